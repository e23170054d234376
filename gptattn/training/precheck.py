"""The checks of a run that need torch: its device, model and data. They write no run folder.

The run then uses the data, weights and costs found here: nothing is loaded or counted twice.
"""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from gptattn.data.run_data import RunData
from gptattn.data.text import cache_folder
from gptattn.data.tokenizer import Tokenizer, encode_prompt
from gptattn.errors import ConfigError, DataError, DiskError
from gptattn.machine.device import check_precision, resolve_device, total_memory_bytes
from gptattn.machine.disk import free_bytes
from gptattn.model.cost import Cost, measure_cost
from gptattn.model.gpt import GPT
from gptattn.runs.checkpoint import KEPT
from gptattn.runs.folder import making_behind
from gptattn.runs.tensor_file import DTYPES as SAVED_DTYPES
from gptattn.settings.build import (
    build_data,
    build_matrix_rule,
    build_model,
    build_tokenizer,
    check_vocabulary,
)
from gptattn.settings.config import TrainConfig
from gptattn.settings.identity import Making, code_for, making_of
from gptattn.settings.match import Match, resolved
from gptattn.training.precision import settled
trackers_of = lambda cfg: {}
from gptattn.weights.convert import Origin, begin_from, read_origin, take_over

ROWS_BYTES = 1_000_000  # for settings, rows and TensorBoard's events; a small run writes a tenth
# Bytes of the token file per byte of text. A GPT-2 token takes two bytes and stands for about four
# bytes of text. Byte and character tokens need more, up to 2.
TOKENS_BYTES = 0.5
DTYPES = {  # of matrix products, by trainer.precision
    "32-true": torch.float32,
    "64-true": torch.float64,
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
}


@dataclass(frozen=True)
class Ready:
    """A run that has passed its checks, and what they loaded and computed."""

    cfg: TrainConfig  # with the match applied
    match: Match | None
    device: torch.device
    data: RunData
    cost: Cost
    bytes_on_disk: int  # the most that its folder will hold at a time
    origin: Origin | None  # of init_from; None: random weights, a checkpoint's, or not made yet
    making: Making | None  # None: the run in init_from has not been made yet
    note: str = ""  # what was chosen for `auto`


def check_run(
    cfg: TrainConfig, original: TrainConfig | None = None, *, resumed: bool = False
) -> Ready:
    """Check the run that these settings describe, and return it ready to start.

    `original`: the settings of a run that is still to be made, whose weights this run will start
    from; only the conversion is checked. `resumed`: the run is resumed, so its checkpoint has its
    weights and init_from is not read. Raises a UserError if the device, the model, the data, the
    match or the conversion is not possible.
    """
    code_for(cfg)
    device = resolve_device(cfg.trainer.accelerator)
    check_precision(cfg.trainer.precision, device)
    build_matrix_rule(cfg)
    trackers_of(cfg)
    # The data comes after the model, since it takes longest and writes tokens to the cache.
    tokenizer = build_tokenizer(cfg)
    ids = tokenizer.vocab_size
    model = _on_meta(cfg, ids or 1, device)  # 0: not known before the text is read
    _check_heads_can_be_logged(cfg, model)
    data = _load_data(cfg, tokenizer)
    check_vocabulary(cfg, tokenizer.vocab_size)
    if cfg.sample.tokens and cfg.sample.prompt is not None:
        encode_prompt(tokenizer, cfg.sample.prompt)
    cfg, match = resolved(cfg, tokenizer)
    if match is not None or tokenizer.vocab_size != ids:
        model = _on_meta(cfg, tokenizer.vocab_size, device)
    cfg, note = settled(cfg, tokenizer.vocab_size)
    origin, making = None, None
    if original is not None:
        source = _on_meta(original, tokenizer.vocab_size, device)
        _check_conversion(source, original, model, cfg)
    else:
        if cfg.init_from is not None and not resumed:
            origin = read_origin(cfg)
            with _no_op_warning_silenced():
                begin_from(origin, model, cfg)
        weights = None if origin is None else origin.digest
        making = making_of(cfg, data.text_hash, device.type, weights, making_behind(cfg))
    if cfg.checkpoint:
        _check_can_be_saved(model)
    cost = measure_cost(model.to(weight_dtype(cfg)), data.scored)
    size = _bytes_on_disk(cfg, cost)
    return Ready(cfg, match, device, data, cost, size, origin, making, note)


def weight_dtype(cfg: TrainConfig) -> torch.dtype:
    """Return the dtype in which weights are stored: float32 under mixed precision."""
    mixed = cfg.trainer.precision.endswith("-mixed")
    return torch.float32 if mixed else DTYPES[cfg.trainer.precision]


def _on_meta(cfg: TrainConfig, vocab_size: int, device: torch.device) -> GPT:
    """Build the model on the meta device. Raises ConfigError if it cannot be built or trained."""
    with torch.device("meta"), _memory_limit(total_memory_bytes(device)):
        return build_model(cfg, vocab_size)


def _check_heads_can_be_logged(cfg: TrainConfig, model: GPT) -> None:
    if cfg.log_heads and not model.layers_with_maps():
        raise ConfigError(
            "log_heads",
            "no layer has attention weights to record; give log_heads=false, or another attention",
        )


def _check_can_be_saved(model: GPT) -> None:
    """Raise ConfigError for a parameter or buffer that a checkpoint cannot hold."""
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor) or value.dtype not in SAVED_DTYPES:
            what = value.dtype if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise ConfigError(
                "attn",
                f"{name} is {what}, which a checkpoint cannot hold; use another dtype, or "
                "register_buffer(..., persistent=False)",
            )
        steps = zip(value.stride(), value.shape, strict=True)
        if any(step == 0 and size > 1 for step, size in steps):
            raise ConfigError("attn", f"{name} is expanded: its elements share memory; clone() it")


@contextlib.contextmanager
def _memory_limit(available: int) -> Iterator[None]:
    """Raise ConfigError if weights, gradients and AdamW's averages exceed `available` bytes.

    It is raised while the model is being built, at the first parameter that does not fit: building
    the layers after it would take long.
    """
    seen: set[int] = set()  # a shared parameter is registered twice
    parameters = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal parameters
        if parameter is not None and id(parameter) not in seen:
            seen.add(id(parameter))
            parameters += parameter.numel()
        if 16 * parameters > available:
            raise ConfigError(
                "model",
                f"more than {parameters:,} parameters need {16 * parameters / 1e9:,.0f} GB to "
                f"train, and there are {available / 1e9:,.0f}; use a smaller model",
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _load_data(cfg: TrainConfig, tokenizer: Tokenizer) -> RunData:
    """Load the run's data. Raises a UserError if its text is too large for the disk or memory."""
    size, cache = _text_bytes(cfg), cache_folder(cfg.cache_dir)
    # Tokens cached earlier need no space. Which file belongs to this text is known only after
    # reading the text, so all files count.
    held = sum(file.stat().st_size for file in cache.glob("*.tokens"))
    needs, free = int(TOKENS_BYTES * size), free_bytes(cache)
    if needs > max(free, held):
        raise DiskError(
            "cache_dir",
            f"the tokens of {size / 1e9:,.1f} GB of text take {needs / 1e9:,.1f} GB or more, and "
            f"{free / 1e9:,.1f} are free for {cache}; give another cache_dir, or less text by "
            "data.path or data.pattern",
        )
    try:
        return build_data(cfg, tokenizer)
    except MemoryError:
        there = total_memory_bytes(torch.device("cpu")) / 1e9
        raise DataError(
            "data",
            f"the memory ({there:,.0f} GB in all) is too small for this text; give less text by "
            "data.path or data.pattern, or use tokenizer=byte, which takes the least",
        ) from None


def _text_bytes(cfg: TrainConfig) -> int:
    """Return the size of the files that the settings name; 0 if none, which loading reports."""
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
        with _no_op_warning_silenced():
            take_over(source, theirs, target, ours)
    except ConfigError as error:
        raise ConfigError("init_from", error.message) from error


@contextlib.contextmanager
def _no_op_warning_silenced() -> Iterator[None]:
    """Silence torch's warning that copying weights to the meta device does nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no-op", UserWarning)
        yield


def _bytes_on_disk(cfg: TrainConfig, cost: Cost) -> int:
    if not cfg.checkpoint:
        return ROWS_BYTES
    values = 3 * cost.params  # the weights and AdamW's two averages
    checkpoints = min(cfg.validation.count, KEPT + 1)
    return ROWS_BYTES + checkpoints * weight_dtype(cfg).itemsize * values
