"""Names and values of runs appear in the report as plain text, never as markup or code."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from reporting import Page, report
from runfolders import write_curve, write_run

from gptattn.runs.evaluation import Basis, CacheLoss, Evaluation
from gptattn.runs.folder import RunFolder

HOSTILE = '<script>alert("1")</script>&{{ 7 * 7 }}$\\frac$]]>--><!--'
INJECTIONS = (
    HOSTILE,
    "<img src=x onerror=alert(1)>",
    "</title></style><script>alert(1)</script>",
    "\" onmouseover=\"alert(1)' onfocus='alert(1)' autofocus='",
    "<a href=javascript:alert(1)>x</a>",
    "<iframe srcdoc='<script>1</script>'>",
    "{{ config }}{% for x in y %}",
    "$\\input{/etc/passwd}$",
    "[red]bold[/red]",
    "../../../../etc/passwd",
)


def test_text_of_runs_is_inert_in_every_file(tmp_path: Path) -> None:
    sweep, board = tmp_path / "<img src=x>", tmp_path / "bands"
    for seed in (1, 2):
        for i, text in enumerate(("mha", *INJECTIONS)):
            run = write_run(
                sweep / f"<b>{i}_{seed}",
                text,
                seed,
                2.0 + seed / 100,
                config={"optim": {"name": text, text: 1}},
                environment={"device": text, text: text},
                data={"tokenizer": " ".join(INJECTIONS)},
            )
            write_curve(run, 2.0)
            caches = {"full": CacheLoss(2.0, 64), text: CacheLoss(2.1, 32)}
            basis = Basis("weights", "text", "code", "cpu")
            RunFolder(run).write_evaluation(Evaluation(basis, 1000, 128, caches=caches))
    (write_run(sweep / "<u>", "mha", 8, 2.0) / "summary.json").write_text("{")
    report(sweep, "--board", board)
    page = Page(sweep / "comparison" / "comparison.html")
    foreign = {"img", "i", "b", "u", "iframe", "a", "object", "link", "embed", "form"}
    assert {"head", "title", "main", "section", "svg"} <= set(page.tags)
    assert not foreign & set(page.tags)
    assert page.runs_no_script()
    assert all(reference.startswith("#") for reference in page.references)
    assert not re.search(r"<[^>]* on\w+=", page.source)
    assert HOSTILE in page.text
    assert "<u>" in page.text
    for svg in (sweep / "comparison").glob("*.svg"):
        names = {node.tag.rpartition("}")[2] for node in ET.parse(svg).getroot().iter()}
        assert not {"script", "image", "a", "foreignObject"} & names
    assert {path.parent for path in sweep.rglob("comparison/**/*")} == {sweep / "comparison"}
    assert {path.parent.parent for path in board.rglob("events*")} == {board}
