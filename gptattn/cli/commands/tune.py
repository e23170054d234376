"""Searches the best learning rate of each variant with Optuna, to compare each at its own best.

`gptattn-tune --variants mha,gqa,gqa+gate --trials 12 model=nano budget.steps=500`: the overrides
are those of training, and what follows a + is a part. Needs the extra tune. It may be stopped at
any time: the same command continues the search, up to `--trials` in all. At the end it prints the
commands that train each variant at its best rate over five seeds, into one folder to compare.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from gptattn import command
from gptattn.cli.ending import ended
from gptattn.cli.jobs import quoted
from gptattn.cli.main import check_job
from gptattn.errors import ConfigError
from gptattn.machine.console import make_console
from gptattn.runs.folder import RunFolder
from gptattn.sweep.ledger import Ledger
from gptattn.sweep.processes import Outcome, Work, run_all

if TYPE_CHECKING:
    import optuna

SEED = 1  # of the sampler


class FailedTrialError(Exception):
    """A trial without a final loss. Optuna marks it as failed and continues."""


class TrialLines:
    """A `Watcher` that prints a line for each trial that ends."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def started(self, work: Work) -> None: ...

    def running(self, works: Sequence[Work]) -> None: ...

    def ended(self, work: Work, outcome: Outcome) -> None:
        loss = RunFolder(outcome.folder).final_loss()
        end = outcome.reason or "no loss" if loss is None else f"val loss {loss:.4f}"
        self.console.print(f"{work.folder.name}: {end}", markup=False)


def objective(args: argparse.Namespace, variant: str, trial: "optuna.Trial") -> float:
    """Train with a rate that Optuna suggests, in a separate process; return the validation loss.

    Raises FailedTrialError if the run has none.
    """
    lr = trial.suggest_float("optim.lr", args.low, args.high, log=True)
    overrides = [*args.overrides, *_choices(variant), f"optim.lr={lr:.4g}"]
    folder = args.out / f"{variant},optim.lr={lr:.4g}_t{trial.number}"
    place = f"hydra.run.dir={quoted(str(folder))}"
    command = [sys.executable, "-m", "gptattn.cli.worker", *overrides, place]
    work = Work(folder, command, overrides, 1.0)
    (outcome,) = run_all([work], 1, Ledger(args.out), TrialLines(args.console))
    loss = RunFolder(folder).final_loss()
    if loss is None:
        raise FailedTrialError(outcome.reason)
    return loss


def _choices(variant: str) -> list[str]:
    """Return the overrides that choose this variant: an attention, and parts after a +."""
    attn, *parts = variant.split("+")
    return [f"attn={attn}", *([f"part=[{','.join(parts)}]"] if parts else [])]


def tune(args: argparse.Namespace, variant: str) -> "optuna.Study":
    """Run the variant's missing trials; return its study, which is kept in optuna.db."""
    import optuna

    study = optuna.create_study(
        study_name=" ".join([variant, *args.overrides]),
        storage=f"sqlite:///{args.out / 'optuna.db'}",
        sampler=optuna.samplers.TPESampler(seed=SEED),
        load_if_exists=True,
    )
    left = args.trials - len(study.trials)
    if left > 0:
        study.optimize(partial(objective, args, variant), n_trials=left, catch=FailedTrialError)
    return study


def parse() -> argparse.Namespace:
    """Parse the command line and check one run of each variant. Raises a UserError."""
    parser = argparse.ArgumentParser(description="Search the best learning rate of each variant.")
    parser.add_argument(
        "--variants",
        default="mha,gqa,mqa",
        help="comma-separated, with parts as gqa+gate; default: %(default)s",
    )
    parser.add_argument(
        "--trials", type=int, default=12, help="per variant, in all; default: %(default)s"
    )
    parser.add_argument("--low", type=float, default=3e-4, help="lowest rate; default: %(default)s")
    parser.add_argument(
        "--high", type=float, default=3e-2, help="highest rate; default: %(default)s"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/tune"), help="default: %(default)s"
    )
    parser.add_argument("overrides", nargs="*", help="settings, as for train.py")
    args = parser.parse_args()
    args.variants = args.variants.split(",")
    if args.trials < 1:
        raise ConfigError("--trials", f"{args.trials} is too few; give 1 or more")
    if not 0 < args.low < args.high:
        raise ConfigError("--low", f"{args.low} to {args.high} is not a range; give 0 < low < high")
    for variant in args.variants:
        check_job([*args.overrides, *_choices(variant)])
    return args


def main() -> int:
    """Run `gptattn-tune`; return the exit code."""
    return ended(run)


def run() -> int:
    """Search, then print the training commands. Return 1 if a variant has no finished trial."""
    args = parse()
    try:
        import optuna
    except ModuleNotFoundError:
        raise ConfigError("optuna", "is not installed; pip install 'gptattn[tune]'") from None
    args.console = make_console()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with Ledger(args.out):
        studies = {variant: tune(args, variant) for variant in args.variants}
    code = 0
    print("\nTrain each at its best rate:")
    for variant, study in studies.items():
        done = study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
        if not done:
            print(f"# {variant}: every trial failed; see {args.out / 'ledger.jsonl'}")
            code = 1
            continue
        best = f"optim.lr={study.best_params['optim.lr']:.4g}"
        own = ["seed=1,2,3,4,5", "experiment_name=tuned", *args.overrides]
        words = shlex.join([*_choices(variant), best, *own])
        print(f"{command('train')} -m {words}  # {study.best_value:.4f}")
    print(f"{command('compare')} outputs/tuned")
    return code
