"""Tests that each public name has a stated stability, and that names do not disappear without a notice.

The tables of `docs/api/index.md` state the stability of each public name and module. `public_names.txt` lists every
name and module that has ever been public: new ones are added to it, and none is taken out.
"""

from __future__ import annotations

import importlib.util
import re

import pytest

import pytorchrl
from tests.conftest import ROOT
from tests.unit.packaging.project import lines_of

PINNED = "tests/unit/packaging/public_names.txt"
ROW = re.compile(r"^\|(?P<names>[^|]*`[^|]*)\|[^|]*\| (?P<stability>stable|provisional) \| (?P<since>\d+\.\d+\.\d+) "
                 r"\|$")


def page():
    return (ROOT / "docs/api/index.md").read_text(encoding="utf-8")


def stated(text):
    """Return the public names of `pytorchrl`, and the public modules, as (name, stability, first version)."""
    section, _, modules = text.partition("## Names in `pytorchrl`")[2].partition("## Public modules")
    return [[(name, row["stability"], row["since"]) for line in part.splitlines() if (row := ROW.match(line))
             for name in re.findall(r"`([\w.]+)`", row["names"])] for part in (section, modules)]


def removed_without_notice(pinned, available, deprecated, changelog):
    """Return the pinned names that are not available, and neither deprecated nor under "Removed" in the changelog."""
    removals = "\n".join(re.findall(r"^### Removed\n(.*?)(?=^##|\Z)", changelog, re.MULTILINE | re.DOTALL))
    return sorted(name for name in set(pinned) - set(available) - set(deprecated) if f"`{name}`" not in removals)


def available():
    names, modules = stated(page())
    return [*(f"pytorchrl.{name}" for name, *_ in names), *(module for module, *_ in modules)]


def test_every_public_name_has_a_stability():
    names, modules = stated(page())
    assert sorted(name for name, *_ in names) == sorted(pytorchrl.__all__)
    assert len({name for name, *_ in names}) == len(names)
    assert {stability for _, stability, _ in names} == {"stable"}
    rows = [line for line in page().partition("## Public modules")[2].splitlines() if line.startswith("| `")]
    assert all(map(ROW.match, rows))
    assert len(modules) > 40
    assert [module for module, *_ in modules if importlib.util.find_spec(module) is None] == []


@pytest.mark.parametrize("row", ["| `a` | page |", "| `a` | page | solid | 0.2.0 |", "| `a` | page | stable | soon |"])
def test_a_row_without_a_stability_or_a_version_is_not_counted(row):
    assert stated(f"## Names in `pytorchrl`\n{row}\n## Public modules\n") == [[], []]


def test_every_public_name_is_pinned_and_none_was_removed_without_notice():
    pinned = lines_of(PINNED)
    assert pinned == sorted(set(pinned))
    assert sorted(set(available()) - set(pinned)) == [], f"add these names to {PINNED}"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    deprecated = [f"pytorchrl.{name}" for name in pytorchrl._DEPRECATED]
    assert removed_without_notice(pinned, available(), deprecated, changelog) == []


@pytest.mark.parametrize(("changelog", "missing"), [
    ("## 1.0.0\n\n### Removed\n\n- `pytorchrl.A`: use `B`.\n\n### Train\n", []),
    ("## 1.0.0\n\n### Train\n\n- `pytorchrl.A` trains.\n", ["pytorchrl.A"]),
    ("## 1.0.0\n\n### Removed\n\n- `pytorchrl.C`\n\n## 0.9.0\n\n- `pytorchrl.A`\n", ["pytorchrl.A"])])
def test_a_removal_without_notice_is_found(changelog, missing):
    assert removed_without_notice(["pytorchrl.A", "pytorchrl.B"], ["pytorchrl.B"], [], changelog) == missing
    assert removed_without_notice(["pytorchrl.A"], [], ["pytorchrl.A"], "") == []


def test_every_deprecated_name_has_a_replacement():
    assert {new for new, _ in pytorchrl._DEPRECATED.values()} <= set(pytorchrl.__all__)
    assert not set(pytorchrl._DEPRECATED) & set(pytorchrl.__all__)


@pytest.mark.parametrize("statement", ["pytorchrl.OldPPO", "__import__('pytorchrl', fromlist=['OldPPO']).OldPPO"])
def test_each_use_of_a_deprecated_name_warns_and_returns_the_replacement(monkeypatch, statement):
    monkeypatch.setitem(pytorchrl._DEPRECATED, "OldPPO", ("PPO", "0.3.0"))
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match=r"^pytorchrl.OldPPO is deprecated since version 0.3.0; "
                                                    r"use pytorchrl.PPO$") as caught:
            assert eval(statement) is pytorchrl.PPO
        assert {warning.filename for warning in caught} == {"<string>"}  # the caller's code, not the library's
    monkeypatch.delitem(pytorchrl._DEPRECATED, "OldPPO")
    with pytest.raises(AttributeError, match="OldPPO"):
        eval(statement)
