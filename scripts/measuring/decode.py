"""Decoding: the whole model next to transformers' own `generate`, and one attention layer.

The model is GPT-2 small: it reads 512 tokens, then decodes 64 one by one, at batch 1 and 8. The
layer takes one step, projections included, with caches of 1,024 and 8,192 tokens, in the first
dtype. Where a second layer reuses the first one's state, the result is the mean of the two. The
default is float32 on a CPU and bfloat16 on a GPU; several dtypes take turns in one run.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import torch

from gptattn.attention import CacheGroup
from gptattn.attention.linear import prepare
from gptattn.cli.arguments import Count, option, parse
from gptattn.decode.generate import stream
from gptattn.decode.sampling import Sampling
from gptattn.machine.device import resolve_device, synchronize
from gptattn.model.cost import count_parameters
from gptattn.model.gpt import GPT
from gptattn.training.speed import interleave
from measuring.menu import VARIANTS, Stack, check_variants, model_of, stack_of
from measuring.peers import Sizes, build_transformers
from measuring.tables import print_table, ratio, set_threads, spread

PROMPT, NEW, VOCABULARY, D_MODEL = 512, 64, 50257, 768
BATCHES = (1, 8)
GPT2_SMALL = Sizes(12, 12, D_MODEL, 1024, VOCABULARY)
GREEDY = Sampling(temperature=0)


@dataclass(frozen=True)
class Arguments:
    """variants=[mha,gqa+sink] only=attention"""

    variants: tuple[str, ...] = option(
        VARIANTS, ("mha", "gqa:attn.num_kv_heads=4", "mqa", "mha_wrapper")
    )
    only: Literal["model", "attention"] | None = option("model or attention; default: both")
    lengths: tuple[int, ...] = option("tokens in the layer's cache", (1024, 8192))
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = option("float32, bfloat16 or both", ())
    rounds: Count = option("turns of each contender", 5)
    threads: Count = option("CPU threads", 2)


def measure(arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Time the model, the layer or both; print and return the figures."""
    args = parse(Arguments, arguments)
    # Huge pages, for all contenders and for the memory Reading sums.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    set_threads(args.threads)
    device = resolve_device("auto")
    kinds = list(args.dtypes) or ["bfloat16" if device.type == "cuda" else "float32"]
    dtypes = [getattr(torch, kind) for kind in dict.fromkeys(kinds)]
    results: dict[str, Any] = {"device": str(device), "dtypes": kinds, "threads": args.threads}
    names = check_variants(args.variants)
    if args.only != "model":
        results["attention"] = measure_layer(names, args.lengths, args.rounds, device, dtypes[0])
    if args.only != "attention":
        results["model"] = measure_model(names, args.rounds, device, dtypes)
    return results, 0


# The whole model


@dataclass(frozen=True)
class Contender:
    """A model that decodes, and the names of the two contenders it is compared with."""

    model: Any
    peer: str  # transformers in the same dtype
    first: str  # the same model in the first dtype


@dataclass
class Times:
    """The seconds of each round."""

    prefill: list[float]  # includes the first token
    token: list[float]  # mean of each further token
    read: list[float]  # of Reading.BYTES, between tokens


class Reading:
    """Measures the speed of memory: sums 64 MiB, a different part each time to miss the caches."""

    PARTS, BYTES = 16, 2**26

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        numbers = torch.ones(self.PARTS * self.BYTES // dtype.itemsize)
        self.parts = numbers.to(device, dtype).chunk(self.PARTS)
        self.device, self.reads = device, 0

    def seconds(self) -> float:
        """Return the seconds of one read."""
        part = self.parts[self.reads % self.PARTS]
        self.reads += 1
        return seconds_of(part.sum, self.device)


def measure_model(
    names: list[str], rounds: int, device: torch.device, dtypes: list[torch.dtype]
) -> dict[str, Any]:
    """Time all models at batch 1 and 8; print and return the figures."""
    models = contenders(names, device, dtypes)
    reading, order = Reading(device, dtypes[0]), random.Random(0)
    times = {f"{name} x{batch}": Times([], [], []) for name in models for batch in BATCHES}

    def decode(name: str) -> float:
        """Decode at both batch sizes back to back, because they are compared."""
        one = models[name]
        for batch in order.sample(BATCHES, len(BATCHES)):
            ids = torch.arange(PROMPT, device=device).expand(batch, -1)
            own = times[f"{name} x{batch}"]
            if name == one.peer:
                prefill, token = decode_transformers(one.model, ids)
            else:
                prefill, token, read = decode_ours(one.model, ids, reading)
                own.read.append(read)
            own.prefill.append(prefill)
            own.token.append(token)
        return times[f"{name} x1"].token[-1]

    measures = {name: partial(decode, name) for name in models}
    for warm_up in measures.values():
        warm_up()
    times.update({key: Times([], [], []) for key in times})
    interleave(measures, rounds)

    results: dict[str, Any] = {}
    rows = []
    for name, one in models.items():
        for batch in BATCHES:
            own, key = times[f"{name} x{batch}"], f"{name} x{batch}"
            whole = [p + t * (NEW - 1) for p, t in zip(own.prefill, own.token, strict=True)]
            figures = {
                "prefill_s": median(own.prefill),
                "tokens_per_s": batch / median(own.token),
                "spread": spread(own.token),
                "with_prefill": batch * NEW / median(whole),
                "of_reading": share_of_reading(one.model, batch, own) if own.read else None,
                "over_transformers": ratio(times[f"{one.peer} x{batch}"].token, own.token),
                "over_first_dtype": ratio(times[f"{one.first} x{batch}"].token, own.token),
                "over_batch_1": batch * ratio(times[f"{name} x1"].token, own.token),
            }
            results[key] = figures
            reads = "" if figures["of_reading"] is None else f"{figures['of_reading']:.2f}"
            form = "{prefill_s:.3f} {tokens_per_s:,.1f} {spread:.1%} {with_prefill:,.1f}"
            ratios = "{over_transformers:.2f} {over_first_dtype:.2f} {over_batch_1:.2f}"
            cells = [*form.format(**figures).split(), reads, *ratios.format(**figures).split()]
            rows.append([key, *cells])
    speeds = [Reading.BYTES / s / 1e9 for own in times.values() for s in own.read]
    title = (
        f"prefill {PROMPT}, decode {NEW}; a sum reads {median(speeds):.1f} GB/s "
        f"({min(speeds):.1f} to {max(speeds):.1f})"
    )
    over = ["transformers x", "first dtype x", "batch 1 x"]
    headings = ["", "prefill s", "tokens/s", "spread", "with prefill", "of reading", *over]
    print_table(title, headings, rows)
    return results | {"read_gb_s": speeds}


def contenders(
    names: list[str], device: torch.device, dtypes: list[torch.dtype]
) -> dict[str, Contender]:
    """Build all models in all dtypes; with several, the dtype ends the name."""
    models_by_name: dict[str, Contender] = {}
    for dtype in dtypes:
        ends = ["" if len(dtypes) == 1 else f" {str(kind)[6:]}" for kind in (dtype, dtypes[0])]
        models: dict[str, Any] = {
            name: model_of(name, f"model.vocab_size={VOCABULARY}") for name in names
        }
        models["transformers"] = build_transformers(GPT2_SMALL).model
        for name, model in models.items():
            placed = model.to(device, dtype).eval()
            models_by_name[name + ends[0]] = Contender(
                placed, f"transformers{ends[0]}", name + ends[1]
            )
    return models_by_name


def decode_ours(model: GPT, ids: torch.Tensor, reading: Reading) -> tuple[float, float, float]:
    """Return the seconds of the prefill with the first token, of each further token, and of a read.

    A read follows each token, because other load on the hardware changes the speed of memory within
    seconds.
    """
    steps = stream(model, ids, NEW, GREEDY)
    seconds, reads = [], []
    for _ in range(NEW):
        seconds.append(seconds_of(lambda: next(steps), ids.device))
        reads.append(reading.seconds())
    return seconds[0], sum(seconds[1:]) / (NEW - 1), sum(reads[1:]) / (NEW - 1)


def decode_transformers(model: Any, ids: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of the prefill with the first token, and of each further token.

    The clock is a stopping criterion: `generate` calls it after each token.
    """
    ends: list[float] = []

    def clock(*_: Any) -> torch.Tensor:
        synchronize(ids.device)
        ends.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        stopping_criteria=[clock],
    )
    return ends[0] - start, (ends[-1] - ends[0]) / (NEW - 1)


def share_of_reading(model: GPT, batch: int, times: Times) -> float:
    """Return the share of a token's time that reading its memory takes.

    A token reads all weights and the cache, which is half full on average.
    """
    cache = model.new_cache(batch, PROMPT + NEW // 2).nbytes
    needed = count_parameters(model) * model.head.weight.itemsize + cache
    return needed / Reading.BYTES * ratio(times.read, times.token)


# One layer


def measure_layer(
    names: list[str], lengths: Sequence[int], rounds: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Time one layer's decoding step; print and return milliseconds and ratios.

    Cache lengths take turns too, because they are compared.
    """
    results: dict[str, Any] = {}
    rows = []
    for batch in BATCHES:
        measures = {
            (name, S): partial(layer_seconds, stack_of(name, S).to(device, dtype).eval(), batch, S)
            for name in names
            for S in lengths
        }
        seconds = interleave(measures, 3 * rounds)
        for (name, S), values in seconds.items():
            figures = {
                "ms": 1e3 * median(values),
                "spread": spread(values),
                "first_over": ratio(seconds[names[0], S], values),
                "over_shortest": ratio(values, seconds[name, min(lengths)]),
            }
            results[f"{name} S={S} x{batch}"] = figures
            form = "{ms:.3f} {spread:.0%} {first_over:.2f} {over_shortest:.2f}"
            rows.append([name, f"{S} x {batch}", *form.format(**figures).split()])
    headings = ["", "S x batch", "ms", "spread", f"{names[0]} / this", f"/ S={min(lengths)}"]
    print_table("one layer, one token, with projections", headings, rows)
    return results


@torch.inference_mode()
def layer_seconds(stack: Stack, batch: int, S: int) -> float:
    """Return the seconds per layer of one token after S - 1 cached ones: the median of ten."""
    weight = next(stack.parameters())
    x = torch.randn(batch, 1, D_MODEL, device=weight.device, dtype=weight.dtype)
    cache = full_cache(stack, batch, S)
    prepare(stack, batch)
    seconds = [seconds_of(lambda: stack(x, cache), weight.device) for _ in range(12)]
    return median(seconds[2:]) / len(stack)


def full_cache(stack: Stack, batch: int, S: int) -> CacheGroup:
    """Return caches of S - 1 tokens with room for one more.

    They hold random numbers: memory that was never written would read too fast.
    """
    group = stack.new_cache(batch, S)
    for cache in group.caches:
        for tensor in cache.tensors.values():
            tensor.normal_()
    group.advance(S - 1)
    return group


def seconds_of(step: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, including what it started on the device."""
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start
