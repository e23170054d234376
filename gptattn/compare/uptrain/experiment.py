"""Which of the runs belong together: originals, what was made from them, the same from scratch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from gptattn import command
from gptattn.compare.finished_runs import Run, one_line
from gptattn.compare.groups import counted
from gptattn.compare.sections import MUST_AGREE, words_of
from gptattn.errors import ConfigError, DataError
from gptattn.machine.untrusted import read_yaml
from gptattn.settings.config import INIT_METHODS

MULTIRUN_BYTES = 1_000_000  # of Hydra's multirun.yaml; it writes 10 kB
Cell = tuple[str, str, int]  # target, method, steps of uptraining


@dataclass(frozen=True)
class Experiment:
    """Runs of one uptraining experiment, each list by seed, at most one run a seed."""

    originals: list[Run]
    cells: dict[Cell, list[Run]]
    scratch: dict[str, list[Run]]  # each target trained from scratch as long as the originals

    @property
    def source(self) -> str:
        return self.originals[0].variant

    @property
    def original_steps(self) -> int:
        return self.originals[0].steps

    @property
    def tokens_per_step(self) -> int:
        settings = self.originals[0].settings
        return int(settings["batch_size"]) * int(settings["model.context_length"])

    @property
    def targets(self) -> list[str]:
        """Those with the larger cache first."""
        cache = {
            target: -members[0].metrics.get("cost/kv_bytes_per_token", 0.0)
            for (target, _, _), members in self.cells.items()
        }
        return sorted(cache, key=lambda target: (cache[target], target))

    @property
    def methods(self) -> list[str]:
        """In the order of the paper, by rising loss."""
        return [m for m in INIT_METHODS if any(method == m for _, method, _ in self.cells)]

    @property
    def steps(self) -> list[int]:
        return sorted({steps for _, _, steps in self.cells})

    def share(self, steps: int) -> float:
        """The paper's α: steps of uptraining over the original's."""
        return steps / self.original_steps


def find_experiment(runs: Sequence[Run]) -> Experiment:
    """The experiment in these runs. Of runs with equal settings and seed the newest count.

    Raises DataError where none of them started from another, ConfigError where they are of several
    experiments.
    """
    runs = sorted(runs, key=lambda run: run.finished)
    names = {run.origin for run in runs}
    named = [run for run in runs if run.folder.name in names]
    # A later run of the same seed takes the earlier one's place, and so do those made from it.
    originals = _newest(named)
    kept = {run.folder.name: run for run in originals}
    children = [
        run
        for run in runs
        if (original := kept.get(run.origin)) is not None
        # Going on as before is no conversion; and what is paired by seed has the original's.
        and (run.variant != original.variant and run.seed == original.seed)
    ]
    if not children:
        raise DataError(
            "run folder",
            "no run there started from the weights of another one there; "
            f"{command('train')} -m experiment=uptrain makes some",
        )
    _check_alike("originals", named, ())
    _check_alike("uptrained runs", children, ("variant", "code", "attn.", "init_method", "budget"))
    targets = sorted({run.variant for run in children})
    for target in targets:
        members = [run for run in children if run.variant == target]
        _check_alike(f"uptrained {target}", members, ("init_method", "budget"))
    _check_comparable([*originals, *children])
    cells: dict[Cell, list[Run]] = {}
    for run in children:
        method = run.settings.get("init_method", INIT_METHODS[0])
        cells.setdefault((run.variant, method, run.steps), []).append(run)
    return Experiment(
        originals,
        {cell: _newest(members) for cell, members in cells.items()},
        {target: _scratch(runs, target, originals[0]) for target in targets},
    )


def _newest(runs: Sequence[Run]) -> list[Run]:
    """The last of each seed, by seed."""
    return sorted({run.seed: run for run in runs}.values(), key=lambda run: run.seed)


def _scratch(runs: Sequence[Run], target: str, original: Run) -> list[Run]:
    """The target's runs from scratch that differ from the original in nothing but attention."""
    own = ("variant", "code", "attn.", "init_")
    same = _kept(original, own)
    found = [run for run in runs if run.variant == target and not run.origin]
    found = [run for run in found if _kept(run, own) == same]
    _check_alike(f"runs of {target} from scratch", found, ())
    return _newest(found)


def _kept(run: Run, without: tuple[str, ...]) -> dict[str, str]:
    settings = {"variant": run.variant, "code": run.code, **run.settings}
    return {key: value for key, value in settings.items() if not key.startswith(without)}


def _check_alike(what: str, runs: Sequence[Run], without: tuple[str, ...]) -> None:
    """Raise ConfigError where runs differ in settings other than `without`."""
    kept = [_kept(run, without) for run in runs]
    for key in sorted({key for settings in kept for key in settings}):
        values = [settings.get(key, "none") for settings in kept]
        if len(set(values)) > 1:
            raise ConfigError(
                "run folder",
                f"the {what} differ in {key} ({counted(values)}); give one experiment's folder",
            )


def _check_comparable(runs: Sequence[Run]) -> None:
    for name in (*MUST_AGREE, "model"):
        values = [words_of(name, run) for run in runs]
        if len(set(values)) > 1:
            raise ConfigError(
                "run folder", f"the runs differ in {name} ({counted(values)}); they must not"
            )


def command_of(folder: Path) -> str | None:
    """The sweep's command line, as its folder's multirun.yaml has it; None where it has none."""
    file = folder / "multirun.yaml"
    try:
        given = read_yaml(file, MULTIRUN_BYTES)["hydra"]["overrides"]
        stage = [text for text in map(str, given["hydra"]) if text.startswith("hydra.sweeper.")]
        return one_line(f"{command('train')} -m {' '.join([*map(str, given['task']), *stage])}")
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return None
