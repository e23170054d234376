"""The commands that README.md, CONTRIBUTING.md and docs/ show, and how each is tested.

What converts, generates, draws or reports is run as it stands. What trains is run with the model
cut down where its page goes on from it; otherwise it goes through every check that comes before the
first step. What cannot run in a test is looked at in another way; its function here says why.
"""

import contextlib
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import bench
import yaml
from support import TINY, check_job, command, process_state
from torch.distributed.run import get_args_parser

from gptattn.cli.arguments import parse_own
from gptattn.cli.commands import evaluate
from gptattn.evaluate.caches import parse_cache_kind
from gptattn.settings.compose import CONF

ROOT = CONF.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

FENCED = re.compile(r"^```(\w*).*?\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(
    r"`((?:[A-Z_]+=\S+\s)*(?:python|make|pip|pytest|tensorboard|gptattn-[a-z-]+)(?:\s[^`]*)?)`"
)
SIZES = [
    *(o for o in TINY if o.startswith(("model.", "batch_size=", "trainer"))),
    "model.context_length=32",  # a prompt of the pages has 22 bytes
]
QUICK = ["log_every=1", "validation.count=1", "sample.tokens=0"]
AS_THEY_ARE = ("convert", "attention-map", "check")
MEASURING = (
    *("torture", "track_speeds", "track_fingerprints", "simulate_statistics"),
    *("recipes_page", "variants_page"),
)
OF_SHAKESPEARE = {f"experiment={e}" for e in ("nanogpt_cpu", "speedrun_cpu")}


def new_on(page: Path) -> list[tuple[str, ...]]:
    """The commands of a page, without sweeps on an earlier page: they only are planned."""
    before = {words for other in PAGES[: PAGES.index(page)] for words in commands_on(other)}
    return [words for words in commands_on(page) if "-m" not in words or words not in before]


@cache
def commands_on(page: Path) -> list[tuple[str, ...]]:
    """The words of each command of a page, in their order, without settings of the environment."""
    text = page.read_text(encoding="utf-8")
    blocks = [(m.start(), m.group(2)) for m in FENCED.finditer(text) if m.group(1) == "bash"]
    prose = FENCED.sub(lambda m: " " * len(m.group()), text)
    spans = [(m.start(), " ".join(m.group(1).split())) for m in INLINE.finditer(prose)]
    commands: list[list[str]] = []
    for _, lines in sorted(blocks + spans):
        for line in lines.replace("\\\n", " ").splitlines():
            plain = re.sub(r'eval "\$\((.*)\)"', r"\1", line.strip())
            lexer = shlex.shlex(plain, posix=True, punctuation_chars="|&;")
            lexer.whitespace_split = True
            commands.append([])
            for word in lexer:
                if word in ("|", "&&", ";"):
                    commands.append([])
                elif commands[-1] or not re.match(r"[A-Z_]+=", word):
                    commands[-1].append(word)
    return [tuple(words) for words in commands if words]


def examine(words: Sequence[str], home: Path) -> None:
    """Test a command in the folder `home`; one of no known kind fails."""
    program, *arguments = words
    if program.startswith("gptattn-"):
        assert program in PROJECT["scripts"], program
        if not arguments:
            return
        program = "train.py" if program == "gptattn-train" else program
    if program == "python":
        door, *arguments = arguments
        program = door.removeprefix("scripts/")
        assert (ROOT / door).is_file(), door
    assert program in KINDS, f"{' '.join(words)}: no kind of command that the tests know"
    with process_state(), contextlib.chdir(home):
        KINDS[program](arguments)


def _local(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with files of this machine in place of what is on the hub."""
    held_out = "validation.fraction=0.2"  # of a few documents
    there = {"data.name": "data.path=corpus.jsonl", "data.val_split": held_out}
    there["validation.fraction"] = held_out
    own = [there.get(a.partition("=")[0], a) for a in arguments]
    return ["tokenizer.path=bpe" if a.startswith("tokenizer.path=hf:") else a for a in own]


def _train(arguments: list[str]) -> None:
    here, arguments = Path.cwd(), _local(arguments)
    if "attn=cosine" in arguments:  # the README's example, which is no file of ours
        arguments = [*arguments, f"hydra.searchpath=[file://{here / 'conf'}]"]
    if OF_SHAKESPEARE & {*arguments}:  # no test has the text
        arguments = [*arguments, "data=text", "data.path=book.txt"]
    if any(a.startswith("init_from=outputs/") for a in arguments):  # a run that is cut down here
        arguments = [*arguments, *SIZES]
    # Help has a test of its own, and machines without a GPU check all else.
    arguments = [a for a in arguments if a not in ("--help", "trainer=gpu")]
    if any(a.startswith("experiment=track") for a in arguments):  # two of a list of attentions
        arguments = [re.sub(r"^((?:attn|recipe)=\w+,\w+),.*", r"\1", a) for a in arguments]
        arguments = [re.sub(r"^(part=\[\w+\],\[\w+\]),.*", r"\1", a) for a in arguments]
    if "-m" in arguments or any(a in ("--cfg", "-sc") for a in arguments):
        assert command(here, *arguments, *_fewer_runs(arguments)) == 0
    elif any(a.startswith(("run_dir=", "resume=")) for a in arguments):
        assert command(here, *_cut(arguments)) == 0
    elif any(a.startswith("init_from=") for a in arguments):
        check_job([*arguments, *SIZES])
    else:
        check_job(arguments)


def _launched(arguments: list[str]) -> None:
    """Check the run's settings; tests/training/test_ddp.py starts several processes."""
    place = arguments.index("train.py")
    options = [a for a in arguments[:place] if a != "python"]
    if not any(option.startswith("--ntasks") for option in options):  # srun is not there
        get_args_parser().parse_args([*options, "train.py"])
    check_job([*arguments[place + 1 :], *(size for size in SIZES if size != "trainer=cpu")])


def _fewer_runs(arguments: Sequence[str]) -> list[str]:
    """Return what cuts an experiment to two variants, a rate and a seed.

    The tests of experiments compose all of them.
    """
    given, fewer = {a.partition("=")[0] for a in arguments}, list[str]()
    for name in (a[11:] for a in arguments if a[:11] == "experiment="):
        text = (CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
        sweeper = yaml.safe_load(text).get("hydra", {}).get("sweeper", {})
        fewer.append("seed=1")
        if "variants" in sweeper:
            fewer.append(f"hydra.sweeper.variants={json.dumps(sweeper['variants'][:2])}")
        if "tune" in sweeper and "hydra.sweeper.tune" not in given:
            fewer.append(f"hydra.sweeper.tune.lr=[{sweeper['tune']['lr'][0]}]")
        if "recipe" in sweeper.get("params", {}):
            fewer.append("recipe=llama3,gemma3")
    return [one for one in fewer if one.partition("=")[0] not in given]


def _cut(arguments: Sequence[str]) -> list[str]:
    """Shrink to a tiny model and few steps; a resumed run keeps its sizes."""
    kept = [a for a in arguments if not a.startswith(("budget.", "trainer."))]
    resumes = any(a.startswith("resume=") for a in arguments)
    longer = any(a.startswith("budget.") for a in arguments)
    steps = [f"budget.steps={6 if longer else 4}"]
    return [*kept, *(steps if longer else [])] if resumes else [*kept, *SIZES, *QUICK, *steps]


def _run(name: str) -> Callable[[list[str]], None]:
    """Run the installed command as it is."""

    def run(arguments: list[str]) -> None:
        sys.argv = [name, *arguments]
        module, main = PROJECT["scripts"][name].split(":")
        assert getattr(importlib.import_module(module), main)() == 0

    return run


def _new(arguments: list[str]) -> None:
    """Run it in a folder of its own: the other commands are tested on files that are there."""
    Path("new").mkdir()
    with contextlib.chdir("new"):
        _run("gptattn-new")(
            [f"{arguments[0]}_of_the_page"]
        )  # another is importable from the folder


def _generate(arguments: list[str]) -> None:
    """Run it for fewer tokens."""
    own = [a for a in arguments if a[:7] != "tokens="]
    _run("gptattn-generate")([*own, "tokens=8"] if own else own)


def _compare(arguments: list[str]) -> None:
    """Run it, without the plots (seconds) unless an option asks for the files."""
    if arguments[:1] in (["outputs/track"], ["outputs/track_gate"], ["outputs/battery"]):
        return  # they need a baseline, or runs; tests/compare runs it
    asked = any("=" in a for a in arguments)
    # The page's own metric is one that no run here has.
    given = ["metrics=[train/loss]" if a.startswith("metrics=") else a for a in arguments]
    _run("gptattn-compare")(given if asked else [*given, "files=false"])


def _evaluate(arguments: list[str]) -> None:
    """Read the arguments, then run it with a length and a cache for the context of these runs."""
    asked = evaluate.parse(evaluate.Arguments, arguments)
    assert all(parse_cache_kind(name) for name in asked.cache)
    runs = [a for a in arguments if a[:4] == "run="]
    _run("gptattn-evaluate")([*runs, "lengths=[4]", "cache=[window:2]"])


def _make(arguments: list[str]) -> None:
    """Test our commands in the output of `make -n`: make itself would install environments."""
    given = ("MAKE", "ARGS")  # to the make that runs the tests
    env = {name: value for name, value in os.environ.items() if not name.startswith(given)}
    command = ["make", "-n", *arguments]
    told = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    for line in told.stdout.splitlines():
        words = [word.removeprefix(".venv/bin/") for word in shlex.split(line)]
        words = [word.removeprefix(".venv-bench/bin/") for word in words]
        ours = words[0] == "python" and (words[1] == "train.py" or words[1].startswith("scripts/"))
        if ours or words[0].startswith(("tensorboard", "gptattn-")):
            examine(words, Path.cwd())


def _read_arguments(name: str) -> Callable[[list[str]], None]:
    """Only read the arguments: it takes minutes."""

    def read(arguments: list[str]) -> None:
        if "--help" not in arguments:
            _, others = parse_own(importlib.import_module(name).Arguments, arguments)
            if others:  # of the part `ddp`
                check_job(others)

    return read


def _bench(arguments: list[str]) -> None:
    """Read the arguments of one of its parts; without any it lists them."""
    if arguments:
        part, *options = arguments
        assert part in bench.PARTS
        _read_arguments(f"measuring.{part}")(options)


def _leave(arguments: list[str]) -> None:
    """Test nothing: it needs the network, makes the environment, serves for ever, or is this."""


KINDS: dict[str, Callable[[list[str]], object]] = {
    "train.py": _train,
    "torchrun": _launched,
    "srun": _launched,
    "gptattn-compare": _compare,
    "gptattn-evaluate": _evaluate,
    "gptattn-generate": _generate,
    "gptattn-new": _new,
    "gptattn-prepare": lambda arguments: _run("gptattn-prepare")(_local(arguments)),
    **{f"gptattn-{name}": _run(f"gptattn-{name}") for name in AS_THEY_ARE},
    "bench.py": _bench,
    **{f"{name}.py": _read_arguments(name) for name in MEASURING},
    "front_figure.py": lambda _: importlib.import_module("front_figure").draw(),
    "make": _make,
    **dict.fromkeys(("pip", "pytest", "tensorboard", "source", "python3"), _leave),
}
