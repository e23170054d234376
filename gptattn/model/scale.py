"""What training a model on many GPUs takes: memory, communication and time, worked out.

Figures of the model are counted from it (`measure_cost`, and the tensors that autograd keeps);
those of the machine are given.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gptattn.model.cost import measure_cost, parameter_count
from gptattn.model.gpt import GPT

FLOAT32 = 4  # bytes
# Per parameter in float32: the weight, its gradient, and AdamW's two averages.
STATE_BYTES = 4 * FLOAT32
BACKWARD = 2 / 3  # of a step's FLOPs, beside which gradients are exchanged
BUCKET_BYTES = 25 * 2**20  # of gradients, exchanged at a time by torch's DDP


@dataclass(frozen=True)
class Machine:
    """What is there. `flops`: of products in the precision used, of one GPU, at its peak.

    `mfu`: the share of that which training reaches. `link`: bytes per second between the GPUs of a
    node, of each; `network`: of each, between nodes.
    """

    devices: int
    nodes: int
    flops: float
    mfu: float
    memory: float
    link: float
    network: float

    @property
    def size(self) -> int:
        """The number of GPUs."""
        return self.devices * self.nodes


@dataclass(frozen=True)
class Plan:
    """Bytes of one GPU and seconds of one step."""

    state: int
    activations: int
    exchanged: float  # bytes that each GPU sends in a step
    computing: float
    exchanging: float
    step: float  # with what of the exchange the backward pass does not hide


def activation_bytes(model: GPT, rows: int, dtype: torch.dtype) -> int:
    """Return the bytes that autograd keeps of `rows` rows of a whole context, without the logits.

    Those of one row are counted, on a CPU in the autocast dtype that is given.
    """
    kept: dict[int, int] = {_memory(p): 0 for p in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        kept.setdefault(_memory(tensor), tensor.untyped_storage().nbytes())
        return tensor

    ids = torch.zeros(1, model.context_length, dtype=torch.int64)
    mixed = dtype != torch.float32
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", dtype, enabled=mixed),
    ):
        model.train().hidden(ids)
    weights = sum(_copied(module, dtype) for module in model.modules()) if mixed else 0
    return rows * (sum(kept.values()) - weights) + weights


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copied(module: nn.Module, dtype: torch.dtype) -> int:
    """The bytes of the copy of a layer's weight that autocast makes, which rows do not multiply."""
    return module.weight.numel() * dtype.itemsize if isinstance(module, nn.Linear) else 0


def plan(model: GPT, machine: Machine, tokens_per_step: int, activations: int) -> Plan:
    """Return what a step takes in which each GPU has an even share of the tokens.

    Gradients are summed by a ring: each GPU sends 2 (n - 1) / n of their bytes (Patarasuk and Yuan
    2009), over its slowest way, while the backward pass goes on. Left over is the last bucket, and
    what the backward pass is too short for.
    """
    params, n = parameter_count(model), machine.size
    work = measure_cost(model).flops_per_token * tokens_per_step / n
    computing = work / (machine.flops * machine.mfu)
    exchanged = 2 * (n - 1) / n * FLOAT32 * params
    way = machine.link if machine.nodes == 1 else machine.network
    exchanging = exchanged / way
    last = exchanging * min(1.0, BUCKET_BYTES / (FLOAT32 * params))
    left = max(exchanging - BACKWARD * computing, last) if n > 1 else 0.0
    return Plan(
        STATE_BYTES * params, activations, exchanged, computing, exchanging, computing + left
    )
