"""Which of a run's processes this is, if torchrun, srun or Lightning has started several."""

import os

RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


def is_first() -> bool:
    """Whether this is the only process of a run, or the first of several."""
    return all(os.environ.get(name, "0") == "0" for name in RANKS)


def forget_launchers() -> None:
    """For a run in one process, remove what a launcher has left in the environment.

    torchrun's variables stay: it started this process, and others that the run does not count.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        for name in (*RANKS, "WORLD_SIZE", "SLURM_NTASKS", "LSB_JOBID"):
            os.environ.pop(name, None)
