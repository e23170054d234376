"""Weights & Biases. Offline unless asked: what is logged then lies in the run's folder."""

import os
from typing import Any

from gptattn.training.trackers.tracker import TrackedRun, Tracker

PATIENCE = 20  # seconds for a server to answer at the start, and for the last rows at the end


class Wandb(Tracker):
    """Lightning's WandbLogger. A run's group is its variant, its job type the experiment.

    `entity`: a team; None: the user's own. With `offline`, `wandb sync` sends the run later.
    """

    libraries: tuple[str, ...] = ("wandb",)
    install: str = "'gptattn[wandb]'"

    def __init__(self, project: str, entity: str | None = None, offline: bool = True) -> None:
        self.project, self.entity, self.offline = project, entity, offline

    def open(self, run: TrackedRun) -> Any:
        # Its reports of its own errors; read when wandb is imported.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # pyright: ignore[reportMissingImports]
        from lightning.pytorch.loggers.wandb import WandbLogger

        wandb.setup(wandb.Settings(silent=True))  # or it prints before `init` has its settings
        logger = WandbLogger(
            name=run.name,
            save_dir=run.place,
            version=run.id,
            project=self.project,
            entity=self.entity,
            group=run.variant,
            job_type=run.experiment,
            # Not `offline`, which stays in the environment.
            mode="offline" if self.offline else "online",
            reinit="create_new",  # the seeds of one process are runs of their own
            settings=wandb.Settings(
                console="off",
                silent=True,
                symlink=False,
                init_timeout=PATIENCE,
                finish_timeout=PATIENCE,
                finish_timeout_raises=True,
            ),
        )
        logger.log_hyperparams(run.hyperparameters)
        return logger

    def close(self, logger: Any, done: bool) -> None:
        super().close(logger, done)
        logger.experiment.finish(exit_code=0 if done else 1)
