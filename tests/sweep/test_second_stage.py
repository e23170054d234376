"""Uptraining: a second stage from the weights of the first, and runs without training steps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import command, run_folders, series, summary, tiny, train

from gptattn.cli.jobs import quoted
from gptattn.cli.main import check_job
from gptattn.data.tokens import TokenData
from gptattn.errors import ConfigError, NumericError
from gptattn.runs.load import load_config, load_run
from gptattn.runs.sweep_states import read_ledger
from gptattn.settings.build import build_data, build_model
from gptattn.settings.config import TrainConfig, check
from gptattn.sweep.plan import Plan
from gptattn.sweep.second_stage import Uptrain, check_first_stage, second_stage, uptrain_of
from gptattn.training.precheck import Ready
from gptattn.weights.convert import convert

STAGE = {
    "source": "mha",
    "targets": ["gqa", "mqa"],
    "methods": ["mean", "random"],
    "fractions": [0, 0.05],
    "lr": 0.5,
}


@pytest.fixture
def cfg(tmp_path: Path) -> TrainConfig:
    return check_job(tiny(tmp_path / "in", "optim.lr=1e-3"))


# No steps


def with_budget(cfg: TrainConfig, init_from: str | None, **budget: Any) -> TrainConfig:
    given = {"steps": None, **budget}
    return replace(cfg, init_from=init_from, budget=replace(cfg.budget, **given))


@pytest.mark.parametrize(
    ("init_from", "budget"),
    [
        (None, {"steps": 0}),
        ("x", {"steps": -1}),
        ("x", {"tokens": 0}),
        ("x", {"seconds": 0.0}),
        ("x", {"flops": 0.0}),
    ],
)
def test_a_budget_of_nothing_is_refused(
    init_from: str | None, budget: dict[str, Any], cfg: TrainConfig
) -> None:
    with pytest.raises(ConfigError, match=r"budget\.\w+: \S+ is not a positive number"):
        check(with_budget(cfg, init_from, **budget))


def test_no_steps_are_allowed_where_weights_come_from_elsewhere(cfg: TrainConfig) -> None:
    check(with_budget(cfg, "x", steps=0))


def test_no_steps_validate_the_converted_model_and_leave_a_whole_run(tmp_path: Path) -> None:
    source = train(tmp_path / "a", "attn=mha", "optim.lr=0.01")
    run = train(tmp_path / "b", "attn=gqa", f"init_from={source}", "budget.steps=0")
    # By hand: convert, then take the mean loss over the held-out tokens, window by window.
    cfg = load_config(run)
    data = build_data(cfg)
    model = build_model(cfg, data.tokenizer.vocab_size).eval()
    convert(load_run(source).model, model, "mean")
    assert isinstance(data, TokenData)
    ids = torch.from_numpy(data.val[:].astype("int64"))
    T, nats = cfg.model.context_length, 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, T):
            window = ids[start : start + T + 1]
            logits = model(window[None, :-1])[0].double()
            nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
    assert series(run, "val/loss") == [(0, pytest.approx(nats / (len(ids) - 1), abs=1e-5))]
    metrics = summary(run)["metrics"]
    assert summary(run)["steps"] == 0
    assert not {"train/loss", "perf/tokens_per_s", "perf/step_ms"} & metrics.keys()
    assert metrics["progress/budget"] == 1.0
    for name, weight in load_run(run).model.state_dict().items():
        torch.testing.assert_close(weight, model.state_dict()[name], rtol=0, atol=0)


# The second stage, planned


def test_each_source_run_goes_on_as_each_target_by_each_method_for_each_share(
    cfg: TrainConfig,
) -> None:
    stage = uptrain_of(STAGE)
    cfg = with_budget(cfg, None, steps=200)
    overrides = ["attn=mha", "seed=3", "model.qkv_bias=false", "budget.steps=200", "optim.lr=1e-3"]
    plan = Plan([*overrides, "hydra.sweep.subdir='x'"], cfg, Path("out/x"))
    jobs = second_stage(stage, plan, Path("out/a,b=1_s3"), quoted)
    kept = ["seed=3", "model.qkv_bias=false", "init_from='out/a,b=1_s3'"]
    assert jobs == [
        [f"attn={attn}", *kept, f"init_method={method}", f"budget.steps={steps}", "optim.lr=0.0005"]
        for steps in (0, 10)
        for attn in ("gqa", "mqa")
        for method in ("mean", "random")
    ]
    gated = replace(plan, cfg=replace(cfg, part={"gate": {}}))
    check_first_stage(stage, [gated])
    assert second_stage(stage, gated, Path("out/a,b=1_s3"), quoted) == jobs
    gqa = replace(plan, cfg=replace(cfg, choices=cfg.choices | {"attn": "gqa"}))
    assert second_stage(stage, gqa, Path("out/y"), quoted) == []


@pytest.mark.parametrize(
    ("budget", "share", "steps"),
    [
        ({"steps": 70}, 0.1, 7),  # 0.1 * 70 is above 7 in floating point
        ({"steps": 9}, 0.05, 1),
        ({"tokens": 640}, 0.5, 5),  # 4 sequences of 16 tokens: 10 steps
    ],
)
def test_a_share_is_of_the_steps_that_the_source_takes(
    budget: dict[str, Any], share: float, steps: int, cfg: TrainConfig
) -> None:
    stage = replace(uptrain_of(STAGE), fractions=[share])
    plan = Plan(["attn=mha"], with_budget(cfg, None, **budget), Path("x"))
    jobs = second_stage(stage, plan, Path("x"), quoted)
    assert all(f"budget.steps={steps}" in job for job in jobs)


def test_seconds_have_no_share_of_steps(cfg: TrainConfig) -> None:
    plan = Plan(["attn=mha"], with_budget(cfg, None, seconds=5.0), Path("x"))
    with pytest.raises(ConfigError, match=r"budget\.seconds: .* give budget\.steps"):
        second_stage(uptrain_of(STAGE), plan, Path("x"), quoted)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fraction": [0]}, r"key: 'fraction' is unknown; did you mean fractions"),
        ({"lr": None}, r"uptrain\.lr: is missing"),
        ({"lr": 0}, r"uptrain\.lr: 0 must be above 0"),
        ({"targets": "gqa"}, r"uptrain\.targets: gqa is not a list"),
        ({"targets": []}, r"uptrain\.targets: \[\] is not a list"),
        ({"targets": ["gqa", "mha"]}, r"uptrain\.targets: mha is the source"),
        ({"methods": ["mean", "mean"]}, r"uptrain\.methods: .* different"),
        ({"methods": ["median"]}, r"uptrain\.methods: 'median' is unknown"),
        ({"fractions": [-0.1]}, r"uptrain\.fractions: -0\.1 must be 0 or more"),
        ({"fractions": ["x"]}, r"uptrain\.fractions: 'x' must be 0 or more"),
    ],
)
def test_a_stage_that_cannot_be_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        uptrain_of({**STAGE, **change})


def test_the_first_stage_must_have_what_the_second_starts_from(cfg: TrainConfig) -> None:
    stage: Uptrain = uptrain_of(STAGE)
    mha = Plan([], cfg, Path("x"))
    check_first_stage(stage, [mha])
    gqa = replace(mha, cfg=replace(cfg, choices=cfg.choices | {"attn": "gqa"}))
    with pytest.raises(ConfigError, match="attn: gqa lacks mha"):
        check_first_stage(stage, [gqa])
    with pytest.raises(ConfigError, match="checkpoint: false leaves no weights"):
        check_first_stage(stage, [replace(mha, cfg=replace(cfg, checkpoint=False))])


# From the command line, in this process


def arguments(folder: Path, *more: str) -> list[str]:
    stage = "hydra.sweeper.uptrain"
    small = [f"{stage}.targets=[gqa]", f"{stage}.methods=[random]", f"{stage}.fractions=[0,1]"]
    own = ["experiment=uptrain", "hydra/launcher=basic", "attn=mha", "budget.steps=2"]
    shown = ["sample.tokens=0", "validation.count=1"]
    return ["-m", *tiny(folder, *own, *shown, *small, *more)]


def made_from(folder: Path) -> dict[tuple[int, str, str, int], str]:
    """Return (seed, variant, method, steps) -> name of the folder whose weights it started from."""
    found = {}
    for run in run_folders(folder):
        cfg = load_config(run)
        origin = Path(cfg.init_from).name if cfg.init_from else ""
        steps = summary(run)["steps"]
        found[cfg.seed, cfg.variant, cfg.init_method if origin else "", steps] = origin
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("no_estimate")
def test_a_failed_source_costs_its_own_children_and_the_rerun_makes_what_is_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import gptattn.training.train

    real = gptattn.training.train.train_ready

    def failing(ready: Ready, *args: Any, **named: Any) -> dict[str, Any]:
        if (ready.cfg.variant, ready.cfg.seed) == ("mha", 2):
            raise NumericError("train/loss", "is nan at step 1; try again")
        return real(ready, *args, **named)

    monkeypatch.setattr("gptattn.training.train.train_ready", failing)
    assert command(tmp_path, *arguments(tmp_path, "seed=1,2")) != 0
    out, err = capfd.readouterr()
    assert "6 runs, in outputs/uptrain" in out
    assert "1 of 6 runs failed, and 2 that start from a failed run were skipped" in err
    first = made_from(tmp_path)
    expected = {(1, "mha", "", 2), (1, "gqa", "random", 0), (1, "gqa", "random", 2)}
    assert first.keys() == expected
    folder = tmp_path / "outputs" / "uptrain"
    states = [line["state"] for line in read_ledger(folder)]
    assert (states.count("done"), states.count("failed"), states.count("skipped")) == (3, 1, 2)

    monkeypatch.setattr("gptattn.training.train.train_ready", real)
    assert command(tmp_path, *arguments(tmp_path, "seed=1,2")) == 0
    assert "3 already done" in capfd.readouterr().out
    second = made_from(tmp_path)
    assert len(run_folders(tmp_path)) == 6
    assert {key: second[key] for key in first} == first
    sources = {summary(run)["seed"]: run.name for run in run_folders(tmp_path) if is_source(run)}
    for (seed, _, method, _), origin in second.items():
        assert origin == (sources[seed] if method else "")


def is_source(run: Path) -> bool:
    return json.loads((run / "summary.json").read_text())["variant"] == "mha"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["attn=gqa"], "error: attn: gqa lacks mha"),
        (["checkpoint=false"], "error: checkpoint: false leaves no weights"),
        (["budget.steps=null", "budget.seconds=3"], "error: budget.seconds: "),
        (["hydra.sweeper.uptrain.targets=[gqaa]"], "error: attn: 'gqaa' is unknown"),
        (["hydra.sweeper.uptrain.targets=[single_head]"], "error: init_from: layer 0: query heads"),
    ],
)
def test_a_second_stage_that_cannot_work_is_found_before_the_first_starts(
    more: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *arguments(tmp_path, *more)) == 2
    assert capfd.readouterr().err.startswith(said)
    assert not (tmp_path / "outputs").exists()
