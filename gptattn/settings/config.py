"""The settings of a run, typed and checked. Values live in `conf/`; here are no defaults.

The open groups (attn, position, data, tokenizer) hold a `_target_` and its arguments; their keys
are checked against the target's signature in `build.py`.
"""

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Optional, get_args

from gptattn.errors import ConfigError

# Optional[...], not X | None: these classes are read by OmegaConf as schemas.
Spec = dict[str, Any]


@dataclass
class ModelConfig:
    num_layers: int
    num_heads: int
    d_model: int
    context_length: int
    d_mlp: Optional[int]  # noqa: UP045
    dropout: float
    qkv_bias: bool
    vocab_size: Optional[int]  # noqa: UP045


@dataclass
class OptimConfig:
    lr: float
    final_lr_fraction: float
    warmup_fraction: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip: float


@dataclass
class BudgetConfig:
    steps: Optional[int]  # noqa: UP045
    tokens: Optional[int]  # noqa: UP045
    seconds: Optional[float]  # noqa: UP045
    flops: Optional[float]  # noqa: UP045
    default_steps: int


@dataclass
class ValidationConfig:
    fraction: float
    count: int


@dataclass
class SampleConfig:
    prompt: Optional[str]  # noqa: UP045
    tokens: int
    temperature: float
    top_k: Optional[int]  # noqa: UP045


@dataclass
class TrainerConfig:
    accelerator: str
    precision: str
    threads: Optional[int]  # noqa: UP045


@dataclass
class SweepConfig:
    jobs: Optional[int]  # noqa: UP045
    fresh: bool
    keep_stale: bool


@dataclass
class TrainConfig:
    choices: dict[str, str]
    experiment_name: str
    seed: int
    batch_size: int
    accumulate: int
    loss_chunk_tokens: Optional[int]  # noqa: UP045
    compile: bool
    log_every: int
    log_heads: bool
    hang_seconds: Optional[float]  # noqa: UP045
    checkpoint: bool
    cache_dir: Optional[str]  # noqa: UP045
    allow_targets: list[str]
    init_from: Optional[str]  # noqa: UP045
    init_method: str
    match: str
    match_to: str
    match_attn: Optional[Spec]  # noqa: UP045
    match_before: Optional[int]  # noqa: UP045
    attn: Spec
    position: Spec
    data: Spec
    tokenizer: Spec
    model: ModelConfig
    optim: OptimConfig
    budget: BudgetConfig
    validation: ValidationConfig
    sample: SampleConfig
    trainer: TrainerConfig
    sweep: SweepConfig

    @property
    def variant(self) -> str:
        """The name of the attention's file in conf/attn."""
        return self.choices["attn"]


PRECISIONS = ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"]
InitMethod = Literal["mean", "first", "random"]
INIT_METHODS: list[str] = list(get_args(InitMethod))
MATCHES = ["none", "params", "flops", "kv_cache"]
ACCELERATORS = ["auto", "cpu", "gpu"]


def check(cfg: TrainConfig) -> None:
    """Raise ConfigError, naming the field, for the first value that cannot work."""
    positive = {
        "model.num_layers": cfg.model.num_layers,
        "model.num_heads": cfg.model.num_heads,
        "model.d_model": cfg.model.d_model,
        "model.context_length": cfg.model.context_length,
        "model.d_mlp": cfg.model.d_mlp,
        "model.vocab_size": cfg.model.vocab_size,
        "batch_size": cfg.batch_size,
        "accumulate": cfg.accumulate,
        "loss_chunk_tokens": cfg.loss_chunk_tokens,
        "match_before": cfg.match_before,
        "log_every": cfg.log_every,
        "hang_seconds": cfg.hang_seconds,
        "optim.lr": cfg.optim.lr,
        "optim.eps": cfg.optim.eps,
        "optim.grad_clip": cfg.optim.grad_clip,
        "budget.steps": cfg.budget.steps,
        "budget.tokens": cfg.budget.tokens,
        "budget.seconds": cfg.budget.seconds,
        "budget.flops": cfg.budget.flops,
        "budget.default_steps": cfg.budget.default_steps,
        "validation.count": cfg.validation.count,
        "sample.temperature": cfg.sample.temperature,
        "sample.top_k": cfg.sample.top_k,
        "trainer.threads": cfg.trainer.threads,
        "sweep.jobs": cfg.sweep.jobs,
    }
    if cfg.init_from is not None and cfg.budget.steps == 0:
        del positive["budget.steps"]  # weights from elsewhere can be validated as they are
    for field, value in positive.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(field, f"{value} is not a positive number; give one above 0")
    for field, value in {
        "seed": cfg.seed,
        "sample.tokens": cfg.sample.tokens,
        "optim.weight_decay": cfg.optim.weight_decay,
    }.items():
        if not 0 <= value < math.inf:
            raise ConfigError(field, f"{value} is negative or not finite; give 0 or more")
    for field, value in {
        "model.dropout": cfg.model.dropout,
        "optim.warmup_fraction": cfg.optim.warmup_fraction,
        "optim.beta1": cfg.optim.beta1,
        "optim.beta2": cfg.optim.beta2,
    }.items():
        if not 0 <= value < 1:
            raise ConfigError(field, f"{value} is out of range; give 0 or more, below 1")
    if not 0 <= cfg.optim.final_lr_fraction <= 1:
        raise ConfigError(
            "optim.final_lr_fraction", f"{cfg.optim.final_lr_fraction} is out of range; 0 to 1"
        )
    if not 0 < cfg.validation.fraction < 1:
        raise ConfigError(
            "validation.fraction",
            f"{cfg.validation.fraction} is out of range; give a share above 0 and below 1",
        )
    if cfg.sample.temperature < 1e-3:
        raise ConfigError(
            "sample.temperature",
            f"{cfg.sample.temperature} is too small; give 0.001 or more, or sample.top_k=1",
        )
    for field, value, most in (
        ("seed", cfg.seed, 2**32 - 1),
        ("batch_size", cfg.batch_size, 2**20),
        ("model.num_layers", cfg.model.num_layers, 1_000),
        ("model.num_heads", cfg.model.num_heads, 2**20),
        ("model.d_model", cfg.model.d_model, 2**20),
        ("model.d_mlp", cfg.model.d_mlp, 2**24),
        ("model.context_length", cfg.model.context_length, 2**30),
        ("model.vocab_size", cfg.model.vocab_size, 2**30),
        ("trainer.threads", cfg.trainer.threads, 1024),
        ("hang_seconds", cfg.hang_seconds, 1_000_000),
        *((name, value, 2**53) for name, value in positive.items() if isinstance(value, int)),
        ("sample.tokens", cfg.sample.tokens, 2**53),
    ):
        if value is not None and value > most:
            raise ConfigError(field, f"{value} is too large; at most {most}")
    if cfg.batch_size % cfg.accumulate:
        raise ConfigError(
            "accumulate",
            f"{cfg.accumulate} does not divide batch_size={cfg.batch_size}; "
            f"one of {[n for n in range(1, cfg.batch_size + 1) if cfg.batch_size % n == 0]}",
        )
    budgets = {k: getattr(cfg.budget, k) for k in ("steps", "tokens", "seconds", "flops")}
    given = [f"budget.{k}" for k, v in budgets.items() if v is not None]
    if len(given) > 1:
        raise ConfigError("budget", f"{' and '.join(given)} are both set; give one of them")
    check_choice("trainer.precision", cfg.trainer.precision, PRECISIONS)
    check_choice("match", cfg.match, MATCHES)
    check_choice("init_method", cfg.init_method, INIT_METHODS)
    if cfg.init_from is not None and cfg.match in ("params", "flops"):
        raise ConfigError("match", f"{cfg.match} changes the MLP, and init_from has one; drop one")
    check_choice("trainer.accelerator", cfg.trainer.accelerator, ACCELERATORS)
    for name in cfg.experiment_name.split("/"):
        if name in ("", ".", ".."):
            raise ConfigError("experiment_name", f"{cfg.experiment_name!r} is no folder name")
    # It stands in paths, and on the terminal.
    if not cfg.experiment_name.isprintable() or len(cfg.experiment_name.encode()) > 200:
        raise ConfigError(
            "experiment_name", "has an unprintable character or more than 200 bytes; take another"
        )


def check_choice(field: str, value: str, choices: Iterable[str]) -> None:
    """Raise ConfigError, with the nearest choice, where value is none of them."""
    choices = list(choices)
    if value not in choices:
        raise ConfigError(field, f"{value!r} is unknown; {suggest(value, choices)}")


def suggest(value: str, choices: Iterable[str]) -> str:
    """`did you mean X? one of [...]`, or the choices alone where none is near."""
    choices = sorted(choices)
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    listed = f"one of {', '.join(choices)}"
    return f"did you mean {near[0]}? {listed}" if near else listed
