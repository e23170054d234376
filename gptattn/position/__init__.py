"""Position encodings: applied to embeddings (learned) or to queries and keys (rope). It may import
`errors` and `machine`. Start reading at `base.py`.
"""

from gptattn.position.base import HeadPosition, InputPosition, Positions
from gptattn.position.learned import LearnedPosition
from gptattn.position.rope import RotaryPosition

__all__ = ["HeadPosition", "InputPosition", "LearnedPosition", "Positions", "RotaryPosition"]
