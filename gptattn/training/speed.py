"""Measures how fast variants train and decode: in turns, with nothing else of ours running.

The speed that a run sees of itself drifts with the machine's clock and load.
"""

import gc
import random
import signal
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeVar

import lightning.pytorch as L
import torch

from gptattn.decode.generate import stream
from gptattn.decode.sampling import Sampling
from gptattn.errors import ConfigError
from gptattn.machine.console import quiet_lightning
from gptattn.machine.device import DTYPES, device_name, matmul_flops_per_second, synchronize
from gptattn.machine.ending import handled_signals
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import load_config, use_kept_tokenizer
from gptattn.runs.speeds import Session, Turns
from gptattn.runs.two_stages import variant_key
from gptattn.settings.identity import list_changed
from gptattn.training.compiling import compile_blocks
from gptattn.training.module import LanguageModel
from gptattn.training.preflight import PreparedRun, make_model, preflight
from gptattn.training.run import set_numerics

TRAINING_SECONDS, DECODING_SECONDS = 0.3, 0.1  # per turn
MOST_SECONDS = 10.0  # per variant, unless MIN_ROUNDS take longer
MIN_ROUNDS, MAX_ROUNDS = 5, 15
WARM_UP = 1  # uncounted steps, which create the optimizer's averages, or compile
BATCHES = (1, 8)  # rows to decode at once

Name = TypeVar("Name", bound=Hashable)
Turn = Callable[[], float]  # builds and warms up what it times; returns seconds per unit of work
Variant = tuple[str, str, PreparedRun]  # `variant_key` and `Provenance.digest` of its runs, and one


def interleave(
    turns: Mapping[Name, Turn],
    rounds: int,
    is_enough: Callable[[dict[Name, list[float]]], bool] = lambda seconds: False,
) -> dict[Name, list[float]]:
    """Let all take one turn per round, in a new random order; return their seconds by name.

    There are `rounds` rounds, or fewer once `is_enough` is true. A fixed order would bias the
    result, since caches, clock speed and other load drift.
    """
    order, rng = list(turns), random.Random(0)
    seconds: dict[Name, list[float]] = {name: [] for name in turns}
    gc.freeze()  # collecting older objects would take longer than a short turn
    try:
        for _ in range(rounds):
            rng.shuffle(order)
            for name in order:
                gc.collect()
                seconds[name].append(turns[name]())
            if is_enough(seconds):
                break
    finally:
        gc.unfreeze()
    return seconds


def prepare(folder: Path, allow_targets: Sequence[str] = ()) -> Variant:
    """Return the variant of a run, ready to take turns as the run would train alone.

    Raises a UserError if its settings, text or device are missing, or its code has changed.
    """
    run = RunFolder(folder)
    record, recorded = run.read_record(), run.read_provenance()
    cfg = replace(use_kept_tokenizer(load_config(folder, allow_targets), run), init_from=None)
    if any(typed.startswith("++trainer.threads=") for typed in record.get("overrides") or ()):
        cfg = replace(cfg, trainer=replace(cfg.trainer, threads=None))  # a sweep set it
    if cfg.trainer.processes > 1:
        raise ConfigError("speed", f"{folder} was trained by several processes; speed needs one")
    prepared = preflight(cfg, shapes_only=True)
    was, now = recorded, prepared.provenance
    if was is None or list_changed(was.code | now.code, was.code) or was.device != now.device:
        wrong = "was made with different code or on another kind of device; train it again"
        raise ConfigError("speed", f"{folder} {wrong}")
    return variant_key(record), was.digest, prepared


def measure_speeds(
    variants: Mapping[str, Variant], is_enough: Callable[[dict[str, list[float]]], bool]
) -> Session:
    """Measure the variants; return their session. Prints how long that takes.

    Each turn builds its variant anew: memory holds one at a time, and none benefits from its place
    in it. There are 5 to 15 rounds, until the seconds of training steps satisfy `is_enough`
    or 10 seconds per variant have passed.
    """
    turns: dict[Any, Turn] = {}
    start = time.perf_counter()
    for name, (_, _, prepared) in variants.items():
        turns |= {(name, work): turn for work, turn in _calibrate(prepared).items()}
    begun, threads = time.perf_counter(), torch.get_num_threads()
    most = max(MOST_SECONDS * len(variants), (MIN_ROUNDS + 1) * (begun - start))
    shown = f"{', '.join(variants)} (interleaved, {threads} thread{'s' * (threads > 1)})"
    print(f"measuring the speed of {shown}, about {most:.0f} s", file=sys.stderr, flush=True)

    def ends(seconds: dict[Any, list[float]]) -> bool:
        steps = {name: seconds[name, "step"] for name in variants}
        rounds, now = len(next(iter(steps.values()))), time.perf_counter()
        late = now + (now - begun) / rounds > start + most  # after another round
        return rounds >= MIN_ROUNDS and (late or is_enough(steps))

    seconds = interleave(turns, MAX_ROUNDS, ends)
    return Session(
        timestamp=datetime.now(UTC).isoformat(timespec="microseconds"),
        device=device_name(next(iter(variants.values()))[2].device),
        threads=threads,
        versions={name: version(name) for name in ("gptattn", "torch", "lightning")},
        variants={
            key: Turns(
                code=code,
                step=seconds[name, "step"],
                token={rows: seconds[name, rows] for rows in BATCHES if (name, rows) in seconds},
                matmul=seconds[name, "matmul"],
            )
            for name, (key, code, _) in variants.items()
        },
    )


def _calibrate(prepared: PreparedRun) -> dict[str | int, Turn]:
    """Return the turns by their work: `step`, `matmul`, and decoding, by the number of rows."""
    device, dtype = prepared.device, DTYPES[prepared.cfg.trainer.precision]
    context = prepared.cfg.model.context_length

    def multiply() -> float:
        set_numerics(prepared)
        return 1 / matmul_flops_per_second(device, dtype)

    steps = max(1, round(TRAINING_SECONDS / train_steps(prepared, 1)))
    step = partial(train_steps, prepared, steps)
    turns: dict[str | int, Turn] = {"step": step, "matmul": multiply}
    cached = prepared.cost.kv_bytes_per_token is not None
    for rows in BATCHES if cached and context > 1 else ():
        tokens = max(1, round(DECODING_SECONDS / decode_tokens(prepared, rows, 1)))
        turns[rows] = partial(decode_tokens, prepared, rows, min(tokens, context // 2))
    return turns


def train_steps(prepared: PreparedRun, steps: int) -> float:
    """Train this many steps after WARM_UP; return the seconds of one, from batch to batch.

    This is the median on a CPU, which other programs may interrupt, and the mean on a GPU, since
    its host runs ahead.
    """
    quiet_lightning()
    cfg, model, on_cpu = prepared.cfg, _build(prepared), prepared.device.type == "cpu"
    compile_blocks(cfg, model)
    ends: list[float] = []
    handlers = {number: signal.getsignal(number) for number in handled_signals()}

    class Clock(L.Callback):
        def on_train_start(self, *args: Any) -> None:
            for number, handler in handlers.items():  # Lightning's own end with exit code 0
                signal.signal(number, handler)

        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step > len(ends):  # not a micro-batch
                if trainer.global_step in (WARM_UP, WARM_UP + steps):
                    synchronize(prepared.device)
                ends.append(time.perf_counter())

    trainer = L.Trainer(
        accelerator="cpu" if on_cpu else "gpu",
        devices=1,
        precision=cfg.trainer.precision,  # type: ignore[arg-type]
        max_steps=WARM_UP + steps,
        accumulate_grad_batches=cfg.accumulate,
        gradient_clip_val=cfg.optim.grad_clip,
        limit_val_batches=0,
        callbacks=[Clock()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(model, cfg, prepared.data, lambda step: 1.0, prepared.matrices))
    taken = [end - start for start, end in pairwise(ends[WARM_UP - 1 :])]
    return median(taken) if on_cpu else mean(taken)


def decode_tokens(prepared: PreparedRun, rows: int, tokens: int) -> float:
    """Decode this many tokens, up to a full context; return the seconds of one, for all rows."""
    model = _build(prepared).to(prepared.device, DTYPES[prepared.cfg.trainer.precision])
    ids = torch.zeros(
        rows, model.context_length - tokens, dtype=torch.int64, device=prepared.device
    )
    tokens_out = stream(model, ids, tokens + 1, Sampling(temperature=0))
    next(tokens_out)  # reads the prompt
    synchronize(prepared.device)
    start = time.perf_counter()
    for _ in tokens_out:
        pass
    synchronize(prepared.device)
    return (time.perf_counter() - start) / tokens


def _build(prepared: PreparedRun) -> Any:
    set_numerics(prepared)
    return make_model(
        prepared.cfg, prepared.data.tokenizer.vocab_size, prepared.device, shapes_only=False
    )
