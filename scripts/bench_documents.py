"""Times training steps with documents kept apart and without, in turns.

python scripts/bench_documents.py [--rounds 15] [--documents 3] [--attn mha sliding] [SETTINGS]
Takes the settings of train.py, as `model=nano`. Each round takes one step of each on the same
random tokens, on one thread, with documents that begin at random places, so many in a row on
average. It is the process's own time, which others on the machine change least. Prints tokens per
second, the ratio of the times, and the larger spread.
"""

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from bench import interleave, ratio, spread
from torch import Tensor

from gptattn.errors import UserError
from gptattn.settings.build import build_model
from gptattn.settings.compose import settings as settings_of
from gptattn.settings.config import TrainConfig
from gptattn.training.preflight import preflight

VOCABULARY = 256  # as of bytes


def new_step(cfg: TrainConfig, ids: Tensor, documents: Tensor | None) -> Callable[[], float]:
    """Return a training step, which returns its seconds."""
    torch.manual_seed(cfg.seed)
    model = build_model(cfg, VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> float:
        begin = time.process_time()
        model.loss(ids, ids, documents).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - begin

    step()  # the optimizer's averages are made
    return step


def main() -> None:
    """Print one line per attention."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--documents", type=float, default=3.0)
    parser.add_argument("--attn", nargs="+", default=["mha", "sliding", "gated_deltanet"])
    given, settings = parser.parse_known_args()
    torch.set_num_threads(1)
    for attn in given.attn:
        try:
            cfg = preflight(settings_of(["trainer=cpu", *settings, f"attn={attn}"])).cfg
        except UserError as error:
            sys.exit(f"error: {error}")
        shape = cfg.batch_size // cfg.accumulate, cfg.model.context_length
        ids = torch.randint(VOCABULARY, shape)
        begins = torch.rand(shape) < (given.documents - 1) / (shape[1] - 1)
        documents = begins.long().cumsum(1)
        steps = {
            "together": new_step(cfg, ids, None),
            "apart": new_step(cfg, ids, documents),
        }
        seconds = interleave(steps, given.rounds, seed=0)
        rates = {name: ids.numel() / median(own) for name, own in seconds.items()}
        print(
            f"{attn:16} {rates['together']:8,.0f} tokens/s together {rates['apart']:8,.0f} apart, "
            f"{ratio(seconds['apart'], seconds['together']):.2f} times as long, spread "
            f"{max(map(spread, seconds.values())):.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
