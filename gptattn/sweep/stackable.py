"""Whether seeds of a variant can train as one model, which a user's own code may not bear."""

import warnings
from dataclasses import replace

import torch

from gptattn.errors import ConfigError
from gptattn.model.gpt import GPT
from gptattn.model.stacked import StackedGPT
from gptattn.settings.build import build_model
from gptattn.settings.config import TrainConfig

TOKENS, VOCABULARY = 16, 2  # of the step that is tried


def check_stackable(cfg: TrainConfig) -> None:
    """Try one step of two seeds. Raises ConfigError if they fail together alone.

    What fails in a model alone is no matter of `sweep.vectorize`: that error is raised as it is.
    """
    cfg = replace(cfg, model=replace(cfg.model, vocab_size=None))
    models = [_seeded(cfg, seed) for seed in (1, 2)]
    ids = torch.zeros(2, 1, min(TOKENS, cfg.model.context_length), dtype=torch.long)
    models[0].loss(ids[0], ids[0]).backward()
    try:
        with warnings.catch_warnings(action="ignore"):  # of what `vmap` does in a loop
            StackedGPT(models).losses(ids, ids).sum().backward()
    except Exception as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            "sweep.vectorize", f"seeds of {cfg.variant} cannot train as one model: {why}; use null"
        ) from error


def _seeded(cfg: TrainConfig, seed: int) -> GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_model(cfg, VOCABULARY)
