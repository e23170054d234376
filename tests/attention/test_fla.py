"""The backend `fla`: what is passed to its kernels, and where it is refused.

The kernels run on a GPU only. A stand-in takes arguments by their names in fla-core 0.6.0, and
computes what its documentation says, token by token in float64.
"""

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from building import build_attention, class_of, settings
from contract import assert_agree, assert_same, draw
from support import refuses
from test_recurrence import B, D, H, V, chunked, drawn
from torch import Tensor, einsum

from gptattn.attention.recurrence import RecurrentAttention, by_fla

T = 13
# The kernel, and whether it follows the delta rule and has a decay per channel.
KERNELS = pytest.mark.parametrize(
    ("delta", "channels"),
    [(False, False), (True, False), (True, True)],
    ids=["simple_gla", "gated_delta_rule", "kda"],
)


def kernel(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each row is a sequence or, with `cu_seqlens`, its pieces from one of them to the next.

    q, k [B, T, H, K], v [B, T, H, V], g [B, T, H] in logarithms, with kda [B, T, H, K]; beta
    [B, T, H] in (0, 1), without it decayed linear attention; states [N, H, K, V].
    """
    assert q.shape[2] == v.shape[2]
    assert g.shape == (k.shape if name == "kda" else k.shape[:3])
    assert (beta is None) == (name == "simple_gla")
    assert output_final_state
    q, k, v, g = (x.double() for x in (q, k, v, g))
    cuts = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    assert cu_seqlens is None or len(q) == 1
    outputs, states = [], []
    for begin, end in pairwise(cuts):
        s = q.new_zeros(len(q), q.shape[2], q.shape[3], v.shape[3])
        s = s if initial_state is None else initial_state
        for t in range(begin, end):
            decay = g[:, t].exp()
            s = s * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
            write = v[:, t]
            if beta is not None:
                write = beta[:, t, :, None] * (write - einsum("bhk,bhkv->bhv", k[:, t], s))
            s = s + einsum("bhk,bhv->bhkv", k[:, t], write)
            outputs.append(einsum("bhk,bhkv->bhv", scale * q[:, t], s))
        states.append(s)
    return torch.stack(outputs, 1), torch.cat(states)


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of this name, with the stand-ins where the kernels are."""
    found = {"fla": {}, "fla.ops": {}} | {
        f"fla.ops.{name}": {f"chunk_{name}": partial(kernel, name)}
        for name in ("simple_gla", "gated_delta_rule", "kda")
    }
    for name, members in found.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)


def run(
    inputs: list[Tensor],
    s: Tensor | None = None,
    start_BT: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    beta = inputs[4] if len(inputs) == 5 else None
    return by_fla(*inputs[:4], beta, s, start_BT, dtype)


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


def test_only_queries_keys_and_values_are_rounded_to_the_type_of_the_projections(fla):
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
    if not issubclass(class_of("attn", variant), RecurrentAttention):
        with refuses("attn.backend: sdpa"):
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
