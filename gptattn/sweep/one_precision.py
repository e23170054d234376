"""`trainer.precision=auto` in a sweep: one precision for all of its runs.

As a command, `python -m gptattn.sweep.one_precision`: reads a run's settings from stdin as JSON,
and prints the seconds of a step in 32-true and in bf16-mixed.
"""

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gptattn.errors import ConfigError
from gptattn.machine.console import make_console
from gptattn.machine.device import resolve_device
from gptattn.runs.folder import CONFIG, RunFolder
from gptattn.settings.build import build_tokenizer
from gptattn.settings.config import Precision, TrainConfig, check
from gptattn.settings.values import typed
from gptattn.sweep.plan import Plan
from gptattn.sweep.sharing import largest, slots, threads_each, work_sizes
from gptattn.training.precision import (
    CHOICES,
    choice_words,
    faster,
    step_seconds,
    with_precision,
)

LIMIT_SECONDS = 60
PATIENCE_SECONDS = 90.0  # the trial's imports, and LIMIT_SECONDS, which it enforces itself
GUESSED_VOCABULARY = 256  # of a tokenizer that is made from the text


class OnePrecision:
    """Settles `auto` for the runs of the sweep in `folder`: all get the same precision.

    A sweep that goes on keeps what its runs have; otherwise the largest run is timed in a process
    of its own, where a variant that crashes or hangs costs the trial alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._chosen: Precision | None = None

    def settled(self, plans: Sequence[Plan]) -> list[Plan]:
        """Return the plans, `auto` replaced, and the choice added to the runs' overrides."""
        asking = [plan for plan in plans if plan.cfg.trainer.precision == "auto"]
        if not asking:
            return list(plans)
        if asking[0].cfg.sweep.shared:
            raise ConfigError(
                "trainer.precision",
                "auto may come out differently on each machine of sweep.shared; give 32-true or "
                "bf16-mixed",
            )
        if self._chosen is None:
            self._chosen = self._kept(asking)
            if self._chosen is None:
                self._chosen = _measured([plan.cfg for plan in asking])
            else:
                kept = f"trainer.precision=auto: {self._chosen}, as chosen before"
                make_console().print(kept, soft_wrap=True)
        chosen = self._chosen
        return [
            _with_choice(plan, chosen) if plan.cfg.trainer.precision == "auto" else plan
            for plan in plans
        ]

    def _kept(self, plans: Sequence[Plan]) -> Precision | None:
        """Return what most runs have for which `auto` was settled, of these sizes and device."""
        works = [work_sizes(asdict(plan.cfg)) for plan in plans]
        device = resolve_device(plans[0].cfg.trainer.accelerator).type
        found: Counter[Precision] = Counter()
        for file in (*self.folder.glob(f"*/{CONFIG}"), *self.folder.glob(f"*/*/{CONFIG}")):
            folder = RunFolder(file.parent)
            try:
                settings = folder.read_settings()
                trainer, making = settings["trainer"], folder.read_making()
                auto = trainer.get("auto_precision") and trainer["precision"] in CHOICES
                here = making is not None and making.device == device
                if auto and here and work_sizes(settings) in works:
                    found[trainer["precision"]] += 1
            except (OSError, ValueError, LookupError, TypeError, AttributeError):
                continue  # an incomplete record decides nothing
        return found.most_common(1)[0][0] if found else None


def _with_choice(plan: Plan, chosen: Precision) -> Plan:
    own = [f"trainer.precision={chosen}", "trainer.auto_precision=true"]
    overrides = [*plan.overrides, *own]  # of two values of a setting, Hydra takes the last
    return replace(plan, cfg=with_precision(plan.cfg, chosen), overrides=overrides)


def _measured(cfgs: Sequence[TrainConfig]) -> Precision:
    """Time the largest of the models; print and return the faster precision."""
    cfg = largest(cfgs)
    check(cfg)  # a wrong value is better told before the trial than after it
    threads = cfg.trainer.threads or threads_each(cfg, slots(cfg))
    cfg = replace(cfg, trainer=replace(cfg.trainer, threads=threads))
    command = [sys.executable, "-m", "gptattn.sweep.one_precision"]
    asked = json.dumps(asdict(cfg)).encode()
    try:
        done = subprocess.run(
            command, input=asked, capture_output=True, timeout=PATIENCE_SECONDS, check=True
        )
        wide, half = json.loads(done.stdout.splitlines()[-1])  # a variant may print lines before
    except (subprocess.SubprocessError, OSError, ValueError, LookupError, TypeError):
        make_console().print("trainer.precision=auto: 32-true; the trial failed")
        return "32-true"
    make_console().print(choice_words(wide, half), soft_wrap=True)
    return faster(wide, half)


def main() -> None:
    """Read the settings from stdin and print the answer as the last line of stdout."""
    cfg = typed(TrainConfig, json.load(sys.stdin))
    signal.alarm(LIMIT_SECONDS)  # the system ends a trial that hangs, even if the sweep is gone
    vocabulary = build_tokenizer(cfg).vocab_size or GUESSED_VOCABULARY
    print("\n" + json.dumps(step_seconds(cfg, vocabulary)))


if __name__ == "__main__":
    main()
