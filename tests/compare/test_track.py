"""The attention track: effective compute by hand and by simulation, verdicts, entries and files."""

import json
import math
import re
import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest
import yaml
from building import settings
from msgspec.structs import replace as changed
from reporting import report
from support import command, refuses, tiny

from gptattn.cli.commands.new import write_variant
from gptattn.compare.effective_compute import (
    RATE_ERROR,
    EffectiveCompute,
    Spread,
    correct_holm,
    decide,
    difference_interval,
    effective_compute,
    fit_curve,
    share_spread,
)
from gptattn.compare.finished_runs import SHIPPED, find_experiment, read_runs
from gptattn.compare.plots import draw_track
from gptattn.compare.track import (
    TRAIN_BASELINE,
    Entry,
    list_regime,
    make_track,
    name_entry,
    read_entries,
    read_shipped,
    track_table,
    write_shipped,
)
from gptattn.machine.source_code import hash_of
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import count_caches
from gptattn.settings.identity import flat, result_settings
from gptattn.training.preflight import preflight

# The loss falls by 1 with each doubling: a straight line, which the curve must follow exactly.
LINE = {2.0**i: [10.0 - i - 0.1, 10.0 - i + 0.1] for i in range(4)}


def effective(loss: float, spread: Spread, seeds=1, compute=2.0) -> EffectiveCompute:
    """The effective compute of so many equal losses, on a curve without error."""
    exact = {spent: [10.0 - math.log2(spent)] * 2 for spent in LINE}
    return effective_compute([loss] * seeds, compute, fit_curve(exact), spread)


def test_the_effective_compute_is_that_of_the_curve_at_the_loss():
    spread = Spread(1e-9, 50)
    # The baseline has 8.5 after 2 ** 1.5; the entry used 2.
    found = effective(8.5, spread, seeds=2)
    assert found.value == pytest.approx(2**0.5, rel=1e-4)
    assert found.p < 1e-9
    assert effective(11.0, spread).value == 0.0  # less than the least budget
    assert effective(6.0, spread).value == math.inf
    same = effective(9.0, spread)
    assert same.value == pytest.approx(1.0, rel=1e-4)
    assert same.equivalent


def test_with_an_exact_curve_the_interval_is_the_losss_t_interval():
    # By hand: t of 10 degrees at 97.5% is 2.2281; 0.1 / sqrt(4) * 2.2281 = 0.1114 doublings.
    found = effective(9.0, Spread(0.1, 10), seeds=4)
    assert [math.log2(end) for end in found.interval] == pytest.approx([-0.1114, 0.1114], abs=1e-3)
    assert found.p == pytest.approx(1.0, abs=1e-3)
    # 5% of the compute is 0.0704 doublings, 1.41 standard errors; t at 95% is 1.812.
    assert not found.equivalent
    assert effective(9.0, Spread(0.1, 10), seeds=9).equivalent


def test_a_difference_of_one_percent_is_not_claimed():
    by = {x: effective(9 - math.log2(x), Spread(0.001, 50)).p for x in (1 / 1.05, 1.01, 1.05)}
    assert by[1.01] > 0.9
    assert max(by[1.05], by[1 / 1.05]) < 1e-6


def test_past_the_baselines_budgets_only_what_the_nearest_shows_is_claimed():
    # The baseline ends at 10 after a budget of 1, which may end anywhere above 10 for less compute,
    # and at 7 after 8.
    verdicts = {(9.0, 0.5): "better", (10.5, 0.5): "open", (9.0, 9.0): "worse", (6.5, 9.0): "open"}
    for (loss, flops), verdict in verdicts.items():
        found = effective(loss, Spread(0.1, 10), 3, flops)
        assert decide(found.p, found) == verdict


def test_the_choice_of_both_rates_is_in_each_interval():
    # Without spread over seeds: 1.96 times the square root of 2, in losses and in doublings.
    half, sure = 1.95996 * 2**0.5 * RATE_ERROR, Spread(0.0, 10**6)
    ends = [math.log2(end) for end in effective(9.0, sure).interval]
    assert ends == pytest.approx([-half, half], rel=0.01)
    assert difference_interval([9.0], [8.0], sure, sure)[1] == pytest.approx((1 - half, 1 + half))


def test_the_curves_error_is_that_of_the_mean_at_a_budget():
    curve = fit_curve(LINE)
    # Two values 0.2 apart: the standard error of their mean is 0.1.
    assert curve.errors[[0, -1]] == pytest.approx([0.1, 0.1], rel=1e-3)
    assert curve.losses[[0, -1]] == pytest.approx([10.0, 7.0])
    # 0.3 / sqrt(2) where it is shared with entries.
    shared = fit_curve(LINE, {8.0: 0.3})
    assert shared.errors[[0, -1]] == pytest.approx([0.1, 0.2121], rel=1e-3)


def test_the_spread_is_shared_but_for_groups_that_are_shown_to_vary_more():
    shared = Spread(pytest.approx(math.sqrt(4 / 3)), 3)  # squares 2 and 2, over 2 + 1 degrees
    assert share_spread([[1.0, 2.0, 3.0], [0.0, 2.0]]) == [shared] * 2
    generator = np.random.default_rng(1)
    narrow, wide = (generator.normal(scale=scale, size=20).tolist() for scale in (1.0, 10.0))
    one, other, own = share_spread([narrow, narrow[::-1], wide])
    assert one == other == Spread(pytest.approx(np.std(narrow) * math.sqrt(20 / 19)), 38)
    assert own == Spread(pytest.approx(np.std(wide, ddof=1)), 19)
    # One run of eight that diverged.
    *others, own = share_spread([*([[-1.0, 1.0] * 4] * 50), [-1.0, 1.0] * 3 + [1.0, 9.0]])
    assert others == [Spread(pytest.approx(math.sqrt(8 / 7)), 350)] * 50
    assert own.degrees == 7


def test_holms_correction_is_that_of_the_papers_steps():
    # 4 * 0.01, then 3 * 0.015 which is above it, then 2 * 0.02 which may not fall below.
    assert correct_holm([0.02, 0.01, 0.015, 0.5], [1.0] * 4) == pytest.approx(
        [0.045, 0.04, 0.045, 0.5]
    )
    # 2 * 0.02 / 0.5, as 0.01 / 0.1 is above it.
    assert correct_holm([0.02, 0.01], [0.5, 0.1]) == pytest.approx([0.08, 0.1])


def test_a_verdict_needs_a_corrected_p_or_an_interval_within_five_percent():
    verdicts = {
        (0.04, 1.2, False): "better",
        (0.04, 0.8, False): "worse",
        (0.04, 1.02, True): "better, by less than 5%",
        (0.06, 1.02, True): "equivalent",
        (0.06, 1.2, False): "open",
    }
    for (p, value, equivalent), verdict in verdicts.items():
        assert decide(p, EffectiveCompute(value, (0.0, 9.0), p, equivalent)) == verdict


@pytest.mark.slow
@pytest.mark.parametrize("effect", [1.0, 1.1])
def test_intervals_of_simulated_entries_hold_the_true_effect_in_95_of_100(effect):
    generator = np.random.default_rng(7)

    def draw(mean: float, seeds: int) -> list[float]:
        """Return losses at a rate that was chosen, which moves all of them."""
        moved = mean + RATE_ERROR * generator.normal()
        return (moved + 0.0045 * generator.normal(size=seeds)).tolist()

    held = 0
    for _ in range(1000):
        base = {spent: draw(1 + 0.3 / spent, 20) for spent in (0.5, 1.0, 2.0, 4.0)}
        losses = draw(1 + 0.3 / effect, 3)
        spread = share_spread([losses, base[1.0], *(draw(2.0, 3) for _ in range(50))])[0]
        low, high = effective_compute(losses, 1.0, fit_curve(base), spread).interval
        held += low <= effect <= high
    assert 0.93 <= held / 1000 <= 0.97


NEW = range(21, 24)


def entry(name: str, loss: float = 3.0, steps: int = 100, seeds: range = NEW, **others) -> Entry:
    losses = {seed: loss + 0.001 * (seed % 3 - 1) for seed in seeds}
    given = {"flops": 1e6 * steps, "params": 7, "caches": [256, 8192], "rate": 0.01}
    given |= {"code": INSTALLED, "regime": {"batch_size": "8"}} | others
    return Entry(name=name, steps=steps, losses=losses, **given)


def shipped(*of_ones_own: Entry) -> list[Entry]:
    return [changed(one, code={}, fingerprint=[one.loss]) for one in of_ones_own]


def bases(seeds: range, **others) -> list[Entry]:
    budgets = (50, 100, 200, 400)
    return [entry("mha", 3 - math.log2(x / 100), x, seeds, **others) for x in budgets]


INSTALLED = {"gptattn.model.gpt": hash_of("gptattn.model.gpt")}
BASE = shipped(*bases(range(1, 13)))


def test_entries_stand_beside_the_baseline_of_their_steps_the_best_first():
    worse = entry("mqa", 4.0, speeds=[2.0, 2.0], machine="m")
    better = entry("mine", 2.5, flops=2e8, caches=None)
    track = make_track([worse, better], BASE)
    assert [row.entry.name for row in track.rows] == ["mine", "mqa"]
    assert [row.verdict for row in track.rows] == ["worse", "worse"]  # for twice the FLOPs
    # 2.5 after 100 * 2 ** 0.5 steps of the baseline, where the entry used twice the FLOPs.
    assert track.rows[0].effective.value == pytest.approx(2**0.5 / 2, rel=0.01)
    assert track.rows[0].difference == pytest.approx(-0.5, abs=0.01)
    # The baseline would take half of the steps, at half the speed.
    assert track.rows[1].time[0] == pytest.approx(0.5 * 2, rel=0.01)
    assert track.rows[1].time[1] == pytest.approx(np.multiply(2, track.rows[1].effective.interval))
    table = track_table(track)
    assert "measured on m by" in "".join(table.notes)
    _, base, *rows = table.cells
    assert [base[:2], base[-3:-1]] == [["mha", "12"], ["256", "8,192"]]
    assert [row[0] for row in rows] == ["mine *", "mqa *"]
    assert rows[0][-3:-1] == ["no cache"] * 2
    assert "mine" in draw_track(track).svg


def test_the_time_has_the_errors_of_speed_and_of_the_effective_compute():
    # Speeds of 2 and 8 are 4 in the middle, times exp(12.706 log(2)): Student's t, one degree.
    (row,) = make_track([entry("mine", 2.5, flops=2e8, speeds=[2.0, 8.0])], BASE).rows
    value, ends = row.effective.value, row.effective.interval
    assert row.time[0] == pytest.approx(2 * 4 * value)
    halves = [math.hypot(math.log(end / value), 12.706 * math.log(2)) for end in ends]
    expected = [2 * 4 * value * math.exp(sign * h) for sign, h in zip((-1, 1), halves, strict=True)]
    assert row.time[1] == pytest.approx(expected, rel=1e-3)


def test_what_cannot_be_compared_is_left_out_by_name():
    other = {"regime": {"batch_size": "9"}}
    own = [
        entry("mine"),
        entry("mine", 9.0),  # older
        entry("few", seeds=range(21, 23)),  # a shipped one takes its place
        entry("picked", seeds=range(22, 25)),
        entry("old", code={"gptattn.model.gpt": "0"}),
        entry("long", steps=300),
        entry("wide", **other),
        *(entry("mha", 9.0, seeds=range(1, 4)), entry("mha", 9.0, seeds=range(1, 4), **other)),
    ]
    others = [
        *(entry("mine", 9.0), entry("few", 3.5), entry("mla", **other)),
        *(entry("tpa", regime={"batch_size": "8", "text": "other"}), entry("kda", stale=True)),
    ]
    track = make_track(own, [*BASE, *shipped(*others)])
    assert [*track.baseline.values()] == BASE
    rows = [(row.entry.name, row.entry.is_shipped, row.entry.loss) for row in track.rows]
    assert rows == [("mine", False, pytest.approx(3.0)), ("few", True, pytest.approx(3.5))]
    expected = {
        "newer": ["mine"],
        "seeds 21, 22;": ["few"],
        "seeds 22, 23, 24;": ["picked"],
        f"code (gptattn.model.gpt); {TRAIN_BASELINE}": ["old"],
        "300 steps": ["long"],
        f"settings (batch_size); {TRAIN_BASELINE}": ["wide"],
        "has more seeds": ["mha at 100 steps"],
        "settings (batch_size)": ["mha at 100 steps", "mla"],
        "text": ["tpa"],
        "mathematics": ["kda"],
    }
    assert [*track.left_out.values()] == [*expected.values()]
    assert all(word in why for word, why in zip(expected, track.left_out, strict=True))
    assert "left out: kda: its mathematics" in "".join(track_table(track).notes)


def test_ones_own_baseline_counts_if_its_budgets_are_enough():
    own = bases(range(1, 4), code={"core": "2"})
    stray = entry("mha", seeds=range(1, 3), code={"core": "3"})
    for more in ([], [stray]):  # none is shipped for this code
        assert [*make_track([*more, *own], BASE).baseline.values()] == own
    begun = bases(range(1, 2), code={"core": "2"})
    assert [*make_track(begun, BASE).baseline.values()] == BASE


def test_a_baseline_that_makes_no_curve_is_refused():
    level = [changed(one, losses={1: 3.0, 2: 3.1}) for one in BASE]
    of_one_seed = [*BASE[:2], *shipped(*bases(range(1, 2)))]
    for base, problem in ((BASE[:2], "budgets"), (of_one_seed, "budgets"), (level, "fall")):
        with refuses(f"track: {problem}", 3):
            make_track([], base)


def test_shipped_entries_are_compared_if_the_code_gives_their_fingerprint():
    others, asked = [*BASE, *shipped(entry("gqa"), entry("mqa"))], []

    def compared(*own: Entry, failing: str = "") -> tuple[set[str], list[list[str]]]:
        def holds(entry: Entry) -> bool:
            asked.append(entry.name)
            return entry.name != failing

        track = make_track(own, others, holds)
        return {row.entry.name for row in track.rows}, [*track.left_out.values()]

    assert compared(failing="gqa") == ({"gqa", "mqa"}, [])
    assert not asked  # they were made by the same code
    mine = entry("mine")
    assert compared(mine, failing="gqa") == ({"mine", "mqa"}, [["gqa"]])
    # One's own entry has no baseline, and the shipped ones have theirs.
    assert compared(mine, failing="mha") == ({"gqa", "mqa"}, [["mine"]])
    rows, _ = compared(mine, *bases(range(1, 4)), failing="mha")
    assert rows == {"gqa", "mqa", "mine"}


def test_rows_of_several_budgets_are_told_apart_by_their_steps():
    track = make_track([entry("mine", steps=steps) for steps in (100, 200)], BASE)
    assert [cells[0] for cells in track_table(track).cells[1:]] == [
        *("mha after 100 steps", "mha after 200 steps"),
        *("mine after 100 steps *", "mine after 200 steps *"),
    ]


def test_shipped_entries_are_read_back_and_a_damaged_file_is_named(tmp_path):
    entries = [*BASE, changed(BASE[0], name="mha part=[gate]")]
    write_shipped(entries, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mha.json", "mha_part_gate.json"]
    assert read_shipped(tmp_path, Entry) == entries
    (tmp_path / "mha.json").write_text("[{}]")
    with refuses("*: mha.json", 3):
        read_shipped(tmp_path, Entry)


def test_runs_of_the_track_become_entries_with_their_cache_at_both_lengths(tmp_path):
    assert command(tmp_path, *tiny(tmp_path, "attn=gqa", "attn.window=0.5", "seed=21")) == 0
    runs, _ = read_runs([tmp_path])
    assert find_experiment(runs) is None
    moved = replace(runs[0], folder=tmp_path / "track_gate" / "gqa_s21_123456")
    assert find_experiment([moved]) == "track_gate"
    (found,) = read_entries(runs, count_caches)
    assert "gqa attn.window=0.5" in found.name
    assert found.regime["text"] == runs[0].settings["text"]
    assert found.losses == {21: runs[0].metrics["val/bits_per_byte"]}
    assert not found.is_baseline
    # Two key/value heads of 4 numbers, of 2 bytes each, for keys and values; windows of 8 tokens.
    assert found.caches == [2 * 2 * 4 * 2 * 8] * 2
    assert found.flops == runs[0].metrics["cost/flops_per_token"] * found.steps * 4 * 16


def test_a_module_without_a_cache_has_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_variant("uncached")
    assert command(tmp_path, *tiny(tmp_path, "attn=uncached")) == 0
    (found,) = read_entries(read_runs([tmp_path])[0], count_caches)
    assert found.caches is None


def test_an_entry_has_one_name_in_whatever_order_it_is_typed():
    names = {
        ("seed=1",): "mha",
        ("part=[gate]",): "mha part=[gate]",
        ("part=[gate]", "attn=mha"): "mha part=[gate]",
        ("position=none", "+attn.window=8", "attn=gqa"): "gqa attn.window=8 position=none",
        ("attn.window=8",): "mha attn.window=8",
        ("position=rope", "recipe=gemma3"): "recipe=gemma3 position=rope",
        ("part=[qk_norm, gate]",): "mha part=[qk_norm,gate]",
    }
    assert {typed: name_entry(typed) for typed in names} == names


@pytest.mark.parametrize("experiment", ["track", "track_gate"])
def test_a_run_records_the_settings_that_its_experiment_gives(experiment):
    cfg = settings(f"experiment={experiment}", "attn=gqa")
    recorded = preflight(cfg, shapes_only=True).cfg
    regimes = [list_regime(result_settings(flat(asdict(one)))) for one in (cfg, recorded)]
    assert regimes[0] == regimes[1]


def test_the_command_prints_the_table_of_a_folder_and_ships_it(runs, tmp_path, monkeypatch, capfd):
    home = tmp_path / "outputs" / "track"
    made = [("mha", steps, seed) for steps in (50, 100, 200) for seed in (1, 2)]
    for name, steps, seed in [*made, *(("gqa", 100, seed) for seed in NEW)]:
        folder = home / f"{name}_s{seed}_{steps:06}"
        shutil.copytree(runs("mha"), folder)
        kept = RunFolder(folder)
        cfg = settings("experiment=track", f"attn={name}", f"budget.steps={steps}")
        record = asdict(cfg) | {"seed": seed, "overrides": [f"attn={name}", "x=1"]}
        kept.config_file.write_text(yaml.safe_dump(record))
        bits = {"val/bits_per_byte": 9 - math.log2(steps) + seed / 500}
        record = json.loads(kept.summary_file.read_text())
        record |= {"seed": seed, "steps": steps, "completed": []}
        kept.summary_file.write_text(json.dumps(record | {"metrics": record["metrics"] | bits}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(SHIPPED, "track", tmp_path / "shipped")
    monkeypatch.setattr("gptattn.training.fingerprint.compute_fingerprint", lambda given: [4.0])
    report(home, "ship=true")
    out, err = capfd.readouterr()
    # Seeds add 0.003 on average to the baseline, 0.044 to the entry: 2 ** -0.041 = 0.972.
    assert re.search(r"gqa \* 3 .* \+0\.0410 ± .* 0\.97 \(0\.9. to 0\.98\)", out)
    made = {one.name for one in (home / "comparison").glob("[!.]*")}
    assert made == {"track.csv", "track.html", "track.svg", "track.png"}
    assert {file.name for file in (tmp_path / "shipped").iterdir()} == {"mha.json", "gqa.json"}
    assert err.count("reproduces") == 4
    (gqa,) = [one for one in read_shipped(tmp_path / "shipped", Entry) if one.name == "gqa"]
    assert gqa.fingerprint == [4.0]
    for folder in home.glob("mha_*_000050"):  # the shipped baseline takes their place
        shutil.rmtree(folder)
    report(home, "ship=true")  # and stays in its file, beside what was trained again
    assert [one.steps for one in read_shipped(tmp_path / "shipped", Entry)] == [100, 50, 100, 200]
    assert "reproduces" not in capfd.readouterr().err
    report(tmp_path / "shipped")
    assert re.search(r"gqa +3 ", capfd.readouterr().out)
