"""Loss through a cache: against the forward pass, a model with a window, and bytes by hand."""

import numpy as np
import pytest
import torch
from building import build_attention, build_gpt, menu, slow_but
from support import refuses

from gptattn.attention import TokenCache
from gptattn.data.sampler import ValidationSet
from gptattn.evaluate.caches import build_caches, check_kind, parse_cache_kind
from gptattn.evaluate.losses import compare_tokens, measure_by_cache
from gptattn.model.gpt import GPT

# Two windows of 11 and one of 6.
TOKENS = np.random.default_rng(0).integers(0, 13, size=29).astype(np.uint16)


def model_of(*overrides: str) -> GPT:
    """Two layers, six heads of eight numbers, a context of 11, in float64.

    In float32 an entry at a rounding edge of the packed cache may fall on either side.
    """
    return build_gpt("model.d_model=48", *overrides, std=0.3).double().eval()


@torch.no_grad()
def forward_loss(model: GPT) -> float:
    losses = [
        compare_tokens(model, model.hidden(ids), targets)[0].flatten()
        for ids, targets in ValidationSet(TOKENS, 2, model.context_length)
    ]
    return torch.cat(losses).mean().item()


@torch.no_grad()
def token_by_token(model: GPT, name: str) -> float:
    losses = []
    for ids, targets in ValidationSet(TOKENS, 1, model.context_length):
        caches = build_caches(model, parse_cache_kind(name), 1, ids.shape[1])
        hidden = [model.hidden(token, caches) for token in ids.split(1, dim=1)]
        losses.append(compare_tokens(model, torch.cat(hidden, dim=1), targets)[0].flatten())
    return torch.cat(losses).mean().item()


def test_a_full_cache_costs_nothing(variant):
    model = model_of(f"attn={variant}")
    found = measure_by_cache(model, TOKENS, parse_cache_kind("full"))
    assert found.loss == pytest.approx(forward_loss(model), abs=1e-5)
    assert found.loss == pytest.approx(token_by_token(model, "full"), abs=1e-5)
    assert found.nbytes == model.new_cache(1).nbytes


WITH_ENTRIES = [  # a token each; the others keep a state
    v for v in menu("attn") if type(build_attention(v).new_cache(1, 1)) is TokenCache
]


@pytest.mark.parametrize("variant", slow_but({"gqa", "mla", "dsa", "tpa"}, WITH_ENTRIES))
def test_a_packed_cache_is_what_a_decoder_of_single_tokens_reads(variant):
    model = model_of(f"attn={variant}")
    check_kind(model, parse_cache_kind("int4"), variant)
    found = measure_by_cache(model, TOKENS, parse_cache_kind("int4"))
    assert found.loss == pytest.approx(token_by_token(model, "int4"), abs=2e-5)
    assert found.nbytes < model.new_cache(1).nbytes
    assert found.loss != forward_loss(model)


@pytest.mark.parametrize(("attn", "position"), [("gqa", "alibi"), ("mla", "rope")])
def test_a_window_in_the_cache_equals_a_model_with_that_window(attn, position):
    model = model_of(f"attn={attn}", f"position={position}")
    other = model_of(f"attn={attn}", f"position={position}", "attn.window=4")
    other.load_state_dict(model.state_dict())
    found = measure_by_cache(model, TOKENS, parse_cache_kind("window:4"))
    assert found.loss == pytest.approx(forward_loss(other), abs=1e-5)
    assert found.loss != pytest.approx(forward_loss(model), abs=1e-4)
    assert found.nbytes == other.new_cache(1).nbytes


def test_sinks_take_places_of_the_window_and_enough_of_both_cost_little():
    model = model_of("attn=gqa", "position=rope")
    losses = {
        name: measure_by_cache(model, TOKENS, parse_cache_kind(name))
        for name in ("window:6", "sink2+window:4", "sink6+window:4")
    }
    assert losses["window:6"].nbytes == losses["sink2+window:4"].nbytes
    assert losses["window:6"].loss != losses["sink2+window:4"].loss
    # Ten of eleven places: only the last query of a window lacks a key.
    assert losses["sink6+window:4"].loss == pytest.approx(forward_loss(model), abs=0.05)


def test_bytes_by_hand():
    model = model_of("attn=gqa", "attn.num_kv_heads=2").float()
    numbers = 2 * 2 * 2 * 11  # layers, keys and values, heads, tokens
    expected = {
        "full": numbers * 8 * 4,
        "bf16": numbers * 8 * 2,
        "int8": numbers * (8 + 2),
        "int4": numbers * (4 + 2 + 2),
        "window:4": numbers // 11 * 4 * 8 * 4,
        "sink1+window:4": numbers // 11 * 5 * 8 * 4,
    }
    for name, nbytes in expected.items():
        assert measure_by_cache(model, TOKENS, parse_cache_kind(name)).nbytes == nbytes


def test_layers_keep_their_own_cache_where_a_kind_does_not_apply():
    model = model_of("pattern=[sliding,gqa]", "position=rope")  # a window of 3, and none
    kind = parse_cache_kind("sink1+window:5")
    check_kind(model, kind, "sliding,gqa")
    sliding, full = build_caches(model, kind, 1, 11).caches
    assert (sliding.capacity, full.capacity) == (3, 6)
    mixed = model_of("pattern=[gated_deltanet,gqa]")
    state, keys = build_caches(mixed, parse_cache_kind("int8"), 1, 11).caches
    assert set(state.tensors) == {"state", "tail"}
    assert set(keys.tensors) == {"k/codes", "k/scale", "v/codes", "v/scale"}


@pytest.mark.parametrize(
    ("attn", "name", "said"),
    [
        (["gated_deltanet"], "int8", "gated_deltanet"),
        (["gqa"], "window:11", "changes no cache"),
        (["gqa"], "sink4+window:7", "changes no cache"),
        (["sliding"], "sink1+window:1", "window of 3"),
        (["mha", "model.d_model=30"], "int4", "changes no cache"),  # five numbers a head
        *((["mha"], name, "full, bf16, int8") for name in ("int3", "window:0", "sink4", "full+")),
    ],
)
def test_a_kind_that_changes_nothing_or_is_unknown_is_refused(attn, name, said):
    with refuses(f"cache: {said}"):
        model = model_of(f"attn={attn[0]}", "position=none", *attn[1:])
        check_kind(model, parse_cache_kind(name), attn[0])
