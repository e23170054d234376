"""The Lightning data module, which gives the training and validation batches to the trainer."""

from collections.abc import Callable, Iterable

import lightning.pytorch as L

from gptattn.data.run_data import RunData
from gptattn.data.sampler import Batch, Rows, TrainingStream


class RunDataModule(L.LightningDataModule):
    """Training and validation batches of one text, or of one task.

    A batch is a few short reads or draws, so no worker processes are needed. `on_made` is called
    with the seconds that each training batch took. `pinned`: batches go to a GPU from pinned
    memory, for which the host does not wait. `rows`: those of each training batch that this process
    trains on, if others train on the rest.
    """

    def __init__(
        self,
        data: RunData,
        *,
        seed: int,
        batch_size: int,
        val_batch_size: int,
        context_length: int,
        on_made: Callable[[float], None] = lambda seconds: None,
        pinned: bool = False,
        rows: Rows | None = None,
    ) -> None:
        super().__init__()
        self.data, self.seed = data, seed
        self.batch_size, self.val_batch_size = batch_size, val_batch_size
        self.context_length, self.on_made, self.pinned = context_length, on_made, pinned
        self.rows = rows

    def train_dataloader(self) -> Iterable[Batch]:
        # global_step counts the steps taken, so a resumed run starts with its next step's batch.
        first_step = self.trainer.global_step if self.trainer is not None else 0
        return TrainingStream(self._training_batch, first_step, self.on_made)

    def _training_batch(self, step: int) -> Batch:
        return self.data.training_batch(
            self.seed, step, self.batch_size, self.context_length, self.rows
        )

    def val_dataloader(self) -> Iterable[Batch]:
        return self.data.validation(self.val_batch_size, self.context_length)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return tuple(tensor.pin_memory() for tensor in batch) if self.pinned else batch
