"""Records attention on fixed validation text: entropy and sink mass per layer, and heatmaps."""

from typing import Any

import lightning.pytorch as L
from lightning.fabric.utilities import move_data_to_device

from gptattn.maps.head_statistics import measure_heads
from gptattn.maps.heatmap import draw_heads
from gptattn.position.base import Documents
from gptattn.training.preflight import PreparedRun
from gptattn.training.record import RunTensorBoard, log_row

TOKENS = 512  # to measure on: with GPT-2 small, 1.5% of a validation's time
MAP_TOKENS = 64  # in a heatmap


class AttentionLog(L.Callback):
    """Record entropy and sink mass at each validation, and heatmaps at the end of training.

    All validations and runs measure on the same tokens. The metrics are means over a layer's heads:
    `val_attention/entropy/layer_00`, in nats, and `val_attention/sink/layer_00`, from 0 to 1.
    TensorBoard sorts by name, so the prefix `val_` puts the losses first. Layers whose attention
    has no maps are left out.
    """

    def __init__(self, prepared: PreparedRun, board: RunTensorBoard) -> None:
        self.board = board
        self.rows, self.documents = prepared.data.opening(prepared.cfg.model.context_length, TOKENS)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.rows.shape[1] == 1:  # every weight is 1
            return
        ids, documents_BT = move_data_to_device((self.rows, self.documents), pl_module.device)
        documents = None if documents_BT is None else Documents.numbered(documents_BT)
        metrics: dict[str, float] = {}
        for layer, w_BHTS in pl_module.model.each_attention(ids, documents_BT):
            measured = measure_heads(w_BHTS, documents)
            for name, value_H in zip(("entropy", "sink"), measured, strict=True):
                metrics[f"val_attention/{name}/layer_{layer:02d}"] = value_H.mean().item()
        log_row(trainer.loggers, metrics, trainer.global_step)

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        model, step = pl_module.model, trainer.global_step
        was_training = model.training
        model.eval()
        batch = (self.rows, self.documents)
        first = [one if one is None else one[:1, :MAP_TOKENS] for one in batch]
        for layer, w_BHTS in model.each_attention(*move_data_to_device(first, pl_module.device)):
            image = draw_heads(w_BHTS[0].float().cpu().numpy())
            tag = f"val_attention/layer_{layer:02d}"
            self.board.experiment.add_image(tag, image, step, dataformats="HWC")
        model.train(was_training)
