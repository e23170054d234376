"""What the menu's YAML files say, and that all of the menu compiles."""

import inspect

import pytest
import torch
import yaml
from building import CONTRACT, chosen, class_of, menu, read_file, settings, slow_but
from support import losses, train

import gptattn.attention
from gptattn.build.model import build_model
from gptattn.machine.device import missing_compiler
from gptattn.machine.source_code import hash_code
from gptattn.settings.config import CONF
from gptattn.settings.construct import find_target


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group in ("attn", "part") for name in menu(group)]
)
def test_a_file_has_the_defaults_of_a_class_that_the_package_exports(group, name):
    spec, target = read_file(group, name), class_of(group, name)
    assert getattr(gptattn.attention, target.__name__) is target
    assert target.__name__ in dir(gptattn.attention)
    # Its code counts as its own file, however it is imported.
    own = hash_code([f"{target.__module__}.{target.__name__}"])
    assert hash_code([f"gptattn.attention.{target.__name__}"]) == own
    assert target.__module__ in own
    del spec["_target_"]
    defaults = {}
    for of in reversed(target.__mro__):  # `**common` passes on what a base class takes
        parameters = inspect.signature(of.__init__).parameters.values()
        defaults |= {p.name: p.default for p in parameters if p.default is not p.empty}
    defaults = {key: [*x] if isinstance(x, tuple) else x for key, x in defaults.items()}
    differing = {key for key, value in spec.items() if value != defaults[key]}
    # A file beside that of its class is the same mechanism with another number.
    assert len(differing) == (not target.__module__.endswith(f".{name}"))


@pytest.mark.parametrize(
    ("group", "name"), [(g, name) for g in ("data", "optim", "position") for name in menu(g)]
)
def test_a_file_and_a_constructor_agree_on_defaults(group, name):
    node = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    for spec in (node, node.get("matrices") or {}):
        if "_target_" in spec:
            takes = inspect.signature(find_target(group, spec, [])).parameters
            differing = {
                key
                for key, value in spec.items()
                if key in takes and takes[key].default not in (takes[key].empty, value)
            }
            assert differing == ({"held_out", "version"} if name == "package" else set())


@pytest.mark.parametrize("name", ["mla", "tpa"])
@pytest.mark.parametrize("model", slow_but({"tiny", "gpt2_small"}, menu("model")))
def test_defaults_that_are_ranks_fit_every_model(model, name):
    with torch.device("meta"):
        sizes = [f"model={model}", "position=rope", f"attn={name}"]
        layer = build_model(settings(*sizes), vocab_size=256).layers()[0].attention
    assert layer.new_cache(1, 1).nbytes < 4 * 2 * layer.d_out  # less than mha's


# Warnings of torch's own, in compiling.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no compiler")
@pytest.mark.slow
@pytest.mark.parametrize("variant", CONTRACT)
def test_compiled_training_has_the_losses_of_eager_training(variant, tmp_path):
    own = [*chosen(variant), "model.num_layers=2"]
    (_, eager), (_, compiled) = (
        zip(*losses(train(tmp_path / how, *own, f"compile={how}")), strict=True)
        for how in ("false", "true")
    )
    assert len(eager) == 6
    assert compiled == pytest.approx(eager, rel=1e-4)
