"""What a model of every attention must do, with every position: the contract of whole models.

It is tested on every file in `conf/attn`, `conf/part` and `conf/position`.
"""

from itertools import chain

import pytest
import torch
from building import CONTRACT, Allocations, build_gpt, chosen, through_cache
from contract import PLACED, T, assert_same, overrides_of

from gptattn.decode.generate import pad_left
from gptattn.model.cost import measure_cost


@pytest.fixture(params=CONTRACT)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@PLACED
@torch.no_grad()
def test_prompts_of_different_lengths_decode_in_one_batch_as_each_is_read_alone(variant, position):
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


def test_reported_are_the_cache_bytes_allocated_and_the_parameters_that_a_checkpoint_holds(variant):
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
