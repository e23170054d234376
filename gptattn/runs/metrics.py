"""The metrics that runs record and reports show, `group/what_unit`. It needs no torch.

A metric is recorded where it is measured, and is then in metrics.jsonl, TensorBoard and
`load_runs`. REPORTED shows it in reports.
"""

from collections.abc import Callable, Iterable, Mapping

LOSS = "val/loss"  # nats per token, of the held-out text
BITS, ACCURACY = "val/bits_per_byte", "val/accuracy"  # of a text, of a task
OF_DATA = (ACCURACY, BITS)  # a run has one of them
SOLVED = 0.99  # the accuracy, at every length, from which a run has solved its task
SLICE = f"{ACCURACY}_"  # before a label of scored positions, or a row length
TRAIN_LOSS = "train/loss"  # nats per token, the mean since the row before
# A run's own training speed, even while it shares the machine. No report compares it.
SPEED, STEP_MS = "perf/tokens_per_s", "perf/step_ms"
# A variant's speed, measured in turns with others (`speeds.py`): of training, and of decoding one
# or eight rows up to a full context.
TRAINING_SPEED, TRAINING_MS = "speed/tokens_per_s", "speed/step_ms"
TRAINING_MFU = "speed/mfu"
DECODING_SPEED, DECODING_MS = "speed/decode_tokens_per_s", "speed/decode_step_ms"
DECODING_SPEED_8 = "speed/decode_tokens_per_s_batch_8"
SPEED_RATIO = "speed/ratio"  # of training speed, over the baseline's
MEASURED = (
    *(TRAINING_SPEED, TRAINING_MS, TRAINING_MFU),
    *(DECODING_SPEED, DECODING_MS, DECODING_SPEED_8),
)
MEMORY = "perf/peak_memory_training_mb"  # 10^6 bytes
PARAMS, PARAMS_ATTENTION = "cost/params", "cost/params_attention"
FLOPS = "cost/flops_per_token"  # in training
CACHE = "cost/kv_bytes_per_token"  # None: the mechanism has no cache
# Hyperparameters that TensorBoard's table of runs always shows.
FIRST_COLUMNS = ("attn", "million params", "cache bytes per token")

# In a report's order: the heading in its table, and the format of a mean. None: only in its files.
REPORTED: dict[str, tuple[str, Callable[[float], str]] | None] = {
    LOSS: ("val loss", "{:.4f}".format),
    ACCURACY: ("accuracy", "{:.4f}".format),
    BITS: ("bits/byte", "{:.3f}".format),
    TRAINING_SPEED: ("tokens/s", "{:,.0f}".format),
    SPEED_RATIO: ("× baseline", "{:.3f}".format),  # noqa: RUF001
    TRAINING_MS: ("step ms", "{:,.1f}".format),
    TRAINING_MFU: None,
    PARAMS: ("params", "{:,.0f}".format),
    PARAMS_ATTENTION: None,
    FLOPS: ("MFLOPs/token", lambda flops: f"{flops * 1e-6:,.2f}"),
    CACHE: ("cache B/token", "{:,.0f}".format),
    DECODING_SPEED: ("decode tokens/s", "{:,.0f}".format),
    DECODING_SPEED_8: ("decode 8 rows", "{:,.0f}".format),
    DECODING_MS: None,
    MEMORY: ("peak MB", "{:,.0f}".format),
}


def list_slices(metrics: Iterable[str]) -> list[str]:
    """Return the metrics that begin with SLICE, each once, lengths first."""
    return sorted({m for m in metrics if m.startswith(SLICE)}, key=lambda m: (len(m), m))


def lowest_accuracy(metrics: Mapping[str, float | None]) -> float | None:
    """Return a task's lowest accuracy over the lengths at which it was measured."""
    lengths = {m for m in metrics if m == ACCURACY or m.removeprefix(SLICE).isdecimal()}
    return min((x for m, x in metrics.items() if m in lengths and x is not None), default=None)
