"""The examples of a new variant and of a new part run, and do what their pages say."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gptattn.build.model import build_model
from gptattn.cli.commands import check
from gptattn.settings.compose import settings

ADDING = Path(__file__).parents[1] / "docs" / "add_a_variant.md"


def block(opening: str) -> str:
    """The code block of the page whose first line is `# opening`."""
    found = re.search(rf"```\w+\n# {re.escape(opening)}\n(.*?)```", ADDING.read_text(), re.DOTALL)
    assert found is not None, opening
    return found.group(1)


@pytest.fixture
def use(tmp_path, monkeypatch):
    """Put the page's module and its YAML where a command finds them; return that override."""

    def put(module: str, file: str, name: str) -> str:
        own = ModuleType(module.replace("/", ".").removesuffix(".py"))
        exec(block(module), own.__dict__)
        monkeypatch.setitem(sys.modules, own.__name__, own)
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(block(file))
        return f"hydra.searchpath=[file://{tmp_path}]"

    return put


def test_the_example_variant_is_comparable_and_weighs_by_cosine(use, capsys):
    # Under a name of its own, so that whoever adds the example to the menu can test it.
    place = "gptattn/attention/variants/cosine.py", "conf/attn/cosine.yaml", "attn/example.yaml"
    given = [use(*place), "attn=example"]
    check.check(given)
    assert "example passed every check" in capsys.readouterr().out
    (w_BHTS,) = build_model(settings([*given, "model.num_layers=1"]), 13).attention_weights(
        torch.randint(13, (2, 7))
    )
    # Cosines lie in [-1, 1] and the scale is 10: no two weights of a row differ by more than e^20.
    seen = w_BHTS[:, :, -1]
    assert (seen.max(-1).values / seen.min(-1).values).log().max() <= 20


@pytest.mark.parametrize("variant", ["mha", "gqa", "mha_wrapper"])
def test_the_example_part_composes_with_every_number_of_heads(variant, use):
    place = "gptattn/attention/parts/value_norm.py", "conf/part/value_norm.yaml"
    given = use(*place, "part/value_norm.yaml")
    typed = settings([given, f"attn={variant}", "part=[value_norm]"])
    attention = build_model(typed, vocab_size=13).layers()[0].attention
    x_BTE = torch.randn(1, 5, typed.model.d_model)
    v_BGSD = attention.encode(*attention.project(x_BTE), attention.begin(x_BTE, None, None))[2]
    # The mean square of a normed value is 1, but for the epsilon beside it.
    square = v_BGSD.pow(2).mean(-1)
    torch.testing.assert_close(square, torch.ones_like(square), rtol=0, atol=1e-4)
