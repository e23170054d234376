"""README.md and docs/ are true: each command that they show, each link, each name of the API."""

import contextlib
import itertools
import json
import pkgutil
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Template

import numpy as np
import pytest
from building import menu
from docs_commands import FENCED, PAGES, ROOT, commands_on, examine, new_on
from support import bpe, train
from test_layering import ROOMS

import gptattn.attention.variants
import gptattn.sweep.loop
from gptattn.cli.commands.convert import convert
from gptattn.cli.commands.new import TEMPLATES

ADDING, TRAINING = ROOT / "docs" / "add_a_variant.md", ROOT / "docs" / "training.md"
WITH_COMMANDS = [page for page in PAGES if commands_on(page)]
# The experiments whose runs the pages compare, beside attention_suite.
SWEPT = (
    *("precision", "optimizers", "speedrun_muon", "scratch", "positions", "zoology_fig2"),
    *("recall_window", "recall_variants", "recall_state", "until", "evidence", "tokenizers"),
    *("recipes", "dropout", "edu"),
)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, runs: Callable[[str], Path]) -> Path:
    """A folder with what the pages' commands start from. Not to be changed."""
    home = tmp_path_factory.mktemp("documented") / "home"
    for place in ("outputs/attention_suite", "runs"):
        for variant in menu("attn"):
            shutil.copytree(runs(variant), home / place / f"{variant}_s1_3fa2c1")
    for name in SWEPT:
        for variant in ("mha_wrapper", "mha", "gqa"):
            shutil.copytree(runs(variant), home / "outputs" / name / f"{variant}_s1_3fa2c1")
    shutil.copytree(runs("gqa"), home / "outputs" / "scratch" / "gqa_s1_19876c")
    (home / "book.txt").write_text("It was a dark and stormy night.\n" * 99, encoding="utf-8")
    rows = (json.dumps({"text": f"Row {i}.\n" * 20, "body": f"Body {i}\n" * 20}) for i in range(99))
    (home / "corpus.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (home / "ids").mkdir()
    for name in ("train", "val"):
        (np.arange(2000, dtype="<u2") % 300).tofile(home / "ids" / f"{name}.bin")
    shutil.copytree(bpe(home.parent / "some_bpe"), home / "bpe")
    for name in ("gptattn/attention/variants/cosine.py", "conf/attn/cosine.yaml"):
        found = re.search(rf"```\w+\n(# {name}\n.*?)```", ADDING.read_text("utf-8"), re.DOTALL)
        assert found is not None
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text(found.group(1), encoding="utf-8")
    found = re.search(
        r"```python\n(.*?class HeadNorm.*?)```", TRAINING.read_text("utf-8"), re.DOTALL
    )
    assert found is not None
    (home / "head_norm.py").write_text(found.group(1), encoding="utf-8")
    (home / "attn").mkdir()
    for file, template in (("mine.py", "module"), ("attn/mine.yaml", "settings")):
        text = (TEMPLATES / f"{template}.txt").read_text("utf-8")
        (home / file).write_text(Template(text).substitute(name="mine", title="Mine"), "utf-8")
    tokenizer = ["tokenizer=gpt2", f"tokenizer.path={bpe(home.parent / 'bpe')}"]
    llamas = ("block=llama", "block.tied_head=false", "block.norm_eps=1e-5", "position.base=5e5")
    for name, block in (("GPT2", ()), ("LLAMA", llamas)):
        run = train(home.parent / name, "model.context_length=32", *tokenizer, *block)
        with contextlib.redirect_stdout(None):
            convert([f"from={run}", "to=hf", f"out={home / name}"])
    return home


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it; sweeps are planned and checked there, and none of their runs is started."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(made.parent / "cache"))
    monkeypatch.setattr(gptattn.sweep.loop, "run_stages", lambda *_: None)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which a command adds this folder
    places = [*gptattn.attention.variants.__path__]
    places.append(str(made / "gptattn" / "attention" / "variants"))
    monkeypatch.setattr(gptattn.attention.variants, "__path__", places)
    home = Path(shutil.copytree(made, tmp_path / "home"))
    (home / "benchmarks").symlink_to(ROOT / "benchmarks")  # shipped entries are known by this place
    yield home
    for name in ("mine", "head_norm", "gptattn.attention.variants.cosine"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.page
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_every_command_of_a_page_does_what_it_says(page, home):
    for words in new_on(page):
        try:
            examine(words, home)
        except BaseException as error:
            error.add_note(" ".join(words))
            raise


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.stem)
def test_every_link_between_pages_leads_somewhere(page):
    # `make docs` finds dead anchors too, and pages that are not on the site, which has docs/ alone.
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s#]+)", prose):
        target = (page.parent / link).resolve()
        home = ROOT if page.parent == ROOT else ROOT / "docs"
        assert re.match(r"\w+:", link) or (target.is_file() and home in target.parents), link


def test_every_name_of_the_api_is_there():
    names = [
        name
        for page in (ROOT / "docs" / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.M)
    ]
    assert len(names) == len(set(names)) > 50
    for name in names:
        assert callable(pkgutil.resolve_name(name)), name


def test_every_name_on_the_architecture_page_exists():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = {*re.findall(rf"`((?:{'|'.join(itertools.chain(*ROOMS))})\.[\w.]+)`", page)}
    assert len(names) > 15
    for name in names:
        # A module is not imported, since importing some of them runs something.
        file = (ROOT / "gptattn" / name.replace(".", "/")).with_suffix(".py")
        assert file.is_file() or callable(pkgutil.resolve_name(f"gptattn.{name}")), name
