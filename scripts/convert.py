"""Weights from one attention to another: `python scripts/convert.py from=outputs/... to=gqa`."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import yaml

from gptattn import gpt2
from gptattn.arguments import parse
from gptattn.build import build_model, build_tokenizer
from gptattn.cli import report
from gptattn.compose import (
    attention_settings,
    composed,
    to_train_config,
)
from gptattn.config import TrainConfig, check_choice
from gptattn.convert import METHODS, Method, convert
from gptattn.errors import ConfigError
from gptattn.saved import SavedRun, load_run, save_model

HELP = """\
python scripts/convert.py from=outputs/... to=gqa to.num_kv_heads=4 method=mean

  from=FOLDER        a run folder, or one that this command made
  from=gpt2 path=DIR a Hugging Face GPT-2 folder: config.json and model.safetensors
  to=VARIANT         a name in conf/attn; to.NAME=VALUE changes its settings
  to=hf              writes a folder that transformers' GPT2LMHeadModel opens
  method=mean        what becomes of key/value heads that are merged: mean, first, random
  seed=1             of the random method
  out=FOLDER         default: the run's folder with _to_VARIANT behind its name
"""


@dataclass(frozen=True)
class Arguments:
    source: Path = field(metadata={"name": "from"})
    to: str
    method: str = "mean"
    seed: int = 1
    out: Path | None = None
    path: Path | None = None


def load_source(args: Arguments) -> SavedRun:
    """A run, or a GPT-2 as if it were one. Raises a UserError for what cannot be read."""
    if str(args.source) != "gpt2":
        return load_run(args.source)
    if args.path is None:
        raise ConfigError("path", "is missing; from=gpt2 needs path=DIR")
    sizes = {name: "null" if v is None else v for name, v in gpt2.read_config(args.path).items()}
    overrides = [f"model.{name}={str(value).lower()}" for name, value in sizes.items()]
    with composed(["attn=mha", "position=learned", *overrides]) as cfg:
        settings = to_train_config(cfg)
    model = gpt2.load(args.path)
    return SavedRun(args.path, settings, model, build_tokenizer(settings), args.path)


def target_settings(cfg: TrainConfig, to: str, changes: dict[str, str]) -> TrainConfig:
    """The run's settings with the attention of variant `to`."""
    spec = attention_settings(to, cfg)
    for name, text in changes.items():
        if name not in spec:
            raise ConfigError(f"to.{name}", f"is no setting of {to}; one of {', '.join(spec)}")
        spec[name] = yaml.safe_load(text)
    return replace(cfg, attn=spec, choices=cfg.choices | {"attn": to})


def run(args: Arguments, changes: dict[str, str]) -> None:
    check_choice("method", args.method, METHODS)
    method: Method = args.method  # type: ignore[assignment]
    saved = load_source(args)
    folder = saved.folder
    out = args.out or folder.with_name(f"{folder.name}_to_{args.to}")
    if args.to == "hf":
        gpt2.write(out, saved.model)
        print(f"written: {out}")
        return
    cfg = target_settings(saved.cfg, args.to, changes)
    model = build_model(cfg, saved.model.vocab_size).eval()
    convert(saved.model, model, method, args.seed)
    save_model(out, cfg, model)
    ids = torch.arange(saved.model.context_length)[None] % saved.model.vocab_size
    with torch.no_grad():
        apart = (saved.model(ids) - model(ids)).abs().max().item()
    before, after = saved.model.new_cache(1).nbytes, model.new_cache(1).nbytes
    print(f"{saved.cfg.variant} -> {args.to}: logits at most {apart:.2g} apart on a trial input")
    print(f"cache of a full context: {before:,} -> {after:,} bytes")
    print(f"written: {out}")


def main() -> int:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if arguments else 2
    changes = dict(a[3:].split("=", 1) for a in arguments if a.startswith("to.") and "=" in a)
    try:
        run(parse(Arguments, [a for a in arguments if not a.startswith("to.")]), changes)
    except Exception as error:
        return report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
