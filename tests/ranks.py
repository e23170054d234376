"""A run's processes as torchrun starts them: forks of this one, which has torch already."""

import functools
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from support import command, tiny
from tortures.bench import Process, undisturbed

# Validations come after steps 2, 4 and 6, and log_every is 3: mostly at different steps.
SHARED = (
    "trainer=ddp",
    "trainer.accelerator=cpu",
    "trainer.threads=1",
    "model.num_layers=2",
    "batch_size=8",
    "accumulate=2",
    "budget.steps=6",
    "validation.count=3",
    "log_every=3",
    "hydra.run.dir=run",
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@functools.cache
def warm_up() -> None:
    """Make a run in this process, once: a fork then need not import and look up what it did."""
    with tempfile.TemporaryDirectory() as folder:
        assert (
            command(Path(folder), *tiny(Path(folder), "budget.steps=1", "validation.count=1")) == 0
        )


Inside = Callable[[int], object]


class Ranks:
    """The processes of `train.py ARGUMENTS` in `folder`; `inside` is called in each with its rank.

    Each has its log of its own.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        size: int = 2,
        inside: Inside = lambda rank: undisturbed(),
    ) -> None:
        warm_up()
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, port = folder, free_port()

        def started(rank: int) -> Process:
            def begin() -> None:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
                meeting = {"LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
                os.environ.update({name: str(value) for name, value in (place | meeting).items()})
                os.environ["MASTER_ADDR"] = "127.0.0.1"
                # Not what pytest has put in their place.
                sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
                sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
                inside(rank)

            return Process(folder, folder / f"log{rank}", arguments, begin)

        self.processes = [started(rank) for rank in range(size)]

    def codes(self) -> list[int]:
        """Their exit codes, once all have ended."""
        return [process.wait() for process in self.processes]

    def text(self) -> str:
        """What they have printed, one after the other."""
        return "".join(process.text() for process in self.processes)

    def errors(self) -> list[str]:
        return [line for line in self.text().splitlines() if line.startswith("error: ")]


def begun(
    folder: Path,
    *overrides: str,
    size: int = 2,
    inside: Inside = lambda rank: undisturbed(),
) -> Ranks:
    """A tiny run of so many processes; with 1, that of one process alone."""
    return Ranks(folder, *tiny(folder, *SHARED, *overrides), size=size, inside=inside)


def trained(
    folder: Path,
    *overrides: str,
    size: int = 2,
    inside: Inside = lambda rank: undisturbed(),
) -> Path:
    """Train a tiny run to its end; return its folder."""
    ranks = begun(folder, *overrides, size=size, inside=inside)
    assert ranks.codes() == [0] * size, ranks.text()
    return folder / "run"


def resumed(folder: Path, *overrides: str, size: int = 2) -> Ranks:
    ranks = Ranks(folder, "resume=run", *overrides, size=size)
    assert ranks.codes() == [0] * size, ranks.text()
    return ranks
