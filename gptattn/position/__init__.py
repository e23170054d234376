"""Position encodings: what they do to embeddings (learned) or to queries and keys (rope). They
import `errors` and `machine` at most. Start reading at `base.py`.
"""

from gptattn.position.base import HeadPosition, InputPosition, Positions
from gptattn.position.learned import LearnedPosition
from gptattn.position.rope import RotaryPosition

__all__ = ["HeadPosition", "InputPosition", "LearnedPosition", "Positions", "RotaryPosition"]
