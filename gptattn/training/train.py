"""One run: build, fit, validate, summarise. Takes its settings as a TrainConfig, without Hydra."""

import logging
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from rich.console import Console

from gptattn.errors import ConfigError, RunFolderError
from gptattn.machine.arithmetic import computing
from gptattn.machine.cpus import usable_cpus
from gptattn.machine.device import (
    missing_compiler,
    reset_peak_memory,
)
from gptattn.machine.signals import StopRequest
from gptattn.machine.waiting import gentle_beside_others
from gptattn.machine.world import ALONE, World
from gptattn.model.gpt import GPT
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import load_weights
from gptattn.runs.resume import Start, check_budget, check_same, facts_of
from gptattn.runs.rows import keep_rows
from gptattn.runs.tracker_states import note_rows_that_go
from gptattn.settings.budget import resolve_budget
from gptattn.settings.build import build_model
from gptattn.settings.config import TrainConfig
from gptattn.settings.identity import (
    Making,
    budget_words,
    changed,
    flat,
    went_on,
)
from gptattn.training.datamodule import RunDataModule
from gptattn.training.module import LanguageModel
from gptattn.training.precheck import Ready, check_run, weight_dtype
from gptattn.training.precision import hint
from gptattn.training.result_tables import metric_table, result_table
from gptattn.training.run_parts import Parts, new_parts
from gptattn.training.summary import Assembly, Shares, summarise
from gptattn.training.watchdog import Watchdog
from gptattn.weights.convert import begin_from


def train(cfg: TrainConfig, folder: str | Path, console: Console | None = None) -> dict[str, Any]:
    """Train as `cfg` says, write the record to `folder`, and return the summary.

    `cfg` must have passed `settings.config.check`. `console`: where to show progress; None shows
    none. Raises a UserError for a user's mistake, and Stopped if a signal asked the run to end.
    """
    return train_ready(check_run(cfg), Path(folder), console or Console(quiet=True))


def train_ready(
    ready: Ready,
    folder: Path,
    console: Console,
    start: Start | None = None,
    *,
    beside_others: bool = False,
    world: World = ALONE,
) -> dict[str, Any]:
    """Train a run that has passed `check_run`; otherwise as `train`.

    `start`: where to resume the run in `folder`. None starts a new run, in a folder without one.
    `beside_others`: other runs share the machine, so that no speed is measured. `world`: the
    processes that train it, all of which call this. Raises ConfigError if their number is not that
    of the settings.
    """
    if ready.cfg.trainer.processes != world.size:
        raise ConfigError(
            "trainer.devices",
            f"{ready.cfg.trainer.processes} processes are to train this run, and {world.size} has "
            "been started; leave out -m, or use trainer.devices=1",
        )
    trainer, watchdog = ready.cfg.trainer, Watchdog(ready.cfg.hang_seconds)
    asked = (start or Start()).threads(world.size) or trainer.threads
    if asked is None and world.place.local_size > 1:
        asked = max(1, usable_cpus() // world.place.local_size)
    how = computing(asked, trainer.matmul_precision, trainer.deterministic, ready.device)
    shares: Shares | None = "machine" if beside_others else None
    with watchdog.watching(), how as threads:
        run = RunFolder(folder)
        return _assembled_and_fit(ready, run, console, start, watchdog, threads, shares, world)


def _assembled_and_fit(
    ready: Ready,
    folder: RunFolder,
    console: Console,
    start: Start | None,
    watchdog: Watchdog,
    threads: int,
    shares: Shares | None,
    world: World,
) -> dict[str, Any]:
    cfg, data, device, match = ready.cfg, ready.data, ready.device, ready.match
    if start is None:
        if world.first:
            claim(folder, cfg)
            folder.write_tokenizer(data.tokenizer.files())
    elif start.source is None and not folder.done:
        console.print("no checkpoint was saved: starting from step 0")
    start = start or Start()
    quiet_lightning()
    check_same(start, facts_of(data, device, threads, world.size), warn=world.first)
    budget = resolve_budget(
        cfg.budget, cfg.batch_size * cfg.model.context_length, ready.cost.flops_per_token
    )
    # Before the seed is set, because trials draw numbers.
    found = (
        hint(cfg, data.tokenizer.vocab_size, budget.steps) if _told(start, folder, console) else ""
    )
    for line in filter(None, (ready.note, found)):
        console.print(line, markup=False, soft_wrap=True)
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    model = build_model(cfg, data.tokenizer.vocab_size)
    if start.source is not None:
        # Lightning converts the model only later: float32 parameters would round float64 weights.
        model.to(weight_dtype(cfg))
        load_weights(model, start.weights(), start.source)
    elif ready.origin is not None:
        begin_from(ready.origin, model, cfg)
        ready.origin.model.to("meta")  # frees its memory for the training
    summary = world.of_first(folder.finished())
    if check_budget(start, budget) and summary is not None:
        console.print(
            f"already finished after {start.step} steps; give a larger budget to continue"
        )
        return summary
    built = Assembly(
        cfg, folder, data, model, ready.cost, budget, device, threads, match, shares, world
    )
    assert ready.making is not None
    rows = 0
    if world.first:
        _keep_making(built, start, ready.making)
        rows = _prepare_folder(built, start, console)
    if match is not None:
        console.print(str(match), markup=False)
    console.print(metric_table(f"{cfg.variant}: costs", built.costs()))
    compiled = cfg.compile and _compile(model, device, console)
    return _fit(built, console, compiled, start, rows, watchdog)


def _told(start: Start, folder: RunFolder, console: Console) -> bool:
    """Whether a hint could change what the user does: at the start of a run that they watch.

    A sweep's run writes to a log, and others at work beside it would disturb the trial.
    """
    return start.source is None and not console.quiet and not folder.console_file.exists()


def _prepare_folder(built: Assembly, start: Start, console: Console) -> int:
    """Prepare the folder to continue from `start`; return the number of rows in metrics.jsonl."""
    built.folder.write_settings(built.cfg)
    built.folder.summary_file.unlink(missing_ok=True)
    note_rows_that_go(built.folder, start.rows)
    rows_kept = keep_rows(built.folder, start.rows, start.step)
    if rows_kept < start.rows:
        print(
            f"warning: metrics.jsonl: {start.rows - rows_kept} rows written before step "
            f"{start.step} are missing",
            file=sys.stderr,
        )
    if start.source is not None:
        console.print(f"resumes after step {start.step}")
    return rows_kept


def _keep_making(built: Assembly, start: Start, making: Making) -> None:
    """Write the run's Making; warn if it resumes with other code or leaves its schedule."""
    if start.source is not None:
        was, schedule = built.folder.read_making(), _unfinished_schedule(built, start)
        if schedule:
            _warn_mixed_run(
                "budget", f"the run leaves its schedule ({schedule}) unfinished for another"
            )
        if was is None or was.code != making.code:
            names = "unknown" if was is None else ", ".join(changed(was.code, making.code))
            _warn_mixed_run("resume", f"the code has changed since the run began ({names})")
        making = went_on(was, making, start.step, schedule)
    built.folder.write_making(making)


def _warn_mixed_run(field: str, what: str) -> None:
    print(
        f"warning: {field}: {what}; the report will not average it with other runs", file=sys.stderr
    )


def _unfinished_schedule(built: Assembly, start: Start) -> str:
    """Return in words the budget whose schedule the run leaves unfinished for another; else ""."""
    recorded = built.folder.read_settings()
    both = ({"budget": node["budget"]} for node in (recorded, asdict(built.cfg)))
    was, now = (budget_words(flat(node)) for node in both)
    # None in checkpoints of a version that did not record it.
    ends = start.content["callbacks"]["MetricRows"].get("completed") or []
    over = any(end["step"] == start.step for end in ends)
    return f"{was}, until step {start.step}" if start.step and was != now and not over else ""


def claim(folder: RunFolder, cfg: TrainConfig) -> None:
    """Claim the folder by writing the run's config. Raises RunFolderError if it holds a run."""
    if folder.begun:
        raise RunFolderError(
            "hydra.run.dir", f"{folder.path} already holds a run; give another folder, or none"
        )
    folder.path.mkdir(parents=True, exist_ok=True)  # from now on, a missing folder is an error
    folder.remove_leftovers()  # of a start that was killed before it wrote a config
    folder.write_settings(cfg)


def _fit(
    built: Assembly,
    console: Console,
    compiled: bool,
    start: Start,
    rows_kept: int,
    watchdog: Watchdog,
) -> dict[str, Any]:
    """Train, and write the summary; `rows_kept` is the number of rows already in metrics.jsonl."""
    world = built.world
    stop = StopRequest(world.most, speaks=world.first)
    run = new_parts(built, console, start, rows_kept, watchdog, stop, compiled=compiled)
    reset_peak_memory(built.device)
    done = False
    try:
        with gentle_beside_others(built.threads):
            if built.budget.steps == 0:
                _validate(run.trainer, run.module, run.datamodule, built)
            else:
                with stop.listening(), run.checkpoints.restoring(start.source):
                    run.trainer.fit(run.module, datamodule=run.datamodule, ckpt_path=start.source)
        summary = write_result(built, run)
        done = True
    finally:
        run.recorder.close(done)
    console.print(result_table(f"{built.cfg.variant}: result", summary["metrics"]))
    return summary


def write_result(built: Assembly, run: Parts) -> dict[str, Any]:
    """Write the summary of a run that has ended, which marks it as done; return it."""
    final = run.rows.final(run.module)
    step = run.trainer.global_step
    run.recorder.log_metrics(final, step)
    summary = summarise(built, run.rows.last | final, step, run.rows.completed)
    if built.world.first:
        built.folder.write_settings(built.cfg)  # again: if it was removed, it could not be read
        built.folder.write_summary(summary)
    return summary


def _validate(
    trainer: L.Trainer, module: LanguageModel, datamodule: RunDataModule, built: Assembly
) -> None:
    """Validate the model once without training it, and save its checkpoint."""
    trainer.validate(module, datamodule=datamodule, verbose=False)
    if built.cfg.checkpoint:
        trainer.save_checkpoint(built.folder.checkpoint(0))


def _compile(model: GPT, device: torch.device, console: Console) -> bool:
    """Compile each block in place: checkpoint names stay, and all blocks share the compiled code.

    Returns False, after a warning, if there is no compiler for what it generates.
    """
    lacking = missing_compiler(device)
    if lacking is not None:
        console.print(
            f"[yellow]warning:[/yellow] compile: no {lacking} compiler found; running eager"
        )
        return False
    for block in model.layers():
        block.compile()
    return True


def quiet_lightning() -> None:
    """Silence Lightning's messages and warnings: the console is for our own output."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
