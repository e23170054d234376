"""experiment=arena: its list of variants, and the page that is made from its runs."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import script
from matplotlib.figure import Figure
from runfolders import write_run

from gptattn.compare.comparison import compare
from gptattn.compare.finished_runs import read_runs
from gptattn.compare.statistics import compare_pairs
from gptattn.compare.table import report_rows
from gptattn.machine.ending import ended
from gptattn.runs.folder import RunFolder
from gptattn.settings.compose import CONF, settings
from gptattn.sweep.jobs import words
from gptattn.sweep.tuning import tune_of

arena_page = script("arena_page")
ARENA = yaml.safe_load((CONF / "experiment" / "arena.yaml").read_text(encoding="utf-8"))
SWEEPER = ARENA["hydra"]["sweeper"]


def test_every_variant_of_the_arena_composes_and_is_another_run() -> None:
    sizes = ["block=llama", "model=nano", "match=params"]
    found = [settings([*words(variant), *sizes]) for variant in SWEEPER["variants"]]
    assert (found[0].variant, found[0].choices["position"]) == ("mha", "rope")
    # One position is the block's own, and so the same run as mha.
    assert (
        len({(str(cfg.attn), cfg.variant, cfg.choices["position"]) for cfg in found})
        == len(found) - 1
    )
    assert str(tune_of(SWEEPER["tune"]).seed) not in SWEEPER["params"]["seed"].split(",")


def write(folder: Path, variant: str, seed: int, loss: float, lr: float, **choices: str) -> Path:
    picked = {"attn": variant, "block": "gpt2", "position": "learned", **choices}
    config: dict[str, Any] = {
        "choices": picked,
        "block": {"norm": picked["block"]},
        "position": {"_target_": picked["position"]},
        "optim": {"lr": lr},
    }
    name = f"{variant}_{picked['position']}_{picked['block']}_{lr}_{seed}"
    return write_run(folder / name, variant, seed, loss, config=config)


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    """Two blocks. In GPT-2's, gqa is worse than mha, and alibi better than learned positions and
    worse than sinusoidal ones. One of gqa's tuning runs there diverged, and mha was tuned at a rate
    that the others were not.
    """
    noise = [0.0, 0.001, 0.003]
    rows = [
        ("mha", 2.0, 0.002, {}),
        ("mha", 1.9, 0.004, {"position": "alibi"}),
        ("mha", 1.5, 0.004, {"position": "sinusoidal"}),
        ("gqa", 2.1, 0.004, {}),
        ("mha", 1.8, 0.004, {"block": "llama"}),
        ("gqa", 1.7, 0.004, {"block": "llama"}),
    ]
    for variant, loss, lr, choices in rows:
        for seed, more in enumerate(noise, start=1):
            # The spread of a difference must not be 0.
            own = more * (1 + (variant == "gqa") + 2 * (choices.get("position") == "alibi"))
            own += 0.01 * (choices.get("position") == "sinusoidal") * (seed == 2)
            write(tmp_path / "arena", variant, seed, loss + own, lr, **choices)
        for rate in (0.002, 0.004):
            if (variant, rate, choices) != ("gqa", 0.002, {}):
                worse = 0.5 * (rate != lr)
                write(tmp_path / "arena" / "tuning", variant, 0, loss + worse, rate, **choices)
    tuning = tmp_path / "arena" / "tuning"
    write(tuning, "mha", 0, 2.25, 0.001)
    write(tuning, "mha", 9, 7.77, 0.016)  # with the seed of an earlier search
    os.utime(tuning / "mha_learned_gpt2_0.016_9" / "summary.json", (1, 1))
    lost = [write(tuning, "gqa", 0, 1.0, rate) for rate in (0.002, 0.008)]
    for folder in lost:
        (folder / "summary.json").unlink()
    # This one diverged. The other was only stopped.
    RunFolder(lost[0]).write_failure(5, "train/loss: is nan")
    return tmp_path / "arena"


def test_a_rate_of_its_own_is_a_column_and_tuning_is_left_out(arena: Path) -> None:
    runs, skipped = read_runs([arena])
    assert skipped == [
        f"{arena / 'tuning'}: runs that chose a learning rate; name the folder to see them"
    ]
    assert len(read_runs([arena / "tuning"])[0]) == 13
    first, second = compare(runs).sections
    table = [row[:4] for row in report_rows(first)]
    assert table == [
        ["variant", "n", "lr", "val loss"],
        ["mha position=learned", "3", "0.002", "2.0013 ± 0.0038"],
        ["mha position=sinusoidal", "3", "0.004", "1.5047 ± 0.0141"],
        ["mha position=alibi", "3", "0.004", "1.9040 ± 0.0114"],
        ["gqa", "3", "0.004", "2.1027 ± 0.0076"],
    ]
    assert "each variant has a learning rate of its own, lr: 0.004: 9 runs; 0.002: 3 runs" in (
        first.warnings
    )
    # In the other block all have the same rate.
    assert report_rows(second)[0][:3] == ["variant", "n", "val loss"]
    assert [first.title, second.title] == ["block=gpt2", "block=llama"]


def test_rates_that_alone_part_two_rows_stay_in_their_names(arena: Path) -> None:
    write(arena, "mha", 1, 2.5, 0.008)
    first = compare(read_runs([arena])[0]).sections[0]
    assert {row.name for row in first.rows} >= {"mha position=learned optim.lr=0.008", "gqa"}
    assert "lr" not in report_rows(first)[0]


def made(arena: Path, page: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["arena_page.py", str(arena), "--page", str(page)])
        arena_page.main()
    return page.read_text(encoding="utf-8")


def test_the_page_has_findings_rates_and_signs_and_keeps_what_was_written(arena: Path) -> None:
    page = arena.parent / "arena.md"
    page.write_text(arena_page.PAGE.read_text(encoding="utf-8") + "\nWhy: by hand.\n")
    text = made(arena, page)
    assert text.startswith("# The arena\n")
    assert text.endswith("\nWhy: by hand.\n")
    assert "- gqa is worse than mha position=learned by 0.1013 nats (95% interval " in text
    assert "- mha position=alibi is better than mha position=learned by 0.0973 nats" in text
    assert "| gqa | 3 | 0.004 | 2.1027 ± 0.0076 | +0.1013 | " in text
    assert "tokens/s" not in text
    known = yaml.safe_load((arena.parent / "arena" / "settings.yaml").read_text("utf-8"))
    assert known["block=gpt2"]["gqa"]["seeds"] == [1, 2, 3]
    assert known["block=gpt2"]["gqa"]["optim.lr"] == 0.004
    assert (arena.parent / "arena" / "differences.png").read_bytes().startswith(b"\x89PNG")
    assert made(arena, page) == text


def lines_of(arena: Path, start: str) -> list[list[str]]:
    page = arena.parent / "arena.md"
    page.write_text(arena_page.PAGE.read_text(encoding="utf-8"))
    lines = made(arena, page).splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith(start)]


def test_each_rate_has_the_loss_of_the_newest_search_or_how_it_ended(arena: Path) -> None:
    assert lines_of(arena, "| variant | block | lr | 0.001 ")[0][3:] == ["0.001", "0.002", "0.004"]
    name = "mha position=learned"
    assert lines_of(arena, f"| {name} | gpt2 | 0") == [
        [name, "gpt2", "0.002", "2.2500", "**2.0000**", "2.5000"]
    ]
    assert lines_of(arena, "| gqa | gpt2 | 0.004 ") == [
        ["gqa", "gpt2", "0.004", "–", "diverged", "**2.1000**"]  # noqa: RUF001
    ]
    assert len(lines_of(arena, "Losses with seed 0; ")) == 1
    (edge,) = lines_of(arena, "At the lowest or the highest rate ")
    assert "gqa (gpt2, highest)" in edge[0]
    assert name not in edge[0]


def test_each_claim_is_held_against_what_its_paper_compared_with(arena: Path) -> None:
    gqa = [line for line in lines_of(arena, "| gqa | mha") if "47.1" in line[2]]
    assert [(line[1], line[4], line[5], line[7]) for line in gqa] == [
        ("mha position=learned", "gpt2", "+0.1013", "agrees"),
        ("mha", "llama", "-0.0987", "**differs**"),
    ]
    # Better than the block's baseline, and yet worse than what the paper compared with.
    (alibi,) = lines_of(arena, "| mha position=alibi | mha position=sinusoidal | better: ")
    assert (alibi[4], alibi[5], alibi[7]) == ("gpt2", "+0.3993", "**differs**")
    low, high = map(float, alibi[6].split(" to "))
    section = compare(read_runs([arena])[0]).sections[0]
    groups = {row.name: row.runs for row in section.rows}
    pair = ("mha position=sinusoidal", "mha position=alibi")
    (difference,) = compare_pairs(groups, [pair], 4)  # three to the baseline, and this
    assert difference.interval == pytest.approx((low, high), abs=6e-5)


def test_a_claim_on_a_mechanism_is_none_on_what_is_left_of_it_without_a_part(arena: Path) -> None:
    for seed, more in ((1, 0.0), (2, 0.002), (3, 0.001)):
        write(arena, "mha", seed, 1.9 + more / 3, 0.004, position="rope")
        for size in (0, 4):
            config = {
                "choices": {"attn": "gated_deltanet", "block": "gpt2", "position": "none"},
                "block": {"norm": "gpt2"},
                "attn": {"_target_": "gptattn.attention.GatedDeltaNet", "conv_size": size},
                "optim": {"lr": 0.004},
            }
            folder = arena / f"delta_{size}_{seed}"
            write_run(folder, "gated_deltanet", seed, 1.7 + more, config=config)
            shutil.copytree(folder, arena / "tuning" / folder.name)
    lines = lines_of(arena, "| gated_deltanet attn.conv_size=")
    claims = [line for line in lines if "Wiki perplexity" in line[2]]
    assert [(line[0], line[1]) for line in claims] == [
        ("gated_deltanet attn.conv_size=4", "mha position=rope")
    ]


def test_settings_are_words_unless_they_are_numbers() -> None:
    words = ["None", "True", "0.004", "1e-5", "3", "@x", "a: b", "on", "[gqa"]
    plain = [None, True, 0.004, 1e-5, 3, "@x", "a: b", "on", "[gqa"]
    assert [arena_page._plain(word) for word in words] == plain


def test_a_claim_without_its_baseline_is_left_out_by_name(arena: Path) -> None:
    for folder in arena.glob("mha_sinusoidal_*"):
        shutil.rmtree(folder)
    assert lines_of(arena, "| mha position=alibi | mha") == []
    (line,) = lines_of(arena, "Left out, ")
    assert line[0].endswith(": mha alibi against mha sinusoidal (block=gpt2).")


def test_the_picture_names_a_report_of_one_section(arena: Path) -> None:
    for folder in arena.glob("*_llama_*"):
        shutil.rmtree(folder)
    legends: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Figure, "legend", lambda self, handles, labels, **_: legends.append([*labels])
        )
        arena_page.picture(compare(read_runs([arena])[0]))
    assert legends == [["All runs, against mha position=learned"]]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ("folder", 3, "error: run folder: nowhere is not a folder"),
        ("page", 2, "error: --page: none.md cannot be read"),
        ("mark", 2, "error: --page: page.md has no mark <!-- arena: rates --> with an"),
        ("end", 2, "error: --page: page.md has no mark <!-- arena: rates --> with an"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    change: str,
    code: int,
    said: str,
    arena: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(arena.parent)
    text = arena_page.PAGE.read_text(encoding="utf-8")
    place = text.index("<!-- arena: rates -->")
    if change == "mark":
        text = text.replace("<!-- arena: rates -->", "")
    if change == "end":
        text = text[:place] + text[place:].replace("<!-- arena: end -->", "", 1)
    Path("page.md").write_text(text)
    folder = "nowhere" if change == "folder" else "arena"
    page = "none.md" if change == "page" else "page.md"
    before = {*arena.parent.rglob("*")}
    monkeypatch.setattr("sys.argv", ["arena_page.py", folder, "--page", page])
    assert ended(arena_page.main) == code
    err = capfd.readouterr().err
    assert err.startswith(said)
    assert len(err.splitlines()) == 1
    assert Path("page.md").read_text() == text
    assert {*arena.parent.rglob("*")} == before
