"""Two parts together: what both have beyond the sum of each alone."""

import json

import numpy as np
import pytest
from reporting import page_text, report, write_typed
from scipy import stats

from gptattn.compare.table import load_comparison

PLAIN, GATE, NORM, BOTH = (
    f"attn=gqa{part}" for part in ("", " part=[gate]", " part=[qk_norm]", "")
)
BOTH += " part=[gate,qk_norm]"
LOSSES = {
    PLAIN: [2.00, 2.02, 2.05],
    GATE: [1.95, 1.96, 1.99],
    NORM: [1.97, 2.00, 2.02],
    BOTH: [1.93, 1.96, 1.97],
}


def write(folder, losses=LOSSES, more=""):
    for overrides, values in losses.items():
        for seed, loss in enumerate(values, 1):
            write_typed(folder, overrides + more, seed, loss)


def test_an_interaction_is_the_loss_of_both_past_the_sum_with_its_interval(tmp_path):
    write(tmp_path)
    comparison = load_comparison(tmp_path)
    ((d,),) = [section.interactions for section in comparison.sections]
    a, b, c, both = (np.array(LOSSES[key]) for key in (PLAIN, GATE, NORM, BOTH))
    each = both - b - c + a  # 0.01, 0.02, 0.01
    assert d.variant == "gate with qk_norm"
    assert d.n == 3
    assert d.mean == pytest.approx(each.mean(), abs=1e-12)
    low, high = stats.t.interval(0.95, 2, each.mean(), stats.sem(each))
    assert d.interval == pytest.approx((low, high))
    assert d.p == pytest.approx(stats.ttest_1samp(each, 0.0)[1])
    report(tmp_path)
    assert "gate with qk_norm, beyond the sum" in page_text(tmp_path / "comparison/comparison.html")
    table = comparison.table()
    assert [*table["n"]] == [3] * 5
    assert table["n"].dtype == "int64"
    assert table.iloc[4]["variant"] == "gate with qk_norm"
    assert table.iloc[4]["difference low"] == pytest.approx(low)


def test_each_two_of_three_parts_are_a_row_and_all_are_corrected_together(tmp_path):
    with_sink = {
        PLAIN: f"{PLAIN} part=[sink]",
        **{key: key.replace("]", ",sink]") for key in (GATE, NORM, BOTH)},
    }
    write(tmp_path, LOSSES | {with_sink[key]: values for key, values in LOSSES.items()})
    ((*found,),) = [section.interactions for section in load_comparison(tmp_path).sections]
    both = [f"gate with {other} in gqa part=[gate,{other}]" for other in ("qk_norm", "sink")]
    names = {d.variant for d in found}
    assert len(names) == 6
    assert names >= {*both, "qk_norm with sink in gqa part=[gate,qk_norm,sink]"}
    assert {d.comparisons for d in found} == {6}


@pytest.mark.parametrize("lacking", [PLAIN, GATE, BOTH])
def test_without_one_of_the_four_rows_there_is_no_interaction(lacking, tmp_path):
    write(tmp_path, {key: own for key, own in LOSSES.items() if key != lacking})
    assert all(not section.interactions for section in load_comparison(tmp_path).sections)


def test_rows_that_differ_in_something_else_have_no_interaction(tmp_path):
    write(tmp_path, {key: own for key, own in LOSSES.items() if key != BOTH})
    write(tmp_path, {BOTH: LOSSES[BOTH]}, " model.dropout=0.1")
    write(tmp_path, {PLAIN: LOSSES[PLAIN]}, " model.dropout=0.1")
    assert all(not section.interactions for section in load_comparison(tmp_path).sections)


def test_a_part_with_another_setting_is_another_part(tmp_path):
    write(tmp_path, {key: own for key, own in LOSSES.items() if key != GATE})
    write(tmp_path, {GATE: LOSSES[GATE]}, " part.gate.granularity=headwise")
    assert all(not section.interactions for section in load_comparison(tmp_path).sections)


def test_another_order_of_parts_is_another_pair(tmp_path):
    write(tmp_path)
    ((before,),) = [section.interactions for section in load_comparison(tmp_path).sections]
    reversed_order = BOTH.replace("gate,qk_norm", "qk_norm,gate")
    write(tmp_path, {reversed_order: [loss - 0.5 for loss in LOSSES[BOTH]]})
    one, other = (d for part in load_comparison(tmp_path).sections for d in part.interactions)
    assert {one.variant, other.variant} == {"gate with qk_norm", "qk_norm with gate"}
    means = {d.variant: d.mean for d in (one, other)}
    assert means["gate with qk_norm"] == pytest.approx(before.mean)
    assert means["qk_norm with gate"] == pytest.approx(before.mean - 0.5)


@pytest.mark.parametrize("module", ["core", "parts.gate"])
def test_rows_of_other_code_have_no_interaction(module, tmp_path):
    write(tmp_path)
    for seed in (1, 2, 3):
        file = tmp_path / f"{GATE} {seed}" / "identity.json"
        known = json.loads(file.read_text(encoding="utf-8"))
        known["code"][f"gptattn.attention.{module}"] = "other"
        file.write_text(json.dumps(known), encoding="utf-8")
    assert all(not section.interactions for section in load_comparison(tmp_path).sections)
