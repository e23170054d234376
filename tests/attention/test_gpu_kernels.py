"""Which kernels a GPU may choose from; the values are the same on a CPU, where this runs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptattn.attention import Rule, attend
from gptattn.attention.gpu_kernels import gpu_attention

SEEN: list[tuple[bool, bool, int]] = []  # of each call: cuDNN allowed, enable_gqa, key heads
PLAIN = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _spied(monkeypatch: pytest.MonkeyPatch) -> None:
    def spy(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        SEEN.append((torch.backends.cuda.cudnn_sdp_enabled(), options["enable_gqa"], k.shape[1]))
        return PLAIN(q, k, v, **options)

    SEEN.clear()
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)


def draw(G: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = ((6, 7), (G, 7), (G, 7))
    return [torch.randn(2, *size, 5, generator=generator).to(dtype) for size in sizes]


def test_only_plain_causal_training_may_use_cudnn() -> None:
    q, k, v = draw(6)
    allowed = torch.ones(7, 7, dtype=torch.bool)
    gpu_attention(q, k, v, 0.3, causal=True)
    gpu_attention(q, k, v, 0.3, 0.2, causal=True)
    gpu_attention(q, k, v, 0.3, mask=allowed)
    gpu_attention(q[:, :, -1:], k, v, 0.3)
    with torch.no_grad():
        gpu_attention(q, k, v, 0.3, causal=True)
    torch.use_deterministic_algorithms(True)
    try:
        gpu_attention(q, k, v, 0.3, causal=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [cudnn for cudnn, *_ in SEEN] == [True, False, False, False, False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("dtype", "mixed", "expected"),
    [
        (torch.float32, False, (False, 6)),
        (torch.float32, True, (True, 2)),  # autocast makes them half precision
        (torch.bfloat16, False, (True, 2)),
    ],
)
def test_float32_keys_are_expanded_and_others_are_not(
    dtype: torch.dtype, mixed: bool, expected: tuple[bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: mixed)
    gpu_attention(*draw(2, dtype), 0.3, causal=True)
    assert [tuple(rest) for _, *rest in SEEN] == [expected]


@pytest.mark.parametrize("G", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_and_gradients_are_those_of_the_definition(G: int, dtype: torch.dtype) -> None:
    inputs = [x.requires_grad_() for x in draw(G, dtype)]
    y = gpu_attention(*inputs, 0.3, causal=True)
    expected = attend(*inputs, Rule(0.3), backend="reference")
    upstream = torch.linspace(-1, 1, y.numel(), dtype=dtype).view(y.shape)
    for got, right in zip(
        (y, *torch.autograd.grad(y, inputs, upstream)),
        (expected, *torch.autograd.grad(expected, inputs, upstream)),
        strict=True,
    ):
        torch.testing.assert_close(got, right)


def test_attention_on_another_device_than_the_cpu_goes_this_way() -> None:
    q, k, v = (x.to("meta") for x in draw(2))
    assert attend(q, k, v, Rule(0.3)).shape == (2, 6, 7, 5)
    late = attend(q[:, :, -1:], k, v, Rule(0.3), q_pos=range(6, 7), k_pos=range(7))
    assert late.shape == (2, 6, 1, 5)
    attend(q, k, v, Rule(0.3, window=3), dropout=0.1)
    # Decoding folds the query heads of a group into the queries of one key head.
    assert SEEN == [(True, False, 6), (False, False, 2), (False, False, 2)]


def test_the_choice_of_kernels_compiles_into_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", PLAIN)
    q, k, v = draw(2)
    compiled = torch.compile(gpu_attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(q, k, v, 0.3, causal=True), gpu_attention(q, k, v, 0.3, causal=True)
    )
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(q, k, v, 0.3, causal=True), gpu_attention(q, k, v, 0.3, causal=True)
        )
