"""Write run folders that hold what the comparison reads of a finished run."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gptattn.runs.folder import RunFolder
from gptattn.runs.speeds import Session, Turns, add_speeds
from gptattn.runs.two_stages import variant_key

TOKENS, FLOPS = 2_048, 738_048.0  # tokens per step; FLOPs per token


def write_run(
    folder: Path,
    variant: str,
    seed: int,
    loss: float,
    *,
    metrics: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    choices: dict[str, str] | None = None,
    summary: dict[str, Any] | None = None,
    identity: dict[str, Any] | None = None,
    **settings: object,
) -> Path:
    """Write a finished run without curves; `settings` are those of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    node: dict[str, Any] = {
        "choices": {"attn": variant, **(choices or {})},
        "seed": seed,
        "attn": {"_target_": f"gptattn.attention.{variant}"},
        "tokenizer": {"_target_": "gptattn.data.tokenizer.ByteTokenizer"},
        "model": {"d_mlp": None, "context_length": 128, **settings},
        "budget": {"steps": None, "tokens": None, "seconds": None, "default_steps": 1000},
        "validation": {"fraction": 0.1, "count": 5},
        **(config or {}),
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(node), encoding="utf-8")
    result = {
        "status": "done",
        "variant": variant,
        "seed": seed,
        "steps": 1000,
        "metrics": {
            "val/loss": loss,
            "val/bits_per_byte": loss / math.log(2),
            "perf/tokens_per_s": 1000.0,
            "perf/step_ms": 10.0,
            "perf/peak_memory_training_mb": 400.0,
            "cost/params": 1200,
            "cost/params_attention": 300,
            "cost/flops_per_token": FLOPS,
            "cost/kv_bytes_per_token": 1024.0,
            **(metrics or {}),
        },
        "data": {"text_sha256": "abcdefgh", "tokenizer": "byte", "val_tokens": 99, **(data or {})},
        "hyperparameters": {
            "device": "cpu",
            "attn": variant,
            "seed": seed,
            "lr": 0.002,
            "million params": 0.0012,
            "cache bytes per token": 1024.0,
        },
        "environment": {"gptattn": "0.1.0", "libraries": {"torch": "2.13.0"}} | (environment or {}),
        **(summary or {}),
    }
    (folder / "summary.json").write_text(json.dumps(result), encoding="utf-8")
    code = {"gptattn.attention.core": "c0", f"gptattn.attention.variants.{variant}": "v0"}
    known = {"text": "abcdefgh", "device": "cpu", "code": code} | (identity or {})
    (folder / "identity.json").write_text(json.dumps(known), encoding="utf-8")
    return folder


def write_sweep(folder: Path, losses: Mapping[str, Sequence[float]], **same: Any) -> Path:
    """Write a run with curves for each variant and loss; seeds count from 1."""
    for variant, values in losses.items():
        for seed, loss in enumerate(values, start=1):
            run = write_run(folder / f"{variant}_s{seed}", variant, seed, loss, **same)
            write_rows(run, curve_rows(loss))
    return folder


def curve_rows(loss: float, steps: int = 100, validations: int = 5) -> list[dict[str, Any]]:
    """A row every tenth step, and validations at equal distances, the last of which has `loss`."""
    rows: list[dict[str, Any]] = [{"step": 0, "time": 1000.0, "cost/params": 1200}]
    for step in [1, *range(10, steps + 1, 10)]:
        value = loss + 2 * float(np.exp(-step / 20))
        progress = {
            "progress/tokens": step * TOKENS,
            "progress/seconds": step * 0.5,
            "progress/flops": step * TOKENS * FLOPS,
        }
        rows.append({"step": step, "time": 1000.0 + step, "train/loss": value} | progress)
        if step > 1 and step % (steps // validations) == 0:
            val = {"val/loss": loss + (steps - step) / steps, "val/bits_per_byte": loss / 0.7}
            rows.append({"step": step, "time": 1000.0 + step} | val | progress)
            rows.append({"step": step, "time": 1000.0 + step, "sample/text": 'a "\n\u2028 b'})
    return rows


def write_rows(run: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the run's metrics.jsonl."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (run / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")


def write_speeds(home: Path, made: str, threads: int, **steps: list[float]) -> None:
    """Record a session with the seconds of each variant's step in each round."""
    variants = {}
    for variant, step in steps.items():
        run = RunFolder(home / f"{variant}_s1")
        code = run.read_provenance().digest
        rounds = len(step)
        turns = Turns(code, step, {1: [0.002] * rounds, 8: [0.004] * rounds}, [1e-12] * rounds)
        variants[variant_key(run.read_record())] = turns
    add_speeds(home, Session(made, "a processor", threads, {}, variants))
