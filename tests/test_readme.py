"""The examples of a new variant and of a new part run, and do what their pages say."""

import re
import sys
from pathlib import Path
from types import ModuleType

import torch

from gptattn.attention import Attention
from gptattn.build.model import build_model, shared_arguments
from gptattn.settings.compose import settings
from gptattn.settings.construct import construct

ADDING = Path(__file__).parents[1] / "docs" / "add_a_variant.md"


def block(opening: str) -> str:
    """The code block of the page whose first line is `# opening`."""
    found = re.search(rf"```\w+\n# {re.escape(opening)}\n(.*?)```", ADDING.read_text(), re.DOTALL)
    assert found is not None, opening
    return found.group(1)


def test_the_example_variant_composes_builds_and_decodes(tmp_path, monkeypatch):
    module = ModuleType("gptattn.attention.variants.cosine")
    exec(block("gptattn/attention/variants/cosine.py"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "attn").mkdir()
    # Under a name of its own, so that whoever adds the example to the menu can test it.
    (tmp_path / "attn" / "example.yaml").write_text(block("conf/attn/cosine.yaml"))

    typed = settings([f"hydra.searchpath=[file://{tmp_path}]", "attn=example"])
    attention = construct("attn", typed.attn, shared_arguments(typed.model, typed.block), [])
    assert isinstance(attention, Attention)

    x_BTE = torch.randn(2, 7, typed.model.d_model)
    weights = attention.attention_weights(x_BTE)
    # Cosines lie in [-1, 1] and the scale is 10: no two weights of a row differ by more than e^20.
    seen = weights[:, :, -1]
    assert (seen.max(-1).values / seen.min(-1).values).log().max() <= 20
    cache = attention.new_cache(2, 7)
    steps = []
    for t in range(7):
        steps.append(attention(x_BTE[:, t : t + 1], cache))
        cache.advance(1)
    torch.testing.assert_close(torch.cat(steps, 1), attention(x_BTE), rtol=0, atol=1e-5)


def test_the_example_part_composes_with_every_number_of_heads(tmp_path, monkeypatch):
    module = ModuleType("gptattn.attention.parts.value_norm")
    exec(block("gptattn/attention/parts/value_norm.py"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "part").mkdir()
    yaml = block("conf/part/value_norm.yaml")
    (tmp_path / "part" / "value_norm.yaml").write_text(yaml)

    for variant in ("mha", "gqa", "mha_wrapper"):
        chosen = [f"attn={variant}", "part=[value_norm]"]
        typed = settings([f"hydra.searchpath=[file://{tmp_path}]", *chosen])
        model = build_model(typed, vocab_size=13)
        attention = model.layers()[0].attention
        x_BTE = torch.randn(1, 5, typed.model.d_model)
        v_BGSD = attention.encode(*attention.project(x_BTE), attention.begin(x_BTE, None, None))[2]
        # The mean square of a normed value is 1, but for the epsilon beside it.
        square = v_BGSD.pow(2).mean(-1)
        torch.testing.assert_close(square, torch.ones_like(square), rtol=0, atol=1e-4)
