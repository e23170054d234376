"""Fingerprints: a few numbers that show whether today's code trains a model as it did before.

The code has changed since it made the shipped results. They still hold if the mathematics has not
changed, and a fingerprint shows that: the losses over a few steps with the result's own settings,
in float64.
"""

import hashlib
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gptattn.build.model import build_matrix_rule, build_model
from gptattn.data.run_data import RunData
from gptattn.data.sampler import Batch, ValidationSet, training_batch
from gptattn.data.tokenizer import ByteTokenizer
from gptattn.machine.console import quiet_lightning
from gptattn.machine.disk import read_json, write_json
from gptattn.model.cost import measure_cost
from gptattn.runs.metrics import LOSS
from gptattn.settings.budget import resolve_budget
from gptattn.settings.compose import settings
from gptattn.settings.config import CONF

TOLERANCE = 1e-8  # relative; instruction sets move these numbers by 1e-12 at most
VOCABULARY, TRAINED, HELD_OUT = 256, 8_192, 512 + 101  # a whole batch, and a short window
NARROW = ("model.d_model=32", "match=none", "batch_size=2", "trainer.precision=64-true")
# Layer matrices with a standard deviation below SMALL are multiplied by GAIN: scores near 0 would
# hide most of what acts on them.
SMALL, GAIN = 0.05, 8.0
# The shares of the budget at which to take a step: in the warm-up, at the peak, in the decay.
PROGRESS = (0.02, 0.3, 0.9)
# The state of the source, and fingerprints by overrides.
CacheFile = tuple[str, dict[str, list[float]]]


def compute_fingerprint(overrides: Sequence[str]) -> list[float]:
    """Return the losses in nats of a training step at each of PROGRESS, and of a validation.

    The model's FLOPs per token and its parameters follow.

    `overrides` are those of the result. Everything in its settings counts (layers, heads, context,
    initial weights, loss, optimizer, schedule, order of the windows), except that the model is
    narrow and has no `match`, the batch is small, and the text is synthetic tokens. It runs in
    float64 on one thread, so that numbers from other machines agree within TOLERANCE.

    It misses: bytes of caches and of texts; what happens only in lower precisions, on other
    devices, with `compile` or with a cache; what depends on the width or on more tokens than the
    context; windows after the third step; how texts are read and tokenized; documents kept apart,
    accumulation, and dropout if the result has none. Raises ConfigError, as `settings` does.
    """
    # Lightning takes seconds to import, and most of this package's commands do not need it.
    import lightning.pytorch as L
    from lightning.pytorch.callbacks import LambdaCallback

    from gptattn.training.module import LanguageModel

    quiet_lightning()
    cfg = settings([*overrides, *NARROW])
    budget = resolve_budget(cfg.budget, cfg.batch_size * cfg.model.context_length, 1.0)
    assert budget.steps is not None
    steps = [round(part * budget.steps) for part in PROGRESS]
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.set_num_threads(1)
            torch.set_default_dtype(torch.float64)
            torch.manual_seed(cfg.seed)
            model = build_model(cfg, VOCABULARY)
            with torch.no_grad():
                for matrix in model.layer_matrices():
                    matrix *= GAIN if matrix.std() < SMALL else 1.0
            data = SyntheticTokens(cfg.data.get("even_windows", False))
            module = LanguageModel(
                model,
                cfg,
                data,
                lambda step: budget.schedule(steps[step - 1], 0.0),
                build_matrix_rule(cfg),
            )
            losses: list[float] = []
            trainer = L.Trainer(
                accelerator="cpu",
                devices=1,
                precision="64-true",
                max_steps=len(steps),
                gradient_clip_val=cfg.optim.grad_clip,
                val_check_interval=len(steps),
                check_val_every_n_epoch=None,
                num_sanity_val_steps=0,
                callbacks=[
                    LambdaCallback(
                        on_train_batch_end=lambda *args: losses.append(args[2]["loss"].item()),
                        on_validation_end=lambda *args: losses.append(args[1].val_metrics[LOSS]),
                    )
                ],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(module)
            cost = measure_cost(model)
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_num_threads(threads)
    return [*losses, cost.flops_per_token, float(cost.params)]


def agrees(shipped: Sequence[float], computed: Sequence[float]) -> bool:
    """Return whether two fingerprints are equal within TOLERANCE."""
    return len(shipped) == len(computed) and np.allclose(
        computed, shipped, rtol=TOLERANCE, atol=0.0
    )


class FingerprintCache:
    """Computes each fingerprint once per state of the source, and saves them in one file."""

    def __init__(self, file: Path) -> None:
        self._file, self._state = file, _hash_installation()
        state, fingerprints = read_json(file, CacheFile) or ("", {})
        self._fingerprints = fingerprints if state == self._state else {}

    def compute(self, overrides: Sequence[str], name: str) -> list[float]:
        """Return the fingerprint of `overrides`. Raises DiskError if it cannot be saved."""
        key = " ".join(overrides)
        if key not in self._fingerprints:
            what = f"checking that this code reproduces {name}"
            print(f"{what}: three training steps, once", file=sys.stderr)
            self._fingerprints[key] = compute_fingerprint(overrides)
            write_json(self._file, (self._state, self._fingerprints))
        return self._fingerprints[key]


def _hash_installation() -> str:
    """Return a hash of this package's files, to the byte, and of the libraries' versions."""
    libraries = " ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "lightning"))
    digest = hashlib.sha256(libraries.encode())
    for folder, kind in ((Path(__file__).parents[1], "py"), (CONF, "yaml")):
        for file in sorted(folder.rglob(f"*.{kind}")):
            digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


class SyntheticTokens(RunData):
    """Bytes from a formula, in the batches of the real sampler."""

    def __init__(self, even_windows: bool) -> None:
        self.tokenizer, self.text_hash, self.val_bytes = ByteTokenizer(), "", HELD_OUT - 1
        self.even_windows = even_windows
        number = np.arange(TRAINED + HELD_OUT)
        # A row of the second step has few different ids, so that its gradient is clipped.
        kinds = np.where((number > 4_700) & (number < 5_200), 3, VOCABULARY)
        ids = (number**3 % 65_537 % kinds).astype(np.uint16)
        self.train, self.val = ids[:TRAINED], ids[TRAINED:]

    def training_batch(self, seed: int, step: int, batch_size: int, context_length: int) -> Batch:
        sizes = batch_size, context_length
        return training_batch(self.train, seed, step, *sizes, even=self.even_windows)

    def validation(self, batch_size: int, context_length: int) -> Iterable[Batch]:
        return ValidationSet(self.val, batch_size, context_length)

    def facts(self) -> dict[str, Any]:
        return {}
