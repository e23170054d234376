"""The settings of a run as dataclasses: the schema of `conf/`, where the values are.

A field's type holds its choices, its range, and how another value affects a run. The open groups
(attn, part, position, data, tokenizer, logger) hold a `_target_` and its arguments, which
`construct.py` checks against the target's signature.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from gptattn.errors import ConfigError
from gptattn.settings.values import build_dataclass

# conf/ lies next to the package in a source tree, and inside it in a wheel.
CONF = next(
    folder
    for folder in (Path(__file__).parents[1] / "conf", Path(__file__).parents[2] / "conf")
    if folder.is_dir()
)
Spec = dict[str, Any]
MASK_DOCUMENTS = "mask_documents"  # in `data`, but not an argument of its `_target_`

MLP = Literal["gelu", "relu2", "swiglu", "none"]
Precision = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"]
InitMethod = Literal["mean", "first", "random"]
Accelerator = Literal["auto", "cpu", "gpu"]

PositiveInt = Annotated[int, Meta(gt=0)]
Threads = Annotated[int, Meta(gt=0, le=1024)]
Positive = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]
Share = Annotated[float, Meta(gt=0, le=1)]


class Effect(Enum):
    """How changing a setting, or one below it, affects a run; RESULT unless the type says more."""

    RESULT = "another result"
    LENGTH = "another result, but a resumed run may change it"
    PLACE = "a path, of which only the content counts"
    VIEW = "the same result, shown or computed in another way"
    FIXED = "fixed once the run has begun; its effect on the result is recorded elsewhere"


# Prefixes of what the files in conf/block set.
OF_BLOCK = ("block.", "model.mlp", "model.qkv_bias")


@dataclass
class ModelConfig:
    """The sizes of the GPT.

    `d_mlp` None: the width that gives as many parameters as GPT-2's MLP. `vocab_size` None: the
    tokenizer's. `activation_checkpointing`: recompute each block in the backward pass.
    """

    num_layers: Annotated[int, Meta(gt=0, le=1_000)]
    num_heads: Annotated[int, Meta(gt=0, le=2**20)]
    d_model: Annotated[int, Meta(gt=0, le=2**20)]
    context_length: Annotated[int, Meta(gt=0, le=2**30)]
    d_mlp: Annotated[int, Meta(gt=0, le=2**24)] | None
    dropout: Fraction
    qkv_bias: bool
    mlp: MLP
    vocab_size: Annotated[int, Meta(gt=0, le=2**30)] | None
    activation_checkpointing: Annotated[bool, Effect.VIEW]


def default_width(mlp: str, d_model: int) -> int:
    """Return the hidden width of an MLP that has as many parameters as GPT-2's.

    4 * d_model for two matrices; 8/3 * d_model for SwiGLU's three, to the nearest multiple of 8.
    Source: Shazeer 2020, arXiv:2002.05202, sec. 2.
    """
    # In integers: someone else's run folder may hold a d_model beyond any float.
    return 4 * d_model if mlp != "swiglu" else max(8, 8 * ((d_model + 1) // 3))


@dataclass
class BlockConfig:
    """The rest of each layer, and the head.

    `bias`: of the MLP and the attention's output projection. `tied_head`: the head shares the token
    embedding's weight. `zero_init`: at first, attention and MLP add 0.
    """

    norm: Literal["layer", "rms"]
    bias: bool
    tied_head: bool
    norm_eps: Positive
    zero_init: bool
    embedding_std: Positive


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule, whose peak is `lr`; see conf/optim.

    `matrices`: the Spec of a `gptattn.optim.MatrixRule`, or None.
    """

    lr: Positive
    final_lr_fraction: Annotated[float, Meta(ge=0, le=1)]
    warmup_fraction: Fraction
    beta1: Fraction
    beta2: Fraction
    eps: Positive
    weight_decay: Annotated[float, Meta(ge=0)]
    grad_clip: Positive
    decay: Literal["cosine", "linear"]
    decay_fraction: Share | None
    matrices: Spec | None


@dataclass
class BudgetConfig:
    """How long to train: in one of these units, or `default_steps` if all of them are None.

    With `accuracy`, a run on a task ends early, after the first validation that reaches it.
    """

    steps: Annotated[int, Meta(ge=0)] | None  # 0 only with init_from, see `check`
    tokens: PositiveInt | None
    seconds: Positive | None
    flops: Positive | None
    default_steps: PositiveInt
    accuracy: Share | None

    def reached(self, accuracy: float | None) -> bool:
        """Return whether a validation's accuracy (None on text) ends the run."""
        if accuracy is None or self.accuracy is None:
            return False
        return accuracy >= self.accuracy


# The units of a budget; at most one is set.
UNITS = ("steps", "tokens", "seconds", "flops")


@dataclass
class ValidationConfig:
    """`fraction`: the share of the text to hold out. `count`: validations in a run.

    `tokens`: the most that one scores; None: all; auto: see `settings.budget.limit_validation`.
    `lengths`: row lengths at which each validation of a task measures the accuracy.
    """

    fraction: Annotated[float, Meta(gt=0, lt=1)]
    tokens: PositiveInt | Literal["auto"] | None
    count: Annotated[PositiveInt, Effect.VIEW]
    lengths: list[PositiveInt]


@dataclass
class SampleConfig:
    """The text generated at each validation: `tokens` new tokens after `prompt`; 0: no text."""

    prompt: str | None
    tokens: Annotated[int, Meta(ge=0)]
    temperature: Annotated[float, Meta(ge=1e-3)]
    top_k: PositiveInt | None


@dataclass
class TrainerConfig:
    """The device, the precision and the processes of a run; see conf/trainer.

    `devices`: the processes on each of `num_nodes` machines. `callbacks`: Specs of Lightning
    callbacks, under any names.
    """

    accelerator: Annotated[Accelerator, Effect.FIXED]
    precision: Precision
    threads: Annotated[Threads | None, Effect.FIXED]
    matmul_precision: Literal["highest", "high", "medium"]
    deterministic: Annotated[bool, Effect.FIXED]
    devices: Annotated[Annotated[int, Meta(gt=0, le=1024)] | Literal["auto"], Effect.VIEW]
    num_nodes: Annotated[Annotated[int, Meta(gt=0, le=65_536)] | Literal["auto"], Effect.VIEW]
    callbacks: dict[str, Spec]

    @property
    def processes(self) -> int:
        """The processes of a run; 1 while the number is not known."""
        devices, nodes = self.devices, self.num_nodes
        return 1 if isinstance(devices, str) or isinstance(nodes, str) else devices * nodes


@dataclass
class SweepConfig:
    """How a `-m` command runs its sweep.

    A sweep sets `beside_others` for runs that share the machine, and on a GPU `backends`, one for
    each kind of layer, so that its runs share one choice.
    """

    jobs: PositiveInt | Literal["auto"] | None
    fresh: bool
    keep_stale: bool
    until: Annotated[float, Meta(ge=1e-6, le=100)] | None
    max_seeds: PositiveInt
    speed: bool
    beside_others: bool
    backends: list[str] | None = None


@dataclass
class Settings:
    """The settings that a user can give a run; see `conf/train.yaml`.

    Units: `batch_size` in sequences, `accumulate` in micro-batches per step, `loss_chunk_tokens`
    in tokens, `log_every` in optimizer steps.
    """

    experiment_name: Annotated[str, Effect.FIXED]
    # Shown separately in a run's name.
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1), Effect.FIXED]
    batch_size: Annotated[int, Meta(gt=0, le=2**20)]
    accumulate: PositiveInt
    loss_chunk_tokens: PositiveInt | None
    compile: bool | Literal["auto"]
    log_every: Annotated[PositiveInt, Effect.VIEW]
    checkpoint: Annotated[bool, Effect.FIXED]
    cache_dir: Annotated[str | None, Effect.VIEW]
    allow_targets: Annotated[list[str], Effect.FIXED]
    init_from: Annotated[str | None, Effect.FIXED]
    init_method: InitMethod
    match: Literal["none", "params", "flops"]
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
    budget: Annotated[BudgetConfig, Effect.LENGTH]
    validation: ValidationConfig
    sample: Annotated[SampleConfig, Effect.VIEW]
    trainer: TrainerConfig
    sweep: Annotated[SweepConfig, Effect.VIEW]
    logger: Annotated[dict[str, Spec], Effect.VIEW]
    shared_init: bool
    checks: Annotated[bool, Effect.VIEW]
    name: Annotated[Annotated[str, Meta(max_length=100)] | None, Effect.VIEW]


class Layer(NamedTuple):
    """The settings of one kind of layer; in a pattern, its own override those for all layers.

    `field`: its attention's name in messages. `part`: by name. `position`: {} if there is none.
    """

    field: str
    attn: Spec
    part: dict[str, Spec]
    position: Spec


@dataclass
class TrainConfig(Settings):
    """All settings of a run, and the values filled in for its record.

    `choices`: the choice in each config group. `layers`: the settings of each name in the
    `pattern`; with a pattern, `attn` is empty. `match_attn`: the attention settings of `match_to`.
    `match_made`: what the match changed (`field`, `before`, `after`), and the costs in the units of
    `Cost` (`target`, that of `match_to`, and `reached`). `code_folders`: folders of the user's own
    modules. `overrides`: as typed; `compare` uses them to write commands for more seeds.
    """

    choices: Annotated[dict[str, str], Effect.FIXED] = field(default_factory=dict)
    match_attn: Annotated[Spec | None, Effect.FIXED] = None
    match_made: Annotated[Spec | None, Effect.FIXED] = None
    code_folders: Annotated[list[str], Effect.FIXED] = field(default_factory=list)
    overrides: Annotated[list[str], Effect.FIXED] = field(default_factory=list)

    @property
    def variant(self) -> str:
        """The name in reports: the file of its attention, or the pattern or recipe, then parts."""
        return variant_name([self.choices["attn"]], self.part)

    def layer(self, number: int) -> Layer:
        """Return the settings of this layer, counted from 0."""
        if self.pattern is None:
            return Layer("attn", self.attn, self.part, self.position)
        name = self.pattern[number % len(self.pattern)]
        node = self.layers[name]
        parts = self.part | node.get("part", {})
        return Layer(f"pattern.{name}", node["attn"], parts, node.get("position", self.position))

    def with_backends(self, chosen: Mapping[str, str]) -> "TrainConfig":
        """Return the settings with the `chosen` backends, keyed by `Layer.field`."""
        kinds = [kind for kind in self.kinds() if kind.field in chosen]
        new = {kind.field: kind.attn | {"backend": chosen[kind.field]} for kind in kinds}
        named = [(name, one, new.get(f"pattern.{name}")) for name, one in self.layers.items()]
        layers = {name: one | ({} if attn is None else {"attn": attn}) for name, one, attn in named}
        return replace(self, attn=new.get("attn", self.attn), layers=layers)

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
    build_dataclass(type(cfg), asdict(cfg))  # `replace` checks nothing
    if cfg.name is not None and not (cfg.name.isprintable() and cfg.name.strip()):
        raise ConfigError("name", "is blank or not printable; give another, or null")
    shares = cfg.trainer.processes * cfg.accumulate
    if cfg.batch_size % shares:
        raise ConfigError(
            "accumulate",
            f"{cfg.accumulate} micro-batches on each of {cfg.trainer.processes} processes "
            f"(trainer.devices * trainer.num_nodes) do not divide batch_size={cfg.batch_size}; "
            f"give a batch_size that is a multiple of {shares}, or change accumulate",
        )
    units = [f"budget.{unit}" for unit in UNITS if getattr(cfg.budget, unit) is not None]
    if len(units) > 1:
        raise ConfigError("budget", f"{' and '.join(units)} are set; give only one of them")
    fall, warmup = cfg.optim.decay_fraction, cfg.optim.warmup_fraction
    if fall is not None and fall > 1 - warmup:
        raise ConfigError(
            "optim.decay_fraction",
            f"{fall} and optim.warmup_fraction={warmup} add up to more than 1; give at most "
            f"{1 - warmup:g}, or null",
        )
    if cfg.layers and cfg.pattern is None:
        names = ",".join(cfg.layers)
        raise ConfigError("layers", f"need a pattern; add pattern=[{names}], for example")
    if cfg.pattern == []:
        raise ConfigError("pattern", "is empty; give names of files in conf/attn, or null")
    layers, names = cfg.model.num_layers, len(cfg.pattern or [""])
    if layers < names:
        raise ConfigError(
            "pattern",
            f"the {names} layers of {cfg.choices['attn']} do not fit model.num_layers={layers}; "
            f"give model.num_layers={names} or more",
        )
    if cfg.match != "none" and (cfg.model.mlp == "none" or cfg.init_from is not None):
        fixes = "model.mlp=none" if cfg.model.mlp == "none" else "init_from"
        raise ConfigError(
            "match",
            f"{cfg.match} cannot change the MLP's width with {fixes}; leave one of them out",
        )
    name = cfg.experiment_name
    if {"", ".", ".."} & {*name.split("/")} or not name.isprintable() or len(name.encode()) > 200:
        raise ConfigError(
            "experiment_name", f"{name[:200]!r} is not a folder name of up to 200 bytes; give one"
        )
