"""Compiled blocks: when they are the default, one graph for each kind of layer, and their error.

Graphs are counted with Dynamo's backend "eager": what tells graphs apart is Dynamo's, not the
backend's.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partialmethod
from itertools import chain
from typing import Any

import pytest
import torch
from building import SMALL, build_gpt, class_of, menu, settings, slow_but
from support import config, losses, train
from sweeping import Launcher, sweep
from torch import Tensor, nn
from torch._dynamo.utils import counters

from gptattn.attention import MultiHeadAttention
from gptattn.attention.recurrence import RecurrentAttention
from gptattn.build.model import build_model, resolve_backends
from gptattn.machine.device import Toolchain, missing_compiler
from gptattn.model.gpt import GPT
from gptattn.settings.budget import Budget
from gptattn.settings.compose import settings as compose_settings
from gptattn.settings.config import TrainConfig
from gptattn.training.compiling import compile_blocks, compiling_pays_off, count_kinds

# By torch itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function:DeprecationWarning"),
]

IDS = torch.arange(144).reshape(2, 72) % 13
CONTEXT = "model.context_length=72"
DOCUMENTS = torch.tensor([[0] * 72, [0] * 5 + [1] * 67])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Keep what is compiled here out of other tests, and allow what a model asks for alone."""
    with torch._dynamo.config.patch(
        recompile_limit=0, fail_on_recompile_limit_hit=False, nested_graph_breaks=False
    ):
        torch._dynamo.reset()
        counters.clear()
        yield
        torch._dynamo.reset()


# When


def test_a_run_on_a_cpu_does_not_compile_unless_it_is_told_to(runs):
    assert config(runs("mha"))["compile"] is False


@pytest.mark.parametrize(
    ("model", "budget", "worth"),
    [
        (["model=gpt2_small"], Budget(1_000, None), True),
        (["model=gpt2_small"], Budget(900, None), False),
        (["model=gpt2_small"], Budget(0, None), False),  # it is only validated
        (["model=gpt2_small"], Budget(None, 60.0), True),
        (["model=gpt2_small"], Budget(None, 59.0), False),
        (["model=gpt2_small", "pattern=[sliding,mha]"], Budget(1_000, None), False),
        # Of two small layers, whose launches take the time.
        (["model=tiny"], Budget(15_100, None), True),
        (["model=tiny"], Budget(14_900, None), False),
    ],
)
def test_a_run_compiles_if_it_trains_four_times_as_long_as_that_takes(model, budget, worth):
    cfg = settings(*model, "batch_size=16")
    with torch.device("meta"):
        built = build_model(cfg, 50_304)
    flops_per_token = 8e8 if model[0] == "model=gpt2_small" else 1e6
    assert compiling_pays_off(cfg, built, budget, flops_per_token) == worth


@pytest.fixture
def planned_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (0, 1e12))
    monkeypatch.setattr("gptattn.training.preflight.resolve_device", lambda _: torch.device("cuda"))
    tools = Toolchain((9, 0), "", (3, 7, 1), fla=False)
    for room in ("build.model", "training.preflight"):
        monkeypatch.setattr(f"gptattn.{room}.find_toolchain", lambda device: tools)


def test_all_runs_of_a_sweep_compile_where_its_longest_does(
    tmp_path, monkeypatch, planned_on_a_gpu
):
    monkeypatch.setattr(
        "gptattn.training.preflight.compiling_pays_off",
        lambda cfg, model, budget, flops: budget.steps == 14,
    )
    known: list[tuple[int | None, bool]] = []

    def outcome(cfg) -> float:
        known.append((cfg.budget.steps, cfg.compile))
        return 2.0

    tune = {"lr": [1e-3], "seed": 0, "budget": 0.5}
    for _ in range(2):  # the second time they are done
        sweep(tmp_path, Launcher(outcome), "budget.steps=10,14", tune=tune)
        assert sorted(known) == [(5, True), (7, True), (10, True), (14, True)]


def test_a_sweeps_runs_use_the_kernels_of_the_machine_that_planned_it(tmp_path, planned_on_a_gpu):
    own = ["model.num_layers=2", "model.dropout=0.0", "trainer.precision=bf16-mixed"]
    own += ["pattern=[sliding,mha]", "model.d_model=64", "model.num_heads=4"]
    launcher = Launcher(lambda cfg: 2.0)
    sweep(tmp_path, launcher, *own, tune={"lr": [1e-3, 2e-3], "seed": 0})
    assert len(launcher.commands) == 3
    for command in launcher.commands:
        (given,) = (one for one in command if one.startswith("++sweep.backends="))
        cfg = compose_settings([*own, given])
        lacking = Toolchain((8, 0), "there is no C compiler", (0,), fla=False)
        found, notes = resolve_backends(cfg, torch.device("cuda"), lacking)
        assert [kind.attn["backend"] for kind in found.kinds()] == ["flex", "sdpa"]
        assert notes == [
            "pattern.sliding.backend=flex: as the sweep chose",
            "pattern.mha.backend=sdpa",
        ]
        assert given not in cfg.overrides


def test_what_auto_comes_to_is_not_trained_twice(tmp_path):
    launcher = Launcher(lambda cfg: 2.0)
    sweep(tmp_path, launcher, "attn.backend=auto,sdpa", "compile=auto,false", "seed=1,2")
    assert launcher.launched == [("mha", 1), ("mha", 2)]


def test_equal_variants_are_trained_once_and_those_of_other_texts_each(tmp_path):
    launcher = Launcher(lambda cfg: 2.0)
    texts = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for text in texts:
        text.write_text("All that is not a mistake is a gift. " * 200, encoding="utf-8")
    variants = [f"data.val_path={texts[0]}", f"attn.backend=sdpa data.val_path={texts[1]}"]
    sweep(tmp_path, launcher, "seed=1,1", variants=[*variants, variants[0]])
    assert launcher.launched == [("mha", 1), ("mha", 1)]


def test_a_variant_that_names_it_decides_for_no_other(tmp_path):
    known: dict[str, bool] = {}

    def outcome(cfg) -> float:
        known[cfg.variant] = cfg.compile
        return 2.0

    sweep(tmp_path, Launcher(outcome), variants=["attn=mha", "attn=gqa compile=true"])
    assert known == {"mha": False, "gqa": True}


# Graphs

KINDS = {
    "attn=cross_layer": 2,
    "attn=cross_layer attn.share=3 part=[value_residual,forget] position=none": 4,
    "attn=rwkv7": 2,
    "part=value_residual": 2,
    "pattern=[sliding,gqa,gqa]": 2,
}
MENU = [
    *KINDS,
    "attn=gated_deltanet attn.householders=2 attn.negative_eigenvalues=true",
    *(f"attn={name}" for name in menu("attn") if f"attn={name}" not in KINDS),
    *(f"attn=gqa part={name} position=none" for name in menu("part") if name != "value_residual"),
    *(f"position={name}" for name in menu("position")),
    *(f"recipe={name}" for name in menu("recipe")),
]
STATES = {n: class_of("attn", n) for n in menu("attn")}
STATES = {n: of for n, of in STATES.items() if issubclass(of, RecurrentAttention)}
OF_FLA = [f"attn={n}" for n, of in STATES.items() if not of.removes]
QUICK = ["attn=cross_layer", "attn=dsa"]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile with Dynamo alone, which takes a tenth of the time."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))


def count_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def build_compiled(*overrides: str) -> GPT:
    """Twelve small layers, compiled as a run would."""
    sizes = ("model.num_layers=12", "model.num_heads=4", "model.d_model=32", CONTEXT)
    model = build_gpt(*sizes, *overrides)
    compile_blocks(replace(settings(*SMALL, *sizes, *overrides), compile=True), model)
    return model


def take_step(model: GPT, documents: Tensor | None = None) -> None:
    """Compute the gradients of a step, then validate."""
    own: dict[str, list[Tensor]] = {}
    loss = model.train().loss(IDS, IDS, documents, losses=own)
    (loss + sum(chain(*own.values()))).backward()
    with torch.inference_mode():
        model.eval().loss(IDS, IDS, documents)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("variant", slow_but(QUICK, MENU))
def test_layers_of_a_kind_share_a_graph_in_training_and_one_in_validation(variant):
    model = build_compiled(*variant.split())
    cfg = settings("model.num_layers=12", *variant.split())
    kinds = KINDS.get(variant) or len({*(cfg.pattern or [""])})
    assert count_kinds(cfg, model) == kinds  # which decides whether it pays
    for _ in range(2):
        take_step(model)
        assert count_graphs() == 2 * kinds
    assert not counters["graph_break"]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("variant", slow_but(["attn=cross_layer"], [*KINDS, "attn=dsa"]))
def test_running_a_block_again_in_backward_takes_no_other_graph(variant):
    again = build_compiled(*variant.split(), "model.activation_checkpointing=true")
    take_step(again)
    assert count_graphs() == 2 * KINDS.get(variant, 1)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("variant", slow_but(["mha"], ["mha", "sliding", "mla", "gated_deltanet"]))
def test_documents_of_every_batch_take_no_other_graph(variant):
    model = build_compiled(f"attn={variant}")
    for documents in (DOCUMENTS, DOCUMENTS.flip(0), DOCUMENTS * 0):
        take_step(model, documents)
        assert count_graphs() == 2


@pytest.fixture
def fla_runs(fla: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Layers with backend=fla can be built, and call a kernel that is not right, but quick."""

    def kernel(name: str, **given: Any) -> tuple[Tensor, None]:
        assert not torch.is_autocast_enabled("cpu")
        return given["v"] * (given["q"] * given["k"]).sum(-1, keepdim=True), None

    init = RecurrentAttention.__init__

    def build(self: RecurrentAttention, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:  # no longer, or torch would look for one
            patch.setattr(torch.cuda, "is_available", lambda: True)
            init(self, *args)

    monkeypatch.setattr(RecurrentAttention, "__init__", build)
    monkeypatch.setattr("fla_kernels.kernel", kernel)
    monkeypatch.setattr("gptattn.attention.recurrence.is_gpu", lambda x: True)
    return fla


@pytest.mark.usefixtures("traced")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch cuts a layer in more pieces")
@pytest.mark.parametrize("variant", slow_but(["attn=kda"], [*OF_FLA, "recipe=qwen3_next"]))
@pytest.mark.parametrize("runs", slow_but([2], [2, 3]))
def test_an_fla_kernel_splits_a_layer_and_layers_share_document_bounds(runs, variant, fla_runs):
    again = f"model.activation_checkpointing={runs == 3}"  # which runs a layer again in backward
    model = build_compiled(*variant.split(), "attn.backend=fla", again)
    layers = sum(isinstance(block.attention, RecurrentAttention) for block in model.layers())
    # A layer that is not fla's has one in each mode.
    graphs = 2 * (2 if layers == len(model.layers()) else 3)
    for documents, bounds in (
        (DOCUMENTS, [0, 72, 77, 144]),
        (DOCUMENTS.flip(0), [0, 5, 72, 144]),
        (DOCUMENTS * 0, [0, 72, 144]),
    ):
        fla_runs.clear()
        take_step(model, documents)
        assert count_graphs() == graphs
        assert len(fla_runs) == runs * layers
        assert len({id(one) for one in fla_runs}) == 2  # in training, and in validation
        assert all(one.tolist() == bounds for one in fla_runs)


@pytest.mark.usefixtures("traced", "fla_runs")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="not equal with torch 2.11")
def test_a_layer_cut_in_two_computes_the_same():
    sizes = "model.num_layers=2", "model.num_heads=4", "model.d_model=32", CONTEXT
    cfg = settings("attn=gated_deltanet", "attn.backend=fla", *sizes)
    eager, compiled = (gradient(cfg, mixed=True, compiled=how) for how in (False, True))
    assert compiled.equal(eager)


@pytest.mark.usefixtures("traced")
def test_short_batches_samples_and_maps_compile_no_further_graph(tmp_path):
    eager, compiled = (
        train(tmp_path / how, "model.num_layers=2", f"compile={how}") for how in ("false", "true")
    )
    assert losses(compiled) == losses(eager)
    assert count_graphs() == 2


@pytest.mark.usefixtures("traced")
def test_numbers_that_differ_by_layer_end_a_run_instead_of_its_compilation():
    model = build_compiled("attn=mha")
    for layer, block in enumerate(model.layers()):
        block.dropout.p = layer / 100
    with pytest.raises(Exception, match="recompile_limit"):
        take_step(model)


class Scaled(MultiHeadAttention):
    """An attention of a user's own."""

    scale: float

    def forward(self, *args: Any) -> Tensor:
        return super().forward(*args) * self.scale


@pytest.mark.usefixtures("traced")
def test_each_layer_of_a_users_own_may_have_numbers_of_its_own():
    model = build_gpt("attn=mha", "model.num_layers=3", CONTEXT)
    for layer, block in enumerate(model.layers()):
        block.attention.__class__ = Scaled
        vars(block.attention)["scale"] = 1 / (1 + layer)
    compile_blocks(replace(settings("attn=mha", *SMALL), compile=True), model)
    take_step(model)
    assert count_graphs() == 6


# Numbers


def gradient(cfg: TrainConfig, *, mixed: bool, compiled: bool) -> Tensor:
    torch.manual_seed(0)
    model = build_model(cfg, 13)
    compile_blocks(replace(cfg, compile=compiled), model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = model.loss(IDS, IDS.flip(1))
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.slow
@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no compiler")
@pytest.mark.parametrize(
    "variant", ["attn=mha", "attn=gqa position=rope", "attn=sliding", "attn=mla", "attn=lightning"]
)
def test_compiled_gradients_are_as_near_to_float32_as_eager_ones(variant):
    sizes = ("model.num_heads=4", "model.d_model=64", CONTEXT)
    cfg = settings(*variant.split(), *sizes)
    exact = gradient(cfg, mixed=False, compiled=False)
    eager, compiled = (
        (gradient(cfg, mixed=True, compiled=how) - exact).norm() for how in (False, True)
    )
    assert 0 < compiled <= 1.2 * eager
