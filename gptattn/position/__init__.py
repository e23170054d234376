"""Position encodings: applied to embeddings (learned, sinusoidal), to queries and keys (rope), or
to scores (alibi). This package may import `errors` and `machine`. Start reading at `base.py`.
"""

from gptattn.position.alibi import LinearBias
from gptattn.position.base import Documents, HeadPosition, InputPosition, Positions
from gptattn.position.learned import LearnedPosition
from gptattn.position.rope import RotaryPosition
from gptattn.position.sinusoidal import SinusoidalPosition
