"""Parts: small additions that any attention with heads can take, alone or together. Each file in
`conf/part` names the class of one, so a new part needs no line here.
"""

from gptattn.attention.parts.base import Part

__all__ = ["Part"]
