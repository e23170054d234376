"""What `backend: auto` becomes: on a CPU, and on GPUs with these or those tools."""

from dataclasses import replace

import pytest
import torch
import yaml
from building import menu, settings, slow_but, takes
from support import save_untrained, tiny

from gptattn.attention import MultiHeadAttention
from gptattn.build.model import resolve_backends
from gptattn.machine.device import Toolchain
from gptattn.runs.load import count_caches, load_run
from gptattn.settings.config import CONF
from gptattn.settings.identity import Provenance, differences, hash_kernels
from gptattn.training.preflight import preflight

RECIPES = sorted(path.stem for path in (CONF / "recipe").glob("*.yaml"))
HOPPER = Toolchain(capability=(9, 0), missing="", triton=(3, 7, 1), fla=True)
OLD_TRITON = replace(HOPPER, triton=(3, 6, 0))
SIZES = (
    "model.num_layers=6",
    "model.num_heads=2",
    "model.d_model=64",
    "model.context_length=256",
    "model.dropout=0.0",
    "trainer.precision=bf16-mixed",
)


def resolve(*overrides: str, tools: Toolchain = HOPPER) -> tuple[list[str], list[str]]:
    """The backends of the kinds of layers on a GPU with these tools, and the lines about them."""
    cfg = settings(*SIZES, *overrides)
    found, notes = resolve_backends(cfg, torch.device("cuda"), tools)
    names = [kind.attn["backend"] for kind in found.kinds() if "backend" in kind.attn]
    return names, notes


def as_said(names: list[str]) -> tuple[list[str], list[str]]:
    """These backends of one kind of layer, and the lines that say no more than that."""
    return names, [f"attn.backend={name}" for name in names]


# What is not sdpa of the files in conf/attn and conf/recipe.
ATTENTIONS = {"sliding": "flex"}
ATTENTIONS |= dict.fromkeys(("gated_deltanet", "kda", "lightning", "mamba2"), "fla")
KINDS = {
    "exaone4": ["flex", "sdpa"],
    "gemma2": ["flex", "flex"],
    "gemma3": ["flex", "sdpa"],
    "gpt_oss": ["flex", "flex"],
    "granite4": ["fla", "sdpa"],
    "kimi_linear": ["fla", "sdpa"],
    "llama4": ["flex", "sdpa"],
    "mamba2": ["fla"],
    "mimo_v2_flash": ["flex", "sdpa"],
    "minimax": ["fla", "sdpa"],
    "mistral": ["flex"],
    "olmo3": ["flex", "sdpa"],
    "olmo_hybrid": ["fla", "sdpa"],
    "qwen3_5": ["fla", "sdpa"],
    "qwen3_next": ["fla", "sdpa"],
    "smollm3": ["sdpa", "sdpa"],
    "trinity": ["flex", "sdpa"],
}


@pytest.mark.parametrize("name", [name for name in menu("attn") if takes(name, "backend")])
def test_each_attention_has_the_kernel_of_the_machine(name):
    if name != "rwkv7":  # which is in SLOWER
        assert resolve(f"attn={name}") == as_said([ATTENTIONS.get(name, "sdpa")])
    on_cpu = resolve_backends(settings(*SIZES, f"attn={name}"), torch.device("cpu"))
    with_state = name == "rwkv7" or ATTENTIONS.get(name) == "fla"
    assert on_cpu[0].attn["backend"] == ("chunked" if with_state else "sdpa")
    assert on_cpu[1] == []


@pytest.mark.parametrize("name", slow_but({"gemma2", "llama4", "qwen3_next"}, RECIPES))
def test_each_kind_of_layer_of_a_recipe_has_the_kernel_of_the_machine(name):
    given = (f"recipe={name}", "model.num_layers=10")
    names, lines = resolve(*given)
    assert names == KINDS.get(name, ["sdpa"])
    assert [line.partition("=")[2] for line in lines] == names
    found, notes = resolve_backends(settings(*SIZES, *given), torch.device("cpu"))
    assert {kind.attn.get("backend", "sdpa") for kind in found.kinds()} <= {"sdpa", "chunked"}
    assert notes == []


WINDOW = ("attn=gqa", "attn.window=37")
BY_FLEX = [
    WINDOW,
    ("attn=gqa", "+attn.chunk=64"),
    ("attn=mla", "attn.window=0.25", "position=rope"),
    ("attn=mha_wrapper", "attn.window=37"),
    ("attn=cross_layer", "attn.window=37"),
    ("attn=differential", "attn.window=37"),
    ("attn=tpa", "part=[softcap]"),
    ("attn=mha", "part=[sink]"),
    ("attn=mha", "position=alibi"),
    ("attn=gqa", "data.mask_documents=true"),
    (*WINDOW, "trainer.precision=16-mixed"),
    (*WINDOW, "trainer.precision=bf16-true"),
]


@pytest.mark.parametrize("overrides", BY_FLEX, ids=" ".join)
def test_flex_computes_what_one_fused_call_cannot(overrides):
    assert resolve(*overrides) == as_said(["flex"])


# Why a layer has blocks of queries, or chunks, in one telling word.
SLOWER = {
    (*WINDOW, "model.dropout=0.1"): "dropout",
    (*WINDOW, "trainer.precision=32-true"): "float32",
    (*WINDOW, "model.num_heads=8"): "heads",
    ("attn=single_head", "attn.window=37", "model.d_model=512"): "heads",
    ("attn=gqa", "part=[forget]"): "learned",
    ("attn=gqa", "part=[softcap]", "position=alibi"): "soft cap",
    ("attn=kda", "trainer.precision=32-true"): "float32",
    ("attn=rwkv7",): "removal",
    ("attn=gated_deltanet", "model.num_heads=1", "attn.expand_v=8.0"): "heads",
}


@pytest.mark.parametrize(("overrides", "word"), SLOWER.items(), ids=map(" ".join, SLOWER))
def test_one_line_says_why_a_layer_has_no_faster_kernel(overrides, word):
    (name,), (line,) = resolve(*overrides)
    assert name == ("chunked" if takes(overrides[0].partition("=")[2], "norm_eps") else "sdpa")
    assert line.startswith(f"attn.backend={name}: ")
    assert word in line


def test_a_window_of_the_whole_context_is_plain():
    assert resolve("attn=gqa", "attn.window=256") == as_said(["sdpa"])


def test_without_a_compiler_or_triton_blocks_and_chunks_run():
    tools = replace(HOPPER, missing="there is no C compiler")
    names, lines = resolve("recipe=qwen3_next", tools=tools)
    assert (names, len(lines)) == (["chunked", "sdpa"], 2)
    assert "C compiler" in lines[0]
    assert resolve(*WINDOW, tools=tools)[0] == ["sdpa"]


@pytest.mark.parametrize("name", ["gated_deltanet", "kda", "lightning", "mamba2"])
def test_a_gate_per_head_needs_a_newer_triton_on_hopper(name):
    names, lines = resolve(f"attn={name}", tools=OLD_TRITON)
    if name == "kda":
        assert (names, lines) == as_said(["fla"])
    else:
        assert names == ["chunked"]
        assert "torch 2.12.1" in lines[0]
    assert resolve(f"attn={name}", tools=replace(OLD_TRITON, capability=(8, 0)))[0] == ["fla"]
    names, lines = resolve(f"attn={name}", tools=replace(HOPPER, fla=False))
    assert names == ["chunked"]
    assert "pip install 'gptattn[fla]'" in lines[0]


def test_a_named_backend_stays():
    for name in ("reference", "sdpa", "flex"):
        assert resolve(*WINDOW, f"attn.backend={name}") == ([name], [])
    assert resolve("attn=kda", "attn.backend=chunked") == (["chunked"], [])


def test_a_file_without_backend_gets_a_kernel_and_its_cpu_record_stays():
    cfg = settings(*SIZES, *WINDOW)
    bare = replace(cfg, attn={key: one for key, one in cfg.attn.items() if key != "backend"})
    assert resolve_backends(bare, torch.device("cpu")) == (bare, [])
    found, _ = resolve_backends(bare, torch.device("cuda"), HOPPER)
    assert found.attn == cfg.attn | {"backend": "flex"}


class OwnAttention(MultiHeadAttention):
    def __init__(self, d_in: int, d_out: int, context_length: int, num_heads: int) -> None:
        super().__init__(d_in, d_out, context_length, num_heads, window=5)


def test_a_mechanism_of_the_users_own_without_the_setting_gets_none():
    own = {"_target_": f"{__name__}.OwnAttention"}
    cfg = replace(settings(*SIZES), attn=own, allow_targets=(__name__,))
    assert resolve_backends(cfg, torch.device("cuda"), HOPPER)[0].attn == own


def test_a_run_records_the_kernels_and_their_versions(tmp_path):
    prepared = preflight(settings(*tiny(tmp_path, "attn=sliding", "match=params", "match_to=kda")))
    assert prepared.cfg.attn["backend"] == "sdpa"
    assert prepared.cfg.match_attn is not None
    assert prepared.cfg.match_attn["backend"] == "chunked"
    assert hash_kernels(prepared.cfg, "cpu") == {}
    for backend, packages in (("flex", {"triton"}), ("fla", {"triton", "fla"})):
        cfg = replace(prepared.cfg, attn={"backend": backend})
        assert hash_kernels(cfg, "cuda").keys() == packages
    assert hash_kernels(replace(prepared.cfg, compile=True), "cuda").keys() == {"triton"}


def test_results_of_two_versions_of_triton_are_told_apart():
    was, now = (Provenance("", "cuda", {"triton": f"version 3.{n}"}) for n in (6, 7))
    assert differences(was, now) == ["different code in triton"]
    assert was.digest != now.digest


def test_a_run_of_a_gpu_opens_on_a_machine_without_one(tmp_path):
    folder = save_untrained(tmp_path, "attn=sliding")
    expected = load_run(folder)
    recorded = yaml.safe_load((folder / "config.yaml").read_text())
    recorded["attn"]["backend"] = "flex"
    (folder / "config.yaml").write_text(yaml.safe_dump(recorded))
    ids = torch.arange(9)[None]
    assert torch.equal(load_run(folder).model(ids), expected.model(ids))
    assert count_caches(folder, [64]) is not None
