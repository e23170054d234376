"""Reading and writing Hugging Face checkpoints, against the library transformers."""

import json
from pathlib import Path

import pytest
import torch
from building import build_gpt
from llamas import assert_same_logits, change, shake, theirs
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from gptattn.errors import CheckpointError, ConfigError, NumericError
from gptattn.model.gpt import GPT
from gptattn.weights.families import FAMILIES, family_of, write

GPT2, LLAMA = FAMILIES["gpt2"], FAMILIES["llama"]
# layers, heads, width, context, vocabulary, MLP width (None: 4 times the width)
GPT2_SIZES = [(1, 1, 8, 5, 11, None), (2, 4, 20, 13, 17, 37)]
# layers, heads, key/value heads, head size, context, vocabulary, MLP width, base, epsilon, tied
LLAMA_SIZES = [
    (1, 1, 1, 2, 5, 11, 7, 10_000.0, 1e-6, False),
    (2, 6, 3, 10, 13, 17, 37, 500.0, 1e-2, False),
    (3, 5, 1, 14, 23, 101, 19, 500_000.0, 1e-5, True),
]


def their_gpt2(sizes: tuple) -> GPT2LMHeadModel:
    names = ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "n_inner")
    torch.manual_seed(7)
    return shake(GPT2LMHeadModel(GPT2Config(**dict(zip(names, sizes, strict=True)))).eval())


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    their_gpt2(GPT2_SIZES[1]).save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    theirs(LLAMA_SIZES[1]).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


QWEN2 = [theirs(sizes, Qwen2Config) for sizes in LLAMA_SIZES[1:]]


@pytest.mark.parametrize("model", [*map(their_gpt2, GPT2_SIZES), *map(theirs, LLAMA_SIZES), *QWEN2])
def test_a_checkpoint_of_transformers_gives_the_same_logits_here(model, tmp_path: Path):
    model.save_pretrained(tmp_path)
    family = family_of(tmp_path)
    assert family is FAMILIES[model.config.model_type]
    assert_same_logits(family.load(tmp_path), model)


@pytest.mark.parametrize(
    "model", [their_gpt2(GPT2_SIZES[1]), *map(theirs, LLAMA_SIZES[1:]), QWEN2[0]]
)
def test_a_checkpoint_trains_as_it_would_in_transformers(model, tmp_path: Path):
    model.save_pretrained(tmp_path)
    ours, model = family_of(tmp_path).load(tmp_path).double(), model.double()
    ids = torch.randint(model.config.vocab_size, (3, model.config.max_position_embeddings))
    logits = model(ids[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    mine = ours.loss(ids[:, :-1], ids[:, 1:], chunk_tokens=5)
    # Their RMSNorm and rotary tables are computed in float32, also in a float64 model.
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
    expected.backward()
    mine.backward()
    write(tmp_path / "gradients", with_gradients(ours))
    found = load_file(tmp_path / "gradients" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 1e-4, name
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def with_gradients(model: GPT) -> GPT:
    """Put the gradients of the model in place of its weights."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.copy_(parameter.grad)
    return model


OURS = ["model.qkv_bias=false", "model.d_model=36", "model.d_mlp=29", "block.norm_eps=0.01"]


@pytest.mark.parametrize(
    ("variants", "overrides", "expected"),
    [
        (["mha", "mha_wrapper"], ["position=learned"], GPT2LMHeadModel),
        (
            ["mha", "mha_wrapper", "gqa", "mqa"],
            ["block=llama", "block.tied_head=false", "position.base=77.0", *OURS],
            LlamaForCausalLM,
        ),
        (["gqa"], ["block=llama", "block.tied_head=true", *OURS], LlamaForCausalLM),
        (["gqa", "mha_wrapper"], ["block=llama", *OURS, "model.qkv_bias=true"], Qwen2ForCausalLM),
    ],
    ids=["gpt2", "llama", "tied", "qwen2"],
)
def test_transformers_opens_what_we_write_and_we_read_it_back(
    variants, overrides, expected, tmp_path: Path
):
    for variant in variants:
        ours, out = build_gpt(f"attn={variant}", *overrides, std=0.1).eval(), tmp_path / variant
        write(out, ours)
        model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert type(model) is expected
        assert not info["missing_keys"] | info["unexpected_keys"]
        assert_same_logits(ours, model.eval())
        again = tmp_path / f"{variant}_again"
        write(again, family_of(out).load(out))
        for name in ("config.json", "model.safetensors"):
            assert (again / name).read_bytes() == (out / name).read_bytes()


def test_old_names_tables_and_masks_are_read(gpt2: Path, llama: Path):
    file = gpt2 / "model.safetensors"
    weights = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    save_file(weights | {"h.0.attn.bias": torch.ones(1, 1, 13, 13)}, file)
    assert_same_logits(GPT2.load(gpt2), their_gpt2(GPT2_SIZES[1]))
    # As transformers 4 wrote it.
    file = llama / "config.json"
    node = json.loads(file.read_text())
    del node["rope_parameters"]
    file.write_text(json.dumps(node | {"rope_theta": 500.0, "rope_scaling": None}))
    weights = load_file(llama / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
    save_file(weights, llama / "model.safetensors")
    assert_same_logits(LLAMA.load(llama), theirs(LLAMA_SIZES[1]))


def test_weights_in_several_files_and_in_bfloat16_are_read(tmp_path: Path):
    theirs(LLAMA_SIZES[1]).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = LLAMA.load(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert_same_logits(ours, LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    next(iter(tmp_path.glob("model-00002*"))).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-.* does not exist"):
        LLAMA.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"n_layer": 3}, "lacks h.2: config.json has 3 layers"),
        ({"n_layer": 1}, "has an unknown tensor 'h.1"),
        ({"n_embd": 24}, r"wte.weight is \[17, 20\], not \[17, 24\]"),
        ({"n_head": 3}, "num_heads=3 must divide"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"n_layer": "many"}, "cannot be used"),
        ({"activation_function": "relu"}, "activation_function is .relu., but must be .gelu_new."),
        ({"model_type": "gpt_neox"}, "model_type is .gpt_neox."),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"n_embd": float("inf")}, "cannot convert float infinity"),
        ({"n_layer": 2_000_000_000}, "lacks h.2: config.json has 2000000000"),
        ({"vocab_size": 2_000_000_000}, r"not \[2000000000, 20\]"),
    ],
)
def test_a_gpt2_that_does_not_fit_its_config_says_where(config, said, gpt2: Path):
    change(gpt2 / "config.json", **config)
    with pytest.raises(CheckpointError, match=said):
        GPT2.load(gpt2)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_attention_heads": 2, "head_dim": 30}, "num_kv_heads=3 must divide"),
        ({"head_dim": 12}, "head_dim is 12, but must be hidden_size / heads"),
        ({"num_key_value_heads": 2}, "k_proj.weight is .30, 60., not .20, 60."),
        ({"num_key_value_heads": 0}, "num_kv_heads is 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but must be 'silu'"),
        ({"attention_bias": True}, "attention_bias is True, but must be False"),
        ({"model_type": "mistral"}, "model_type is 'mistral', but must be 'llama'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings 'no'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn', but"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta is -1"),
        ({"rope_parameters": "default"}, "cannot be used"),
    ],
)
def test_a_llama_that_does_not_fit_its_config_says_where(config, said, llama: Path):
    change(llama / "config.json", **config)
    with pytest.raises(CheckpointError, match=said) as error:
        LLAMA.load(llama)
    assert "\n" not in str(error.value)


def test_a_head_is_read_if_it_is_not_tied_and_must_then_be_there(llama: Path, tmp_path: Path):
    change(llama / "config.json", tie_word_embeddings=True)
    assert LLAMA.load(llama).lm_head is None
    theirs(LLAMA_SIZES[2]).save_pretrained(tmp_path)
    change(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        LLAMA.load(tmp_path)


def test_damaged_weights_are_named(llama: Path):
    file = llama / "model.safetensors"
    whole, weights = file.read_bytes(), load_file(file)
    save_file(weights | {"norm.weight": torch.ones(60)}, file)
    with pytest.raises(CheckpointError, match=r"has a second tensor '(model\.)?norm\.weight'"):
        LLAMA.load(llama)
    up = "model.layers.1.mlp.up_proj.weight"
    save_file(weights | {up: weights[up] / 0}, file)
    with pytest.raises(NumericError, match=r"layers\.1\.mlp\.up_proj\.weight is not finite"):
        LLAMA.load(llama)
    save_file(weights | {up: weights[up].int()}, file)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is torch.int32, not floating"):
        LLAMA.load(llama)
    for size in (0, 5, 1000):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="cannot be read"):
            LLAMA.load(llama)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({}, "has no 'weight_map'"),
        ({"weight_map": {}}, "it names no file"),
        ({"weight_map": {"a": "../model.safetensors"}}, "is not the name of a file beside it"),
        ({"weight_map": {"a": "config.json"}}, r"config\.json cannot be read"),
        ({"weight_map": [1]}, "cannot be used"),
    ],
)
def test_an_index_from_anywhere_is_one_line(index, said, llama: Path):
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=said):
        LLAMA.load(llama)


A_LLAMA = ("block=llama", "model.qkv_bias=false", "model.d_model=36")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["attn=gqa"], "a key/value head for each query head"),
        (["position=none"], "learned positions"),
        (["model.qkv_bias=false"], "layer 0: GPT-2 has qkv biases, but this model has none"),
        (["attn.scale=0.3"], "layer 0: the same heads give other outputs"),
        (["position=sinusoidal"], "learned positions"),
        (["part=sink"], "would be lost"),
        (["part=softcap", "part.softcap.cap=0.5"], "give other outputs in GPT-2"),
        (["block.tied_head=false"], "a tied head"),
        (["model.mlp=none"], "an MLP with GELU"),
        (["block.norm_eps=1e-6"], "LayerNorm with epsilon 1e-5"),
        (["block.bias=false"], "train with block=gpt2"),
        (["attn.out_proj=false"], "an output projection"),
        (["attn.window=5"], "give other outputs in GPT-2"),
        ([*A_LLAMA, "model.mlp=gelu"], "model.mlp=gelu and block.bias=false; train with block="),
        ([*A_LLAMA, "block.bias=true"], "block.bias=true"),
        ([*A_LLAMA, "position=learned"], "rotary positions"),
        ([*A_LLAMA, "position=alibi"], "rotary positions"),
        ([*A_LLAMA, "model.qkv_bias=true", "attn=gqa", "++attn.window=5"], "outputs in Qwen2"),
        ([*A_LLAMA, "attn=single_head"], r"layer 0: Llama has an output projection"),
        ([*A_LLAMA, "attn=gqa", "++attn.window=5"], "give other outputs in Llama"),
        # Only the count of pairs shows it: the trial is of 1,024 tokens.
        (
            [*A_LLAMA, "model.context_length=1100", "attn=gqa", "++attn.window=1050"],
            "give other outputs in Llama",
        ),
        ([*A_LLAMA, "attn=probe_sunk"], "layer 0: .* would be lost"),
        ([*A_LLAMA, "part=qk_norm"], "layer 0: .* would be lost"),
        ([*A_LLAMA, "position.stretch=4.0"], "neither partial nor stretched"),
        ([*A_LLAMA, "position.fraction=0.67"], "neither partial nor stretched"),
        ([*A_LLAMA, "pattern=[mha,mqa]"], "as many heads in every layer"),
        (["block=gpt2", "block.norm=rms", "position=rope", "model.d_model=36"], "model.mlp=gelu"),
    ],
)
def test_what_a_family_has_not_cannot_be_written_as_one(overrides, said, tmp_path: Path):
    variant = [] if any(o.startswith(("attn=", "pattern=")) for o in overrides) else ["attn=mha"]
    with pytest.raises(ConfigError, match=said) as error:
        write(tmp_path / "out", build_gpt(*variant, *overrides))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
