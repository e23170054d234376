"""Reading and writing Llama checkpoints, against the library transformers."""

import json
from pathlib import Path

import pytest
import torch
from building import build_gpt
from llamas import assert_same_logits, change, theirs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from gptattn.errors import CheckpointError, ConfigError, NumericError
from gptattn.weights import llama
from gptattn.weights.families import family_of, write

# layers, heads, key/value heads, head size, context, vocabulary, MLP width, base, epsilon, tied
SIZES = [
    (1, 1, 1, 2, 5, 11, 7, 10_000.0, 1e-6, False),
    (2, 6, 3, 10, 13, 17, 37, 500.0, 1e-2, False),
    (3, 5, 1, 14, 23, 101, 19, 500_000.0, 1e-5, True),
]


@pytest.mark.parametrize("sizes", SIZES)
def test_a_checkpoint_of_transformers_gives_the_same_logits_here(sizes, tmp_path: Path):
    model = theirs(sizes)
    model.save_pretrained(tmp_path)
    assert_same_logits(llama.load(tmp_path), model)


def test_weights_in_several_files_and_in_bfloat16_are_read(tmp_path: Path):
    model = theirs(SIZES[1]).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = llama.load(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert_same_logits(ours, LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    next(iter(tmp_path.glob("model-00002*"))).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-.* does not exist"):
        llama.load(tmp_path)


def test_a_config_as_transformers_4_wrote_it_is_read(tmp_path: Path):
    model = theirs(SIZES[1])
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    node = json.loads(file.read_text())
    del node["rope_parameters"]
    file.write_text(json.dumps(node | {"rope_theta": 500.0, "rope_scaling": None}))
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
    save_file(weights, tmp_path / "model.safetensors")
    assert_same_logits(llama.load(tmp_path), model)


@pytest.mark.parametrize("variant", ["mha", "mha_wrapper", "gqa", "mqa"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_transformers_opens_what_we_write_and_we_read_it_back(variant, tied, tmp_path: Path):
    block = ["block=llama", f"block.tied_head={tied}", "position.base=77.0"]
    own = ["model.qkv_bias=false", "model.d_model=36", "model.d_mlp=29", "block.norm_eps=0.01"]
    ours = build_gpt(f"attn={variant}", *block, *own, std=0.1).eval()
    write(tmp_path / "out", ours)
    assert family_of(tmp_path / "out") is llama.FAMILY
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(model) is LlamaForCausalLM
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same_logits(ours, model.eval())
    write(tmp_path / "again", llama.load(tmp_path / "out"))
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_hidden_layers": 3}, "lacks layers.2: config.json has 3 layers"),
        ({"num_hidden_layers": 1}, "has an unknown 'layers.1"),
        ({"num_hidden_layers": 2_000_000_000}, "lacks layers.2: config.json has 2000000000"),
        ({"hidden_size": 66, "head_dim": None}, r"embed_tokens.weight is \[17, 60\], not \[17, 66"),
        ({"num_attention_heads": 4, "head_dim": 15}, "k_proj.weight is .* not"),
        ({"head_dim": 12}, "head_dim is 12, but must be hidden_size / heads"),
        ({"num_key_value_heads": 4}, "k_proj.weight is .30, 60., not .40, 60."),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"vocab_size": 2_000_000_000}, r"not \[2000000000, 60\]"),
        ({"intermediate_size": "many"}, "cannot be used"),
        ({"hidden_size": float("inf")}, "cannot convert float infinity"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but must be 'silu'"),
        ({"attention_bias": True}, "attention_bias is True, but must be False"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"model_type": "mistral"}, "model_type is 'mistral', but must be 'llama'"),
        ({"tie_word_embeddings": True}, None),  # the head in the file is then not read
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings 'no'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn', but"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta is -1"),
        ({"rope_parameters": "default"}, "cannot be used"),
    ],
)
def test_a_folder_that_does_not_fit_says_where(config, said, tmp_path: Path):
    theirs(SIZES[1]).save_pretrained(tmp_path)
    change(tmp_path / "config.json", **config)
    if said is None:
        assert llama.load(tmp_path).lm_head is None
        return
    with pytest.raises(CheckpointError, match=said) as error:
        llama.load(tmp_path)
    assert "\n" not in str(error.value)


def test_a_head_of_its_own_must_be_there(tmp_path: Path):
    theirs(SIZES[2]).save_pretrained(tmp_path)
    change(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        llama.load(tmp_path)


def test_a_tensor_under_both_of_its_names_is_refused(tmp_path: Path):
    theirs(SIZES[1]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"norm.weight": torch.ones(60)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has a second '(model\.)?norm\.weight'"):
        llama.load(tmp_path)


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path):
    model = theirs(SIZES[1])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(NumericError, match=r"layers\.1\.mlp\.up_proj\.weight is not finite"):
        llama.load(tmp_path)


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
def test_an_index_from_anywhere_is_one_line(index, said, tmp_path: Path):
    theirs(SIZES[1]).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path.parent / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=said):
        llama.load(tmp_path)


LLAMA = ("block=llama", "model.qkv_bias=false", "model.d_model=36")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([*LLAMA, "model.mlp=gelu"], "model.mlp=gelu and block.bias=false; train with block=llama"),
        ([*LLAMA, "block.bias=true"], "block.bias=true"),
        ([*LLAMA, "model.mlp=none"], "model.mlp=none"),
        ([*LLAMA, "position=none"], "rotary positions"),
        ([*LLAMA, "position=learned"], "rotary positions"),
        ([*LLAMA, "model.qkv_bias=true"], "layer 0: Llama has no biases in its attention"),
        ([*LLAMA, "attn.out_proj=false"], "layer 0: Llama has an output projection"),
        (
            [*LLAMA, "attn=gqa", "++attn.window=5"],
            "layer 0: the same heads give other outputs in Llama",
        ),
        ([*LLAMA, "attn.scale=0.3"], "layer 0: the same heads give other outputs in Llama"),
        ([*LLAMA, "attn=single_head"], r"layer 0: Llama has an output projection"),
        ([*LLAMA, "attn=probe_sunk"], "layer 0: .* would be lost"),
        ([*LLAMA, "part=qk_norm"], "layer 0: .* would be lost"),
        ([*LLAMA, "position=alibi"], "rotary positions"),
        ([*LLAMA, "position.stretch=4.0"], "neither partial nor stretched"),
        ([*LLAMA, "position.fraction=0.67"], "neither partial nor stretched"),
        ([*LLAMA, "pattern=[mha,mqa]"], "as many heads in every layer"),
        (["block=gpt2", "block.norm=rms", "position=rope", "model.d_model=36"], "model.mlp=gelu"),
    ],
)
def test_what_llama_has_not_cannot_be_written_as_one(overrides, said, tmp_path: Path):
    variant = [] if any(o.startswith(("attn=", "pattern=")) for o in overrides) else ["attn=mha"]
    with pytest.raises(ConfigError, match=said) as error:
        write(tmp_path / "out", build_gpt(*variant, *overrides))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_window_or_another_base_beyond_the_trial_is_seen(tmp_path: Path):
    long = [*LLAMA, "attn=gqa", "model.context_length=1500"]
    write(tmp_path / "plain", build_gpt(*long))
    with pytest.raises(ConfigError, match="other outputs in Llama"):
        write(tmp_path / "out", build_gpt(*long, "++attn.window=1400"))
