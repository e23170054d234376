"""Times decoding: the whole model against transformers' own `generate`, and attention alone.

`make bench-decode`, or in its environment: python scripts/bench_decode.py [--rounds N]
    [--variants mha gqa+sink sliding] [--parts gate,sink] [--only attention]
    [--dtypes float32 bfloat16]
GPT-2 small sizes: prefill 512 tokens, then 64 one by one, at batch 1 and 8; and one attention
layer's step against caches of 1,024 and 8,192 tokens, with its projections and without, in the
first dtype; the mean of two layers in a row where the second uses what the first leaves. By default
float32 on the CPU, bfloat16 on a GPU; several take turns in one run, each beside transformers in
the same one. Ends in one line of JSON.
"""

import argparse
import json
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from bench import interleave, quiet_threads, ratio, spread
from contenders import Stack, add_choices, chosen, model_of, stack_of
from rich.console import Console
from rich.table import Table

from gptattn.attention import CacheGroup, Shared
from gptattn.attention.linear import prepare
from gptattn.attention.softmax import SoftmaxAttention
from gptattn.decode.generate import stream
from gptattn.decode.sampling import Sampling
from gptattn.machine.device import resolve_device, synchronize
from gptattn.model.cost import parameter_count
from gptattn.model.gpt import GPT

PROMPT, NEW, VOCABULARY = 512, 64, 50257
GREEDY = Sampling(temperature=0)
VARIANTS = ("mha", "gqa:attn.num_kv_heads=4", "mqa", "mha_wrapper")
D_MODEL = 768


@dataclass(frozen=True)
class Setting:
    """What all measurements share."""

    device: torch.device
    dtypes: list[torch.dtype]
    rounds: int
    seed: int

    @property
    def dtype(self) -> torch.dtype:
        """The first dtype, in which one layer's attention is measured."""
        return self.dtypes[0]


class Reading:
    """Measures the speed of memory: sums 64 MiB, another part each time so that no cache has it."""

    PARTS, BYTES = 16, 2**26

    def __init__(self, setting: Setting) -> None:
        numbers = torch.ones(self.PARTS * self.BYTES // setting.dtype.itemsize)
        self.parts = numbers.to(setting.device, setting.dtype).chunk(self.PARTS)
        self.setting, self.reads = setting, 0

    def seconds(self) -> float:
        """Return the seconds of one read."""
        part = self.parts[self.reads % self.PARTS]
        self.reads += 1
        synchronize(self.setting.device)
        start = time.perf_counter()
        part.sum()
        synchronize(self.setting.device)
        return time.perf_counter() - start


def decode_ours(
    model: GPT, setting: Setting, batch: int, reading: Reading
) -> tuple[float, float, float]:
    """Return the seconds of prefill and first token, of each further token, and of a read.

    A read follows each token, because the speed of memory changes within seconds with the load of
    others on the same hardware.
    """
    ids = torch.arange(PROMPT, device=setting.device).expand(batch, -1)
    steps = stream(model, ids, NEW, GREEDY)
    seconds, reads = [], []
    for _ in range(NEW):
        synchronize(setting.device)
        start = time.perf_counter()
        next(steps)
        synchronize(setting.device)
        seconds.append(time.perf_counter() - start)
        reads.append(reading.seconds())
    return seconds[0], sum(seconds[1:]) / (NEW - 1), sum(reads[1:]) / (NEW - 1)


def transformers_model() -> Any:
    """Build transformers' GPT-2 small on SDPA."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        activation_function="gelu_pytorch_tanh",
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
    )
    return GPT2LMHeadModel(config)


def decode_transformers(model: Any, setting: Setting, batch: int) -> tuple[float, float]:
    """Return the seconds of prefill and first token, and of each further token of `generate`.

    The clock is a stopping criterion, which `generate` calls after each token.
    """
    ids = torch.arange(PROMPT, device=setting.device).expand(batch, -1)
    made: list[float] = []

    def clock(*_: Any) -> torch.Tensor:
        synchronize(setting.device)
        made.append(time.perf_counter())
        return torch.zeros(batch, dtype=torch.bool, device=setting.device)

    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=[clock],
    )
    return made[0] - start, (made[-1] - made[0]) / (NEW - 1)


def whole_model(setting: Setting, variants: list[str], console: Console) -> dict[str, Any]:
    """Time all models at batch 1 and 8; print and return the figures."""
    sizes = f"model.vocab_size={VOCABULARY}"
    models: dict[str, Any] = {}
    peers: dict[str, str] = {}  # name -> transformers in the same dtype
    firsts: dict[str, str] = {}  # name -> the same contender in the first dtype
    for dtype in setting.dtypes:
        more = "" if len(setting.dtypes) == 1 else f" {str(dtype).removeprefix('torch.')}"
        made = {name: model_of(name, sizes) for name in variants}
        for name, model in {**made, "transformers": transformers_model()}.items():
            models[f"{name}{more}"] = model.to(setting.device, dtype).eval()
            peers[f"{name}{more}"] = f"transformers{more}"
            firsts.setdefault(name, f"{name}{more}")
            firsts[f"{name}{more}"] = firsts[name]
    keys = {f"{name} x{batch}": (name, batch) for name in models for batch in (1, 8)}
    prefill: dict[str, list[float]] = {key: [] for key in keys}
    each: dict[str, list[float]] = {key: [] for key in keys}
    read: dict[str, list[float]] = {
        key: [] for key, (name, _) in keys.items() if name != peers[name]
    }
    reading, order = Reading(setting), random.Random(setting.seed)

    def decode(name: str) -> float:
        """Measure both batch sizes directly after each other, because they are compared."""
        for batch in order.sample((1, 8), 2):
            key = f"{name} x{batch}"
            if name == peers[name]:
                first, token = decode_transformers(models[name], setting, batch)
            else:
                first, token, one = decode_ours(models[name], setting, batch, reading)
                read[key].append(one)
            prefill[key].append(first)
            each[key].append(token)
        return each[f"{name} x1"][-1]

    contenders = {name: partial(decode, name) for name in models}
    for measure in contenders.values():
        measure()  # warm up
    for times in (*prefill.values(), *each.values(), *read.values()):
        times.clear()
    interleave(contenders, setting.rounds, setting.seed)
    speeds = [Reading.BYTES / seconds for times in read.values() for seconds in times]
    result: dict[str, Any] = {"read_gb_s": [speed / 1e9 for speed in speeds]}
    table = Table(
        title=f"prefill {PROMPT}, decode {NEW}; a sum reads {median(speeds) / 1e9:.1f} GB/s "
        f"({min(speeds) / 1e9:.1f} to {max(speeds) / 1e9:.1f})"
    )
    headings = (
        "",
        "prefill s",
        "tokens/s",
        "spread",
        "with prefill",
        "of reading",
        "transformers x",
        "first dtype x",
    )
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for key, seconds in each.items():
        name, batch = keys[key]
        whole = [p + s * (NEW - 1) for p, s in zip(prefill[key], seconds, strict=True)]
        row = {
            "tokens_per_s": batch / median(seconds),
            "spread": spread(seconds),
            "prefill_s": median(prefill[key]),
            "tokens_per_s_with_prefill": batch * NEW / median(whole),
            "over_transformers": ratio(each[f"{peers[name]} x{batch}"], seconds),
            "over_first_dtype": ratio(each[f"{firsts[name]} x{batch}"], seconds),
        }
        if name != peers[name]:
            # A step reads all weights and the cache, which is half-way full on average.
            model = models[name]
            cache = model.new_cache(batch, PROMPT + NEW // 2).nbytes
            needed = parameter_count(model) * model.head.weight.itemsize + cache
            row["of_reading"] = needed / Reading.BYTES * ratio(read[key], seconds)
        result[key] = row
        table.add_row(
            key,
            f"{row['prefill_s']:.3f}",
            f"{row['tokens_per_s']:,.1f}",
            f"{row['spread']:.1%}",
            f"{row['tokens_per_s_with_prefill']:,.1f}",
            f"{row['of_reading']:.2f}" if "of_reading" in row else "",
            f"{row['over_transformers']:.2f}",
            f"{row['over_first_dtype']:.2f}",
        )
    console.print(table)
    for name in models:
        more = 8 * ratio(each[f"{name} x1"], each[f"{name} x8"])
        result[f"{name} x8"]["over_batch_1"] = more
        console.print(f"{name}: batch 8 gives {more:.2f} times the tokens/s of batch 1")
    return result


@torch.inference_mode()
def layer_step(stack: Stack, setting: Setting, batch: int, S: int) -> float:
    """Return the seconds per layer of one token against S - 1 cached ones, with projections."""
    x = torch.randn(batch, 1, D_MODEL, device=setting.device, dtype=setting.dtype)
    cache = full_cache(stack, batch, S)
    prepare(stack, batch)
    return step_seconds(lambda: stack(x, cache), setting) / len(stack)


@torch.inference_mode()
def attend_step(stack: Stack, setting: Setting, batch: int, S: int) -> float:
    """Return the seconds of the same without projections: write to the cache and attend to it.

    What parts and positions do to scores is left out as well. NaN for what is no softmax attention
    with heads.
    """
    layers = [one for one in stack.attentions if isinstance(one, SoftmaxAttention)]
    if len(layers) < len(stack):
        return math.nan
    cache, shared = full_cache(stack, batch, S), Shared(range(S - 1, S))
    x = torch.randn(batch, 1, D_MODEL, device=setting.device, dtype=setting.dtype)
    entries = [layer.entries(x, None, shared) for layer in layers]

    def step() -> None:
        for i, (layer, (q, new)) in enumerate(zip(layers, entries, strict=True)):
            held, k_pos = layer.remember(new, cache[i], shared)
            layer.attend(q, held, layer.rule(), shared.positions, k_pos)

    return step_seconds(step, setting) / len(stack)


def full_cache(stack: Stack, batch: int, S: int) -> CacheGroup:
    """Return caches of S - 1 tokens with room for one more.

    They are filled with random numbers: memory that was never written would be read too fast.
    """
    group = stack.new_cache(batch, S)
    for cache in group.caches:
        for tensor in cache.tensors.values():
            tensor.normal_()
    group.advance(S - 1)
    return group


def step_seconds(step: Callable[[], object], setting: Setting) -> float:
    """Return the median seconds of 10 steps after 2 for warm-up."""
    seconds = []
    for _ in range(12):
        synchronize(setting.device)
        start = time.perf_counter()
        step()
        synchronize(setting.device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])


def attention_alone(
    setting: Setting, variants: list[str], lengths: list[int], console: Console
) -> dict[str, Any]:
    """Time one layer's decoding step; print and return milliseconds and ratios.

    The lengths of the cache are interleaved as the variants are, because they are compared too.
    """
    result: dict[str, Any] = {}
    first, shortest = variants[0], min(lengths)
    table = Table(
        title=f"one layer, one token: milliseconds ({first}'s over it; it over its own at "
        f"S={shortest}; spread)"
    )
    for heading in ("", "S x batch", *variants):
        table.add_column(heading, justify="right" if heading in variants else "left")
    for batch in (1, 8):
        modules = {
            (name, S): stack_of(name, S).to(setting.device, setting.dtype).eval()
            for name in variants
            for S in lengths
        }
        for what, of in (("attention alone", attend_step), ("with projections", layer_step)):
            measures = {
                f"{n} {S}": partial(of, module, setting, batch, S)
                for (n, S), module in modules.items()
            }
            each = interleave(measures, 3 * setting.rounds, setting.seed)
            for S in lengths:
                cells = []
                for name in variants:
                    seconds = each[f"{name} {S}"]
                    figures = {
                        "ms": 1e3 * median(seconds),
                        "first_over": ratio(each[f"{first} {S}"], seconds),
                        "over_shortest": ratio(seconds, each[f"{name} {shortest}"]),
                        "spread": spread(seconds),
                    }
                    result[f"{what}: {name} S={S} x{batch}"] = figures
                    form = "{ms:.3f} ({first_over:.2f}; {over_shortest:.2f}; {spread:.0%})"
                    cells.append(form.format(**figures))
                table.add_row(what, f"{S} x {batch}", *cells)
    console.print(table)
    return result


def main() -> None:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser(description="Decoding speed.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    add_choices(parser, VARIANTS)
    parser.add_argument("--only", choices=("model", "attention"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192], metavar="S")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    # Huge pages, for all contenders and for the memory that Reading sums.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    quiet_threads(args.threads)
    device = resolve_device("auto")
    names = args.dtypes or ["bfloat16" if device.type == "cuda" else "float32"]
    dtypes = [getattr(torch, name) for name in dict.fromkeys(names)]
    setting = Setting(device, dtypes, args.rounds, args.seed)
    console = Console(width=130)
    result: dict[str, Any] = {"device": str(device), "dtypes": names, "threads": args.threads}
    if args.only != "model":
        result["attention"] = attention_alone(setting, chosen(args), args.lengths, console)
    if args.only != "attention":
        result["model"] = whole_model(setting, chosen(args), console)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
