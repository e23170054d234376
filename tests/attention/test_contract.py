"""What every attention must do, alone and in a model with every position.

Tested on every file in `conf/attn`, `conf/part` and `conf/position`; a capability on the mechanisms
that have it.
"""

from itertools import chain

import pytest
import torch
from building import (
    CONTRACT,
    Allocations,
    build_attention,
    build_gpt,
    chosen,
    menu,
    takes,
    through_cache,
)
from contract import (
    PLACED,
    B,
    E,
    T,
    all_keys,
    assert_same,
    decode,
    draw,
    outputs_and_gradients,
    overrides_of,
    receptive_field,
    with_maps,
)

from gptattn.attention import HasHeads, Shared
from gptattn.attention.softmax import SoftmaxAttention
from gptattn.decode.generate import pad_left
from gptattn.model.cost import measure_cost
from gptattn.weights.convert import names_in_heads


@pytest.fixture(params=CONTRACT)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


def test_an_output_depends_on_its_token_and_the_past_but_not_the_future(variant):
    attention = build_attention(variant, **all_keys(variant)).double()
    x = draw(1, T, E).requires_grad_()
    y = attention(x) @ draw(E)
    rows = [torch.autograd.grad(y[0, t], x, retain_graph=True)[0][0] for t in range(T)]
    assert torch.equal(torch.stack(rows).norm(dim=-1) != 0, receptive_field(attention))


@pytest.mark.parametrize("length", [1, T])
def test_sdpa_matches_the_reference_in_outputs_and_gradients(variant, length):
    reference, sdpa = (build_attention(variant, backend=b).double() for b in ("reference", "sdpa"))
    sdpa.load_state_dict(reference.state_dict())
    x, upstream = draw(B, length, E).requires_grad_(), draw(B, length, E)
    expected = outputs_and_gradients(reference, x, upstream)
    assert_same(outputs_and_gradients(sdpa, x, upstream), expected)


def test_dropout_acts_in_training_only(variant):
    if not takes(variant, "dropout"):
        pytest.skip("has no dropout")
    plain, dropping = (build_attention(variant, dropout=p).double() for p in (0.0, 0.4))
    dropping.load_state_dict(plain.state_dict())
    x = draw(B, T, E)
    assert not torch.allclose(dropping(x), dropping(x))
    assert_same(dropping.eval()(x), plain(x))


def test_dropout_acts_on_weights_alone(variant):
    attention = build_attention(variant, dropout=0.4).double()
    if not isinstance(attention, HasHeads):
        pytest.skip("its output need not be linear in the weights")
    maps, writer = with_maps(attention), attention.residual_writer()
    if writer is not None:
        torch.nn.init.eye_(writer.weight)
        torch.nn.init.zeros_(writer.bias)
    # One token has one weight per head. Dropout zeroes the whole head or scales it by
    # 1 / (1 - 0.4), if nothing else (queries, keys or values) is dropped.
    x = draw(61, 1, E)
    heads = maps.attention_weights(x).shape[1]
    trained = attention(x).unflatten(-1, (heads, -1))
    whole = attention.eval()(x).unflatten(-1, (heads, -1))
    kept = (trained != 0).any(-1, keepdim=True)
    assert_same(trained, torch.where(kept, whole / 0.6, 0.0))
    assert 0 < kept.sum() < kept.numel()


@pytest.mark.parametrize("mechanism", menu("attn"))
def test_training_under_autocast_is_near(mechanism):
    attention, x = build_attention(mechanism), torch.randn(B, T, E)
    exact = attention(x)
    shared = Shared(range(T), losses={})
    with torch.autocast("cpu", torch.bfloat16):
        y = attention(x, None, shared)
    (y.sum() + sum(chain(*shared.losses.values()))).backward()
    assert_same(y.float(), exact, atol=0.04 * exact.abs().max().item())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attention.parameters())


def test_it_decodes_in_half_precision(variant):
    attention, x = build_attention(variant), torch.randn(B, T, E)
    with torch.no_grad():
        exact = attention(x)
    y = decode(attention.bfloat16(), x.bfloat16(), [5, 1, 3, 2])
    assert y.dtype == torch.bfloat16
    assert_same(y.float(), exact, atol=0.05 * exact.abs().max().item())


def test_attention_weights_are_causal_sum_to_one_and_give_the_output(variant):
    attention = build_attention(variant, dropout=0.4, **all_keys(variant)).double().eval()
    x = draw(B, T, E)
    w_BHTS = with_maps(attention).attention_weights(x)
    assert torch.equal((w_BHTS != 0).any(1).any(0), receptive_field(attention))
    every = {*attention.state_dict()}
    # These change values or outputs, without parameters.
    alone = not any(one in variant for one in ("+xsa", "+value_scale"))
    alone = alone and isinstance(attention, HasHeads)
    if not alone or names_in_heads(attention) < every:
        return  # parts and other parameters may change weights and output in any way
    assert_same(w_BHTS.sum(-1), torch.ones(w_BHTS.shape[:-1], dtype=x.dtype))
    heads = attention.export_heads()
    v_BGSD = torch.einsum("bse,gde->bgsd", x, heads.v_GDE) + heads.v_bias_GD[:, None]
    v_BHSD = v_BGSD.repeat_interleave(w_BHTS.shape[1] // v_BGSD.shape[1], dim=1)
    y_BTHD = (w_BHTS @ v_BHSD).transpose(1, 2)
    y = y_BTHD.flatten(2)
    if heads.out_EHD is not None:
        y = torch.einsum("bthd,ehd->bte", y_BTHD, heads.out_EHD) + heads.out_bias_E
    assert_same(attention(x), y)


def test_flops_grow_with_tokens_and_one_forms_decoding_sums_to_reading(variant):
    attention = build_attention(variant)
    full = [attention.flops(t, t) for t in range(1, T + 1)]
    steps = [attention.flops(1, s) for s in range(1, T + 1)]
    assert full[0] > 0
    assert full == sorted(set(full))
    assert steps[1:] == sorted(steps[1:])
    if type(attention).flops is not SoftmaxAttention.flops:
        return  # it may decode in another form than it trains in; its own tests count
    assert sum(steps) == full[-1]
    assert attention.flops(5, 5) + attention.flops(6, 11) == full[-1]


def test_training_makes_no_t_by_t_matrix_and_decoding_copies_no_cache(variant):
    length, width = 1024, 2 * E  # positions of the keys are no longer small beside narrow heads
    sizes = {"context_length": length, "d_in": width, "d_out": width}
    attention = build_attention(variant, **sizes, backend="sdpa")
    x = torch.randn(1, length, width, requires_grad=True)
    with Allocations() as training:
        attention(x).sum().backward()
    assert max(training.elements) < length * length
    cache = attention.new_cache(1, length)
    with torch.no_grad():
        attention(x[:, :-1], cache)
        cache.advance(length - 1)
        with Allocations() as decoding:
            attention(x[:, -1:], cache)
    if cache.nbytes > attention.new_cache(1, 1).nbytes * length / 2:  # it grows with the tokens
        assert max(decoding.elements) * x.itemsize < cache.nbytes / 2
        if variant in menu("attn"):
            assert decoding.bytes < cache.nbytes


@PLACED
@torch.no_grad()
def test_prompts_of_different_lengths_decode_in_a_batch_as_they_do_alone(variant, position):
    model = build_gpt(*overrides_of(variant, position), std=0.3).double().eval()
    prompts = [torch.randint(13, (length,)) for length in (8, 1, 5)]
    ids, padding = pad_left(prompts)
    assert padding.tolist() == [0, 7, 3]
    more = torch.randint(13, (3, 3))  # to the context's edge
    cache = model.new_cache(len(ids), padding_B=padding)
    y = through_cache(model, torch.cat([ids, more], dim=1), cache, [2, 5, 1, 1, 2])
    assert torch.isfinite(y).all()
    with pytest.raises(ValueError, match="context_length=11"):
        model(ids[:, :1], cache)
    for row, (prompt, pad) in enumerate(zip(prompts, padding, strict=True)):
        assert_same(y[row, pad:], model(torch.cat([prompt, more[row]])[None])[0])


def test_a_model_prepared_for_decoding_gives_the_same_logits(variant, monkeypatch):
    monkeypatch.setattr("gptattn.attention.linear.MIN_BYTES", 0)
    model = build_gpt(*chosen(variant), std=0.3).eval()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for rows in (1, 3):
        ids = torch.randint(13, (rows, T))
        with torch.no_grad():
            expected = model(ids)[:, -1]
            model.prepare(rows)
            cache = model.new_cache(rows)
            model.hidden(ids[:, :8], cache)
            for t in range(8, T):
                logits = model.next_logits(ids[:, t : t + 1], cache)
        assert_same(logits, expected, atol=1e-5)
        # A training step in between works too: with gradients the prepared layers are not used.
        losses: dict[str, list[torch.Tensor]] = {}
        loss = model.train().loss(ids, ids, losses=losses)
        (loss + sum(chain(*losses.values()))).backward()
        model.eval()
        assert all(p.grad is not None for p in model.parameters())
        model.prepare(None)
    assert_same(model.state_dict(), before, atol=0)


def test_cost_reports_allocated_cache_bytes_and_checkpointed_parameters(variant):
    dtype = torch.bfloat16
    model = build_gpt(*chosen(variant)).to(dtype)
    with torch.device("meta"):
        reported = measure_cost(build_gpt(*chosen(variant)).to(dtype))
    assert reported == measure_cost(model)
    with Allocations() as made:
        cache = model.new_cache(batch=1)
    assert made.bytes == cache.nbytes > 0
    assert reported.kv_bytes_per_token == made.bytes / T
    assert model.new_cache(batch=3).nbytes == 3 * made.bytes
    held = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    assert reported.params == sum(held.values())
    assert reported.params_attention == sum(n for name, n in held.items() if ".attention." in name)
    # Vocabulary 13 and context 11.
    assert reported.params_embedding == (13 + 11) * 30
