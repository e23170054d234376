"""What training a model on many GPUs takes: memory, communication and time, worked out.

Figures of the model are counted from it (`measure_cost`, and the tensors that autograd keeps);
those of the machine are given.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gptattn.model.cost import measure_cost, parameter_count
from gptattn.model.gpt import GPT
from gptattn.model.loss import LOGITS_AT_A_TIME

FLOAT32 = 4  # bytes
# Per parameter in float32: the weight, its gradient, and AdamW's two averages.
STATE_BYTES = 4 * FLOAT32
BACKWARD = 2 / 3  # of a step's FLOPs; gradients are exchanged beside it
BUCKET_BYTES = 25 * 2**20  # of gradients, exchanged at a time by torch's DDP


@dataclass(frozen=True)
class Machine:
    """What there is: `nodes` machines with `devices` GPUs each.

    `flops`: of products in the precision used, per second, of one GPU at its peak. `mfu`: the share
    of that which training reaches. `link`: bytes per second that a GPU sends to others of its node;
    `network`: to other nodes.
    """

    devices: int
    nodes: int
    flops: float
    mfu: float
    link: float
    network: float

    @property
    def size(self) -> int:
        """The number of GPUs."""
        return self.devices * self.nodes


@dataclass(frozen=True)
class Plan:
    """Bytes and seconds of one GPU in one step."""

    state: int  # bytes of weights, gradients and averages
    exchanged: float  # bytes that it sends
    computing: float  # seconds
    exchanging: float  # seconds, if nothing is hidden
    step: float  # seconds, with what of the exchange the backward pass does not hide


class _Kept:
    """Counts what autograd keeps of a forward pass, per block and outside of them."""

    def __init__(self, model: GPT) -> None:
        # Weights are held in any case. All storages stay alive here, so that none has the address
        # of one that is gone.
        weights = (p.untyped_storage() for p in model.parameters())
        self.known = {weight._cdata: weight for weight in weights}
        self.blocks: list[int] = []
        self.inputs = self.outside = 0
        self.inside = False

    def note(self, tensor: Tensor) -> Tensor:
        """Count the tensor's memory, if it is not counted already."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known[storage._cdata] = storage
            if self.inside:
                self.blocks[-1] += storage.nbytes()
            else:
                self.outside += storage.nbytes()
        return tensor

    def enter(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Begin a block."""
        self.inside = True
        self.blocks.append(0)
        self.inputs += args[0].untyped_storage().nbytes()

    def leave(self, *_: object) -> None:
        """End a block."""
        self.inside = False


def activation_bytes(model: GPT, rows: int, dtype: torch.dtype) -> int:
    """Return the bytes held for the backward pass of `rows` rows of a whole context.

    That is what autograd keeps of a forward pass under autocast to `dtype` (float32: without), and
    the logits that exist at a time. With `recompute` it is the input of each block, and what one
    block keeps while it is computed again. The pass is made on a CPU; in a `FakeTensorMode`, in
    which the model was built, it takes neither memory nor arithmetic.
    """
    kept = _Kept(model)
    hooks = [block.register_forward_pre_hook(kept.enter) for block in model.layers()]
    hooks += [block.register_forward_hook(kept.leave) for block in model.layers()]
    recompute, model.recompute = model.recompute, False
    ids = torch.zeros(rows, model.context_length, dtype=torch.int64)
    try:
        with (
            torch.autograd.graph.saved_tensors_hooks(kept.note, lambda tensor: tensor),
            torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
        ):
            model.train().hidden(ids)
    finally:
        model.recompute = recompute
        for hook in hooks:
            hook.remove()
    # Log-probabilities in float32, and the product and its gradient in the dtype.
    logits = min(LOGITS_AT_A_TIME, ids.numel() * model.vocab_size)
    outside = kept.outside + logits * (FLOAT32 + 2 * dtype.itemsize)
    blocks = kept.inputs + max(kept.blocks) if recompute else sum(kept.blocks)
    return outside + blocks


def plan(model: GPT, machine: Machine, tokens_per_step: int, rows: int) -> Plan:
    """Return what a step takes in which each GPU has an even share of the tokens, `rows` at a time.

    Gradients are summed by a ring: each GPU sends 2 (n - 1) / n of their bytes (Patarasuk and Yuan
    2009), over its slowest way, while the backward pass of its last rows goes on. Left over is the
    last bucket, and what that pass is too short for. With `recompute` the blocks' forward pass is
    computed twice; the head's is not, but the sum here takes it so.
    """
    params, n = parameter_count(model), machine.size
    work = measure_cost(model).flops_per_token * tokens_per_step / n
    again = 4 / 3 if model.recompute else 1.0
    computing = again * work / (machine.flops * machine.mfu)
    exchanged = 2 * (n - 1) / n * FLOAT32 * params
    exchanging = exchanged / (machine.link if machine.nodes == 1 else machine.network)
    last = exchanging * min(1.0, BUCKET_BYTES / (FLOAT32 * params))
    times = max(1, math.ceil(tokens_per_step / (n * rows * model.context_length)))
    left = max(exchanging - BACKWARD * computing / times, last)
    return Plan(STATE_BYTES * params, exchanged, computing, exchanging, computing + left)
