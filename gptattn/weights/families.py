"""The kinds of Hugging Face checkpoints that can be read and written."""

from pathlib import Path
from typing import Any

from gptattn.model.gpt import GPT
from gptattn.weights import gpt2, llama
from gptattn.weights.hugging_face import Family, is_checkpoint, read_config

FAMILIES = {family.name: family for family in (gpt2.FAMILY, llama.FAMILY)}


def family_of(folder: Path) -> Family | None:
    """Return the family of the checkpoint in `folder`, or None if that holds no checkpoint.

    Raises CheckpointError if its config.json is damaged or names another kind of model.
    """
    return read_config(folder, _named) if is_checkpoint(folder) else None


def _named(node: dict[str, Any]) -> Family:
    # GPT-2's own release has no such key.
    name = node.get("model_type", gpt2.FAMILY.name)
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"model_type is {name!r:.60}, but must be one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def write(folder: Path, model: GPT) -> None:
    """Write a Hugging Face folder: Llama's for a model with RMSNorm, else GPT-2's.

    Raises ConfigError, with the reason, if neither has such a model.
    """
    (llama if model.style.norm == "rms" else gpt2).write(folder, model)
