"""Seeds of a sweep that train as one model: which go together, what is refused, how they end."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from building import SMALL, settings
from support import command, ledger_lines, losses, run_folders, summary, tiny

from gptattn.errors import ConfigError
from gptattn.runs.folder import RunFolder
from gptattn.settings.config import TrainConfig
from gptattn.sweep.ledger import Ledger
from gptattn.sweep.plan import Plan
from gptattn.sweep.processes import Outcome, Work, run_all
from gptattn.sweep.stackable import check_stackable
from gptattn.sweep.vectorize import check_vectorize, grouped, read_seeds, seeds_argument


def plan(folder: Path, variant: str, seed: int, *overrides: str) -> Plan:
    cfg = settings(f"attn={variant}", "sweep.vectorize=2", *overrides)
    return Plan([f"seed={seed}"], replace(cfg, seed=seed), folder / f"{variant}{seed}")


def test_a_group_has_so_many_seeds_of_equal_settings(tmp_path: Path) -> None:
    plans = [plan(tmp_path, variant, seed) for seed in (1, 2, 3) for variant in ("mha", "gqa")]
    plans.append(plan(tmp_path, "mha", 4, "optim.lr=0.5"))
    names = [[one.folder.name for one in group] for group in grouped(plans)]
    assert names == [["mha1", "mha2"], ["gqa1", "gqa2"], ["mha3"], ["gqa3"], ["mha4"]]


def test_a_run_that_goes_on_does_so_alone(tmp_path: Path) -> None:
    plans = [plan(tmp_path, "mha", seed) for seed in (1, 2, 3)]
    plans[1].folder.mkdir()
    RunFolder(plans[1].folder).write_settings(plans[1].cfg)
    names = [[one.folder.name for one in group] for group in grouped(plans)]
    assert names == [["mha1", "mha3"], ["mha2"]]


def test_the_seeds_reach_the_process(tmp_path: Path) -> None:
    group = [plan(tmp_path, "mha", seed) for seed in (3, 1)]
    (argument,) = seeds_argument(group)
    assert read_seeds(argument) == {3: tmp_path / "mha3", 1: tmp_path / "mha1"}
    assert seeds_argument(group[:1]) == []


REFUSED = {
    "compile=true": "compile=true, which compiles",
    "model.dropout=0.1": "model.dropout=0.1, which would drop",
    "+attn.dropout=0.2": "attn.dropout=0.2, which would drop",
    "budget.seconds=5": "budget.seconds=5, which needs",
    "optim=muon": "optim=muon, which updates",
    "trainer.precision=bf16-mixed": "trainer.precision=bf16-mixed, which",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_seeds_cannot_have_together_is_refused_by_name(override: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_vectorize(settings("sweep.vectorize=2", override))
    assert refused.value.field == "sweep.vectorize"
    assert refused.value.message.startswith(f"cannot be had with {REFUSED[override]}")
    check_vectorize(settings(override))


def test_a_precision_that_the_sweep_chose_is_named_as_it_was_asked_for() -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.precision=auto, which chose bf16-mixed, which"
    ):
        check_vectorize(
            settings(
                "sweep.vectorize=2", "trainer.precision=bf16-mixed", "trainer.auto_precision=true"
            )
        )


def test_another_launcher_cannot_do_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = tiny(tmp_path, "seed=1,2", "sweep.vectorize=2", "hydra/launcher=basic")
    assert command(tmp_path, "-m", *given) == 2
    assert "error: sweep.vectorize: 2 needs launcher=processes" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["null", "word"])
def test_a_dropout_that_is_no_number_is_refused_as_without_vectorize(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for size in ("2", "null"):
        given = tiny(tmp_path, "seed=1,2", f"sweep.vectorize={size}", f"+attn.dropout={value}")
        assert command(tmp_path, "-m", *given) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert said[0].startswith("error: attn.dropout: ")


OWN = """
import torch
from gptattn.attention import MultiHeadAttention

class Own(MultiHeadAttention):
    def __init__(
        self, d_in, d_out, context_length, num_heads, out_proj, scale, window, backend, how
    ):
        super().__init__(d_in, d_out, context_length, num_heads)
        self.how = how
        if how == "drawn":
            self.register_buffer("drawn", torch.rand(3))

    def forward(self, x, *args, **kwargs):
        if self.how == "looks" and x.sum() > 0:
            return super().forward(x, *args, **kwargs)
        if self.how == "raises":
            raise RuntimeError("fails alone, too")
        return super().forward(x, *args, **kwargs)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides that select a user's attention."""
    (tmp_path / "own_attention.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_attention", raising=False)
    return ["attn._target_=own_attention.Own", "allow_targets=[own_attention]"]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("looks", "vmap: "),  # the start of torch's own words
        ("drawn", "the buffer blocks.0.attention.drawn depends on the seed"),
    ],
)
@pytest.mark.usefixtures("no_estimate")
def test_a_users_mechanism_that_cannot_be_stacked_is_refused_before_a_folder_is_made(
    how: str, why: str, own: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tiny(tmp_path, *own, "seed=1,2", "sweep.vectorize=2", f"+attn.how={how}")
    assert command(tmp_path, "-m", *given) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: sweep.vectorize: seeds of mha cannot train as one model: {why}")
    assert said.count("\n") == 1
    assert not list(tmp_path.rglob("config.yaml"))


def test_what_fails_alone_is_no_matter_of_vectorize(own: list[str]) -> None:
    with pytest.raises(RuntimeError, match="fails alone, too"):
        check_stackable(settings(*own, *SMALL, "+attn.how=raises"))


def test_what_can_be_stacked_passes_and_draws_nothing() -> None:
    before = torch.get_rng_state()
    check_stackable(settings(*SMALL, "attn=gqa"))
    assert torch.equal(torch.get_rng_state(), before)


class Silent:
    """A watcher that shows nothing."""

    def started(self, work: Work) -> None: ...
    def running(self, works: object) -> None: ...
    def ended(self, work: Work, outcome: Outcome) -> None: ...


def test_each_run_of_one_process_has_its_own_end_and_its_own_reason(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    code = (
        f"from pathlib import Path; Path({str(b / 'summary.json')!r}).write_text('{{}}')\n"
        f"Path({str(c / 'console.log')!r}).write_text('error: train/loss: is nan at step 3')\n"
        "print('error: disk: full'); raise SystemExit(5)"
    )
    work = Work(a, [sys.executable, "-c", code], ["seed=1"], 1.0, {b: ["seed=2"], c: ["seed=3"]})
    outcomes = run_all([work], 1, Ledger(tmp_path), Silent())
    assert [(o.folder, o.exit, o.reason) for o in outcomes] == [
        (a, 5, "disk: full"),
        (b, 5, ""),
        (c, 5, "train/loss: is nan at step 3"),
    ]
    lines = ledger_lines(tmp_path)
    assert [(line["run"], line["state"]) for line in lines[:3]] == [
        (name, "running") for name in "abc"
    ]
    assert [line["overrides"] for line in lines[:3]] == [["seed=1"], ["seed=2"], ["seed=3"]]
    assert {line["run"]: line["state"] for line in lines[3:]} == {
        "a": "failed",
        "b": "done",
        "c": "failed",
    }


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A sweep of two seeds, and of two that diverge; its folder, and the command without those."""
    folder = tmp_path_factory.mktemp("sweep")
    given = ["-m", *tiny(folder, "seed=1,2", "sweep.jobs=1", "sample.tokens=0")]
    assert command(folder, *given, "sweep.vectorize=2", "optim.lr=0.001,1e25") == 5
    return folder, [*given, "optim.lr=0.001"]


@pytest.mark.slow
def test_a_sweep_of_vectorised_seeds_leaves_a_folder_for_each(
    sweep: tuple[Path, list[str]],
) -> None:
    runs = {summary(run)["seed"]: run for run in run_folders(sweep[0])}
    assert runs.keys() == {1, 2}
    assert {summary(run)["metrics"]["perf/tokens_per_s"] for run in runs.values()} == {None}
    assert losses(runs[1]) != losses(runs[2])


@pytest.mark.slow
def test_seeds_that_diverge_each_fail_with_their_own_line(sweep: tuple[Path, list[str]]) -> None:
    (ledger,) = sweep[0].rglob("ledger.jsonl")
    ends = [line for line in ledger_lines(ledger.parent) if line["state"] == "failed"]
    assert [line["exit"] for line in ends] == [5, 5]
    assert all(line["reason"].startswith("train/loss: is nan at step") for line in ends)


@pytest.mark.slow
def test_the_search_for_finished_runs_knows_no_difference(
    sweep: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, given = sweep
    assert command(folder, *given) == 0
    assert "2 already done" in capsys.readouterr().out
    assert len(run_folders(folder)) == 2


def test_every_setting_without_a_reason_against_it_is_taken() -> None:
    cfg: TrainConfig = settings("sweep.vectorize=8", "accumulate=2", "model.dropout=0.0")
    check_vectorize(cfg)
