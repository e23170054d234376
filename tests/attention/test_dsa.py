"""Latent attention to chosen keys, and its indexer's loss; test_recipes.py has it as released."""

import math
from typing import Any

import pytest
import torch
from building import Allocations, disturb
from contract import assert_agree, assert_same, draw
from hugging import B, D, E, H, T
from support import series, summary, train
from torch import Tensor

from gptattn.attention import Shared
from gptattn.attention.rule import attention_weights
from gptattn.attention.variants.dsa import DeepSeekSparseAttention
from gptattn.position import RotaryPosition
from gptattn.position.base import Documents

# Ranks, what rotates, heads of the indexer, their size: with so many, no score is 0 by ReLU, of
# which theirs chooses any.
C, P, QUERY, INDEX, J = 23, 6, 17, 24, 8


def ours(topk: float = 3, context: int = T, **changes: Any) -> DeepSeekSparseAttention:
    """A layer at the sizes of the oracles, in float64, with noise on every parameter."""
    own = {"kv_rank": C, "query_rank": QUERY, "rope_dim": P, "index_heads": INDEX, "index_dim": J}
    own |= {"position": RotaryPosition(context, D, pairs="neighbours"), "out_bias": False} | changes
    layer = DeepSeekSparseAttention(E, E, context, H, topk=topk, **own).double()
    disturb(layer, std=0.3)
    return layer


def of_indexer(layer: DeepSeekSparseAttention) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in layer.named_parameters() if "index" in name}


def own_loss(layer: DeepSeekSparseAttention, x: Tensor, positions: Any = None) -> Tensor:
    """The loss that the layer adds in training."""
    losses: dict[str, list[Tensor]] = {}
    at = range(x.shape[1]) if positions is None else positions
    layer.train()(x, None, Shared(at, losses=losses))
    ((loss,),) = losses.values()
    return loss


def test_of_equal_scores_the_newest_are_chosen_in_any_order_of_the_keys():
    mine, x = ours(topk=3), draw(B, T, E)
    with torch.no_grad():
        mine.W_index_weight.weight.zero_()  # all scores are 0
    seen = mine.attention_weights(x).ne(0).any(1)
    newest = torch.ones(T, T).bool().tril().triu(-2)
    assert torch.equal(seen, newest.expand(B, T, T))
    ring = ours(topk=3, window=5).eval()
    with torch.no_grad():
        ring.W_index_weight.weight.zero_()
        cache = ring.new_cache(B, T)
        for t, token in enumerate(x.split(1, dim=1)):
            y = ring(token, cache)
            cache.advance(1)
            assert_same(y[:, 0], ring(x)[:, t])


def plain_loss(layer: DeepSeekSparseAttention, x: Tensor, documents: Documents | None) -> Tensor:
    """The mean divergence, query by query from whole matrices."""
    at = range(x.shape[1]) if documents is None else documents
    q, held, placed, *_ = layer.project_and_cache(x, None, Shared(at))
    w_BTS = attention_weights(q, layer.keys(held), *placed[:3]).sum(1).detach()
    q_BITJ, k_BSJ = held["index_query"], held["index_key"][:, 0]
    start = torch.zeros(len(x), x.shape[1]).long() if documents is None else documents.start_BT
    each = []
    for b in range(len(x)):
        for t in range(x.shape[1]):
            first = int(start[b, t])
            products = (k_BSJ[b, first : t + 1] @ q_BITJ[b, :, t].T).clamp_min(0)
            score = products @ held["index_weight"][b, :, t, 0]
            kept = score.topk(min(layer.topk, len(score))).indices
            p = w_BTS[b, t, first : t + 1]
            assert p.count_nonzero() == len(kept)
            p = p[kept] / p.sum()
            each.append((p * (p.log() - score[kept].log_softmax(0))).sum())
    return torch.stack(each).mean()


@pytest.mark.parametrize(("topk", "in_documents"), [(3, False), (3, True), (150, False)])
def test_its_loss_is_the_divergence_in_value_and_gradient(topk, in_documents):
    mine, x = ours(topk, context=150), draw(B, 150, E)  # two blocks of queries
    documents = Documents.numbered(torch.arange(150).repeat(B, 1) // 40) if in_documents else None
    own = [*of_indexer(mine).values()]
    found, expected = own_loss(mine, x, documents), plain_loss(mine, x, documents)
    assert found > 1e-3
    assert_agree(found, expected, own)


def test_the_loss_trains_the_indexer_alone_and_the_output_all_else():
    mine, x = ours(), draw(B, T, E).requires_grad_()
    indexer, every = of_indexer(mine), dict(mine.named_parameters())
    assert len(indexer) == 5
    by_loss = torch.autograd.grad(own_loss(mine, x), [x, *every.values()], allow_unused=True)
    assert by_loss[0] is None
    trained = {name for name, g in zip(every, by_loss[1:], strict=True) if g is not None}
    assert trained == indexer.keys()
    by_output = torch.autograd.grad(mine(x).sum(), [*every.values()], allow_unused=True)
    trained = {name for name, g in zip(every, by_output, strict=True) if g is not None}
    assert trained == every.keys() - indexer.keys()


def test_the_loss_is_there_in_training_alone_and_holds_no_matrix_of_tokens():
    length, narrow = 1024, {"kv_rank": 8, "query_rank": 8, "rope_dim": 4, "index_dim": 4}
    mine = DeepSeekSparseAttention(E, E, length, H, **narrow, index_heads=2)
    x = torch.randn(1, length, E)
    with Allocations() as made:
        own_loss(mine, x).backward()
    assert max(made.elements) < length * length
    losses: dict[str, list[Tensor]] = {}
    mine.eval()(x, None, Shared(range(length), losses=losses))
    with torch.no_grad():
        mine.train()(x, None, Shared(range(length), losses=losses))
    assert not losses


@pytest.mark.slow
def test_it_is_logged_and_kept_out_of_the_other_losses(tmp_path):
    sizes = ["attn=dsa", "position=rope", "log_every=1", "accumulate=2"]
    run = train(tmp_path / "a", *sizes)
    again = train(tmp_path / "b", *sizes, "model.activation_checkpointing=true")
    own = [value for _, value in series(run, "train/index_loss")]
    assert own[0] > 0
    for name in ("train/index_loss", "train/loss", "val/loss"):
        assert [v for _, v in series(run, name)] == pytest.approx(
            [v for _, v in series(again, name)], rel=1e-4
        )
    assert not [tag for tag in summary(run)["metrics"] if "index" in tag and "train" not in tag]
    assert series(run, "train/loss")[0][1] == pytest.approx(math.log(256), abs=0.5)


def test_costs_by_hand():
    mine = ours(topk=3)
    index = 2 * INDEX * (J + 1)
    # In training each counts three times: the indexer's scores are made twice, and the main ones
    # once more, without gradients.
    assert 3 * mine.flops(5, 5) == (3 * 2 * H * (2 * D + P) + 4 * index + 2 * H * (D + P)) * 15
    assert mine.flops(1, 9) == ours(topk=T).flops(1, 3) + index * (9 - 3)
    assert mine.bfloat16().new_cache(1, 1).nbytes == 2 * (C + P + J)
