"""A variant whose parameters and buffers are laid out in unusual ways resumes bit for bit."""

import shutil
from pathlib import Path

import pytest
import torch
from interrupted import fingerprint
from support import command, tiny
from torch import nn

from gptattn.attention import MultiHeadAttention


class Transposed(MultiHeadAttention):
    """Has a parameter whose memory is not in the order of its elements."""

    def __init__(self, d_in: int, d_out: int, context_length: int, num_heads: int) -> None:
        super().__init__(d_in, d_out, context_length, num_heads)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, d_in * 3).view(d_in, 3).T)

    def forward(self, x_BTE, cache=None, shared=None):  # type: ignore[no-untyped-def]
        return super().forward(x_BTE * self.gain.square().sum(0), cache, shared)


class Masked(MultiHeadAttention):
    """Has persistent buffers: a mask, a mask of -inf, numbers."""

    def __init__(self, d_in: int, d_out: int, context_length: int, num_heads: int) -> None:
        super().__init__(d_in, d_out, context_length, num_heads)
        mask = torch.ones(context_length, context_length, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask)
        self.register_buffer("minus", torch.zeros(mask.shape).masked_fill(mask, -torch.inf))
        self.register_buffer("order", torch.arange(context_length))


@pytest.mark.parametrize("variant", [Transposed, Masked])
def test_it_resumes_bit_for_bit(variant: type, tmp_path: Path) -> None:
    allowed = f"allow_targets=[{__name__}]"
    (tmp_path / "conf" / "attn").mkdir(parents=True)
    file = tmp_path / "conf" / "attn" / "unusual.yaml"
    file.write_text(f"_target_: {__name__}.{variant.__name__}\n", encoding="utf-8")
    own = [f"hydra.searchpath=[file://{tmp_path / 'conf'}]", "attn=unusual", allowed]
    more = ["run_dir=run", "budget.steps=6", "validation.count=3", "optim.lr=0.01"]
    assert command(tmp_path, *tiny(tmp_path, *own, *more)) == 0
    run, cut = tmp_path / "run", tmp_path / "cut"
    shutil.copytree(run, cut)
    for part in [*(cut / "checkpoints").glob("step=6*"), cut / "summary.json"]:
        part.unlink()
    assert command(tmp_path, "resume=cut", allowed) == 0
    assert fingerprint(cut) == fingerprint(run)
