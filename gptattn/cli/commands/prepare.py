"""Encodes a large text ahead of training.

The other arguments are the same as for training: data=text, stdlib, hf or bin with its settings;
tokenizer=..., default byte; and validation.fraction=0.1, unless data brings its own held-out text.

Then train with data=bin data.path=FOLDER and the same tokenizer.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gptattn import command
from gptattn.cli.arguments import option, parse_own, run_script


@dataclass(frozen=True)
class Arguments:
    """to=FOLDER data=text data.path=FILE_OR_FOLDER"""

    to: Path = option("where to write the token ids and their JSON index")


def run(arguments: Sequence[str]) -> None:
    """Encode the text. Raises a UserError, which names the argument."""
    # Imported here, because --help needs neither torch nor Hydra.
    from gptattn.build.data import build_request, build_source, build_tokenizer
    from gptattn.data.bin_files import choose_tokenizer
    from gptattn.data.tokens import FILES, TokenSource, make_tokens
    from gptattn.errors import ConfigError
    from gptattn.machine.disk import claim_folder
    from gptattn.settings.compose import settings

    args, others = parse_own(Arguments, arguments)
    cfg = settings(others)
    request = build_request(cfg, build_tokenizer(cfg))
    source = build_source(cfg)
    if not isinstance(source, TokenSource):
        raise ConfigError(
            "data", f"{request.data_name} is not a text and needs no preparation; give a text"
        )
    claim_folder(args.to, "tokens", "to", *FILES)
    index = make_tokens(source, args.to, request)
    print(f"train: {index.train_tokens:,} tokens")
    print(f"val: {index.tokens - index.val_start - 1:,} tokens")
    words = choose_tokenizer(index, args.to)
    print("train with:", command("train"), "data=bin", shlex.quote(f"data.path={args.to}"), words)


main = partial(run_script, run, Arguments)
