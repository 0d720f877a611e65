"""Tests of the directory for bad batches, which is checked before a run starts."""

from __future__ import annotations

import pytest

from pytorchrl.errors import ConfigError
from pytorchrl.scheme.options.gradients import check_directory


def test_existing_and_new_directories_are_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_directory("folder", tmp_path) == str(tmp_path)
    assert check_directory("folder", "a/b/c") == str(tmp_path / "a" / "b" / "c")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("wrong", "text"), [
    ("", "folder must be a directory or None"), (None, "got None"), (3, "got 3"), (b"bytes", "got b'bytes'"),
    ("file", "folder must be a directory, got"), ("file/below", "folder .* cannot be a directory"),
    ("zero\0byte", "folder .* cannot be a directory"), ("x" * 300, "folder .* cannot be a directory")],
    ids=["empty", "none", "number", "bytes", "file", "below a file", "zero byte", "long"])
def test_paths_that_cannot_be_directories_are_refused(tmp_path, monkeypatch, wrong, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=text):
        check_directory("folder", wrong)
