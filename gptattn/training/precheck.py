"""The checks of a run that need torch: its device, model and data. Leaves no run folder."""

from dataclasses import dataclass
from pathlib import Path

import torch

from gptattn.data.text import cache_folder
from gptattn.data.tokenizer import encode_prompt
from gptattn.data.tokens import TokenData
from gptattn.errors import ConfigError, DataError, DiskError
from gptattn.machine.device import check_precision, resolve_device, total_memory_bytes
from gptattn.machine.disk import free_bytes
from gptattn.model.cost import parameter_count
from gptattn.model.gpt import GPT
from gptattn.runs.checkpoint import KEPT
from gptattn.runs.folder import making_behind
from gptattn.settings.build import build_data, build_model, check_vocabulary
from gptattn.settings.config import TrainConfig
from gptattn.settings.identity import Making, code_for, making_of
from gptattn.settings.match import resolved
from gptattn.weights.convert import initialise, take_over

ROWS_BYTES = 1_000_000  # for settings, rows and TensorBoard's events; a small run writes a tenth
# Of its tokens, per byte of text: GPT-2's stand for four bytes or so each, and have two. Bytes and
# characters take more, up to 2.
TOKENS_BYTES = 0.5
BYTES_PER_VALUE = {"64-true": 8, "bf16-true": 2}  # of a weight in the others: 4


@dataclass(frozen=True)
class Ready:
    """A run that can start: its settings, and what its folder will hold at once, at most."""

    cfg: TrainConfig
    bytes_on_disk: int
    making: Making | None  # None: what it starts from has not been made yet


def check_run(cfg: TrainConfig, original: TrainConfig | None = None) -> Ready:
    """The run with the match made that its settings ask for.

    `original`: the settings of the run that `init_from` will name once it has been made. Raises a
    UserError where the device, the model, the data, the match or the conversion cannot be.
    """
    code_for(cfg)
    device = resolve_device(cfg.trainer.accelerator)
    check_precision(cfg.trainer.precision, device)
    # The data comes after, since it leaves its tokens in the cache.
    _check_memory(_parameters(cfg, vocab_size=1), device)
    data = _load_data(cfg)
    tokenizer, weights = data.tokenizer, None
    check_vocabulary(cfg, tokenizer.vocab_size)
    if cfg.sample.tokens and cfg.sample.prompt is not None:
        encode_prompt(tokenizer, cfg.sample.prompt)
    if cfg.init_from is not None:
        model = build_model(cfg, tokenizer.vocab_size)
        if original is None:
            weights = initialise(model, cfg)
        else:
            source = build_model(original, tokenizer.vocab_size)
            _check_conversion(source, original, model, cfg)
    cfg = resolved(cfg, tokenizer)[0]
    making = None
    if original is None:
        making = making_of(cfg, data.text_hash, device.type, weights, making_behind(cfg))
    return Ready(cfg, _bytes_on_disk(cfg, tokenizer.vocab_size), making)


def _load_data(cfg: TrainConfig) -> TokenData:
    """The run's data. Raises a UserError where its text is too large for the disk or the memory."""
    size, cache = _text_bytes(cfg), cache_folder(cfg.cache_dir)
    # Tokens that are there already need no room; which text a file is of, only reading it tells.
    held = sum(file.stat().st_size for file in cache.glob("*.tokens"))
    needs, free = int(TOKENS_BYTES * size), free_bytes(cache)
    if needs > max(free, held):
        raise DiskError(
            "cache_dir",
            f"the tokens of {size / 1e9:,.1f} GB of text take {needs / 1e9:,.1f} GB and more, and "
            f"{free / 1e9:,.1f} are free for {cache}; give another cache_dir, or less text by "
            "data.path or data.pattern",
        )
    try:
        return build_data(cfg)
    except MemoryError:
        there = total_memory_bytes(torch.device("cpu")) / 1e9
        raise DataError(
            "data",
            f"the memory ({there:,.0f} GB in all) is too small for this text; give less by "
            "data.path or data.pattern; tokenizer=byte takes the least",
        ) from None


def _text_bytes(cfg: TrainConfig) -> int:
    """The size of the files that the settings name; 0 for none, as loading will tell."""
    pattern = str(cfg.data.get("pattern") or "**/*")
    given = [cfg.data.get("path"), cfg.data.get("val_path")]
    try:
        roots = [Path(path).expanduser() for path in given if isinstance(path, str)]
        places = [[*root.glob(pattern)] if root.is_dir() else [root] for root in roots]
        return sum(file.stat().st_size for files in places for file in files if file.is_file())
    except (OSError, RuntimeError, ValueError, NotImplementedError):
        return 0


def _check_conversion(source: GPT, theirs: TrainConfig, target: GPT, ours: TrainConfig) -> None:
    try:
        take_over(source, theirs, target, ours)
    except ConfigError as error:
        raise ConfigError("init_from", error.message) from error


def _bytes_on_disk(cfg: TrainConfig, vocab_size: int) -> int:
    if not cfg.checkpoint:
        return ROWS_BYTES
    values = 3 * _parameters(cfg, vocab_size)  # with AdamW's two averages
    checkpoints = min(cfg.validation.count, KEPT + 1)
    return ROWS_BYTES + checkpoints * BYTES_PER_VALUE.get(cfg.trainer.precision, 4) * values


def _parameters(cfg: TrainConfig, vocab_size: int) -> int:
    # On the meta device a layer of any size costs no memory.
    with torch.device("meta"):
        return parameter_count(build_model(cfg, vocab_size))


def _check_memory(parameters: int, device: torch.device) -> None:
    """Refuse a model whose weights, gradients and AdamW's two averages alone are too much."""
    needs, there = 16 * parameters, total_memory_bytes(device)
    if needs > there:
        raise ConfigError(
            "model",
            f"{parameters:,} parameters need {needs / 1e9:,.0f} GB to train, and there are "
            f"{there / 1e9:,.0f}; take a smaller model",
        )
