"""The content of summary.json, and of a run's row in TensorBoard's HParams tab."""

import platform
from importlib.metadata import version
from typing import Any

from gptattn import __version__
from gptattn.build.model import choose_mlp_width
from gptattn.machine.device import device_name, git_commit
from gptattn.settings.budget import Budget
from gptattn.training.preflight import PreparedRun

GROUPS = ("model", "position", "block", "data", "tokenizer", "optim")
SIZES = ("num_layers", "num_heads", "d_model", "context_length", "dropout")
LIBRARIES = ("torch", "lightning", "hydra-core", "omegaconf", "tensorboard", "numpy")


def list_hyperparameters(prepared: PreparedRun) -> dict[str, Any]:
    """Return the hyperparameters. TensorBoard needs the same keys and types in every run."""
    cfg = prepared.cfg
    # Of each attention, and of each part as `gate.key=value`.
    layers = {name: layer["attn"] for name, layer in cfg.layers.items()}
    specs = {"": cfg.attn, **layers, **cfg.part}
    attention = " ".join(
        f"{f'{name}.' * bool(name)}{key}={value}"
        for name, spec in specs.items()
        for key, value in spec.items()
        if key != "_target_"
    )
    return {
        "attn": cfg.variant,
        "attn_settings": attention,
        "million params": prepared.cost.params / 1e6,
        "cache bytes per token": prepared.cost.kv_bytes_per_token,
        "seed": cfg.seed,
        **{group: cfg.choices[group] for group in GROUPS},
        **{name: getattr(cfg.model, name) for name in SIZES},
        "d_mlp": choose_mlp_width(cfg.model),
        "match": cfg.match,
        "lr": cfg.optim.lr,
        "weight_decay": cfg.optim.weight_decay,
        "batch_size": cfg.batch_size,
        "budget": describe_budget(prepared.budget),
        "precision": cfg.trainer.precision,
        "compile": cfg.compile,
        "device": prepared.device.type,
    }


def describe_budget(budget: Budget) -> str:
    """Return the budget in words: `1000 steps` or `60 seconds`."""
    return f"{budget.steps} steps" if budget.steps is not None else f"{budget.seconds:g} seconds"


def summarise(prepared: PreparedRun, run: str, threads: int, step: int) -> dict[str, Any]:
    """Return the content of summary.json: names, final metrics, costs, and the environment.

    `threads`: CPU threads of each process. `step`: optimizer steps taken.
    """
    cfg, data = prepared.cfg, prepared.data
    return {
        "status": "done",
        "variant": cfg.variant,
        "seed": cfg.seed,
        "experiment": cfg.experiment_name,
        "run": run,
        "steps": step,
        "budget": describe_budget(prepared.budget),
        "init_from": cfg.init_from,
        "match": cfg.match_made,
        "shares": "machine" if prepared.state.shared else None,
        "metrics": prepared.costs() | prepared.state.last,
        "hyperparameters": list_hyperparameters(prepared),
        "data": {
            "text_sha256": data.text_hash,
            "tokenizer": cfg.choices["tokenizer"],
            "vocab_size": data.tokenizer.vocab_size,
            **data.facts(),
        },
        "environment": {
            "gptattn": __version__,
            "git_commit": git_commit(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": device_name(prepared.device),
            "threads": threads,
            "processes": cfg.trainer.processes,
            "libraries": {name: version(name) for name in LIBRARIES},
        },
    }
