"""Write and read sealed files: models and checkpoints with a checksum over the whole file.

A sealed file is a file of `torch.save`. The comment of its zip archive is the SHA-256 of all other bytes.
`torch.load(path, weights_only=True)` can also read the file. Reading executes no code from the file.
"""

from __future__ import annotations

import hashlib
import os
import pickletools
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch

from pytorchrl.errors import CheckpointError
from pytorchrl.files.atomic import check_format, open_regular, put_in_place, sha256_of

MODEL_FORMAT = 1
"""Number of the format of models."""
_LABEL = b"pytorchrl sha256 "
_COMMENT_BYTES = len(_LABEL) + 64
_DEEPEST = 100
# A file of this library contains few containers more than once. A file that contains some more than `_MOST_REPEATED`
# times each, and has more than `_MOST_VALUES` values in total, is malicious.
_MOST_VALUES, _MOST_REPEATED = 1_000_000, 100
_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8,
                     torch.int16, torch.int32, torch.int64})


class _HashedFile:
    """A file for `torch.save` that hashes what is written.

    The last two bytes that `torch.save` writes are the length of the archive's comment, which is 0. The latest two
    bytes are therefore always held back, and `finish` replaces them by the length of the comment that it adds.
    """

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
        """Write the end of the zip archive: the length of its comment, and the comment, which contains the checksum."""
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
        torch.save(dict(value), hashed)  # type: ignore[arg-type] # torch needs only `write` and `flush`
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
    """Return the contents of a sealed file.

    Args:
        path: The file.
        kind: Kind of the file, such as "model", for error messages.
        largest: Maximum size in bytes; None: no limit.

    Raises:
        CheckpointError: The file is missing, too large or damaged, is not a regular file, or contains values that
            this library never saves. The message names the path.
    """
    name = f"{kind} {os.fspath(path)!r}"
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if largest is not None and size > largest:
                raise CheckpointError(f"{name} has {size:,} bytes, but at most {largest:,} are expected")
            _verify(file, name)
            file.seek(0)
            value = torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except FileNotFoundError:
        doubled = os.fspath(path).endswith(".pt.pt")
        raise CheckpointError(f"there is no {name}{'; give its name without .pt' if doubled else ''}") from None
    except Exception as error:
        raise CheckpointError(f"{name} cannot be read: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"{name} contains a {type(value).__name__} instead of named values")
    _Check(name).check(value)
    return value


def _verify(file: IO[bytes], name: str) -> None:
    """Check the archive and its SHA-256 checksum.

    Raises:
        CheckpointError: The checksum is wrong or missing, or entries are compressed (`torch.save` never compresses
            entries).
    """
    with zipfile.ZipFile(file) as archive:
        members, comment = archive.infolist(), archive.comment
        if packed := [member.filename for member in members if member.compress_type != zipfile.ZIP_STORED]:
            raise CheckpointError(f"{name} is not a file of this library: its member {packed[0]} is compressed")
        if not (comment.startswith(_LABEL) and len(comment) == _COMMENT_BYTES):
            raise CheckpointError(f"{name} has no checksum, so it is damaged, or this library did not write it")
        if _digest(file).encode("ascii") != comment.removeprefix(_LABEL):
            damaged = archive.testzip()
            raise CheckpointError(f"{name} is damaged: the checksum of {damaged or 'the file'} is wrong")
        for member in members:
            if member.filename.endswith("/data.pkl"):
                _check_tuples(archive.read(member), name)


def _check_tuples(pickled: bytes, name: str) -> None:
    """Refuse tuples that contain the same tuples so often that computing their hash would take for ever.

    `torch.load` computes the hash of each key of a mapping, so tuples must be checked before the file is unpickled. The
    number of values in each tuple is counted on a stack like that of the unpickler; other objects count as one value.
    """
    stack, marks = list[int](), list[int]()  # `marks` contains the positions of marks in the stack
    memo: dict[object, int] = {}
    for number, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
        before, after = opcode.stack_before, opcode.stack_after
        start = len(stack) - len(before)
        if pickletools.markobject in before:
            start = marks.pop() - before.index(pickletools.markobject)
        items = stack[start:]
        del stack[start:]
        if opcode.name == "MARK":
            marks.append(len(stack))
            stack.append(0)
        elif opcode.name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif opcode.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            stack += items
            memo[len(memo) if opcode.name == "MEMOIZE" else argument] = stack[-1]
        elif opcode.name == "DUP":
            stack += items * 2
        elif opcode.name.startswith("TUPLE"):
            stack.append(1 + sum(items))
            if stack[-1] > number + _MOST_REPEATED:  # each value that is not a repetition needs an operation
                raise CheckpointError(f"{name} contains the same tuples so often that it cannot be read")
        else:
            stack += [1] * len(after)


def _digest(file: IO[bytes]) -> str:
    """Return the SHA-256 of a sealed file without its comment, as a hexadecimal string."""
    file.seek(0)
    return sha256_of(file, os.fstat(file.fileno()).st_size - _COMMENT_BYTES).hexdigest()


class _Check:
    """Check the values of a file, each object once, however often the file refers to it.

    Args:
        name: Name of the file, for error messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # id of a container -> number of its values, and number of nested levels
        self._known: dict[int, tuple[int, int]] = {}

    def check(self, value: object, where: str = "", depth: int = 0) -> tuple[int, int]:
        """Return the number of values that `value` contains, and the number of nested levels.

        Raises:
            CheckpointError: There is a tensor that this library never saves, such as a sparse or complex one; or
                containers are nested too deeply, contain themselves, or contain others so often that reading all
                values would take for ever.
        """
        if isinstance(value, torch.Tensor):
            self._check_tensor(value, where)
        if not isinstance(value, (Mapping, list, tuple)):
            return 1, 0
        if (found := self._known.get(id(value))) is None and depth <= _DEEPEST:
            size, levels = 1, 0
            for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
                own_size, own_levels = self.check(item, f"{where}/{key}" if where else str(key), depth + 1)
                size, levels = size + own_size, max(levels, own_levels + 1)
            found = self._known[id(value)] = size, levels
        if found is None or depth + found[1] > _DEEPEST:
            raise CheckpointError(f"{self._name} is nested too deeply")
        if found[0] > max(_MOST_VALUES, _MOST_REPEATED * len(self._known)):
            raise CheckpointError(f"{self._name} contains the same lists or mappings so often that it has more than "
                                  f"{found[0]:,} values at {where or 'the top'}")
        return found

    def _check_tensor(self, value: torch.Tensor, where: str) -> None:
        is_plain = (value.layout == torch.strided and value.device.type == "cpu" and value.dtype in _DTYPES
                    and not value.is_neg() and type(value) is torch.Tensor)
        if is_plain and value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise CheckpointError(f"{self._name} contains the tensor {where} with {value.numel():,} elements, but only "
                                  f"{value.untyped_storage().nbytes():,} bytes of data")
        if not is_plain or value.requires_grad:
            raise CheckpointError(
                f"{self._name} contains the tensor {where} with dtype {str(value.dtype).removeprefix('torch.')}, "
                f"layout {str(value.layout).removeprefix('torch.')}, device {value.device}, "
                f"requires_grad={value.requires_grad} and negative bit {value.is_neg()}; expected a dense tensor of "
                "real numbers on the CPU")


def acting_state_of(saved: Mapping[str, object], name: str) -> dict[str, torch.Tensor]:
    """Return the tensors that the agent needs to act, from the contents of a model file.

    Args:
        saved: Contents of the file.
        name: Name of the model, for error messages.

    Raises:
        CheckpointError: The tensors are missing or contain NaN or infinity, or a newer pytorchrl saved the model.
    """
    state = acting_tensors_of(saved, name)
    check_finite(state, name)
    return state


def acting_tensors_of(saved: Mapping[str, object], name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a model like `acting_state_of`, but do not check their values yet.

    A file can contain any number of tensors that share their data, so values are checked after the names.

    Raises:
        CheckpointError: The tensors are missing, or a newer pytorchrl saved the model.
    """
    if saved.keys() >= {"scheme", "learner"}:
        raise CheckpointError(f"{name} is a checkpoint of a run, and not a model; give the file model.pt of the run, "
                              "or continue the run with resume=True")
    try:
        check_format(saved, MODEL_FORMAT)
    except ValueError as error:
        raise CheckpointError(f"{name} cannot be loaded: {error}") from error
    state = saved.get("acting_state")
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(f"{name} contains no acting state; only files of save_model can be loaded")
    return state


def check_finite(state: Mapping[str, torch.Tensor], name: str) -> None:
    """Raise `CheckpointError` if a tensor of a model contains NaN or infinity."""
    for key, value in state.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise CheckpointError(f"{name} contains numbers in {key!r} that are not finite, so it cannot act")
