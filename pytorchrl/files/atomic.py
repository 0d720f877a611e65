"""Write files completely or not at all, and read texts and JSON that may be damaged or untrusted.

Only regular files of a limited size are read. The entry `sha256` of a JSON object, if there is one, is the checksum of
its other entries, and shows whether the file was damaged. This module must not import torch, so that commands that only
show runs start quickly.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, SupportsIndex

LARGEST_JSON = 16 << 20
"""Maximum size of a JSON file in bytes."""
_SHA256, _DIGITS = "sha256", 64
_DEEPEST = 100
_CHUNK_BYTES = 1 << 20
_LARGEST_BITS = 63
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


@contextmanager
def put_in_place(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file, which replaces `path` when the `with` block ends, or is removed if the block fails.

    If `path` is a symbolic link, the link is replaced, and the file to which it leads does not change. Folders that do
    not exist are created. After the block, the file and its name are on the disk, so that they also survive a crash of
    the machine. An `OSError` names `path`, or the folder that cannot be created.

    Raises:
        OSError: `path` is a device, a named pipe or a directory, or leads to a device or a pipe; or it cannot be
            written.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(f"{os.fspath(path)!r} is not a regular file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    _make_folder(path.parent)
    temporary.unlink(missing_ok=True)  # a killed process with the same id may have left this file
    try:
        with open(temporary, "xb", opener=open_no_follow) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, os.fspath(temporary)):
            error.filename, error.filename2 = os.fspath(path), None
        raise


def _make_folder(folder: Path) -> None:
    """Create a folder and the folders above it, and flush their names to the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        _sync(made.parent)


def open_no_follow(path: str, flags: int) -> int:
    """Serve as `opener` for `open`; raise `OSError` for a symbolic link. New files have mode 0666 & ~umask."""
    return os.open(path, flags | _NO_FOLLOW, 0o666)


def _sync(folder: Path) -> None:
    """Flush the names of the files in a folder to the disk, so that they survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a regular file for reading. Named pipes and devices are refused, because reading them could block forever.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    # A named pipe without a writer would block `open`, unless it is opened in non-blocking mode.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{os.fspath(path)!r} is not a regular file")
        yield file


def sha256_of(file: IO[bytes], size: int) -> hashlib._Hash:
    """Return the SHA-256 of the next `size` bytes of a file, or of the rest of the file if it is shorter."""
    found = hashlib.sha256()
    while size > 0 and (data := file.read(min(size, _CHUNK_BYTES))):
        found.update(data)
        size -= len(data)
    return found


def read_bytes(path: str | os.PathLike[str], largest: int = LARGEST_JSON) -> bytes:
    """Return the contents of a regular file.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
        ValueError: The file has more than `largest` bytes.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            raise ValueError(f"{os.fspath(path)!r} has more than {largest:,} bytes")
        return file.read(size)  # not `read(largest)`, which would allocate `largest` bytes


def saved_int(value: SupportsIndex) -> int:
    """Convert a value that was read from a file to an int.

    Raises:
        TypeError: The value is not an integer.
        OverflowError: The integer has more than 63 bits.
    """
    found = operator.index(value)
    if found.bit_length() > _LARGEST_BITS:
        raise OverflowError(f"an integer has {found.bit_length()} bits, but at most {_LARGEST_BITS} are expected")
    return found


def read_text(path: str | os.PathLike[str], largest: int = LARGEST_JSON) -> str:
    """Return the text of a regular file; see `read_bytes`. A text that is not in UTF-8 raises `ValueError`."""
    return read_bytes(path, largest).decode("utf-8")


def read_json(path: str | os.PathLike[str], largest: int = LARGEST_JSON) -> object:
    """Return the value in a JSON file, after the checksum was verified and removed.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
        ValueError: The file is too large, contains no JSON, or differs from its checksum.
    """
    return parse_json(read_text(path, largest), os.fspath(path))


def parse_json(text: str | bytes, name: str) -> object:
    """Parse a JSON text, and verify and remove its checksum; see `read_json`. Errors name the file as `name`.

    Raises:
        ValueError: The text is not valid JSON, or differs from its checksum.
    """
    value = parse_value(text, name)
    if not isinstance(value, dict):
        return value
    has_checksum = _SHA256 in value
    found = value.pop(_SHA256, None)
    # If the key `sha256` itself was damaged, the file contains the correct checksum under another key.
    is_damaged = any(
        item == _checksum({name: other for name, other in value.items() if name != key})
        for key, item in value.items() if isinstance(item, str) and len(item) == _DIGITS
    ) if not has_checksum else found != _checksum(value)
    if is_damaged:
        raise ValueError(f"{name!r} differs from its checksum, so it was damaged or changed after it was written; "
                         f'if you changed it on purpose, delete its entry "{_SHA256}"')
    return value


def parse_value(text: str | bytes, name: str) -> object:
    """Return the value of a JSON text; raise `ValueError` for other text and for more than a hundred nested levels."""
    try:
        value: object = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{name!r} is nested too deeply") from error
    if is_deep(value):
        raise ValueError(f"{name!r} is nested too deeply")
    return value


def check_format(value: Mapping[str, object], newest: int) -> None:
    """Raise `ValueError` unless the entry `format` of a file is an integer from 1 to `newest`."""
    found = value.get("format")
    if type(found) is not int or not 1 <= found <= newest:
        raise ValueError(f"it has the format {found!r}, but this version of pytorchrl reads formats up to {newest}; "
                         "use the version that wrote it, or a newer one")


def is_deep(value: object, levels: int = _DEEPEST) -> bool:
    """Return whether a value of JSON or TOML has more than `levels` nested levels of lists and tables."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(children) and (levels == 0 or any(
        is_deep(child, levels - 1) for child in children if isinstance(child, (dict, list))))


def with_checksum(value: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of a JSON object, with the checksum of its entries as the additional entry `sha256`."""
    return {**value, _SHA256: _checksum(value)}


def _checksum(value: Mapping[str, object]) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
