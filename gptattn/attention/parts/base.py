"""The base class of parts: small additions to an attention with heads, at up to six points."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from gptattn.attention.base import Shared
from gptattn.attention.cache import Cache, Entry
from gptattn.attention.rule import Rule


class Part(nn.Module):
    """An addition to softmax attention; a subclass overrides the methods it needs.

    Besides its YAML's keys, its constructor can declare `d_in`, `num_heads`, `num_kv_heads`,
    `head_dim`, `context_length`, `layer` and `provided` (the names of what earlier layers put into
    `Shared.state`), which come from the attention. Its Linear layers start like the attention's.
    """

    # Parts and positions that cannot be combined with this one, by name -> the reason.
    refuses: Mapping[str, str] = {}
    # False for a part that itself mixes tokens across documents.
    keeps_documents: ClassVar[bool] = True
    uses_values: ClassVar[bool] = False  # `mix` needs the values of each head, as entries["v"]

    def __init__(self) -> None:
        super().__init__()  # a signature without nn.Module's *args

    @property
    def changes_heads(self) -> bool:
        """Whether it changes queries, keys or values of each head, which some layers don't keep."""
        kind = type(self)
        return kind.heads is not Part.heads or kind.rotated is not Part.rotated

    def input(self, x_BTE: Tensor, shared: Shared) -> Tensor:
        """Change the attention's input; everything after it, other parts too, gets the new one."""
        return x_BTE

    def heads(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, shared: Shared
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Change queries, keys and values after the projections, before positions."""
        return q_BHTD, k_BGTD, v_BGTD

    def rotated(self, q_BHTD: Tensor, k_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Change queries and keys after the position has acted on them."""
        return q_BHTD, k_BGTD

    def rule(self, rule: Rule, new: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> Rule:
        """Change the rule, except its window, on which the cache and the costs rely.

        `new` has this step's `entries`, and `held` those of all keys.
        """
        return rule

    def mix(self, y_BHTD: Tensor, x_BTE: Tensor, entries: Mapping[str, Tensor]) -> Tensor:
        """Change the heads' outputs, before they are merged; x is the attention's input.

        `entries` has this step's entries and, with `uses_values`, its values as "v": [B, G, T, D],
        or [B, G, T, n * D] if a value serves n neighbouring heads of y.
        """
        return y_BHTD

    def output(self, y_BTE: Tensor, x_BTE: Tensor) -> Tensor:
        """Change the merged output, before the output projection."""
        return y_BTE

    def kept(self) -> dict[str, Entry]:
        """Return what the cache keeps for each token besides keys and values, by name.

        No two parts of one attention may use the same name.
        """
        return {}

    def state(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its state per row, of constant size, by name.

        `shared.cache.tensors` holds the states with a batch axis in front. They start at zero, and
        the part updates them in place at each step.
        """
        return {}

    def entries(self, x_BTE: Tensor, cache: Cache | None) -> dict[str, Tensor]:
        """Return the T new tokens' entries [B, heads, T, size], by the names in `kept`."""
        return {}

    def provides(self) -> dict[str, str]:
        """Return what it provides to later layers; see `Attention.provides`."""
        return {}

    def needs(self) -> dict[str, str]:
        """Return what an earlier layer must provide; see `Attention.needs`."""
        return {}

    def initialise(self, std: float) -> None:
        """Set the weights that are not drawn from N(0, std), without gradients."""
