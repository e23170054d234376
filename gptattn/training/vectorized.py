"""Trains several seeds of one variant as one model, and writes the folder of each as if alone.

Each seed starts from its own weights and sees its own batches, so it ends with the losses that it
would have alone, but for rounding. What is recorded, by whom and when is that of a single run:
`run_parts.new_parts`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console

from gptattn.data.sampler import Batch
from gptattn.errors import NumericError
from gptattn.machine.arithmetic import computing
from gptattn.machine.signals import Stopped, StopRequest
from gptattn.machine.waiting import gentle_beside_others
from gptattn.model.stacked import StackedGPT
from gptattn.runs.folder import RunFolder
from gptattn.runs.resume import Start
from gptattn.settings.budget import resolve_budget
from gptattn.settings.build import build_model
from gptattn.training.precheck import Ready
from gptattn.training.run_parts import Parts, new_parts
from gptattn.training.step_guard import not_finite
from gptattn.training.summary import Assembly
from gptattn.training.train import claim, quiet_lightning, write_result
from gptattn.training.watchdog import Watchdog
from gptattn.weights.convert import begin_from

CLIP_EPS = 1e-6  # as in torch's clip_grads_with_norm_


@dataclass
class _Seed:
    """One run of the group. `error`: why it has ended early, if it has."""

    built: Assembly
    parts: Parts
    optimizer: torch.optim.Optimizer  # holds views of the group's averages, for checkpoints
    error: NumericError | None = None
    done: bool = False

    def call(self, hook: str, *args: Any) -> None:
        """Call this hook of all callbacks, as the Trainer would."""
        for callback in self.parts.callbacks:
            getattr(callback, hook)(self.parts.trainer, self.parts.module, *args)


def train_seeds(
    ready: Ready, folders: Mapping[int, Path], console: Console
) -> dict[int, NumericError]:
    """Train a run of each seed in its folder; return the errors of those that have diverged.

    `ready`: the run of any of these seeds. Raises a UserError for what ends all of them, and
    Stopped, once all are saved, if a signal asked for the end.
    """
    trainer, stop = ready.cfg.trainer, StopRequest()
    watchdog = Watchdog(ready.cfg.hang_seconds)
    quiet_lightning()
    how = computing(trainer.threads, trainer.matmul_precision, trainer.deterministic, ready.device)
    with watchdog.watching(), how as threads:
        seeds: list[_Seed] = []
        try:
            for seed, folder in folders.items():
                shown = Console(quiet=True) if seeds else console
                built = _built(ready, seed, RunFolder(folder), threads)
                seeds.append(_new_seed(built, shown, watchdog, stop))
            if ready.origin is not None:
                ready.origin.model.to("meta")  # frees its memory for the training
            with gentle_beside_others(threads), stop.listening():
                _Group(seeds).train()
            for seed in _live(seeds):
                write_result(seed.built, seed.parts)
                seed.done = True
        finally:
            # The other way round: each has replaced the error hook of the one before it.
            for seed in reversed(seeds):
                seed.parts.recorder.close(seed.done)
    return {seed.built.cfg.seed: seed.error for seed in seeds if seed.error is not None}


def _built(ready: Ready, seed: int, folder: RunFolder, threads: int) -> Assembly:
    """Claim the folder, and draw the weights as this seed's run would alone."""
    cfg, data = replace(ready.cfg, seed=seed), ready.data
    claim(folder, cfg)
    folder.write_tokenizer(data.tokenizer.files())
    assert ready.making is not None
    folder.write_making(ready.making)
    L.seed_everything(seed, workers=True, verbose=False)
    model = build_model(cfg, data.tokenizer.vocab_size)
    if ready.origin is not None:
        begin_from(ready.origin, model, cfg)
    budget = resolve_budget(
        cfg.budget, cfg.batch_size * cfg.model.context_length, ready.cost.flops_per_token
    )
    return Assembly(
        cfg, folder, data, model, ready.cost, budget, ready.device, threads, ready.match, "model"
    )


def _new_seed(built: Assembly, console: Console, watchdog: Watchdog, stop: StopRequest) -> _Seed:
    parts = new_parts(built, console, Start(), 0, watchdog, stop)
    module, trainer = parts.module, parts.trainer
    module.to(built.device)
    # What `fit` does before its first step, as far as saving a checkpoint and callbacks need it.
    trainer.state.fn = TrainerFn.FITTING
    trainer.strategy.connect(module)
    module.trainer = trainer
    optimizer = module.configure_optimizers()
    trainer.strategy.optimizers = [optimizer]
    return _Seed(built, parts, optimizer)


def _live(seeds: list[_Seed]) -> list[_Seed]:
    return [seed for seed in seeds if seed.error is None]


class _Group:
    """The loop over the steps, of all seeds at once."""

    def __init__(self, seeds: list[_Seed]) -> None:
        self.seeds, self.first = seeds, seeds[0].built
        self.model = StackedGPT([seed.built.model for seed in seeds])
        self.optimizer = _stacked_optimizer(seeds[0], self.model)
        self.device = self.first.device

    def train(self) -> None:
        """Train and validate until the budget is used up, or no seed is left."""
        every, steps = self.seeds[0].parts.trainer.val_check_interval, self.first.budget.steps
        assert isinstance(every, int)
        assert steps is not None
        streams = [iter(seed.parts.datamodule.train_dataloader()) for seed in self.seeds]
        self._call("setup", "fit")
        self._call("on_train_start")
        for step in range(1, steps + 1):
            batches = [next(stream) for stream in streams]
            self._call("on_train_batch_start", None, step)
            self._step(batches)
            if not _live(self.seeds):
                return
            self._call("on_train_batch_end", None, None, step)
            if step % every == 0 or step == steps:
                self._validate()
        self._call("on_train_end")

    def _call(self, hook: str, *args: Any) -> None:
        self._each(lambda seed: seed.call(hook, *args))

    def _each(self, act: Callable[[_Seed], object]) -> None:
        """Act on each seed that is left; what is not finite ends that seed alone.

        Raises Stopped, once all are saved, if a signal asked for the end.
        """
        stopped: Stopped | None = None
        unsaved: list[_Seed] = []  # that acted before the signal came
        for seed in _live(self.seeds):
            try:
                act(seed)
                unsaved.append(seed)
            except NumericError as error:
                seed.error = error
            except Stopped as request:  # this seed is saved
                stopped = request
        if stopped is None:
            return
        for seed in unsaved:
            try:
                seed.parts.checkpoints.save_at_stop(seed.parts.trainer)
            except NumericError as error:
                seed.error = error
        raise stopped

    def _step(self, batches: list[Batch]) -> None:
        """Take an optimizer step with each seed's batch, as `LanguageModel.training_step` does."""
        cfg = self.first.cfg
        whole = [torch.stack(each).to(self.device) for each in zip(*batches, strict=True)]
        rows = cfg.batch_size // cfg.accumulate
        losses = torch.zeros(len(self.seeds), device=self.device)
        for part in zip(*(tensor.split(rows, 1) for tensor in whole), strict=True):
            chunk, ignoring = cfg.loss_chunk_tokens, self.first.data.val_bytes is None
            loss_N = self.model.losses(*part, chunk_tokens=chunk, ignoring=ignoring)
            loss_N = loss_N / cfg.accumulate
            loss_N.sum().backward()  # a loss depends on the parameters of its own seed alone
            losses += loss_N.detach()
        norms = self.model.gradient_norms()
        # One transfer: on a GPU the host waits for it.
        found = dict(zip(map(id, self.seeds), torch.stack([losses, norms], 1).cpu(), strict=True))
        self._each(lambda seed: _note(seed, *found[id(seed)]))
        live, clip = _live(self.seeds), cfg.optim.grad_clip
        if not live:
            return
        if any(norm > clip for _, norm in found.values()):
            factors = torch.where(norms > clip, clip / (norms + CLIP_EPS), 1.0)
            self.model.scale_gradients(factors)
        for group in self.optimizer.param_groups:
            group["lr"] = live[0].parts.module.lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._each(_count_step)
        self._share_state()

    def _share_state(self) -> None:
        """Let each seed's own optimizer, which checkpoints save, hold its part of the averages."""
        if self.seeds[0].optimizer.state:
            return
        for n, seed in enumerate(self.seeds):
            for name, p in seed.built.model.named_parameters():
                state = self.optimizer.state.get(self.model.parameters[name], {})
                seed.optimizer.state[p] = {k: v[n] if v.ndim else v for k, v in state.items()}

    @torch.no_grad()
    def _validate(self) -> None:
        """Validate every seed on the held-out text, as Lightning would each."""
        self._call("on_validation_start")
        for seed in self.seeds:
            seed.built.model.eval()
            seed.parts.module.on_validation_epoch_start()
        for i, batch in enumerate(self.seeds[0].parts.datamodule.val_dataloader()):
            N = len(self.seeds)
            ids, targets, *documents = (x.to(self.device).expand(N, -1, -1) for x in batch)
            self._call("on_validation_batch_start", None, i)
            for seed, hidden in zip(self.seeds, self.model.hidden(ids, *documents), strict=True):
                seed.parts.module.add_validation(hidden, targets[0])
            self._call("on_validation_batch_end", None, None, i)
        self._each(lambda seed: seed.parts.module.on_validation_epoch_end())
        self._call("on_validation_end")
        for seed in self.seeds:
            seed.built.model.train()


def _stacked_optimizer(seed: _Seed, model: StackedGPT) -> torch.optim.Optimizer:
    """Return a seed's optimizer with the stacked parameters: AdamW treats each number by itself."""
    names = {p: name for name, p in seed.built.model.named_parameters()}
    groups = [
        {**group, "params": [model.parameters[names[p]] for p in group["params"]]}
        for group in seed.optimizer.param_groups
    ]
    return torch.optim.AdamW(groups)


def _note(seed: _Seed, loss: torch.Tensor, norm: torch.Tensor) -> None:
    """Note the step's loss and gradient norm. Raises NumericError if one is not finite."""
    module = seed.parts.module
    for name, value in (("train/loss", loss), ("train/grad_norm", norm)):
        if not torch.isfinite(value):
            raise not_finite(name, value.item(), module.global_step + 1)
    module.train_losses.append(loss)
    module.grad_norm = norm
    module.lr = module.learning_rate()


def _count_step(seed: _Seed) -> None:
    """Count an optimizer step where the Trainer does, for `global_step`."""
    steps = seed.parts.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    steps.increment_ready()
    steps.increment_completed()
