"""Weights & Biases and MLflow themselves, offline, read back with their own code.

They are no part of the test environment: `make test-trackers`.
"""

import json
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from building import settings
from interrupted import SIX, begun, crash, once
from rich.console import Console
from support import command, process_state, run_folders, summary, tiny, train
from test_trackers import Rows, recorded
from tortures.bench import fingerprint

from gptattn.training.precheck import check_run
from gptattn.training.trackers import feed, weights_and_biases
from gptattn.training.trackers.tracker import Tracker
from gptattn.training.vectorized import train_seeds

# A folder of wandb's in the working directory has no origin.
THERE = all(getattr(find_spec(name), "origin", None) for name in ("wandb", "mlflow"))
pytestmark = [
    pytest.mark.trackers,
    pytest.mark.skipif(not THERE, reason="needs wandb and mlflow: make test-trackers"),
    pytest.mark.filterwarnings("default"),  # the libraries warn of their own parts
]

ALL = "logger=[tensorboard,wandb,mlflow,csv]"
BLOCK, HEAD = 32 * 1024, 7  # of wandb's file, which is a LevelDB log


@pytest.fixture(scope="module", autouse=True)
def _patient() -> Iterator[None]:
    """A busy machine takes more than seconds to import mlflow."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OPENING", "ENDING", "STOPPING"):
            patch.setattr(feed, name, 600)
        patch.setattr(weights_and_biases, "PATIENCE", 300)
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that died in its fourth step, was resumed, and had all trackers."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        once(patch, "training_step", 3, crash)
        assert command(folder, *begun(folder, ALL, "experiment_name=tracked")) == 1
    assert command(folder, "resume=run") == 0
    return folder


def client(folder: Path) -> Any:
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

    return MlflowClient(f"sqlite:///{folder / 'outputs' / 'mlflow.db'}")


def mlflow_runs(folder: Path, experiment: str) -> list[Any]:
    found = client(folder).get_experiment_by_name(experiment)
    return client(folder).search_runs([found.experiment_id])


def records(file: Path) -> Iterator[Any]:
    """The records of an offline run, as wandb's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    data, at, whole = file.read_bytes(), HEAD, b""
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:  # no head fits into the rest of the block
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEAD])
        whole += data[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


def sessions(run: Path) -> list[list[Any]]:
    """The records of each session of a run in wandb, oldest first."""
    files = (run / "trackers" / "wandb").glob("offline-run-*/*.wandb")
    return [[*records(file)] for file in sorted(files, key=lambda file: file.stat().st_mtime_ns)]


def values(items: Any) -> dict[str, Any]:
    found = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
    return {key: value for key, value in found.items() if key[0] != "_"}


def history(session: list[Any]) -> Rows:
    rows = [values(record.history.item) for record in session if record.HasField("history")]
    return [(int(row.pop("trainer/global_step")), row) for row in rows]


def by_name(rows: Rows) -> dict[str, list[tuple[int, float]]]:
    """The points of each metric; measured ones are 0, since steps made again take other times."""
    found = defaultdict(list)
    for step, numbers in rows:
        for name, value in numbers.items():
            measured = name.startswith("perf/") or name == "progress/seconds"
            found[name].append((step, 0.0 if measured else value))
    return dict(found)


def mlflow_points(folder: Path, run: Any) -> dict[str, list[tuple[int, float]]]:
    """The points of each metric of a run in MLflow, as `by_name` has them."""
    points = [
        (point.step, {name: point.value})
        for name in run.data.metrics
        for point in client(folder).get_metric_history(run.info.run_id, name)
    ]
    return by_name(sorted(points, key=lambda point: point[0]))


def test_trackers_leave_the_result_as_it_is(home: Path, whole: Callable[[str], str]) -> None:
    assert fingerprint(home / "run") == whole("mha")


def test_wandb_has_each_row_once_in_one_run_of_two_sessions(home: Path) -> None:
    run = home / "run"
    first, second = sessions(run)
    assert by_name(history(first) + history(second)) == by_name(recorded(run))
    assert history(first)
    assert history(second)
    told = [next(r.run for r in session if r.HasField("run")) for session in (first, second)]
    assert len({one.run_id for one in told}) == 1
    for one in told:
        assert (one.project, one.run_group, one.display_name) == ("gptattn", "mha", "run")
        assert one.job_type == "tracked"
    ends = [next(r.exit.exit_code for r in s if r.HasField("exit")) for s in (first, second)]
    assert ends == [1, 0]


def test_wandb_has_the_hyperparameters_and_the_final_figures(home: Path) -> None:
    found: dict[str, dict[str, Any]] = {"config": {}, "summary": {}}
    for record in [record for session in sessions(home / "run") for record in session]:
        for kind, known in found.items():
            if record.HasField(kind):
                known |= values(getattr(record, kind).update)
    expected = summary(home / "run")
    assert found["config"] == expected["hyperparameters"]
    assert found["summary"].items() >= {k: v for k, v in expected["metrics"].items() if v}.items()


def test_mlflow_has_each_row_once_in_one_run(home: Path) -> None:
    (found,) = mlflow_runs(home, "tracked")
    assert mlflow_points(home, found) == by_name(recorded(home / "run"))
    assert found.info.status == "FINISHED"


def test_mlflow_has_the_name_the_variant_the_hyperparameters_and_the_final_figures(
    home: Path,
) -> None:
    (found,) = mlflow_runs(home, "tracked")
    expected = summary(home / "run")
    assert found.info.run_name == "run"
    assert found.data.tags.items() >= {"variant": "mha", "seed": "1"}.items()
    assert found.data.params == {k: str(v) for k, v in expected["hyperparameters"].items()}
    assert found.data.metrics.items() >= {k: v for k, v in expected["metrics"].items() if v}.items()


def test_nothing_is_written_but_into_the_run_and_the_store(home: Path) -> None:
    there = {path.name for path in home.iterdir()}
    assert there == {"text.txt", "cache", "run", "outputs"}
    there = {path.name for path in (home / "outputs").iterdir()}
    assert there == {"mlflow.db", "mlflow.db.lock"}


def test_a_finished_run_goes_on_in_the_same_runs(tmp_path: Path) -> None:
    run = train(tmp_path, *SIX, ALL)
    assert command(tmp_path, "resume=run", "budget.steps=8", "validation.count=1") == 0
    # The final speed of the first budget is no row of the record any more.
    own = {k: v for k, v in by_name(recorded(run)).items() if not k.startswith("perf/")}
    rows = [row for session in sessions(run) for row in history(session)]
    assert {name: by_name(rows)[name] for name in own} == own
    (found,) = mlflow_runs(tmp_path, "scratch")
    there = mlflow_points(tmp_path, found)
    assert {name: there[name] for name in own} == own


def test_seeds_of_one_process_are_runs_of_their_own(tmp_path: Path) -> None:
    store = f"logger.mlflow.tracking_uri=sqlite:///{tmp_path / 'outputs' / 'mlflow.db'}"
    cfg = settings(*tiny(tmp_path, "logger=[wandb,mlflow]", store))
    folders = {seed: tmp_path / f"s{seed}" for seed in (3, 1)}
    with process_state():
        assert train_seeds(check_run(cfg), folders, Console(quiet=True)) == {}
    for folder in folders.values():
        (session,) = sessions(folder)
        assert by_name(history(session)) == by_name(recorded(folder))
    found = mlflow_runs(tmp_path, "scratch")
    assert {run.data.tags["seed"] for run in found} == {"1", "3"}
    assert len(found) == 2


def test_the_runs_of_a_sweep_are_runs_of_their_own(tmp_path: Path) -> None:
    sweep = ("-m", "seed=1,2", "hydra/launcher=basic", "logger=[wandb,mlflow]")
    assert command(tmp_path, *tiny(tmp_path, *sweep)) == 0
    runs = run_folders(tmp_path)
    assert len(runs) == 2
    for run in runs:
        (session,) = sessions(run)
        assert by_name(history(session)) == by_name(recorded(run))
    names = {run.info.run_name for run in mlflow_runs(tmp_path, "scratch")}
    assert names == {run.name for run in runs}


OPENS = """
import sys
from pathlib import Path
from gptattn.training.trackers.mlflow_store import Mlflow
from gptattn.training.trackers.tracker import TrackedRun
run = TrackedRun(sys.argv[1], "scratch", "mha", 1, {}, Path())
tracker = Mlflow("sqlite:///outputs/mlflow.db")
tracker.close(tracker.open(run), True)
"""


def test_processes_may_open_a_new_store_at_once(tmp_path: Path) -> None:
    lines = [[sys.executable, "-c", OPENS, name] for name in ("a", "b")]
    started = [subprocess.Popen(line, cwd=tmp_path) for line in lines]
    assert [one.wait() for one in started] == [0, 0]
    assert {run.info.run_name for run in mlflow_runs(tmp_path, "scratch")} == {"a", "b"}


@pytest.mark.parametrize(
    "given",
    [
        ["logger=[wandb]", "logger.wandb.offline=false"],
        ["logger=[mlflow]", "logger.mlflow.tracking_uri=http://127.0.0.1:9"],
    ],
)
def test_a_server_that_is_gone_costs_one_line(
    given: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: Callable[[str], str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(weights_and_biases, "PATIENCE", 1)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = train(tmp_path, *SIX, *given)
    assert fingerprint(run) == whole("mha")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"warning: logger: {given[0][8:-1]}: ")
    assert line.endswith("; the run goes on, and metrics.jsonl has all rows")


def test_their_checks_find_them() -> None:
    from gptattn.training.trackers.mlflow_store import Mlflow
    from gptattn.training.trackers.weights_and_biases import Wandb

    found: list[Tracker] = [Wandb("p"), Mlflow("sqlite:///x.db"), Mlflow("http://127.0.0.1:9")]
    assert [one.missing() for one in found] == [[], [], []]
