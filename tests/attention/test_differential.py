"""Differential attention: its start and dropout; test_recipes.py has it as released."""

import math

import pytest
import torch
from building import build_gpt
from contract import draw
from hugging import D, E, H, T

from gptattn.attention.variants.differential import DifferentialAttention


def test_weights_are_drawn_as_in_the_paper():
    model = build_gpt("attn=differential", "model.d_model=600", "model.num_layers=2")
    for layer, block in enumerate(model.layers()):
        attention = block.attention
        assert isinstance(attention, DifferentialAttention)
        drawn = torch.cat([attention.lambda_q1_D, attention.lambda_k1_D, attention.lambda_q2_D])
        assert drawn.std().item() == pytest.approx(0.1, rel=0.15)
        assert torch.equal(attention.norm_gain, torch.ones(200))
        assert attention.lambda0 == pytest.approx(0.8 - 0.6 * math.exp(-0.3 * layer))


def test_dropout_drops_each_of_the_two_softmaxes():
    attention = DifferentialAttention(E, E, T, H, out_proj=False, dropout=0.5).double().train()
    x = draw(61, 1, E)
    y = attention(x).unflatten(-1, (H // 2, 2 * D))
    v = attention.W_value(x).unflatten(-1, (H // 2, 2 * D))
    # One token: each softmax is 2 or 0, and the norm leaves of their difference only the sign.
    signs = (y * v).sum(-1).sign().unique().tolist()
    assert signs == [-1.0, 0.0, 1.0]
