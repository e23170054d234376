"""The checks of a run that need torch: its device, model and data. Leaves no run folder."""

from dataclasses import replace

import torch

from gptattn.build import build_data, build_model, check_vocabulary
from gptattn.config import TrainConfig
from gptattn.data.tokenizer import encode_prompt
from gptattn.device import resolve_device
from gptattn.match import matched


def prepared(cfg: TrainConfig) -> TrainConfig:
    """The settings with the match made that they ask for.

    Raises a UserError where the device, the model, the data or the match cannot be.
    """
    resolve_device(cfg.trainer.accelerator)
    # On the meta device a layer of any size costs no memory; two of them tell of all the others.
    # The data comes after, since it leaves its tokens in the cache.
    few = replace(cfg, model=replace(cfg.model, num_layers=min(cfg.model.num_layers, 2)))
    with torch.device("meta"):
        build_model(few, vocab_size=1)
    tokenizer = build_data(cfg).tokenizer
    check_vocabulary(cfg, tokenizer.vocab_size)
    if cfg.sample.tokens and cfg.sample.prompt is not None:
        encode_prompt(tokenizer, cfg.sample.prompt)
    return matched(cfg, tokenizer.vocab_size)[0]
