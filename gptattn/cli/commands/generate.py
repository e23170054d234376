"""Streams text from a trained run: `gptattn-generate run=outputs/... prompt=TEXT`."""

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from gptattn.cli.arguments import NO_NAMES, SEED, Names, parse
from gptattn.cli.script import run_script
from gptattn.decode.dtype import DecodeDType, in_dtype
from gptattn.decode.generate import left_padded, stream
from gptattn.decode.prompt import read_prompt, read_prompts
from gptattn.decode.sampling import Sampling
from gptattn.decode.text_stream import TextStream
from gptattn.errors import ConfigError, DataError
from gptattn.machine.device import resolve_device, set_threads, synchronize
from gptattn.runs.load import load_run
from gptattn.settings.config import Accelerator
from gptattn.settings.values import within

HELP = """\
COMMAND run=outputs/... prompt="To be"

  run=FOLDER              a run folder, or one that convert made
  prompt=TEXT             text to continue; prompt=- reads stdin
  prompt_file=FILE        read the prompt from a file
  prompts_file=FILE       one prompt per line, continued as a batch; when the
                          longest row fills the context, all slide or stop
  tokens=200              maximum number of new tokens
  temperature=0.8         0 is greedy
  top_k=N                 keep the N most likely tokens
  top_p=P                 keep the fewest tokens with total probability P
  min_p=P                 keep tokens at least P times as likely as the top one
  repetition_penalty=1.0  above 1: fewer repeated tokens
  stop=TEXT               stop at this text
  samples=1               samples per prompt, generated as a batch
  seed=1                  the same seed gives the same text
  full=slide              when the context is full: slide (keep the newer half
                          and read it again) or stop
  device=auto             cpu, gpu or auto
  dtype=float32           bfloat16: half the bytes to read, so up to twice as
                          fast on a processor with instructions for it, and
                          slower on others; auto decodes a few tokens in both
                          and takes the faster, so texts may differ
  threads=N               CPU threads; default: all. 1 suits a small model
  allow_targets=PACKAGE   packages besides gptattn that the run may name (a,b)

It ends with tokens/s, which include reading the prompt, and the cache size.
"""


@dataclass(frozen=True)
class Arguments:
    """The command's arguments; HELP describes them."""

    run: Path
    prompt: str | None = None
    prompt_file: Path | None = None
    prompts_file: Path | None = None
    tokens: int = field(default=200, metadata=within(least=1))
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop: str | None = None
    samples: int = field(default=1, metadata=within(least=1))
    seed: int = field(default=1, metadata=SEED)
    full: Literal["slide", "stop"] = "slide"
    device: Accelerator = "auto"
    dtype: DecodeDType = "float32"
    threads: int | None = field(default=None, metadata=within(least=1, most=1024))
    allow_targets: Names = NO_NAMES


def write(text: str) -> None:
    """Write text to stdout at once, with control characters replaced."""
    # A model may generate control characters, which the terminal must not obey.
    safe = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    sys.stdout.write(safe)
    sys.stdout.flush()


def run(args: Arguments) -> None:
    """Stream the first sample, then print the others; speed and cache size go to stderr.

    Raises ConfigError if no prompt is given, or in more than one way.
    """
    if args.stop == "":
        raise ConfigError("stop", "is empty; give a text, or leave it out")
    sampling = Sampling(
        args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty
    )
    # Large tensors in huge pages make decoding with GPT-2 small a tenth faster (docs/decoding.md).
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    device = resolve_device(args.device, "device")
    set_threads(args.threads)
    if args.prompts_file is None:
        prompts = [read_prompt(args.prompt, args.prompt_file)]
    elif args.prompt is None and args.prompt_file is None:
        prompts = read_prompts(args.prompts_file)
    else:
        raise ConfigError("prompts_file", "is given together with another prompt; give only one")
    saved = load_run(args.run, args.allow_targets)
    model = saved.model.to(device)
    context = model.context_length
    ids = [saved.tokenizer.encode(prompt, "prompt").astype("int64") for prompt in prompts]
    longest = max(map(len, ids))
    if args.full == "stop" and longest > context:
        raise DataError(
            "prompt", f"has {longest} tokens, more than the context of {context}; shorten it"
        )
    batch, padding = left_padded([torch.from_numpy(row).to(device) for row in ids])
    batch = batch.repeat_interleave(args.samples, dim=0)
    model = in_dtype(model, args.dtype, batch)
    new = stream(
        model,
        batch,
        args.tokens,
        sampling,
        padding=padding.repeat_interleave(args.samples),
        vocab_size=saved.tokenizer.vocab_size,
        generator=torch.Generator(device).manual_seed(args.seed),
        slide=args.full == "slide",
    )
    prompts = [prompt for prompt in prompts for _ in range(args.samples)]
    samples = [TextStream(saved.tokenizer, args.stop) for _ in prompts]
    start = time.perf_counter()
    write(prompts[0])
    steps = 0
    for step in new:
        steps += 1
        new_text = [own.feed(id) for own, id in zip(samples, step[:, 0].tolist(), strict=True)]
        write(new_text[0])
        if all(sample.done for sample in samples):
            break
    synchronize(device)
    seconds = time.perf_counter() - start
    ends = [sample.end() for sample in samples]
    write(ends[0])
    for prompt, sample in zip(prompts[1:], samples[1:], strict=True):
        write(f"\n---\n{prompt}{sample.emitted}")
    rows = len(samples)
    capacity = min(context, longest + args.tokens)
    held = model.new_cache(1, capacity).nbytes  # windows and states have a fixed size
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    how = saved.cfg.variant if args.dtype == "float32" else f"{saved.cfg.variant} in {dtype}"
    speed = f"{steps * rows / seconds:,.0f} tokens/s, {how}"
    whole = f"{held * rows:,} for {rows} x {capacity} tokens"
    print(f"\n\n{speed}, cache {held / capacity:,.0f} bytes per token, {whole}", file=sys.stderr)


def main() -> int:
    """Run `gptattn-generate`; return the exit code."""
    return run_script(HELP, lambda arguments: run(parse(Arguments, arguments)))
