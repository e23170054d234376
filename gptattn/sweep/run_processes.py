"""Runs planned runs, each in its own process, and gives back their losses."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from gptattn.machine.console import make_console, span
from gptattn.machine.device import resolve_device
from gptattn.runs.folder import RunFolder
from gptattn.sweep.claims import SharedQueue
from gptattn.sweep.fork_server import ForkServer, can_fork
from gptattn.sweep.ledger import Ledger
from gptattn.sweep.plan import Plan
from gptattn.sweep.processes import Outcome, Queue, Work, run_all
from gptattn.sweep.sharing import BESIDE_OTHERS, slots, threads_each, time_to_end
from gptattn.sweep.sweep_progress import SweepProgress
from gptattn.sweep.vectorize import grouped, seeds_argument


def run_in_processes(
    plans: Sequence[Plan],
    command: Callable[[Plan], list[str]],
    until: float = math.inf,
    sweep: Ledger | None = None,
) -> Iterator[tuple[Plan, float | Exception]]:
    """Run each plan in its own process. Yield the plan with its final validation loss or its error.

    A run that ended out of memory is run once more, alone, after all others. For `until` see
    `run_all`. `sweep`: the ledger of the whole sweep, which other machines may share.
    """
    groups = grouped(plans)
    parallel = min(slots(plans[0].cfg), len(groups))
    # A run has the same threads however many others are left.
    works = [_work(group, command, plans[0].together or parallel) for group in groups]
    known = all(plan.seconds is not None for plan in plans)
    console = make_console()
    console.print(_announced(len(plans), works, parallel, known))
    home = plans[0].folder.parent
    ledger = Ledger(home) if sweep is None else sweep.of(home)
    noted = {line["run"] for line in ledger.this_round()} if ledger.shared else set()
    for plan in plans:
        if plan.folder.name not in noted:
            ledger.note(plan.folder.name, "submitted", overrides=plan.overrides)
    by_folder = {plan.folder: plan for plan in plans}

    def queue(works: Sequence[Work], jobs: int, tries: int) -> Queue:
        def again(work: Work) -> Work:
            return _work([by_folder[work.folder]], command, jobs)

        tell = partial(console.print, markup=False, soft_wrap=True)
        return SharedQueue(works, ledger, again, tell, tries) if ledger.shared else Queue(works)

    shown = SweepProgress(console, works, parallel, known=known)
    with shown as progress, _server(plans) as server:
        own = queue(works, plans[0].together or parallel, 1)
        ended = run_all(works, parallel, ledger, progress, until, server, own)
        outcomes = {outcome.folder: outcome for outcome in ended}
        short = [
            plan for plan in plans if outcomes[plan.folder].out_of_memory and _can_start_again(plan)
        ]
        again = [_work([plan], command, 1) for plan in short]
        progress.retrying(again)
        own = queue(again, 1, 2)
        for outcome in run_all(again, 1, ledger, progress, until, server, own):
            outcomes[outcome.folder] = outcome
    ledger.warn_unwritten()
    for plan in plans:
        outcome = outcomes[plan.folder]
        yield plan, _loss(outcome) if outcome.done else RuntimeError(outcome.reason)


def _announced(runs: int, works: Sequence[Work], parallel: int, known: bool) -> str:
    """Return the line on what is to run; `known`: the works' weights are seconds."""
    how = f", {parallel} at a time" if parallel > 1 else ", one after the other"
    how = how if runs > 1 else ""
    models = f"{len(works)} model{'s' * (len(works) > 1)}"
    together = f" as {models}" if len(works) < runs else ""
    seconds = time_to_end((work.weight for work in works), parallel)
    about = f": about {span(seconds)}" if known else "; no time estimate: the trial failed"
    return f"{runs} to run{together}{how}{about}"


@contextlib.contextmanager
def _server(plans: Sequence[Plan]) -> Iterator[ForkServer | None]:
    """Give what starts the runs, if it pays; a process that has used a GPU cannot be copied."""
    several = len(plans) > 1 and can_fork()
    on_cpu = resolve_device(plans[0].cfg.trainer.accelerator).type == "cpu"
    with contextlib.ExitStack() as stack:
        server = None
        if several and on_cpu:
            with contextlib.suppress(OSError):  # too many processes: each run starts by itself
                server = stack.enter_context(ForkServer())
        yield server


def _can_start_again(plan: Plan) -> bool:
    """Whether the plan can start again in its folder: without checkpoints, a begun run cannot."""
    return plan.cfg.checkpoint or not plan.begun


def _work(group: Sequence[Plan], command: Callable[[Plan], list[str]], parallel: int) -> Work:
    """Return the process of these runs, which share the machine with as many as `parallel` says."""
    plan, *others = group
    threads = threads_each(plan.cfg, parallel)
    # A resumed run must keep its number of threads.
    own = [] if threads is None or plan.begun else [f"trainer.threads={threads}"]
    beside = [BESIDE_OTHERS] if parallel > 1 else []
    return Work(
        plan.folder,
        [*command(plan), *own, *seeds_argument(group), *beside],
        plan.overrides,
        sum(one.seconds or 1.0 for one in group),
        {other.folder: other.overrides for other in others},
    )


def _loss(outcome: Outcome) -> float | Exception:
    loss = RunFolder(outcome.folder).final_loss()
    return RuntimeError("its summary.json has no loss") if loss is None else loss
