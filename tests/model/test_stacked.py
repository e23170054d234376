"""Several models stacked as one have the losses and gradients that they have alone."""

import pytest
import torch
from building import CONTRACT, PROBES, SMALL, chosen, menu, settings
from torch import Tensor

from gptattn.model.gpt import GPT
from gptattn.model.stacked import StackedGPT
from gptattn.settings.build import build_model

SEEDS, ROWS, VOCABULARY = 3, 2, 17
VARIANTS = [name for name in CONTRACT if name not in PROBES]


def models(*overrides: str) -> list[GPT]:
    """A model of each seed, in float64."""
    built = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        built.append(build_model(settings(*overrides), VOCABULARY).double())
    return built


def batches(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (2, SEEDS, ROWS, tokens)
    ids, targets = torch.randint(VOCABULARY, shape, generator=generator)
    return ids, targets


def assert_as_alone(tokens: int, *overrides: str) -> None:
    ids, targets = batches(tokens)
    alone = models(*overrides)
    expected = torch.stack([m.loss(*one) for m, *one in zip(alone, ids, targets, strict=True)])
    expected.sum().backward()
    stacked = StackedGPT(models(*overrides))
    found = stacked.losses(ids, targets)
    found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    with torch.no_grad():  # where attention may take another path
        torch.testing.assert_close(stacked.losses(ids, targets), found, rtol=0, atol=1e-12)
    for n, model in enumerate(alone):
        for name, p in model.named_parameters():
            grad = stacked.parameters[name].grad
            assert p.grad is not None
            assert grad is not None
            torch.testing.assert_close(grad[n], p.grad, rtol=0, atol=1e-12, msg=name)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in m.parameters()]) for m in alone]
    torch.testing.assert_close(stacked.gradient_norms(), torch.stack(norms))


@pytest.mark.parametrize("variant", VARIANTS)
def test_seeds_stacked_as_one_model_have_the_gradients_that_they_have_alone(variant: str) -> None:
    assert_as_alone(11, *chosen(variant), *SMALL)


@pytest.mark.parametrize("position", menu("position"))
def test_stacked_models_take_every_position(position: str) -> None:
    size = SMALL if position != "rope" else (*SMALL[:2], "model.d_model=36", *SMALL[3:])
    assert_as_alone(7, "attn=gqa", f"position={position}", *size)


@pytest.mark.parametrize(
    "variant", ["sliding", "mha", "differential", "gated_deltanet", "gqa+sink"]
)
def test_stacked_models_take_texts_of_several_blocks(variant: str) -> None:
    assert_as_alone(131, *chosen(variant), *SMALL, "model.context_length=137")


def test_stacked_models_take_the_blocks_of_llama_and_a_head_of_its_own() -> None:
    assert_as_alone(11, "attn=gqa", *SMALL, "block=llama", "position=none")


def test_a_model_stays_a_view_of_its_part_of_the_stack() -> None:
    own = models("attn=mha", *SMALL)
    stacked = StackedGPT(own)
    with torch.no_grad():
        for p in stacked.parameters.values():
            p[1] *= 0.5
    ids, targets = batches(11)
    alone = torch.stack([m.loss(*one) for m, *one in zip(own, ids, targets, strict=True)])
    torch.testing.assert_close(alone, stacked.losses(ids, targets), rtol=0, atol=1e-12)


def test_gradients_are_scaled_per_model() -> None:
    stacked = StackedGPT(models("attn=mha", *SMALL))
    stacked.losses(*batches(11)).sum().backward()
    before = stacked.gradient_norms()
    factors = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    stacked.scale_gradients(factors)
    torch.testing.assert_close(stacked.gradient_norms(), before * factors)


def test_models_whose_buffers_differ_are_refused() -> None:
    own = models("attn=mha", *SMALL)
    for n, model in enumerate(own):
        model.register_buffer("noise", torch.tensor(float(n)))
    with pytest.raises(ValueError, match="the buffer noise depends on the seed"):
        StackedGPT(own)
