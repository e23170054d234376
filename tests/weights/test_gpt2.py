"""Reading and writing GPT-2 checkpoints, against the library transformers."""

import json
from pathlib import Path

import pytest
import torch
from building import build_gpt
from transformers import GPT2Config, GPT2LMHeadModel

from gptattn.errors import CheckpointError, ConfigError
from gptattn.weights import gpt2

# layers, heads, width, context, vocabulary, MLP width (None: 4 times the width)
SIZES = [(1, 1, 8, 5, 11, None), (2, 4, 20, 13, 17, 37), (3, 2, 36, 23, 101, None)]


def theirs(sizes: tuple) -> GPT2LMHeadModel:
    layers, heads, width, context, vocabulary, inner = sizes
    torch.manual_seed(7)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers,
            n_head=heads,
            n_embd=width,
            n_positions=context,
            vocab_size=vocabulary,
            n_inner=inner,
        )
    ).eval()
    with torch.no_grad():  # so that biases and gains affect the output too
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@torch.no_grad()
def assert_same_logits(ours: torch.nn.Module, model: GPT2LMHeadModel) -> None:
    config = model.config
    ids = torch.randint(config.vocab_size, (2, config.n_positions))
    expected = model(ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(ids), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_checkpoint_of_transformers_gives_the_same_logits_here(sizes, tmp_path: Path):
    model = theirs(sizes)
    model.save_pretrained(tmp_path)
    assert_same_logits(gpt2.load(tmp_path), model)


@pytest.mark.parametrize("variant", ["mha", "mha_wrapper"])
def test_transformers_opens_what_we_write_with_the_same_logits(variant, tmp_path: Path):
    ours = build_gpt(f"attn={variant}", "position=learned", std=0.1).eval()
    gpt2.write(tmp_path / "out", ours)
    model, info = GPT2LMHeadModel.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same_logits(ours, model.eval())


def test_old_names_and_the_masks_of_old_files_are_read(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    model = theirs(SIZES[1])
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 13, 13)
    save_file(weights, file)
    assert_same_logits(gpt2.load(tmp_path), model)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"n_layer": 3}, "lacks h.2"),
        ({"n_layer": 1}, "has an unknown 'h.1"),
        ({"n_embd": 24}, r"wte.weight is \[17, 20\], not \[17, 24\]"),
        ({"n_head": 3}, "num_heads=3 must divide"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"n_layer": "many"}, "cannot be used"),
        (
            {"activation_function": "relu"},
            "activation_function is .relu., but must be .gelu_new.",
        ),
        ({"model_type": "gpt_neox"}, "model_type is .gpt_neox."),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"n_embd": float("inf")}, "cannot convert float infinity"),
        ({"n_layer": 2000000000}, "lacks h.2: config.json has 2000000000"),
        ({"vocab_size": 2000000000}, r"not \[2000000000, 20\]"),
    ],
)
def test_a_folder_that_does_not_fit_says_where(config, said, tmp_path: Path):
    theirs(SIZES[1]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(CheckpointError, match=said):
        gpt2.load(tmp_path)


@pytest.mark.parametrize("size", [0, 5, 1000])
def test_weights_that_are_cut_short_are_named(size, tmp_path: Path):
    theirs(SIZES[1]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="cannot be read"):
        gpt2.load(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["attn=gqa"], "a key/value head for each query head"),
        (["attn=mha", "position=none"], "learned positions"),
        (["attn=mha", "model.qkv_bias=false"], "qkv biases"),
        (["attn=mha", "attn.scale=0.3"], "layer 0: the same heads give other outputs"),
        (["attn=mha", "position=sinusoidal"], "learned positions"),
        (["attn=mha", "part=sink"], "would be lost"),
        (["attn=mha", "part=softcap", "part.softcap.cap=0.5"], "give other outputs in GPT-2"),
        (["attn=mha", "block.tied_head=false"], "a tied head"),
        (["attn=mha", "model.mlp=none"], "an MLP with GELU"),
        (["attn=mha", "block.norm_eps=1e-6"], "LayerNorm with epsilon 1e-5"),
        (["attn=mha", "block.bias=false"], "train with block=gpt2"),
        (["attn=mha", "block=llama", "model.d_model=36"], "train with block=gpt2"),
        (["attn=mha", "attn.out_proj=false"], "an output projection"),
        (["attn=probe_windowed", "+attn.num_kv_heads=6"], "give other outputs in GPT-2"),
    ],
)
def test_what_gpt2_has_not_cannot_be_written_as_one(overrides, said, tmp_path: Path):
    with pytest.raises(ConfigError, match=said):
        gpt2.write(tmp_path / "out", build_gpt(*overrides))
    assert not (tmp_path / "out").exists()
