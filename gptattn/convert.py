"""Weights from one attention variant to another, exactly where that can be, else by a method.

Every variant speaks one canonical per-head layout (`HeadWeights`), so that a conversion is an
export, a change of the number of key/value heads, and a load.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from gptattn import gpt2
from gptattn.attention.base import HeadWeights
from gptattn.errors import ConfigError
from gptattn.gpt import GPT
from gptattn.saved import load_run

Method = Literal["mean", "first", "random"]
METHODS = get_args(Method)
INIT_STD = 0.02  # of the random method: GPT-2's initialisation


def convert_heads(
    weights: HeadWeights, num_kv_heads: int, method: Method, generator: torch.Generator
) -> HeadWeights:
    """The same layer with `num_kv_heads` key/value heads.

    Fewer: each new head stands for a run of old ones, which is their mean, the first of them, or
    freshly drawn. More: each old head is copied to those that it stood for, which changes nothing
    in the output. Raises ValueError where one count does not divide the other.

    Source: Ainslie et al. 2023, arXiv:2305.13245, sec. 2.1 and fig. 4.
    """
    old = len(weights.k_GDE)
    if max(old, num_kv_heads) % min(old, num_kv_heads):
        raise ValueError(
            f"{old} key/value heads cannot become {num_kv_heads}: one must divide the other"
        )

    def change(heads: Tensor | None) -> Tensor | None:
        if heads is None or num_kv_heads == old:
            return heads
        if num_kv_heads > old:
            return heads.repeat_interleave(num_kv_heads // old, dim=0)
        groups = heads.unflatten(0, (num_kv_heads, -1))
        if method == "mean":
            return groups.mean(dim=1)
        if method == "first":
            return groups[:, 0].clone()
        if heads.ndim == 2:
            return torch.zeros_like(groups[:, 0])  # a bias starts at 0
        return torch.randn(groups[:, 0].shape, generator=generator).to(heads) * INIT_STD

    return replace(
        weights,
        k_GDE=_given(change(weights.k_GDE)),
        v_GDE=_given(change(weights.v_GDE)),
        k_bias_GD=change(weights.k_bias_GD),
        v_bias_GD=change(weights.v_bias_GD),
    )


def _given(heads: Tensor | None) -> Tensor:
    assert heads is not None
    return heads


def initialise(model: GPT, folder: Path, method: Method, seed: int) -> None:
    """Put the weights of a run, of a converted model or of a GPT-2 checkpoint into `model`.

    Raises CheckpointError for what cannot be read, ConfigError for what cannot be converted.
    """
    source = gpt2.load(folder) if gpt2.is_gpt2(folder) else load_run(folder).model
    try:
        convert(source, model, method, seed)
    except ConfigError as error:
        raise ConfigError("init_from", error.message) from error


@torch.no_grad()
def convert(source: GPT, target: GPT, method: Method = "mean", seed: int = 0) -> None:
    """Put the weights of `source` into `target`, which differs in its attention alone.

    Exact between the wrapper, the split form and GQA with as many key/value heads, and wherever
    key/value heads are copied; otherwise by `method`. Raises ConfigError where it cannot be done.
    """
    theirs = {k: v for k, v in source.state_dict().items() if ".attention." not in k}
    ours = {k: v for k, v in target.state_dict().items() if ".attention." not in k}
    for name in theirs.keys() | ours.keys():
        if name not in theirs or name not in ours or theirs[name].shape != ours[name].shape:
            raise ConfigError(
                "to", f"{name} differs: only the attention may; give both models the same sizes"
            )
    generator = torch.Generator().manual_seed(seed)
    for layer, (old, new) in enumerate(zip(source.layers(), target.layers(), strict=True)):
        weights, wanted = old.attention.export_heads(), new.attention.export_heads()
        try:
            if weights.q_HDE.shape != wanted.q_HDE.shape:
                raise ValueError(
                    f"query heads of shape {list(weights.q_HDE.shape)} cannot become "
                    f"{list(wanted.q_HDE.shape)}"
                )
            new.attention.load_heads(convert_heads(weights, len(wanted.k_GDE), method, generator))
        except ValueError as error:
            raise ConfigError("to", f"layer {layer}: {error}") from error
    target.load_state_dict(theirs, strict=False)
