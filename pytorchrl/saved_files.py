"""Read and write files that are read back: models, checkpoints and JSON.

A file may be damaged, or may come from a stranger. Each read function accepts only regular files of a limited size and
executes nothing. Checksums (SHA-256) find changed bits:

- A *sealed* file is a file of `torch.save`, whose contents have the key `sealed`. The comment of its zip archive is
  the checksum of all other bytes. `torch.load(path, weights_only=True)` also reads it.
- A JSON object may have the key `sha256`, the checksum of its other entries.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch

from pytorchrl.errors import CheckpointError

LARGEST_JSON = 16 << 20
"""Maximum size of a JSON file in bytes."""
_SEALED, _SHA256 = "sealed", "sha256"
_LABEL = b"pytorchrl sha256 "
_COMMENT_BYTES = len(_LABEL) + 64
_CHUNK_BYTES = 1 << 20
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8,
                     torch.int16, torch.int32, torch.int64})


@contextmanager
def put_in_place(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file, which replaces `path` when the `with` block ends, or is removed if the block fails.

    After the block, the file and its name are on the disk, so that they also survive a crash of the machine.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # a killed process with the same id may have left this file
    try:
        with open(temporary, "xb", opener=open_no_follow) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def open_no_follow(path: str, flags: int) -> int:
    """Open a file unless it is a symbolic link; used as an `opener` of `open`. New files have mode 0666 & ~umask."""
    return os.open(path, flags | _NO_FOLLOW, 0o666)


def _sync(folder: Path) -> None:
    """Write the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a regular file for reading. Other files, such as a named pipe or a device, could block for ever.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    # A named pipe without a writer would block `open`, unless it is opened in non-blocking mode.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{os.fspath(path)!r} is not a regular file")
        yield file


def read_text(path: str | os.PathLike[str], largest: int = LARGEST_JSON) -> str:
    """Return the text of a regular file in UTF-8.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
        ValueError: It has more than `largest` bytes, or is not in UTF-8.
    """
    with open_regular(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"{os.fspath(path)!r} has more than {largest:,} bytes")
    return content.decode("utf-8")


def read_json(path: str | os.PathLike[str], largest: int = LARGEST_JSON) -> object:
    """Return the value in a JSON file, without its checksum.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
        ValueError: The file is too large, contains no JSON, or differs from its checksum.
    """
    return parse_json(read_text(path, largest), os.fspath(path))


def parse_json(text: str, name: str) -> object:
    """Return the value in the text of a JSON file called `name`, without its checksum; see `read_json`."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{name!r} is nested too deeply") from error
    if isinstance(value, dict) and _SHA256 in value:
        found = value.pop(_SHA256)
        if found != _checksum(value):
            raise ValueError(f"{name!r} differs from its checksum, so it was damaged or changed after it was written; "
                             f'if you changed it on purpose, delete its entry "{_SHA256}"')
    return value


def with_checksum(value: Mapping[str, object]) -> dict[str, object]:
    """Return a JSON object with the checksum of its entries."""
    return {**value, _SHA256: _checksum(value)}


def _checksum(value: Mapping[str, object]) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


class _HashedFile:
    """A file that `torch.save` writes in order. The last two bytes are withheld, because `finish` changes them."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash, self._last = file, hashlib.sha256(), b""

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if len(view) >= 2:
            self._put(self._last)
            self._put(view[:-2])
            self._last = bytes(view[-2:])
        else:
            joined = self._last + bytes(view)
            self._put(joined[:-2])
            self._last = joined[-2:]
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        """Write the length of the archive's comment, which was 0, and the comment."""
        self._put(_COMMENT_BYTES.to_bytes(2, "little"))
        self._file.write(_LABEL + self._hash.hexdigest().encode("ascii"))

    def _put(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self._file.write(data)


def write_sealed(value: Mapping[str, object], file: IO[bytes]) -> None:
    """Write plain values and tensors as a sealed file.

    Raises:
        OSError: The file cannot be written, for example because the disk is full.
    """
    hashed = _HashedFile(file)
    try:
        torch.save({**value, _SEALED: True}, hashed)  # type: ignore[arg-type] # torch needs only `write` and `flush`
    except RuntimeError as error:  # torch raises this error if `write` fails
        raise OSError(str(error)) from error
    hashed.finish()


def save(path: str | os.PathLike[str], value: Mapping[str, object]) -> str:
    """Write plain values and tensors to a sealed file, completely or not at all, and return its path.

    Raises:
        OSError: The file cannot be written; an earlier file is unchanged.
    """
    with put_in_place(Path(path)) as file:
        write_sealed(value, file)
    return os.fspath(path)


def read_sealed(path: str | os.PathLike[str], kind: str, largest: int | None = None) -> dict[str, object]:
    """Return the contents of a sealed file, or of an older file without a checksum.

    Args:
        path: The file.
        kind: Kind of file for messages, such as "model".
        largest: Maximum size in bytes; None: no limit.

    Raises:
        CheckpointError: The file is missing, too large or damaged, is not a regular file, or contains values that
            `write_sealed` cannot have written. The message names the path.
    """
    name = f"{kind} {os.fspath(path)!r}"
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if largest is not None and size > largest:
                raise CheckpointError(f"{name} has {size:,} bytes, but at most {largest:,} are expected")
            is_verified = _verify(file, name)
            file.seek(0)
            value = torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"there is no {name}") from None
    except Exception as error:
        raise CheckpointError(f"{name} cannot be read: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"{name} contains a {type(value).__name__} instead of named values")
    if value.pop(_SEALED, False) and not is_verified:
        raise CheckpointError(f"{name} is damaged: it has lost its checksum")
    _check_tensors(value, name)
    return value


def _verify(file: IO[bytes], name: str) -> bool:
    """Check the archive and its checksum; return whether it has one.

    Raises:
        CheckpointError: The checksum is wrong, or entries are compressed, which `torch.save` never does.
    """
    with zipfile.ZipFile(file) as archive:
        members, comment = archive.infolist(), archive.comment
        if packed := [member.filename for member in members if member.compress_type != zipfile.ZIP_STORED]:
            raise CheckpointError(f"{name} is not a file of this library: its member {packed[0]} is compressed")
        if not (comment.startswith(_LABEL) and len(comment) == _COMMENT_BYTES):
            damaged = archive.testzip()
            if damaged is not None:
                raise CheckpointError(f"{name} is damaged: the checksum of its member {damaged} is wrong")
            return False
        if _digest(file).encode("ascii") != comment.removeprefix(_LABEL):
            damaged = archive.testzip()
            raise CheckpointError(f"{name} is damaged: the checksum of {damaged or 'the file'} is wrong")
    return True


def _digest(file: IO[bytes]) -> str:
    """Return the SHA-256 of a sealed file without its comment, as a hexadecimal text."""
    left = os.fstat(file.fileno()).st_size - _COMMENT_BYTES
    found = hashlib.sha256()
    file.seek(0)
    while left > 0 and (data := file.read(min(left, _CHUNK_BYTES))):
        found.update(data)
        left -= len(data)
    return found.hexdigest()


def _check_tensors(value: object, name: str, where: str = "") -> None:
    """Refuse tensors that `write_sealed` cannot have written: sparse, complex, quantized or with gradients."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_tensors(item, name, f"{where}/{key}" if where else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_tensors(item, name, f"{where}/{index}")
    elif isinstance(value, torch.Tensor):
        is_plain = value.layout == torch.strided and value.device.type == "cpu" and value.dtype in _DTYPES
        if not is_plain or value.requires_grad:
            raise CheckpointError(
                f"{name} contains the tensor {where} with dtype {str(value.dtype).removeprefix('torch.')}, layout "
                f"{str(value.layout).removeprefix('torch.')}, device {value.device} and "
                f"requires_grad={value.requires_grad}; expected a dense tensor of real numbers on the CPU")


def acting_state_of(saved: Mapping[str, object], name: str) -> dict[str, torch.Tensor]:
    """Return the acting state in the contents of a model.

    Raises:
        CheckpointError: There is none, or it contains numbers that are not finite.
    """
    state = saved.get("acting_state")
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(f"{name} contains no acting state; only files of save_model can be loaded")
    for key, value in state.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise CheckpointError(f"{name} contains numbers in {key!r} that are not finite, so it cannot act")
    return state
