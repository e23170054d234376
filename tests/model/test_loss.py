"""The chunked loss against torch's own cross-entropy of the whole matrix of logits."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from building import Allocations
from contract import assert_agree
from torch import Tensor

from gptattn.model.loss import (
    IGNORED,
    drop_ignored,
    find_hits,
    linear_cross_entropy,
    logits_to_gradient,
)

N, D, V = 23, 7, 13
# None: as on a CPU; else as on a GPU.
FORMS = pytest.mark.parametrize("to_gradient", [None, logits_to_gradient], ids=["cpu", "gpu"])


def draw(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(N, D, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(V, (N,))


@FORMS
@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 23, 1000, None])
def test_value_and_gradients_match_torchs_cross_entropy(chunk_tokens, factor, to_gradient):
    hidden, weight, targets = draw()
    ours = factor * linear_cross_entropy(hidden, weight, targets, chunk_tokens, to_gradient)
    theirs = factor * F.cross_entropy(F.linear(hidden, weight), targets)
    assert_agree(ours, theirs, (hidden, weight), atol=1e-13)


def test_under_bfloat16_autocast_loss_and_gradients_stay_close_to_float32():
    hidden, weight, targets = draw(torch.float32)
    exact = linear_cross_entropy(hidden, weight, targets, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = linear_cross_entropy(hidden, weight, targets, 5)
    assert mixed.dtype == torch.float32
    assert not torch.equal(mixed, exact)
    # bfloat16 keeps 8 bits: logits of up to 10 are off by up to 0.02.
    torch.testing.assert_close(mixed, exact, rtol=0, atol=0.02)
    gradients = torch.autograd.grad(mixed, (hidden, weight))
    expected = torch.autograd.grad(exact, (hidden, weight))
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert (gradient - wanted).norm() < 0.02 * wanted.norm()


def scaled_gradients(loss: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return gradients as with a GradScaler: a large factor before backward, removed afterwards."""
    return [g / 2**16 for g in torch.autograd.grad(loss * 2**16, inputs)]


def test_under_float16_autocast_small_gradients_do_not_vanish():
    tokens, vocab_size = 1024, 4001
    hidden = torch.randn(tokens, D).requires_grad_()
    weight = (0.02 * torch.randn(vocab_size, D)).requires_grad_()
    targets = torch.randint(vocab_size, (tokens,))
    plain = F.cross_entropy(F.linear(hidden, weight), targets)
    expected = scaled_gradients(plain, (hidden, weight))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = linear_cross_entropy(hidden, weight, targets, 128)
    for gradient, wanted in zip(scaled_gradients(loss, (hidden, weight)), expected, strict=True):
        # Plain cross-entropy under the same autocast is off by 0.0004.
        assert (gradient - wanted).norm() < 0.002 * wanted.norm()


PRECISIONS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("chunk_tokens", [300, 128, 7])
@pytest.mark.parametrize("vocab_size", [64, 509, 1000])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_a_gpus_loss_and_gradients_are_as_close_to_float64_as_a_cpus(
    dtype, vocab_size, chunk_tokens
):
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    hidden = (3 * torch.randn(300, 32)).to(dtype).to(exact).requires_grad_()
    weight = (torch.randn(vocab_size, 32) / 8).to(dtype).to(exact).requires_grad_()
    targets = torch.randint(vocab_size, (300,))
    targets[:100] = (hidden[:100] @ weight.T).argmax(-1)  # sure and right
    wide = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(F.linear(*wide), targets)
    wanted = [loss, *torch.autograd.grad(loss, wide)]

    def errors(to_gradient: Callable[[Tensor, Tensor], Tensor] | None) -> list[float]:
        with torch.autocast("cpu", dtype, enabled=dtype.itemsize == 2):
            loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens, to_gradient)
        gradients = scaled_gradients(loss, (hidden, weight))
        pairs = zip([loss, *gradients], wanted, strict=True)
        return [((found - right).norm() / right.norm()).item() for found, right in pairs]

    for cpu, gpu in zip(errors(None), errors(logits_to_gradient), strict=True):
        assert gpu <= 1.05 * cpu + 4 * torch.finfo(exact).eps


@pytest.mark.slow  # the compiler takes 10 seconds
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by torch's compiler
def test_the_compiled_form_of_a_gpu_is_the_eager_one():
    compiled = torch.compile(logits_to_gradient, fullgraph=True)
    for vocab_size, chunk_tokens in ((509, 300), (509, 128), (64, 128)):
        hidden = torch.randn(300, 32).requires_grad_()
        weight = torch.randn(vocab_size, 32).requires_grad_()
        targets = torch.randint(vocab_size, (300,))
        found = []
        for to_gradient in (logits_to_gradient, compiled):
            with torch.autocast("cpu", torch.bfloat16):
                loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens, to_gradient)
            found.append([loss, *torch.autograd.grad(loss, (hidden, weight))])
        for eager, other in zip(*found, strict=True):
            assert (eager - other).norm() < 1e-4 * eager.norm()


@FORMS
@pytest.mark.parametrize("chunks", [1, 64])
def test_in_bfloat16_the_heads_gradient_is_as_good_in_chunks_as_in_one(chunks, to_gradient):
    tokens, vocab_size = 1024, 257
    hidden, weight = torch.randn(tokens, 64).bfloat16(), (0.02 * torch.randn(257, 64)).bfloat16()
    targets = torch.randint(vocab_size, (tokens,))
    exact = weight.double().requires_grad_()
    F.cross_entropy(F.linear(hidden.double(), exact), targets).backward()
    weight.requires_grad_()
    linear_cross_entropy(hidden, weight, targets, tokens // chunks, to_gradient).backward()
    assert weight.grad.dtype == torch.bfloat16
    # torch's own, all at once, is off by 0.0018; a sum in bfloat16 over 64 chunks by 0.0097.
    assert (weight.grad.double() - exact.grad).norm() < 0.003 * exact.grad.norm()


def test_a_gradient_is_allocated_once_and_without_gradients_not_at_all():
    hidden, weight = torch.randn(24, 64).requires_grad_(), torch.randn(257, 64).requires_grad_()
    targets = torch.randint(257, (24,))
    with Allocations() as made:
        loss = linear_cross_entropy(hidden, weight, targets, 2)
        loss.backward()
    assert made.elements.count(weight.numel()) == 1
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), Allocations() as made:
            torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets, 2), loss)
        assert weight.numel() not in made.elements


@FORMS
def test_the_loss_of_scored_positions_is_torchs_with_an_ignored_index(to_gradient):
    hidden, weight, targets = draw()
    targets[::3] = IGNORED
    found, kept = drop_ignored(hidden, targets, 15)
    ours = linear_cross_entropy(found, weight, kept, 5, to_gradient)
    theirs = F.cross_entropy(F.linear(hidden, weight), targets, ignore_index=IGNORED)
    assert_agree(ours, theirs, (hidden, weight), atol=1e-13)


@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_hits_are_the_targets_with_the_largest_logit(chunk_tokens):
    hidden, weight, targets = draw()
    best = F.linear(hidden, weight).argmax(-1)
    targets[:7] = best[:7]
    expected = (best == targets).sum()
    assert find_hits(hidden, weight, targets, chunk_tokens).sum() == expected >= 7
