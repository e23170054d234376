"""Attention in the record: entropy and sink mass per layer, and maps, on fixed validation text."""

from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from torch import Tensor

from gptattn.attention.head_statistics import entropy, sink_mass
from gptattn.data.tokens import Tokens
from gptattn.maps.heatmap import heatmap
from gptattn.model.gpt import GPT
from gptattn.training.recorder import RunRecorder

TOKENS = 512  # of the validation text, in the figures: 1.5% of a validation of GPT-2 small
MAP_TOKENS = 64  # in the maps


class AttentionLog(L.Callback):
    """Figures at each validation, maps at the end; the same tokens each time and in every run.

    A layer's figures, the means over its heads, are `val_attention/entropy/layer_00`, in nats, and
    `val_attention/sink/...`; with `heads`, `.../layer_00/head_00` is that of a head. The names
    begin with val_ since TensorBoard sorts them: the losses come first. Layers whose attention has
    no maps have no figures either.
    """

    def __init__(
        self,
        recorder: RunRecorder,
        val: Tokens,
        context_length: int,
        heads: bool,
        console: Console,
    ) -> None:
        self.recorder, self.heads, self.console = recorder, heads, console
        self.rows = opening_rows(val, context_length, TOKENS)
        self.map_row = opening_rows(val, context_length, MAP_TOKENS)[:1]

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Say once what will not be in the record."""
        shown, layers = len(pl_module.model.layers_with_maps()), len(pl_module.model.layers())
        if shown < layers:
            self.console.print(
                f"attention: {shown} of {layers} layers have weights to look at; the others are "
                "not in the record"
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        # A token alone sees itself: there is nothing to measure.
        if self.rows.shape[1] > 1 and pl_module.model.layers_with_maps():
            ids = self.rows.to(pl_module.device)
            found = figures(pl_module.model, ids, self.heads)
            self.recorder.log_metrics(found, trainer.global_step)
        # Nothing is trained, and this is the end; `trainer.validating` is true within fit as well.
        if trainer.state.fn == TrainerFn.VALIDATING:
            self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        model, step = pl_module.model, trainer.global_step
        if not model.layers_with_maps():
            return

        def log(layer: int, w_BHTS: Tensor) -> None:
            image = heatmap(w_BHTS[0].float().cpu().numpy())
            self.recorder.log_image(f"val_attention/layer_{layer:02d}", image, step)

        was_training = model.training
        model.eval()
        model.each_attention(self.map_row.to(pl_module.device), log)
        model.train(was_training)


def opening_rows(val: Tokens, context_length: int, tokens: int) -> Tensor:
    """The first of the tokens, as whole rows [B, T] of at most the context: about `tokens`."""
    T = min(tokens, context_length, len(val))
    B = min(tokens, len(val)) // T
    return torch.from_numpy(val[: B * T].astype("int64")).view(B, T)


def figures(model: GPT, ids: Tensor, heads: bool) -> dict[str, float]:
    """Entropy and sink mass on ids [B, T], the mean of each layer; with `heads`, of each head."""
    found: dict[str, float] = {}

    def measure(layer: int, w_BHTS: Tensor) -> None:
        for name, value_H in (("entropy", entropy(w_BHTS)), ("sink", sink_mass(w_BHTS))):
            place = f"val_attention/{name}/layer_{layer:02d}"
            found[place] = value_H.mean().item()
            for head, value in enumerate(value_H.tolist() if heads else ()):
                found[f"{place}/head_{head:02d}"] = value

    model.each_attention(ids, measure)
    return found
