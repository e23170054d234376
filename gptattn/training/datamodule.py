"""The Lightning data module, which gives the training and validation batches to the trainer."""

from collections.abc import Callable, Iterable

import lightning.pytorch as L

from gptattn.data.sampler import Batch, TrainingStream, ValidationSet
from gptattn.data.tokens import TokenData


class TokenDataModule(L.LightningDataModule):
    """Training and validation batches of one text.

    A batch is a few short reads, so no worker processes are needed. `on_made` is called with the
    seconds that each training batch took. `pinned`: batches go to a GPU from pinned memory, for
    which the host does not wait.
    """

    def __init__(
        self,
        data: TokenData,
        *,
        seed: int,
        batch_size: int,
        val_batch_size: int,
        context_length: int,
        on_made: Callable[[float], None] = lambda seconds: None,
        pinned: bool = False,
    ) -> None:
        super().__init__()
        self.data, self.seed = data, seed
        self.batch_size, self.val_batch_size = batch_size, val_batch_size
        self.context_length, self.on_made, self.pinned = context_length, on_made, pinned

    def train_dataloader(self) -> Iterable[Batch]:
        # global_step counts the steps taken, so a resumed run starts with its next step's batch.
        first_step = self.trainer.global_step if self.trainer is not None else 0
        return TrainingStream(
            self.data.train,
            self.seed,
            self.batch_size,
            self.context_length,
            first_step,
            self.on_made,
        )

    def val_dataloader(self) -> Iterable[Batch]:
        return ValidationSet(self.data.val, self.val_batch_size, self.context_length)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        ids, targets = batch
        return (ids.pin_memory(), targets.pin_memory()) if self.pinned else batch
