"""Measures loss by position and by cache: `gptattn-evaluate run=outputs/... lengths=[256]`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gptattn.cli.arguments import NO_NAMES, Names, converted, parse
from gptattn.cli.script import run_script
from gptattn.compare.evaluation_tables import change_words
from gptattn.compare.finished_runs import Run, one_line, read_runs
from gptattn.data.tokens import TokenData
from gptattn.errors import ConfigError
from gptattn.evaluate.cache_kinds import CacheKind, cache_kind
from gptattn.evaluate.evaluation_of import Asked, Step, check_unchanged, measured, possible
from gptattn.machine.device import resolve_device, set_threads
from gptattn.runs.evaluation import Evaluation
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import SavedRun, load_run
from gptattn.settings.build import build_data
from gptattn.settings.config import Accelerator
from gptattn.settings.values import within

HELP = """\
COMMAND run=outputs/... lengths=[256,512,1024]

  run=FOLDER        a finished run, or a folder of them, such as a sweep's; may
                    be given several times
  lengths=[256,512] loss by position in windows of so many tokens, also beyond
                    the trained length where positions allow it
  cache=[full,int4,sink4+window:60]
                    loss of the held-out text decoded through these caches:
                    full, bf16, int8, int4, window:N (the newest N tokens),
                    sinkN+window:M (and the first N); full always is among them
  device=auto       cpu, gpu or auto
  threads=N         CPU threads; default: all
  allow_targets=PACKAGE
                    packages besides gptattn that the runs may name (a,b)

Without lengths and cache it is the loss by position at the trained length.
Results go to evaluation.json in each run's folder; what is there already for
the same weights, text and code is not measured again.
"""


@dataclass(frozen=True)
class Arguments:
    """The command's arguments, without run=FOLDER; HELP describes them."""

    lengths: Names = NO_NAMES
    cache: Names = NO_NAMES
    device: Accelerator = "auto"
    threads: int | None = field(default=None, metadata=within(least=1, most=1024))
    allow_targets: Names = NO_NAMES


def asked_lengths(names: Names) -> tuple[int, ...]:
    """Return the lengths in ascending order. Raises ConfigError for one that is no length."""
    lengths = {converted(int, name, "lengths") for name in names}
    if wrong := [length for length in lengths if length < 1]:
        raise ConfigError("lengths", f"{wrong[0]} is not a positive number; give 1 or more tokens")
    return tuple(sorted(lengths))


def asked_kinds(names: Names) -> tuple[CacheKind, ...]:
    """Return the kinds in the given order, `full` first: the others are compared with it."""
    return tuple(cache_kind(name) for name in dict.fromkeys(["full", *names] if names else []))


class NoText(ConfigError):
    """Raised for a run on a task, whose rows are drawn."""


class Texts:
    """The held-out texts of runs; runs with the same data and tokenizer share one."""

    def __init__(self) -> None:
        self._read: dict[str, TokenData] = {}

    def of(self, saved: SavedRun) -> TokenData:
        """Return the run's text, read with its own tokenizer. Raises a UserError."""
        cfg = saved.cfg
        key = json.dumps(
            [cfg.data, saved.tokenizer.fingerprint(), cfg.validation.fraction, cfg.cache_dir],
            sort_keys=True,
        )
        if key not in self._read:
            data = build_data(cfg, saved.tokenizer)
            if not isinstance(data, TokenData):
                raise NoText(
                    "run",
                    f"data={cfg.choices['data']} is not one text; give a run that trained on one",
                )
            self._read[key] = data
        return self._read[key]


@dataclass(frozen=True)
class Plan:
    """A run, what can be measured of it, and what was measured before."""

    folder: Path
    asked: Asked
    known: Evaluation | None


def planned(
    runs: Sequence[Run], asked: Asked, texts: Texts, allow_targets: Sequence[str]
) -> list[Plan]:
    """Check every run before the first is measured.

    Of several runs, what one cannot give is left out, with a line that says so. Raises a UserError
    for a run that cannot be read, for a single run's refusal, and if no run gives anything.
    """
    plans = list[Plan]()
    refused: dict[str, list[Path]] = {}
    first: ConfigError | None = None
    for run in runs:
        saved = load_run(run.folder, allow_targets)
        try:
            data = texts.of(saved)
            check_unchanged(saved, data, run.data["text_sha256"], run.steps)
            some = asked if asked != Asked() else Asked((saved.cfg.model.context_length,))
            given, why = possible(saved, data, some)
        except NoText as error:
            given, why = Asked(), [error]
        for error in why:
            refused.setdefault(str(error), []).append(run.folder)
            first = first or error
        if given != Asked():
            plans.append(Plan(run.folder, given, run.evaluation))
    if first is not None and (len(runs) == 1 or not plans):
        raise first
    for error, of in refused.items():
        more = f" and {len(of) - 1} more" * (len(of) > 1)
        print(one_line(f"left out for {of[0].name}{more}: {error}"), file=sys.stderr)
    return plans


def run(args: Arguments, paths: Sequence[Path]) -> None:
    """Measure what is asked of every finished run below the paths, and print and write it."""
    asked = Asked(asked_lengths(args.lengths), asked_kinds(args.cache))
    device = resolve_device(args.device, "device")
    runs, passed_over = read_runs(paths)
    for line in passed_over:
        print(f"passed over: {line}", file=sys.stderr)
    set_threads(args.threads)
    texts = Texts()
    for plan in planned(runs, asked, texts, args.allow_targets):
        saved = load_run(plan.folder, args.allow_targets)
        data = texts.of(saved)
        saved.model.to(device)
        print(f"{plan.folder}: {saved.cfg.variant}, trained at {saved.model.context_length} tokens")
        for step in measured(saved, data, plan.asked, plan.known):
            if step.new:
                RunFolder(plan.folder).write_evaluation(step.evaluation)
            print(words(step), flush=True)


def words(step: Step) -> str:
    """Return the line that tells of one answer."""
    found, as_before = step.evaluation, "" if step.new else "  (as before)"
    if isinstance(step.asked, int):
        length, trained = found.lengths[step.asked], found.context_length
        told = f"  length {step.asked:>16,}  loss {length.loss:.4f}  {length.windows:,} windows"
        if step.asked > trained:
            within, beyond = length.between(1, trained), length.between(trained + 1, step.asked)
            told += f"; {within:.4f} up to {trained:,} tokens, {beyond:.4f} beyond"
        return told + as_before
    name = step.asked.name
    one, full = found.caches[name], found.caches["full"]
    each = found.bytes_per_token(name)
    told = f"  cache  {name:>16}  loss {one.loss:.4f}  {each:,.6g} bytes per token, "
    told += f"{one.nbytes:,} in all"
    told += "" if name == "full" else f"; {change_words(one.loss - full.loss)} to full"
    return told + as_before


def main() -> int:
    """Run `gptattn-evaluate`; return the exit code."""
    return run_script(HELP, evaluate)


def evaluate(arguments: Sequence[str]) -> None:
    """Split off the runs, of which there may be several, and run the command with the rest."""
    paths = [Path(a.removeprefix("run=")) for a in arguments if a.startswith("run=")]
    args = parse(Arguments, [a for a in arguments if not a.startswith("run=")])
    if not paths:
        raise ConfigError("run", "is missing; give run=...")
    run(args, paths)
