"""Names and values of runs appear in the report as plain text, never as markup or code."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest
from reporting import LOSSES, NAMES, Page, report
from runfolders import write_run, write_sweep

HOSTILE = '<script>alert("1")</script>&{{ 7 * 7 }}$\\frac$]]>--><!--'


def test_names_from_run_folders_are_shown_and_never_obeyed(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "<img src=x>", {"mha": LOSSES["mha"], HOSTILE: LOSSES["gqa"]})
    write_run(sweep / "<b>", "mha", 9, 2.0, environment={"git_commit": "<i>x</i>"})
    (write_run(sweep / "<u>", "mha", 8, 2.0) / "summary.json").write_text("{")
    board = tmp_path / "bands"
    report(sweep, "--board", board)
    page = Page(sweep / "comparison" / "comparison.html")
    assert page.runs_no_script()
    assert not {"img", "i", "b", "u"} & set(page.tags)
    assert HOSTILE in page.text
    assert "<u>" in page.text
    for name in NAMES:
        root = ET.parse(sweep / "comparison" / f"{name}.svg").getroot()
        assert not [node for node in root.iter() if node.tag.endswith("script")]
    assert len(list(board.iterdir())) == 6
    assert {path.parent.parent for path in board.rglob("events*")} == {board}


INJECTIONS = (
    HOSTILE,
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "</script><script>alert(1)</script>",
    "</title><script>alert(1)</script>",
    "</style><style>*{display:none}</style>",
    '" onmouseover="alert(1)',
    "' onfocus='alert(1)' autofocus='",
    "<a href=javascript:alert(1)>x</a>",
    "<iframe srcdoc='<script>1</script>'>",
    "<!--",
    "]]><script>alert(1)</script>",
    "{{ config }}{% for x in y %}",
    "{{ ''.__class__.__mro__ }}",
    "$\\input{/etc/passwd}$",
    "[red]bold[/red]",
    "../../../../etc/passwd",
)


@pytest.mark.parametrize("texts", [INJECTIONS[i::3] for i in range(3)], ids=range(3))
def test_text_of_runs_is_inert_in_every_file(texts: Sequence[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    for seed in (1, 2):
        for i, text in enumerate(("mha", *texts)):
            write_run(
                tmp_path / "runs" / f"{i}_{seed}",
                text,
                seed,
                2.0 + seed / 100,
                config={"optim": {"name": text, text: 1}},
                environment={"device": text, text: text},
                data={"tokenizer": " ".join(texts)},
            )
    report(tmp_path / "runs", f"--out={out}")
    page = Page(out / "comparison.html")
    allowed = {"html", "head", "meta", "title", "style", "body", "header", "main", "section", "p"}
    foreign = {"img", "iframe", "a", "object", "link", "embed", "form"} & set(page.tags)
    assert not foreign
    assert page.runs_no_script()
    assert allowed <= set(page.tags)
    assert all(reference.startswith("#") for reference in page.references)
    assert not re.search(r"<[^>]* on\w+=", page.source)
    for svg in out.glob("*.svg"):
        names = {node.tag.rpartition("}")[2] for node in ET.parse(svg).getroot().iter()}
        assert not {"script", "image", "a", "foreignObject"} & names
    assert {path.parent for path in out.rglob("*") if path.is_file()} == {out}
