"""Folders on the Hugging Face hub, by name: `hf:owner/name`, or `hf:owner/name@revision`."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from gptattn.errors import CheckpointError, ConfigError
from gptattn.machine.disk import REFUSALS

NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
PREFIX = "hf:"


def is_hub_name(name: str) -> bool:
    """Return whether `name` begins with `hf:`; the disk is not looked at."""
    return name.startswith(PREFIX)


def local_folder(name: str, field: str, files: Sequence[str]) -> Path:
    """Return the folder that `name` stands for; from the hub, only `files` are downloaded.

    Without a network, the hub's own cache is used. Raises ConfigError for a malformed name or
    without the extra `hf`, CheckpointError for what cannot be fetched.
    """
    if not is_hub_name(name):
        try:
            return Path(name).expanduser()
        except RuntimeError:
            raise ConfigError(
                field, f"{name} names an unknown home folder; give the whole path"
            ) from None
    match = NAME.fullmatch(name.removeprefix(PREFIX))
    if match is None:
        raise ConfigError(
            field, f"{name!r} is not a name on the hub; give hf:owner/name[@revision]"
        )
    return _fetched(match["repo"], match["revision"], field, tuple(files))


@cache  # a run asks twice: in its checks, and when it starts
def _fetched(repo: str, revision: str | None, field: str, files: tuple[str, ...]) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise ConfigError(
            field, f"{PREFIX}{repo} needs the extra hf: pip install 'gptattn[hf]'"
        ) from None
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(files)))
    except errors.RevisionNotFoundError:
        reason = f"has no revision {revision}"
    except errors.RepositoryNotFoundError:
        reason = "does not exist or needs a login (hf auth login)"
    # The library raises its own errors and those of its two transport libraries.
    except Exception as error:
        if isinstance(error, OSError) and error.errno in REFUSALS:
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
        reason = f"cannot be fetched ({first.rstrip('.')})"
    raise CheckpointError(
        field, f"{PREFIX}{repo} {reason}; check the name and the network, or give a folder"
    )
