"""The backend `fla`: what is passed to its kernels, and where it is refused.

The kernels run on a GPU only; fla_kernels.py stands in for them.
"""

import sys

import pytest
import torch
from building import build_attention, class_of, settings, takes
from contract import assert_agree, assert_same, draw
from fla_kernels import kernel
from support import refuses
from test_recurrence import B, D, H, V, chunked, drawn
from torch import Tensor

from gptattn.attention.recurrence import RecurrentAttention, by_fla, load_fla
from gptattn.position.base import Documents

T = 13
# The kernel, and whether it follows the delta rule and has a decay per channel.
KERNELS = pytest.mark.parametrize(
    ("delta", "channels"),
    [(False, False), (True, False), (True, True)],
    ids=["simple_gla", "gated_delta_rule", "kda"],
)


def run(
    inputs: list[Tensor],
    s: Tensor | None = None,
    start_BT: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = *inputs, *[None] * (5 - len(inputs))
    name = "simple_gla" if beta is None else "kda" if g.ndim == q.ndim else "gated_delta_rule"
    documents = None if start_BT is None else Documents(start_BT)
    return by_fla(load_fla(name), q, k, v, g, beta, s, documents, dtype)


@KERNELS
@pytest.mark.parametrize("begin", ["empty", "continued", "documents"])
def test_the_kernels_get_what_makes_them_the_chunks(delta, channels, begin, fla):
    inputs, s = drawn(T, delta, channels), draw(B, H, D, V) if begin == "continued" else None
    of = [x.requires_grad_() for x in (*inputs, s) if x is not None]
    starts = torch.tensor([[0] * 4 + [4] * 8 + [12], [0] * T]) if begin == "documents" else None
    got, expected = run(inputs, s, starts), chunked(inputs, s, 4, starts)
    kept = 1 if begin == "documents" else 2  # the states of documents are not used
    assert_agree(got[:kept], expected[:kept], of)


def test_heads_that_share_keys_and_a_decay_of_all_rows_are_spread(fla):
    q, k, v, g = drawn(T, delta=False, channels=False)
    inputs, s = [q[:, :2], k[:, :2], v, g[:1]], draw(B, H, D, V)
    assert_same(run(inputs, s), chunked(inputs, s, 4))


def test_only_queries_keys_and_values_are_rounded_to_the_projections_dtype(fla):
    seen = {}

    def seeing(**given):
        seen.update({name: x.dtype for name, x in given.items() if isinstance(x, Tensor)})
        return kernel("kda", **given)

    sys.modules["fla.ops.kda"].chunk_kda = seeing
    inputs = [x.float() for x in drawn(T, delta=True, channels=True)]
    y, _ = run(inputs, torch.zeros(B, H, D, V), None, torch.bfloat16)
    half, single = torch.bfloat16, torch.float32
    assert seen == {"q": half, "k": half, "v": half, "g": single, "beta": single} | {
        "initial_state": single
    }
    assert y.dtype == single


def test_it_is_refused_without_a_gpu_or_the_package_or_a_state(variant, monkeypatch):
    if not takes(variant, "backend"):
        pytest.skip("has one form only")
    own = class_of("attn", variant)
    if not issubclass(own, RecurrentAttention) or own.removes:
        with refuses(f"attn.backend: {own.plain_backend}"):
            build_attention(variant, backend="fla")
        return
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refuses("attn.backend: CUDA"):
        build_attention(variant, backend="fla")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "fla", None)
    with refuses("attn.backend: 'gptattn[fla]'"):
        build_attention(variant, backend="fla")


@pytest.mark.parametrize("variant", ["gated_deltanet", "kda", "lightning", "mamba2"])
def test_on_a_cpu_as_in_the_checks_before_a_run_it_is_the_chunks(variant, monkeypatch, fla):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    attention, plain = build_attention(variant, backend="fla"), build_attention(variant)
    plain.load_state_dict(attention.state_dict())
    x = torch.randn(B, 11, 30)
    assert_same(attention(x), plain(x), atol=0)
    assert attention.flops(200, 200) == build_attention(variant, chunk=64).flops(200, 200)


@pytest.mark.parametrize(
    ("backend", "linear", "full"), [("fla", "fla", "auto"), ("reference", "auto", "reference")]
)
def test_in_a_pattern_a_backend_reaches_the_layers_that_have_it(backend, linear, full):
    layers = settings("recipe=qwen3_next", f"attn.backend={backend}").layers
    assert layers["linear"]["attn"]["backend"] == linear
    assert layers["full"]["attn"]["backend"] == full
