"""Decoding speed: the whole model beside transformers' own `generate`, and attention alone.

`make bench-decode`, or in its environment: python scripts/bench_decode.py [--rounds N]
GPT-2 small sizes, float32 on the CPU (bfloat16 on a GPU): prefill 512 tokens, then 64 one by one,
at batch 1 and 8; and one attention layer's step against caches of 1,024 and 8,192 tokens. Ends in
one line of JSON.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from bench import interleave, quiet_threads, ratio, spread
from rich.console import Console
from rich.table import Table

from gptattn.attention import Attention, GroupedQueryAttention, MultiHeadAttention
from gptattn.attention.wrapper import MultiHeadAttentionWrapper
from gptattn.build import build_model
from gptattn.cli import check_job
from gptattn.cost import parameter_count
from gptattn.device import resolve_device, synchronize
from gptattn.generate import stream
from gptattn.gpt import GPT
from gptattn.sampling import Sampling

PROMPT, NEW, VOCABULARY = 512, 64, 50257
GREEDY = Sampling(temperature=0)
VARIANTS: dict[str, list[str]] = {
    "mha": ["attn=mha"],
    "gqa (4)": ["attn=gqa", "attn.num_kv_heads=4"],
    "mqa": ["attn=mqa"],
    "mha_wrapper": ["attn=mha_wrapper"],
}
D_MODEL, HEADS = 768, 12
LAYERS: dict[str, Callable[[int], Attention]] = {
    "mha": lambda S: MultiHeadAttention(D_MODEL, D_MODEL, S, HEADS),
    "gqa (4)": lambda S: GroupedQueryAttention(D_MODEL, D_MODEL, S, HEADS, num_kv_heads=4),
    "mqa": lambda S: GroupedQueryAttention(D_MODEL, D_MODEL, S, HEADS, num_kv_heads=1),
    "mha_wrapper": lambda S: MultiHeadAttentionWrapper(D_MODEL, D_MODEL, S, HEADS),
}


@dataclass(frozen=True)
class Setting:
    device: torch.device
    dtype: torch.dtype
    rounds: int
    seed: int


def read_bandwidth(setting: Setting) -> float:
    """Bytes per second at which this device reads: a matrix times a vector, best of ten.

    The matrix has 1 GiB, so that no cache holds it; each element is used once, as in decoding.
    """
    n = 16384
    matrix = torch.ones(2**30 // setting.dtype.itemsize // n, n, device=setting.device)
    matrix = matrix.to(setting.dtype)
    vector = torch.ones(n, device=setting.device, dtype=setting.dtype)
    seconds = []
    for _ in range(11):
        synchronize(setting.device)
        start = time.perf_counter()
        torch.mv(matrix, vector)
        synchronize(setting.device)
        seconds.append(time.perf_counter() - start)
    return matrix.nbytes / min(seconds[1:])


def our_model(setting: Setting, variant: str) -> GPT:
    own = ["model=gpt2_small", f"model.vocab_size={VOCABULARY}", "trainer=cpu"]
    model = build_model(check_job([*own, *VARIANTS[variant]]), vocab_size=256)
    return model.to(setting.device, setting.dtype).eval()


def decode_ours(model: GPT, setting: Setting, batch: int) -> tuple[float, float]:
    """Seconds of the prefill with the first token, and of each of the others."""
    ids = torch.arange(PROMPT, device=setting.device).expand(batch, -1)
    synchronize(setting.device)
    start = time.perf_counter()
    steps = stream(model, ids, NEW, GREEDY)
    next(steps)
    synchronize(setting.device)
    first = time.perf_counter()
    for _ in steps:
        pass
    synchronize(setting.device)
    return first - start, (time.perf_counter() - first) / (NEW - 1)


def transformers_model(setting: Setting) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        activation_function="gelu_pytorch_tanh",
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
    )
    model: Any = GPT2LMHeadModel(config)
    return model.to(setting.device, setting.dtype).eval()


@torch.no_grad()
def decode_transformers(model: Any, setting: Setting, batch: int) -> tuple[float, float]:
    ids = torch.arange(PROMPT, device=setting.device).expand(batch, -1)
    mask = torch.ones_like(ids)

    def seconds(tokens: int) -> float:
        synchronize(setting.device)
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        synchronize(setting.device)
        return time.perf_counter() - start

    first = seconds(1)
    return first, (seconds(NEW) - first) / (NEW - 1)


def whole_model(setting: Setting, console: Console) -> dict[str, Any]:
    models: dict[str, Any] = {name: our_model(setting, name) for name in VARIANTS}
    models["transformers"] = transformers_model(setting)
    bandwidth = read_bandwidth(setting)
    prefill: dict[str, list[float]] = {}
    contenders = {}
    for name, model in models.items():
        decode = decode_transformers if name == "transformers" else decode_ours
        for batch in (1, 8):
            key = f"{name} x{batch}"
            prefill[key] = []

            def measure(
                decode: Any = decode, model: Any = model, batch: int = batch, key: str = key
            ) -> float:
                first, each = decode(model, setting, batch)
                prefill[key].append(first)
                return each

            contenders[key] = measure
    for measure in contenders.values():
        measure()  # warm up
    for times in prefill.values():
        times.clear()
    each = interleave(contenders, setting.rounds, setting.seed)
    table = Table(title=f"prefill {PROMPT}, decode {NEW}; reading at {bandwidth / 1e9:.1f} GB/s")
    for heading in ("", "prefill s", "tokens/s", "spread", "with prefill", "of the bandwidth"):
        table.add_column(heading, justify="right" if heading else "left")
    result: dict[str, Any] = {"bandwidth_gb_s": bandwidth / 1e9}
    for key, seconds in each.items():
        name, batch = key.rsplit(" x", 1)
        rate = int(batch) / median(seconds)
        total = [p + s * (NEW - 1) for p, s in zip(prefill[key], seconds, strict=True)]
        share = None
        if name != "transformers":
            # What a step has to read: all weights, and the cache as it is half-way.
            model = models[name]
            cache = model.new_cache(int(batch), PROMPT + NEW // 2).nbytes
            least = (parameter_count(model) * setting.dtype.itemsize + cache) / bandwidth
            share = least / median(seconds)
        result[key] = {
            "tokens_per_s": rate,
            "prefill_s": median(prefill[key]),
            "tokens_per_s_with_prefill": int(batch) * NEW / median(total),
            "of_bandwidth": share,
        }
        table.add_row(
            key,
            f"{median(prefill[key]):.3f}",
            f"{rate:,.1f}",
            f"{spread(seconds):.1%}",
            f"{int(batch) * NEW / median(total):,.1f}",
            "" if share is None else f"{share:.2f}",
        )
    console.print(table)
    for batch in (1, 8):
        base = each[f"transformers x{batch}"]
        for name in VARIANTS:
            faster = ratio(base, each[f"{name} x{batch}"])
            result[f"{name} x{batch}"]["over_transformers"] = faster
            console.print(f"{name} x{batch}: {faster:.2f} times transformers' rate")
    for name in VARIANTS:
        more = 8 * ratio(each[f"{name} x1"], each[f"{name} x8"])
        result[f"{name} x8"]["over_batch_1"] = more
        console.print(f"{name}: batch 8 gives {more:.2f} times the tokens/s of batch 1")
    return result


@torch.no_grad()
def layer_step(module: Attention, setting: Setting, batch: int, S: int) -> float:
    """Seconds of one token against S - 1 others: projections, attention, projection."""
    cache = module.new_cache(batch, S)
    x = torch.randn(batch, 1, D_MODEL, device=setting.device, dtype=setting.dtype)
    cache.advance(S - 1)
    seconds = []
    for _ in range(12):
        synchronize(setting.device)
        start = time.perf_counter()
        module(x, cache)
        synchronize(setting.device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])


def attention_alone(setting: Setting, console: Console) -> dict[str, Any]:
    result: dict[str, Any] = {}
    table = Table(title="one attention layer, one token: milliseconds, and mha's over it")
    for heading in ("S x batch", *LAYERS):
        table.add_column(heading, justify="right" if heading in LAYERS else "left")
    for S in (1024, 8192):
        for batch in (1, 8):
            modules = {
                name: make(S).to(setting.device, setting.dtype).eval()
                for name, make in LAYERS.items()
            }
            measures = {n: partial(layer_step, m, setting, batch, S) for n, m in modules.items()}
            each = interleave(measures, setting.rounds, setting.seed)
            cells = []
            for name, seconds in each.items():
                faster = ratio(each["mha"], seconds)
                result[f"{name} S={S} x{batch}"] = {
                    "ms": 1e3 * median(seconds),
                    "mha_over": faster,
                    "spread": spread(seconds),
                }
                cells.append(f"{1e3 * median(seconds):.3f} ({faster:.2f})")
            table.add_row(f"{S} x {batch}", *cells)
    console.print(table)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding speed.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("model", "attention"))
    args = parser.parse_args()
    quiet_threads(args.threads)
    device = resolve_device("auto")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    setting = Setting(device, dtype, args.rounds, args.seed)
    console = Console(width=120)
    result: dict[str, Any] = {"device": str(device), "dtype": str(dtype), "threads": args.threads}
    if args.only != "model":
        result["attention"] = attention_alone(setting, console)
    if args.only != "attention":
        result["model"] = whole_model(setting, console)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
