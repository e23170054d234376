"""Which recipes fit: their caches, worked by hand, and sizes in words."""

import pytest

from gptattn.cli.commands import recipes
from gptattn.cli.commands.recipes import read_bytes


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


def test_a_size_is_in_bytes_or_has_a_unit():
    sizes = {"1000": 1000, "1.5MB": 1.5e6, "2GB": 2e9, "8kB": 8000, "1MiB": 2**20, "3G": 3e9}
    assert {text: read_bytes(text) for text in sizes} == sizes
