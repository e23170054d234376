"""Checks a run's device, model, data and weights before it starts; no folder is written.

The run then uses the model, data and costs from here: nothing is built, loaded or counted twice.
"""

import math
import os
import warnings
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gptattn.build.data import build_data, build_tokenizer
from gptattn.build.longer import build_longer
from gptattn.build.match import apply_match
from gptattn.build.model import build_matrix_rule, build_model, resolve_backends
from gptattn.data.run_data import RunData
from gptattn.errors import ConfigError
from gptattn.machine.device import (
    DTYPES,
    find_toolchain,
    missing_compiler,
    resolve_device,
    seed_everything,
)
from gptattn.model.cost import Cost, measure_cost
from gptattn.model.gpt import GPT
from gptattn.optim.matrix_rule import MatrixRule
from gptattn.runs.checkpoint import KEPT, RunState
from gptattn.runs.folder import RunFolder
from gptattn.runs.load import use_plain_kernels
from gptattn.runs.resume import find_resume_point
from gptattn.settings.budget import Budget, resolve_budget
from gptattn.settings.config import TrainConfig, TrainerConfig, check
from gptattn.settings.construct import bind, construct, find_target
from gptattn.settings.identity import Provenance, hash_code_for, hash_kernels
from gptattn.training.compiling import compiling_pays_off, uses_backend
from gptattn.weights.init_from import begin_from, read_origin

if TYPE_CHECKING:
    from lightning.pytorch import Callback

ROWS_BYTES = 1_000_000  # of settings, rows and TensorBoard events; a small run writes a tenth


@dataclass(frozen=True)
class PreparedRun:
    """A run that has passed its checks, and what they loaded and computed."""

    cfg: TrainConfig  # with the match applied, and `auto` replaced
    device: torch.device
    model: GPT  # with its first weights
    longer: GPT  # on the same weights, for the longest of `validation.lengths`
    data: RunData
    cost: Cost
    budget: Budget
    bytes_on_disk: int  # the most that its folder will ever hold
    source: Path | None  # the checkpoint that it resumes from
    state: RunState  # what it has done so far, which its callbacks update
    matrices: MatrixRule | None  # of `optim.matrices`
    callbacks: "list[Callback]"  # those of `trainer.callbacks`
    notes: list[str]  # on kernels and validation
    provenance: Provenance

    def costs(self) -> dict[str, float | None]:
        """Return the fields of `cost` by the names of their metrics, `cost/...`."""
        return {f"cost/{name}": value for name, value in asdict(self.cost).items()}


def preflight(
    cfg: TrainConfig, resumes: RunFolder | None = None, *, shapes_only: bool = False
) -> PreparedRun:
    """Check the run that these settings describe, and return it ready to start.

    `resumes`: the folder of a run to resume; if it has a checkpoint, init_from is not read.
    `shapes_only`: the run will start elsewhere, so its model gets only shapes, which takes no time.
    Raises a UserError if the device, model, data, match or weights do not allow the run.
    """
    code = hash_code_for(cfg)  # first: a file edited meanwhile is not what was imported
    device = resolve_device(cfg.trainer.accelerator)
    cfg = replace(cfg, trainer=count_processes(cfg.trainer, device))
    check(cfg)
    precision = cfg.trainer.precision
    if precision == "16-mixed" and device.type == "cpu":  # Lightning would use bfloat16
        raise ConfigError("trainer.precision", "16-mixed needs a GPU; use bf16-mixed or 32-true")
    if cfg.compile is True and (lacking := missing_compiler(device)) is not None:
        raise ConfigError("compile", f"needs a {lacking} compiler; install one, or use false")
    matrices = build_matrix_rule(cfg)
    check_trackers(cfg)
    callbacks = build_callbacks(cfg)
    cfg, notes = resolve_backends(cfg, device)
    # Breaking a block's graph changes its gradients with torch 2.11, but not with 2.13.
    cuts_badly = torch.__version__ < "2.13" and uses_backend(cfg, "fla")
    if cfg.compile is True and cuts_badly:
        raise ConfigError("compile", "needs torch 2.13 for layers with backend=fla; use false")
    # The data comes after the model, since it takes longest and writes tokens to the cache, unless
    # the vocabulary comes from the text.
    tokenizer = build_tokenizer(cfg)
    data = None if tokenizer.vocab_size else build_data(cfg, tokenizer)
    if cfg.match != "none":
        cfg = apply_match(cfg, tokenizer.vocab_size)
    model = make_model(cfg, tokenizer.vocab_size, device, shapes_only)
    source, state = None, RunState()
    if resumes is not None:
        source, state = find_resume_point(resumes, cfg, model)
    data = data or build_data(cfg, tokenizer)
    requested = cfg.validation.lengths
    lengths = sorted({*requested, cfg.model.context_length}) if requested else []
    validation = replace(cfg.validation, tokens=data.val_limit, lengths=lengths)
    cfg = replace(cfg, tokenizer=cfg.tokenizer | tokenizer.settings(), validation=validation)
    weights_origin = None, ""
    if cfg.init_from is not None and source is None:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*no-op", UserWarning)  # copying without values
            origin = read_origin(cfg)  # builds a model, with random weights at first
            begin_from(origin, model, cfg)
        weights_origin = origin.digest, origin.made_by
    longer = model if shapes_only else lengthen(cfg, model, notes)

    stored = torch.float32 if precision.endswith("-mixed") else DTYPES[precision]
    cost = measure_cost(model.to(stored), data.scored)
    tokens_per_step = cfg.batch_size * cfg.model.context_length
    checkpoints = min(cfg.validation.count, KEPT + 1) if cfg.checkpoint else 0
    size = 3 * stored.itemsize * cost.params  # of the weights and AdamW's two averages
    budget = resolve_budget(cfg.budget, tokens_per_step, cost.flops_per_token)
    if cfg.compile == "auto":
        able = device.type == "cuda" and not (cuts_badly or find_toolchain(device).missing)
        cfg = replace(
            cfg, compile=able and compiling_pays_off(cfg, model, budget, cost.flops_per_token)
        )
    kernels = hash_kernels(cfg, device.type)
    return PreparedRun(
        cfg=cfg,
        device=device,
        model=model,
        longer=longer,
        data=data,
        cost=cost,
        budget=budget,
        bytes_on_disk=ROWS_BYTES + checkpoints * size,
        source=source,
        state=state,
        matrices=matrices,
        callbacks=callbacks,
        notes=[*notes, *(f"{name}: {installed}" for name, installed in kernels.items())],
        provenance=Provenance(data.text_hash, device.type, code | kernels, *weights_origin),
    )


def count_processes(trainer: TrainerConfig, device: torch.device) -> TrainerConfig:
    """Return the settings with numbers in place of `auto`.

    These are the processes that torchrun or srun started; without them, one per GPU, or one on a
    CPU. Raises ConfigError for a number other than was started, or for more than there are GPUs.
    """
    gpus = torch.cuda.device_count() if device.type == "cuda" else None
    started = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE")
    nodes = os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("SLURM_NNODES") or 1
    if trainer.devices == "auto":
        trainer = replace(trainer, devices=int(started or gpus or 1))
    if nodes == 1 and trainer.num_nodes not in (1, "auto"):  # it would wait for the others
        raise ConfigError("trainer.num_nodes", "needs torchrun or srun; start the run with either")
    if "TORCHELASTIC_RUN_ID" in os.environ and trainer.devices != int(started or 1):
        has = f"is {trainer.devices}, but torchrun has started {started}"
        raise ConfigError("trainer.devices", f"{has}; use trainer=ddp, or give {started}")
    if gpus is not None and int(trainer.devices) > gpus:
        message = f"{trainer.devices} processes need as many GPUs; give at most {gpus}"
        raise ConfigError("trainer.devices", message)
    return replace(trainer, num_nodes=int(nodes)) if trainer.num_nodes == "auto" else trainer


def check_trackers(cfg: TrainConfig) -> None:
    """Raise ConfigError for a tracker whose library is missing or whose arguments are wrong."""
    for name, spec in cfg.logger.items():
        if spec:  # empty settings are TensorBoard's
            field = f"logger.{name}"
            library = find_target(field, spec, cfg.allow_targets).__module__.rpartition(".")[2]
            if library in ("wandb", "mlflow") and find_spec(library) is None:
                message = f"{name} needs {library}; pip install 'gptattn[{library}]'"
                raise ConfigError("logger", message)
            bind(field, spec, {}, cfg.allow_targets)


def build_callbacks(cfg: TrainConfig) -> "list[Callback]":
    """Build the callbacks of `trainer.callbacks`. Raises ConfigError, naming the field."""
    if not cfg.trainer.callbacks:
        return []
    from lightning.pytorch import Callback  # slow to import
    from lightning.pytorch.callbacks import Checkpoint

    named = {f"trainer.callbacks.{name}": one for name, one in cfg.trainer.callbacks.items()}
    callbacks = {n: construct(n, one, {}, cfg.allow_targets, Callback) for n, one in named.items()}
    for name, one in callbacks.items():
        if isinstance(one, Checkpoint):
            raise ConfigError(name, "saves checkpoints, which every run does anyway; leave it out")
    return [*callbacks.values()]


def make_model(cfg: TrainConfig, vocab_size: int, device: torch.device, shapes_only: bool) -> GPT:
    """Build the model on the CPU with this seed's random weights, or, with `shapes_only`, none.

    Raises ConfigError if it cannot be built, or does not fit in the device's memory for training.
    """
    available = math.inf
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[1]
    elif hasattr(os, "sysconf"):  # not on Windows
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with torch.device("meta"):
            shapes = build_model(cfg, vocab_size)
    except RuntimeError:  # a constructor reads values, which shapes alone do not have
        shapes = build_model(cfg, vocab_size)
    # Weights, gradients, AdamW's averages.
    if 16 * sum(parameter.numel() for parameter in shapes.parameters()) > available:
        message = f"needs more than the {available / 1e9:,.0f} GB in total; use a smaller one"
        raise ConfigError("model", message)
    seed_everything(cfg.seed)
    return shapes if shapes_only else build_model(cfg, vocab_size)


def lengthen(cfg: TrainConfig, model: GPT, notes: list[str]) -> GPT:
    """Return a model that reads rows of all `validation.lengths`; add notes about these.

    It is the given model if no length exceeds the trained one, or if its weights allow no other.
    """
    trained, lengths = cfg.model.context_length, cfg.validation.lengths
    try:
        longer = build_longer(use_plain_kernels(cfg), model, max(lengths, default=0))
    except ConfigError as error:
        longer, why = model, error.message.partition(";")[0]
        notes.append(f"validation.lengths: measured only up to {trained}: {why}")
    if more := sum(n for n in {*lengths} - {trained} if n <= longer.context_length):
        factor = f"{1 + more / trained:.3g} times as many tokens as with length {trained} alone"
        notes.append(f"validation.lengths: a validation reads {factor}")
    return longer
