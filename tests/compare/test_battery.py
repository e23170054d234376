"""The battery: its table by hand, what is left out, its figures, its files."""

import re
from dataclasses import asdict
from pathlib import Path

import yaml
from building import settings
from msgspec.structs import replace as changed
from reporting import report
from runfolders import write_run
from support import refuses
from test_track import BASE, entry

from gptattn.compare.battery import (
    BatteryTask,
    Result,
    battery_table,
    make_battery,
    read_results,
    read_tasks,
)
from gptattn.compare.finished_runs import SHIPPED, read_runs
from gptattn.compare.plots import draw_battery, draw_recall
from gptattn.compare.track import make_track, read_shipped
from gptattn.machine.source_code import hash_of
from gptattn.runs.load import count_caches
from gptattn.settings.config import CONF
from gptattn.training.fingerprint import compute_fingerprint
from gptattn.training.preflight import preflight

INSTALLED = {"gptattn.model.gpt": hash_of("gptattn.model.gpt")}
SIZES = {"parity": "40", "mixed recall": "128"}
FACTS = {
    name: {"model.context_length": n, "rows": "r", "budget": "9 steps"} for name, n in SIZES.items()
}
TASKS = {
    "parity": BatteryTask(FACTS["parity"], 256, "val/accuracy_256"),
    "mixed recall": BatteryTask(FACTS["mixed recall"], 128, "val/accuracy"),
}


def result(name: str, task: str, *accuracies: float, **others) -> Result:
    """A result of one's own: with the first seed the first accuracy, and so on."""
    found = {
        seed: {"val/accuracy": 0.4} | {TASKS[task].metric: x}
        for seed, x in enumerate(accuracies, 1)
    }
    given = {"rate": 0.01, "steps": dict.fromkeys(found, 9), "chance": 0.5, "params": 1234}
    given |= {"cache": 4096, "code": INSTALLED, "facts": FACTS[task]} | others
    return Result(name=name, task=task, accuracies=found, **given)


def shipped(one: Result, **others) -> Result:
    return changed(one, code={}, fingerprint=[1.0], **others)


def make(*results: Result, failing: str = ""):
    return make_battery(results, TASKS, lambda one: one.name != failing)


def test_rows_have_accuracy_spread_and_solved_seeds_per_task_best_first():
    battery = make(
        result("gqa", "mixed recall", 1.0, 0.99, 0.98),
        result("gqa", "parity", 0.5, 0.5),
        shipped(result("mha", "mixed recall", 1.0, 1.0, 1.0, cache=None, params=5678)),
    )
    table = battery_table(battery)
    # A third of one task's seeds less than all: (2/3 + 0) / 2 against (1 + 0) / 2.
    assert table.cells == [
        ["entry", "parity", "mixed recall", "cache", "params"],
        ["mha", "\u2013", "100.0±0 3/3", "no cache", "5,678"],
        ["gqa *", "40 → 50.0±0 0/2", "99.0±1 2/3", "4,096", "1,234"],
    ]
    notes = "\n".join(table.notes)
    assert "parity 256, mixed recall 128" in notes
    assert "mha lacks seeds: parity (0 of 3)" in notes
    assert "gqa lacks seeds: parity (2 of 3)" in notes


def test_a_length_that_was_not_asked_counts_as_missing():
    asked = result("mha", "parity", 0.9, 0.9, 0.9)
    learned = changed(asked, accuracies={seed: {"val/accuracy": 1.0} for seed in (1, 2, 3)})
    table = battery_table(make(learned))
    assert table.cells[1][1] == "100 → \u2013"


def test_what_cannot_be_compared_is_left_out_with_the_reason():
    good = result("gqa", "parity", 1.0)
    battery = make(
        good,
        result("gqa", "parity", 0.5),
        result("mqa", "parity", 1.0, facts=FACTS["parity"] | {"budget": "8 steps"}),
        result("mla", "parity", 1.0, code={"gptattn.model.gpt": "0"}),
        changed(good, name="tpa", task="copy"),
        shipped(result("gqa", "parity", 0.1)),  # one's own takes its place
        shipped(result("gqa", "mixed recall", 0.1)),
        shipped(result("kda", "parity", 0.1), stale=True),
        shipped(result("dsa", "parity", 0.1)),
        shipped(result("sliding", "parity", 0.1), facts=FACTS["parity"] | {"rows": "other"}),
        failing="dsa",
    )
    assert {name: [*row] for name, row in battery.rows.items()} == {
        "gqa": ["parity", "mixed recall"]
    }
    assert battery.list_accuracies("gqa", "parity") == [1.0]
    expected = {
        "newer": ["gqa on parity"],
        "settings (budget)": ["mqa on parity"],
        "code (gptattn.model.gpt)": ["mla on parity"],
        "not one of the tasks": ["tpa on copy"],
        "mathematics": ["kda on parity"],
        "shipped losses": ["dsa on parity"],
        "settings (rows)": ["sliding on parity"],
    }
    assert [*battery.left_out.values()] == [*expected.values()]
    assert all(word in why for word, why in zip(expected, battery.left_out, strict=True))


def test_shipped_results_alone_are_shown_whatever_the_code_gives():
    assert [*make(shipped(result("dsa", "parity", 0.1)), failing="dsa").rows] == ["dsa"]


def test_a_battery_without_a_row_is_refused_with_the_reasons():
    with refuses("battery: mathematics", 3):
        make(shipped(result("kda", "parity", 0.1), stale=True))


def test_the_heat_map_has_each_accuracy_and_recall_is_plotted_by_compute():
    rows = [
        *(result("mha", task, 1.0, 0.5) for task in TASKS),
        result("mine", "mixed recall", 0.75, 0.25),
    ]
    battery = make(*rows)
    svg = draw_battery(battery).svg
    assert all(word in svg for word in ("mixed recall", "mine", "75.0±35 1/2", "50.0±35 0/2"))
    track = make_track([entry("mine", 2.5), entry("other", 2.5)], BASE)
    (plot,) = draw_recall(battery, track)
    assert "1  mine" in plot.svg
    assert "2  mha" in plot.svg
    assert "other" not in plot.svg
    assert not draw_recall(make(*rows[:2]), track)  # a single row is in both


def write_runs(folder: Path, name: str, seeds: range, *typed: str, **metrics: float) -> None:
    """Write runs as the sweep records them, with the installed code."""
    prepared = preflight(settings("experiment=battery", f"attn={name}", *typed), shapes_only=True)
    cfg, data = prepared.cfg, prepared.data
    for seed in seeds:
        config = asdict(cfg) | {"seed": seed, "overrides": [f"attn={name}", *typed, f"seed={seed}"]}
        write_run(
            folder / f"{name} {' '.join(typed)}_s{seed}",
            name,
            seed,
            1.0,
            config=config,
            metrics={"val/accuracy": 1.0} | metrics,
            data=data.facts(),
            identity={"text": data.text_hash, "code": INSTALLED},
        )


SWEEPER = yaml.safe_load((CONF / "experiment" / "battery.yaml").read_text())["hydra"]["sweeper"]
PARITY, _, _, RECALL, *_ = (variant.split() for variant in SWEEPER["variants"])


def test_the_command_prints_the_table_of_a_folder_and_ships_it(tmp_path, monkeypatch, capfd):
    home, seeds = tmp_path / "outputs" / "battery", range(1, 4)
    tasks = read_tasks(lambda cfg: "")
    assert [*tasks] == ["parity", "S3", "S5", "mixed recall", "noisy recall", "selective copy"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(SHIPPED, "battery", tmp_path / "shipped")
    length = {"val/accuracy_256": 0.5}
    write_runs(home, "mha", seeds, *RECALL)
    write_runs(home, "mha", seeds, *PARITY, **length)
    write_runs(home, "gqa", range(1, 3), *PARITY, **length)  # not finished, so not shipped
    write_runs(home, "mha", seeds, *(o for o in RECALL if "steps" not in o), "budget.steps=7")
    report(home, "ship=true")
    out, _ = capfd.readouterr()
    assert re.search(r"mha \* +100 → 50\.0±0 0/3 .* 100\.0±0 3/3", out)
    assert "left out: mha on mixed recall: different settings (budget)" in out
    assert "lacks seeds: S3 (0 of 3), S5 (0 of 3), noisy recall (0 of 3)" in out
    made = {one.name for one in (home / "comparison").glob("[!.]*")}
    assert made == {"battery.csv", "battery.html", "battery.svg", "battery.png"}
    kept = read_shipped(tmp_path / "shipped", Result)
    assert {(one.name, one.task) for one in kept} == {("mha", "parity"), ("mha", "mixed recall")}
    assert kept[0].accuracies[2] in ({"val/accuracy": 1.0}, {"val/accuracy": 1.0} | length)
    assert kept[0].fingerprint == compute_fingerprint(["experiment=battery", "attn=mha"])
    # Keys and values of 6 layers, 64 numbers of 2 bytes each, 64 tokens.
    assert {one.cache for one in kept if one.task == "mixed recall"} == {2 * 6 * 64 * 2 * 64}
    report(tmp_path / "shipped")
    assert re.search(r"mha +100 → 50\.0±0 0/3 ", capfd.readouterr().out)


def test_runs_of_several_rates_are_not_one_result(tmp_path):
    write_runs(tmp_path, "mha", range(1, 3), *PARITY)
    write_runs(tmp_path, "mha", range(3, 4), *PARITY, "optim.lr=0.1")
    found = read_results(read_runs([tmp_path])[0], count_caches)
    assert sorted([*one.steps] for one in found) == [[1, 2], [3]]
