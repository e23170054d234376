"""A causal language model: its blocks, and GPT, which takes a function that builds attentions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gptattn.attention.base import Attention, HasMaps, Shared
from gptattn.attention.cache import Cache, CacheGroup
from gptattn.attention.linear import Linear, PreparedWeight, prepare
from gptattn.model.loss import drop_ignored, linear_cross_entropy
from gptattn.model.shared_init import DrawnByName
from gptattn.position.base import Documents, InputPosition

INIT_STD = 0.02


@dataclass(frozen=True)
class BlockStyle:
    """The block around the attention; GPT-2's by default.

    `bias`: in the MLP's layers. `zero_init`: attentions and MLPs add 0 at first.
    """

    norm: str = "layer"
    norm_eps: float = 1e-5
    mlp: str = "gelu"
    bias: bool = True
    zero_init: bool = False


GPT2_STYLE = BlockStyle()


def build_norm(style: BlockStyle, d_model: int) -> nn.LayerNorm | nn.RMSNorm:
    """Return LayerNorm, or RMSNorm, which has no bias and does not subtract the mean.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, sec. 3.
    """
    if style.norm == "rms":
        return nn.RMSNorm(d_model, style.norm_eps)
    return nn.LayerNorm(d_model, style.norm_eps)


class MLP(nn.Module):
    """Linear, tanh-GELU, Linear: x [..., d_model] -> [..., d_model]."""

    def __init__(self, d_model: int, d_mlp: int, bias: bool = True) -> None:
        super().__init__()
        self.up = Linear(d_model, d_mlp, bias=bias)
        self.down = Linear(d_mlp, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))

    def activation(self, x: Tensor) -> Tensor:
        """Return the second layer's input."""
        return F.gelu(x, approximate="tanh")


class SquaredReLU(MLP):
    """Linear, squared ReLU, Linear. Source: So et al. 2021 (Primer), arXiv:2109.08668, sec. 3."""

    def activation(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): x [..., d_model] -> [..., d_model].

    Source: Shazeer 2020, arXiv:2002.05202, sec. 2.
    """

    def __init__(self, d_model: int, d_mlp: int, bias: bool = False) -> None:
        super().__init__()
        self.gate = Linear(d_model, d_mlp, bias=bias)
        self.up = Linear(d_model, d_mlp, bias=bias)
        self.down = Linear(d_mlp, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


MLPS = {"gelu": MLP, "relu2": SquaredReLU, "swiglu": SwiGLU}


class Block(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + MLP(norm(x)), if there is an MLP."""

    def __init__(
        self,
        attention: Attention,
        d_model: int,
        d_mlp: int,
        dropout: float,
        style: BlockStyle = GPT2_STYLE,
    ) -> None:
        super().__init__()
        self.norm_attention = build_norm(style, d_model)
        self.attention, self.needs = attention, [*attention.needs()]
        self.norm_mlp, self.mlp = None, None
        if style.mlp != "none":
            self.norm_mlp = build_norm(style, d_model)
            self.mlp = MLPS[style.mlp](d_model, d_mlp, style.bias)
        self.dropout = nn.Dropout(dropout)

    @property
    def d_mlp(self) -> int:
        """The hidden width of the MLP; 0 without one."""
        return 0 if self.mlp is None else self.mlp.up.out_features

    def forward(self, x: Tensor, cache: Cache | None, shared: Shared) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x), cache, shared))
        if self.mlp is None or self.norm_mlp is None:
            return x
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class GPT(nn.Module):
    """A causal language model: token ids [B, T] -> logits [B, T, vocab_size].

    `attention(layer)` builds the attention of layer 0, 1, ...; `input_position` is None if the
    attention encodes positions, or nothing does. `style` describes the rest of each block; with
    `tied_head`, the head uses the token embedding's weight. `shared_init`: see `DrawnByName`. With
    `activation_checkpointing`, training keeps only each block's input, and the backward pass
    recomputes the block (Chen et al. 2016, arXiv:1604.06174).

    Raises ValueError for more tokens than `context_length`.

    Source: Radford et al. 2019 (GPT-2), sec. 2.3; its style is the default.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        context_length: int,
        d_model: int,
        num_layers: int,
        attention: Callable[[int], Attention],
        input_position: InputPosition | None,
        d_mlp: int,
        dropout: float,
        style: BlockStyle = GPT2_STYLE,
        tied_head: bool = True,
        embedding_std: float = INIT_STD,
        shared_init: bool = False,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.vocab_size, self.context_length, self.style = vocab_size, context_length, style
        self.activation_checkpointing = activation_checkpointing
        # Uninitialised: _initialise draws it, and drawing 50,257 rows twice takes time.
        self.token_embedding = nn.Embedding.from_pretrained(
            torch.empty(vocab_size, d_model), freeze=False
        )
        self.input_position = input_position
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(attention(layer), d_model, d_mlp, dropout, style) for layer in range(num_layers)
        )
        self.norm = build_norm(style, d_model)
        self.lm_head = None if tied_head else Linear(d_model, vocab_size, bias=False)
        self._prepared_head: PreparedWeight | None = None
        self.to_gradient: Callable[[Tensor, Tensor], Tensor] | None = None  # of the loss
        if shared_init:
            with DrawnByName(self) as drawn:
                self._initialise(embedding_std)
            drawn.check()
        else:
            self._initialise(embedding_std)

    @property
    def head(self) -> nn.Embedding | nn.Linear:
        """The layer whose weight [vocab_size, d_model] turns the last hidden state into logits."""
        return self.token_embedding if self.lm_head is None else self.lm_head

    def layers(self) -> list[Block]:
        """Return the blocks, first layer first."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def layer_matrices(self) -> set[nn.Parameter]:
        """Return the matrices inside the layers: no embedding, no head, no convolution."""
        return {p for block in self.layers() for p in block.parameters() if p.ndim == 2}

    @torch.no_grad()
    def _initialise(self, embedding_std: float) -> None:
        """Draw all weights as GPT-2 does, whatever the style.

        The std is 0.02, `embedding_std` for embeddings, and 0.02 / sqrt(n) for layers that write to
        the residual stream, where n counts attentions and MLPs together (with `zero_init`: 0).
        """
        if self.token_embedding.weight.is_meta:
            return
        _draw(self, embedding_std)
        added = sum(1 if block.mlp is None else 2 for block in self.layers())
        residual_std = 0.0 if self.style.zero_init else INIT_STD * added**-0.5
        for block in self.layers():
            down = None if block.mlp is None else block.mlp.down
            for writer in (block.attention.residual_writer(), down):
                if writer is not None:
                    writer.weight.normal_(0.0, residual_std)

    def hidden(
        self,
        ids: Tensor,
        cache: CacheGroup | None = None,
        documents_BT: Tensor | None = None,
        losses: dict[str, list[Tensor]] | None = None,
    ) -> Tensor:
        """Return the last layer's output after the final norm [B, T, d_model].

        Advances the cache by T. `documents_BT` keeps documents apart, as if each had its own row:
        each run of equal numbers is one document. `losses` collects the layers' losses, as in
        `Shared`. Raises ValueError for documents with a cache.
        """
        x, shared = self._embed(ids, cache, documents_BT)
        shared.losses = losses
        if cache is None:  # made here, because each block would make them again
            by_layer = [b.attention.make_masks(x, shared.positions) for b in self.layers()]
            shared.masks = {reach: mask for masks in by_layer for reach, mask in masks.items()}
        learning = self.training and torch.is_grad_enabled()
        for layer, block in enumerate(self.layers()):
            if self.activation_checkpointing and learning and cache is None:
                x, shared = checkpoint(run_block, block, x, None, shared, use_reentrant=False)
            else:
                x, shared = run_block(block, x, cache and cache.caches[layer], shared)
        if cache is not None:
            cache.advance(ids.shape[1])
        return self.norm(x)

    def _embed(
        self, ids: Tensor, cache: CacheGroup | None, documents_BT: Tensor | None
    ) -> tuple[Tensor, Shared]:
        """Return the first block's input [B, T, d_model], and the tokens' positions."""
        T = ids.shape[1]
        length = T + (0 if cache is None else cache.length)
        if length > self.context_length:
            raise ValueError(f"{length} tokens; pass at most context_length={self.context_length}")
        if documents_BT is None:
            positions = range(T) if cache is None else cache.next_positions(T)
        else:
            positions = Documents.numbered(documents_BT)
        x = self.token_embedding(ids)
        if self.input_position is not None:
            x = self.input_position(x, positions)
        return self.dropout(x), Shared(positions, masks={})

    def forward(self, ids: Tensor, cache: CacheGroup | None = None) -> Tensor:
        return F.linear(self.hidden(ids, cache), self.head.weight)

    def next_logits(self, ids: Tensor, cache: CacheGroup | None = None) -> Tensor:
        """Return the logits [B, vocab_size] of the token after ids [B, T]."""
        last_BE = self.hidden(ids, cache)[:, -1]
        if self._prepared_head is not None and not torch.is_grad_enabled():
            return self._prepared_head(last_BE)
        return F.linear(last_BE, self.head.weight)

    def prepare(self, rows: int | None) -> None:
        """Speed up decoding of `rows` rows at a time, until prepare(None).

        On the CPU, with 2 to 32 rows or bfloat16 weights, it holds a packed copy of the weights.
        """
        self._prepared_head = None if rows is None else PreparedWeight(self.head, rows)
        for child in self.children():
            if child is not self.lm_head:
                prepare(child, rows)

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        documents_BT: Tensor | None = None,
        *,
        chunk_tokens: int | None = None,
        scored: int | None = None,
        losses: dict[str, list[Tensor]] | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy in nats of the targets [B, T] that follow ids [B, T].

        `documents_BT` is as in `hidden`, `chunk_tokens` as in `linear_cross_entropy`. `scored` is
        the number of targets that are not IGNORED; the mean is then over these. In training,
        `losses` collects the layers' losses by name, for the training loop to add to the mean.
        """
        hidden = self.hidden(ids, None, documents_BT, losses)
        if scored is not None:
            hidden, targets = drop_ignored(hidden, targets, scored)
        weight = self.head.weight
        return linear_cross_entropy(hidden, weight, targets, chunk_tokens, self.to_gradient)

    def new_cache(
        self, batch: int, capacity: int | None = None, padding_B: Tensor | None = None
    ) -> CacheGroup:
        """Return one empty cache per layer, for up to `capacity` (default: context_length) tokens.

        `padding_B` [batch] is the number of padding ids at the start of each row.
        """
        capacity = self.context_length if capacity is None else capacity
        caches = [block.attention.new_cache(batch, capacity) for block in self.layers()]
        return CacheGroup(caches, padding_B)

    def layers_with_maps(self) -> list[int]:
        """Return the indices of the layers that can return attention weights."""
        return [i for i, block in enumerate(self.layers()) if isinstance(block.attention, HasMaps)]

    def attention_weights(self, ids: Tensor, documents_BT: Tensor | None = None) -> list[Tensor]:
        """Return the attention weights [B, H, T, T] on these ids, for each layer that has them."""
        return [w_BHTS for _, w_BHTS in self.each_attention(ids, documents_BT)]

    @torch.no_grad()
    def each_attention(
        self, ids: Tensor, documents_BT: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield each layer that has attention weights, and those weights [B, H, T, T].

        `documents_BT` is as in `hidden`.
        """
        x, shared = self._embed(ids, None, documents_BT)
        for layer, block in enumerate(self.layers()):
            # Compiled blocks would be recompiled for these sizes.
            with torch.compiler.set_stance("force_eager"):
                if isinstance(block.attention, HasMaps):
                    normed = block.norm_attention(x)
                    yield layer, block.attention.attention_weights(normed, shared)
                x, shared = run_block(block, x, None, shared)


def run_block(
    block: Block, x: Tensor, cache: Cache | None, shared: Shared
) -> tuple[Tensor, Shared]:
    """Return the block's output, and the shared state for the next one.

    The block gets only what it needs. So compiled code sees the same in all layers of a kind, and
    if backward runs the block again, the block sees what it saw first.
    """
    losses, needed = shared.losses, {n: shared.state[n] for n in block.needs if n in shared.state}
    visible = replace(shared, state=needed, losses=None if losses is None else {})
    y = block(x, cache, visible)
    if losses is not None and visible.losses:
        for name, terms in visible.losses.items():
            losses.setdefault(name, []).extend(terms)
    return y, replace(shared, state=shared.state | visible.state)


def _draw(module: nn.Module, embedding_std: float) -> None:
    """Draw the weights of a module and its submodules, in order of construction."""
    if isinstance(module, Attention):
        module.initialise(INIT_STD)
        return
    if isinstance(module, nn.Linear | nn.Embedding):
        std = embedding_std if isinstance(module, nn.Embedding) else INIT_STD
        module.weight.normal_(0.0, std)
    if isinstance(module, nn.Linear) and module.bias is not None:
        module.bias.zero_()
    for child in module.children():
        _draw(child, embedding_std)
