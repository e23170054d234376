"""What a checkpoint's file asks for, found out before torch reads it. Nothing in it is run.

torch.load with weights_only runs no code, but a file may still ask for any memory or time: by
compressed entries, by `bytearray(10**12)`, by keys that take years to hash.
"""

import os
import pickletools
import re
import stat
import zipfile
from pathlib import Path

PICKLE_BYTES = 16_000_000  # of a small model 10 kB: names, shapes and a few numbers
ENTRIES = 200_000
TUPLE_DEPTH = 8  # ours are 2 deep; a tuple of itself twice, and so on 60 times, cannot be hashed
GLOBALS = re.compile(
    r"collections OrderedDict|torch Size|torch device"
    r"|torch\._utils _rebuild_(tensor_v2|parameter)"
    r"|torch (Float|Double|Half|BFloat16|Long|Int|Short|Char|Byte|Bool)Storage"
    r"|torch (float|int|uint)\d+|torch (bfloat16|bool)"
)
# What each operation takes from the stack; -1: all down to the mark. It leaves one value if MAKES.
TAKES = {
    "TUPLE": -1,
    "TUPLE1": 1,
    "TUPLE2": 2,
    "TUPLE3": 3,
    "REDUCE": 2,
    "BINPERSID": 1,
    "APPEND": 1,
    "SETITEM": 2,
    "BUILD": 1,
    "APPENDS": -1,
    "SETITEMS": -1,
}
MAKES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "BINPERSID"}
PUSHES = {
    "GLOBAL",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "BINUNICODE",
    "EMPTY_TUPLE",
    "EMPTY_LIST",
    "EMPTY_DICT",
}


def check_archive(path: Path, most: int | None = None) -> None:
    """Raise ValueError for a file that no run of ours writes; `most` is its largest size in bytes.

    What passes is a zip of stored entries, so that nothing in it is larger than the file, and its
    pickle makes nothing but tensors and plain values. Raises OSError where it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise ValueError("it is not a regular file")
        if most is not None and info.st_size > most:
            raise ValueError(f"it has {info.st_size:,} bytes, more than the {most:,} of its model")
        try:
            with zipfile.ZipFile(file) as archive:
                check_pickle(_pickle(archive, info.st_size))
        except (zipfile.BadZipFile, NotImplementedError, EOFError, LookupError) as error:
            raise ValueError(f"it is no whole zip file of torch's: {error}") from None


def _pickle(archive: zipfile.ZipFile, size: int) -> bytes:
    entries = archive.infolist()
    if len(entries) > ENTRIES or len({entry.filename for entry in entries}) < len(entries):
        raise ValueError("its entries are too many, or two of one name")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise ValueError(f"{entry.filename[:80]!r} in it is compressed or encrypted")
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError("its entries are larger than the file")
    found = [entry for entry in entries if re.fullmatch(r"[^/]*/data\.pkl", entry.filename)]
    if len(found) != 1:
        raise ValueError("it has no data.pkl: it is no checkpoint")
    if found[0].file_size > PICKLE_BYTES:
        raise ValueError(f"its data.pkl has more than {PICKLE_BYTES:,} bytes")
    return archive.read(found[0])


def check_pickle(data: bytes) -> None:
    """Raise ValueError for a pickle that makes anything but tensors and plain values.

    Follows the stack, of each value knowing only how deep a tuple it is. Values that are not
    tuples count as 0: a list or a dict cannot be hashed.
    """
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    try:
        for operation, argument, _ in pickletools.genops(data):
            name = operation.name
            if name in TAKES:
                start = marks.pop() if TAKES[name] < 0 else len(stack) - TAKES[name]
                if start < 0:
                    raise IndexError
                taken, stack[start:] = stack[start:], []
                if name in MAKES:
                    stack.append(1 + max(taken, default=0) if name.startswith("TUPLE") else 0)
                if stack[-1] > TUPLE_DEPTH:
                    raise ValueError(f"a tuple in it is more than {TUPLE_DEPTH} deep")
            elif name in PUSHES:
                if name == "GLOBAL" and not GLOBALS.fullmatch(str(argument)):
                    raise ValueError(f"it asks for {str(argument)[:80]!r}, which is no tensor")
                stack.append(0)
            elif name == "MARK":
                marks.append(len(stack))
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[int(argument or 0)] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[int(argument or 0)])
            elif name not in ("PROTO", "STOP"):
                raise ValueError(f"it holds {name}, which no checkpoint needs")
        if marks or len(stack) != 1:
            raise IndexError
    except (IndexError, KeyError):
        raise ValueError("its pickle is damaged") from None
