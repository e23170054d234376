"""What decides defaults and claims on one GPU, in ten minutes, in the order of what it decides.

Each item has a process and a time limit of its own, so a hang or a crash costs that item alone. Its
cells are written to OUT/ITEM.json as they end. The same command with the same `out` takes what is
missing, and then once more what failed. `device=cpu tiny=true` shows that everything runs; what
only a GPU can do says so.

Prints all that is in `out`, and the goals beside it. Exit code 1: something failed or is missing.
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

    out: Path = option("the folder of results", Path("gpu"))
    items: tuple[str, ...] = option(f"some of {', '.join(ITEMS)}", ())
    seconds: Count = option("after that many it stops", 560)
    device: Literal["cuda", "cpu"] = option("cuda or cpu", "cuda")
    tiny: bool = option("true: sizes for a CPU", False)
    item: str | None = option("only the cells of it that stdin names, in this process")


def measure(arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Take what is missing; print and return all that there is."""
    args = parse(Arguments, arguments)
    if unknown := {*args.items} - {*ITEMS}:
        raise ConfigError("items", f"{unknown.pop()} is unknown; give some of {', '.join(ITEMS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "no GPU is visible to torch; give device=cpu tiny=true")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.item is not None:
        take_cells(args, args.item)
    take_missing(args)
    found = {name: read_item(args.out, name) for name in ITEMS}
    print(yaml.safe_dump(found, sort_keys=False, width=200))
    print_goals(found)
    return {"results": found}, int(any(find_missing(args.out, n) for n in args.items or ITEMS))


# The process that starts the others


def take_missing(args: Arguments) -> None:
    """Run the items that lack cells, each in a process of its own."""
    end = time.monotonic() + args.seconds
    jobs = [(n, cells) for n in args.items or ITEMS if (cells := find_missing(args.out, n))]
    given = [f"{key}={getattr(args, key)}" for key in ("out", "device", "tiny")]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {}
    running: list[subprocess.Popen[str]] = []
    try:
        for number, (name, cells) in enumerate(jobs):
            # The next one imports meanwhile, which takes seconds.
            for item, _ in jobs[number + len(running) : number + 2]:
                command = [sys.executable, sys.argv[0], "gpu", *given, f"item={item}"]
                # In a session of its own, with its compilers: all are killed together.
                own = {"env": os.environ | hidden, "start_new_session": True}
                running.append(subprocess.Popen(command, stdin=subprocess.PIPE, text=True, **own))
            process, seconds = running[0], min(end - time.monotonic(), ITEMS[name].seconds)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
                process.stdin.write(json.dumps(cells) + "\n")
                process.stdin.flush()
                process.wait(max(0.0, seconds))
            if process.poll() != 0:
                why = "its time was up" if process.poll() is None else "its process crashed"
                print(f"{name}: {why}; the same command takes the rest", flush=True)
            stop(running.pop(0))
            if time.monotonic() >= end:
                break
    finally:
        for process in running:
            stop(process)


def stop(process: "subprocess.Popen[str]") -> None:
    """Kill the process and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# The process of an item


def take_cells(args: Arguments, item: str) -> None:
    """Take the cells that stdin names, and end this process."""
    lab, cells = Lab(args.tiny, args.out), sys.stdin.readline()
    # The other end closes when the process that started this one is gone.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    for name in json.loads(cells or "[]"):
        found, begun = read_item(args.out, item), time.monotonic()
        for values in (lambda: {"error": "did not end"}, partial(run_cell, lab, item, name)):
            new = args.out / f"{item}.json.new"
            new.write_text(json.dumps({**found, name: values()}, indent=1), "utf-8")
            new.replace(args.out / f"{item}.json")  # whole or not at all
        print(f"{item}: {name}: {time.monotonic() - begun:.1f} s", flush=True)
    os._exit(0)  # compilers and a GPU's context take time to end


def read_item(out: Path, item: str) -> dict[str, Cell]:
    """Return the cells that there are of an item."""
    file = out / f"{item}.json"
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def find_missing(out: Path, item: str) -> list[str]:
    """Return the cells that an item lacks, then those that failed."""
    found = read_item(out, item)
    missing = [cell for cell in ITEMS[item].cells if cell not in found]
    return missing + [cell for cell, values in found.items() if "error" in values]


def print_goals(found: dict[str, dict[str, Cell]]) -> None:
    """Print what GPT-2 small must reach, and what was measured: each is a ratio of two figures."""
    run, step, mode, speed = ("run", "log_every=10"), ("step", MODES[0]), MODES[0], "tokens_per_s"
    goals: list[tuple[Any, ...]] = [
        ("train.py / rate of products", (*run, "tflops"), ("device", "rates", "tflops"), ">=0.50"),
        ("train.py / a plain loop", (*run, speed), (*step, speed), ">=0.97"),
        ("50,257 ids / 50,304, time", ("step", mode + IDS[1], "ms"), (*step, "ms"), "<=1.03"),
    ]
    for peer in ITEMS["peers"].cells:
        goals.append((f"train.py / {peer}", (*run, speed), ("peers", peer, speed), ">=1.00"))
    for cell in ITEMS["mechanisms"].cells:
        bound, own = "0.60" if "differential" in cell else "0.80", ("mechanisms", cell, "tflops")
        goals.append((f"{cell} / mha, at equal FLOPs", own, (*step, "tflops"), f">={bound}"))
    for name, how in product(("kda", "lightning"), ("eager_ms", "compiled_ms")):
        of = ("fla", name, f"fla_{how}"), ("layers_of_fla", name, how)
        goals.append((f"{name} by fla / fla's own layer, {how}", *of, "<=1.10"))
    errors = (("gradients", "mha", how) for how in ("compiled", "eager"))
    goals.append(("error of gradients, compiled / eager", *errors, "<=1.20"))
    rows = []
    for words, *figures, bound in goals:
        pair: list[Any] = [found[item].get(cell, {}).get(name) for item, cell, name in figures]
        rows.append([words, bound, "", ""])
        if None not in pair:
            measured, least = pair[0] / pair[1], bound.startswith(">")
            met = measured >= float(bound[2:]) if least else measured <= float(bound[2:])
            rows[-1][2:] = f"{measured:.3f}", "yes" if met else "no"
    print_table("goals, of GPT-2 small on one GPU", ["", "goal", "measured", "met"], rows)
