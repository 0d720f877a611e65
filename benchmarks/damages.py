"""Damage files of runs: plain damage to bytes, and files that are valid on the outside and strange within.

`benchmarks/damage.py` reads the damaged files. Plain damage is what a disk, a copy or a kill can do to a file; a reader
must refuse it, or return the same data. Forged files have correct checksums, so a reader may accept them, but it must
not end with an error of another kind, hang, or take much memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import re
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pytorchrl.files.atomic import with_checksum
from pytorchrl.files.tensors import write_sealed

LABEL = b"pytorchrl sha256 "
Damage = tuple[str, Callable[[Path], None]]
"""A name, and a function that damages the file at a path."""


def written(content: bytes) -> Callable[[Path], None]:
    """Return a function that replaces the contents of a file."""
    return lambda path: path.write_bytes(content) and None


def flips(content: bytes, count: int, rng: random.Random) -> Iterator[Damage]:
    """Yield single changed bits at positions that are spread over the file."""
    for number in range(count):
        low, high = number * len(content) // count, (number + 1) * len(content) // count
        place = rng.randrange(low, max(low + 1, high)) % len(content)
        changed = bytearray(content)
        changed[place] ^= 1 << rng.randrange(8)
        yield "flip", written(bytes(changed))


def blocks(content: bytes, count: int, rng: random.Random) -> Iterator[Damage]:
    """Yield files in which a block is random, zero, missing, doubled, or exchanged with another block."""
    for _ in range(count):
        size = min(rng.choice((2, 16, 100, 512, 4096)), len(content) // 2)
        a, b = sorted((rng.randrange(len(content) - size + 1), rng.randrange(len(content) - size + 1)))
        block = content[a:a + size]
        yield "random block", written(content[:a] + rng.randbytes(size) + content[a + size:])
        yield "zero block", written(content[:a] + bytes(size) + content[a + size:])
        yield "missing block", written(content[:a] + content[a + size:])
        yield "doubled block", written(content[:a] + block + content[a:])
        if b >= a + size:
            yield "exchanged blocks", written(
                content[:a] + content[b:b + size] + content[a + size:b] + block + content[b + size:])


def cuts(content: bytes, count: int, rng: random.Random) -> Iterator[Damage]:
    """Yield files that end early, and files with additional bytes."""
    sizes = {0, 1, len(content) - 1, len(content) // 2, *(rng.randrange(len(content)) for _ in range(count))}
    for size in sorted(sizes):
        yield "truncated", written(content[:size])
    for more in (b"\0", b"\n", b" ", b"{}", rng.randbytes(100), content):
        yield "additional bytes", written(content + more)


def lines(content: bytes, count: int, rng: random.Random) -> Iterator[Damage]:
    """Yield files of lines in which lines are missing, doubled or exchanged."""
    rows = content.splitlines(keepends=True)
    for _ in range(count):
        a, b = rng.randrange(len(rows)), rng.randrange(len(rows))
        if a < len(rows) - 1:  # files without their last lines are those of killed runs, see `truncated`
            yield "missing line", written(b"".join(rows[:a] + rows[a + 1:]))
        yield "doubled line", written(b"".join([*rows[:a], rows[a], *rows[a:]]))
        if rows[a] != rows[b]:
            rows_of = list(rows)
            rows_of[a], rows_of[b] = rows[b], rows[a]
            yield "exchanged lines", written(b"".join(rows_of))
            rows_of[a] = rows[a]
            yield "foreign line", written(b"".join([*rows_of[:a], rows[b], *rows_of[a + 1:]]))


def others(files: list[bytes]) -> Iterator[Damage]:
    """Yield other things in place of the file: nothing, a directory, a named pipe, a dead link, and other files."""
    def pipe(path: Path) -> None:
        path.unlink()
        os.mkfifo(path)

    def folder(path: Path) -> None:
        path.unlink()
        path.mkdir()

    def link(path: Path) -> None:
        path.unlink()
        path.symlink_to("nowhere")
    yield "missing", lambda path: path.unlink()
    yield from (("directory", folder), ("named pipe", pipe), ("dead link", link))
    for content in files:
        yield "another file", written(content)


def members(content: bytes, rng: random.Random) -> Iterator[Damage]:
    """Yield archives with missing, additional, doubled and exchanged members; the archive's comment is kept."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        found, comment = [(name, archive.read(name)) for name in archive.namelist()], archive.comment

    def packed(entries: list[tuple[str, bytes]]) -> Callable[[Path], None]:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, data in entries:
                archive.writestr(zipfile.ZipInfo(name), data)
            archive.comment = comment
        return written(out.getvalue())
    for place, (name, data) in enumerate(found):
        yield "missing member", packed(found[:place] + found[place + 1:])
        yield "doubled member", packed([*found, (name, rng.randbytes(len(data)))])
        for other, (_, theirs) in enumerate(found):
            if other > place and theirs != data:
                exchanged = list(found)
                exchanged[place], exchanged[other] = (name, theirs), (found[other][0], data)
                yield "exchanged members", packed(exchanged)
    yield "additional member", packed([*found, ("more", b"123")])


# ---- forged files


def forge(name: str, content: bytes, rng: random.Random) -> bytes:
    """Return other contents for a file: forged, or damaged at random places."""
    if rng.random() < 0.2:
        makers = [flips(content, 1, rng), blocks(content, 1, rng), cuts(content, 1, rng)]
        with tempfile.TemporaryDirectory() as folder:
            rng.choice(list(rng.choice(makers)))[1](Path(folder) / "file")
            return (Path(folder) / "file").read_bytes()
    if name.endswith(".pt"):
        while True:
            with contextlib.suppress(RuntimeError, MemoryError):  # a forged tensor that does not fit into memory
                return forged_archive(content, rng)
    if name.endswith(".npz"):
        return forged_zip(content, rng)
    if name.endswith(".jsonl"):
        return forged_lines(content, rng)
    if name.endswith(".json"):
        return forged_json(content, rng)
    return rng.randbytes(rng.randrange(5000))

def sealed(line: bytes, previous: str) -> tuple[bytes, str]:
    """Return a line of JSON with a correct checksum, without a line break, and the checksum."""
    start = line[:-1] + (b"" if line == b"{}" else b", ")
    found = hashlib.sha256(previous.encode() + start).hexdigest()
    return start + b'"sha256": "' + found.encode() + b'"}', found


def first_line(content: bytes, **changes: object) -> bytes:
    """Return a record of a run with other entries in its first line, and correct checksums."""
    head, *rest = [json.loads(line) for line in content.splitlines()]
    out, previous = b"", ""
    for row in ({**head, **changes}, *rest):
        del row["sha256"]
        text, previous = sealed(json.dumps(row, separators=(",", ":")).encode(), previous)
        out += text + b"\n"
    return out


def strange(rng: random.Random, depth: int = 0) -> Any:
    """Return a value of JSON that no run has."""
    if depth < 3 and rng.random() < 0.3:
        return rng.choice((
            lambda: [strange(rng, depth + 1) for _ in range(rng.randrange(4))],
            lambda: {rng.choice(("", "a", "__code__", "__factory__", "schedule", "__space__", "__mapping__", "options",
                                 "__tuple__", "__float__", "__partial__", "\ud800", "sha256")): strange(rng, depth + 1)
                     for _ in range(rng.randrange(3))}))()
    return rng.choice((
        None, True, False, 0, -1, 1, 2**31, 2**63, -2**63 - 1, 10**400, 10**4000, 0.0, -0.0, 0.5, 1e308, float("inf"),
        float("nan"), 5e-324, "", "x", "\0", "\x1b[2J", "\ud800", "nan", "1e999", "a" * 10_000, "../../etc",
        "os:system", "pytorchrl.scheme.scheme:Scheme", [], {}, [[]], [None] * 1000))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in a nested value."""
    yield path
    is_list = isinstance(value, (list, tuple))
    children = value.items() if isinstance(value, dict) else enumerate(value) if is_list else ()
    for key, child in children:
        yield from places(child, (*path, key))


def changed(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """Return a copy of a nested value with a change at a path."""
    if not path:
        return change(value)
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = changed(value[path[0]], path[1:], change)
    return tuple(copied) if isinstance(value, tuple) else copied


def deranged(value: Any, rng: random.Random, replacement: Callable[[Any], Any]) -> Any:
    """Return a copy of a nested value in which one to three places are replaced, removed or doubled."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path = rng.choice(list(places(value)))
        if path and rng.random() < 0.25:
            def without(parent: Any, key: Any = path[-1]) -> Any:
                if isinstance(parent, dict):
                    return {name: item for name, item in parent.items() if name != key}
                return type(parent)([item for place, item in enumerate(parent) if place != key])
            value = changed(value, path[:-1], without)
        else:
            value = changed(value, path, replacement)
    return value


def dumped(value: Any, rng: random.Random) -> bytes:
    """Return a value as JSON, in one of ten cases with damage that only a parser meets."""
    try:
        text = json.dumps(value).encode("ascii")
    except ValueError:  # too many digits
        return b'{"seed": ' + b"9" * 5000 + b"}"
    kind = rng.randrange(40)
    if kind == 0:
        return text[:1] + b'"seed": 5, ' + text[1:]  # a key twice
    if kind == 1:
        return text.replace(b'"', b'"\xff\xfe', 1)
    if kind == 2:
        return b"\xef\xbb\xbf" + text
    if kind == 3:
        return text.decode("ascii").encode("utf-16")
    if kind == 4:
        depth = rng.choice((900, 2000, 100_000))
        return rng.choice((b"[", b'{"recipe":')) * depth + b"1"
    if kind == 5:
        depth = rng.choice((300, 900, 5000))
        left, right = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
        return b'{"recipe": ' + left * depth + b"1" + right * depth + b', "seed": 1}'
    if kind == 6:
        return b'{"seed": ' + b"9" * rng.choice((400, 4000, 5000, 100_000)) + b"}"
    return text


def forged_json(content: bytes, rng: random.Random) -> bytes:
    """Return a JSON file with strange values and, usually, a correct checksum."""
    value = json.loads(content)
    value.pop("sha256", None)
    value = deranged(value, rng, lambda _: strange(rng))
    if isinstance(value, dict) and rng.random() < 0.7:
        with contextlib.suppress(ValueError):  # too many digits
            value = with_checksum(value)
    return dumped(value, rng)


def forged_lines(content: bytes, rng: random.Random) -> bytes:
    """Return a file of JSON lines with strange values and, usually, correct checksums."""
    rows = [json.loads(line) for line in content.splitlines()]
    is_sealed, keeps = b'"sha256"' in content, rng.random() < 0.8
    for row in rows:
        if isinstance(row, dict):
            row.pop("sha256", None)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(rows))
        rows[place] = deranged(rows[place], rng, lambda _: strange(rng))
    out, previous = b"", ""
    for row in rows:
        text = dumped(row, rng)
        if is_sealed and keeps and text.endswith(b"}"):
            text, previous = sealed(text, previous)
        out += text + b"\n"
    return out


def resealed(content: bytes) -> bytes:
    """Return an archive with a correct checksum in its comment."""
    comment = len(LABEL) + 64
    body = content[:-comment]
    return body + LABEL + hashlib.sha256(body).hexdigest().encode()


def strange_part(value: Any, rng: random.Random) -> Any:
    """Return a value that may stand in a file of `torch.save`, in place of another."""
    if isinstance(value, torch.Tensor) and rng.random() < 0.8:
        return rng.choice((
            lambda: value.flatten()[:-1] if value.numel() else torch.zeros(3), value.double,
            lambda: value.to(torch.int64), lambda: torch.full_like(value, float("nan")) if value.is_floating_point()
            else value, lambda: value[None], lambda: torch.zeros(0), lambda: value.to(torch.bool),
            lambda: value.to(torch.complex64), lambda: torch.empty(3, device="meta"), lambda: -value.float() - 1,
            lambda: torch.zeros(1).expand(10**9)))()
    return rng.choice((
        lambda: None, lambda: -1, lambda: 2**70, lambda: float("nan"), lambda: "x", list, dict,
        lambda: {"a": 1}, lambda: [1, 2], lambda: torch.zeros(3), lambda: True, lambda: (), lambda: {1: 2},
        lambda: b"bytes", lambda: torch.zeros(2, 2)))()


def forged_archive(content: bytes, rng: random.Random) -> bytes:
    """Return a model or checkpoint with a correct checksum and strange contents, or with strange headers."""
    if rng.random() < 0.6:
        value = torch.load(io.BytesIO(content), weights_only=True)
        value = deranged(value, rng, lambda part: strange_part(part, rng))
        out = io.BytesIO()
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            write_sealed(value, out)
        else:
            torch.save(value, out)
        return out.getvalue()
    body = forged_zip(content, rng)
    return resealed(body) if body[-len(LABEL) - 64:].startswith(LABEL) else body


def forged_zip(content: bytes, rng: random.Random) -> bytes:
    """Return an archive with bombs, duplicate names, strange names, or wrong numbers in its headers."""
    kind = rng.randrange(4)
    if kind == 0:  # numbers in the headers
        body = bytearray(content)
        signature = rng.choice((b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7"))
        starts = [found.start() for found in re.finditer(re.escape(signature), content)]
        for _ in range(rng.choice((1, 1, 2, 4))):
            start = (rng.choice(starts) if starts else 0) + rng.randrange(4, 46)
            number = rng.choice((0, 1, 0x7fffffff, 0xffffffff, 0xfffffffe, 2**16, rng.getrandbits(32)))
            body[start:start + 4] = struct.pack("<I", number)
        return bytes(body[:len(content)])
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        found, comment = [(name, archive.read(name)) for name in archive.namelist()], archive.comment
    out = io.BytesIO()
    bomb = rng.randrange(len(found))
    with zipfile.ZipFile(out, "w") as archive:
        for place, (name, data) in enumerate(found):
            if kind == 1 and place == bomb:  # a few kilobytes that become many megabytes
                archive.writestr(name, bytes(rng.choice((1, 100)) << 20), zipfile.ZIP_DEFLATED)
            elif kind == 2 and place == bomb:
                archive.writestr(rng.choice(("../x", "/etc/x", name.upper(), "data.pkl", "x" * 60_000, "é",
                                             found[0][0], name + "/")), data)
            elif kind == 3 and place == bomb:
                archive.writestr(name, strange_data(data, rng))
            else:
                archive.writestr(name, data)
        archive.comment = comment
    return out.getvalue()


def strange_data(data: bytes, rng: random.Random) -> bytes:
    """Return other contents of a member: another pickle, an array of objects, or an array with a strange header."""
    out = io.BytesIO()
    kind = rng.randrange(5)
    if kind == 0:
        np.save(out, np.array([{"a": 1}, None], dtype=object), allow_pickle=True)
    elif kind == 1:
        shape = rng.choice(((10**12,), (-1,), (2**62, 2**62), (3, -3), (1,) * 40, (0,)))
        header = repr({"descr": rng.choice(("<f8", "|O", "<U999999999", "|V8", "<M8[s]", "<c16", "|S0", "<U0")),
                       "fortran_order": rng.random() < 0.3, "shape": shape}).encode() + b"\n"
        out.write(b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + bytes(80))
    elif kind == 2:
        out.write(b"\x93NUMPY" + bytes([rng.randrange(4), 0]) + struct.pack("<H", rng.randrange(2**16)) + data[10:])
    elif kind == 3:
        out.write(b"\x80\2cos\nsystem\nX\4\0\0\0true\x85R.")
    else:
        body = bytearray(data)
        for _ in range(5):
            if body:
                body[rng.randrange(len(body))] = rng.randrange(256)
        out.write(bytes(body))
    return out.getvalue()
