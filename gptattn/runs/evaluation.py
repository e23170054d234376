"""The contents of evaluation.json: the measurements of a finished run.

It needs no torch. Losses are in nats per token, of float32 weights on the run's own held-out text.
"""

import msgspec


class Basis(msgspec.Struct, frozen=True):
    """What an evaluation was measured on; if that changes, a new evaluation replaces it."""

    weights: str  # sha256 of their file
    text: str  # sha256, as in the summary
    code: str  # hash of the model's code and of the evaluation's
    device: str


class Bin(msgspec.Struct, frozen=True, array_like=True):
    """The mean loss of the predictions from `first` to `last` tokens of context, both included.

    A window's first prediction is made from one token.
    """

    first: int
    last: int
    loss: float


class LengthLoss(msgspec.Struct, frozen=True):
    """Loss in windows of one length."""

    windows: int  # how often each position was scored
    loss: float  # mean over all positions
    bins: list[Bin]

    def between(self, first: int, last: int) -> float:
        """Return the mean loss of the bins that lie within these contexts, both included."""
        inside = [one for one in self.bins if first <= one.first and one.last <= last]
        counts = [one.last - one.first + 1 for one in inside]
        return sum(n * one.loss for n, one in zip(counts, inside, strict=True)) / sum(counts)


class CacheLoss(msgspec.Struct, frozen=True):
    """Loss of the whole held-out text, decoded through one kind of cache."""

    loss: float
    nbytes: int  # of all layers' caches for one row of the trained context length


class TaskScores(msgspec.Struct, frozen=True):
    """Scores on a task of lm-evaluation-harness, by the harness's metric names."""

    request: str = msgspec.field(name="asked")  # the task, its YAML file, group or tag
    harness: str  # its version
    shots: int | None  # examples before each item; None: a group
    digest: str  # hash of the items with their prompts and answers
    values: dict[str, float]
    errors: dict[str, float]  # standard errors over items
    items: dict[str, list[float]]  # of the metrics that are a mean over items


class Evaluation(msgspec.Struct, frozen=True):
    """All measurements of a run with its newest weights, those after optimizer step `step`."""

    basis: Basis
    step: int
    context_length: int  # in training
    lengths: dict[int, LengthLoss] = {}
    caches: dict[str, CacheLoss] = {}
    tasks: dict[str, TaskScores] = {}

    def bytes_per_token(self, cache: str) -> float:
        """Return a cache's bytes divided by the context length, as `cost/kv_bytes_per_token`."""
        return self.caches[cache].nbytes / self.context_length
