"""The norms and MLPs that a block can have, and an MLP's default width; free of torch."""

from typing import Literal

NormKind = Literal["layer", "rms"]
MLPKind = Literal["gelu", "relu2", "swiglu", "none"]


def default_width(mlp: str, d_model: int) -> int:
    """Return the hidden width of an MLP that has as many parameters as GPT-2's.

    4 * d_model for two matrices; 8/3 * d_model for SwiGLU's three, to the nearest multiple of 8.
    Source: Shazeer 2020, arXiv:2002.05202, sec. 2.
    """
    # In whole numbers: a run folder of others may hold a d_model beyond any float.
    return 4 * d_model if mlp != "swiglu" else max(8, 8 * ((d_model + 1) // 3))
