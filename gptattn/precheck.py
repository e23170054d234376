"""The checks of a run that need torch: its data, its model, its device. Leaves nothing behind."""

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
    # On the meta device a model of any size costs no memory and next to no time.
    with torch.device("meta"):
        build_model(cfg, data.tokenizer.vocab_size)
