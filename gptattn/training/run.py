"""One run, from checked settings to summary.json. It reads from top to bottom.

Lightning is imported where it is used: it takes seconds, and a mistake should not wait for that.
"""

import atexit
import contextlib
import math
import os
import shlex
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from gptattn import command
from gptattn.attention.softmax import SoftmaxAttention
from gptattn.build.match import describe_match
from gptattn.build.model import describe_missing_parts
from gptattn.errors import ConfigError, DataError, DiskError, RunFolderError
from gptattn.machine.console import quiet_lightning
from gptattn.machine.cpus import usable_cpus
from gptattn.machine.device import keep_freed_memory, reset_peak_memory, set_threads
from gptattn.machine.disk import check_room, expand_path, refuse_taken, remove_partials
from gptattn.machine.ending import Stopped, as_user_error
from gptattn.machine.launcher import forget_launchers, is_first
from gptattn.runs.folder import NAMES, RunFolder, name_run
from gptattn.runs.load import use_kept_tokenizer
from gptattn.runs.metrics import lowest_accuracy
from gptattn.runs.overrides import leave_out_defaults
from gptattn.runs.resume import check_same, collect_facts, continue_provenance
from gptattn.settings.config import TrainConfig
from gptattn.training.compiling import COMPILE_SECONDS, compile_blocks, count_kinds
from gptattn.training.contract import check_device, check_layers
from gptattn.training.preflight import PreparedRun, preflight
from gptattn.training.summary import list_hyperparameters, summarise

if TYPE_CHECKING:
    import lightning.pytorch as L
    from lightning.pytorch.loggers import Logger

    from gptattn.training.callbacks import BudgetEnd, StepClock


def train(
    cfg: TrainConfig,
    folder: str | Path | None = None,
    console: Console | None = None,
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
) -> dict[str, Any]:
    """Train a run, or with `resume` continue the one in `folder`, and return its summary.

    `cfg` must have passed `settings.config.check`. `folder` None: a new one in outputs/, named
    after the `overrides`. `console` None shows no progress. With several processes, the first
    writes the record and the output. Raises a UserError for a user's mistake, and Stopped if a
    signal stopped the run.
    """
    if (cfg.trainer.devices, cfg.trainer.num_nodes) == (1, 1):
        forget_launchers()
    console = console if console is not None and is_first() else Console(quiet=True)
    if folder is None:
        name = name_run(cfg, leave_out_defaults(cfg, overrides))
        folder = f"outputs/{cfg.experiment_name}/{name}"
    run_folder = RunFolder(expand_path(folder, "run_dir"))
    with contextlib.ExitStack() as until_the_end:
        if resume:
            if is_first():
                until_the_end.enter_context(run_folder.lock("resume"))
            cfg = use_kept_tokenizer(cfg, run_folder)
        elif is_first() and not run_folder.begun:  # if begun, refused below, under the lock
            refuse_taken(run_folder.path, "run_dir", *NAMES)
        if cfg.checks:  # before the text is read
            for note in check_layers(cfg):
                console.print(f"note: {note}", markup=False)
            if is_first():
                check_device(cfg)
        try:
            prepared = preflight(cfg, run_folder if resume else None)
        except DataError as error:
            hint = "; if the text has moved, add data.path=..." if resume else ""
            raise DataError(error.field, error.message + hint) from None
        if resume and prepared.source is None and cfg.budget.steps != 0:
            console.print("no checkpoint was saved: starting from step 0")
        if "lightning" not in sys.modules:
            console.print("loading lightning")
        if not is_first():
            return _train(prepared, run_folder, console)
        if not resume:
            check_room(run_folder.path, prepared.bytes_on_disk)
            until_the_end.enter_context(run_folder.lock())  # from here on it must not disappear
        _claim(run_folder, prepared, resume)
        with _record_ending(run_folder, resume):
            summary = _train(prepared, run_folder, console)
    console.print(f"run: {os.path.relpath(run_folder.path)}", markup=False)
    parent = shlex.quote(os.path.relpath(run_folder.path.parent))
    console.print(f"curves: tensorboard --logdir {parent}", markup=False)
    return summary


def _claim(run_folder: RunFolder, prepared: PreparedRun, resume: bool) -> None:
    """Claim a new run's folder, or clear the folder of a run that resumes."""
    if not resume and run_folder.begun:
        raise RunFolderError(
            "run_dir",
            f"{run_folder.path} already holds a run; use resume=..., or give another folder",
        )
    remove_partials(run_folder.path, run_folder.checkpoints, run_folder.tokenizer)
    run_folder.failure_file.unlink(missing_ok=True)
    if not resume:
        run_folder.write_settings(prepared.cfg)
        run_folder.write_tokenizer(prepared.data.tokenizer.files())


@contextlib.contextmanager
def _record_ending(run_folder: RunFolder, resume: bool) -> Iterator[None]:
    """Print what a run stopped in this block has saved; record why a failed one failed."""
    shown = os.path.relpath(run_folder.path)
    try:
        yield
    except Stopped as stopped:
        saved = f"the state after step {stopped.step}" if stopped.saved else "only the log"
        again = f"; to resume: {command('train')} {shlex.quote(f'resume={shown}')}"
        print(f"{shown}: saved {saved}{again * stopped.saved}", file=sys.stderr)
        raise
    except KeyboardInterrupt:  # in the middle of a step
        steps = [one.stem.replace("=", " ") for one in run_folder.known_checkpoints()]
        saved = f"last saved at {steps[0]}" if steps else "no checkpoint saved"
        print(f"{shown}: {saved}", file=sys.stderr)
        raise
    except Exception as error:
        if not run_folder.path.is_dir():
            raise DiskError(
                shown, "was removed or moved during the run; put it back and use resume=..."
            ) from error
        refused = resume and isinstance(error, ConfigError)  # the run is as it was
        if not refused:
            mistake = as_user_error(error)
            why = f"{type(error).__name__}: {error}" if mistake is None else str(mistake)
            run_folder.write_failure(1 if mistake is None else mistake.exit_code, why)
        raise


def _train(prepared: PreparedRun, run_folder: RunFolder, console: Console) -> dict[str, Any]:
    """Train a run that has passed its checks and owns its folder; return the summary."""
    from gptattn.training.console_output import make_table

    quiet_lightning()  # after its import, which sets the levels of its loggers
    cfg, state = prepared.cfg, prepared.state
    with contextlib.ExitStack() as at_end:
        threads = set_numerics(prepared)
        facts = collect_facts(prepared.data, prepared.device, threads, cfg.trainer.processes)
        if prepared.source is not None:
            check_same(state.facts, facts)
            if (summary := _find_finished(prepared, run_folder, console)) is not None:
                return summary
        state.facts = facts
        if is_first():
            _begin_record(prepared, run_folder)
        _print_outline(prepared, console)
        compile_blocks(cfg, prepared.model)
        loggers = _open_loggers(prepared, run_folder, at_end) if is_first() else []
        steps = _fit(prepared, run_folder, console, loggers)
        summary = summarise(prepared, run_folder.path.name, threads, steps)
        if is_first():
            run_folder.write_summary(summary)
    console.print(make_table(f"{cfg.variant}: result", summary["metrics"]))
    return summary


def set_numerics(prepared: PreparedRun) -> int:
    """Set what the last bits of a run's numbers depend on; return the CPU threads per process."""
    trainer, facts = prepared.cfg.trainer, prepared.state.facts
    threads = trainer.threads
    if facts.get("processes") == trainer.processes:
        threads = facts["threads"]  # another number would change the last bits
    if threads is None and int(trainer.devices) > 1:
        threads = max(1, usable_cpus() // int(trainer.devices))
    torch.set_float32_matmul_precision(trainer.matmul_precision)
    # With deterministic=true, torch fills a GPU's memory before use: for debugging, and slow.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    keep_freed_memory()
    return set_threads(threads)


def _find_finished(
    prepared: PreparedRun, run_folder: RunFolder, console: Console
) -> dict[str, Any] | None:
    """Return the summary of a run that has nothing left to do.

    Raises ConfigError if the budget has fewer steps than the run has taken.
    """
    cfg, state, budget = prepared.cfg, prepared.state, prepared.budget
    if budget.steps is not None and budget.steps < state.step:
        raise ConfigError(
            "budget", f"is {budget.steps} steps, but the run has taken {state.step}; give more"
        )
    summary = run_folder.finished_summary()
    if summary is None:
        return None
    reached = cfg.budget.reached(lowest_accuracy(summary["metrics"]))
    if not reached and budget.progress(state.step, state.seconds) < 1.0:
        return None
    larger = "higher budget.accuracy, or null," if reached else "larger budget"
    console.print(f"already finished after {state.step} steps; give a {larger} to continue")
    return summary


def _begin_record(prepared: PreparedRun, run_folder: RunFolder) -> None:
    """Write the run's provenance and settings; cut off the rows that it will write again."""
    provenance = prepared.provenance
    if prepared.source is not None:
        provenance = continue_provenance(run_folder, prepared.cfg, provenance, prepared.state)
    run_folder.write_provenance(provenance)
    run_folder.write_settings(prepared.cfg)
    run_folder.summary_file.unlink(missing_ok=True)
    if run_folder.rows_file.exists():
        size = run_folder.rows_file.stat().st_size
        os.truncate(run_folder.rows_file, min(prepared.state.row_bytes, size))


def _print_outline(prepared: PreparedRun, console: Console) -> None:
    """Print where the run begins, what it costs, and what is special about its layers."""
    from gptattn.training.console_output import make_table

    cfg = prepared.cfg
    if prepared.source is not None:
        console.print(f"resumes after step {prepared.state.step}")
    if cfg.match_made is not None:
        console.print(describe_match(cfg.match_made), markup=False)
    for line in (*describe_missing_parts(cfg, prepared.model), *prepared.notes):
        console.print(line, markup=False)
    table = make_table(f"{cfg.variant}: costs", prepared.costs())
    layers = [layer.attention for layer in prepared.model.layers()]
    softmax = [one for one in layers if isinstance(one, SoftmaxAttention)]
    if heads := dict.fromkeys(f"{one.num_kv_heads} of {one.num_heads}" for one in softmax):
        table.add_row("key/value heads", ", ".join(heads))
    console.print(table)
    if cfg.compile:
        seconds = COMPILE_SECONDS * count_kinds(cfg, prepared.model)
        console.print(f"compiling the layers takes about {seconds:.0f} s, mostly before step 1")


def _open_loggers(
    prepared: PreparedRun, run_folder: RunFolder, at_end: contextlib.ExitStack
) -> "list[Logger]":
    """Open the run's record, then TensorBoard, then the trackers of the settings; log the costs.

    The record comes first, so that its rows reach the disk before the others'.
    """
    from gptattn.training.record import MetricsFile, RunTensorBoard, log_row, open_trackers

    cfg, step, hyperparameters = prepared.cfg, prepared.state.step, list_hyperparameters(prepared)
    record = MetricsFile(run_folder)
    at_end.callback(record.close)
    hook = threading.excepthook
    at_end.callback(setattr, threading, "excepthook", hook)
    # TensorBoard's thread prints no disk error: the next write raises it here.
    threading.excepthook = lambda args: isinstance(args.exc_value, OSError) or hook(args)
    board = RunTensorBoard(
        run_folder, prepared.data.val_bytes is None, None if prepared.source is None else step + 1
    )
    loggers = [record, board, *open_trackers(cfg, run_folder, step, hyperparameters)]
    board.declare(hyperparameters)
    if prepared.source is None:
        # In TensorBoard each would be a chart with a single point.
        log_row([one for one in loggers if one is not board], prepared.costs(), 0)
    return loggers


def _fit(
    prepared: PreparedRun,
    run_folder: RunFolder,
    console: Console,
    loggers: "Sequence[Logger]",
) -> int:
    """Train the model, or validate it if the budget is 0 steps; return the steps it has taken."""
    from gptattn.training.callbacks import BudgetEnd, StepClock
    from gptattn.training.module import LanguageModel

    cfg, budget = prepared.cfg, prepared.budget
    clock = StepClock(prepared)
    end = BudgetEnd(prepared, clock)
    trainer = _make_trainer(prepared, run_folder, console, clock, end, loggers)

    def schedule(step: int) -> float:
        return budget.schedule(step, end.seconds)

    module = LanguageModel(
        prepared.model, cfg, prepared.data, schedule, prepared.matrices, clock.add, prepared.longer
    )
    reset_peak_memory(prepared.device)
    if budget.steps == 0:  # the weights of init_from are only validated
        trainer.validate(module, verbose=False)
    else:
        try:
            trainer.fit(module, ckpt_path=prepared.source)
        except Exception as error:
            callback_modules = {type(one).__module__ for one in prepared.callbacks}
            raised_in = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            if as_user_error(error) is None and any(
                frame.f_globals.get("__name__") in callback_modules for frame in raised_in
            ):
                why = str(error).partition("\n")[0]
                raise ConfigError("trainer.callbacks", f"{type(error).__name__}: {why}") from error
            raise
        reached = cfg.budget.reached(lowest_accuracy(prepared.state.last))
        if budget.progress(trainer.global_step, end.seconds) < 1.0 and not reached:
            # Runs are compared at equal budgets.
            raise ConfigError(
                "trainer.callbacks",
                f"one of them stopped the run after {trainer.global_step} steps, before the end of "
                "its budget; leave it out, or give a smaller budget",
            )
    return trainer.global_step


def _make_trainer(
    prepared: PreparedRun,
    run_folder: RunFolder,
    console: Console,
    clock: "StepClock",
    end: "BudgetEnd",
    loggers: "Sequence[Logger]",
) -> "L.Trainer":
    """Make Lightning's trainer, which ends when a callback asks it to.

    Each hook calls the callbacks in the order of the list.
    """
    import lightning.pytorch as L
    from lightning.fabric.utilities.distributed import _destroy_dist_connection
    from lightning.pytorch.strategies import DDPStrategy

    from gptattn.training.attention_log import AttentionLog
    from gptattn.training.callbacks import MetricRows, Samples
    from gptattn.training.checkpoints import Checkpoints, SafeCheckpointIO
    from gptattn.training.console_output import ConsoleProgress
    from gptattn.training.record import MetricsFile, RunTensorBoard

    record = next((one for one in loggers if isinstance(one, MetricsFile)), None)
    checkpoints = Checkpoints(prepared, run_folder, clock, record)
    board = next((one for one in loggers if isinstance(one, RunTensorBoard)), None)
    callbacks: list[L.Callback] = [clock, *prepared.callbacks, MetricRows(prepared, clock)]
    if record is not None and board is not None:
        samples = Samples(prepared, record, board, lambda: checkpoints.signum != 0)
        progress = ConsoleProgress(prepared, console, clock, samples)
        callbacks += [samples] if prepared.cfg.sample.tokens else []
        callbacks += [progress]
        callbacks += [AttentionLog(prepared, board)] if prepared.model.layers_with_maps() else []
    callbacks += [end, checkpoints]

    cfg, budget, on_cpu = prepared.cfg, prepared.budget, prepared.device.type == "cpu"
    every = 1  # for a budget in seconds, as `BudgetEnd` says
    if budget.steps is not None:
        every = cfg.accumulate * max(1, math.ceil(budget.steps / cfg.validation.count))
    exchange = None if on_cpu else "cpu:gloo,cuda:nccl"  # gloo: what hosts agree on without GPUs
    ddp = DDPStrategy(
        broadcast_buffers=False, gradient_as_bucket_view=True, process_group_backend=exchange
    )
    if not on_cpu and cfg.trainer.processes > 1:
        atexit.register(_destroy_dist_connection)  # as Lightning does for `nccl`
    return L.Trainer(
        accelerator="cpu" if on_cpu else "gpu",
        devices=cfg.trainer.devices,
        num_nodes=int(cfg.trainer.num_nodes),
        strategy="auto" if cfg.trainer.processes == 1 else ddp,
        precision=cfg.trainer.precision,  # type: ignore[arg-type]
        deterministic=cfg.trainer.deterministic and not on_cpu,  # a CPU is anyway
        max_epochs=-1,  # `BudgetEnd` stops it
        accumulate_grad_batches=cfg.accumulate,
        gradient_clip_val=cfg.optim.grad_clip,
        val_check_interval=every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=loggers or False,
        log_every_n_steps=cfg.log_every,
        callbacks=callbacks,
        plugins=[SafeCheckpointIO()],
        default_root_dir=run_folder.path.absolute(),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
