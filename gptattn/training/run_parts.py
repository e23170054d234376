"""What trains a run and writes its record: module, data, callbacks and Lightning's Trainer."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as L
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from rich.console import Console

from gptattn.data.sampler import rows_of
from gptattn.machine.device import matmul_flops_per_second
from gptattn.machine.signals import StopRequest
from gptattn.machine.world import World
from gptattn.runs.resume import Start, facts_of
from gptattn.settings.build import build_matrix_rule
from gptattn.training.attention_log import AttentionLog
from gptattn.training.callbacks import (
    BudgetEnd,
    MetricRows,
    Samples,
    SharedValidations,
    StepClock,
)
from gptattn.training.checkpoint_callback import AtomicCheckpointIO, Checkpoints
from gptattn.training.console_progress import ConsoleProgress, SlowSteps
from gptattn.training.datamodule import RunDataModule
from gptattn.training.module import LanguageModel
from gptattn.training.precheck import DTYPES
from gptattn.training.recorder import NoRecord, RunRecorder
from gptattn.training.summary import Assembly, hyperparameters
from gptattn.training.timers import EventTimer, HostTimer
from gptattn.training.trackers.feed import Feed
from gptattn.training.trackers.tracker import TrackedRun, trackers_of
from gptattn.training.watchdog import Watchdog


@dataclass(frozen=True)
class Parts:
    """What trains a run and writes its record."""

    recorder: RunRecorder
    rows: MetricRows
    checkpoints: Checkpoints
    module: LanguageModel
    datamodule: RunDataModule
    trainer: L.Trainer
    callbacks: list[L.Callback]  # of the trainer


def new_parts(
    built: Assembly,
    console: Console,
    start: Start,
    rows_kept: int,
    watchdog: Watchdog,
    stop: StopRequest,
    *,
    compiled: bool = False,
) -> Parts:
    """Return the parts of a run; `rows_kept` is the number of rows already in metrics.jsonl."""
    cfg, budget = built.cfg, built.budget
    resumed = start.source is not None
    world = built.world
    if world.first:
        recorder = RunRecorder(
            built.folder,
            rows_kept,
            start.step + 1 if resumed else None,
            of_task=built.data.val_bytes is None,
            feeds=_feeds(built, rows_kept),
        )
    else:
        recorder = NoRecord(built.folder)
    on_gpu = built.device.type == "cuda"
    timer = EventTimer() if on_gpu else HostTimer()
    # Steps are counted alike everywhere, but only one clock can say when seconds are over.
    clock = StepClock(compiled, timer, world.of_first if budget.steps is None else float)
    rows = MetricRows(
        recorder,
        clock,
        log_every=cfg.log_every,
        tokens_per_step=cfg.batch_size * cfg.model.context_length,
        flops_per_token=built.cost.flops_per_token,
        budget=budget,
        budget_settings=asdict(cfg.budget),
        device_flops_per_second=_rate(built),
        own_memory=built.shares != "model",
    )
    samples = Samples(recorder, built.data, cfg.sample, cfg.seed)
    module = LanguageModel(
        built.model,
        cfg.optim,
        lambda step: budget.schedule(step, clock.seconds),
        accumulate=cfg.accumulate,
        loss_chunk_tokens=cfg.loss_chunk_tokens,
        val_bytes=built.data.val_bytes,
        scaled_loss=cfg.trainer.precision == "16-mixed",
        matrices=build_matrix_rule(cfg),
        on_device=on_gpu,
        world=world,
        seed=cfg.seed,
    )
    share = (cfg.batch_size, cfg.accumulate, world.place.rank, world.size)
    datamodule = RunDataModule(
        built.data,
        seed=cfg.seed,
        batch_size=cfg.batch_size,
        val_batch_size=cfg.batch_size // cfg.accumulate,
        context_length=cfg.model.context_length,
        on_made=clock.add,
        pinned=on_gpu,
        rows=rows_of(*share) if world.size > 1 else None,
    )
    progress = ConsoleProgress(console, budget, clock, rows, samples)
    attention = AttentionLog(recorder, built.data, cfg.model.context_length, cfg.log_heads, console)
    facts = facts_of(built.data, built.device, built.threads, world.size)
    checkpoints = Checkpoints(built.folder if cfg.checkpoint else None, stop, facts)
    shown = [samples, progress, attention] if world.first else []
    callbacks = [clock, rows, *shown, BudgetEnd(budget, clock), checkpoints, watchdog]
    if world.size > 1 and budget.seconds is not None:
        callbacks.insert(1, SharedValidations(budget.seconds / cfg.validation.count, clock))
    if built.device.type == "cpu" and world.first:
        callbacks.append(SlowSteps(console, clock, built.threads))
    trainer = _trainer(built, recorder, callbacks, AtomicCheckpointIO(start.content))
    recorder.log_hyperparams(hyperparameters(built))
    if not resumed:
        recorder.log_metrics(built.costs(), 0)
        if built.match is not None:
            recorder.log_text("match", str(built.match), 0)
    return Parts(recorder, rows, checkpoints, module, datamodule, trainer, callbacks)


def _feeds(built: Assembly, rows: int) -> list[Feed]:
    """Start to open the run's trackers, all at once, and wait until they are open."""
    cfg, folder = built.cfg, built.folder
    run = TrackedRun(
        folder.path.name,
        cfg.experiment_name,
        cfg.variant,
        cfg.seed,
        hyperparameters(built),
        # wandb's own process may have been started elsewhere.
        folder.trackers.absolute(),
    )
    feeds = [
        Feed(name, tracker, cfg.logger[name], run, folder, rows)
        for name, tracker in trackers_of(cfg).items()
    ]
    for feed in feeds:
        feed.wait_for_opening()
    return feeds


def _rate(built: Assembly) -> float | None:
    """Return the rate of products of all processes together, measured at the same time.

    None where the speed is not the run's own, and in a process that does not record it.
    """
    if built.shares is not None:
        return None
    own = matmul_flops_per_second(built.device, DTYPES[built.cfg.trainer.precision])
    (rate,) = built.world.total(own)
    return rate if built.world.first else None


def _trainer(
    built: Assembly,
    recorder: RunRecorder,
    callbacks: list[L.Callback],
    checkpoint_io: AtomicCheckpointIO,
) -> L.Trainer:
    cfg, budget = built.cfg, built.budget
    if budget.steps is not None:
        every: Any = max(1, math.ceil(budget.steps / cfg.validation.count))
    elif built.world.size > 1:
        every = 1  # as `SharedValidations` says
    else:
        assert budget.seconds is not None
        every = {"seconds": budget.seconds / cfg.validation.count}
    place = built.world.place
    trainer = L.Trainer(
        accelerator=built.device.type,
        devices=place.local_size,
        num_nodes=place.nodes,
        strategy=_strategy(built.world),
        precision=cfg.trainer.precision,  # type: ignore[arg-type]
        max_steps=-1 if budget.steps is None else budget.steps,
        max_epochs=-1,
        val_check_interval=every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=recorder,
        log_every_n_steps=cfg.log_every,
        callbacks=callbacks,
        plugins=[checkpoint_io, *([TorchElasticEnvironment()] if place.size > 1 else [])],
        default_root_dir=built.folder.path,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    # Signals are for `StopRequest`. Lightning's handler would end a run with exit code 0 and leave
    # nothing saved. Its flag is exchanged in each step, for which a GPU's host waits.
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    return trainer


def _strategy(world: World) -> Strategy | str:
    if world.size == 1:
        return "auto"
    # All buffers are constants, and every parameter has a gradient in every step. The gradients lie
    # in the memory that is exchanged, instead of beside it.
    return DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
