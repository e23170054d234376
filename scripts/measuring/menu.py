"""What the benchmark measures: variants, named on the command line.

A name is a file of conf/attn, then parts after `+` and settings after `:`, such as `gqa`,
`gqa+sink+gate`, `gqa:attn.num_kv_heads=4` or `mha:position=rope:attn.window=256`.
"""

from collections.abc import Collection, Sequence

from torch import Tensor, nn

from gptattn.attention import Attention, CacheGroup, Shared
from gptattn.build.model import build_model
from gptattn.errors import ConfigError, UserError
from gptattn.model.gpt import GPT, Block
from gptattn.settings.compose import settings
from gptattn.settings.values import suggest

SIZES = ("model=gpt2_small", "model.dropout=0.0", "trainer=cpu")
# Help of options that several parts share.
VARIANTS = "files of conf/attn; NAME+PART adds a part, NAME:SETTING=VALUE changes a setting"
PEERS = "other libraries to measure; [] for none"


def check_variants(names: Sequence[str]) -> list[str]:
    """Return the names without duplicates. Raises ConfigError for a wrong one."""
    for name in names:
        try:
            settings([*SIZES, *overrides_of(name)])
        except UserError as error:
            raise ConfigError("variants", f"{name}: {error}") from None
    return list(dict.fromkeys(names))


def check_peers(names: Sequence[str], choices: Collection[str]) -> list[str]:
    """Return the names. Raises ConfigError for an unknown one."""
    for name in names:
        if name not in choices:
            raise ConfigError("peers", f"{name!r} is unknown; {suggest(name, choices)}, or []")
    return list(names)


def overrides_of(name: str) -> list[str]:
    """Return the overrides that a name stands for."""
    choice, *changes = name.split(":")
    variant, *parts = choice.split("+")
    part = [f"part=[{','.join(parts)}]"] if parts else []
    return [f"attn={variant}", *part, *changes]


def model_of(name: str, *more: str) -> GPT:
    """Build GPT-2 small with this variant. Raises ConfigError, which names the field."""
    return build_model(settings([*SIZES, *more, *overrides_of(name)]), vocab_size=256)


class Stack(nn.Module):
    """Layers in a row, called as in a model, so later layers can reuse what earlier ones share.

    Without positions that act on the embeddings.
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
    """Build one attention layer of GPT-2 small, or two where the second reuses the first's state.

    For more layers, set `model.num_layers` in the name:
    `cross_layer:attn.share=3:model.num_layers=3`.
    """
    blocks = model_of(name, f"model.context_length={context}", "model.num_layers=2").layers()
    layers = [block.attention for block in blocks]
    return Stack(layers if any(layer.needs() for layer in layers) else layers[:1])
