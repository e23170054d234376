"""gptattn-evaluate: what it prints, writes, leaves alone and refuses."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import refuses, summary, train

from gptattn.build.data import build_data
from gptattn.errors import DataError
from gptattn.evaluate import harness
from gptattn.evaluate.measure import check_unchanged
from gptattn.runs.evaluation import Evaluation, TaskScores
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import SavedRun, load_run

POSITIONS = {"gqa": "rope", "mha": "learned", "gated_deltanet": "none"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three runs whose context is 16, with their text. Not to be changed."""
    home = tmp_path_factory.mktemp("evaluated")
    for attn, position in POSITIONS.items():
        train(home / attn, f"attn={attn}", f"position={position}", "model.d_model=32")
    return home


@pytest.fixture
def sweep(trained: Path, tmp_path: Path) -> Path:
    """A copy of their folders."""
    for attn in POSITIONS:
        (run,) = (file.parent for file in (trained / attn).rglob("summary.json"))
        shutil.copytree(run, tmp_path / "sweep" / attn)
    return tmp_path / "sweep"


def evaluation(run: Path) -> Evaluation:
    return RunFolder(run).read_evaluation()


def test_it_measures_what_is_asked_and_later_only_what_is_missing(sweep, call):
    run = sweep / "gqa"
    ask = ("evaluate", f"run={run}", "threads=1", "device=cpu")
    code, out, err = call(*ask, "lengths=[8,40]", "cache=[int8,sink2+window:4]")
    assert (code, err) == (0, "")
    found = evaluation(run)
    assert [*found.lengths] == [8, 40]
    assert [*found.caches] == ["full", "int8", "sink2+window:4"]
    assert (found.step, found.context_length) == (4, 16)
    assert found.basis.text == summary(run)["data"]["text_sha256"]
    # The last validation has scored the same tokens.
    assert found.caches["full"].loss == pytest.approx(summary(run)["metrics"]["val/loss"], abs=1e-5)
    assert found.bytes_per_token("full") == summary(run)["metrics"]["cost/kv_bytes_per_token"]
    within, beyond = found.lengths[40].between(1, 16), found.lengths[40].between(17, 40)
    assert f"{within:.4f} up to 16 tokens, {beyond:.4f} beyond" in out
    assert f"cache              int8  loss {found.caches['int8'].loss:.4f}" in out
    code, out, _ = call(*ask, "lengths=8,24", "cache=full")
    assert [line.endswith("measured)") for line in out.splitlines()[1:]] == [True, False, True]
    again = evaluation(run)
    assert again.lengths == found.lengths | {24: again.lengths[24]}
    assert again.caches == found.caches


def test_each_of_several_runs_answers_what_it_can(sweep, call):
    code, _, err = call("evaluate", f"run={sweep}", "lengths=[16,40]", "cache=[full,int4]")
    assert code == 0
    first, second = sorted(err.splitlines())
    assert first.startswith("left out gated_deltanet: cache: int4 ")
    assert second.startswith("left out mha: lengths: 40 is beyond the 16 positions ")
    answered = {
        attn: ([*evaluation(sweep / attn).lengths], [*evaluation(sweep / attn).caches])
        for attn in POSITIONS
    }
    assert answered == {
        "gqa": ([16, 40], ["full", "int4"]),
        "mha": ([16], ["full", "int4"]),
        "gated_deltanet": ([16, 40], ["full"]),
    }


def test_a_task_that_one_run_cannot_answer_is_scored_for_the_others(
    sweep, tmp_path, call, monkeypatch
):
    def score(saved: SavedRun, task: str) -> dict[str, TaskScores]:
        if saved.folder.name == "mha":
            raise DataError("lm_eval", "a request is too long")
        return {"told": TaskScores(task, "", 0, "", {"acc": 0.5}, {}, {})}

    monkeypatch.setattr(harness, "score_tasks", score)
    (task := tmp_path / "told.yaml").touch()
    code, _, err = call("evaluate", f"run={sweep}", f"lm_eval=[{task}]")
    assert (code, err) == (0, "left out mha: lm_eval: a request is too long\n")
    assert [attn for attn in POSITIONS if (sweep / attn / "evaluation.json").exists()] == [
        "gqa",
        "gated_deltanet",
    ]
    code, _, err = call("evaluate", f"run={sweep / 'mha'}", f"lm_eval=[{task}]")
    assert (code, err) == (3, "error: lm_eval: a request is too long\n")


def test_a_task_that_is_unknown_is_refused_before_anything_is_measured(sweep, call, monkeypatch):
    monkeypatch.setattr(harness, "find_tasks", lambda _: SimpleNamespace(all_tasks=["told"]))
    code, out, err = call("evaluate", f"run={sweep}", "lengths=[4]", "lm_eval=[told,tlod]")
    assert (code, out) == (2, "")
    assert "lm_eval: 'tlod' is neither a task" in err


def test_what_is_of_other_weights_is_replaced(sweep, call):
    run = sweep / "gqa"
    ask = ("evaluate", f"run={run}")
    assert call(*ask, "lengths=[4]")[0] == 0
    file = run / "evaluation.json"
    node = json.loads(file.read_text())
    node["basis"]["weights"] = "0" * 64
    file.write_text(json.dumps(node))
    assert call(*ask, "lengths=[8]")[::2] == (0, "")
    assert [*evaluation(run).lengths] == [8]


def test_another_text_and_weights_from_before_the_end_are_refused(sweep):
    saved = load_run(sweep / "gqa")
    data = build_data(saved.cfg, saved.tokenizer)
    check_unchanged(saved, data, data.text_hash, 4)
    with refuses("data: has changed"):
        check_unchanged(saved, data, "another", 4)
    with refuses("*: step 6", 4):
        check_unchanged(saved, data, data.text_hash, 6)
