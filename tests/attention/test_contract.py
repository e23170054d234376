"""What every attention must do, tested on every file in `conf/attn` and on the probes.

A capability is tested on the mechanisms that have it. No mechanism is named here.
"""

import io
import os
from pathlib import Path

import pytest
import torch
from building import PROBES, Allocations, build_attention, build_gpt, menu, takes, through_cache
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gptattn.attention import Attention, HasHeads, HasMaps
from gptattn.attention.split import SplitAttention
from gptattn.decode.generate import left_padded
from gptattn.model.cost import measure_cost

B, T, E = 2, 11, 30  # the context is filled
CHUNKS = pytest.mark.parametrize(
    "chunks", [[1] * 11, [5, 1, 3, 2], [11]], ids=["by_token", "uneven", "at_once"]
)
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(params=[*menu("attn"), *PROBES])
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


def with_maps(attention: Attention) -> HasMaps:
    """Return the attention as `HasMaps`; skip the test if it has no attention weights."""
    if not isinstance(attention, HasMaps):
        pytest.skip("has no attention maps")
    return attention


def overrides_of(variant: str, position: str, backend: str | None = None) -> list[str]:
    """Return the overrides for a model of this variant; skip if it cannot have this position."""
    if position == "rope" and not takes(variant, "position"):
        pytest.skip("takes no position")
    backends = [f"attn.backend={backend}"] if backend and takes(variant, "backend") else []
    # Heads of 6: rotary positions need an even size.
    return [f"attn={variant}", f"position={position}", "model.d_model=36", *backends]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def assert_same(actual: object, expected: object, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def receptive_field(attention: Attention) -> Tensor:
    """[T, T], True where output t may depend on input u: a window W is W tokens, its own too."""
    window = (attention.rule().window if isinstance(attention, SplitAttention) else None) or T
    return torch.ones(T, T, dtype=torch.bool).tril().triu(1 - window)


@pytest.mark.parametrize("length", [1, 7, T])
def test_the_output_has_the_shape_of_the_input(variant, length):
    assert build_attention(variant)(torch.randn(B, length, E)).shape == (B, length, E)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_an_output_depends_on_its_own_token_and_the_past_and_on_no_future_token(variant, backend):
    attention = build_attention(variant, backend=backend).double()
    x = draw(1, T, E).requires_grad_()
    y = attention(x) @ draw(E)
    rows = [torch.autograd.grad(y[0, t], x, retain_graph=True)[0][0] for t in range(T)]
    assert torch.equal(torch.stack(rows).norm(dim=-1) != 0, receptive_field(attention))


@pytest.mark.parametrize("length", [1, 7, T])
def test_sdpa_matches_the_reference_in_outputs_and_gradients(variant, length):
    reference = build_attention(variant, backend="reference").double()
    sdpa = build_attention(variant, backend="sdpa").double()
    sdpa.load_state_dict(reference.state_dict())
    x, upstream = draw(B, length, E).requires_grad_(), draw(B, length, E)
    results = []
    for attention in (reference, sdpa):
        y = attention(x)
        results.append((y, *torch.autograd.grad(y, (x, *attention.parameters()), upstream)))
    assert_same(results[1], results[0])


@torch.no_grad()
def decode(attention: Attention, x: Tensor, chunks: list[int]) -> Tensor:
    cache = attention.new_cache(len(x), T)

    def step(part: Tensor, cache) -> Tensor:
        y = attention(part, cache)
        cache.advance(part.shape[1])
        return y

    y = through_cache(step, x, cache, chunks)
    assert cache.length == T
    with pytest.raises(ValueError, match="context_length=11"):
        attention(x[:, :1], cache)
    return y


@CHUNKS
@PRECISIONS
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_decoding_through_the_cache_matches_the_full_forward(variant, backend, dtype, atol, chunks):
    attention = build_attention(variant, backend=backend).to(dtype)
    x = draw(B, T, E, dtype=dtype)
    assert_same(decode(attention, x, chunks), attention(x), atol)


def test_one_cache_does_not_know_of_another(variant):
    attention = build_attention(variant).double()
    x, other = draw(B, T, E), draw(B, T, E)
    decode(attention, other, [T])
    assert_same(decode(attention, x, [4, 7]), attention(x))


@CHUNKS
def test_a_whole_model_decodes_as_it_reads_with_every_position_encoding(variant, position, chunks):
    model = build_gpt(*overrides_of(variant, position), std=0.3).double().eval()
    ids = torch.randint(13, (B, T))
    cache = model.new_cache(B)
    with torch.no_grad():
        assert_same(through_cache(model, ids, cache, chunks), model(ids), atol=1e-11)
        assert cache.length == T
        with pytest.raises(ValueError, match="12 tokens do not fit context_length=11"):
            model(ids[:, :1], cache)


@pytest.mark.parametrize("chunks", [[8], [2, 5, 1], [1] * 8], ids=["at_once", "uneven", "by_token"])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@PRECISIONS
def test_prompts_of_different_lengths_decode_in_one_batch_as_each_does_alone(
    variant, position, backend, dtype, atol, chunks
):
    model = build_gpt(*overrides_of(variant, position, backend), std=0.3).to(dtype).eval()
    prompts = [torch.randint(13, (length,)) for length in (8, 1, 5)]
    ids, padding = left_padded(prompts)
    assert padding.tolist() == [0, 7, 3]
    cache = model.new_cache(len(ids), padding_B=padding)
    more = torch.randint(13, (3, 3))  # to the context's edge
    with torch.no_grad():
        y = through_cache(model, ids, cache, chunks)
        y = torch.cat([y, through_cache(model, more, cache, [1, 2])], dim=1)
        for row, (prompt, pad) in enumerate(zip(prompts, padding, strict=True)):
            alone = model(torch.cat([prompt, more[row]])[None])
            assert_same(y[row, pad:], alone[0], atol)
    assert torch.isfinite(y).all()


def test_a_model_prepared_for_decoding_gives_the_same_logits(variant, monkeypatch):
    monkeypatch.setattr("gptattn.attention.linear.WORTH_THREADS", 0)
    model = build_gpt(f"attn={variant}", std=0.3).eval()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for rows in (1, 3, 8):
        ids = torch.randint(13, (rows, T))
        with torch.no_grad():
            expected = model(ids)[:, -1]
            model.prepare(rows)
            cache = model.new_cache(rows)
            model.hidden(ids[:, :4], cache)
            for t in range(4, T):
                logits = model.next_logits(ids[:, t : t + 1], cache)
        assert_same(logits, expected, atol=1e-5)
        # A training step in between works too: with gradients the prepared layers are not used.
        model(ids).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        model.prepare(None)
    assert_same(model.state_dict(), before, atol=0)


def test_more_tokens_than_the_context_are_refused(variant):
    attention, x = build_attention(variant), torch.randn(B, T + 1, E)
    calls = [attention, lambda x: decode(attention, x, [T + 1])]
    if isinstance(attention, HasMaps):
        calls.append(attention.attention_weights)
    for call in calls:
        with pytest.raises(ValueError, match="12 tokens do not fit context_length=11"):
            call(x)
    with pytest.raises(ValueError, match="12 tokens do not fit context_length=11"):
        build_gpt(f"attn={variant}")(torch.zeros(B, T + 1, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_bytes_that_are_reported_are_the_bytes_allocated(variant, dtype):
    model = build_gpt(f"attn={variant}").to(dtype)
    with torch.device("meta"):
        reported = measure_cost(build_gpt(f"attn={variant}").to(dtype)).kv_bytes_per_token
    with Allocations() as made:
        cache = model.new_cache(batch=1)
    assert made.bytes == cache.nbytes > 0
    assert reported == made.bytes / T
    assert model.new_cache(batch=3).nbytes == 3 * made.bytes


@pytest.mark.skipif(not STATM.exists(), reason="asks Linux what the process holds")
def test_the_process_grows_by_the_cache_bytes_that_are_reported(variant):
    attention = build_attention(variant, context_length=4096)
    # Tensors this large never reuse memory that was freed before.
    rows = 2**28 // attention.new_cache(1, 4096).nbytes
    before = resident_bytes()
    cache = attention.new_cache(rows, 4096)
    for tensor in tree_leaves(vars(cache)):
        if isinstance(tensor, Tensor):
            tensor.zero_()  # memory counts as resident only after a write
    grown = resident_bytes() - before
    assert grown == pytest.approx(cache.nbytes, rel=0.02)


def test_the_parameters_that_are_reported_are_the_numbers_a_checkpoint_holds(variant):
    model = build_gpt(f"attn={variant}")
    with torch.device("meta"):
        reported = measure_cost(build_gpt(f"attn={variant}"))
    held = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    assert reported == measure_cost(model)
    assert reported.params == sum(held.values())
    assert reported.params_attention == sum(n for name, n in held.items() if ".attention." in name)
    # Vocabulary 13 and context 11.
    assert reported.params_embedding == (13 + 11) * 30


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_dropout_acts_in_training_only(variant, backend):
    if not takes(variant, "dropout"):
        pytest.skip("has no dropout")
    plain = build_attention(variant, backend=backend).double()
    dropping = build_attention(variant, backend=backend, dropout=0.4).double()
    dropping.load_state_dict(plain.state_dict())
    x = draw(B, T, E)
    dropping.train()
    assert not torch.allclose(dropping(x), dropping(x))
    dropping.eval()
    assert_same(dropping(x), plain(x))


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_dropout_acts_on_weights_alone(variant, backend):
    attention = build_attention(variant, backend=backend, dropout=0.4).double()
    maps, writer = with_maps(attention), attention.residual_writer()
    if writer is not None:
        with torch.no_grad():
            writer.weight.copy_(torch.eye(E))
            writer.bias.zero_()
    # One token has one weight per head. Dropout zeroes the whole head or scales it by
    # 1 / (1 - 0.4), if nothing else (queries, keys or values) is dropped.
    x = draw(61, 1, E)
    heads = maps.attention_weights(x).shape[1]
    trained = attention(x).unflatten(-1, (heads, -1))
    whole = attention.eval()(x).unflatten(-1, (heads, -1))
    kept = (trained != 0).any(-1, keepdim=True)
    assert_same(trained, torch.where(kept, whole / 0.6, 0.0))
    assert 0 < kept.sum() < kept.numel()


def test_a_saved_state_gives_the_same_outputs_in_a_new_module(variant):
    saved, loaded = build_attention(variant), build_attention(variant)
    x = torch.randn(B, T, E)
    assert not torch.equal(saved(x), loaded(x))
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    # This test wrote the buffer itself, so torch.load is safe.
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(saved(x), loaded(x))


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_attention_weights_are_causal_and_of_heads_alone_sum_to_one_and_give_the_output(
    variant, backend
):
    attention = build_attention(variant, backend=backend, dropout=0.4).double().eval()
    x = draw(B, T, E)
    w_BHTS = with_maps(attention).attention_weights(x)
    assert torch.equal((w_BHTS != 0).any(1).any(0), receptive_field(attention))
    if not isinstance(attention, HasHeads) or attention.names_in_heads() < {
        *attention.state_dict()
    }:
        return  # its other parameters may change weights and output in any way
    assert_same(w_BHTS.sum(-1), torch.ones(w_BHTS.shape[:-1], dtype=x.dtype))
    heads = attention.export_heads()
    v_BGSD = torch.einsum("bse,gde->bgsd", x, heads.v_GDE) + heads.v_bias_GD[:, None]
    v_BHSD = v_BGSD.repeat_interleave(w_BHTS.shape[1] // v_BGSD.shape[1], dim=1)
    y_BTHD = (w_BHTS @ v_BHSD).transpose(1, 2)
    y = y_BTHD.flatten(2)
    if heads.out_EHD is not None:
        y = torch.einsum("bthd,ehd->bte", y_BTHD, heads.out_EHD) + heads.out_bias_E
    assert_same(attention(x), y)


def test_attention_weights_ignore_dropout_in_training(variant):
    attention = with_maps(build_attention(variant, dropout=0.4).train())
    x = torch.randn(B, T, E)
    assert torch.equal(attention.attention_weights(x), attention.attention_weights(x))


def test_the_model_shows_the_weights_of_every_layer_that_has_some(variant):
    model = build_gpt(f"attn={variant}").eval()
    ids = torch.randint(13, (B, T))
    maps = model.attention_weights(ids)
    shown = [i for i, b in enumerate(model.layers()) if isinstance(b.attention, HasMaps)]
    assert shown == model.layers_with_maps()
    assert len(maps) == len(shown)
    if 0 not in shown:
        return
    first = model.layers()[0]
    with torch.no_grad():  # like the maps: with gradients a linear layer may sum in another order
        x = first.norm_attention(model.input_position(model.token_embedding(ids), range(T)))
        expected = first.attention.attention_weights(x)
    assert_same(maps[0], expected)


def test_flops_grow_with_the_tokens_and_decoding_adds_up_to_reading(variant):
    attention = build_attention(variant)
    full = [attention.flops(t, t) for t in range(1, T + 1)]
    steps = [attention.flops(1, s) for s in range(1, T + 1)]
    assert full[0] > 0
    assert full == sorted(set(full))
    assert steps == sorted(steps)
    assert sum(steps) == full[-1]
    assert attention.flops(5, 5) + attention.flops(6, 11) == full[-1]


def test_training_makes_no_matrix_of_tokens_by_tokens_and_decoding_no_copy_of_the_cache(variant):
    length = 1024
    attention = build_attention(variant, context_length=length, backend="sdpa")
    x = torch.randn(1, length, E, requires_grad=True)
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
        assert decoding.bytes < cache.nbytes / 2
