"""Tests of lines with checksums: changed, missing, doubled and exchanged lines."""

from __future__ import annotations

import json

import pytest

from pytorchrl.files.sealed_lines import LineChecker, check_sealed, seal, seal_of


def sealed(*texts):
    content, previous = b"", ""
    for text in texts:
        line = seal(text, previous).encode()
        content, previous = content + line, seal_of(line)
    return content


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
    lambda a, b, c, d: [a, b, c[:-5] + b"\n", d]])
def test_other_lines_are_found(change):
    with pytest.raises(ValueError, match=r"line \d differs from its checksum"):
        check_sealed(b"".join(change(*CONTENT.splitlines(keepends=True))))


def test_a_killed_writer_leaves_its_first_lines():
    lines = CONTENT.splitlines(keepends=True)
    for size in range(len(CONTENT) + 1):
        found = check_sealed(CONTENT[:size])
        assert found == lines[:len(found)]


def test_lines_of_earlier_versions_come_first():
    old = b'{"a": 0}\n'
    assert len(check_sealed(old + CONTENT)) == 5
    with pytest.raises(ValueError, match="line 5"):
        check_sealed(CONTENT + old)


def test_a_checker_may_begin_in_the_middle():
    checker = LineChecker(at_start=False)
    assert [checker.is_sound(line) for line in CONTENT.splitlines(keepends=True)[1:]] == [True, True, True]
