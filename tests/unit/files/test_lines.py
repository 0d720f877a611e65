"""Tests of appended lines: a full disk, resuming, damaged lines, and the checksums of lines."""

from __future__ import annotations

import errno
import hashlib
import shutil
import json
import os

import pytest

from pytorchrl.errors import CheckpointError
from pytorchrl.files import lines as lines_module
from pytorchrl.files.lines import AppendedFile, check_appended, check_sealed, seal


class Disk:
    """A stand-in for `os.write` with room for a number of bytes."""

    def __init__(self, room):
        self.room, self._write = room, os.write

    def write(self, descriptor, data):
        written = min(self.room, len(data))
        if not written:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= written
        return self._write(descriptor, data[:written])


@pytest.mark.parametrize("room", range(13))
def test_a_full_disk_loses_whole_lines_and_writing_goes_on(tmp_path, monkeypatch, caplog, room):
    file, disk = AppendedFile(tmp_path / "lines"), Disk(room)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", disk.write)
        for line in ("one", "two", "three"):
            file.append(line)
        disk.room = 100
        file.append("four")
    file.close()
    complete = ["one"] * (room >= 4) + ["two"] * (room >= 8)
    # The room of a line that did not fit is used again.
    written = (tmp_path / "lines").read_text().split("\n")
    assert written[-2:] == ["four", ""]
    assert written[:len(complete)] == complete
    assert all(line in ("one", "two", "three", "four", "") for line in written)
    missing = 5 - len(written)
    assert caplog.text.count("cannot be written (") == caplog.text.count("is written again") <= 2
    assert missing > 0
    assert f"{missing} lines are missing" in caplog.text or caplog.text.count("1 lines are missing") == missing


@pytest.mark.parametrize("chunk", [1, 3, 1 << 16])
@pytest.mark.parametrize("left", ["", "o", "one", "one\n", "one\ntw", "one\ntwo\n", "one\n" + "x" * 20])
def test_an_incomplete_last_line_is_removed(tmp_path, monkeypatch, left, chunk):
    monkeypatch.setattr(lines_module, "_CHUNK_BYTES", chunk)
    path = tmp_path / "lines"
    path.write_text(left)
    file = AppendedFile(path)
    file.append("next")
    assert path.read_text() == left[:left.rfind("\n") + 1] + "next\n"
    assert file.state == {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    file.close()


@pytest.mark.parametrize("removed", ["file", "folder"])
def test_a_file_that_is_removed_begins_again_with_its_header(tmp_path, caplog, removed):
    path = tmp_path / "folder" / "lines"
    path.parent.mkdir()
    file = AppendedFile(path, header="header")
    file.append("lost")
    shutil.rmtree(path.parent) if removed == "folder" else path.unlink()
    for line in ("kept", "also kept"):
        file.append(line)
    assert path.read_text() == "header\nkept\nalso kept\n"
    assert file.state == {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert caplog.text.count("was removed") == 1
    file.close()
    again = AppendedFile(path, header="header")
    again.append("later")
    again.close()
    assert path.read_text() == "header\nkept\nalso kept\nlater\n"


@pytest.mark.parametrize("gap", ["same", "later", "reopened"])
def test_a_resumed_file_ends_where_it_was_at_the_checkpoint(tmp_path, gap):
    path = tmp_path / "lines"
    file = AppendedFile(path)
    file.append("before, ä")
    state = file.state
    if gap != "same":
        file.append("after")
    if gap == "reopened":
        file.close()
        file = AppendedFile(path)
        assert file.state["bytes"] == os.path.getsize(path)
        file.append("and later")
    file.close()
    resumed = AppendedFile(path, state)
    assert resumed.state == state
    resumed.append("again")
    assert check_appended(path, resumed.state).hexdigest() == resumed.state["sha256"]
    resumed.close()
    resumed.close()
    assert path.read_text() == "before, ä\nagain\n"


def test_every_changed_byte_before_a_checkpoint_is_found(tmp_path):
    path = tmp_path / "lines"
    file = AppendedFile(path)
    file.append('{"env_steps": 10}')
    state = file.state
    file.append("later")
    file.close()
    content = path.read_bytes()
    for index in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[index] ^= 1 << bit
            path.write_bytes(flipped)
            if index < state["bytes"]:
                with pytest.raises(CheckpointError, match=r"the lines of '.*lines' differ .* or move it away"):
                    AppendedFile(path, state)
            else:
                AppendedFile(path, state).close()
    for size in range(state["bytes"]):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match="differ"):
            AppendedFile(path, state)
        assert path.read_bytes() == content[:size]


def test_a_missing_file_begins_anew(tmp_path):
    file = AppendedFile(tmp_path / "lines", {"bytes": 10, "sha256": "0"})
    file.append("a")
    assert file.state["bytes"] == 2
    file.close()


def test_links_and_pipes_are_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="link"):
        AppendedFile(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        AppendedFile(tmp_path / "pipe", {"bytes": 3, "sha256": "0"})


def sealed(*texts):
    content, checksum = "", ""
    for text in texts:
        line, checksum = seal(text, checksum)
        content += line
    return content.encode()


TEXTS = ('{"a": 1}', "{}", '{"a": "ä\\n"}', '{"b": [1, 2]}')
CONTENT = sealed(*TEXTS)


def values(lines):
    return [{name: item for name, item in json.loads(line).items() if name != "sha256"} for line in lines]


def test_sealed_lines_are_json_and_are_read_back():
    assert values(check_sealed(CONTENT)) == [json.loads(text) for text in TEXTS]


def test_every_changed_bit_is_found_or_changes_nothing():
    silent = 0
    for index in range(8 * len(CONTENT)):
        flipped = bytearray(CONTENT)
        flipped[index // 8] ^= 1 << index % 8
        try:
            found = check_sealed(bytes(flipped))
        except ValueError:
            continue
        silent += 1
        assert values(found) == values(check_sealed(CONTENT))
    assert silent < 9  # the line break at the end


@pytest.mark.parametrize("change", [
    lambda a, b, c, d: [b, c, d], lambda a, b, c, d: [a, c, d], lambda a, b, c, d: [a, c, b, d],
    lambda a, b, c, d: [a, a, b, c, d], lambda a, b, c, d: [a, b'{"b": 1}\n', b, c, d], lambda a, b, c, d: [d],
    lambda a, b, c, d: [a, b, c[:-5] + b"\n", d], lambda a, b, c, d: [b'{"a": 0}\n', a, b, c, d],
    lambda a, b, c, d: [a, b, c, d, b'{"a": 0}\n']])
def test_other_lines_are_found(change):
    with pytest.raises(ValueError, match=r"line \d differs from its checksum or has none"):
        check_sealed(b"".join(change(*CONTENT.splitlines(keepends=True))))


def test_a_killed_writer_leaves_its_first_lines():
    lines = CONTENT.splitlines()
    for size in range(len(CONTENT) + 1):
        found = check_sealed(CONTENT[:size])
        assert found == lines[:len(found)]
