"""Measures on one GPU what decides defaults and claims, in at most ten minutes.

Each item has its own process and time limit, so a hang or a crash costs only that item. The most
decisive items run first. Each result is saved to OUT/ITEM.json at once. Run the same command with
the same `out` to measure what is missing, then what failed. With `device=cpu tiny=true` everything
runs on a CPU; what needs a GPU says so.

Prints all results in `out`, then the goals. Exit code 1: something failed or is missing.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from gptattn.cli.arguments import Count, option, parse
from gptattn.errors import ConfigError
from measuring.gpu_items import IDS, ITEMS, MODES, Cell, Lab, run_cell
from measuring.tables import print_table


@dataclass(frozen=True)
class Arguments:
    """out=gpu device=cpu tiny=true"""

    out: Path = option("folder for results", Path("gpu"))
    items: tuple[str, ...] = option(f"some of {', '.join(ITEMS)}", ())
    seconds: Count = option("time limit for everything", 560)
    device: Literal["cuda", "cpu"] = option("cuda or cpu", "cuda")
    tiny: bool = option("true: small sizes, for a CPU", False)
    item: str | None = option("measure only the cells that stdin names, in this process")


def measure(arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Measure what is missing; print and return all results."""
    args = parse(Arguments, arguments)
    if unknown := {*args.items} - {*ITEMS}:
        raise ConfigError("items", f"{unknown.pop()!r} is unknown; choose from {', '.join(ITEMS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "torch sees no GPU; use device=cpu tiny=true")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.item is not None:
        take_cells(args, args.item)
    take_missing(args)
    results = {name: read_item(args.out, name) for name in ITEMS}
    print(yaml.safe_dump(results, sort_keys=False, width=200))
    print_goals(results)
    return {"results": results}, int(any(find_missing(args.out, n) for n in args.items or ITEMS))


# The process that starts the others


def take_missing(args: Arguments) -> None:
    """Run the items that lack cells, each in its own process."""
    end = time.monotonic() + args.seconds
    jobs = [(n, cells) for n in args.items or ITEMS if (cells := find_missing(args.out, n))]
    options = [f"{key}={getattr(args, key)}" for key in ("out", "device", "tiny")]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {}
    running: list[subprocess.Popen[str]] = []
    try:
        for number, (name, cells) in enumerate(jobs):
            # Start the next one early: importing takes seconds.
            for item, _ in jobs[number + len(running) : number + 2]:
                command = [sys.executable, sys.argv[0], "gpu", *options, f"item={item}"]
                # Its own session, so that its compilers are killed with it.
                more = {"env": os.environ | hidden, "start_new_session": True}
                running.append(subprocess.Popen(command, stdin=subprocess.PIPE, text=True, **more))
            process, seconds = running[0], min(end - time.monotonic(), ITEMS[name].seconds)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
                process.stdin.write(json.dumps(cells) + "\n")
                process.stdin.flush()
                process.wait(max(0.0, seconds))
            if process.poll() != 0:
                why = "out of time" if process.poll() is None else "its process crashed"
                print(f"{name}: {why}; run the same command for the rest", flush=True)
            stop(running.pop(0))
            if time.monotonic() >= end:
                break
    finally:
        for process in running:
            stop(process)


def stop(process: "subprocess.Popen[str]") -> None:
    """Kill the process and those it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# The process of an item


def take_cells(args: Arguments, item: str) -> None:
    """Measure the cells that stdin names, then end this process."""
    lab, cells = Lab(args.tiny, args.out), sys.stdin.readline()
    # stdin closes when the parent process is gone.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    for name in json.loads(cells or "[]"):
        cells_by_name, begun = read_item(args.out, item), time.monotonic()
        for values in (lambda: {"error": "did not end"}, partial(run_cell, lab, item, name)):
            new = args.out / f"{item}.json.new"
            new.write_text(json.dumps({**cells_by_name, name: values()}, indent=1), "utf-8")
            new.replace(args.out / f"{item}.json")  # atomic
        print(f"{item}: {name}: {time.monotonic() - begun:.1f} s", flush=True)
    os._exit(0)  # compilers and a GPU context take time to shut down


def read_item(out: Path, item: str) -> dict[str, Cell]:
    """Return an item's cells so far."""
    file = out / f"{item}.json"
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def find_missing(out: Path, item: str) -> list[str]:
    """Return the cells that an item lacks, then those that failed."""
    results = read_item(out, item)
    missing = [cell for cell in ITEMS[item].cells if cell not in results]
    return missing + [cell for cell, values in results.items() if "error" in values]


def print_goals(results: dict[str, dict[str, Cell]]) -> None:
    """Print the goals of GPT-2 small, each a ratio of two figures, and what was measured."""
    run, step, mode, speed = ("run", "log_every=10"), ("step", MODES[0]), MODES[0], "tokens_per_s"
    goals: list[tuple[Any, ...]] = [
        ("train.py / rate of products", (*run, "tflops"), ("device", "rates", "tflops"), ">=0.50"),
        ("train.py / a plain loop", (*run, speed), (*step, speed), ">=0.97"),
        ("50,257 ids / 50,304, time", ("step", mode + IDS[1], "ms"), (*step, "ms"), "<=1.03"),
    ]
    for peer in ITEMS["peers"].cells:
        goals.append((f"train.py / {peer}", (*run, speed), ("peers", peer, speed), ">=1.00"))
    for cell in ITEMS["mechanisms"].cells:
        bound, rate = "0.60" if "differential" in cell else "0.80", ("mechanisms", cell, "tflops")
        goals.append((f"{cell} / mha, at equal FLOPs", rate, (*step, "tflops"), f">={bound}"))
    for name, how in product(("kda", "lightning"), ("eager_ms", "compiled_ms")):
        of = ("fla", name, f"fla_{how}"), ("layers_of_fla", name, how)
        goals.append((f"{name} by fla / fla's own layer, {how}", *of, "<=1.10"))
    errors = (("gradients", "mha", how) for how in ("compiled", "eager"))
    goals.append(("gradient error, compiled / eager", *errors, "<=1.20"))
    rows = []
    for words, *figures, bound in goals:
        pair: list[Any] = [results[item].get(cell, {}).get(name) for item, cell, name in figures]
        rows.append([words, bound, "", ""])
        if None not in pair:
            measured, least = pair[0] / pair[1], bound.startswith(">")
            met = measured >= float(bound[2:]) if least else measured <= float(bound[2:])
            rows[-1][2:] = f"{measured:.3f}", "yes" if met else "no"
    print_table("goals of GPT-2 small on one GPU", ["", "goal", "measured", "met"], rows)
