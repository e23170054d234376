"""Runs planned runs, each in its own process, and gives back their losses."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

from gptattn.machine.console import make_console, span
from gptattn.machine.device import resolve_device
from gptattn.runs.folder import RunFolder
from gptattn.sweep.fork_server import ForkServer, can_fork
from gptattn.sweep.ledger import Ledger
from gptattn.sweep.plan import Plan
from gptattn.sweep.processes import Outcome, Work, run_all
from gptattn.sweep.sharing import slots, threads_each
from gptattn.sweep.sweep_progress import SweepProgress
from gptattn.sweep.vectorize import grouped, seeds_argument


def run_in_processes(
    plans: Sequence[Plan], command: Callable[[Plan], list[str]], until: float = math.inf
) -> Iterator[tuple[Plan, float | Exception]]:
    """Run each plan in its own process. Yield the plan with its final validation loss or its error.

    A run that ended out of memory is run once more, alone, after all others. For `until` see
    `run_all`.
    """
    cfg = plans[0].cfg
    groups = grouped(plans)
    console, parallel, threads = make_console(), min(slots(cfg), len(groups)), threads_each(cfg)
    works = [_work(group, command, threads) for group in groups]
    known = [plan.seconds for plan in plans if plan.seconds is not None]
    how = f", {parallel} at a time" if parallel > 1 else ", one after the other"
    how = how if len(plans) > 1 else ""
    about = (
        f": about {span(sum(known) / parallel)}"
        if len(known) == len(plans)
        else "; no time estimate: the trial failed"
    )
    models = f"{len(groups)} model{'s' * (len(groups) > 1)}"
    together = f" as {models}" if len(groups) < len(plans) else ""
    console.print(f"{len(plans)} to run{together}{how}{about}")
    ledger = Ledger(plans[0].folder.parent)
    shown = SweepProgress(console, works, parallel, known=len(known) == len(plans))
    with shown as progress, _server(plans) as server:
        ended = run_all(works, parallel, ledger, progress, until, server)
        outcomes = {outcome.folder: outcome for outcome in ended}
        short = [
            plan for plan in plans if outcomes[plan.folder].out_of_memory and _can_start_again(plan)
        ]
        again = [_work([plan], command, threads) for plan in short]
        progress.retrying(again)
        for outcome in run_all(again, 1, ledger, progress, until, server):
            outcomes[outcome.folder] = outcome
    ledger.warn_unwritten()
    for plan in plans:
        outcome = outcomes[plan.folder]
        yield plan, _loss(outcome) if outcome.done else RuntimeError(outcome.reason)


def _server(plans: Sequence[Plan]) -> contextlib.AbstractContextManager[ForkServer | None]:
    """Return what starts the runs, if it pays; a process that has used a GPU cannot be copied."""
    several = len(plans) > 1 and can_fork()
    on_cpu = resolve_device(plans[0].cfg.trainer.accelerator).type == "cpu"
    return ForkServer() if several and on_cpu else contextlib.nullcontext()


def _can_start_again(plan: Plan) -> bool:
    """Whether the plan can start again in its folder: without checkpoints, a begun run cannot."""
    return plan.cfg.checkpoint or not plan.begun


def _work(group: Sequence[Plan], command: Callable[[Plan], list[str]], threads: int | None) -> Work:
    plan, *others = group
    # A resumed run must keep its number of threads.
    own = [] if threads is None or plan.begun else [f"trainer.threads={threads}"]
    return Work(
        plan.folder,
        [*command(plan), *own, *seeds_argument(group)],
        plan.overrides,
        sum(one.seconds or 1.0 for one in group),
        {other.folder: other.overrides for other in others},
    )


def _loss(outcome: Outcome) -> float | Exception:
    loss = RunFolder(outcome.folder).final_loss()
    return RuntimeError("its summary.json has no loss") if loss is None else loss
