"""Tests of deprecated names: the text and the source line of the warning, and the removal in the announced release."""

from __future__ import annotations

import ast
import sys

import pytest

import pytorchrl
from pytorchrl.support.deprecation import deprecated, renamed, renamed_attribute, renamed_options, warn_deprecated
from pytorchrl.errors import ConfigError
from tests.unit.packaging.source import MODULES, nodes_of, reads_source

RENAMES = (
    renamed("queue_length", "queue_size", since="0.2", removed_in="0.3"),
    renamed("lag", "max_policy_lag", since="0.2", removed_in="0.3"),
)


def test_a_warning_names_releases_replacement_and_the_users_line():
    with pytest.warns(DeprecationWarning, match="scheme.ranks") as caught:
        warn_deprecated("scheme.ranks", use="scheme.settings", since="0.2", removed_in="0.3")
    assert (
        str(caught[0].message) == "scheme.ranks is deprecated since 0.2 and will be removed in 0.3; use scheme.settings"
    )
    assert caught[0].filename == __file__


def test_a_warning_from_deep_inside_the_package_points_to_the_users_line():
    with pytest.warns(DeprecationWarning, match="use max_policy_lag") as caught:
        renamed_options({"lag": 1}, RENAMES)
    assert caught[0].filename == __file__


def test_a_deprecated_function_warns_and_still_works():
    @deprecated(use="area(width, height)", since="0.2", removed_in="0.3")
    def surface(width, height=1):
        """Return the area."""
        return width * height

    with pytest.warns(DeprecationWarning, match=r"surface\(\) is deprecated since 0.2 .* use area\(width, height\)$"):
        assert surface(3, height=2) == 6
    assert (surface.__name__, surface.__doc__) == ("surface", "Return the area.")


def test_renamed_options_are_returned_in_order_under_their_new_names():
    with pytest.warns(DeprecationWarning, match="is deprecated") as caught:
        options = renamed_options({"lag": 2, "seed": 3, "queue_length": 4}, RENAMES)
    assert list(options.items()) == [("max_policy_lag", 2), ("seed", 3), ("queue_size", 4)]
    assert sorted(str(warning.message) for warning in caught) == [
        "lag is deprecated since 0.2 and will be removed in 0.3; use max_policy_lag",
        "queue_length is deprecated since 0.2 and will be removed in 0.3; use queue_size",
    ]


def test_options_with_current_names_do_not_warn():
    assert renamed_options({"queue_size": 4}, RENAMES) == {"queue_size": 4}


def test_an_option_given_under_both_names_is_refused():
    with pytest.raises(
        ConfigError, match="queue_length and queue_size are the same option, got both; leave out queue_length"
    ):
        renamed_options({"queue_size": 4, "queue_length": 4}, RENAMES)


def test_a_renamed_attribute_is_available_under_its_old_name():
    class Settings:
        queue_size = 5

        def __getattr__(self, name):
            return renamed_attribute(self, name, RENAMES)

    with pytest.warns(DeprecationWarning, match="queue_length is deprecated"):
        assert Settings().queue_length == 5
    with pytest.raises(AttributeError, match="'Settings' has no attribute 'size'"):
        Settings().size  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'size'"):
        renamed_attribute(sys.modules[__name__], "size", RENAMES)


def release(text):
    return tuple(int(number) for number in text.split(".")[:2])


@reads_source
def test_deprecated_names_are_removed_in_the_announced_release():
    kept = []
    for path in MODULES:
        for node in nodes_of(path):
            given = {
                keyword.arg: keyword.value.value
                for keyword in getattr(node, "keywords", [])
                if isinstance(keyword.value, ast.Constant) and keyword.arg in ("since", "removed_in")
            }
            if len(given) == 2:
                assert release(given["since"]) < release(given["removed_in"]), (
                    f"{path}:{node.lineno} has no release of warning"
                )
                if release(given["removed_in"]) <= release(pytorchrl.__version__):
                    kept.append(f"{path}:{node.lineno}")
    assert kept == [], "remove these, with their tests"
