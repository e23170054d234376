"""What a state must hold for a run to go on from it; somebody else may have made the file."""

import math
from typing import Any

import torch
from torch import Tensor, nn

SAVED_BY = ("StepClock", "MetricRows", "Checkpoints")  # the keys of their states
FACTS = ("text_sha256", "tokenizer", "device", "threads", "torch")
THREADS = 1024  # config.check allows no more
AVERAGES = ("exp_avg", "exp_avg_sq")  # AdamW's


def check_state(content: dict[str, Any], model: nn.Module) -> None:
    """Raise ValueError, saying which part, where it is not the state of a run of `model`.

    Names, kinds, ranges and shapes: torch's own loading checks none of an optimizer's, and its
    fused step would read past a tensor's end. `model` may be on the meta device.
    """
    try:
        for part, holds in _parts(content, model).items():
            if not holds:
                raise ValueError(f"its {part} is not that of a run")
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no state of a run ({type(error).__name__}: {error})") from None


def _parts(content: dict[str, Any], model: nn.Module) -> dict[str, bool]:
    step = content["global_step"]
    clock, rows, own = (content["callbacks"][key] for key in SAVED_BY)
    loops = content["loops"]["fit_loop"]
    row = content["since_row"]
    return {
        "version of Lightning": isinstance(content["pytorch-lightning_version"], str),
        "step": _whole(step),
        "clock": _number(clock["seconds"])
        and _vector(clock["step_seconds"], torch.float64)
        and len(clock["step_seconds"]) <= step,
        "count of rows": all(_whole(rows[key]) for key in ("rows", "logged_step", "timed_steps")),
        "newest row": _numbers(rows["last"]),
        "completed budgets": all(map(_budget_end, rows.get("completed") or [])),
        "loss since the newest row": all(_scalar(loss) for loss in row["train_losses"])
        and _scalar(row["grad_norm"])
        and _number(row["lr"]),
        "record": isinstance(own["validated"], bool)
        and all(isinstance(own[name], str) for name in FACTS if name != "threads"),
        "number of threads": _whole(own["threads"]) and 0 < own["threads"] <= THREADS,
        "place in the epoch": loops["epoch_loop.batch_progress"]["total"]["completed"]
        == step - (not own["validated"]),
        "state of the generators": _generators(content["generator"]),
        "optimizer": _optimizer(content["optimizer"], model),
    }


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _number(value: Any, least: float = 0.0) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= least


def _numbers(values: dict[str, Any]) -> bool:
    # An MFU that cannot be is none.
    return all(
        _number(value, -math.inf) or (value is None and name == "perf/mfu")
        for name, value in values.items()
    )


def _budget_end(end: dict[str, Any]) -> bool:
    given = {name: value for name, value in end["budget"].items() if value is not None}
    return _whole(end["step"]) and _numbers(end["metrics"]) and _numbers(given)


def _scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def _vector(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1 and value.dtype == dtype


def _generators(states: dict[str, Any]) -> bool:
    python, numpy = states["python"], states["numpy"]
    return (
        _vector(states["torch"], torch.uint8)
        and states["torch"].shape == torch.get_rng_state().shape
        and all(_vector(state, torch.uint8) for state in states["cuda"])
        and _vector(python["words"], torch.uint32)
        and len(python["words"]) == 625
        and _vector(numpy["words"], torch.uint32)
        and (numpy["name"], len(numpy["words"]), len(numpy["rest"])) == ("MT19937", 624, 3)
    )


def _optimizer(states: dict[str, Any], model: nn.Module) -> bool:
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return states.keys() <= shapes.keys() and all(
        _scalar(one["step"])
        and all(one[average].shape == shapes[name] for average in AVERAGES)
        and all(one[average].is_floating_point() for average in AVERAGES)
        for name, one in states.items()
    )
