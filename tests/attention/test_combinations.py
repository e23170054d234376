"""Random mechanisms, heads, windows, positions and parts together keep the promises of each.

The same 25 combinations each time; `GPTATTN_COMBINATIONS=2000` makes 2,000, in about a minute.
"""

import os
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from building import acts_in_heads, build_attention, class_of, fits, menu, read_file, refused, takes
from contract import assert_same, draw, outputs_and_gradients
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from torch import Tensor

from gptattn.attention import Attention, Shared, SoftmaxAttention
from gptattn.settings.construct import construct

# hypothesis keeps files between runs: keep them outside of the repository.
set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "gptattn-hypothesis")
COUNT = int(os.environ.get("GPTATTN_COMBINATIONS", "25"))
HOSTS = [name for name in menu("attn") if issubclass(class_of("attn", name), SoftmaxAttention)]
IN_HEADS = [None, *(name for name in menu("position") if acts_in_heads(name))]
B, E = 2, 7


@st.composite
def combinations(take: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Draw a mechanism with parts, and arguments of its constructor."""
    host = take(st.sampled_from(HOSTS))
    tokens = take(st.integers(2, 13))
    name = take(st.sampled_from(IN_HEADS))
    parts = [part for part in menu("part") if name not in refused(part) and fits(host, part)]
    parts = take(st.lists(st.sampled_from(parts), unique=True))
    assert not any(part in refused(other) for part in parts for other in parts)
    heads = 6 if takes(host, "num_heads") else 1  # as in SMALL
    size = take(st.sampled_from([4, 8] if name else [3, 4, 5]))
    position = None
    if name is not None:
        spec = read_file("position", name)
        if "fraction" in spec:
            spec["fraction"] = take(st.sampled_from([1.0, 0.5]))
            spec["stretch"] = take(st.sampled_from([1.0, 1.5]))
        shared = {"context_length": tokens, "head_dim": size, "num_heads": heads}
        position = construct("position", spec, shared, [])
    window = take(st.none() | st.integers(1, tokens))
    sizes = {"d_in": E, "d_out": heads * size, "context_length": tokens}
    if host == "nsa":
        sizes |= {"block": 2, "stride": 1, "select_block": 2, "topk": 3}
    return "+".join([host, *parts]), sizes | {"window": window, "position": position}


def splits(tokens: int) -> st.SearchStrategy[list[int]]:
    """Return chunks of tokens that add up to all."""
    cuts = st.lists(st.integers(1, tokens - 1), unique=True, max_size=4)
    return cuts.map(lambda at: [b - a for a, b in pairwise([0, *sorted(at), tokens])])


@torch.no_grad()
def decoded(attention: Attention, x: Tensor, padding: Tensor, chunks: Sequence[int]) -> Tensor:
    """The outputs token by token through a cache, with `padding` tokens of none on the left."""
    cache, done = attention.new_cache(len(x), x.shape[1]), []
    for part in x.split(list(chunks), dim=1):
        index = torch.arange(cache.length, cache.length + part.shape[1])
        at = (index - padding[:, None]).clamp_min(-1)
        done.append(attention(part, cache, Shared(at) if padding.any() else None))
        cache.advance(part.shape[1])
    return torch.cat(done, dim=1)


@settings(
    max_examples=COUNT,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_each_combination_is_causal_exact_and_decodes_as_it_reads(data):
    variant, given = data.draw(combinations())
    tokens = given["context_length"]
    torch.manual_seed(data.draw(st.integers(0, 99)))
    reference = build_attention(variant, backend="reference", **given).double()
    fast = build_attention(variant, backend="sdpa", **given).double()
    assert isinstance(fast, SoftmaxAttention)
    fast.load_state_dict(reference.state_dict())
    x = draw(B, tokens, E).requires_grad_()
    upstream = draw(B, tokens, given["d_out"])
    expected = outputs_and_gradients(reference, x, upstream)
    assert_same(outputs_and_gradients(fast, x, upstream), expected)

    causal = torch.ones(tokens, tokens).bool().tril().triu(1 - (fast.rule().window or tokens))
    row = data.draw(st.integers(0, tokens - 1))
    (reached,) = torch.autograd.grad(fast(x)[0, row].sum(), x)
    assert not reached[0, row + 1 :].any()
    assert not reached[1].any()
    # What a forget gate before the window adds to all scores cancels, except for rounding.
    # A convolution over four tokens reaches three before the window.
    wide = causal[max(0, row - 3 * ("+conv" in variant)) : row + 1].any(0)
    beyond = reached[0, ~wide]
    assert_same(beyond, torch.zeros_like(beyond))

    w_BHTS = fast.attention_weights(x)
    assert not w_BHTS[..., ~causal].any()
    total = w_BHTS.sum(-1)
    assert (w_BHTS >= 0).all()
    assert (total <= 1 + 1e-12).all()

    chunks = data.draw(splits(tokens))
    whole = torch.zeros(B, dtype=torch.int64)
    for attention in (reference, fast):
        assert_same(decoded(attention, x, whole, chunks), expected[0].detach())
    padding = torch.tensor([0, data.draw(st.integers(0, tokens - 1))])
    padded = decoded(fast, x, padding, chunks)
    assert torch.isfinite(padded).all()
    for row, pad in enumerate(padding.tolist()):
        alone = fast(x[row : row + 1, pad:])
        assert_same(padded[row, pad:], alone[0].detach())
