"""The whole model: its initialisation, its head, and what it costs.

tests/weights compares it with GPT-2 and Llama of transformers.
"""

import pytest
import torch
from building import build_gpt, settings
from torch import Tensor, nn

from gptattn.build.model import build_model
from gptattn.model.cost import measure_cost
from gptattn.model.gpt import SquaredReLU


def test_gpt2_small_has_the_published_number_of_parameters():
    cfg = settings("model=gpt2_small", "model.vocab_size=50257")
    with torch.device("meta"):
        model = build_model(cfg, vocab_size=256)
    assert measure_cost(model).params == 124_439_808


def test_weights_start_as_gpt2s(variant):
    model = build_gpt(f"attn={variant}", "model.num_layers=3", "model.d_model=60")
    writers = [block.mlp.down for block in model.layers()]
    writers += [block.attention.residual_writer() for block in model.layers()]
    drawn: dict[float, list[Tensor]] = {0.02: [], 0.02 * 6**-0.5: []}
    attentions = [block.attention for block in model.layers()]
    # Those with an `initialise` of their own are drawn as their papers say.
    own = [a for a in attentions if "initialise" in vars(type(a))]
    other = {layer for attention in own for layer in attention.modules()} - {*writers}
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and module not in other:
            writes = any(module is writer for writer in writers)
            drawn[0.02 * 6**-0.5 if writes else 0.02].append(module.weight.flatten())
        if isinstance(module, nn.LayerNorm):
            assert torch.equal(module.weight, torch.ones_like(module.weight))
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
            assert module.bias.count_nonzero() == 0
    for std, weights in drawn.items():
        joined = torch.cat(weights)
        # Over 40,000 draws: 5% is ten standard errors.
        assert joined.std().item() == pytest.approx(std, rel=0.05)
        assert abs(joined.mean().item()) < 0.05 * std


SMALLEST = (
    "model.num_layers=1",
    "model.num_heads=2",
    "model.d_model=4",
    "model.context_length=3",
    "model.d_mlp=5",
)


@pytest.mark.parametrize(
    ("overrides", "forward_flops"),
    [
        # Weights: q, k, v, out 4 * 4 * 4, MLP 2 * 4 * 5, head 7 * 4, together 132, times 2. Mix:
        # 1 + 2 + 3 pairs, 2 heads of 2, a product for scores and one for values: 6 * 4 * 4 / 3.
        (["attn=mha"], 264 + 32),
        # One head of keys and values instead of two: 2 * 4 * 2 weights fewer, the same mix.
        (["attn=mqa"], 264 - 32 + 32),
        # No output projection: 4 * 4 weights fewer. One head of 4 mixes as much as two of 2.
        (["attn=single_head"], 264 - 32 + 32),
        # A second layer costs the same again, without the head's 28 weights.
        (["attn=mha", "model.num_layers=2"], 264 + 32 + 264 - 56 + 32),
        (["pattern=[mha,mqa]", "model.num_layers=2"], 264 + 32 + 264 - 56 - 32 + 32),
        # SwiGLU has a third matrix of 4 * 5; without an MLP, two of them go.
        (["attn=mha", "model.mlp=swiglu"], 264 + 40 + 32),
        (["attn=mha", "model.mlp=none"], 264 - 80 + 32),
    ],
    ids=str,
)
def test_flops_per_token_match_a_count_by_hand(overrides, forward_flops):
    model = build_gpt(*SMALLEST, *overrides, vocab_size=7)
    # Backward costs twice the forward.
    assert measure_cost(model).flops_per_token == 3 * forward_flops


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_counted_once_and_gives_the_logits(tied):
    overrides = ("position=none", f"block.tied_head={str(tied).lower()}")
    model = build_gpt(*SMALLEST, *overrides, vocab_size=7).eval()
    cost = measure_cost(model)
    # As above: the embedding is no product, and either head has as many weights.
    assert cost.flops_per_token == 3 * (264 + 32)
    assert cost.params == sum(p.numel() for p in model.parameters())
    assert cost.params_embedding == 7 * 4
    weights = [p for p in model.parameters() if p.shape == (7, 4)]
    assert len(weights) == 2 - tied
    ids = torch.randint(7, (2, 3))
    with torch.no_grad():
        expected = model.hidden(ids) @ weights[-1].T
        torch.testing.assert_close(model(ids), expected)
        model.prepare(2)
        torch.testing.assert_close(model.next_logits(ids), expected[:, -1])


def test_with_zero_init_the_layers_add_nothing_at_first(variant):
    model = build_gpt(f"attn={variant}", "block.zero_init=true", "model.num_layers=3")
    if any(block.attention.residual_writer() is None for block in model.layers()):
        pytest.skip("has no output projection")
    ids = torch.randint(13, (2, 7))
    with torch.no_grad():
        x = model.token_embedding(ids)
        torch.testing.assert_close(model.hidden(ids), model.norm(model.input_position(x, range(7))))


@pytest.mark.parametrize("shared", ["false", "true"])
def test_embedding_std_scales_the_embeddings_and_nothing_else(shared):
    given = ["position=learned", "block.tied_head=false", f"shared_init={shared}"]
    torch.manual_seed(1)
    usual = build_gpt(*given).state_dict()
    torch.manual_seed(1)
    wide = build_gpt(*given, "block.embedding_std=0.5").state_dict()
    for name, weight in usual.items():
        scale = 25 if "embedding" in name else 1
        torch.testing.assert_close(wide[name], scale * weight, rtol=1e-6, atol=0)
    assert sum("embedding" in name for name in usual) == 2


def test_relu2_squares_what_passes_the_relu():
    mlp = SquaredReLU(2, 3, bias=False)
    with torch.no_grad():
        mlp.up.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        mlp.down.weight.copy_(torch.tensor([[1.0, 10.0, 100.0], [0.0, 0.0, 1.0]]))
        # Hidden 2, -3 and -1; only the first passes.
        assert mlp(torch.tensor([2.0, -3.0])).tolist() == [4.0, 0.0]
        # Hidden 1, 2 and 3: 1 + 40 + 900, and 9.
        assert mlp(torch.tensor([1.0, 2.0])).tolist() == [941.0, 9.0]
