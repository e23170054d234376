"""The content of summary.json, and of a run's row in the HParams tab."""

import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch

from gptattn import __version__
from gptattn.data.run_data import RunData
from gptattn.machine.device import device_name, git_commit
from gptattn.model.cost import Cost
from gptattn.model.gpt import GPT
from gptattn.runs.folder import RunFolder
from gptattn.settings.budget import Budget
from gptattn.settings.build import width_of_mlp
from gptattn.settings.config import TrainConfig
from gptattn.settings.match import Match

LIBRARIES = ("torch", "lightning", "hydra-core", "omegaconf", "tensorboard", "numpy")


@dataclass(frozen=True)
class Assembly:
    """The parts of a run, once all are built.

    `threads`: CPU threads of each of its `processes`.
    """

    cfg: TrainConfig
    folder: RunFolder
    data: RunData
    model: GPT
    cost: Cost
    budget: Budget
    device: torch.device
    threads: int
    match: Match | None = None
    processes: int = 1

    def costs(self) -> dict[str, float]:
        """Return the fields of `cost` by the names of their metrics, `cost/...`."""
        return {f"cost/{name}": value for name, value in asdict(self.cost).items()}


def hyperparameters(built: Assembly) -> dict[str, Any]:
    """Return the hyperparameters. TensorBoard needs the same keys and types in every run."""
    cfg = built.cfg
    return {
        "attn": cfg.variant,
        "attn_settings": _attention_settings(cfg),
        "seed": cfg.seed,
        "model": cfg.choices["model"],
        "num_layers": cfg.model.num_layers,
        "num_heads": cfg.model.num_heads,
        "d_model": cfg.model.d_model,
        "context_length": cfg.model.context_length,
        "d_mlp": width_of_mlp(cfg.model),
        "match": cfg.match,
        "dropout": cfg.model.dropout,
        "position": cfg.choices["position"],
        "block": cfg.choices["block"],
        "data": cfg.choices["data"],
        "tokenizer": cfg.choices["tokenizer"],
        "optim": cfg.choices["optim"],
        "lr": cfg.optim.lr,
        "weight_decay": cfg.optim.weight_decay,
        "batch_size": cfg.batch_size,
        "budget": describe_budget(built.budget),
        "precision": cfg.trainer.precision,
        "compile": cfg.compile,
        "device": built.device.type,
    }


def _attention_settings(cfg: TrainConfig) -> str:
    """Return `key=value` for each setting of the attention, those of a part as `gate.key=value`."""
    named = {"": cfg.attn, **(cfg.pattern_attn or {}), **cfg.part}
    return " ".join(
        f"{f'{name}.' * bool(name)}{key}={value}"
        for name, spec in named.items()
        for key, value in spec.items()
        if key != "_target_"
    )


def describe_budget(budget: Budget) -> str:
    """Return the budget in words: `1000 steps` or `60 seconds`."""
    return f"{budget.steps} steps" if budget.steps is not None else f"{budget.seconds:g} seconds"


def summarise(
    built: Assembly,
    metrics: dict[str, float | None],
    step: int,
    completed: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the content of summary.json: names, final metrics, costs, and the environment.

    `completed`: each budget that the run completed, with the step and the metrics at its end; more
    than one if the run was resumed with a larger budget.
    """
    return {
        "status": "done",
        "variant": built.cfg.variant,
        "seed": built.cfg.seed,
        "experiment": built.cfg.experiment_name,
        "run": built.folder.path.name,
        "steps": step,
        "budget": describe_budget(built.budget),
        "completed": completed,
        "init_from": built.cfg.init_from,
        "match": None if built.match is None else asdict(built.match),
        "shares": "machine" if built.cfg.sweep.beside_others else None,
        "metrics": built.costs() | metrics,
        "hyperparameters": hyperparameters(built),
        "data": {
            "text_sha256": built.data.text_hash,
            "tokenizer": built.cfg.choices["tokenizer"],
            "vocab_size": built.data.tokenizer.vocab_size,
            **built.data.facts(),
        },
        "environment": {
            "gptattn": __version__,
            "git_commit": git_commit(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": device_name(built.device),
            "threads": built.threads,
            "processes": built.processes,
            "libraries": {name: version(name) for name in LIBRARIES},
        },
    }
