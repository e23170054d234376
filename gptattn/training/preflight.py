"""The checks of a run before it starts: its device, model, data and weights. They write no folder.

The run then uses the data, weights and costs found here: nothing is loaded or counted twice.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from gptattn.data.run_data import RunData
from gptattn.data.text import cache_folder
from gptattn.data.tokenizer import encode_prompt
from gptattn.errors import ConfigError, DataError, DiskError
from gptattn.machine.device import resolve_device, total_memory_bytes
from gptattn.machine.disk import free_bytes
from gptattn.model.cost import Cost, measure_cost
from gptattn.model.gpt import GPT
from gptattn.runs.checkpoint import KEPT
from gptattn.runs.folder import RunFolder
from gptattn.settings.build import (
    build_data,
    build_matrix_rule,
    build_model,
    build_tokenizer,
    check_vocabulary,
)
from gptattn.settings.config import TrainConfig, check
from gptattn.settings.construct import find_target
from gptattn.settings.identity import Making, code_for, making_of
from gptattn.settings.match import Match, resolved
from gptattn.weights.convert import Origin, begin_from, read_origin

ROWS_BYTES = 1_000_000  # for settings, rows and TensorBoard's events; a small run writes a tenth
# Bytes of the token file per byte of text. A GPT-2 token takes two bytes and stands for about four
# bytes of text. Byte and character tokens need more, up to 2.
TOKENS_BYTES = 0.5
WIDE = 384  # model.d_model from which bfloat16 products are faster, where a CPU has them
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

    cfg: TrainConfig  # with the match applied, and `auto` replaced
    match: Match | None
    device: torch.device
    data: RunData
    cost: Cost
    bytes_on_disk: int  # the most that its folder will hold at a time
    origin: Origin | None  # of init_from; None: random weights, or a checkpoint's
    making: Making
    note: str = ""  # what was chosen for `auto`


def preflight(cfg: TrainConfig, *, resumed: bool = False) -> Ready:
    """Check the run that these settings describe, and return it ready to start.

    `resumed`: its checkpoint has its weights, and init_from is not read. Raises a UserError if the
    device, the model, the data, the match or the conversion of weights is not possible.
    """
    code_for(cfg)  # before anything slow: a file edited meanwhile is not what was imported
    device = resolve_device(cfg.trainer.accelerator)
    cfg, note = _settled(cfg, device)
    if cfg.trainer.precision == "16-mixed" and device.type == "cpu":  # Lightning would use bfloat16
        raise ConfigError(
            "trainer.precision", "16-mixed needs a GPU; use bf16-mixed or 32-true on a CPU"
        )
    build_matrix_rule(cfg)
    for name, spec in cfg.logger.items():
        if spec:  # TensorBoard has none of its own where its settings are empty
            find_target(f"logger.{name}", spec, cfg.allow_targets)

    # The data comes after the model, since it takes longest and writes tokens to the cache.
    tokenizer = build_tokenizer(cfg)
    ids = tokenizer.vocab_size
    model = _outlined(cfg, ids or 1, device)  # 0: not known before the text is read
    if cfg.log_heads and not model.layers_with_maps():
        raise ConfigError(
            "log_heads",
            "no layer has attention weights to record; give log_heads=false, or another attention",
        )
    _check_text_fits(cfg)
    try:
        data = build_data(cfg, tokenizer)
    except MemoryError:
        there = total_memory_bytes(torch.device("cpu")) / 1e9
        raise DataError(
            "data",
            f"the memory ({there:,.0f} GB in all) is too small for this text; give less text by "
            "data.path or data.pattern, or use tokenizer=byte, which takes the least",
        ) from None
    check_vocabulary(cfg, tokenizer.vocab_size)
    if cfg.sample.tokens and cfg.sample.prompt is not None:
        encode_prompt(tokenizer, cfg.sample.prompt)

    cfg, match = resolved(cfg, tokenizer)
    if match is not None or tokenizer.vocab_size != ids:
        model = _outlined(cfg, tokenizer.vocab_size, device)
    origin = None
    if cfg.init_from is not None and not resumed:
        origin = read_origin(cfg)
        with warnings.catch_warnings():  # copying weights to the meta device does nothing
            warnings.filterwarnings("ignore", ".*no-op", UserWarning)
            begin_from(origin, model, cfg)
    weights = None if origin is None else origin.digest
    # What made the weights, if they are those of a run.
    start = None if cfg.init_from is None else RunFolder(Path(cfg.init_from).expanduser())
    behind = None if start is None else start.read_making()
    making = making_of(cfg, data.text_hash, device.type, weights, behind)
    cost = measure_cost(model.to(weight_dtype(cfg)), data.scored)
    size = ROWS_BYTES
    if cfg.checkpoint:  # the weights and AdamW's two averages
        size += min(cfg.validation.count, KEPT + 1) * weight_dtype(cfg).itemsize * 3 * cost.params
    return Ready(cfg, match, device, data, cost, size, origin, making, note)


def weight_dtype(cfg: TrainConfig) -> torch.dtype:
    """Return the dtype in which weights are stored: float32 under mixed precision."""
    mixed = cfg.trainer.precision.endswith("-mixed")
    return torch.float32 if mixed else DTYPES[cfg.trainer.precision]


def _settled(cfg: TrainConfig, device: torch.device) -> tuple[TrainConfig, str]:
    """Return the settings with `auto` replaced by what this machine has, and a line that says so.

    Processes: as many as torchrun or srun has started, else the GPUs that are there. Precision:
    bf16-mixed where the device has instructions for it and the model is wide enough to gain by it.
    """
    trainer, note = cfg.trainer, ""
    started = int(
        os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or 0
    )
    if trainer.devices == "auto":
        there = torch.cuda.device_count() if device.type == "cuda" else 1
        trainer = replace(trainer, devices=started or there)
    elif "TORCHELASTIC_RUN_ID" in os.environ and started != trainer.devices:
        raise ConfigError(
            "trainer.devices",
            f"is {trainer.devices}, but {started} processes have been started on this machine; "
            f"give trainer=ddp, or trainer.devices={started}",
        )
    if trainer.num_nodes == "auto":
        nodes = os.environ.get("SLURM_NNODES") or os.environ.get("GROUP_WORLD_SIZE") or 1
        trainer = replace(trainer, num_nodes=int(nodes))
    if device.type == "cuda" and int(trainer.devices) > torch.cuda.device_count():
        raise ConfigError(
            "trainer.devices",
            f"{trainer.devices} processes need as many GPUs, and there are "
            f"{torch.cuda.device_count()} here",
        )
    if trainer.precision == "auto":
        if device.type == "cuda":
            halves, why = torch.cuda.is_bf16_supported(), "this GPU"
        else:
            halves = _cpu_has_bfloat16() and cfg.model.d_model >= WIDE
            why = f"this CPU and model.d_model={cfg.model.d_model}"
        chosen = "bf16-mixed" if halves else "32-true"
        trainer = replace(trainer, precision=chosen)
        note = f"trainer.precision=auto: {chosen}, for {why}"
    settled = replace(cfg, trainer=trainer)
    check(settled)
    return settled, note


def _cpu_has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 matrices itself; false where that is unknown."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def _outlined(cfg: TrainConfig, vocab_size: int, device: torch.device) -> GPT:
    """Build the model on the meta device. Raises ConfigError if it cannot be built or trained."""
    with torch.device("meta"), _memory_limit(total_memory_bytes(device)):
        return build_model(cfg, vocab_size)


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


def _check_text_fits(cfg: TrainConfig) -> None:
    """Raise DiskError if the files that the settings name are too large for the cache's disk."""
    pattern = str(cfg.data.get("pattern") or "**/*")
    given = [cfg.data.get("path"), cfg.data.get("val_path")]
    try:
        roots = [Path(path).expanduser() for path in given if isinstance(path, str)]
        places = [[*root.glob(pattern)] if root.is_dir() else [root] for root in roots]
        size = sum(file.stat().st_size for files in places for file in files if file.is_file())
    except (OSError, RuntimeError, ValueError, NotImplementedError):
        return  # loading says what is wrong
    cache = cache_folder(cfg.cache_dir)
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
