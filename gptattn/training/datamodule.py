"""The Lightning data module, which gives the training and validation batches to the trainer."""

from collections.abc import Callable, Iterable

import lightning.pytorch as L

from gptattn.data.run_data import RunData
from gptattn.data.sampler import Batch, TrainingStream, rows_of
from gptattn.settings.config import TrainConfig


class RunDataModule(L.LightningDataModule):
    """Training and validation batches of a text or a task; an optimizer step takes
    `accumulate`.

    A batch is a few short reads or draws, so no worker processes are needed. `on_made` is called
    with the seconds that each step's batch took. `pinned`: batches go to a GPU from pinned memory,
    for which the host does not wait.
    """

    def __init__(
        self,
        data: RunData,
        cfg: TrainConfig,
        on_made: Callable[[float], None] = lambda seconds: None,
        pinned: bool = False,
    ) -> None:
        super().__init__()
        self.data, self.cfg, self.on_made, self.pinned = data, cfg, on_made, pinned

    def train_dataloader(self) -> Iterable[Batch]:
        # A torch DataLoader would draw from the global generator, and move the masks of dropout.
        # global_step counts the steps taken, so a resumed run starts with its next step's batch.
        trainer, cfg = self.trainer, self.cfg
        assert trainer is not None
        rows = rows_of(cfg.batch_size, cfg.accumulate, trainer.global_rank, trainer.world_size)

        def batch(step: int) -> Batch:
            sizes = cfg.batch_size, cfg.model.context_length
            # Each process makes the whole batch, in milliseconds, and trains on its rows.
            whole = self.data.training_batch(cfg.seed, step, *sizes)
            return whole if trainer.world_size == 1 else tuple(part[rows] for part in whole)

        return TrainingStream(batch, trainer.global_step, self.on_made, cfg.accumulate)

    def val_dataloader(self) -> Iterable[Batch]:
        return self.data.validation(
            self.cfg.batch_size // self.cfg.accumulate, self.cfg.model.context_length
        )

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return tuple(tensor.pin_memory() for tensor in batch) if self.pinned else batch
