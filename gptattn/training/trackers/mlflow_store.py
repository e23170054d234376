"""MLflow: a file on this machine unless `tracking_uri` names a server."""

import contextlib
import fcntl
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptattn.machine.untrusted import open_to_append
from gptattn.training.trackers.tracker import TrackedRun, Tracker

FILE = "sqlite:///"  # before the path of a file on this machine
# Read when mlflow is imported; a user's own values count. A server that is gone would otherwise be
# tried for minutes, and usage figures be sent.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class Mlflow(Tracker):
    """Lightning's MLFlowLogger. A run lies in the experiment's MLflow experiment.

    Its tags tell its variant and its seed. `tracking_uri` is as MLflow has it.
    """

    install: str = "'gptattn[mlflow]'"

    def __init__(self, tracking_uri: str) -> None:
        self.tracking_uri = tracking_uri
        store = ("sqlalchemy", "alembic") if tracking_uri.startswith("sqlite:") else ()
        self.libraries = ("mlflow", *store)

    def open(self, run: TrackedRun) -> Any:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import mlflow  # noqa: F401  # pyright: ignore[reportMissingImports]
        from lightning.pytorch.loggers.mlflow import MLFlowLogger

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module=r"(mlflow|alembic|sqlalchemy)\b")
        uri = self.tracking_uri
        if uri.startswith(FILE):  # mlflow keeps what it has opened by this name
            uri = f"{FILE}{Path(uri.removeprefix(FILE)).absolute()}"
        with _alone(uri):
            logger = MLFlowLogger(
                experiment_name=run.experiment,
                run_name=run.name,
                tracking_uri=uri,
                tags={"variant": run.variant, "seed": str(run.seed)},
                run_id=run.id,
            )
            client = logger.experiment
        given = run.hyperparameters
        if run.id is not None:
            client.update_run(run.id, status="RUNNING")
            # A parameter cannot be changed: the budget stays that of the run's beginning.
            there = client.get_run(run.id).data.params
            given = {name: value for name, value in given.items() if name not in there}
        logger.log_hyperparams(given)
        return logger


@contextlib.contextmanager
def _alone(tracking_uri: str) -> Iterator[None]:
    """Wait for other processes that open the same file: two that prepare a new one spoil it."""
    path = tracking_uri.removeprefix(FILE)
    if path == tracking_uri:
        yield
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open_to_append(Path(f"{path}.lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        yield
