"""The Lightning side of the data: hands the streams to the trainer."""

from collections.abc import Callable, Iterable

import lightning.pytorch as L

from gptattn.data.sampler import Batch, TrainingStream, ValidationSet
from gptattn.data.tokens import TokenData


class TokenDataModule(L.LightningDataModule):
    """Training and validation batches of one text.

    A batch is a few short reads, so there are no workers to seed or to lose.
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
    ) -> None:
        super().__init__()
        self.data, self.seed = data, seed
        self.batch_size, self.val_batch_size = batch_size, val_batch_size
        self.context_length, self.on_made = context_length, on_made

    def train_dataloader(self) -> Iterable[Batch]:
        # global_step is the step to take next, so a resumed run goes on where it stopped.
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
