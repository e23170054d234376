"""The checks of a run that need torch: its device, model and data. Leaves no run folder."""

from dataclasses import dataclass, replace

import torch

from gptattn.build import build_data, build_model, check_vocabulary
from gptattn.checkpoint import KEPT
from gptattn.config import TrainConfig
from gptattn.convert import convert, initialise
from gptattn.cost import parameter_count
from gptattn.data.tokenizer import encode_prompt
from gptattn.device import check_precision, resolve_device, total_memory_bytes
from gptattn.errors import ConfigError
from gptattn.gpt import GPT
from gptattn.match import resolved

ROWS_BYTES = 1_000_000  # for settings, rows and TensorBoard's events; a small run writes a tenth
BYTES_PER_VALUE = {"64-true": 8, "bf16-true": 2}  # of a weight in the others: 4


@dataclass(frozen=True)
class Ready:
    """A run that can start: its settings, and what its folder will hold at once, at most."""

    cfg: TrainConfig
    bytes_on_disk: int


def prepared(cfg: TrainConfig, original: TrainConfig | None = None) -> Ready:
    """The run with the match made that its settings ask for.

    `original`: the settings of the run that `init_from` will name once it has been made. Raises a
    UserError where the device, the model, the data, the match or the conversion cannot be.
    """
    device = resolve_device(cfg.trainer.accelerator)
    check_precision(cfg.trainer.precision, device)
    # The data comes after, since it leaves its tokens in the cache.
    _check_memory(_parameters(cfg, vocab_size=1), device)
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
    cfg = resolved(cfg, tokenizer)[0]
    return Ready(cfg, _bytes_on_disk(cfg, tokenizer.vocab_size))


def _check_conversion(source: GPT, target: GPT) -> None:
    try:
        convert(source, target)
    except ConfigError as error:
        raise ConfigError("init_from", error.message) from error


def _bytes_on_disk(cfg: TrainConfig, vocab_size: int) -> int:
    if not cfg.checkpoint:
        return ROWS_BYTES
    values = 3 * _parameters(cfg, vocab_size)  # with AdamW's two averages
    checkpoints = min(cfg.validation.count, KEPT + 1)
    return ROWS_BYTES + checkpoints * BYTES_PER_VALUE.get(cfg.trainer.precision, 4) * values


def _parameters(cfg: TrainConfig, vocab_size: int) -> int:
    # On the meta device a layer of any size costs no memory; two of them tell of all the others.
    few = replace(cfg, model=replace(cfg.model, num_layers=min(cfg.model.num_layers, 2)))
    with torch.device("meta"):
        model = build_model(few, vocab_size)
    left = cfg.model.num_layers - len(model.layers())
    return parameter_count(model) + left * parameter_count(model.layers()[0])


def _check_memory(parameters: int, device: torch.device) -> None:
    """Refuse a model whose weights, gradients and AdamW's two averages alone are too much."""
    needs, there = 16 * parameters, total_memory_bytes(device)
    if needs > there:
        raise ConfigError(
            "model",
            f"{parameters:,} parameters need {needs / 1e9:,.0f} GB to train, and there are "
            f"{there / 1e9:,.0f}; take a smaller model",
        )
