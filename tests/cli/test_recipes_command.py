"""Which recipes fit: their caches, worked by hand."""

import pytest

from gptattn.cli.commands import recipes


@pytest.mark.slow
def test_recipes_that_fit_are_listed_cheapest_first(call, monkeypatch):
    monkeypatch.setattr(recipes, "list_recipes", lambda: ["gemma3", "gpt2", "llama3"])
    code, out, err = call("recipes", "cache_bytes=163840", "context=128")
    assert (code, err) == (0, "")
    _, *rows, others = out.splitlines()
    # Ten layers, 16 numbers to a head, keys and values, two bytes each: two heads of 128 tokens.
    # Gemma 3 keeps 8 tokens in nine of the layers; GPT-2 has four heads.
    assert [row.split()[:2] for row in rows] == [["gemma3", "25,600"], ["llama3", "163,840"]]
    assert rows[0].endswith("9 window, 1 full")
    assert others == "too large: gpt2 (327,680)"
