"""Reading run folders, and grouping them over seeds."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runfolders import curve_rows, write_curve, write_run

from gptattn.cli.commands.compare import main
from gptattn.compare import curves
from gptattn.compare.curves import read_curves
from gptattn.compare.finished_runs import read_runs
from gptattn.compare.groups import group_runs, pick_baseline
from gptattn.compare.makings import differences_in_making
from gptattn.compare.sections import comparable_sets
from gptattn.compare.table import rows, terminal_table
from gptattn.errors import ConfigError, DataError
from gptattn.runs import rows as record
from gptattn.runs.folder import CONFIG_BYTES


def test_seeds_of_one_variant_are_one_row_with_mean_and_interval(tmp_path: Path) -> None:
    for seed, loss in ((1, 2.0), (2, 2.5), (3, 3.0)):
        write_run(tmp_path / f"gqa_s{seed}", "gqa", seed, loss)
    heading, row = rows(read_runs([tmp_path])[0])
    cells = dict(zip(heading, row, strict=True))
    # By hand: mean 2.5, deviation 0.5; t(0.975, 2) = 4.3027 over the root of 3.
    assert (cells["variant"], cells["seeds"], cells["val loss"]) == ("gqa", "3", "2.5000 ± 1.2421")


def test_runs_that_differ_in_any_setting_are_never_averaged(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "mha", 1, 2.0)
    write_run(tmp_path / "b", "mha", 2, 3.0, d_mlp=512)
    groups = group_runs(read_runs([tmp_path])[0])
    assert set(groups) == {"mha model.d_mlp=None", "mha model.d_mlp=512"}


def test_of_a_repeated_seed_the_newest_run_counts(tmp_path: Path) -> None:
    for name, seed, loss, time in (("b", 1, 2.0, 10), ("a", 1, 2.1, 20), ("c", 2, 2.5, 5)):
        write_run(tmp_path / name, "mha", seed, loss)
        os.utime(tmp_path / name / "summary.json", (time, time))
    (members,) = group_runs(read_runs([tmp_path])[0]).values()
    assert [(run.seed, run.metrics["val/loss"]) for run in members] == [(1, 2.1), (2, 2.5)]


def test_the_name_of_a_file_stands_for_its_settings_where_it_tells_all(tmp_path: Path) -> None:
    def run(name: str, model: str, d_model: int, **more: object) -> None:
        choices = {"choices": {"attn": "mha", "model": model}}
        write_run(tmp_path / name, "mha", 1, 2.0, config=choices, d_model=d_model, **more)

    run("a", "tiny", 64, num_layers=2)
    run("b", "nano", 128, num_layers=4)
    assert set(group_runs(read_runs([tmp_path])[0])) == {"mha model=tiny", "mha model=nano"}
    run("c", "nano", 256, num_layers=4)
    assert "mha model.d_model=256 model.num_layers=4" in group_runs(read_runs([tmp_path])[0])


def test_steps_of_another_batch_are_another_budget(tmp_path: Path) -> None:
    for name, batch in (("a", 16), ("b", 8)):
        write_run(tmp_path / name, name, 1, 2.0, config={"batch_size": batch})
    sets = comparable_sets(read_runs([tmp_path])[0], split=False)
    assert [found.title for found in sets] == ["batch_size=8", "batch_size=16"]


def test_values_that_are_cut_short_in_names_do_not_merge_groups(tmp_path: Path) -> None:
    for name in ("x", "y"):
        config = {"tokenizer": {"_target_": "t", "characters": "abcdefghijklmnopqrstuv" + name}}
        write_run(tmp_path / name, "mha", 1, 2.0, config=config)
    assert len(group_runs(read_runs([tmp_path])[0])) == 2


DAMAGED_SUMMARIES = [
    "",
    "{",
    "[]",
    "null",
    '{"variant": "mha"}',
    '{"variant": "mha", "seed": 1, "data": {}, "hyperparameters": {}}',
    "[" * 100_000,
    "\x00",
]
WRONG_VALUES: dict[str, Any] = {
    "seed": "one",
    "variant": 7,
    "metrics": [1, 2],
    "data": None,
    "hyperparameters": {},
    "status": "running",
}


def only_the_good_one_is_read(tmp_path: Path, bad: Path, reason: str = "") -> None:
    runs, passed_over = read_runs([tmp_path])
    assert [run.folder.name for run in runs] == ["good"]
    (line,) = passed_over
    assert line.startswith(f"{bad}: ")
    assert reason in line
    assert "\n" not in line


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A run to be damaged, beside a good one."""
    write_run(tmp_path / "good", "mha", 1, 2.0)
    return write_run(tmp_path / "bad", "mha", 2, 2.0)


@pytest.mark.parametrize("content", DAMAGED_SUMMARIES)
def test_a_damaged_summary_is_named_and_passed_over(
    content: str, tmp_path: Path, bad: Path
) -> None:
    (bad / "summary.json").write_text(content)
    only_the_good_one_is_read(tmp_path, bad)


def test_a_summary_written_by_half_is_named_and_passed_over(tmp_path: Path, bad: Path) -> None:
    summary = bad / "summary.json"
    summary.write_bytes(summary.read_bytes()[:200])
    only_the_good_one_is_read(tmp_path, bad, "half-written")


@pytest.mark.parametrize("key", WRONG_VALUES)
def test_a_summary_with_a_wrong_value_is_named_and_passed_over(
    key: str, tmp_path: Path, bad: Path
) -> None:
    summary = json.loads((bad / "summary.json").read_text())
    (bad / "summary.json").write_text(json.dumps(summary | {key: WRONG_VALUES[key]}))
    only_the_good_one_is_read(tmp_path, bad)


@pytest.mark.parametrize(
    "loss", ["NaN", "Infinity", "null", '"2.0"', "1e300", "1" + "0" * 400, "9" * 5000]
)
def test_a_loss_that_is_no_finite_number_is_named_and_passed_over(
    loss: str, tmp_path: Path, bad: Path
) -> None:
    text = (bad / "summary.json").read_text()
    (bad / "summary.json").write_text(text.replace('"val/loss": 2.0', f'"val/loss": {loss}'))
    only_the_good_one_is_read(tmp_path, bad)


def test_a_metric_that_is_missing_or_nan_leaves_a_gap_in_the_table(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "mha", 1, 2.0, metrics={"perf/tokens_per_s": float("nan")})
    summary = json.loads((run / "summary.json").read_text())
    del summary["metrics"]["cost/params"]
    (run / "summary.json").write_text(json.dumps(summary))
    cells = dict(zip(*rows(read_runs([tmp_path])[0]), strict=True))
    assert cells["tokens/s"] == cells["params"] == "\N{EN DASH}"
    assert cells["val loss"] == "2.0000"


ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "- 1",
        "text",
        "a: !!python/object/apply:os.system [true]",
        ALIASES,
        ALIASES.replace("[", "{p: ").replace("]", "}").replace(", ", ", q: ", 1),
        "a: &a {b: *a}",
        "a: &a [*a]",
        "[" * 5_000,
        "x: " + "y" * CONFIG_BYTES,
        "a: \t\x01",
    ],
    ids=range(12),
)
def test_a_damaged_or_hostile_config_is_named_and_passed_over(
    content: str, tmp_path: Path, bad: Path
) -> None:
    (bad / "config.yaml").write_text(content)
    only_the_good_one_is_read(tmp_path, bad)


def test_a_run_that_is_not_finished_is_named_and_passed_over(tmp_path: Path, bad: Path) -> None:
    (bad / "summary.json").unlink()
    only_the_good_one_is_read(tmp_path, bad, "not finished")


@pytest.mark.parametrize("file", ["summary.json", "config.yaml"])
def test_a_pipe_or_folder_in_place_of_a_file_does_not_block(
    file: str, tmp_path: Path, bad: Path
) -> None:
    (bad / file).unlink()
    os.mkfifo(bad / file)
    only_the_good_one_is_read(tmp_path, bad)
    (bad / file).unlink()
    (bad / file).mkdir()
    only_the_good_one_is_read(tmp_path, bad)


@pytest.mark.parametrize("file", ["summary.json", "config.yaml", "metrics.jsonl"])
def test_what_may_not_be_read_is_named_and_passed_over(
    file: str, tmp_path: Path, bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_curve(bad, 2.0)
    opened = os.open, Path.open

    def refusing(open_it: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
            # Permissions would not do: tests may run as root.
            if path == bad / file:
                raise PermissionError(13, "Permission denied", str(path))
            return open_it(path, *args, **kwargs)

        return wrapped

    monkeypatch.setattr(os, "open", refusing(opened[0]))
    monkeypatch.setattr(Path, "open", refusing(opened[1]))
    if file == "metrics.jsonl":
        assert read_curves(bad)[1] == f"{bad}: metrics.jsonl: Permission denied: no curves"
    else:
        only_the_good_one_is_read(tmp_path, bad, "Permission denied")


def test_a_folder_that_cannot_be_listed_is_named_and_passed_over(
    tmp_path: Path, bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if Path(path) == bad:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    only_the_good_one_is_read(tmp_path, bad, "Permission denied")


def test_loops_of_links_have_an_end_and_no_run_is_read_twice(tmp_path: Path) -> None:
    run = write_run(tmp_path / "sweep" / "a", "mha", 1, 2.0)
    (run / "loop").symlink_to(tmp_path)
    (tmp_path / "other").symlink_to(tmp_path / "sweep")
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    runs, passed_over = read_runs([tmp_path, tmp_path / "sweep", run])
    assert len(runs) == 1
    assert passed_over == []


def test_names_from_files_cannot_steer_the_terminal(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "m\x1b[31mha\n[bold]", 1, 2.0)
    write_run(tmp_path / "\x1b[2J", "mha", 1, 2.0)
    (tmp_path / "\x1b[2J" / "summary.json").write_text("{")
    runs, passed_over = read_runs([tmp_path])
    assert runs[0].variant == "m\N{REPLACEMENT CHARACTER}[31mha\N{REPLACEMENT CHARACTER}[bold]"
    assert "\x1b" not in passed_over[0]
    column = terminal_table(runs, "[red]", 200).columns[0]
    assert str(next(iter(column.cells))) == runs[0].variant


def test_the_copy_of_hydra_is_not_taken_for_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "mha", 1, 2.0)
    (run / ".hydra").mkdir()
    (run / ".hydra" / "config.yaml").write_text("{}")
    assert len(read_runs([tmp_path])[0]) == 1
    assert read_runs([tmp_path])[1] == []


def test_folders_without_a_finished_run_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no finished run"):
        read_runs([tmp_path])
    with pytest.raises(DataError, match="is no folder"):
        read_runs([tmp_path / "none"])
    write_run(tmp_path / "a", "mha", 1, 2.0)
    (tmp_path / "a" / "summary.json").unlink()
    with pytest.raises(DataError, match=r"1 passed over, as .*not finished"):
        read_runs([tmp_path])


@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_table_names_the_variants_at_any_width(
    columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    write_run(tmp_path / "a", "mha_wrapper", 1, 2.0)
    monkeypatch.setattr("sys.argv", ["gptattn-compare", str(tmp_path), "--no-files"])
    monkeypatch.setitem(os.environ, "COLUMNS", columns)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert "mha_wrapper" in capsys.readouterr().out


def test_settings_that_no_result_depends_on_do_not_part_runs(tmp_path: Path) -> None:
    config: dict[str, Any] = {"sweep": {"jobs": 2}, "experiment_name": "a", "allow_targets": ["x"]}
    write_run(tmp_path / "a", "mha", 1, 2.0, config=config)
    # The default number of steps, given: the same budget.
    budget = {"steps": 1000, "tokens": None, "default_steps": 500}
    write_run(tmp_path / "b", "mha", 2, 2.0, config={"budget": budget, "experiment_name": "b"})
    assert [len(members) for members in group_runs(read_runs([tmp_path])[0]).values()] == [2]


def test_settings_cut_short_in_names_still_give_two_names(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "mha", 1, 2.0, init="x" * 30 + "a")
    write_run(tmp_path / "b", "mha", 1, 2.0, init="x" * 30 + "b")
    assert len(group_runs(read_runs([tmp_path])[0])) == 2


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"data": {"text_sha256": "zzz"}}, "data (text abcdefgh, 99 validation tokens: 2 runs;"),
        ({"data": {"val_tokens": 98}}, "data ("),
        ({"data": {"tokenizer": "char"}}, "tokenizer (byte ByteTokenizer: 2 runs; char"),
        ({"config": {"tokenizer": {"_target_": "ByteTokenizer", "lower": True}}}, "lower=True"),
        ({"config": {"validation": {"fraction": 0.2}}}, "validation (validation.fraction=0.1: 2"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_or_split(
    other: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write_run(tmp_path / "a", "mha", 1, 2.0)
    write_run(tmp_path / "b", "gqa", 1, 2.0)
    write_run(tmp_path / "c", "gqa", 2, 2.0, **other)
    runs = read_runs([tmp_path])[0]
    with pytest.raises(ConfigError) as error:
        comparable_sets(runs, split=False)
    assert str(error.value).startswith("comparison: the runs differ in ")
    assert named in str(error.value)
    assert str(error.value).endswith("; --split reports each apart, or give fewer folders")
    assert sorted(len(found.runs) for found in comparable_sets(runs, split=True)) == [1, 2]


def test_a_matched_width_is_no_reason_to_refuse(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "mha", 1, 2.0)
    write_run(tmp_path / "b", "gqa", 1, 2.0, d_mlp=545, config={"match": "params"})
    (found,) = comparable_sets(read_runs([tmp_path])[0], split=False)
    assert found.title == ""


def test_the_baseline_is_mha_or_the_first_or_the_one_that_is_named(tmp_path: Path) -> None:
    for variant, width in (("mqa", 1), ("mqa", 2), ("gqa", 1), ("mha", 1)):
        write_run(tmp_path / f"{variant}{width}", variant, 1, 2.0, d_mlp=width)
    groups = group_runs(read_runs([tmp_path])[0])
    assert pick_baseline(groups, None) == "mha"
    assert pick_baseline(groups, "gqa") == "gqa"
    assert pick_baseline(groups, "mqa model.d_mlp=2") == "mqa model.d_mlp=2"
    assert pick_baseline(groups, "mqa") is None
    del groups["mha"]
    assert pick_baseline(groups, None) == "gqa"


def test_differing_code_and_machines_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "mha", 1, 2.0, environment={"git_commit": "aaa", "threads": 2})
    write_run(tmp_path / "b", "mha", 2, 2.0, environment={"git_commit": "bbb", "threads": 2})
    libraries = {"libraries": {"torch": "2.12.0"}}
    write_run(tmp_path / "c", "mha", 3, 2.0, environment={"git_commit": "aaa", **libraries})
    assert differences_in_making(read_runs([tmp_path])[0]) == [
        "the runs differ in git_commit (aaa: 2 runs; bbb: 1 run)",
        "the runs differ in torch (2.13.0: 2 runs; 2.12.0: 1 run)",
        "the runs differ in threads (2: 2 runs; unknown: 1 run)",
    ]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    found, damage = read_curves(write_curve(write_run(tmp_path / "a", "mha", 1, 2.0), 2.0))
    expected = [row for row in curve_rows(2.0) if "train/loss" in row]
    assert damage is None
    assert found.start == 1000.0
    assert found.train.loss.tolist() == [row["train/loss"] for row in expected]
    assert found.train.flops.tolist() == [row["progress/flops"] for row in expected]
    assert found.val.step.tolist() == [20, 40, 60, 80, 100]
    assert found.val.bits.tolist() == pytest.approx([2.0 / 0.7] * 5)


def test_a_record_cut_in_a_line_counts_up_to_there(tmp_path: Path) -> None:
    run = write_curve(write_run(tmp_path / "a", "mha", 1, 2.0), 2.0)
    whole = (run / "metrics.jsonl").read_bytes()
    lines = whole.split(b"\n")
    (run / "metrics.jsonl").write_bytes(b"\n".join(lines[:5]) + b"\n" + lines[5][:30])
    found, damage = read_curves(run)
    assert damage == f"{run}: metrics.jsonl is damaged after 5 rows; those count"
    assert found.train.step.tolist() == [1, 10, 20]
    assert found.val.step.tolist() == [20]


@pytest.mark.parametrize(
    "line", ["[]", '"text"', '{"step": "one"}', '{"train/loss": {}}', "\x00\x00", "[" * 100_000]
)
def test_a_line_of_another_kind_ends_the_record(line: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "mha", 1, 2.0)
    text = [json.dumps(row) for row in curve_rows(2.0)]
    (run / "metrics.jsonl").write_text("\n".join([*text[:4], line, *text[4:]]) + "\n")
    found, damage = read_curves(run)
    assert damage is not None
    assert "damaged after 4 rows" in damage
    assert found.train.step.tolist() == [1, 10, 20]


def test_rows_with_nan_leave_a_gap_and_no_more(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "mha", 1, 2.0)
    rows_ = curve_rows(2.0)
    rows_[2]["train/loss"] = float("nan")
    rows_[-2]["val/loss"] = float("inf")
    rows_.append(rows_[-3] | {"step": 1e300})
    rows_.append(rows_[-3] | {"step": 101, "train/loss": 1e300})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_))
    found, damage = read_curves(run)
    assert damage is None
    assert found.train.step.tolist() == [1, *range(20, 101, 10)]
    assert len(found.val) == 4


def test_a_record_that_is_missing_or_no_file_gives_no_curves(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "mha", 1, 2.0)
    found, damage = read_curves(run)
    assert (len(found.train), len(found.val)) == (0, 0)
    assert damage == f"{run}: has no metrics.jsonl: no curves"
    os.mkfifo(run / "metrics.jsonl")
    assert "is no file" in str(read_curves(run)[1])


def test_of_steps_that_were_done_again_the_last_count(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "mha", 1, 2.0)
    first, again = curve_rows(3.0), curve_rows(2.0)[7:]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in first + again))
    found, _ = read_curves(run)
    assert (np.diff(found.train.step) > 0).all()
    assert found.train.loss[-1] == curve_rows(2.0)[-3]["train/loss"]
    assert found.train.loss[0] == curve_rows(3.0)[1]["train/loss"]


@pytest.mark.parametrize("block", [record.BLOCK, 700])
def test_a_long_record_is_read_in_blocks_and_resampled(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "BLOCK", block)
    run = write_run(tmp_path / "a", "mha", 1, 2.0)
    write_curve(run, 2.0, steps=4000, validations=400)
    found, damage = read_curves(run)
    assert damage is None
    losses = [row["train/loss"] for row in curve_rows(2.0, steps=4000) if "train/loss" in row]
    assert len(found.train) == curves.POINTS
    # 401 rows in 200 stretches of two, the last of three.
    assert found.train.loss[0] == pytest.approx((losses[0] + losses[1]) / 2)
    assert found.train.loss[-1] == pytest.approx(sum(losses[-3:]) / 3)
    assert len(found.val) == curves.POINTS
    assert (found.val.step[0], found.val.step[-1]) == (10, 4000)


def test_a_line_without_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "BLOCK", 1000)
    run = write_run(tmp_path / "a", "mha", 1, 2.0)
    row = json.dumps(curve_rows(2.0)[1])
    (run / "metrics.jsonl").write_text(f"{row}\n" + " " * 100_000 + row)
    found, damage = read_curves(run)
    assert found.train.step.tolist() == [1]
    assert "damaged after 1 rows" in str(damage)
