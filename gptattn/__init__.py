"""gptattn: which attention should my GPT use, what does it cost, and how sure are we?"""

__version__ = "0.1.0"
