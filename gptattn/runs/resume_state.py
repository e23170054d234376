"""Checks a checkpoint's content before a run is resumed from it; the file may be from anybody."""

import math
from typing import Any

import torch
from torch import Tensor

from gptattn.model.decay import layer_matrices
from gptattn.model.gpt import GPT
from gptattn.optim.matrix_rule import MatrixRule, kept_shapes

CALLBACK_KEYS = ("StepClock", "MetricRows", "Checkpoints")  # of their states
FACTS = ("text_sha256", "tokenizer", "device", "threads", "processes", "torch")
COUNTED = ("threads", "processes")
MAX_THREADS = 1024  # as for the setting trainer.threads
AVERAGES = ("exp_avg", "exp_avg_sq")  # AdamW's


def check_state(content: dict[str, Any], model: GPT, rule: MatrixRule | None = None) -> None:
    """Raise ValueError, naming the part, if this is not the state of a run of `model`.

    Checks names, types, ranges and shapes. When torch loads an optimizer's state it checks none of
    these, and its fused step would read past the end of a tensor that is too small. `model` may be
    on the meta device. `rule`: what updates the matrices of its layers in place of AdamW.
    """
    try:
        for part, valid in _checks(content, model, rule).items():
            if not valid:
                raise ValueError(f"its {part} is not that of a run")
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"it is not the state of a run ({type(error).__name__}: {error})"
        ) from None


def _checks(content: dict[str, Any], model: GPT, rule: MatrixRule | None) -> dict[str, bool]:
    """Return, for each part of the state by its name in error messages, whether it is valid."""
    step = content["global_step"]
    clock, rows, own = (content["callbacks"][key] for key in CALLBACK_KEYS)
    loops = content["loops"]["fit_loop"]
    row = content["since_row"]
    return {
        "version of Lightning": isinstance(content["pytorch-lightning_version"], str),
        "step": _is_count(step),
        "clock": _is_number(clock["seconds"])
        and _is_vector(clock["step_seconds"], torch.float64)
        and len(clock["step_seconds"]) <= step,
        "count of rows": all(
            _is_count(rows[key]) for key in ("rows", "logged_step", "timed_steps")
        ),
        "newest row": _are_numbers(rows["last"]),
        "completed budgets": all(map(_is_budget_end, rows.get("completed") or [])),
        "loss since the newest row": all(_is_scalar(loss) for loss in row["train_losses"])
        and _is_scalar(row["grad_norm"])
        and _is_number(row["lr"]),
        "record": isinstance(own["validated"], bool)
        and all(isinstance(own[name], str) for name in FACTS if name not in COUNTED),
        "number of threads": _is_count(own["threads"]) and 0 < own["threads"] <= MAX_THREADS,
        "number of processes": _is_count(own.get("processes", 1)) and own.get("processes", 1) > 0,
        "place in the epoch": loops["epoch_loop.batch_progress"]["total"]["completed"]
        == step - (not own["validated"]),
        "state of the generators": _are_generator_states(content["generator"]),
        "optimizer": _is_optimizer_state(content["optimizer"], model, rule),
    }


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any, least: float = 0.0) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= least


def _may_be_none(name: str) -> bool:
    # The norm of gradients that overflowed in float16; an MFU above 1, and speed and memory where
    # the run shared the machine or its model.
    return name == "train/grad_norm" or name.startswith("perf/")


def _are_numbers(values: dict[str, Any]) -> bool:
    return all(
        _is_number(value, -math.inf) or (value is None and _may_be_none(name))
        for name, value in values.items()
    )


def _is_budget_end(end: dict[str, Any]) -> bool:
    given = {name: value for name, value in end["budget"].items() if value is not None}
    return _is_count(end["step"]) and _are_numbers(end["metrics"]) and _are_numbers(given)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def _is_vector(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1 and value.dtype == dtype


def _are_generator_states(states: dict[str, Any]) -> bool:
    python, numpy = states["python"], states["numpy"]
    return (
        _is_vector(states["torch"], torch.uint8)
        and states["torch"].shape == torch.get_rng_state().shape
        and all(_is_vector(state, torch.uint8) for state in states["cuda"])
        and _is_vector(python["words"], torch.uint32)
        and len(python["words"]) == 625
        and _is_vector(numpy["words"], torch.uint32)
        and (numpy["name"], len(numpy["words"]), len(numpy["rest"])) == ("MT19937", 624, 3)
    )


def _is_optimizer_state(states: dict[str, Any], model: GPT, rule: MatrixRule | None) -> bool:
    inner = layer_matrices(model) if rule is not None else set()
    expected = {
        name: kept_shapes(rule, p.shape)
        if rule is not None and p in inner
        else dict.fromkeys(AVERAGES, tuple(p.shape)) | {"step": ()}
        for name, p in model.named_parameters()
    }
    return states.keys() <= expected.keys() and all(
        tuple(one[key].shape) == shape and one[key].is_floating_point()
        for name, one in states.items()
        for key, shape in expected[name].items()
    )
