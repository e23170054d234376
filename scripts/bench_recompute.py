"""Measures model.activation_checkpointing: memory and time of training steps, with and without.

python scripts/bench_recompute.py [--rounds 15] [SETTINGS]
Takes the settings of train.py, as `model=nano`. Each round takes one step of each on the same
random tokens, on one thread, in a new order; their time is the process's own, which others on the
machine change least. Prints of each the MB of tensors that are kept for the backward pass, the peak
MB of a process of its own that trains, and tokens per second; then the ratio of the times.
"""

import argparse
import subprocess
import sys
from statistics import median

import torch
from bench import interleave, ratio, spread
from bench_documents import VOCABULARY, new_step
from torch import Tensor

from gptattn.errors import UserError
from gptattn.machine.device import peak_memory_mb, reset_peak_memory
from gptattn.settings.build import build_model
from gptattn.settings.compose import settings as settings_of
from gptattn.settings.config import TrainConfig
from gptattn.training.preflight import preflight

CPU = torch.device("cpu")
CONTENDERS = {
    "kept": "model.activation_checkpointing=false",
    "recomputed": "model.activation_checkpointing=true",
}


def new_ids(cfg: TrainConfig) -> Tensor:
    """Return the random ids of a micro-batch."""
    return torch.randint(VOCABULARY, (cfg.batch_size // cfg.accumulate, cfg.model.context_length))


def kept_mb(cfg: TrainConfig, ids: Tensor) -> float:
    """Return the MB of the tensors that autograd keeps, each once, without the weights."""
    model = build_model(cfg, VOCABULARY).train()
    sizes = {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}
    held: list[Tensor] = []  # or the memory of one that is gone would be another's

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes.setdefault(storage.data_ptr(), storage.nbytes())
        held.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.hidden(ids)
    return sum(sizes.values()) / 1e6


def peak_mb(contender: str, settings: list[str]) -> float:
    """Return the peak MB of a new process over three steps."""
    command = [sys.executable, __file__, "--memory-of", contender, *settings]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    """Print one line per contender, and the ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory-of", choices=CONTENDERS, help=argparse.SUPPRESS)
    given, settings = parser.parse_known_args()
    torch.set_num_threads(1)
    try:
        cfgs = {
            name: preflight(settings_of(["trainer=cpu", *settings, setting])).cfg
            for name, setting in CONTENDERS.items()
        }
    except UserError as error:
        sys.exit(f"error: {error}")
    ids = new_ids(cfgs["kept"])
    if given.memory_of:
        reset_peak_memory(CPU)
        step = new_step(cfgs[given.memory_of], ids, None)
        for _ in range(2):
            step()
        print(peak_memory_mb(CPU))
        return
    memory = {name: (kept_mb(cfg, ids), peak_mb(name, settings)) for name, cfg in cfgs.items()}
    steps = {name: new_step(cfg, ids, None) for name, cfg in cfgs.items()}
    seconds = interleave(steps, given.rounds, seed=0)
    for name, (kept, peak) in memory.items():
        rate = ids.numel() / median(seconds[name])
        print(
            f"{name:12} {kept:8,.1f} MB for the backward pass {peak:8,.0f} MB at the peak "
            f"{rate:10,.0f} tokens/s, spread {spread(seconds[name]):.0%}"
        )
    print(f"{ratio(seconds['recomputed'], seconds['kept']):.2f} times as long")


if __name__ == "__main__":
    main()
