"""Encodes a large text ahead of training.

The other arguments are those of training: data=text, stdlib or hf, with its settings; tokenizer=,
default: byte; and validation.fraction=0.1, held out where data does not say what is: the end of
each file of text, and of rows those that their hash picks.

Then train with data=bin data.path=FOLDER and the same tokenizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gptattn import command
from gptattn.cli.arguments import option, parse, run_script
from gptattn.errors import ConfigError
from gptattn.machine.cpus import usable_cpus


@dataclass(frozen=True)
class Arguments:
    """to=FOLDER data=text data.path=FILE_OR_FOLDER"""

    to: Path = option(
        "where the shards of token ids and their index go; the same command goes on where it was "
        "stopped"
    )
    workers: int | None = option("processes; default: one for each core", least=1, most=1024)


def run(arguments: Sequence[str]) -> None:
    """Encode the text. Raises a UserError, which names the argument."""
    # Worker processes import this module: what needs torch or Hydra is imported here.
    from gptattn.data.corpus import Corpus
    from gptattn.data.prepare import PartedText, check_folder, fit, in_parts, prepare
    from gptattn.data.tasks import Task
    from gptattn.data.text import cache_folder
    from gptattn.settings.build import build_content, build_tokenizer
    from gptattn.settings.compose import settings
    from gptattn.settings.construct import find_target

    own = [argument for argument in arguments if argument.partition("=")[0] in ("to", "workers")]
    args = parse(Arguments, own)
    cfg = settings([argument for argument in arguments if argument not in own])
    tokenizer = build_tokenizer(cfg)
    check_folder(args.to)
    choice = cfg.choices["data"]
    target = find_target("data", cfg.data, cfg.allow_targets)
    is_task = isinstance(target, type) and issubclass(target, Task)
    text = None if is_task else build_content(cfg)
    if isinstance(text, Corpus):
        text = in_parts(text, cfg.validation.fraction, f"data={choice}")
    if not isinstance(text, PartedText):
        raise ConfigError(
            "data",
            f"{choice} is no text in files, and needs no preparation; give text, stdlib or hf",
        )
    fit(tokenizer, text, cache_folder(cfg.cache_dir))
    index = prepare(
        text,
        tokenizer,
        args.to,
        choice=cfg.choices["tokenizer"],
        workers=args.workers or usable_cpus(),
        what=f"encoding {text.name}",
    )
    for side in ("train", "val"):
        shards = [shard for shard in index.shards if shard.side == side]
        tokens, size = (sum(getattr(s, name) for s in shards) for name in ("tokens", "bytes"))
        print(f"{side}: {tokens:,} tokens of {size:,} bytes in {len(shards)} shards")
    words = index.choice_for(args.to)
    print(f"train with: {command('train')} data=bin data.path={args.to} {words}")


main = partial(run_script, run, Arguments, __doc__)
