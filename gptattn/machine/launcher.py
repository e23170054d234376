"""Which of a run's processes this is: of those that torchrun, srun or Lightning has started.

What a launcher has left in a shell does not count: `forget_other_launchers` removes it.
"""

import os

STARTED = "GPTATTN_STARTED"  # set for the processes that Lightning starts
# What shows that a launcher has started this process -> where its number is.
RANKS = {
    "TORCHELASTIC_RUN_ID": "RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",  # of srun, and not of the script that calls it
    STARTED: "LOCAL_RANK",
}
# All by which Lightning and torch take a process for one of several.
VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS", "SLURM_PROCID"),
    *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK"),
)


def find_launcher() -> str | None:
    """Return the variable of RANKS whose launcher has started this process, or None."""
    alone = os.environ.get("SLURM_STEP_NUM_TASKS") == "1"  # as of `srun --pty bash`
    found = [name for name in RANKS if name in os.environ and not (alone and "SLURM" in name)]
    return found[0] if found else None


def is_first() -> bool:
    """Whether this is the only process of a run, or the first of several."""
    return os.environ.get(RANKS.get(find_launcher() or "", ""), "0") == "0"


def count_started() -> tuple[int, int] | None:
    """Return how many processes on this machine, and machines, a launcher has started, or None."""
    launcher, read = find_launcher(), os.environ.get
    if launcher is None or launcher == STARTED:
        return None
    if launcher == "TORCHELASTIC_RUN_ID":
        return int(read("LOCAL_WORLD_SIZE", 1)), int(read("GROUP_WORLD_SIZE", 1))
    nodes = int(read("SLURM_STEP_NUM_NODES", 1))
    return int(read(launcher, 1)) // nodes, nodes


def forget_other_launchers() -> None:
    """Remove what launchers that have not started this process have left in its environment."""
    launcher = find_launcher()
    for name in VARIABLES if launcher is None else ():
        os.environ.pop(name, None)
    if launcher == "SLURM_STEP_NUM_TASKS" and (started := count_started()) is not None:
        os.environ["SLURM_NTASKS_PER_NODE"] = str(started[0])  # Lightning reads the job's, or fails
