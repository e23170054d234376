"""The run's rows as one table, `metrics.csv`."""

from typing import Any

from gptattn.training.trackers.tracker import TrackedRun, Tracker

FOLDER = "csv"


class Csv(Tracker):
    """Lightning's CSVLogger, which writes each row at once.

    It drops a table that is there already, so a resumed run writes all of its rows again.
    """

    keeps: bool = False

    def open(self, run: TrackedRun) -> Any:
        from lightning.pytorch.loggers.csv_logs import CSVLogger, ExperimentWriter

        # The logger would remove them itself, with a warning.
        for name in (ExperimentWriter.NAME_METRICS_FILE, ExperimentWriter.NAME_HPARAMS_FILE):
            (run.place / FOLDER / name).unlink(missing_ok=True)
        logger = CSVLogger(run.place, FOLDER, version="", flush_logs_every_n_steps=1)
        logger.log_hyperparams(run.hyperparameters)
        return logger
