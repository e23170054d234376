"""Reads files that somebody else may have made: kind and size are checked before the content."""

import errno
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from gptattn.errors import RunFolderError

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, if PyYAML was built with it
YAML_NODES, YAML_DEPTH = 50_000, 50  # a run's config.yaml has about a hundred nodes, four deep


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """Return the content of a regular file, of at most `most` bytes if that is given.

    Raises ValueError for a larger file or one that is not regular, OSError if it cannot be read. A
    pipe could block, and a device may never end, so neither is read.
    """
    with os.fdopen(_regular(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise ValueError(f"{path.name} has {size:,} bytes; at most {most:,} are read")
        # If the file grows meanwhile, no more than the size above is read.
        return file.read(size)


def open_to_append(path: Path) -> BinaryIO:
    """Open a file of a run folder for reading and appending, unbuffered; create it if missing.

    Raises RunFolderError for a link, which would lead writes elsewhere, and for what is not a
    regular file.
    """
    try:
        descriptor = _regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ELOOP, errno.EISDIR):
            raise
        raise RunFolderError("run", f"{path} is a link or not a regular file; remove it") from None
    return os.fdopen(descriptor, "ab+", buffering=0)


def _regular(path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path.name} is not a regular file")
    return descriptor


def read_yaml(path: Path, most: int) -> Any:
    """Return plain values from a YAML file. Raises ValueError, OSError or yaml.YAMLError."""
    text = read_bytes(path, most).decode("utf-8")
    check_yaml(text)
    return yaml.load(text, Loader=LOADER)


def check_yaml(text: str) -> None:
    """Raise ValueError if the text stands for more values than a config has, or nests too deeply.

    A few hundred bytes with aliases can stand for billions of values. This counts the parser's
    events, each alias as everything that it stands for, and builds no values.
    """
    sizes: dict[str, int] = {}  # by anchor
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and the count before it
    count = 0
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.AliasEvent):
            # The anchor is missing, or its node is still open and would contain itself.
            if event.anchor not in sizes:
                raise ValueError(f"alias {event.anchor!r} is undefined or refers to itself")
            count += sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            sizes.pop(event.anchor or "", None)
            open_nodes.append((event.anchor, count))
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        if count > YAML_NODES:
            raise ValueError(f"it expands to more than {YAML_NODES:,} values")
        if len(open_nodes) > YAML_DEPTH:
            raise ValueError(f"it is nested more than {YAML_DEPTH} deep")
