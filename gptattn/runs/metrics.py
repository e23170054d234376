"""The names of the metrics that runs record and reports show, `group/what_unit`. It needs no torch.

A metric is recorded where it is measured; being in REPORTED shows it in reports and in
TensorBoard's table of runs.
"""

LOSS = "val/loss"  # nats per token, of the held-out text
BITS, ACCURACY = "val/bits_per_byte", "val/accuracy"  # of a text, of a task
OF_DATA = (ACCURACY, BITS)  # a run has one of them
TRAIN_LOSS = "train/loss"  # nats per token, the mean since the row before
SPEED = "perf/tokens_per_s"  # in training; None if other runs shared the machine
STEP_MS = "perf/step_ms"
MFU = "perf/mfu"  # share of the device's measured FLOP/s
MEMORY = "perf/peak_memory_training_mb"  # 10^6 bytes
FLOPS = "cost/flops_per_token"  # in training
CACHE = "cost/kv_bytes_per_token"

# In the order of a report.
REPORTED = (
    LOSS,
    *OF_DATA,
    SPEED,
    STEP_MS,
    "cost/params",
    "cost/params_attention",
    FLOPS,
    CACHE,
    MEMORY,
)
