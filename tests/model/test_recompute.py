"""model.activation_checkpointing gives the same gradients, and keeps less for the backward pass."""

from itertools import chain

import pytest
import torch
from building import CONTRACT, build_gpt, chosen, menu, slow_but
from torch import Tensor

IDS = torch.randint(13, (2, 9), generator=torch.Generator().manual_seed(2))


def gradients(variant: str, *, recompute: bool) -> list[Tensor]:
    """The gradients of one step with dropout, whose masks are drawn again for the second pass."""
    torch.manual_seed(1)
    wanted = f"model.activation_checkpointing={str(recompute).lower()}"
    model = build_gpt(*chosen(variant), "model.dropout=0.2", wanted).train()
    torch.manual_seed(5)
    own: dict[str, list[Tensor]] = {}
    loss = model.loss(IDS, IDS.flip(1), losses=own)
    (loss + sum(chain(*own.values()))).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("variant", slow_but([*menu("attn"), "gqa+value_residual"], CONTRACT))
def test_the_gradients_are_the_same(variant):
    again, kept = (gradients(variant, recompute=r) for r in (True, False))
    assert len(again) == len(kept)
    assert all(torch.equal(a, b) for a, b in zip(again, kept, strict=True))


def held(*overrides: str) -> int:
    """The bytes that autograd keeps for the backward pass, each tensor once."""
    model = build_gpt("model.num_layers=6", *overrides).train()
    sizes: dict[int, int] = {id(p): 0 for p in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        sizes.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.hidden(IDS.repeat(50, 1))
    return sum(sizes.values())


def test_only_the_input_of_each_block_is_kept():
    again, kept = (held(f"model.activation_checkpointing={r}") for r in ("true", "false"))
    assert again < kept / 4
