"""The settings of a run as dataclasses: the schema of `conf/`, where the defaults are.

Hydra checks types and names of settings against it; choices and ranges stand beside the field, for
`check`. The open groups (attn, part, position, data, tokenizer, logger) hold a `_target_` and its
arguments; `construct.py` checks those against the target's signature.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gptattn.errors import ConfigError
from gptattn.settings.values import AUTO, check_values, one_of, within

# conf/ lies beside the package in a source tree, and inside it in a wheel.
CONF = next(
    folder
    for folder in (Path(__file__).parents[1] / "conf", Path(__file__).parents[2] / "conf")
    if folder.is_dir()
)
Spec = dict[str, Any]
MASK_DOCUMENTS = "mask_documents"  # in `data`, beside the arguments of what gives the text

# OmegaConf knows no Literal: a field is a str, and these are its choices.
MLP = Literal["gelu", "relu2", "swiglu", "none"]
Precision = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"]
InitMethod = Literal["mean", "first", "random"]
Accelerator = Literal["auto", "cpu", "gpu"]

POSITIVE = within(above=0)
FRACTION = within(least=0, below=1)

# What another value of a setting means for a run stands under this key in its field's metadata, and
# holds for all settings below it. Without one it is RESULT.
MEANING = "meaning"
RESULT = "another result"
LENGTH = "another result, but a resumed run may have it"
PLACE = "what counts is the content at this path"
VIEW = "shown, or computed, in another way: the result is the same"
BOUND = "fixed once the run has begun; what it means for the result is recorded apart from settings"

VIEWED, FIXED = {MEANING: VIEW}, {MEANING: BOUND}

LONGEST_NAME = 100  # characters of `name`

# What the files in conf/block set, by the beginnings of the names.
OF_BLOCK = ("block.", "model.mlp", "model.qkv_bias")


@dataclass
class ModelConfig:
    """The sizes of the GPT.

    `d_mlp` None means the width with as many parameters as GPT-2's MLP, `vocab_size` None the
    tokenizer's. `activation_checkpointing`: the backward pass computes each block again.
    """

    num_layers: int = field(metadata=within(above=0, most=1_000))
    num_heads: int = field(metadata=within(above=0, most=2**20))
    d_model: int = field(metadata=within(above=0, most=2**20))
    context_length: int = field(metadata=within(above=0, most=2**30))
    d_mlp: int | None = field(metadata=within(above=0, most=2**24))
    dropout: float = field(metadata=FRACTION)
    qkv_bias: bool
    mlp: str = field(metadata=one_of(MLP))
    vocab_size: int | None = field(metadata=within(above=0, most=2**30))
    activation_checkpointing: bool = field(default=False, metadata=VIEWED)


def default_width(mlp: str, d_model: int) -> int:
    """Return the hidden width of an MLP that has as many parameters as GPT-2's.

    4 * d_model for two matrices; 8/3 * d_model for SwiGLU's three, to the nearest multiple of 8.
    Source: Shazeer 2020, arXiv:2002.05202, sec. 2.
    """
    # In whole numbers: a run folder of others may hold a d_model beyond any float.
    return 4 * d_model if mlp != "swiglu" else max(8, 8 * ((d_model + 1) // 3))


@dataclass
class BlockConfig:
    """The rest of each layer, and the head.

    `bias`: of the MLP and of the attention's output projection. `tied_head`: the head's weight is
    the token embedding's. `zero_init`: attentions and MLPs start by adding 0.
    """

    norm: str = field(metadata=one_of(Literal["layer", "rms"]))
    bias: bool
    tied_head: bool
    norm_eps: float = field(metadata=POSITIVE)
    zero_init: bool = False


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule, whose peak is `lr`; see conf/optim.

    `matrices`: the Spec of a `gptattn.optim.MatrixRule`, or None.
    """

    lr: float = field(metadata=POSITIVE)
    final_lr_fraction: float = field(metadata=within(least=0, most=1))
    warmup_fraction: float = field(metadata=FRACTION)
    beta1: float = field(metadata=FRACTION)
    beta2: float = field(metadata=FRACTION)
    eps: float = field(metadata=POSITIVE)
    weight_decay: float = field(metadata=within(least=0))
    grad_clip: float = field(metadata=POSITIVE)
    decay: str = field(default="cosine", metadata=one_of(Literal["cosine", "linear"]))
    decay_fraction: float | None = field(default=None, metadata=within(above=0, most=1))
    matrices: Any = None  # OmegaConf cannot merge a Spec into None


@dataclass
class BudgetConfig:
    """How long to train, in one of these units, or `default_steps` if all others are None.

    With `accuracy`, a task's run ends sooner, after a validation that reaches it.
    """

    steps: int | None = field(metadata=within(least=0))  # 0 only with init_from, see `check`
    tokens: int | None = field(metadata=POSITIVE)
    seconds: float | None = field(metadata=POSITIVE)
    flops: float | None = field(metadata=POSITIVE)
    default_steps: int = field(metadata=POSITIVE)
    accuracy: float | None = field(default=None, metadata=within(above=0, most=1))

    def reached(self, accuracy: float | None) -> bool:
        """Return whether a validation's accuracy, None on text, ends the run."""
        if accuracy is None or self.accuracy is None:
            return False
        return accuracy >= self.accuracy


# The units of a budget, of which one is set at most.
UNITS = ("steps", "tokens", "seconds", "flops")


@dataclass
class ValidationConfig:
    """`fraction`: the share of the text that is held out. `count`: validations in a run."""

    fraction: float = field(metadata=within(above=0, below=1))
    count: int = field(metadata=POSITIVE | VIEWED)


@dataclass
class SampleConfig:
    """The text generated at each validation: `tokens` new tokens after `prompt`; 0: no text."""

    prompt: str | None
    tokens: int = field(metadata=within(least=0))
    temperature: float = field(metadata=within(least=1e-3))
    top_k: int | None = field(metadata=POSITIVE)


@dataclass
class TrainerConfig:
    """The device, the precision and the processes of a run; see conf/trainer.

    `devices`: the processes on each of `num_nodes` machines.
    """

    accelerator: str = field(metadata=one_of(Accelerator) | FIXED)
    precision: str = field(metadata=one_of(Precision))
    threads: int | None = field(metadata=within(above=0, most=1024) | FIXED)
    matmul_precision: str = field(
        default="highest", metadata=one_of(Literal["highest", "high", "medium"])
    )
    deterministic: bool = field(default=False, metadata=FIXED)
    devices: int | str = field(default=1, metadata=within(above=0, most=1024) | AUTO | VIEWED)
    num_nodes: int | str = field(default=1, metadata=within(above=0, most=65_536) | AUTO | VIEWED)

    @property
    def processes(self) -> int:
        """The processes of a run, one where that is not known yet."""
        devices, nodes = self.devices, self.num_nodes
        return 1 if isinstance(devices, str) or isinstance(nodes, str) else devices * nodes


@dataclass
class SweepConfig:
    """How a `-m` command runs its sweep.

    `beside_others`: set by a sweep for runs that share the machine, whose speed is then not
    recorded.
    """

    jobs: int | str | None = field(metadata=POSITIVE | AUTO)
    fresh: bool
    keep_stale: bool
    until: float | None = field(default=None, metadata=within(least=1e-6, most=100))
    max_seeds: int = field(default=50, metadata=POSITIVE)
    beside_others: bool = False


@dataclass
class Settings:
    """What a user can set of a run; see `conf/train.yaml`.

    Units: `batch_size` in sequences, `accumulate` in micro-batches per step, `loss_chunk_tokens`
    in tokens, `log_every` in optimizer steps, `hang_seconds` in seconds.
    """

    experiment_name: str = field(metadata=FIXED)
    seed: int = field(
        metadata=within(least=0, most=2**32 - 1) | FIXED
    )  # shown separately in a run's name
    batch_size: int = field(metadata=within(above=0, most=2**20))
    accumulate: int = field(metadata=POSITIVE)
    loss_chunk_tokens: int | None = field(metadata=POSITIVE)
    compile: bool
    log_every: int = field(metadata=POSITIVE | VIEWED)
    log_heads: bool = field(metadata=VIEWED)
    hang_seconds: float | None = field(metadata=within(above=0, most=1_000_000) | VIEWED)
    checkpoint: bool = field(metadata=FIXED)
    cache_dir: str | None = field(metadata=VIEWED)
    allow_targets: list[str] = field(metadata=FIXED)
    init_from: str | None = field(metadata=FIXED)
    init_method: str = field(metadata=one_of(InitMethod))
    match: str = field(metadata=one_of(Literal["none", "params", "flops", "kv_cache"]))
    match_to: str
    attn: Spec
    pattern: list[str] | None
    layers: dict[str, Any]
    part: dict[str, Spec]
    position: Spec
    block: BlockConfig
    data: Spec
    tokenizer: Spec
    model: ModelConfig
    optim: OptimConfig
    budget: BudgetConfig = field(metadata={MEANING: LENGTH})
    validation: ValidationConfig
    sample: SampleConfig = field(metadata=VIEWED)
    trainer: TrainerConfig
    sweep: SweepConfig = field(metadata=VIEWED)
    logger: dict[str, Spec] = field(default_factory=dict, metadata=VIEWED)
    shared_init: bool = False
    checks: bool = field(default=True, metadata=VIEWED)
    name: str | None = field(default=None, metadata=VIEWED)


class Layer(NamedTuple):
    """The settings of one kind of layer; in a pattern, its own override those of all layers.

    `field`: how messages name its attention. `part`: by name. `position`: {} if there is none.
    """

    field: str
    attn: Spec
    part: dict[str, Spec]
    position: Spec


@dataclass
class TrainConfig(Settings):
    """All settings of a run, and the values filled in for its record.

    `choices`: the choice in each config group. `layers`: the settings of each name in the
    `pattern`, with which `attn` is empty; see `Layer`. `match_attn`: those of `match_to`.
    `match_made`: what the match has changed (`field`, `before`, `after`), and the costs (`target`,
    that of `match_to`, and `reached`), in the units of `Cost`. `code_folders`: where the user's own
    modules were. `overrides`: as they were typed, from which `compare` writes commands for more
    seeds.
    """

    choices: dict[str, str] = field(default_factory=dict, metadata=FIXED)
    match_attn: Spec | None = field(default=None, metadata=FIXED)
    match_made: Spec | None = field(default=None, metadata=FIXED)
    code_folders: list[str] = field(default_factory=list, metadata=FIXED)
    overrides: list[str] = field(default_factory=list, metadata=FIXED)

    @property
    def variant(self) -> str:
        """What the run is called after: the attention's YAML or those of the pattern, and parts."""
        return variant_name([self.choices["attn"]], self.part)

    def layer(self, number: int) -> Layer:
        """Return the settings of this layer, counted from 0."""
        if self.pattern is None:
            return Layer("attn", self.attn, self.part, self.position)
        name = self.pattern[number % len(self.pattern)]
        own = self.layers[name]
        parts = self.part | own.get("part", {})
        return Layer(f"pattern.{name}", own["attn"], parts, own.get("position", self.position))

    def kinds(self) -> list[Layer]:
        """Return the settings of each kind of layer."""
        names = self.pattern or [""]
        return [self.layer(names.index(name)) for name in dict.fromkeys(names)]


def variant_name(attn: Iterable[str], parts: Iterable[str]) -> str:
    """Return `gqa`, `gqa+gate+sink`, or `sliding,sliding,gqa` for a pattern."""
    return "+".join([",".join(attn), *parts])


def check(cfg: TrainConfig) -> None:
    """Raise ConfigError, naming the field, for the first value that cannot work."""
    steps = cfg.budget.steps
    # With init_from, 0 steps validate the given weights.
    if steps is not None and steps < (cfg.init_from is None):
        raise ConfigError("budget.steps", f"{steps} is not a positive number; give one above 0")
    check_values(cfg)
    name = cfg.name
    if name is not None and not (name.isprintable() and name.strip() and len(name) <= LONGEST_NAME):
        raise ConfigError(
            "name", f"is empty, too long or not printable; give 1 to {LONGEST_NAME} characters"
        )
    if cfg.batch_size % cfg.accumulate:
        raise ConfigError(
            "accumulate",
            f"{cfg.accumulate} does not divide batch_size={cfg.batch_size}; "
            f"one of {[n for n in range(1, cfg.batch_size + 1) if cfg.batch_size % n == 0]}",
        )
    shares = cfg.trainer.processes * cfg.accumulate
    if cfg.batch_size % shares:
        raise ConfigError(
            "batch_size",
            f"{cfg.batch_size} sequences do not divide evenly among {cfg.trainer.processes} "
            f"processes (trainer.devices * trainer.num_nodes) with accumulate={cfg.accumulate}; "
            f"give a multiple of {shares}",
        )
    given = [f"budget.{unit}" for unit in UNITS if getattr(cfg.budget, unit) is not None]
    if len(given) > 1:
        raise ConfigError("budget", f"{' and '.join(given)} are both set; give one of them")
    fall, warmup = cfg.optim.decay_fraction, cfg.optim.warmup_fraction
    if fall is not None and fall > 1 - warmup:
        raise ConfigError(
            "optim.decay_fraction",
            f"{fall} and optim.warmup_fraction={warmup} exceed the budget; give at most "
            f"{1 - warmup:g}, or null",
        )
    if not isinstance(cfg.optim.matrices, dict | None):
        raise ConfigError(
            "optim.matrices", "is not a mapping; give optim=muon, or {_target_:CLASS}"
        )
    if cfg.pattern == []:
        raise ConfigError("pattern", "is empty; give names of files in conf/attn, or null")
    layers, names = cfg.model.num_layers, len(cfg.pattern or [""])
    if layers < names:
        raise ConfigError(
            "pattern",
            f"the {names} layers of {cfg.choices['attn']} do not fit model.num_layers={layers}; "
            f"give model.num_layers={names} or more",
        )
    if cfg.match in ("params", "flops"):
        changes = f"{cfg.match} changes the MLP's width"
        if cfg.model.mlp == "none":
            raise ConfigError(
                "match", f"{changes}, but model.mlp=none has no MLP; leave one of them out"
            )
        if cfg.init_from is not None:
            raise ConfigError("match", f"{changes}, but init_from fixes it; leave one of them out")
    name = cfg.experiment_name
    if {"", ".", ".."} & {*name.split("/")} or not name.isprintable() or len(name.encode()) > 200:
        raise ConfigError(
            "experiment_name", f"{name[:200]!r} is not a folder name of at most 200 bytes; give one"
        )
