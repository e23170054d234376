"""Measures the loss of finished runs by position and by cache, and their scores on tasks.

Without lengths, cache or lm_eval, it measures the loss by position at the trained length. It
writes results to evaluation.json in each run's folder, and reuses them for the same weights, text
and code.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gptattn.build.data import build_data
from gptattn.cli.arguments import PACKAGES, Count, option, parse, run_script
from gptattn.compare.finished_runs import one_line, read_runs
from gptattn.data.tokens import TokenData
from gptattn.errors import ConfigError, DataError
from gptattn.evaluate.caches import CacheKind, parse_cache_kind
from gptattn.evaluate.measure import begin_evaluation, check_question, check_unchanged, measure
from gptattn.machine.device import resolve_device, set_threads
from gptattn.machine.disk import refuse_taken
from gptattn.runs.evaluation import Evaluation
from gptattn.runs.folder import EVALUATION, RunFolder
from gptattn.runs.load import load_run
from gptattn.settings.config import Accelerator, Threads


@dataclass(frozen=True)
class Arguments:
    """run=outputs/... lengths=256,512,1024"""

    run: tuple[Path, ...] = option(
        "a finished run, or a folder of them, such as a sweep's; repeatable"
    )
    lengths: tuple[Count, ...] = option(
        "loss by position in windows of this many tokens, which can be longer than in training if "
        "the positions allow it",
        (),
    )
    cache: tuple[str, ...] = option(
        "loss when decoding held-out text through these caches: full (always), bf16, int8, int4, "
        "window:N (the newest N tokens), sinkN+window:M (also the first N)",
        (),
    )
    lm_eval: tuple[str, ...] = option(
        "tasks of lm-evaluation-harness: names, such as lambada_openai, or YAML files", ()
    )
    device: Accelerator = option("cpu, gpu or auto", "auto")
    threads: Threads | None = option("CPU threads; default: all")
    allow_targets: tuple[str, ...] = option(PACKAGES, ())


def evaluate(arguments: Sequence[str]) -> None:
    """Measure every finished run below run=FOLDER; print the results, and write them.

    If one of several runs cannot answer a question, it is left out for that question, with a line
    that says why. Raises a UserError for a run that cannot be read, and if nothing is measured.
    """
    args = parse(Arguments, arguments)
    # `full` comes first: the others are compared with it.
    kinds = dict.fromkeys(["full", *args.cache] if args.cache else [])
    questions: list[int | CacheKind | str] = [*sorted(args.lengths), *args.lm_eval]
    questions += map(parse_cache_kind, kinds)
    if args.lm_eval:  # the extra lm-eval takes seconds to import
        from gptattn.evaluate.harness import check_task

        for task in args.lm_eval:
            check_task(task)
    device = resolve_device(args.device, "device")
    runs, skipped = read_runs(args.run)
    for line in skipped:
        print(f"skipped: {line}", file=sys.stderr)
    set_threads(args.threads)
    refused: dict[str, list[str]] = {}  # reason -> runs
    measured = False
    for run in runs:
        saved = load_run(run.folder, args.allow_targets)
        cfg, data = saved.cfg, build_data(saved.cfg, saved.tokenizer)
        possible: list[int | CacheKind | str] = []
        for question in questions or [cfg.model.context_length]:
            try:
                if not isinstance(data, TokenData):
                    what = f"data={cfg.choices['data']} is not a text"
                    raise ConfigError("run", f"{what}; use a run that was trained on text")
                check_question(saved, data, question)
                possible.append(question)
            except ConfigError as error:
                if len(runs) == 1:
                    raise
                refused.setdefault(str(error), []).append(run.folder.name)
        if not possible or not isinstance(data, TokenData):
            continue
        if run.evaluation is None:
            refuse_taken(run.folder, "run", EVALUATION)
        check_unchanged(saved, data, run.data["text_sha256"], run.steps)
        saved.model.to(device)
        print(f"{run.folder}: {cfg.variant}, trained at {cfg.model.context_length} tokens")
        found = begin_evaluation(saved, data, run.evaluation)
        for question in possible:
            try:
                earlier, found = found, measure(saved, data, question, found)
            except (ConfigError, DataError) as error:  # of a task
                if len(runs) == 1:
                    raise
                refused.setdefault(str(error), []).append(run.folder.name)
                continue
            measured = True
            if found is not earlier:
                RunFolder(run.folder).write_evaluation(found)
            before = "  (already measured)" if found is earlier else ""
            print(f"{describe_answer(found, question)}{before}", flush=True)
    for reason, names in refused.items():
        print(one_line(f"left out {', '.join(dict.fromkeys(names))}: {reason}"), file=sys.stderr)
    if not measured:
        raise ConfigError("run", "nothing could be measured, for the reasons above")


def describe_answer(found: Evaluation, question: int | CacheKind | str) -> str:
    """Return the evaluation's answer to a question: one line, or one per score."""
    if isinstance(question, str):
        return "\n".join(
            f"  {name:>23}  {key} {value:.4f}"
            + (f" ± {task.errors[key]:.4f}" if key in task.errors else "")
            for name, task in found.tasks.items()
            for key, value in task.values.items()
            if task.request == question
        )
    if isinstance(question, int):
        length, trained = found.lengths[question], found.context_length
        line = f"  length {question:>16,}  loss {length.loss:.4f}  {length.windows:,} windows"
        if question <= trained:
            return line
        within, beyond = length.between(1, trained), length.between(trained + 1, question)
        return f"{line}; {within:.4f} up to {trained:,} tokens, {beyond:.4f} beyond"
    name = question.name
    one, each = found.caches[name], found.bytes_per_token(name)
    line = f"  cache  {name:>16}  loss {one.loss:.4f}  {each:,.6g} bytes per token, "
    line += f"{one.nbytes:,} in all"
    if name == "full":
        return line
    return f"{line}; {one.loss - found.caches['full'].loss:+z.4f} vs full"


main = partial(run_script, evaluate, Arguments)
