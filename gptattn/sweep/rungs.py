"""The sizes of a ladder: models that grow, each with training tokens in proportion.

Source: Hoffmann et al. 2022, arXiv:2203.15556, sec. 3: parameters and tokens grow together.
"""

import re
from collections.abc import Sequence

from gptattn.errors import ConfigError
from gptattn.settings.config import LadderConfig

FIELD = "ladder.sizes"


def rungs(ladder: LadderConfig) -> list[list[str]]:
    """Return the overrides of each size, smallest first: width, layers and budget.

    Raises ConfigError for a size that cannot be read, and unless parameters grow.
    """
    if ladder.sizes is None:
        return []
    sizes = [_size(text) for text in ladder.sizes]
    counts = [parameters(*size) for size in sizes]
    if not sizes or counts != sorted(set(counts)):
        raise ConfigError(
            FIELD, f"{_listed(ladder.sizes)} do not grow; give one or more, the smallest first"
        )
    return [
        [
            f"model.d_model={d_model}",
            f"model.num_layers={num_layers}",
            f"budget.tokens={round(ladder.tokens_per_parameter * count)}",
        ]
        for (d_model, num_layers), count in zip(sizes, counts, strict=True)
    ]


def parameters(d_model: int, num_layers: int) -> int:
    """Return the weights in the blocks of a GPT with multi-head attention, without biases.

    Source: Kaplan et al. 2020, arXiv:2001.08361, sec. 2.1.
    """
    return 12 * num_layers * d_model**2


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,3})", text)
    if found is None:
        raise ConfigError(
            FIELD, f"{text!r} is not a size; give model.d_model x model.num_layers, as 64x2"
        )
    return int(found[1]), int(found[2])


def _listed(sizes: Sequence[str]) -> str:
    return f"[{','.join(sizes)}]"
