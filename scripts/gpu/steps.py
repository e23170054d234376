"""A training step in a plain loop, as the run's own does it, and one of a plain GPT-2."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptattn.model.gpt import GPT
from gpu.lab import Lab

LOSS = Callable[[Tensor, Tensor], Tensor]
CLIP = 1.0


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return the fused optimizer of all loops."""
    return torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )


class Loop:
    """Our model's steps, without Lightning: clipped on the device, so that nothing waits."""

    def __init__(self, lab: Lab, model: GPT, loss: LOSS | None = None) -> None:
        self.lab, self.model, self.loss = lab, model, loss or model.loss
        self.optimizer = adamw(model)
        self.losses: list[Tensor] = []

    def __call__(self, ids: Tensor, targets: Tensor) -> None:
        with torch.autocast(self.lab.device.type, torch.bfloat16, enabled=self.lab.on_gpu):
            loss = self.loss(ids, targets)
        loss.backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        nn.utils.clip_grads_with_norm_(list(self.model.parameters()), CLIP, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())


class PlainLayer(nn.Module):
    """A layer of GPT-2: q, k and v in one product, sdpa, GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 with the settings of nanoGPT's benchmark: tied head, all logits at once, no dropout.

    Source: karpathy/nanoGPT, bench.py and model.py (settings only).
    """

    def __init__(self, vocab: int, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(PlainLayer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for weight in (self.tokens.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        logits = F.linear(self.norm(self.layers(x)), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_step(lab: Lab, model: nn.Module, compiled: bool) -> Callable[[Tensor, Tensor], None]:
    """Return a step of the plain GPT-2's loop, as in its benchmark, with clipping."""
    optimizer = adamw(model)
    if compiled:
        lab.compile(model)

    def step(ids: Tensor, targets: Tensor) -> None:
        with torch.autocast(lab.device.type, torch.bfloat16, enabled=lab.on_gpu):
            loss = model(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step
