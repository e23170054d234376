"""What trains a run and writes its record: module, data, callbacks and Lightning's Trainer."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as L
from rich.console import Console

from gptattn.machine.device import matmul_flops_per_second
from gptattn.machine.signals import StopRequest
from gptattn.runs.resume import Start, facts_of
from gptattn.settings.build import build_matrix_rule
from gptattn.training.attention_log import AttentionLog
from gptattn.training.callbacks import BudgetEnd, MetricRows, Samples, StepClock
from gptattn.training.checkpoint_callback import AtomicCheckpointIO, Checkpoints
from gptattn.training.console_progress import ConsoleProgress, SlowSteps
from gptattn.training.datamodule import RunDataModule
from gptattn.training.module import LanguageModel
from gptattn.training.precheck import DTYPES
from gptattn.training.recorder import RunRecorder
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
    recorder = RunRecorder(
        built.folder,
        rows_kept,
        start.step + 1 if resumed else None,
        of_task=built.data.val_bytes is None,
        feeds=_feeds(built, rows_kept),
    )
    on_gpu = built.device.type == "cuda"
    clock = StepClock(compiled, EventTimer() if on_gpu else HostTimer())
    rows = MetricRows(
        recorder,
        clock,
        log_every=cfg.log_every,
        tokens_per_step=cfg.batch_size * cfg.model.context_length,
        flops_per_token=built.cost.flops_per_token,
        budget=budget,
        budget_settings=asdict(cfg.budget),
        device_flops_per_second=matmul_flops_per_second(built.device, DTYPES[cfg.trainer.precision])
        if built.shares is None
        else None,
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
    )
    datamodule = RunDataModule(
        built.data,
        seed=cfg.seed,
        batch_size=cfg.batch_size,
        val_batch_size=cfg.batch_size // cfg.accumulate,
        context_length=cfg.model.context_length,
        on_made=clock.add,
        pinned=on_gpu,
    )
    progress = ConsoleProgress(console, budget, clock, rows, samples)
    attention = AttentionLog(recorder, built.data, cfg.model.context_length, cfg.log_heads, console)
    facts = facts_of(built.data, built.device, built.threads)
    checkpoints = Checkpoints(built.folder if cfg.checkpoint else None, stop, facts)
    callbacks = [clock, rows, samples, progress, attention, BudgetEnd(budget, clock), checkpoints]
    callbacks.append(watchdog)
    if built.device.type == "cpu":
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


def _trainer(
    built: Assembly,
    recorder: RunRecorder,
    callbacks: list[L.Callback],
    checkpoint_io: AtomicCheckpointIO,
) -> L.Trainer:
    cfg, budget = built.cfg, built.budget
    if budget.steps is not None:
        every: Any = max(1, math.ceil(budget.steps / cfg.validation.count))
    else:
        assert budget.seconds is not None
        every = {"seconds": budget.seconds / cfg.validation.count}
    return L.Trainer(
        accelerator=built.device.type,
        devices=1,
        precision=cfg.trainer.precision,  # type: ignore[arg-type]
        max_steps=-1 if budget.steps is None else budget.steps,
        max_epochs=-1,
        val_check_interval=every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=recorder,
        log_every_n_steps=cfg.log_every,
        callbacks=callbacks,
        plugins=[checkpoint_io],
        default_root_dir=built.folder.path,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
