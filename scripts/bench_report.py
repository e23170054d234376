"""Measures time and memory of the report on many long runs: `python scripts/bench_report.py`.

Writes run folders such as training makes into a temporary folder, and starts the report as a user
would. Prints its seconds, its peak memory and whether it imported torch. The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gptattn.runs.folder import RunFolder

STEPS_PER_ROW, TOKENS_PER_STEP, FLOPS_PER_TOKEN = 10, 2048, 738048.0
VALIDATIONS = 10
# -X importtime lists all imports on stderr.
COMMAND = (sys.executable, "-X", "importtime", str(Path(__file__).parent / "compare.py"))


def config(variant: str, heads: int, seed: int) -> dict[str, Any]:
    """Return a run's config.yaml, as far as the report reads it."""
    return {
        "choices": {"attn": variant, "model": "tiny", "data": "pydocs", "tokenizer": "byte"},
        "experiment_name": "bench",
        "seed": seed,
        "batch_size": 16,
        "attn": {"_target_": "gptattn.attention.GroupedQueryAttention", "num_kv_heads": heads},
        "tokenizer": {"_target_": "gptattn.data.tokenizer.ByteTokenizer"},
        "model": {"num_layers": 2, "num_heads": 4, "d_model": 64, "context_length": 128},
        "budget": {"steps": None, "tokens": None, "seconds": None, "default_steps": 50_000},
        "validation": {"fraction": 0.1, "count": VALIDATIONS},
    }


def summary(variant: str, index: int, seed: int, loss: float) -> dict[str, Any]:
    """Return a run's summary.json, as far as the report reads it."""
    metrics = {
        "val/loss": loss,
        "val/bits_per_byte": loss / np.log(2),
        "perf/tokens_per_s": 50_000.0 + 1_000 * index + seed,
        "perf/step_ms": 27.0,
        "perf/peak_memory_training_mb": 435.0,
        "cost/params": 100_000 + 1_000 * index,
        "cost/params_attention": 24_960,
        "cost/flops_per_token": FLOPS_PER_TOKEN,
        "cost/kv_bytes_per_token": 64.0 * (index + 1),
    }
    return {
        "status": "done",
        "steps": 50_000,
        "completed": [{"budget": {"default_steps": 50_000}, "step": 50_000, "metrics": metrics}],
        "variant": variant,
        "seed": seed,
        "metrics": metrics,
        "hyperparameters": {"device": "cpu"},
        "data": {"text_sha256": "0" * 64, "tokenizer": "byte", "val_tokens": 46_619},
        "environment": {"gptattn": "0.1.0", "git_commit": "0" * 40, "threads": 2},
    }


def metric_rows(points: int, loss: float, generator: np.random.Generator) -> str:
    """Return a metrics.jsonl of `points` log rows and VALIDATIONS validation rows."""
    losses = loss + 3 * np.exp(-np.arange(points) / (points / 10))
    losses += generator.normal(scale=0.05, size=points)
    rows = []
    for i, value in enumerate(losses.tolist()):
        step = (i + 1) * STEPS_PER_ROW
        tokens = step * TOKENS_PER_STEP
        progress = {
            "progress/tokens": tokens,
            "progress/seconds": step * 0.02774893261,
            "progress/flops": tokens * FLOPS_PER_TOKEN,
        }
        row = {"step": step, "time": 1795258645.472 + step, "train/loss": value}
        row |= {"train/lr": 0.001834512, "train/grad_norm": 0.6079427003860474}
        row |= {"perf/tokens_per_s": 55017.69726950232, "perf/step_ms": 37.22438600016176}
        row |= {"perf/mfu": 0.5753062043573723, "perf/peak_memory_training_mb": 534.994944}
        rows.append(row | progress)
        if (i + 1) % (points // VALIDATIONS) == 0:
            val = {"val/loss": value, "val/perplexity": 6.0, "val/bits_per_byte": value / 0.693}
            rows.append({"step": step, "time": 1795258645.472 + step} | val | progress)
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_runs(folder: Path, variants: int, seeds: int, points: int) -> None:
    """Write a run folder for each variant and seed; losses have noise per seed and per run."""
    generator = np.random.default_rng(0)
    noise = generator.normal(scale=0.02, size=seeds)
    for index in range(variants):
        variant = "mha" if index == 0 else f"variant_{index:03d}"
        rows = metric_rows(points, 1.7 + 0.001 * index, generator)
        for seed in range(seeds):
            run = folder / f"{variant}_s{seed}"
            run.mkdir(parents=True)
            loss = 1.7 + 0.001 * index + noise[seed] + generator.normal(scale=0.005)
            RunFolder(run).config_file.write_text(yaml.safe_dump(config(variant, index + 1, seed)))
            RunFolder(run).summary_file.write_text(json.dumps(summary(variant, index, seed, loss)))
            RunFolder(run).rows_file.write_text(rows)


def measure(folder: Path, out: Path) -> dict[str, Any]:
    """Run the report in its own process; return its seconds, peak MB, imports and page size."""
    start = time.perf_counter()
    with subprocess.Popen(
        [*COMMAND, str(folder), "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        imports = [line.rpartition("|")[2].strip() for line in process.stderr if "|" in line]
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the report ended with {process.returncode}")
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "peak_mb": round(usage.ru_maxrss * 1024 / 1e6),
        "torch_imported": any(name.partition(".")[0] == "torch" for name in imports),
        "page_mb": round((out / "comparison.html").stat().st_size / 1e6, 2),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--points", type=int, default=5_000, help="log rows per run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_runs(folder / "runs", args.variants, args.seeds, args.points)
        megabytes = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6
        print(f"{args.variants * args.seeds} runs of {args.points} rows, {megabytes:,.0f} MB")
        found = measure(folder / "runs", folder / "out")
    print(f"{found['seconds']} s, peak {found['peak_mb']} MB")
    print(json.dumps({"bench": "report", **vars(args), **found}))


if __name__ == "__main__":
    main()
