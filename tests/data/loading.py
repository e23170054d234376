"""Loads the data of small texts, as a run does."""

from pathlib import Path
from typing import Any

from gptattn.data.run_data import Request, Source
from gptattn.data.text import PlainText
from gptattn.data.tokenizer import ByteTokenizer, Tokenizer
from gptattn.data.tokens import TokenData


def request(cache: Path, tokenizer: Tokenizer | None = None, **given: Any) -> Request:
    """What a run with a context of 8 tokens asks; `given`: other fields of the request."""
    settings: dict[str, Any] = {
        "context_length": 8,
        "val_fraction": 0.1,
        "mask_documents": False,
        "data_name": "data=text",
        "tokenizer_name": "byte",
    }
    return Request(tokenizer=tokenizer or ByteTokenizer(), cache=cache, **settings | given)


def load(
    source: Source | str, cache: Path, tokenizer: Tokenizer | None = None, **given: Any
) -> TokenData:
    """Load a source, or a single text."""
    found = PlainText([source]) if isinstance(source, str) else source
    data = found.load(request(cache, tokenizer, **given))
    assert isinstance(data, TokenData)
    return data


def read_sides(data: TokenData) -> tuple[str, str]:
    """The text that is trained on, and the text that is scored."""
    decode = data.tokenizer.decode
    return decode(data.train[:]), decode(data.val[1:])
