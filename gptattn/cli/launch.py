"""How a run gets several processes: from torchrun or srun, or else from here, on this machine."""

import logging
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from gptattn.cli.ending import as_user_error, ended, report
from gptattn.errors import ConfigError, UserError
from gptattn.machine.place import Elsewhere, Place
from gptattn.machine.signals import ending_at_once, handled_signals
from gptattn.settings.config import TrainConfig, check
from gptattn.settings.identity import differences

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from gptattn.machine.world import World
    from gptattn.training.precheck import Ready

SAVING_SECONDS = "120"  # after a signal, until a process that has not ended is killed


def placed(cfg: TrainConfig, place: Place) -> TrainConfig:
    """Return the settings with the number of processes that there are, or that are to be started.

    Raises ConfigError if it is not the number that has been started.
    """
    devices, nodes = cfg.trainer.devices, cfg.trainer.num_nodes
    if place.size == 1 and not place.launched:
        devices = _devices_here(cfg.trainer.accelerator) if devices == "auto" else devices
        nodes = 1 if nodes == "auto" else nodes
    elif place.size % place.local_size:
        raise ConfigError(
            "trainer.devices",
            f"{place.size} processes have been started, not as many on each machine; "
            "give srun --ntasks-per-node",
        )
    elif devices not in ("auto", place.local_size):
        raise ConfigError(
            "trainer.devices",
            f"is {devices}, but {place.local_size} processes have been started on this machine; "
            f"give trainer=ddp, or trainer.devices={place.local_size}",
        )
    elif nodes not in ("auto", place.nodes):
        raise ConfigError(
            "trainer.num_nodes",
            f"is {nodes}, but the processes run on {place.nodes}; "
            f"give trainer.num_nodes={place.nodes}",
        )
    else:
        devices, nodes = place.local_size, place.nodes
    settled = replace(cfg, trainer=replace(cfg.trainer, devices=devices, num_nodes=nodes))
    check(settled)
    return settled


def _devices_here(accelerator: str) -> int:
    if accelerator == "cpu":
        return 1
    with ending_at_once():
        import torch
    return max(1, torch.cuda.device_count())


def joined(cfg: TrainConfig, place: Place) -> "World":
    """Return the processes of this run, met; start them if nobody has, and exit as they do.

    `cfg` is from `placed`. Raises ConfigError if they need more machines or GPUs than there are.
    """
    processes = cfg.trainer.processes
    if not place.launched and cfg.trainer.num_nodes != 1:
        raise ConfigError(
            "trainer.num_nodes",
            f"{cfg.trainer.num_nodes} machines need a start on each: torchrun "
            f"--nnodes={cfg.trainer.num_nodes} --nproc-per-node={cfg.trainer.devices} train.py, "
            "or srun; docs/scale.md",
        )
    # torch takes seconds to import, so what needs it comes last.
    with ending_at_once():
        from gptattn.machine.device import resolve_device
        from gptattn.machine.world import ALONE, join
    if place.size == processes == 1:
        return ALONE
    device = resolve_device(cfg.trainer.accelerator)
    _check_gpus(cfg, device.type)
    if not place.launched and processes > 1:
        # `main` has taken the flag out.
        _start(processes, [*sys.argv[1:], *(["--debug"] if "--debug" in sys.orig_argv else [])])
    return join(place, device)


def agreed(world: "World", ready: "Ready") -> "Ready":
    """Return the run with the precision that the first process found to be faster.

    Raises ConfigError if another process would train with other code, text or starting weights.
    """
    trainer, making = world.of_first((ready.cfg.trainer, ready.making))

    def check_making() -> None:
        assert ready.making is not None
        if found := differences(making, ready.making):
            raise ConfigError(
                "trainer.num_nodes",
                f"{platform.node()} is not like the first machine: {', '.join(found)}; "
                "give all machines the same",
            )

    world.together(check_making)
    return replace(ready, cfg=replace(ready.cfg, trainer=trainer))


def _check_gpus(cfg: TrainConfig, kind: str) -> None:
    import torch

    wanted = cfg.trainer.devices
    if kind != "cuda" or wanted == 1:
        return
    there = torch.cuda.device_count()
    if isinstance(wanted, int) and wanted > there:
        raise ConfigError(
            "trainer.devices", f"{wanted} processes need as many GPUs, and there are {there} here"
        )


def _start(processes: int, arguments: Sequence[str]) -> NoReturn:
    """Start the run's processes with torchrun's own launcher, and exit with their code."""
    with ending_at_once():
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # It tells of each process that it ends; ours say why themselves. Its loggers have their own
    # levels, and this process does nothing else.
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each process sets its own number of threads
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SAVING_SECONDS)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        run_id=str(os.getpid()),
        max_restarts=0,
        signals_to_handle=",".join(number.name for number in handled_signals()),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "gptattn.cli.process", *arguments)
    except ChildFailedError as failed:
        raise SystemExit(_exit_code(failed)) from failed
    except SignalException as stopped:
        raise SystemExit(128 + stopped.sigval) from stopped
    raise SystemExit(0)


def _exit_code(failed: "ChildFailedError") -> int:
    rank, failure = failed.get_first_failure()
    if failure.exitcode >= 0:
        return failure.exitcode
    if rank == 0:  # any other is missed by the first one, which then says so
        report(_lost(f"process 0 was ended by {signal.Signals(-failure.exitcode).name}"))
    return 128 - failure.exitcode


def _lost(what: str) -> UserError:
    return UserError(
        "trainer.devices", f"{what}; resume=... continues from the newest checkpoint, if any"
    )


def ended_together(run: Callable[[], int | None], place: Place, debug: bool) -> int:
    """As `ended`, for a process that may be one of several: one of them says what ends all."""
    if place.size == 1:
        return ended(run, debug)
    # Else torch prints stack traces where another process has died; ours is one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    failed: list[bool] = []  # here; True: and said here

    def once() -> int | None:
        try:
            return run()
        except KeyboardInterrupt:
            if place.first:
                raise
            return 130
        except BrokenPipeError:
            raise
        except Elsewhere as end:
            failed.append(False)
            return int(end.code or 1)
        except Exception as error:
            shown, code = _to_say(error, place)
            failed.append(shown is not None)
            return code if shown is None else report(shown, debug)

    code = ended(once, debug)
    with ending_at_once():
        from gptattn.machine.world import end_early, joined, leave

    if failed == [True] and place.first and not joined():
        end_early(place, code)
    return leave(code, speaks=failed[0] if failed else place.first)


def _to_say(error: Exception, place: Place) -> tuple[Exception | None, int]:
    """Return what this process is to say of the error, if anything, and its exit code."""
    code = getattr(as_user_error(error), "exit_code", 1)
    if place.first and "torch" not in sys.modules:
        return error, code  # the error's line need not wait for torch
    with ending_at_once():
        from gptattn.machine.world import end_early, first_to_fail, is_lost, joined, told

    if is_lost(error):
        known = told()
        return _broken(error) if known is None and place.first else None, known or 1
    if joined():
        return error if first_to_fail() else None, code
    early = None if place.first else end_early(place, code)
    return (error, code) if early is None else (None, early)


def _broken(error: Exception) -> UserError:
    what = "another process of this run has died"
    if "NCCL" in str(error):  # which fails for other reasons too
        what = f"GPUs cannot exchange with each other ({str(error)[:300]})"
    lost = _lost(what)
    lost.__cause__ = error  # --debug shows it
    return lost
