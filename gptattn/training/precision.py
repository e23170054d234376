"""Which precision is faster here: `trainer.precision=auto`, and a hint for runs without it."""

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from gptattn.machine.arithmetic import matmul_precision
from gptattn.machine.device import (
    matmul_flops_per_second,
    resolve_device,
    set_threads,
    synchronize,
)
from gptattn.settings.build import build_model
from gptattn.settings.config import Precision, TrainConfig

CHOICES: tuple[Precision, Precision] = ("32-true", "bf16-mixed")
TRIAL_SECONDS = 1.0  # of a turn, unless one step takes longer
TRIAL_TOKENS = 2048  # in a step, at most
MARGIN = 1.05  # 32-true is the more exact one: bf16-mixed has to be faster by this factor
WORTH_SAYING = 1.5
# The hint's trial takes a few steps: less than a hundredth of so many.
LONG_RUN_STEPS = 1000
SMALL_PRODUCT = 384  # milliseconds, also in bfloat16 without instructions for it


def step_seconds(cfg: TrainConfig, vocab_size: int, seconds: float = TRIAL_SECONDS) -> list[float]:
    """Return the seconds of a step in each of CHOICES, without the optimizer; the least of some.

    The precisions take turns, each for `seconds` or one step; the first turn warms up. The model is
    a new one, which draws from torch's generator, and the ids are zeros. Infinite for bf16-mixed if
    the model fails in it. Sets torch's threads.
    """
    device = resolve_device(cfg.trainer.accelerator)
    set_threads(cfg.trainer.threads)
    with device:
        model = build_model(cfg, vocab_size)
    T = cfg.model.context_length
    rows = max(1, min(cfg.batch_size // cfg.accumulate, TRIAL_TOKENS // T))
    ids = torch.zeros(rows, T, dtype=torch.long, device=device)

    def turn(precision: Precision) -> float:
        taken: list[float] = []
        while sum(taken) < seconds or not taken:
            synchronize(device)
            start = time.perf_counter()
            try:
                with autocast(precision, device):
                    loss = model.loss(ids, ids, chunk_tokens=cfg.loss_chunk_tokens)
                loss.backward()
            except RuntimeError:
                if precision == "32-true":
                    raise
                return math.inf
            synchronize(device)
            taken.append(time.perf_counter() - start)
        return min(taken)

    with matmul_precision(cfg.trainer.matmul_precision):
        return [[turn(precision) for precision in CHOICES] for _ in range(2)][1]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a run in one of CHOICES computes its loss."""
    mixed = precision == "bf16-mixed"
    return torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext()


def settled(cfg: TrainConfig, vocab_size: int) -> tuple[TrainConfig, str]:
    """Return the settings with `auto` replaced by the faster precision, and the choice in words.

    Settings that name a precision come back as they are, without words.
    """
    if cfg.trainer.precision != "auto":
        return cfg, ""
    wide, half = step_seconds(cfg, vocab_size)
    return with_precision(cfg, faster(wide, half)), choice_words(wide, half)


def with_precision(cfg: TrainConfig, precision: Precision) -> TrainConfig:
    """Return the settings of a run for which `auto` chose this precision."""
    trainer = replace(cfg.trainer, precision=precision, auto_precision=True)
    return replace(cfg, trainer=trainer)


def faster(wide: float, half: float) -> Precision:
    """Return the precision to take, from the seconds in 32-true and in bf16-mixed."""
    return "bf16-mixed" if MARGIN * half < wide else "32-true"


def choice_words(wide: float, half: float) -> str:
    """Return the choice from these seconds in words; infinite ones are of a model that fails."""
    if half == math.inf:
        return "trainer.precision=auto: 32-true; this model cannot compute in bf16-mixed"
    return (
        f"trainer.precision=auto: {faster(wide, half)}; a step in bf16-mixed is "
        f"{wide / half:.1f} times as fast as in 32-true here"
    )


def hint(cfg: TrainConfig, vocab_size: int, steps: int | None) -> str:
    """Return a line if this run would be much faster in bf16-mixed; else "".

    Measures only where that costs less than a hundredth of the run, of `steps` steps (None: not
    known), and where small products in bfloat16 are fast. Draws from torch's generator.
    """
    trainer = cfg.trainer
    if trainer.precision != "32-true" or trainer.auto_precision:  # `auto` has measured already
        return ""
    if steps is None or steps < LONG_RUN_STEPS:
        return ""
    device = resolve_device(trainer.accelerator)
    wide, half = (
        matmul_flops_per_second(device, dtype, SMALL_PRODUCT)
        for dtype in (torch.float32, torch.bfloat16)
    )
    if half < WORTH_SAYING * wide:
        return ""
    try:
        wide, half = step_seconds(cfg, vocab_size, seconds=0.0)
    except Exception:  # a hint ends no run: what is wrong shows in the run itself
        return ""
    if wide < WORTH_SAYING * half:
        return ""
    return (
        f"hint: trainer.precision=bf16-mixed would be about {wide / half:.1f} times as fast here; "
        "its losses may differ a little"
    )
