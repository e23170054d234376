"""Reading and writing Hugging Face checkpoints, against the library transformers."""

import copy
import json
from pathlib import Path

import pytest
import torch
from building import SMALL, build_gpt, settings, slow_but
from llamas import assert_same_logits, change, shake, theirs
from safetensors.torch import load_file, save_file
from support import refuses
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    SmolLM3Config,
)

from gptattn.model.gpt import GPT
from gptattn.weights.families import FAMILIES
from gptattn.weights.hugging_face import find_family, load_checkpoint, write_checkpoint

# layers, heads, key/value heads, head size, context, vocabulary, MLP width, base, epsilon, tied
LLAMA_SIZES = [
    (2, 6, 3, 10, 13, 17, 37, 500.0, 1e-2, False),
    (3, 5, 1, 14, 23, 101, 19, 500_000.0, 1e-5, True),
]


LLAMA, LARGER = map(theirs, LLAMA_SIZES)
QWEN2 = theirs(LLAMA_SIZES[0], Qwen2Config)
GPT2_CONFIG = {"n_layer": 2, "n_head": 4, "n_embd": 20, "n_positions": 13, "n_inner": 37}
GPT2 = shake(GPT2LMHeadModel(GPT2Config(**GPT2_CONFIG, vocab_size=17)).eval())
CHECKPOINTS = [GPT2, LLAMA, LARGER, QWEN2]


def load(folder: Path) -> GPT:
    return load_checkpoint(folder, find_family(folder))[1]


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    GPT2.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    LLAMA.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("model", slow_but(CHECKPOINTS[:2], CHECKPOINTS))
def test_a_checkpoint_computes_and_trains_as_it_would_in_transformers(model, tmp_path):
    model.save_pretrained(tmp_path)
    family = find_family(tmp_path)
    assert family is FAMILIES[model.config.model_type]
    cfg, ours = load_checkpoint(tmp_path, family)
    assert_same_logits(ours, model)
    ours, model = ours.double(), copy.deepcopy(model).double()
    ids = torch.randint(model.config.vocab_size, (3, model.config.max_position_embeddings))
    logits = model(ids[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    mine = ours.loss(ids[:, :-1], ids[:, 1:], chunk_tokens=5)
    # Their RMSNorm and rotary tables are computed in float32, also in a float64 model.
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
    expected.backward()
    mine.backward()
    write_checkpoint(tmp_path / "gradients", cfg, with_gradients(ours))
    found = load_file(tmp_path / "gradients" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 1e-4, name
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def with_gradients(model: GPT) -> GPT:
    """Put the gradients of the model in place of its weights."""
    for parameter in model.parameters():
        parameter.copy_(parameter.grad)
    return model


LIKE_LLAMA = (
    *("block=llama", "model.qkv_bias=false", "model.d_model=36", "model.d_mlp=29"),
    "block.norm_eps=0.01",
)
UNTIED = "block.tied_head=false"


WRITTEN = [
    (("pattern=[mha,mqa]", *LIKE_LLAMA, "block.tied_head=true"), LlamaForCausalLM),
    (("attn=gqa", *LIKE_LLAMA, UNTIED, "position.base=77.0"), LlamaForCausalLM),
    (("attn=gqa", UNTIED, "block.norm_eps=0.01"), GPT2LMHeadModel),
    (("attn=mha", *LIKE_LLAMA, "model.qkv_bias=true"), Qwen2ForCausalLM),
]


@pytest.mark.parametrize("case", slow_but(WRITTEN[:1], WRITTEN))
def test_transformers_opens_what_we_write_and_we_read_it_back(case, tmp_path):
    chosen, expected = case
    out, ours = tmp_path / "out", build_gpt(*chosen, std=0.1).eval()
    write_checkpoint(out, settings(*SMALL, *chosen), ours)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(model) is expected
    assert not info["missing_keys"] | info["unexpected_keys"]
    assert_same_logits(ours, model.eval())
    family, again = FAMILIES[model.config.model_type], tmp_path / "again"
    write_checkpoint(again, *load_checkpoint(out, family))
    for name in ("config.json", "model.safetensors"):
        assert (again / name).read_bytes() == (out / name).read_bytes()


OF_RECIPES = {
    "vocab_size": 17,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 37,
    "num_hidden_layers": 5,
    "max_position_embeddings": 13,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "pad_token_id": None,
}


@pytest.mark.parametrize(
    "config", [Qwen3Config(**OF_RECIPES, head_dim=10), SmolLM3Config(**OF_RECIPES)]
)
def test_a_release_is_read_into_its_recipe(config, tmp_path):
    torch.manual_seed(7)
    model = shake(AutoModelForCausalLM.from_config(config).eval())
    model.save_pretrained(tmp_path)
    family = find_family(tmp_path)
    cfg, ours = load_checkpoint(tmp_path, family)
    assert cfg.variant == family.name
    assert_same_logits(ours, model)


# Keys of transformers' config classes that leave the logits as they are.
WITHOUT_EFFECT = {
    # of every model: what a file is, what a call returns, ids of special tokens, dropout
    *("_name_or_path", "architectures", "dtype", "model_type", "transformers_version"),
    *("return_dict", "output_attentions", "output_hidden_states", "use_cache", "problem_type"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "id2label", "label2id"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "attention_dropout"),
    # GPT-2's dropout, precision and other heads
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn", "summary_activation"),
    *("summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    "pretraining_tp",  # Llama's split of products over devices
    *("sliding_window", "max_window_layers"),  # without `use_sliding_window`
    "rope_parameters",  # its keys are looked at one by one
}
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=17, **GPT2_CONFIG),
    **{
        kind.model_type: kind(**(OF_RECIPES | {"num_hidden_layers": 4}))
        for kind in (LlamaConfig, Qwen2Config, Qwen3Config, SmolLM3Config)
    },
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_key_of_a_config_is_read_or_required_or_has_no_effect(name):
    family, config = FAMILIES[name], CONFIGS[name]
    node = config.to_dict()
    listed = {*family.settings.values(), *family.accepted, *family.required, *WITHOUT_EFFECT}
    assert node.keys() <= listed
    # A key that is missing means what it means to their class.
    read = family.read_values(node)
    for key in family.defaults.keys() & node.keys() - {"num_key_value_heads", "head_dim"}:
        shorter = {k: v for k, v in node.items() if k != key}
        as_theirs = type(config).from_dict(shorter).to_dict()
        assert family.read_values(shorter) == family.read_values(as_theirs), key
    # What is said to have no effect has none.
    torch.manual_seed(7)
    model = shake(AutoModelForCausalLM.from_config(config).eval())
    for key in WITHOUT_EFFECT & node.keys():
        if isinstance(value := node[key], bool | float) and not key.startswith(("return", "out")):
            node[key] = not value if isinstance(value, bool) else value + 0.1
    changed = AutoModelForCausalLM.from_config(type(config).from_dict(node)).eval()
    changed.load_state_dict(model.state_dict())
    ids = torch.randint(17, (2, 13))
    torch.testing.assert_close(changed(ids)[0], model(ids)[0])
    assert family.read_values(node) == read


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((name, {"quantization_config": {"quant_method": "fp8"}}) for name in FAMILIES),
        ("gpt2", {"add_cross_attention": True}),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ("qwen3", {"use_sliding_window": True}),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0], "no_rope_layer_interval": 2}),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2}),
        ("smollm3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}),
    ],
)
def test_what_a_family_computes_otherwise_is_refused_by_its_key(name, config):
    with pytest.raises(ValueError, match="|".join([*config, "rope_type"])):
        FAMILIES[name].read_values(CONFIGS[name].to_dict() | config)


def test_old_names_tables_and_masks_are_read(gpt2, llama):
    file = gpt2 / "model.safetensors"
    weights = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    save_file(weights | {"h.0.attn.bias": torch.ones(1, 1, 13, 13)}, file)
    assert_same_logits(load(gpt2), GPT2)
    # As transformers 4 wrote it.
    file = llama / "config.json"
    node = json.loads(file.read_text())
    del node["rope_parameters"]
    file.write_text(json.dumps(node | {"rope_theta": 500.0, "rope_scaling": None}))
    weights = load_file(llama / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
    save_file(weights, llama / "model.safetensors")
    assert_same_logits(load(llama), LLAMA)
    change(file, tie_word_embeddings=True)
    assert load(llama).lm_head is None  # whatever the file holds


def test_weights_in_several_files_and_in_bfloat16_are_read(tmp_path):
    theirs(LLAMA_SIZES[0]).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = load(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert_same_logits(ours, LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    next(iter(tmp_path.glob("model-00002*"))).unlink()
    with refuses("*: model-00002-of-", 4):
        load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "config", "said"),
    [
        ("gpt2", {"n_layer": 3}, "lacks h.2.ln_1.weight"),
        ("gpt2", {"n_layer": 1}, "has an unknown tensor 'h.1"),
        ("gpt2", {"n_embd": 24}, "wte.weight has shape [17, 20], not [17, 24]"),
        ("gpt2", {"n_layer": "many"}, "n_layer"),
        ("llama", {"head_dim": 12}, "head_dim is 12"),
        ("llama", {"num_key_value_heads": 2}, "k_proj.weight has shape [30, 60]"),
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "type is 'linear'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"rope_parameters": "default"}, "cannot be used"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_says_where(kind, config, said, request):
    folder = request.getfixturevalue(kind)
    change(folder / "config.json", **config)
    with refuses(f"*: {said}", 4):
        load_checkpoint(folder, FAMILIES[kind])


def test_damaged_weights_are_named(llama):
    file = llama / "model.safetensors"
    whole, weights = file.read_bytes(), load_file(file)
    up = "model.layers.1.mlp.up_proj.weight"
    save_file(weights | {up: weights[up] / 0}, file)
    with refuses("*: layers.1.mlp.up_proj.weight", 5):
        load(llama)
    file.write_bytes(whole[:1000])
    with refuses("*: cannot be read", 4):
        load(llama)
    file.unlink()
    (llama / "model.safetensors.index.json").write_text("{}")
    with refuses("*: 'weight_map'", 4):
        load(llama)


A_LLAMA = ("block=llama", "model.qkv_bias=false", "model.d_model=36")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["position=none"], "position=learned"),
        (["model.qkv_bias=false"], "model.qkv_bias=true"),
        (["attn.scale=0.3"], "different outputs"),
        (["part=sink"], "lost"),
        ([*A_LLAMA, "model.mlp=gelu"], "model.mlp=swiglu"),
        # Only the count of pairs shows it: the trial is of 1,024 tokens.
        ([*A_LLAMA, "model.context_length=1100", "attn.window=1050"], "different outputs in llama"),
        ([*A_LLAMA, "position.stretch=4.0"], "position.stretch=1.0"),
    ],
)
def test_a_model_that_a_family_lacks_cannot_be_written_as_one(overrides, said, tmp_path):
    overrides = ["attn=mha", *overrides]
    with refuses(f"*: {said}"):
        write_checkpoint(tmp_path / "out", settings(*SMALL, *overrides), build_gpt(*overrides))
    assert not (tmp_path / "out").exists()
