"""What variants with heads share: counting visible pairs, and weights by head."""

from torch import Tensor, nn

from gptattn.attention.capabilities import HeadWeights, copy_into


def seen_pairs(T: int, S: int, window: int | None) -> int:
    """Count the pairs of a query and a key that it sees in one causal head.

    The T queries are the last of S tokens; `window` is as in `Rule`.
    """

    def of_first(n: int) -> int:
        full = n if window is None else min(n, window)  # queries that the window does not limit
        return full * (full + 1) // 2 + (n - full) * full

    return of_first(S) - of_first(S - T)


def export_out_proj(
    out_proj: nn.Linear | None, head_dim: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return copies of the projection's weight [E, H, D] and bias [E]; None: there is none."""
    if out_proj is None:
        return None, None
    bias = out_proj.bias
    out_EHD = out_proj.weight.detach().clone().unflatten(1, (-1, head_dim))
    return out_EHD, None if bias is None else bias.detach().clone()


def load_out_proj(out_proj: nn.Linear | None, weights: HeadWeights) -> None:
    """Copy the output projection of `weights`. Raises ValueError if it does not fit `out_proj`."""
    out = None if weights.out_EHD is None else weights.out_EHD.flatten(1)
    copy_into(None if out_proj is None else out_proj.weight, out, "output weight")
    copy_into(None if out_proj is None else out_proj.bias, weights.out_bias_E, "output bias")


def per_head(parameter: Tensor, head_dim: int) -> Tensor:
    """Return a copy of a weight [heads * D, ...] or bias [heads * D] as [heads, D, ...]."""
    return parameter.detach().clone().unflatten(0, (-1, head_dim))


def names_of(module: nn.Module, linears: tuple[str, ...]) -> set[str]:
    """Return the `state_dict()` keys of the weights and biases of these layers of the module."""
    names = {f"{linear}.{part}" for linear in linears for part in ("weight", "bias")}
    return names & module.state_dict().keys()
