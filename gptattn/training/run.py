"""One run, from checked settings to summary.json. It reads from top to bottom.

Lightning is imported where it is used: it takes seconds, which a mistake should not wait for.
"""

import contextlib
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from gptattn import command
from gptattn.build.match import describe_match
from gptattn.build.model import build_model, describe_missing_parts
from gptattn.errors import ConfigError, DataError, DiskError, RunFolderError, UserError
from gptattn.machine.console import quiet_lightning
from gptattn.machine.cpus import usable_cpus
from gptattn.machine.device import (
    matmul_flops_per_second,
    missing_compiler,
    reset_peak_memory,
    set_threads,
)
from gptattn.machine.disk import check_room
from gptattn.machine.ending import FIRST, Stopped, as_user_error
from gptattn.model.gpt import GPT
from gptattn.runs.folder import RunFolder, name_run
from gptattn.runs.load import use_kept_tokenizer
from gptattn.runs.metrics import ACCURACY
from gptattn.runs.resume import Start, check_same, collect_facts, find_start
from gptattn.settings.budget import resolve_budget
from gptattn.settings.config import TrainConfig
from gptattn.settings.construct import construct
from gptattn.settings.identity import (
    budget_words,
    flat,
    list_changed,
    resume_provenance,
)
from gptattn.training.contract import check_layers
from gptattn.training.preflight import DTYPES, Ready, preflight
from gptattn.training.summary import list_hyperparameters, summarise
from gptattn.weights.init_from import begin_from

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger


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
    after the `overrides`. `console` None shows no progress. Of several processes, the first writes
    the record and the output. Raises a UserError for a user's mistake, and Stopped if a signal
    asked the run to end.
    """
    console = console if console is not None and FIRST else Console(quiet=True)
    start = Start()
    with contextlib.ExitStack() as until_the_end:
        if resume:
            assert folder is not None
            held = RunFolder(Path(folder))
            if FIRST:
                until_the_end.enter_context(held.lock("resume"))
            start = find_start(held, cfg)
            if start.source is None and cfg.budget.steps != 0:
                console.print("no checkpoint was saved: starting from step 0")
            cfg = use_kept_tokenizer(cfg, held)
        for note in check_layers(cfg) if cfg.checks else ():  # before the text is read
            console.print(f"note: {note}", markup=False)
        try:
            ready = preflight(cfg, resumed=start.source is not None)
        except DataError as error:
            hint = "; if the text has moved, add data.path=..." if resume else ""
            raise DataError(error.field, error.message + hint) from None
        cfg = ready.cfg
        if "lightning" not in sys.modules:
            console.print("loading lightning")
        import lightning.pytorch as L

        quiet_lightning()
        L.seed_everything(cfg.seed, workers=True, verbose=False)
        model = build_model(cfg, ready.data.tokenizer.vocab_size)
        place = folder or Path("outputs", cfg.experiment_name, name_run(cfg, overrides))
        held = RunFolder(Path(place))
        if not FIRST:
            return _train(ready, model, held, start, console)
        if not resume:
            check_room(held.path, ready.bytes_on_disk)
        held.path.mkdir(parents=True, exist_ok=True)  # from now on its absence is an error
        if not resume:
            until_the_end.enter_context(held.lock())
            if held.begun:
                raise RunFolderError(
                    "run_dir",
                    f"{held.path} already holds a run; resume it with resume=..., or give another "
                    "folder",
                )
        for part in held.path.rglob("*.part"):  # of a process that was killed
            part.unlink()
        held.failure_file.unlink(missing_ok=True)
        if not resume:
            held.write_settings(cfg)
            held.write_tokenizer(ready.data.tokenizer.files())
        shown = os.path.relpath(held.path)
        try:
            summary = _train(ready, model, held, start, console)
        except Stopped as stopped:
            kept = f"step {stopped.step}" if stopped.saved else "what was logged"
            again = f"; to resume: {command('train')} resume={shlex.quote(shown)}"
            print(f"{shown} holds {kept}{again * stopped.saved}", file=sys.stderr)
            raise
        except Exception as error:
            if not held.path.is_dir():
                raise DiskError(
                    shown, "was removed or moved during the run; put it back and use resume=..."
                ) from error
            refused = resume and isinstance(error, ConfigError)  # the run is as it was
            if not refused:
                known = as_user_error(error)
                why = f"{type(error).__name__}: {error}" if known is None else str(known)
                held.write_failure(1 if known is None else known.exit_code, why)
            raise
    console.print(f"run: {shown}", markup=False)
    parent = shlex.quote(os.path.relpath(held.path.parent))
    console.print(f"look: tensorboard --logdir {parent}", markup=False)
    return summary


def _train(
    ready: Ready, model: GPT, held: RunFolder, start: Start, console: Console
) -> dict[str, Any]:
    """Train a run that has passed its checks in a folder that is its own; return the summary."""
    import lightning.pytorch as L
    from lightning.pytorch.strategies import DDPStrategy

    from gptattn.training.attention_log import AttentionLog
    from gptattn.training.callbacks import BudgetEnd, Hang, MetricRows, Samples, StepClock
    from gptattn.training.checkpoints import Checkpoints, SafeCheckpointIO
    from gptattn.training.console_output import ConsoleProgress, make_result_table, make_table
    from gptattn.training.datamodule import RunDataModule
    from gptattn.training.module import LanguageModel
    from gptattn.training.record import Board, MetricsFile, log_row, quiet_writer_threads

    cfg, data, device = ready.cfg, ready.data, ready.device
    trainer_cfg, processes = cfg.trainer, cfg.trainer.processes
    threads = trainer_cfg.threads
    if start.facts.get("processes") == processes:
        threads = start.facts["threads"]  # their number changes the last bits
    if threads is None and int(trainer_cfg.devices) > 1:
        threads = max(1, usable_cpus() // int(trainer_cfg.devices))
    threads = set_threads(threads)
    torch.set_float32_matmul_precision(trainer_cfg.matmul_precision)
    # A CPU is deterministic anyway. Filling memory before use is for debugging, and slow.
    deterministic = trainer_cfg.deterministic and device.type != "cpu"
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    with quiet_writer_threads(), contextlib.ExitStack() as at_end:
        facts = collect_facts(data, device, threads, processes)
        tokens_per_step = cfg.batch_size * cfg.model.context_length
        per_token = ready.cost.flops_per_token
        budget = resolve_budget(cfg.budget, tokens_per_step, per_token)
        if start.source is not None:
            check_same(start, facts)
            if budget.steps is not None and budget.steps < start.step:
                raise ConfigError(
                    "budget",
                    f"is {budget.steps} steps, but {start.step} are already taken; give more",
                )
            summary = held.finished()
            if summary is not None:
                reached = cfg.budget.reached(summary["metrics"].get(ACCURACY))
                if reached or budget.progress(start.step, start.seconds) >= 1.0:
                    larger = "higher budget.accuracy, or null," if reached else "larger budget"
                    console.print(
                        f"already finished after {start.step} steps; give a {larger} to continue"
                    )
                    return summary

        if start.source is not None:
            # Lightning converts the model only after it has loaded the weights.
            model.to(ready.weight_dtype)
        elif ready.origin is not None:
            begin_from(ready.origin, model, cfg)
            ready.origin.model.to("meta")  # frees its memory for the training
        if FIRST:
            _record_provenance(ready, held, start)
            held.write_settings(cfg)
            held.summary_file.unlink(missing_ok=True)
            if held.rows_file.exists():  # rows after the checkpoint are written once more
                size = held.rows_file.stat().st_size
                os.truncate(held.rows_file, min(start.bytes_of_rows, size))
        if start.source is not None:
            console.print(f"resumes after step {start.step}")
        if cfg.match_made is not None:
            console.print(describe_match(cfg.match_made), markup=False)
        for line in describe_missing_parts(cfg, model):
            console.print(line, markup=False)
        console.print(make_table(f"{cfg.variant}: costs", ready.costs()))
        with_maps, layers = len(model.layers_with_maps()), len(model.layers())
        if with_maps < layers:
            console.print(
                f"attention: {with_maps} of {layers} layers have weights to record; the others are "
                "left out"
            )
        lacking = missing_compiler(device) if cfg.compile else None
        compiled = cfg.compile and lacking is None
        if lacking is not None:
            console.print(
                f"[yellow]warning:[/yellow] compile: no {lacking} compiler found; running eager"
            )
        # In place: names in checkpoints stay, and all blocks share the compiled code.
        for block in model.layers() if compiled else ():
            block.compile()

        # The record comes first, so that its rows are on the disk before others'.
        record = board = None
        loggers: list[Logger] = []
        if FIRST:
            record = MetricsFile(held)
            at_end.callback(record.close)
            rewritten = None if start.source is None else start.step + 1
            board = Board(held, data.val_bytes is None, purge_step=rewritten)
            shown = list_hyperparameters(ready, budget)
            loggers = [record, board, *_open_trackers(ready, held, start.step, shown)]
            board.declare(shown)
        clock = StepClock(device, compiled)
        end = BudgetEnd(budget, clock, cfg.validation.count, cfg.budget)
        rate = None
        if not cfg.sweep.beside_others:
            rate = processes * matmul_flops_per_second(device, DTYPES[trainer_cfg.precision])
        metrics = MetricRows(record, clock, cfg, budget, per_token, rate)
        checkpoints = Checkpoints(held, cfg.checkpoint, facts)
        callbacks: list[L.Callback] = [clock, *ready.callbacks, metrics]
        if board is not None and record is not None:
            samples = Samples(record, board, data, cfg.sample, cfg.seed)
            callbacks += [
                samples,
                ConsoleProgress(console, budget, clock, metrics, samples),
                AttentionLog(board, data, cfg.model.context_length, cfg.log_heads),
            ]
        callbacks += [end, checkpoints]
        if cfg.hang_seconds is not None:
            callbacks.append(Hang(cfg.hang_seconds))
        every = 1  # for a budget in seconds, as `BudgetEnd` says
        if budget.steps is not None:
            every = cfg.accumulate * max(1, math.ceil(budget.steps / cfg.validation.count))
        ddp = DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
        trainer = L.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=trainer_cfg.devices,
            num_nodes=int(trainer_cfg.num_nodes),
            strategy="auto" if processes == 1 else ddp,
            precision=trainer_cfg.precision,  # type: ignore[arg-type]
            deterministic=deterministic,
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
            default_root_dir=held.path,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        module = LanguageModel(
            model, cfg, lambda step: budget.schedule(step, end.seconds), data.val_bytes
        )
        batches = RunDataModule(data, cfg, clock.add, pinned=device.type == "cuda")
        if start.source is None and record is not None:
            log_row(loggers, ready.costs(), 0)
            if cfg.match_made is not None:
                record.log_metrics({"match": describe_match(cfg.match_made)}, 0)

        reset_peak_memory(device)
        try:
            if budget.steps == 0:  # the weights of init_from are only validated
                trainer.validate(module, datamodule=batches, verbose=False)
                if cfg.checkpoint:
                    trainer.save_checkpoint(held.checkpoint(0))
            else:
                trainer.fit(module, datamodule=batches, ckpt_path=start.source)
            end_of_run = (trainer.global_step, metrics.last, metrics.completed)
            summary = summarise(ready, held.path.name, budget, threads, *end_of_run)
            if FIRST:
                held.write_settings(cfg)  # again, in case it was removed
                held.write_summary(summary)
        except SystemExit as ended:  # Lightning exits with 1 on a Ctrl-C
            if isinstance(ended.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from ended
            raise
    console.print(make_result_table(f"{cfg.variant}: result", summary["metrics"]))
    return summary


def _record_provenance(ready: Ready, held: RunFolder, start: Start) -> None:
    """Write what made the run; warn if it resumes with other code or leaves its schedule."""
    provenance = ready.provenance
    if start.source is not None:
        mixed = "; the report will not average it with other runs"
        was, now = (
            budget_words(flat({"budget": node["budget"]}))
            for node in (held.read_settings(), asdict(ready.cfg))
        )
        schedule = ""
        if start.step and was != now and all(end["step"] != start.step for end in start.completed):
            schedule = f"{was}, until step {start.step}"
            print(
                f"warning: budget: the run leaves its schedule ({schedule}) unfinished for another"
                f"{mixed}",
                file=sys.stderr,
            )
        before = held.read_provenance()
        if before is None or before.code != provenance.code:
            names = "unknown"
            if before is not None:
                names = ", ".join(list_changed(before.code, provenance.code))
            print(
                f"warning: resume: the code has changed since the run began ({names}){mixed}",
                file=sys.stderr,
            )
        provenance = resume_provenance(before, provenance, start.step, schedule)
    held.write_provenance(provenance)


def _open_trackers(
    ready: Ready, folder: RunFolder, step: int, hyperparameters: dict[str, Any]
) -> "list[Logger]":
    """Return the loggers that the settings name besides TensorBoard, which is always on.

    Raises ConfigError for one that cannot be opened.
    """
    from lightning.pytorch.loggers import Logger
    from lightning_utilities.core.apply_func import apply_to_collection

    cfg, loggers = ready.cfg, []
    names = {
        "folder": str(folder.path.absolute()),
        "run": folder.path.name,
        "experiment": cfg.experiment_name,
        "variant": cfg.variant,
        "seed": cfg.seed,
        "step": step,
    }
    for name, spec in cfg.logger.items():
        if not spec:
            continue  # TensorBoard
        try:
            own = apply_to_collection(dict(spec), str, lambda text: text.format(**names))
            logger = construct(f"logger.{name}", own, {}, cfg.allow_targets, Logger)
            logger.log_hyperparams(hyperparameters)
        except UserError:
            raise
        except Exception as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            raise ConfigError("logger", f"{name} cannot be opened ({why}); leave it out") from error
        loggers.append(logger)
    return loggers
