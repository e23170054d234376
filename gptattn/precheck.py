"""The checks of a run that need torch: its device, model and data. Leaves no run folder."""

from dataclasses import replace

import torch

from gptattn.build import build_data, build_model, check_vocabulary
from gptattn.config import TrainConfig
from gptattn.convert import convert, initialise
from gptattn.cost import parameter_count
from gptattn.data.tokenizer import encode_prompt
from gptattn.device import resolve_device, total_memory_bytes
from gptattn.errors import ConfigError
from gptattn.gpt import GPT
from gptattn.match import resolved


def prepared(cfg: TrainConfig, original: TrainConfig | None = None) -> TrainConfig:
    """The settings with the match made that they ask for.

    `original`: the settings of the run that `init_from` will name once it has been made. Raises a
    UserError where the device, the model, the data, the match or the conversion cannot be.
    """
    device = resolve_device(cfg.trainer.accelerator)
    # On the meta device a layer of any size costs no memory; two of them tell of all the others.
    # The data comes after, since it leaves its tokens in the cache.
    few = replace(cfg, model=replace(cfg.model, num_layers=min(cfg.model.num_layers, 2)))
    with torch.device("meta"):
        _check_memory(cfg, build_model(few, vocab_size=1), device)
    tokenizer = build_data(cfg).tokenizer
    check_vocabulary(cfg, tokenizer.vocab_size)
    if cfg.sample.tokens and cfg.sample.prompt is not None:
        encode_prompt(tokenizer, cfg.sample.prompt)
    if cfg.init_from is not None:
        model = build_model(cfg, tokenizer.vocab_size)
        if original is None:
            initialise(model, cfg)
        else:
            _check_conversion(build_model(original, tokenizer.vocab_size), model)
    return resolved(cfg, tokenizer)[0]


def _check_conversion(source: GPT, target: GPT) -> None:
    try:
        convert(source, target)
    except ConfigError as error:
        raise ConfigError("init_from", error.message) from error


def _check_memory(cfg: TrainConfig, few: GPT, device: torch.device) -> None:
    """Refuse a model whose weights, gradients and AdamW's two averages alone are too much.

    `few` is the model with fewer layers; all layers are of one size.
    """
    block = parameter_count(few.layers()[0])
    parameters = parameter_count(few) + (cfg.model.num_layers - len(few.layers())) * block
    needs, there = 16 * parameters, total_memory_bytes(device)
    if needs > there:
        raise ConfigError(
            "model",
            f"{parameters:,} parameters need {needs / 1e9:,.0f} GB to train, and there are "
            f"{there / 1e9:,.0f}; take a smaller model",
        )
