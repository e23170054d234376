"""How the report forms sections by size and budget, and which runs share a section."""

import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from reporting import Page, compared, report
from rich.console import Console
from runfolders import write_run, write_sweep

from gptattn.compare.comparison import Section
from gptattn.compare.finished_runs import read_runs
from gptattn.compare.table import cells_table, section_table, short_rows
from gptattn.compare.verdicts import headline
from gptattn.sweep.progress import print_end

SMALL = {"mha": [3.00, 3.01, 3.02, 3.03], "gqa": [3.11, 3.13, 3.13, 3.15]}
LARGE = {"mha": [2.00, 2.01, 2.02, 2.03], "gqa": [1.91, 1.91, 1.89, 1.93]}


def write_sizes(folder: Path, choices: bool = False) -> Path:
    """Write mha and gqa at two sizes, as `-m attn=mha,gqa model.d_model=32,64` would."""
    for name, losses, width, params in (("nano", LARGE, 64, 4800), ("tiny", SMALL, 32, 1200)):
        picked = {"model": name} if choices else {}
        for variant, values in losses.items():
            write_sweep(
                folder / f"{name}_{variant}",
                {variant: values},
                d_model=width,
                metrics={"cost/params": params - 100 * (variant == "gqa")},
                config={"choices": {"attn": variant, **picked}},
            )
    return folder


def titles(folder: Path, split: bool = False) -> list[str]:
    return [found.title for found in compared(folder, split=split).sections]


def test_a_variant_is_compared_with_the_baseline_of_its_own_size(tmp_path: Path) -> None:
    found = compared(write_sizes(tmp_path))
    assert [section.title for section in found.sections] == ["d_model=32", "d_model=64"]
    assert [[row.name for row in section.rows] for section in found.sections] == [
        ["mha", "gqa"],
        ["mha", "gqa"],
    ]
    small, large = (section.rows[1].difference for section in found.sections)
    # Differences 0.11, 0.12, 0.11, 0.12 and -0.09, -0.10, -0.13, -0.10; one comparison each.
    assert small is not None
    assert large is not None
    assert (small.mean, large.mean) == (pytest.approx(0.115), pytest.approx(-0.105))
    assert (small.comparisons, large.comparisons) == (1, 1)
    assert headline(found) == "16 runs, 2 variants, 4 seeds each, in 2 sections"


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"config": {"budget": {"steps": 200}}}, ["200 steps", "1,000 steps"]),
        ({"config": {"batch_size": 4}}, ["batch_size=4", "batch_size=None"]),
        ({"context_length": 64}, ["context_length=64", "context_length=128"]),
        ({"num_layers": 3}, ["num_layers=3", "num_layers=None"]),
        ({"d_mlp": 99}, ["d_mlp=default", "d_mlp=99"]),
        ({"config": {"init_from": "outputs/a"}}, ["from outputs/a", "from scratch"]),
    ],
)
def test_settings_that_losses_must_share_make_sections(
    other: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    write_run(tmp_path / "a", "mha", 1, 2.0)
    write_run(tmp_path / "b", "mha", 1, 2.0, **other)
    assert sorted(titles(tmp_path)) == sorted(expected)


def test_runs_from_other_weights_are_a_section_named_after_them(tmp_path: Path) -> None:
    for variant, loss in (("mha", 1.5), ("gqa", 1.52)):
        for seed in (1, 2, 3):
            write_run(tmp_path / f"{variant}{seed}", variant, seed, loss)
    for variant, method, loss in (("mha", "mean", 1.4), ("gqa", "mean", 1.45), ("gqa", "first", 2)):
        for seed in (1, 2, 3):
            # Each seed goes on from its own seed's run.
            config = {"init_from": f"up/mha_s{seed}_00000{seed}", "init_method": method}
            noisy = loss + seed / 1000
            write_run(tmp_path / f"{variant}_{method}{seed}", variant, seed, noisy, config=config)
    trained_on, scratch = compared(tmp_path).sections
    assert [section.title for section in (scratch, trained_on)] == ["from scratch", "from up/mha"]
    assert [row.name for row in scratch.rows] == ["mha", "gqa"]
    made = ["mha", "gqa init_method=mean", "gqa init_method=first"]
    assert [row.name for row in trained_on.rows] == made
    # A table without sections names the start of the variants that have several.
    found = [row[0] for row in short_rows(read_runs([tmp_path])[0])[1:]]
    assert [name.split()[:2] for name in found if name.startswith("mha")] == [
        ["mha", "init_from=unset"],
        ["mha", "init_from=up/mha"],
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"config": {"position": {"_target_": "Rope"}}},
        {"config": {"optim": {"lr": 0.003}}},
        {"config": {"attn": {"_target_": "x", "num_kv_heads": 2}}},
        {"config": {"block": {"norm": "rms"}}},
        {"config": {"trainer": {"precision": "bf16-mixed"}}},
        {"dropout": 0.1},
        {"num_heads": 8},
        {"config": {"compile": True}},
    ],
)
def test_settings_that_are_compared_share_a_section(other: dict[str, Any], tmp_path: Path) -> None:
    write_run(tmp_path / "a", "mha", 1, 2.0)
    write_run(tmp_path / "b", "mha", 1, 2.1, **other)
    (section,) = compared(tmp_path).sections
    assert len(section.rows) == 2


def test_precisions_are_rows_of_one_variant_and_sections_of_several(tmp_path: Path) -> None:
    for precision in ("32-true", "bf16-mixed"):
        config = {"trainer": {"precision": precision}}
        write_run(tmp_path / f"mha_{precision}", "mha", 1, 2.0, config=config)
    (section,) = compared(tmp_path).sections
    assert {row.name for row in section.rows} == {
        "mha trainer.precision=32-true",
        "mha trainer.precision=bf16-mixed",
    }
    for precision in ("32-true", "bf16-mixed"):
        config = {"trainer": {"precision": precision}}
        write_run(tmp_path / f"gqa_{precision}", "gqa", 1, 2.2, config=config)
    assert titles(tmp_path) == ["trainer.precision=32-true", "trainer.precision=bf16-mixed"]


def test_a_matched_width_makes_no_section_and_no_name(tmp_path: Path) -> None:
    match = {"what": "params", "to": "mha", "field": "model.d_mlp", "target": 9.0, "reached": 9.0}
    for variant, size, after in (("mha", 0, 256), ("x", 0, 290), ("x", 4, 280)):
        config = {"match": "params", "attn": {"_target_": "gptattn.attention.X", "conv_size": size}}
        folder, made = tmp_path / f"{variant}{size}", match | {"before": 256, "after": after}
        write_run(folder, variant, 1, 2.0, d_model=64, d_mlp=after, match=made, config=config)
    write_run(tmp_path / "c", "mqa", 1, 2.0, d_model=64, d_mlp=256)
    (section,) = compared(tmp_path).sections
    assert section.title == ""
    assert {row.name for row in section.rows} == {
        *("mha", "mqa", "x attn.conv_size=0", "x attn.conv_size=4")
    }


@pytest.mark.usefixtures("undrawn")
def test_the_page_has_contents_and_a_curve_over_sizes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report(write_sizes(tmp_path / "runs"), "--out", out)
    page = Page(out / "comparison.html").source
    linked = re.findall(r'<a href="#(section-\d)">(.*?)</a>', page)
    assert linked == [("section-1", "d_model=32"), ("section-2", "d_model=64")]
    assert all(f'<section id="{name}">' in page for name, _ in linked)
    assert page.count("<svg") == 15  # seven of each section, and one over sizes
    assert "A line joins the sizes of one variant (d_model=32, d_model=64)" in page
    assert (out / "loss_sizes.png").exists()


def printed(section: Section, width: int) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    table = section_table(section)
    console.print(cells_table(table.cells, "runs", width, table.caption))
    return console.export_text().splitlines()


def test_at_80_columns_a_name_breaks_between_words(tmp_path: Path) -> None:
    for lr in (0.001, 0.002):
        for variant, losses in LARGE.items():
            config = {"optim": {"lr": lr}}
            folder = tmp_path / f"{variant}{lr}"
            write_sweep(folder, {variant: losses}, config=config, d_model=64)
    (section,) = compared(tmp_path).sections
    assert section.baseline == "mha optim.lr=0.001"
    lines = printed(section, 80)
    assert all(len(line) <= 80 for line in lines)
    for row in section.rows:
        assert any(line.strip().startswith(row.name) for line in lines)
    # Figures are not wrapped: the mean and its interval are on one line.
    assert sum("2.0150 ± " in line for line in lines) == 2


@pytest.mark.parametrize(
    ("other", "split"),
    [
        ({"context_length": 64, "config": {"budget": {"steps": 20}}}, False),
        ({"data": {"text_sha256": "zyxwvuts"}}, True),
    ],
)
def test_the_report_command_printed_by_a_sweep_works(
    other: dict[str, Any], split: bool, tmp_path: Path
) -> None:
    done = [write_run(tmp_path / "a b" / "1", "mha", 1, 2.0)]
    # A run of an earlier command in the same folder.
    write_run(tmp_path / "a b" / "2", "mha", 1, 2.0, **other)
    console = Console(width=200, record=True, file=io.StringIO())
    print_end(console, done, {})
    (line,) = re.findall(r"report: python scripts/compare.py (.*)", console.export_text())
    arguments = shlex.split(line)
    assert ("--split" in arguments) == split
    report(*arguments, "--no-files")
