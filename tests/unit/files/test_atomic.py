"""Tests of files that are read back: every changed bit, incomplete writes, and files from strangers."""

from __future__ import annotations

import json
import os
import random
import zipfile

import numpy as np
import pytest
import torch

from pytorchrl.files import tensors
from pytorchrl.errors import CheckpointError
from pytorchrl.files.atomic import put_in_place, read_json, read_text, with_checksum
from pytorchrl.files.tensors import acting_state_of, read_sealed, save

VALUE = {"format": 1, "version": 3, "acting_state": {
    "all": torch.linspace(-1.0, 1.0, 60), "moments": torch.full((3,), 0.5, dtype=torch.float64)}}


@pytest.fixture
def sealed(tmp_path):
    return save(tmp_path / "model.pt", VALUE)


def equals_the_original(found):
    return (found["format"], found["version"]) == (1, 3) and all(
        torch.equal(found["acting_state"][name], tensor) for name, tensor in VALUE["acting_state"].items())


def test_a_sealed_file_is_read_back_by_this_library_and_by_torch(sealed):
    assert equals_the_original(read_sealed(sealed, "model"))
    assert equals_the_original(torch.load(sealed, weights_only=True))
    assert set(read_sealed(sealed, "model")) == set(VALUE)


def test_a_file_without_a_checksum_is_refused(tmp_path):
    torch.save(VALUE, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model\.pt' has no checksum, so it is damaged, or this library did not"):
        read_sealed(tmp_path / "model.pt", "model")


def test_every_changed_byte_is_found(tmp_path, sealed):
    with open(sealed, "rb") as file:
        content = file.read()
    drawn, path = random.Random(7), tmp_path / "flipped.pt"
    for index in range(len(content)):
        flipped = bytearray(content)
        flipped[index] ^= 1 << drawn.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"flipped\.pt"):
            read_sealed(path, "model")


@pytest.mark.parametrize("size", [0, 1, 21, 22, 100, -1, -60, -81, -82, -100])
def test_a_truncated_file_is_refused(tmp_path, sealed, size):
    with open(sealed, "r+b") as file:
        length = file.seek(0, os.SEEK_END)
        file.truncate(size if size >= 0 else length + size)
    with pytest.raises(CheckpointError, match=r"model '.*model\.pt' (cannot be read|is damaged|has no checksum)"):
        read_sealed(sealed, "model")


def repacked(path, change=lambda name, data: data, compression=zipfile.ZIP_STORED):
    """Write the members of an archive again, with valid checksums of their own."""
    with zipfile.ZipFile(path) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, change(name, data))


def test_members_that_were_packed_again_are_refused(sealed):
    def change(name, data):
        return data[:-1] + bytes([data[-1] ^ 1]) if name.endswith("data/0") else data
    repacked(sealed, change)
    with pytest.raises(CheckpointError, match="has no checksum"):
        read_sealed(sealed, "model")


def test_compressed_members_are_refused(sealed):
    repacked(sealed, lambda name, data: bytes(200_000_000) if name.endswith("data/0") else data, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"its member .* is compressed"):
        read_sealed(sealed, "model")
    assert os.path.getsize(sealed) < 1_000_000


def test_a_named_pipe_and_a_directory_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_sealed(tmp_path / name, "model")
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            read_text(tmp_path / name)
    with pytest.raises(CheckpointError, match="there is no model"):
        read_sealed(tmp_path / "missing", "model")


def test_files_that_are_too_large_are_refused_unread(tmp_path):
    for name in ("large.pt", "large.json"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(20 << 30)  # a sparse file, which needs no room on the disk
    with pytest.raises(CheckpointError, match="has 21,474,836,480 bytes, but at most 1,000 are expected"):
        read_sealed(tmp_path / "large.pt", "model", 1000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_sealed(tmp_path / "large.pt", "model")
    with pytest.raises(ValueError, match="has more than 16,777,216 bytes"):
        read_json(tmp_path / "large.json")


@pytest.mark.parametrize(("tensor", "words"), [
    (torch.zeros(2, dtype=torch.complex64), "complex64"), (torch.zeros(2, device="meta"), "meta"),
    (torch.eye(3).to_sparse(), "sparse_coo"), (torch.zeros(2, requires_grad=True), "requires_grad=True"),
])
def test_tensors_that_no_agent_has_are_refused_by_name(tmp_path, tensor, words):
    save(tmp_path / "model.pt", {"acting_state": {"strange": tensor}})
    with pytest.raises(CheckpointError, match=rf"contains the tensor acting_state/strange with .*{words}"):
        read_sealed(tmp_path / "model.pt", "model")


@pytest.mark.parametrize("content", [[1, 2], {1: "a"}, torch.zeros(3), "text", None])
def test_contents_without_names_are_refused(tmp_path, monkeypatch, content):
    write = torch.save
    monkeypatch.setattr(torch, "save", lambda _, file: write(content, file))
    save(tmp_path / "x.pt", {})
    with pytest.raises(CheckpointError, match="instead of named values"):
        read_sealed(tmp_path / "x.pt", "model")


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return open, (self.canary, "w")


def test_nothing_in_a_file_is_executed(tmp_path):
    canary = tmp_path / "canary"
    save(tmp_path / "model.pt", {"acting_state": Payload(str(canary))})
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_sealed(tmp_path / "model.pt", "model")
    assert not canary.exists()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(number):
    with pytest.raises(CheckpointError, match="model 'x' contains numbers in 'all' that are not finite"):
        acting_state_of({"format": 1, "acting_state": {"all": torch.tensor([1.0, number])}}, "model 'x'")


@pytest.mark.parametrize("saved", [{}, {"acting_state": 3}, {"acting_state": {"all": [1.0]}}])
def test_a_file_without_an_acting_state_is_refused(saved):
    with pytest.raises(CheckpointError, match="contains no acting state"):
        acting_state_of({"format": 1, **saved}, "model 'x'")


JSON = {"recipe": {"lr": 1e-3, "text": "ä\u2028", "list": [1, None, True]}, "seed": 2**63 - 1, "target_steps": 10}


def test_every_changed_byte_of_json_is_found_or_changes_nothing(tmp_path):
    content = (json.dumps(with_checksum(JSON), indent=2) + "\n").encode("ascii")
    drawn, path = random.Random(8), tmp_path / "run.json"
    path.write_bytes(content)
    assert read_json(path) == JSON
    errors = 0
    for index in range(len(content)):
        flipped = bytearray(content)
        flipped[index] ^= 1 << drawn.randrange(8)
        path.write_bytes(flipped)
        try:
            found = read_json(path)
        except ValueError:
            errors += 1
        else:
            # Spaces may change, and a checksum under another name is an additional entry.
            assert {name: found[name] for name in JSON} == JSON
            assert len(found) <= len(JSON) + 1
    assert errors > 0.6 * len(content)


def test_the_error_of_a_changed_file_says_how_to_accept_the_change(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**with_checksum(JSON), "seed": 5}))
    with pytest.raises(ValueError, match=r"run\.json' differs from its checksum.*delete its entry \"sha256\""):
        read_json(path)
    path.write_text(json.dumps({**JSON, "seed": 5}))
    assert read_json(path)["seed"] == 5


@pytest.mark.parametrize("content", ["[" * 100_000, "{", "\ud800".encode("utf-8", "surrogatepass"), "9" * 5000])
def test_hostile_json_is_a_value_error(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r".+"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("value", [[1], "text", None, 3])
def test_json_other_than_an_object_has_no_checksum(tmp_path, value):
    (tmp_path / "x.json").write_text(json.dumps(value))
    assert read_json(tmp_path / "x.json") == value


def test_an_error_of_writing_names_the_file(tmp_path):
    with pytest.raises(OSError, match=r"No space left on device: '.*/model.pt'"), put_in_place(tmp_path / "model.pt"):
        raise OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No such file or directory: 'other'"), put_in_place(tmp_path / "model.pt"):
        os.stat("other")
    assert list(tmp_path.iterdir()) == []


class Stop(BaseException):
    """A stand-in for the end of the process."""


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Stop()], ids=["full", "end"])
def test_a_write_that_fails_at_any_point_leaves_the_old_file(tmp_path, monkeypatch, error):
    path = tmp_path / "model.pt"
    save(path, VALUE)
    before = path.read_bytes()
    new = {**VALUE, "version": 4, "acting_state": {"all": torch.zeros(50_000), "moments": torch.zeros(3)}}
    points = 0
    for owner, name in [(tensors._HashedFile, "_put"), (tensors._HashedFile, "finish"), (os, "fsync"),
                        (os, "replace")]:
        original = getattr(owner, name)
        for number in range(100):
            calls = []

            def fail(*args, original=original, number=number, calls=calls):
                calls.append(1)
                if len(calls) > number:
                    raise error
                return original(*args)
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fail)
                try:
                    save(path, new)
                except (OSError, Stop):
                    points += 1
                else:
                    break
            found = read_sealed(path, "model")["version"]
            assert found == 3 or (owner, name, number) == (os, "fsync", 1)  # the new file is in place before its name
            assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]
            path.write_bytes(before)
        else:
            pytest.fail(f"{name} has no last call")
        path.write_bytes(before)
    assert points >= 10


def test_a_link_in_place_of_the_temporary_file_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".model.pt.{os.getpid()}").symlink_to(victim)
    save(tmp_path / "model.pt", VALUE)
    assert victim.read_text() == "precious"
    assert equals_the_original(read_sealed(tmp_path / "model.pt", "model"))


def test_files_have_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with put_in_place(tmp_path / "x") as file:
            file.write(b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_large_arrays_are_read_back(tmp_path):
    value = {"storage": torch.from_numpy(np.arange(2_000_000, dtype=np.float32))}
    save(tmp_path / "x.pt", value)
    assert torch.equal(read_sealed(tmp_path / "x.pt", "checkpoint")["storage"], value["storage"])
