"""Converts weights from one attention to another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from gptattn.build.data import build_tokenizer
from gptattn.build.model import build_model
from gptattn.cli.arguments import PACKAGES, Seed, option, parse, run_script
from gptattn.data import hub
from gptattn.data.tokenizer import write_files
from gptattn.errors import ConfigError
from gptattn.machine.disk import expand_path, refuse_taken
from gptattn.runs.folder import NAMES
from gptattn.runs.load import SavedRun, load_run, save_model
from gptattn.settings.compose import settings
from gptattn.settings.config import InitMethod, TrainConfig
from gptattn.weights.convert import transfer_weights
from gptattn.weights.hugging_face import FILES, find_family, load_checkpoint, write_checkpoint

TRIAL_TOKENS = 256


@dataclass(frozen=True)
class Arguments:
    """from=outputs/... to=gqa to.num_kv_heads=4 method=mean"""

    from_: str = option(
        "a run folder, or one made by this command; or a Hugging Face folder of a GPT-2, Llama, "
        "Qwen or SmolLM3 with its tokenizer, or hf:owner/name[@revision]"
    )
    to: str = option(
        "a variant in conf/attn, with to.NAME=VALUE for its settings; or hf, which writes a folder "
        "that transformers opens: a GPT-2, or for block=llama a Llama or Qwen2"
    )
    method: InitMethod = option("how to merge key/value heads: mean, first or random", "mean")
    seed: Seed = option("seed for method=random", 1)
    out: Path | None = option(
        "where to write; default: next to the source, as NAME_to_VARIANT; for hf:..., in outputs"
    )
    allow_targets: tuple[str, ...] = option(PACKAGES, ())


def load_source(args: Arguments) -> SavedRun:
    """Load a run, or a Hugging Face folder as if it were one.

    A folder without a tokenizer gets the byte tokenizer, with a note. Raises a UserError if it
    cannot be read, or if the model has fewer ids than its tokenizer.
    """
    folder = hub.local_folder(args.from_, "from", FILES)
    family = find_family(folder)
    if family is None:
        return load_run(folder, args.allow_targets)
    cfg, model = load_checkpoint(folder, family)
    tokenizer, bare = build_tokenizer(cfg), cfg.choices["tokenizer"] == "byte"
    cfg = replace(cfg, tokenizer=cfg.tokenizer | tokenizer.settings())
    if not bare or args.to != "hf":  # hf does not need the byte tokenizer
        lacks, ids = "no tokenizer.json; ", tokenizer.vocab_size
        if model.vocab_size < ids:
            whose = f"{lacks}the byte tokenizer" if bare else "the tokenizer"
            has = f"has {ids:,} ids, the model {model.vocab_size:,}"
            raise ConfigError("from", f"{whose} {has}; add the model's own tokenizer")
        if bare:
            print(f"{lacks}recorded the byte tokenizer; to generate text, add the model's own")
    return SavedRun(folder, cfg, model, tokenizer, folder)


def make_target_settings(cfg: TrainConfig, to: str, changes: Sequence[str]) -> TrainConfig:
    """Return the run's settings with the attention `to`, after these changes to its settings.

    Raises ConfigError, as the same overrides of a run do.
    """
    sizes = ("num_layers", "num_heads", "d_model", "context_length")
    same = [f"model.{name}={getattr(cfg.model, name)}" for name in sizes]
    try:
        spec = settings([f"attn={to}", *same, *(f"attn.{one}" for one in changes)]).attn
    except ConfigError as error:  # name what was typed
        raise ConfigError(error.field.replace("attn", "to", 1), error.message) from None
    return replace(cfg, attn=spec, choices=cfg.choices | {"attn": to}, pattern=None, layers={})


def convert(arguments: Sequence[str]) -> None:
    """Convert the weights, write the folder, and print how far the logits moved."""
    args = parse(Arguments, [one for one in arguments if not one.startswith("to.")])
    changes = [one.removeprefix("to.") for one in arguments if one.startswith("to.")]
    if args.to == "hf" and changes:
        raise ConfigError(
            f"to.{changes[0].partition('=')[0]}", "does not apply to to=hf; leave it out"
        )
    source = expand_path(args.from_, "from")
    if args.from_.startswith(hub.PREFIX):
        source = Path("outputs", Path(args.from_.partition("@")[0]).name)
    saved = load_source(args)
    out = args.out or source.with_name(f"{source.name}_to_{args.to}")
    if args.to == "hf":
        refuse_taken(out, "out", *NAMES, "config.json", "tokenizer*.json")
        write_checkpoint(out, saved.cfg, saved.model)
        write_files(out, saved.tokenizer.files())
        print(f"written: {out}")
        return
    cfg = make_target_settings(saved.cfg, args.to, changes)
    model = build_model(cfg, saved.model.vocab_size).eval()
    transfer_weights(saved.model, saved.cfg, model, cfg, args.method, args.seed)
    save_model(out, cfg, model, saved.tokenizer)
    # A Llama's whole context can be too long for a trial.
    length = min(saved.model.context_length, TRIAL_TOKENS)
    ids = torch.arange(length)[None] % saved.model.vocab_size
    with torch.no_grad():
        apart = (saved.model(ids) - model(ids)).abs().max().item()
    with torch.device("meta"):  # allocates nothing
        before, after = (
            build_model(c, model.vocab_size).new_cache(1).nbytes for c in (saved.cfg, cfg)
        )
    variants = f"{saved.cfg.variant} -> {cfg.variant}"
    print(f"{variants}: logits at most {apart:.2g} apart on a trial input")
    print(f"cache of a full context: {before:,} -> {after:,} bytes")
    print(f"written: {out}")


main = partial(run_script, convert, Arguments)
