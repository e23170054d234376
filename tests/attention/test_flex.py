"""The backend `flex`: against the definition on a CPU, its graphs, and what it refuses.

Its own code refuses gradients on a CPU and holds all scores there, so the operator is traced, which
has both. Its kernels run on a GPU only.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from building import build_attention, class_of, settings, slow_but, takes
from contract import assert_agree, draw
from support import refuses
from torch import Tensor

from gptattn.attention import Rule, SoftmaxAttention, Span, attend, core
from gptattn.attention.core import by_flex, make_block_mask
from gptattn.attention.rule import Decay, place, visible
from gptattn.build.model import build_model, resolve_backends
from gptattn.machine.device import Toolchain
from gptattn.model.gpt import GPT
from gptattn.position import Documents

H, G, T, D = 6, 2, 150, 16
SINK_H = torch.linspace(-1, 1, H)
C_BHT = -torch.linspace(0, 3, T) * torch.linspace(0.5, 2, H)[None, :, None]
RULES = {
    "plain": Rule(0.3),
    "window and sink": Rule(0.3, window=37, sink_H=SINK_H),
    "chunk": Rule(0.3, chunk=40),
    "cap": Rule(0.3, softcap=0.8),
    "decay": Rule(0.3, decay=Decay(C_BHT, C_BHT)),
    "all": Rule(0.3, 37, 0.8, None, SINK_H, Decay(C_BHT, C_BHT)),
}
EVERY_RULE = pytest.mark.parametrize("name", slow_but({*RULES} - {"plain", "all"}, [*RULES]))
ONE = range(T)
SEVERAL = Documents(torch.tensor([[0] * 47 + [47] * (T - 47), [0] * T]))
POSITIONS = pytest.mark.parametrize("at", [ONE, SEVERAL], ids=["one", "several"])


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets layers on a CPU use flex, with gradients, in code that is traced."""
    monkeypatch.setattr(core, "GPUS", ("cpu",))
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    alone = torch.compile(torch_flex.flex_attention, backend="eager", dynamic=False)
    monkeypatch.setattr(core, "compile_alone", lambda *_, **options: alone)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


@EVERY_RULE
@POSITIONS
def test_flex_is_the_reference_in_outputs_and_gradients(name, at, traced):
    rule = RULES[name]
    inputs = [draw(2, heads, T, D).requires_grad_() for heads in (H, G, G)]
    sink_H, c = SINK_H.double().requires_grad_(), C_BHT.double().requires_grad_()
    decay = None if rule.decay is None else Decay(c, c)
    sink = None if rule.sink_H is None else sink_H
    rule = Rule(rule.scale, rule.window, rule.softcap, None, sink, decay, rule.chunk)
    mask = make_block_mask(T, (rule.window, rule.chunk), at, torch.device("cpu"))
    y = torch.compile(by_flex, backend="eager", fullgraph=True)(*inputs, rule, mask)
    expected = attend(*inputs, rule, at, at, backend="reference")
    of = [*inputs, *[sink_H] * (sink is not None), *[c] * (decay is not None)]
    # The gradient of its log-sum-exp has the digits of float32.
    assert_agree(y, expected, of, atol=1e-12 if sink is None else 1e-8)


@pytest.mark.parametrize("reach", [(None, None), (37, None), (1, None), (None, 40), (None, 1)])
@POSITIONS
def test_a_mask_hides_what_the_rule_hides(reach, at):
    window, chunk = reach
    rule, device = Rule(1.0, window, chunk=chunk), torch.device("cpu")
    mask = make_block_mask(T, reach, at, device)
    rows = 1 if at is ONE else 2
    dense = torch_flex.create_mask(mask.mask_mod, rows, 1, T, T, device)
    assert torch.equal(dense, visible(rule, *place(at, at, T, T, device)))
    # A block that is left out holds no pair.
    left_out = mask.to_dense()[..., None, :, None].expand(-1, -1, -1, 128, -1, 128) == 0
    left_out = left_out.flatten(4).flatten(2, 3)[..., :T, :T]
    assert not (dense & left_out).any()


def build_for_gpu(*overrides: str) -> tuple[GPT, int]:
    """A model of 12 layers with the backends of a GPU, and how many kinds of layers it has."""
    sizes = ("model.num_layers=12", "model.num_heads=2", "model.d_model=32", "model.dropout=0.0")
    more = ("model.context_length=150", "trainer.precision=bf16-mixed")
    cfg = settings(*overrides, *sizes, *more)
    model = build_model(cfg, 13)
    found, _ = resolve_backends(cfg, torch.device("cuda"), Toolchain((9, 0), "", (3, 7, 1), True))
    for layer, block in enumerate(model.layers()):
        block.attention.backend = found.layer(layer).attn["backend"]
    return model, len(cfg.kinds())


MODELS = {
    "window": ("attn=sliding", "position=rope"),
    "alibi": ("attn=mha", "position=alibi"),
    "latent": ("attn=mla", "attn.window=37", "position=rope"),
    "products": ("attn=tpa", "part=[softcap]"),
    "heads one by one": ("attn=mha_wrapper", "attn.window=37"),
    "pairs": ("attn=differential", "part=[sink]"),
    "caps": ("recipe=gemma2",),
    "chunks": ("recipe=llama4",),
    "sinks": ("recipe=gpt_oss",),
    "documents": ("attn=gqa", "attn.window=37", "data.mask_documents=true"),
    "two kinds of documents": ("recipe=gemma3", "data.mask_documents=true"),
}


@pytest.mark.parametrize("name", slow_but({"documents"}, [*MODELS]))
@torch.no_grad()
def test_compiled_layers_of_a_kind_share_one_graph_with_flex_in_it(name, traced):
    model, kinds = build_for_gpu(*MODELS[name])
    fused = []

    def note(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        fused.append(any("flex_attention" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    for block in model.layers():
        block.compile(backend=note, fullgraph=True, dynamic=False)
    for cut in (40, 90):
        documents_BT = (torch.arange(150) >= cut).long()[None] if "documents" in name else None
        with torch.autocast("cpu", torch.bfloat16):
            model.hidden(torch.zeros(1, 150, dtype=torch.long), None, documents_BT)
    assert fused == [True] * kinds if name != "chunks" else [True, False]


@torch.no_grad()
def test_compiled_eager_and_cached_models_compute_the_same(traced):
    model, _ = build_for_gpu("attn=gqa", "attn.window=37", "position=alibi")
    ids = torch.randint(13, (2, 150))
    for block in model.layers():
        block.compile(backend="eager", fullgraph=True)
    found = [model.hidden(ids)]
    with torch.compiler.set_stance("force_eager"):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found.append(model.hidden(ids))
        # flex runs, compiled once for all layers.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
        found.append(model.hidden(ids, model.new_cache(2)))
        for block in model.layers():
            block.attention.backend = "reference"
        expected = model.hidden(ids)
    for one in found:
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("groups", [2, 6])
def test_differential_attention_in_one_call_is_the_definition(groups, monkeypatch):
    layer = build_attention("differential", num_kv_heads=groups, backend="sdpa").double()
    x = draw(2, 11, 30).requires_grad_()
    expected = layer(x)
    monkeypatch.setattr(core, "GPUS", ("cpu",))
    assert_agree(layer(x), expected, [x, *layer.parameters()])


def test_what_flex_cannot_do_is_refused_in_one_line():
    def bias(query: Span, key: Span) -> Tensor:
        return query.pos - key.pos

    q, k, v = (draw(2, heads, T, D) for heads in (H, G, G))
    with torch.no_grad(), pytest.raises(ValueError, match="bias"):
        attend(q, k, v, Rule(1.0, bias=bias), backend="flex")
    with torch.no_grad(), pytest.raises(ValueError, match="dropout"):
        attend(q, k, v, Rule(1.0), dropout=0.1, backend="flex")


def test_flex_is_refused_at_construction_without_a_gpu_or_with_dropout(variant, monkeypatch):
    if not takes(variant, "backend") or not issubclass(class_of("attn", variant), SoftmaxAttention):
        pytest.skip("has no such backend")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refuses("*: CUDA"):
        build_attention(variant, backend="flex")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if takes(variant, "topk"):
        with refuses("*: compute"):
            build_attention(variant, backend="flex")
        return
    build_attention(variant, backend="flex")
    with refuses("*: dropout"):
        build_attention(variant, backend="flex", dropout=0.1)
