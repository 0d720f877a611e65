"""Tests that the list of scheme options is complete and matches the declarations of their owners."""

from __future__ import annotations

from pytorchrl.scheme.architectures import PRESETS
from pytorchrl.scheme.replay.storage_options import STORAGE_OPTIONS
from pytorchrl.scheme.options.settings import declaration_of, known_keywords
from pytorchrl.training.composition import GROUPS, scheme_options


def test_every_keyword_of_a_scheme_is_listed_once():
    names = [option.name for option in scheme_options()]
    assert names[0] == "preset"
    assert len(names) == len(set(names))
    of_storage = {"prioritized", *STORAGE_OPTIONS}
    assert set(names) - {"preset"} == set(known_keywords()) - of_storage


def test_each_option_matches_the_declaration_of_its_owner():
    for option in scheme_options()[1:]:
        declared = declaration_of(option.name)
        assert (option.hint, option.help, option.choices) == (declared.type, declared.help, declared.choices)


def test_a_preset_is_the_name_of_an_architecture_or_none():
    preset = scheme_options()[0]
    assert preset.default is None
    assert set(preset.choices) == {None, *PRESETS}


def test_every_group_has_options_and_every_option_has_a_group():
    options = scheme_options()
    assert {option.group for option in options} == set(GROUPS)
    groups = {option.name: option.group for option in options}
    assert {name: groups[name] for name in ("queue_size", "record", "num_threads", "num_replay_workers")} == {
        "queue_size": "collection", "record": "runtime", "num_threads": "runtime", "num_replay_workers": "replay"}


def test_defaults_are_allowed_values():
    for option in scheme_options():
        assert option.choices is None or option.default in (None, *option.choices), option.name
        assert option.help
