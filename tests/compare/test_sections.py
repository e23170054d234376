"""Which runs share a section, by size, budget, task and data, and which are never compared."""

import re
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from reporting import only_section, report, write_typed
from runfolders import write_run, write_sweep
from support import refuses

import gptattn.sweep.speed
from gptattn.compare.table import load_comparison, report_rows, section_table
from gptattn.compare.verdicts import headline, match_words
from gptattn.sweep.progress import print_end

SMALL = {"mha": [3.00, 3.01, 3.02, 3.03], "gqa": [3.11, 3.13, 3.13, 3.15]}
LARGE = {"mha": [2.00, 2.01, 2.02, 2.03], "gqa": [1.91, 1.91, 1.89, 1.93]}
DROPOUT = "model.dropout=0.0,0.1"
TASK = {"task": "Recall", "val_rows": 10, "tokenizer": "none"}


def write_sizes(folder: Path) -> Path:
    """Write mha and gqa at two sizes, as `-m attn=mha,gqa model.d_model=32,64` would."""
    for losses, width, params in ((LARGE, 64, 4800), (SMALL, 32, 1200)):
        write_sweep(folder / f"{width}", losses, d_model=width, metrics={"cost/params": params})
    return folder


def test_a_variant_is_compared_with_the_baseline_of_its_own_size(tmp_path):
    found = load_comparison(write_sizes(tmp_path))
    assert [(section.title, [row.name for row in section.rows]) for section in found.sections] == [
        ("d_model=32", ["mha", "gqa"]),
        ("d_model=64", ["mha", "gqa"]),
    ]
    small, large = (section.rows[1].difference for section in found.sections)
    # Differences 0.11, 0.12, 0.11, 0.12 and -0.09, -0.10, -0.13, -0.10; one comparison each.
    assert (small.mean, large.mean) == (pytest.approx(0.115), pytest.approx(-0.105))
    assert (small.comparisons, large.comparisons) == (1, 1)
    assert headline(found) == "16 runs, 2 variants, 4 seeds each, in 2 sections"


# What one of two runs has -> the title of its section; "": it is a row beside the other.
TITLES: list[tuple[dict[str, Any], str]] = [
    ({"config": {"budget": {"steps": 200}}}, "200 steps"),
    ({"config": {"batch_size": 4}}, "batch_size=4"),
    ({"config": {"trainer": {"precision": "bf16-mixed"}}}, "trainer.precision=bf16-mixed"),
    ({"context_length": 64}, "context_length=64"),
    ({"num_layers": 3}, "num_layers=3"),
    ({"d_mlp": 99}, "d_mlp=99"),
    ({"config": {"init_from": "outputs/a"}}, "from outputs/a"),
    ({"data": {"text_sha256": "zzz"}}, "text zzz"),
    ({"data": {"val_tokens": 98}}, "98 validation tokens"),
    ({"data": {"tokenizer": "char"}}, "char ByteTokenizer"),
    ({"config": {"tokenizer": {"_target_": "ByteTokenizer", "lower": True}}}, "lower=True"),
    ({"config": {"validation": {"fraction": 0.2}}}, "validation.fraction=0.2"),
    ({"data": TASK}, "task Recall 10 validation rows, none ByteTokenizer, context_length=128"),
    ({"config": {"position": {"_target_": "Rope"}}}, ""),
    ({"config": {"optim": {"lr": 0.003}}}, ""),
    ({"config": {"attn": {"_target_": "x", "num_kv_heads": 2}}}, ""),
    ({"config": {"block": {"norm": "rms"}}}, ""),
    ({"dropout": 0.1}, ""),
    ({"num_heads": 8}, ""),
    ({"config": {"compile": True}}, ""),
]


@pytest.mark.parametrize(("other", "title"), TITLES)
def test_settings_that_losses_must_share_make_sections_and_others_rows(other, title, tmp_path):
    write_run(tmp_path / "a", "mha", 1, 2.0)
    write_run(tmp_path / "b", "mha", 1, 2.1, **other)
    found = load_comparison(tmp_path).sections
    titles = {row.runs[0].folder.name: each.title for each in found for row in each.rows}
    assert titles["b"] == title
    assert (titles["a"] == titles["b"]) == (title == "")


# What is compared, what is held, and the rows. In a sweep over several settings the attention is
# compared, or, if it is the same, what was typed first.
HELD = [
    ("trainer.precision=32-true,bf16-mixed", "", ["mha", "mha trainer.precision=bf16-mixed"]),
    ("block=gpt2,llama", "", ["mha", "mha block=llama"]),
    ("optim=adamw,muon", "", ["mha", "mha optim=muon"]),
    ("batch_size=16,8", "", ["mha", "mha batch_size=8"]),
    ("attn=mha,gqa", DROPOUT, ["gqa", "mha"]),
    ("attn=mha,gqa", "trainer.precision=32-true,bf16-mixed", ["gqa", "mha"]),
    ("part=[],[gate]", "optim=adamw,muon", ["mha", "mha part=[gate]"]),
    ("model.mlp=gelu,relu2", "block.norm=layer,rms", ["mha", "mha model.mlp=relu2"]),
]


def list_values(axis: str) -> list[str]:
    key, _, values = axis.partition("=")
    return [f"{key}={value}" for value in values.split(",") if value]


def write_grid(folder: Path, *axes: str) -> Path:
    """Write a run for each combination of values, as `train.py -m AXES` does."""
    for words in product(*map(list_values, filter(None, axes))):
        write_typed(folder, " ".join(words))
    return folder


def sections(folder: Path, **options: Any) -> dict[str, list[str]]:
    found = load_comparison(folder, **options).sections
    return {section.title: [row.name for row in section.rows] for section in found}


@pytest.mark.parametrize(("compared", "held", "rows"), HELD)
def test_one_setting_of_a_sweep_is_compared_and_the_others_held_fixed(
    compared, held, rows, tmp_path
):
    # The attention is compared in whatever order was typed; of other settings, the first is.
    orders = [(compared, held)]
    if compared.startswith("attn"):
        orders.append((held, compared))
    for i, axes in enumerate(orders):
        found = sections(write_grid(tmp_path / str(i), *axes))
        expected = dict.fromkeys(list_values(held) or [""], rows)
        assert {title: sorted(own) for title, own in found.items()} == expected


@pytest.mark.parametrize(
    ("axes", "by", "expected"),
    [
        (("attn=mha,gqa", DROPOUT), "model.dropout", ["attn=gqa", "attn=mha"]),
        (("attn=mha,gqa", DROPOUT), "attn,model.dropout", [""]),
        (("part=[],[gate]", DROPOUT), "part", list_values(DROPOUT)),
        (("part=[],[gate]", DROPOUT), "attn", list_values(DROPOUT)),
        (("model.d_model=32,64",), "", ["d_model=32", "d_model=64"]),
        (("model.d_model=32,64",), "model.d_model", [""]),
    ],
)
def test_by_names_what_is_compared_instead(axes, by, expected, tmp_path):
    found = sections(write_grid(tmp_path, *axes), by=[*filter(None, by.split(","))])
    assert sorted(found) == expected
    assert sum(map(len, found.values())) == 2 ** len(axes)


def test_what_cannot_be_compared_is_refused_by_name(tmp_path):
    write_grid(tmp_path, DROPOUT)
    for by, said in (("model.dropuot", "model.dropout"), ("tokenizer", "tokenizer")):
        with refuses(f"by: {said}"):
            sections(tmp_path, by=[by])


def test_runs_from_other_weights_are_a_section_named_after_them(tmp_path):
    write_sweep(tmp_path / "scratch", {"mha": [1.5] * 3, "gqa": [1.52] * 3})
    for variant, method, loss in (("mha", "mean", 1.4), ("gqa", "mean", 1.45), ("gqa", "first", 2)):
        for seed in (1, 2, 3):
            # Each seed goes on from its own seed's run.
            config = {"init_from": f"up/mha_s{seed}_00000{seed}", "init_method": method}
            noisy = loss + seed / 1000
            write_run(tmp_path / f"{variant}_{method}{seed}", variant, seed, noisy, config=config)
    trained_on, scratch = load_comparison(tmp_path).sections
    assert [section.title for section in (scratch, trained_on)] == ["from scratch", "from up/mha"]
    assert [row.name for row in scratch.rows] == ["mha", "gqa"]
    made = ["mha", "gqa init_method=mean", "gqa init_method=first"]
    assert [row.name for row in trained_on.rows] == made


def test_a_matched_width_makes_no_section_and_no_name_but_is_said(tmp_path):
    match = {"what": "params", "field": "model.d_mlp"}
    for variant, size, after in (("mha", 0, 256), ("x", 0, 290), ("x", 4, 280)):
        config = {"match": "params", "attn": {"_target_": "gptattn.attention.X", "conv_size": size}}
        made = {"match": match | {"before": 256, "after": after}}
        mlp = {"d_model": 64, "d_mlp": after}
        write_run(tmp_path / str(after), variant, 1, 2.0, summary=made, config=config, **mlp)
    write_run(tmp_path / "c", "mqa", 1, 2.0, d_model=64, d_mlp=256)
    section = only_section(tmp_path)
    assert (section.title, section.warnings) == ("", [])
    names = {"mha", "mqa", "x attn.conv_size=0", "x attn.conv_size=4"}
    assert {row.name for row in section.rows} == names
    assert "match=params: x attn.conv_size=0 has model.d_mlp=290, not 256" in match_words(section)


def test_a_tasks_lengths_are_sections_and_widths_rows_of_mean_accuracy(tmp_path):
    sizes = product(((64, 4), (128, 8)), ((16, 0.25), (32, 1.0)), (1, 2))
    for (length, pairs), (width, right), seed in sizes:
        metrics = {"val/accuracy": right - 0.1 * (seed - 1), "val/bits_per_byte": None}
        own = {"data": {**TASK, "text_sha256": str(pairs)}, "metrics": metrics}
        own["config"] = {"data": {"_target_": "gptattn.data.tasks.Recall", "pairs": pairs}}
        place, size = f"{length}_{width}_{seed}", {"d_model": width, "context_length": length}
        write_run(tmp_path / place, "mha", seed, 4 - right, **own, **size)
    found = load_comparison(tmp_path)
    titles = [section.title for section in found.sections]
    assert titles == ["context_length=64 pairs=4", "context_length=128 pairs=8"]
    for section in found.sections:
        names = {row.name: row.mean("val/accuracy") for row in section.rows}
        assert names == pytest.approx({"mha model.d_model=16": 0.2, "mha model.d_model=32": 0.95})
        heading, *body = report_rows(section)
        assert "bits/byte" not in heading
        assert [row[heading.index("accuracy")] for row in body] == ["0.2000", "0.9500"]
    table = found.table()
    assert [*table["val/accuracy"]] == pytest.approx([0.2, 0.95] * 2)
    assert "val/bits_per_byte" not in table


def test_sizes_on_a_task_are_sections_joined_by_a_curve_across_attentions(tmp_path):
    for variant in ("mha", "gqa"):
        for width in (16, 32):
            config = {"overrides": [f"attn={variant}", f"model.d_model={width}"]}
            place = tmp_path / f"{variant}{width}"
            write_run(place, variant, 1, 2.0, data=TASK, config=config, d_model=width)
    found = load_comparison(tmp_path)
    assert [section.title for section in found.sections] == ["d_model=16", "d_model=32"]
    assert {section.title_without("model") for section in found.sections} == {""}


def test_rows_of_the_same_settings_but_other_data_are_not_averaged(tmp_path):
    for seed, text in ((1, "a"), (2, "b")):
        write_run(tmp_path / text, "mha", seed, 3.5, data={**TASK, "text_sha256": text})
    assert [row.n for row in only_section(tmp_path).rows] == [1, 1]


def test_a_section_without_the_baseline_has_another_and_says_so(tmp_path):
    write_run(tmp_path / "a", "mha", 1, 2.0)
    write_run(tmp_path / "b", "gqa", 1, 2.1, config={"budget": {"steps": 2000}})
    short, long = load_comparison(tmp_path, baseline="mha").sections
    assert (short.warnings, long.baseline) == ([], "gqa")
    (line,) = long.warnings
    assert "baseline here is gqa" in line
    with refuses("baseline: gqa"):
        load_comparison(tmp_path, baseline="gpa")


@pytest.mark.usefixtures("undrawn")
def test_the_page_has_contents_and_a_curve_over_sizes(tmp_path):
    out = tmp_path / "out"
    report(write_sizes(tmp_path / "runs"), f"out={out}")
    page = (out / "comparison.html").read_text(encoding="utf-8")
    linked = re.findall(r'<a href="#(section-\d)">(.*?)</a>', page)
    assert linked == [("section-1", "d_model=32"), ("section-2", "d_model=64")]
    assert all(f'<section id="{name}">' in page for name, _ in linked)
    assert page.count("<svg") == 14  # six of each section, and two over sizes
    assert "A line joins the sizes of one variant (d_model=32, d_model=64)" in page
    assert {"loss_sizes.png", "loss_sizes_cache.png"} <= {path.name for path in out.iterdir()}


def test_the_report_command_printed_by_a_sweep_works(tmp_path, capsys):
    done = [write_run(tmp_path / "a b" / "1", "mha", 1, 2.0)]
    # A run of an earlier command in the same folder.
    write_run(tmp_path / "a b" / "2", "mha", 1, 2.0, data={"text_sha256": "zyxwvuts"})
    print_end(done, {})
    (line,) = re.findall(r"report: gptattn-compare (.*)", capsys.readouterr().out)
    report(*shlex.split(line), "files=false")


def test_a_sweep_that_is_stopped_while_it_measures_has_its_table(tmp_path, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gptattn.sweep.speed, "measure_rows", stop)
    with pytest.raises(KeyboardInterrupt):
        print_end([write_run(tmp_path / "1", "mha", 1, 2.0)], {}, measures=())
    assert "mha" in capsys.readouterr().out
    assert (tmp_path / "comparison" / "comparison.html").is_file()


def test_a_mechanism_without_a_cache_is_not_compared_by_cache(tmp_path):
    write_sweep(tmp_path, {"mha": [2.0, 2.1]})
    write_sweep(tmp_path, {"mine": [1.0, 1.2]}, metrics={"cost/kv_bytes_per_token": None})
    found = load_comparison(tmp_path)
    (section,) = found.sections
    heading, mha, mine = report_rows(section)
    column = heading.index("cache B/token")
    assert (mha[column], mine[column]) == ("1,024", "no cache")
    assert not any("cache" in line for line in section_table(section).words)
    assert {row.name: "cache" in row.fronts for row in section.rows} == {"mha": True, "mine": False}
    assert found.table()["cost/kv_bytes_per_token"].isna().tolist() == [False, True]


def test_rows_that_were_not_checked_are_marked_once(tmp_path):
    write_sweep(tmp_path, {"mha": [2.0, 2.1]}, config={"checks": True})
    write_sweep(tmp_path, {"gqa": [2.0, 2.2]})  # an older record
    write_sweep(tmp_path, {"mine": [1.0, 1.2]}, config={"checks": False})
    (mark,) = [line for line in only_section(tmp_path).warnings if "causal" in line]
    assert mark.endswith(": mine")
