"""Measures what makes the difference of two variants vary less over seeds, at equal cost.

`python scripts/seed_noise.py --record FILE [--seeds 1 200] [--steps 200] [--ways WAY ...]` trains
mha and gqa at model=tiny in each of the ways below, or in those given, seed after seed, and adds a
line per run to FILE; the same command goes on. Then it prints, for each way and each reading of the
loss, the standard deviation of the difference over seeds, how the two losses correlate, the
variance of the difference over that of a plain run, and the seeds that show a difference of 0.02
nats. An interval is the middle 95% of the values of seeds drawn again.

Ways of training, all on the same tokens: plain; shared (`shared_init=true`: variants begin alike
where they can); to zero (as shared, and the learning rate falls along a line to 0); large end (as
shared, with batches twice as large over the last fifth of the tokens). Readings of the loss: of the
last weights on all held-out text; on half of it; and of the weights averaged over the last tenth of
the steps.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from gptattn.compare.statistics import seeds_needed
from gptattn.compare.table import markdown_table
from gptattn.data.run_data import RunData
from gptattn.data.sampler import Batch
from gptattn.model.gpt import GPT
from gptattn.optim.matrix_rule import split_by_decay
from gptattn.settings.budget import learning_rate_factor
from gptattn.settings.build import build_data, build_model
from gptattn.settings.compose import settings
from gptattn.settings.config import TrainConfig

VARIANTS = ("mha", "gqa")
DIFFERENCE = 0.02  # nats, for the seeds needed
RESAMPLES = 2_000
AVERAGED = 0.1  # of the steps, at the end
LARGE = 0.2  # of the tokens, at the end, in batches twice as large
READINGS = ("last", "half the text", "averaged")


@dataclass(frozen=True)
class Way:
    """A way to train."""

    shared: bool = True
    to_zero: bool = False
    large_end: bool = False


WAYS = {
    "plain": Way(shared=False),
    "shared": Way(),
    "to zero": Way(to_zero=True),
    "large end": Way(large_end=True),
}


def train(cfg: TrainConfig, data: RunData, way: Way, steps: int) -> dict[str, float]:
    """Train from the settings' seed; return the loss of each of READINGS."""
    torch.manual_seed(cfg.seed)
    model = build_model(replace(cfg, shared_init=way.shared), data.tokenizer.vocab_size)
    optim = cfg.optim
    if way.to_zero:
        optim = replace(optim, final_lr_fraction=0.0, decay="linear")
    decayed, others = split_by_decay(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )
    average: dict[str, Tensor] = {}
    count = 0
    for progress, (ids, targets) in _batches(cfg, data, way, steps):
        for group in optimizer.param_groups:
            group["lr"] = optim.lr * learning_rate_factor(progress, optim)
        model.loss(ids, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if progress > 1 - AVERAGED:
            count += 1
            for name, weight in model.named_parameters():
                mean = average.setdefault(name, torch.zeros_like(weight))
                mean.lerp_(weight.detach(), 1 / count)
    losses = _losses(model, data, cfg)
    found = {"last": float(losses.mean()), "half the text": float(losses[::2].mean())}
    model.load_state_dict(average, strict=False)
    return found | {"averaged": float(_losses(model, data, cfg).mean())}


def _batches(
    cfg: TrainConfig, data: RunData, way: Way, steps: int
) -> Iterator[tuple[float, Batch]]:
    """Yield the share of the tokens used by the end of each step, and its batch."""
    large = round(LARGE * steps / 2) if way.large_end else 0
    done = 0
    for step in range(steps - large):
        parts = 2 if step >= steps - 2 * large else 1
        rows = [
            data.training_batch(cfg.seed, done + i, cfg.batch_size, cfg.model.context_length)
            for i in range(parts)
        ]
        done += parts
        ids, targets = (torch.cat(each) for each in zip(*rows, strict=True))
        yield done / steps, (ids, targets)


@torch.no_grad()
def _losses(model: GPT, data: RunData, cfg: TrainConfig) -> NDArray[np.float64]:
    """Return the mean loss of each whole window of the held-out text."""
    model.eval()
    T = cfg.model.context_length
    found = [
        F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="none").view(-1, T)
        for ids, targets in data.validation(64, T)
        if ids.shape[1] == T
    ]
    model.train()
    return torch.cat(found).double().mean(dim=1).numpy()


def measure(record: Path, seeds: range, steps: int, ways: Sequence[str]) -> None:
    """Train what the record lacks, seed after seed, a line for each run."""
    done = {(line["way"], line["variant"], line["seed"]) for line in _lines(record, steps)}
    data = build_data(settings())
    for seed in seeds:
        for way in ways:
            for variant in VARIANTS:
                if (way, variant, seed) in done:
                    continue
                cfg = settings([f"attn={variant}", f"seed={seed}"])
                losses = train(cfg, data, WAYS[way], steps)
                line: dict[str, object] = {"way": way, "variant": variant, "seed": seed}
                line |= {"steps": steps} | {name: round(x, 6) for name, x in losses.items()}
                with record.open("a", encoding="utf-8") as file:
                    file.write(f"{json.dumps(line)}\n")


def _lines(record: Path, steps: int) -> list[dict[str, Any]]:
    text = record.read_text(encoding="utf-8") if record.is_file() else ""
    return [line for line in map(json.loads, text.splitlines()) if line["steps"] == steps]


def show(record: Path, steps: int, ways: Sequence[str]) -> None:
    """Print the table, over the seeds that all of these ways and variants have."""
    runs = {(line["way"], line["variant"], line["seed"]): line for line in _lines(record, steps)}
    keys = [{s for w, v, s in runs if (w, v) == cell} for cell in product(ways, VARIANTS)]
    seeds = sorted(set.intersection(*keys))
    losses = {
        (way, reading, variant): np.array([runs[way, variant, s][reading] for s in seeds])
        for way, reading, variant in product(ways, READINGS, VARIANTS)
    }
    base, other = VARIANTS
    apart = {cell: losses[*cell, other] - losses[*cell, base] for cell in product(ways, READINGS)}
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(seeds), size=(RESAMPLES, len(seeds)))
    plain = apart["plain", "last"]
    heading = ["way", "reading", "loss of mha", "difference", "deviation", "correlation"]
    cells = [[*heading, "variance / plain", f"seeds for {DIFFERENCE}"]]
    for (way, reading), d in apart.items():
        ratios = np.var(d[drawn], axis=1) / np.var(plain[drawn], axis=1)
        low, high = np.quantile(ratios, [0.025, 0.975])
        both = np.stack([losses[way, reading, v] for v in VARIANTS])
        correlations = [np.corrcoef(both[:, again])[0, 1] for again in drawn]
        least, most = np.quantile(correlations, [0.025, 0.975])
        deviation = float(d.std(ddof=1))
        figures = [
            f"{losses[way, reading, base].mean():.4f}",
            f"{d.mean():+.4f}",
            f"{deviation:.4f}",
            f"{np.corrcoef(both)[0, 1]:.2f} ({least:.2f} to {most:.2f})",
            f"{d.var() / plain.var():.2f} ({low:.2f} to {high:.2f})",
            f"{seeds_needed(DIFFERENCE, deviation)}",
        ]
        cells.append([way, reading, *figures])
    print(f"{len(seeds)} seeds, {steps} steps; difference: {other} - {base}, nats\n")
    print(markdown_table(cells))


def main() -> None:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, required=True, help="a file of lines, added to")
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 200), metavar=("FIRST", "LAST"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    args = parser.parse_args()
    ways = dict.fromkeys(["plain", *args.ways])  # what the others are measured by
    torch.set_num_threads(1)  # the models are small: run a command for each core, with its seeds
    measure(args.record, range(args.seeds[0], args.seeds[1] + 1), args.steps, [*ways])
    show(args.record, args.steps, [*ways])


if __name__ == "__main__":
    main()
