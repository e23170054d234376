"""What the benchmark measures: the menu's choices, named on the command line.

A name is a file of conf/attn, parts joined with `+`, settings after `:` with `,` between them:
`gqa`, `gqa+sink+gate`, `gqa:attn.num_kv_heads=4`, `mha:position=rope`.
"""

import argparse
from collections.abc import Sequence

from torch import Tensor, nn

from gptattn.attention import Attention, CacheGroup, Shared
from gptattn.build.model import build_model
from gptattn.errors import UserError
from gptattn.model.gpt import GPT, Block
from gptattn.settings.compose import settings

SIZES = ("model=gpt2_small", "model.dropout=0.0", "trainer=cpu")


def add_choices(
    parser: argparse.ArgumentParser, default: Sequence[str], peers: list[str] | None = None
) -> None:
    """Add `--variants`, of which `chosen` makes names, and `--peers`, other libraries."""
    if peers:
        parser.add_argument("--peers", nargs="*", choices=peers, default=peers, help="or none")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=list(default),
        metavar="NAME",
        help="files of conf/attn; NAME+PART+PART adds parts, NAME:SETTING=VALUE changes settings",
    )


def chosen(args: argparse.Namespace) -> list[str]:
    """Return the names that the command line asks for, each once; a mistake ends the script."""
    names = list(dict.fromkeys(args.variants))
    for name in names:
        try:
            settings([*SIZES, *overrides_of(name)])
        except UserError as error:
            raise SystemExit(f"error: {error}") from None
    return names


def overrides_of(name: str) -> list[str]:
    """Return the overrides of a name."""
    choice, _, changes = name.partition(":")
    variant, *parts = choice.split("+")
    part = [f"part=[{','.join(parts)}]"] if parts else []
    return [f"attn={variant}", *part, *(change for change in changes.split(",") if change)]


def model_of(name: str, *more: str) -> GPT:
    """Build GPT-2 small with this choice. Raises ConfigError, which names the field."""
    return build_model(settings([*SIZES, *more, *overrides_of(name)]), vocab_size=256)


class Stack(nn.Module):
    """Layers in a row, called as a model calls them: what one leaves, the next finds.

    Positions that act on the embeddings are no part of it.
    """

    def __init__(self, layers: Sequence[Attention | Block]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.attentions = [one.attention if isinstance(one, Block) else one for one in layers]

    def __len__(self) -> int:
        return len(self.layers)

    def new_cache(self, batch: int, capacity: int) -> CacheGroup:
        """Return the empty caches of all layers."""
        return CacheGroup([one.new_cache(batch, capacity) for one in self.attentions])

    def forward(self, x_BTE: Tensor, cache: CacheGroup | None = None) -> Tensor:
        T = x_BTE.shape[1]
        shared = Shared(range(T) if cache is None else cache.next_positions(T))
        for i, layer in enumerate(self.layers):
            x_BTE = layer(x_BTE, None if cache is None else cache.caches[i], shared)
        return x_BTE


def stack_of(name: str, context: int) -> Stack:
    """Build one attention layer of GPT-2 small, or if what layers leave is used, two in a row.

    A name that changes `model.num_layers` gets as many, such as
    `cross_layer:attn.share=3,model.num_layers=3`.
    """
    blocks = model_of(name, f"model.context_length={context}", "model.num_layers=2").layers()
    layers = [block.attention for block in blocks]
    return Stack(layers if any(layer.needs() for layer in layers) else layers[:1])
