"""Reading and writing Llama checkpoints, against the library transformers."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from building import build_gpt
from safetensors.torch import load_file, save_file
from support import TEXT, Call, bpe, command, series, tiny, train
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from gptattn.errors import CheckpointError, ConfigError, NumericError
from gptattn.runs.load import load_config, load_run
from gptattn.weights import gpt2, llama
from gptattn.weights.families import family_of, write

# layers, heads, key/value heads, head size, context, vocabulary, MLP width, base, epsilon, tied
SIZES = [
    (1, 1, 1, 2, 5, 11, 7, 10_000.0, 1e-6, False),
    (2, 6, 3, 10, 13, 17, 37, 500.0, 1e-2, False),
    (3, 5, 1, 14, 23, 101, 19, 500_000.0, 1e-5, True),
]


def theirs(sizes: tuple) -> LlamaForCausalLM:
    layers, heads, kv_heads, head_dim, context, vocabulary, inner, base, eps, tied = sizes
    torch.manual_seed(7)
    config = LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=heads * head_dim,
        max_position_embeddings=context,
        vocab_size=vocabulary,
        intermediate_size=inner,
        rope_theta=base,
        rms_norm_eps=eps,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # so that gains affect the output too
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@torch.no_grad()
def assert_same_logits(ours: torch.nn.Module, model: LlamaForCausalLM) -> None:
    config = model.config
    ids = torch.randint(config.vocab_size, (2, config.max_position_embeddings))
    expected = model(ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(ids), expected, rtol=0, atol=1e-5)


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


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
    assert_same_logits(ours, model.float())
    next(iter(tmp_path.glob("model-00002*"))).unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-.* does not exist"):
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
        ({"max_position_embeddings": 2_000_000_000}, "needs .* bytes, and this machine has"),
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
        ([*LLAMA, "attn.window=5"], "layer 0: the same heads give other outputs in Llama"),
        ([*LLAMA, "attn.scale=0.3"], "layer 0: the same heads give other outputs in Llama"),
        ([*LLAMA, "attn=single_head"], "layer 0: "),
        ([*LLAMA, "part=[qk_norm]"], "would be lost"),
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
    long = [*LLAMA, "attn=mha", "model.context_length=1500"]
    write(tmp_path / "plain", build_gpt(*long))
    with pytest.raises(ConfigError, match="other outputs in Llama"):
        write(tmp_path / "out", build_gpt(*long, "attn.window=1400"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with GQA, a head of its own and a tokenizer that is GPT-2's kind."""
    folder = tmp_path_factory.mktemp("llama")
    theirs((2, 4, 2, 6, 64, 416, 29, 500.0, 1e-5, False)).save_pretrained(folder)
    shutil.copy(bpe(folder.parent / "bpe") / "tokenizer.json", folder)
    return folder


def test_a_llama_converts_generates_and_goes_out_again(
    checkpoint: Path, tmp_path: Path, call: Call
) -> None:
    run, out = tmp_path / "as_mqa", tmp_path / "out"
    code, said, _ = call("convert", "from=llama", f"path={checkpoint}", "to=mqa", f"out={run}")
    assert code == 0
    assert "cache of a full context: 12,288 -> 6,144 bytes" in said
    cfg = load_config(run)
    assert (cfg.choices["block"], cfg.block.tied_head, cfg.block.norm_eps) == ("llama", False, 1e-5)
    assert (cfg.position["base"], cfg.model.qkv_bias, cfg.model.d_mlp) == (500.0, False, 29)
    ask = ("prompt=Line 001", "tokens=20", "temperature=0", "threads=1", "device=cpu")
    assert call("generate", f"run={run}", *ask)[1].startswith("Line 001")
    # To as many heads as before and out: the logits and the tokens are the source's.
    same = tmp_path / "same"
    to = ("to=gqa", "to.num_kv_heads=2", f"out={same}")
    assert call("convert", "from=llama", f"path={checkpoint}", *to)[0] == 0
    assert call("convert", f"from={same}", "to=hf", f"out={out}")[0] == 0
    source = LlamaForCausalLM.from_pretrained(checkpoint)
    assert_same_logits(LlamaForCausalLM.from_pretrained(out), source)
    assert_same_logits(load_run(same).model, source)
    ids = AutoTokenizer.from_pretrained(out)(TEXT[:300])["input_ids"]
    assert ids == load_run(same).tokenizer.encode(TEXT[:300], "text").tolist()


def test_a_llama_trains_on_with_the_settings_that_the_error_names(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    still = ["optim.lr=1e-12", "budget.steps=1", "attn=gqa", "attn.num_kv_heads=2"]
    arguments = tiny(tmp_path, f"init_from={checkpoint}", *still)
    assert command(tmp_path, *arguments) == 2
    line = capfd.readouterr().err
    assert re.fullmatch(
        r"error: init_from: \S+ differs from this run; give tokenizer=gpt2 block=llama "
        r"position=rope model.num_layers=2 model.d_model=24 model.d_mlp=29 model.qkv_bias=false "
        r"block.norm_eps=1e-05 block.tied_head=false position.base=500.0\n",
        line,
    ), line
    arguments += re.findall(r"[\w.]+=\S+", line.partition("; give ")[2])
    assert command(tmp_path, *arguments) == 2
    line = capfd.readouterr().err
    assert line.endswith("give model.vocab_size=416\n"), line
    # The context stays shorter than the source's: rotary positions have no weights.
    assert command(tmp_path, *arguments, "model.vocab_size=416") == 0
    (run,) = (file.parent for file in tmp_path.rglob("summary.json"))
    saved = load_run(run)
    assert saved.model.context_length == 16
    ids = torch.tensor(saved.tokenizer.encode(TEXT, "text").astype("int64"))
    tail = ids[len(ids) - round(len(ids) * 0.1) - 1 :]
    source, total = LlamaForCausalLM.from_pretrained(checkpoint), 0.0
    for start in range(0, len(tail) - 1, 16):
        here, after = tail[start : start + 16], tail[start + 1 : start + 17]
        with torch.no_grad():
            logits = source(here[None]).logits[0, : len(after)]
        total += torch.nn.functional.cross_entropy(logits, after, reduction="sum").item()
    found = series(run, "val/loss")[-1][1]
    assert found == pytest.approx(total / (len(tail) - 1), abs=1e-4)


MISTAKES = [
    (["position.base=10000.0"], r"give position\.base=500\.0$"),
    (["position=none"], r"give position=rope position\.base=500\.0$"),
    (["block.norm_eps=1e-6"], r"give block\.norm_eps=1e-05$"),
    (["block.tied_head=true"], r"give block\.tied_head=false$"),
    (["model.mlp=none"], r"give model\.d_mlp=29 model\.mlp=swiglu$"),
    (["block=gpt2"], r"give block=llama block\.norm_eps=1e-05 block\.tied_head=false$"),
    (["model.context_length=65"], r"give model\.context_length=64$"),
    (["attn=gqa", "attn.num_kv_heads=4", "model.qkv_bias=true"], r"give model\.qkv_bias=false$"),
]


@pytest.mark.parametrize(("overrides", "said"), MISTAKES)
def test_another_block_or_base_than_the_sources_is_one_line(
    overrides: list[str],
    said: str,
    checkpoint: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fitting = [
        *("block=llama", "tokenizer=gpt2", "position=rope", "position.base=500.0"),
        *("model.num_layers=2", "model.d_model=24", "model.d_mlp=29", "model.vocab_size=416"),
        *("block.norm_eps=1e-5", "block.tied_head=false", "model.qkv_bias=false"),
    ]
    names = {override.partition("=")[0] for override in overrides}
    dropped = {"position.base"} if "position" in names else set()
    kept = [o for o in fitting if o.partition("=")[0] not in names | dropped]
    capfd.readouterr()
    arguments = tiny(tmp_path, f"init_from={checkpoint}", *kept, *overrides)
    assert command(tmp_path, *arguments) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(said, line), line


def test_a_tokenizer_of_another_kind_is_not_claimed(
    checkpoint: Path, tmp_path: Path, call: Call, capfd: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(checkpoint, tmp_path / "source")
    assert llama.has_tokenizer(source)
    node = json.loads((source / "tokenizer.json").read_text())
    node["model"]["byte_fallback"] = True  # as Llama 2's
    (source / "tokenizer.json").write_text(json.dumps(node))
    assert not llama.has_tokenizer(source)
    code, said, _ = call("convert", "from=llama", f"path={source}", "to=gqa")
    assert code == 0
    assert "no tokenizer that tokenizer=gpt2 reads found; recorded the byte tokenizer" in said
    assert load_config(tmp_path / "source_to_gqa").choices["tokenizer"] == "byte"
    # Files that do not say how the text is split may be those of any tokenizer.
    shutil.copy(bpe(tmp_path / "bpe") / "vocab.json", source)
    shutil.copy(tmp_path / "bpe" / "merges.txt", source)
    (source / "tokenizer.json").unlink()
    assert not llama.has_tokenizer(source)


def test_a_llama_is_not_read_as_a_gpt2_nor_written_as_one(
    checkpoint: Path, tmp_path: Path, call: Call
) -> None:
    code, _, err = call("convert", "from=gpt2", f"path={checkpoint}", "to=gqa")
    assert (code, len(err.splitlines())) == (4, 1)
    assert "model_type is 'llama', but must be 'gpt2'" in err
    with pytest.raises(ConfigError, match="train with block=gpt2"):
        gpt2.write(tmp_path / "out", build_gpt(*LLAMA, "attn=mha"))
    mistral = shutil.copytree(checkpoint, tmp_path / "mistral")
    change(mistral / "config.json", model_type="mistral")
    with pytest.raises(CheckpointError, match="'mistral', but must be one of gpt2, llama"):
        family_of(mistral)


def test_a_run_with_blocks_of_llama_starts_from_another_with_fewer_heads(tmp_path: Path) -> None:
    block = ["block=llama", "block.tied_head=false", "model.num_layers=2"]
    source = train(tmp_path / "a", *block, "attn=mha", "budget.steps=30", "optim.lr=0.01")
    still = [*block, f"init_from={source}", "budget.steps=1", "optim.lr=1e-12"]
    same = train(tmp_path / "b", *still, "attn=gqa", "attn.num_kv_heads=4")
    before, after = (series(run, "val/loss")[-1][1] for run in (source, same))
    assert after == pytest.approx(before, abs=1e-5)
    fewer = train(tmp_path / "c", *still, "attn=mqa", "init_method=first")
    assert series(fewer, "val/loss")[-1][1] > before
