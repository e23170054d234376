"""Speeds are compared within rounds, where they were measured, and say why they are missing."""

import math
from pathlib import Path

import msgspec
import pytest
from runfolders import write_run, write_speeds

from gptattn.compare.speeds import are_narrow, compare_rounds
from gptattn.compare.table import load_comparison, load_runs, report_rows, section_table

TWO = {"batch_size": 16}


def write_runs(home: Path, *variants: str, **same: object) -> None:
    for variant in variants:
        for seed in (1, 2):
            write_run(home / f"{variant}_s{seed}", variant, seed, 2.0, config=TWO, **same)


def test_a_ratio_of_few_rounds_has_students_interval_of_the_logarithms():
    # The rounds' ratios are 1, 2 and 4: logarithms 0, ln 2, 2 ln 2, with deviation ln 2.
    found = compare_rounds([1.0, 2.0, 8.0], [1.0, 1.0, 2.0], comparisons=1)
    half = 4.3027 * math.log(2) / math.sqrt(3)  # t(0.975, 2) from the table
    assert found.mean == pytest.approx(2.0)
    assert found.interval == pytest.approx((2 / math.exp(half), 2 * math.exp(half)), rel=1e-4)
    wider = compare_rounds([1.0, 2.0, 8.0], [1.0, 1.0, 2.0], comparisons=2)
    assert wider.interval[1] > found.interval[1]


def test_a_burst_of_other_work_is_trimmed_from_a_ratio():
    rounds = [1.00, 1.01, 1.02, 1.03, 0.99, 0.98, 1.00, 1.01, 1.00, 5.00]
    found = compare_rounds(rounds, [1.0] * 10, comparisons=1)
    kept = [math.log(x) for x in (1.00, 1.00, 1.00, 1.01, 1.01, 1.02)]  # without two at each end
    assert found.mean == pytest.approx(math.exp(sum(kept) / 6))
    winsorized = [kept[0]] * 2 + kept + [kept[-1]] * 2
    squares = sum((x - sum(winsorized) / 10) ** 2 for x in winsorized)
    half = 2.5706 * math.sqrt(squares / (6 * 5))  # t(0.975, 5) from the table
    assert found.interval[1] == pytest.approx(found.mean * math.exp(half), rel=1e-6)


def test_measuring_ends_once_each_interval_is_within_three_percent():
    base = [1.0, 1.0, 1.0, 1.0, 1.0]
    near, far = [2.0, 2.02, 1.98, 2.0, 2.0], [2.0, 2.2, 1.8, 2.2, 1.8]
    assert are_narrow({"mha": base, "gqa": near}, "mha")
    assert not are_narrow({"mha": base, "gqa": near, "mqa": far}, "mha")


def test_a_report_has_the_measured_speeds_and_their_ratio(tmp_path):
    write_runs(tmp_path, "mha", "gqa")
    write_speeds(tmp_path, "1", 2, mha=[0.010, 0.011, 0.010], gqa=[0.005, 0.0055, 0.005])
    (section,) = load_comparison(tmp_path).sections
    heading, mha, gqa = report_rows(section)
    at = heading.index("tokens/s")
    # 16 rows of 128 tokens in 10 and 5 ms; all rounds give the ratio 2.
    assert heading[at + 1 :][:1] == ["× baseline"]  # noqa: RUF001
    assert (mha[at], gqa[at], gqa[at + 1]) == ("204,800", "409,600", "2.000 (2.000 to 2.000)")
    assert gqa[heading.index("decode tokens/s")] == "500"
    assert gqa[heading.index("decode 8 rows")] == "2,000"
    table = section_table(section)
    assert "faster" in table.words[0]
    assert any("2 threads, a processor" in line for line in table.notes)
    assert section.rows[1].fronts == ["params", "cache", "flops", "training", "decoding"]
    frame = load_runs(tmp_path)
    assert frame.loc[frame.variant == "gqa", "speed/tokens_per_s"].tolist() == [409_600] * 2
    for end in ("", " low", " high"):
        column = frame.sort_values(["variant", "seed"])[f"speed/ratio{end}"]
        assert column.tolist() == pytest.approx([2, 2, math.nan, math.nan], nan_ok=True)
    # FLOPs of a token, 738,048, times tokens/s, of a rate of 1e12.
    assert frame["speed/mfu"].max() == pytest.approx(738_048 * 409_600 / 1e12)


def test_a_damaged_record_of_speeds_counts_as_none(tmp_path):
    write_runs(tmp_path, "mha", "gqa")
    write_speeds(tmp_path, "1", 2, mha=[1.0, 1.0], gqa=[1.0, 0.0])
    (section,) = load_comparison(tmp_path).sections
    assert "speed/tokens_per_s" not in section.rows[0].metrics
    assert any("speed=true" in line for line in section.notes)


def test_neither_faster_nor_slower_is_said_where_it_is_not_shown(tmp_path):
    write_runs(tmp_path, "mha", "gqa")
    write_speeds(tmp_path, "1", 2, mha=[1.0, 1.0, 1.0], gqa=[0.9, 1.0, 1.15])
    (section,) = load_comparison(tmp_path).sections
    (words, *_) = section_table(section).words
    assert "Training speed is too close" in words
    assert not {"faster", "slower"} & {*words.split()}


def test_a_new_variants_speed_is_relative_to_the_baseline_in_its_rounds(tmp_path):
    write_runs(tmp_path, "mha", "gqa", "mqa")
    write_speeds(tmp_path, "1", 2, mha=[1.0, 1.0], gqa=[0.5, 0.5])
    write_speeds(
        tmp_path, "2", 2, mha=[2.0, 2.0], mqa=[0.5, 0.5]
    )  # on a machine that has slowed down
    (section,) = load_comparison(tmp_path).sections
    # Its tokens/s are those of the ratio, on the scale of the baseline's newest.
    assert {row.name: row.mean("speed/ratio") for row in section.rows} == {
        "mha": None,
        "gqa": pytest.approx(2.0),
        "mqa": pytest.approx(4.0),
    }
    speeds = {row.name: row.mean("speed/tokens_per_s") for row in section.rows}
    assert speeds == {"mha": 1024, "gqa": pytest.approx(2048), "mqa": pytest.approx(4096)}


def test_speeds_of_other_threads_or_other_code_are_not_compared(tmp_path):
    write_runs(tmp_path, "mha", "gqa", "mqa", "mla")
    write_speeds(tmp_path, "1", 1, mqa=[0.5, 0.5])
    write_speeds(tmp_path, "2", 2, mha=[1.0, 1.0], gqa=[0.5, 0.5], mla=[0.5, 0.5])
    for seed in (1, 2):  # trained by code that was edited since
        run = tmp_path / f"mla_s{seed}"
        made = msgspec.json.decode((run / "identity.json").read_bytes())
        made["code"]["gptattn.attention.core"] = "c1"
        (run / "identity.json").write_bytes(msgspec.json.encode(made))
    (section,) = load_comparison(tmp_path).sections
    shown = {row.name: "speed/tokens_per_s" in row.metrics for row in section.rows}
    assert shown == {"mha": True, "gqa": True, "mqa": False, "mla": False}
    assert any("mqa" in line and "1 thread, a processor" in line for line in section.notes)
    assert any("mla" in line and "speed=true" in line for line in section.notes)


def test_peaks_of_memory_are_left_out_where_runs_shared_the_machine(tmp_path):
    write_runs(tmp_path, "mha", "gqa")
    (section,) = load_comparison(tmp_path).sections
    assert {row.mean("perf/peak_memory_training_mb") for row in section.rows} == {400.0}
    write_runs(tmp_path, "mqa", summary={"shares": "machine"})
    (section,) = load_comparison(tmp_path).sections
    assert {row.mean("perf/peak_memory_training_mb") for row in section.rows} == {None}
    assert any("peak MB" in line and "shared" in line for line in section.notes)
