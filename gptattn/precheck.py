"""The checks of a run that need torch: its data, its model, its device. Leaves nothing behind."""

from dataclasses import replace

import torch

from gptattn.build import build_data, build_model
from gptattn.config import TrainConfig
from gptattn.data.tokenizer import encode_prompt
from gptattn.device import resolve_device


def check_buildable(cfg: TrainConfig) -> None:
    """Raise a UserError where the device, the data or the model of these settings cannot be."""
    resolve_device(cfg.trainer.accelerator)
    data = build_data(cfg)
    encode_prompt(data.tokenizer, cfg.sample.prompt)
    # On the meta device a layer of any size costs no memory; two of them tell of all the others.
    few = replace(cfg, model=replace(cfg.model, num_layers=min(cfg.model.num_layers, 2)))
    with torch.device("meta"):
        build_model(few, data.tokenizer.vocab_size)
