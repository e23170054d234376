"""A model rebuilt with a longer context, on the same weights."""

from dataclasses import replace

import torch

from gptattn.attention.base import window_of
from gptattn.build.model import build_model
from gptattn.errors import ConfigError
from gptattn.model.gpt import GPT
from gptattn.settings.config import Spec, TrainConfig

TOLERANCE = 1e-4  # for hidden states, which are of size 1 or so


def lengthen_settings(cfg: TrainConfig, length: int) -> TrainConfig:
    """Return the run's settings with another context; shares of the old context become tokens.

    A window of 0.25 of 128 tokens stays 32. Stretched rotary positions keep their original context.
    """
    default = {"attn": cfg.attn, "position": cfg.position}
    return replace(
        cfg,
        model=replace(cfg.model, context_length=length),
        layers={name: _in_tokens(one, cfg) for name, one in cfg.layers.items()},
        **_in_tokens(default, cfg),
    )


def _in_tokens(layer: dict[str, Spec], cfg: TrainConfig) -> dict[str, Spec]:
    trained, attn, position = cfg.model.context_length, layer["attn"], layer.get("position", {})
    if isinstance(attn.get("window"), float):
        layer = layer | {"attn": attn | {"window": window_of(attn["window"], trained)}}
    if position.get("stretch", 1) > 1 and position.get("original_context") is None:
        original = round(trained / position["stretch"])
        layer = layer | {"position": position | {"original_context": original}}
    return layer


def check_length(cfg: TrainConfig, model: GPT, length: int) -> None:
    """Raise ConfigError if the model's weights do not fit a context of `length`.

    `model` is built from these settings; it can be on the meta device.
    """
    trained = cfg.model.context_length
    if length <= trained:
        return
    with torch.device("meta"):
        longer = build_model(lengthen_settings(cfg, length), model.vocab_size).state_dict()
    unfit = [n for n, weight in model.state_dict().items() if longer[n].shape != weight.shape]
    if unfit:
        what = unfit[0]
        if what.startswith("input_position."):
            what = f"position={cfg.choices['position']}"
        raise ConfigError(
            "lengths",
            f"{length} is beyond the {trained} positions that {what} has weights for; give "
            f"lengths up to {trained}",
        )


@torch.no_grad()
def build_longer(cfg: TrainConfig, model: GPT, length: int) -> GPT:
    """Return the model of these settings with a context of at least `length`, in eval mode.

    It shares the weights of `model`, and changes with them; it draws no random numbers. Raises
    ConfigError if the weights do not fit, or if its outputs within the trained length differ, as
    they can if a setting is a share of the context.
    """
    trained, weights = cfg.model.context_length, model.state_dict(keep_vars=True)
    if length <= trained:
        return model
    check_length(cfg, model, length)
    with torch.random.fork_rng(devices=[]):
        longer = build_model(lengthen_settings(cfg, length), model.vocab_size).eval()
    longer.load_state_dict(weights, assign=True)
    longer.to(model.head.weight)  # buffers too
    ids = torch.arange(trained, device=model.head.weight.device)[None] % model.vocab_size
    learning, blank = model.training, [w for w in model.parameters() if not w.any()]
    for weight in blank:  # with `block.zero_init`, layers add 0, so any of them would seem right
        weight.copy_(torch.linspace(-0.02, 0.02, weight.numel()).view_as(weight))
    difference = (model.eval().hidden(ids) - longer.hidden(ids)).abs().max().item()
    model.train(learning)
    for weight in blank:
        weight.zero_()
    if difference > TOLERANCE:
        raise ConfigError(
            "lengths",
            f"{length}: with this context, {cfg.variant} gives different outputs within the "
            f"{trained} tokens of its trained context; give lengths up to {trained}",
        )
    return longer
