"""The names of the norms and MLPs that a block can have; settings read them without torch."""

from typing import Literal

NormKind = Literal["layer", "rms"]
MLPKind = Literal["gelu", "swiglu", "none"]
