"""MLflow: a file on this machine unless `tracking_uri` names a server."""

import logging
import os
from typing import Any

from gptattn.training.trackers.tracker import TrackedRun, Tracker

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
        from lightning.pytorch.loggers.mlflow import MLFlowLogger
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        logger = MLFlowLogger(
            experiment_name=run.experiment,
            run_name=run.name,
            tracking_uri=self.tracking_uri,
            tags={"variant": run.variant, "seed": str(run.seed)},
            run_id=run.id,
        )
        try:
            client = logger.experiment
        except MlflowException:
            client = logger.experiment  # another run has just made the MLflow experiment
        given = run.hyperparameters
        if run.id is not None:
            client.update_run(run.id, status="RUNNING")
            # A parameter cannot be changed: the budget stays that of the run's beginning.
            there = client.get_run(run.id).data.params
            given = {name: value for name, value in given.items() if name not in there}
        logger.log_hyperparams(given)
        return logger
