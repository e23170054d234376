"""Times training steps with documents kept apart and without, in turns.

python scripts/bench_documents.py [--rounds 15] [--attn mha sliding gated_deltanet] [SETTINGS]
Takes the settings of train.py, as `model=nano`; the text is data=stdlib unless they name another
of several documents. Each round takes one step of each, on the same rows, on one thread. It is the
process's own time, which others on the machine change least. Prints tokens per second and the
ratio of the times.
"""

import argparse
import sys
import time
from collections.abc import Callable
from statistics import mean, median

import torch
from bench import interleave, ratio

from gptattn.cli.main import check_job
from gptattn.data.run_data import RunData
from gptattn.errors import UserError
from gptattn.settings.build import build_data, build_model
from gptattn.settings.config import TrainConfig


def new_step(cfg: TrainConfig, data: RunData, *, apart: bool) -> Callable[[], float]:
    """Return a training step, which returns its seconds."""
    torch.manual_seed(cfg.seed)
    model = build_model(cfg, data.tokenizer.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    done = 0

    def step() -> float:
        nonlocal done
        batch = data.training_batch(cfg.seed, done, cfg.batch_size, cfg.model.context_length)
        done += 1
        begin = time.process_time()
        model.loss(*batch[: 2 + apart]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - begin

    step()  # the optimizer's averages are made
    return step


def documents_in_a_row(cfg: TrainConfig, data: RunData) -> float:
    """Return the mean number of documents in a row of the first batches."""
    batches = [
        data.training_batch(cfg.seed, step, cfg.batch_size, cfg.model.context_length)
        for step in range(20)
    ]
    return mean(1 + float(numbers.max(1).values.double().mean()) for *_, numbers in batches)


def main() -> None:
    """Print one line per attention."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--attn", nargs="+", default=["mha", "sliding", "gated_deltanet"])
    given, settings = parser.parse_known_args()
    torch.set_num_threads(1)
    for attn in given.attn:
        chosen = ["data=stdlib", "trainer=cpu", *settings, "data.mask_documents=true"]
        try:
            cfg = check_job([*chosen, f"attn={attn}"])
            data = build_data(cfg)
        except UserError as error:
            sys.exit(f"error: {error}")
        steps = {name: new_step(cfg, data, apart=name == "apart") for name in ("apart", "together")}
        seconds = interleave(steps, given.rounds, seed=0)
        tokens = cfg.batch_size * cfg.model.context_length
        rates = {name: tokens / median(own) for name, own in seconds.items()}
        print(
            f"{attn:16} {documents_in_a_row(cfg, data):.2f} documents in a row: "
            f"{rates['together']:,.0f} tokens/s together, {rates['apart']:,.0f} apart, "
            f"{ratio(seconds['apart'], seconds['together']):.2f} times as long"
        )


if __name__ == "__main__":
    main()
