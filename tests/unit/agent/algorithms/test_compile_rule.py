"""Test the rule that decides whether to compile; tests/unit/scheme/test_choices.py tests it for whole schemes."""

from __future__ import annotations

import pytest

from pytorchrl import A2C, DQN, PPO, SAC
from pytorchrl.agent.algorithms import compile_rule
from pytorchrl.agent.algorithms.compile_rule import num_updates
from pytorchrl.agent.algorithms.precision import BatchShape

HAS_COMPILER = compile_rule.has_compiler  # `never_compile` in tests/conftest.py replaces it


@pytest.mark.parametrize(("algorithm", "shape", "target_steps", "updates"), [
    (PPO.create_factory(num_epochs=10, num_mini_batch=4), BatchShape(256), 100_000, 3906),
    (PPO.create_factory(num_epochs=4, num_mini_batch=4), BatchShape(8, 16), 1024, 32),
    (A2C.create_factory(), BatchShape(80), 800, 10),
    (DQN.create_factory(start_steps=500, update_every=4, num_updates=2), BatchShape(64), 40_000, 19_750),
    (SAC.create_factory(start_steps=1000, update_every=1, num_updates=1), BatchShape(128), 20_000, 19_000),
    (SAC.create_factory(start_steps=1000), BatchShape(128), 500, 0),
])
def test_the_number_of_updates_follows_from_the_options(algorithm, shape, target_steps, updates):
    assert num_updates(algorithm, shape, target_steps) == updates


def test_a_compiler_needs_linux_its_program_and_the_headers_of_python(monkeypatch, tmp_path):
    headers, programs = tmp_path / "include", tmp_path / "bin"
    for folder in (headers, programs):
        folder.mkdir()
    monkeypatch.setattr(compile_rule.sysconfig, "get_path", lambda _: str(headers))
    monkeypatch.setattr(compile_rule.sys, "platform", "linux")
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("CXX", raising=False)
    assert not HAS_COMPILER()
    (headers / "Python.h").touch()
    assert not HAS_COMPILER()
    (programs / "g++").touch(mode=0o755)
    assert HAS_COMPILER()
    monkeypatch.setenv("CXX", "clang++")
    assert not HAS_COMPILER()
    (programs / "clang++").touch(mode=0o755)
    assert HAS_COMPILER()
    monkeypatch.setattr(compile_rule.sys, "platform", "darwin")
    assert not HAS_COMPILER()
