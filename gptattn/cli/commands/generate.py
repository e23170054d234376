"""Streams text from a trained run.

It ends with tokens/s, including the time to read the prompt, and the cache size.
"""

import codecs
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gptattn.cli.arguments import PACKAGES, Count, Seed, option, parse, run_script
from gptattn.decode.generate import stream
from gptattn.decode.prompt import read_prompt
from gptattn.decode.sampling import Sampling
from gptattn.machine.console import make_printable
from gptattn.machine.device import resolve_device, set_threads, synchronize
from gptattn.runs.load import load_run
from gptattn.settings.config import Accelerator, Threads


@dataclass(frozen=True)
class Arguments:
    """prompt="To be" run=outputs/..."""

    run: Path = option("a run folder, or one made by gptattn-convert")
    prompt: str | None = option("text to continue; prompt=- reads stdin")
    prompt_file: Path | None = option("a file with the text to continue")
    tokens: Count = option("number of new tokens", 200)
    temperature: float = option("0 is greedy", 0.8)
    top_k: int | None = option("sample from the N most likely tokens")
    samples: Count = option("number of texts to generate, as a batch", 1)
    seed: Seed = option("the same seed gives the same text", 1)
    device: Accelerator = option("cpu, gpu or auto", "auto")
    threads: Threads | None = option("CPU threads; default: all; 1 suits small models")
    allow_targets: tuple[str, ...] = option(PACKAGES, ())


def run(arguments: Sequence[str]) -> None:
    """Stream the first sample, then print the others; speed and cache size go to stderr."""
    args = parse(Arguments, arguments)
    sampling = Sampling(args.temperature, args.top_k)
    # Large tensors in huge pages make decoding with GPT-2 small a tenth faster (docs/decoding.md).
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    device = resolve_device(args.device, "device")
    set_threads(args.threads)
    prompt = read_prompt(args.prompt, args.prompt_file)
    saved = load_run(args.run, args.allow_targets)
    model = saved.model.to(device)
    ids = torch.from_numpy(saved.tokenizer.encode(prompt, "prompt").astype("int64")).to(device)
    new = stream(
        model,
        ids.repeat(args.samples, 1),
        args.tokens,
        sampling,
        vocab_size=saved.tokenizer.vocab_size,
        generator=torch.Generator(device).manual_seed(args.seed),
    )
    tokenizer, new_ids = saved.tokenizer, list[torch.Tensor]()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # waits for a character's last byte
    start = time.perf_counter()
    print(make_printable(prompt), end="", flush=True)
    for step in new:
        new_ids.append(step)
        new_text = decoder.decode(tokenizer.to_bytes(step[0].cpu().numpy()))
        print(make_printable(new_text), end="", flush=True)
    synchronize(device)
    seconds = time.perf_counter() - start
    print(make_printable(decoder.decode(b"", final=True)), end="")
    for sample in torch.cat(new_ids, dim=1)[1:].cpu().numpy():
        print(make_printable(f"\n---\n{prompt}{tokenizer.decode(sample)}"), end="")
    capacity = min(model.context_length, len(ids) + args.tokens)
    nbytes = model.new_cache(1, capacity).nbytes  # windows and states have a fixed size
    speed = f"{args.tokens * args.samples / seconds:,.0f} tokens/s, {saved.cfg.variant}"
    cache = f"cache {nbytes / capacity:,.0f} bytes per token, "
    cache += f"{nbytes * args.samples:,} for {args.samples} x {capacity} tokens"
    if not all(block.attention.decodes_from_cache for block in model.layers()):
        cache = "no cache: it rereads the whole text for each token"
    print(f"\n\n{speed}, {cache}", file=sys.stderr)


main = partial(run_script, run, Arguments)
