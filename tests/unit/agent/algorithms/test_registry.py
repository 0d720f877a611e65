"""Test the registration of algorithms: names, classes, `module:Class`, and imports."""

from __future__ import annotations


import pytest

from pytorchrl import A2C, DQN, PPO, GAEBuffer, OnPolicyActor, PERBuffer, QActor, ReplayBuffer
from pytorchrl.agent.algorithms import OnPolicyAlgorithm, algorithm
from pytorchrl.agent.algorithms import registry as module
from pytorchrl.agent.algorithms.registry import is_reference, registered, registration_of
from pytorchrl.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_names(monkeypatch):
    """Restore the registered names after each test."""
    monkeypatch.setattr(module, "_by_name", dict(module._by_name))


def test_built_in_algorithms_are_registered_in_order():
    assert list(registered()) == [
        "a2c", "appo", "bc", "ddpg", "dqn", "grpo", "impala", "iql", "mpo", "ppo", "pqn", "r2d2", "sac", "td3"]
    dqn = registration_of("dqn")
    assert (dqn.algorithm, dqn.storage, dqn.prioritized_storage, dqn.actor) == (DQN, ReplayBuffer, PERBuffer, QActor)
    assert (dqn.label, dqn.reference) == ("dqn", "dqn")
    assert registration_of(DQN) == registration_of("pytorchrl.agent.algorithms.dqn:DQN") == dqn


def test_an_unnamed_class_inherits_the_parts_of_its_nearest_base():
    class Own(PPO):
        pass

    found = registration_of(Own)
    assert (found.algorithm, found.name, found.storage, found.actor) == (Own, "ppo", GAEBuffer, OnPolicyActor)
    assert (found.label, found.reference) == ("Own", f"{__name__}:{Own.__qualname__}")


def test_a_named_class_has_its_own_parts():
    class Networks(OnPolicyActor):
        pass

    @algorithm("own", storage=GAEBuffer, actor=Networks)
    class Own(A2C):
        pass

    found = registration_of("own")
    assert found == registration_of(Own)
    assert (found.algorithm, found.actor, found.label) == (Own, Networks, "own")
    assert found.reference == f"{__name__}:{Own.__qualname__}"  # a name alone would not identify the module to import
    assert "own" in registered()


def test_rerunning_a_cell_replaces_its_class_but_other_classes_are_refused():
    def cell():
        @algorithm("own", storage=GAEBuffer)
        class Own(A2C):
            pass
        return Own

    first, second = cell(), cell()
    assert registration_of("own").algorithm is second is not first
    with pytest.raises(ConfigError, match=r"'own'.*Other.*Own already has this name; choose a different one"):
        @algorithm("own", storage=GAEBuffer)
        class Other(A2C):
            pass


@pytest.mark.parametrize(("name", "cls", "message"), [
    ("own algorithm", A2C, "the name of an algorithm must match .*, got 'own algorithm'"),
    ("module:Own", A2C, "must match"), (3, A2C, "must match"),
    ("own", GAEBuffer, "classes that derive from Algorithm, got .*GAEBuffer"),
    ("own", "ppo", "derive from Algorithm, got 'ppo'"),
])
def test_wrong_registrations_are_refused(name, cls, message):
    with pytest.raises(ConfigError, match=message):
        algorithm(name, storage=GAEBuffer)(cls)


@pytest.mark.parametrize(("given", "message"), [
    ("pppo", r"must be one of \['a2c', .*'pppo'; did you mean 'ppo'\?"), (3, "a class or 'module:Class', got 3"),
    (GAEBuffer, "a class that derives from Algorithm, got"),
    (OnPolicyAlgorithm, "OnPolicyAlgorithm is abstract"),
    ("no_such_module:Own",
     r"cannot be imported \(No module named 'no_such_module'\); run from the folder that contains the module"),
    ("json:JSONDecoder", "a class that derives from Algorithm, got .*JSONDecoder"),
    ("pytorchrl:Own", "module 'pytorchrl' has no class or function 'Own'; it defines: none"),
    ("pytorchrl.agent.algorithms.ddpg:TD4", "no class or function 'TD4'; it defines: .*TD3"),
])
def test_unknown_algorithms_are_refused_with_the_known_names(given, message):
    with pytest.raises(ConfigError, match=message):
        registration_of(given)


def test_an_options_class_that_python_ignores_is_refused():
    class Own(A2C):
        class Options(A2C.Options):
            coef: float = 1.0

    with pytest.raises(ConfigError, match="declares coef but is not a dataclass"):
        registration_of(Own)


def test_an_error_in_importing_the_module_is_reported(tmp_path, monkeypatch):
    (tmp_path / "broken_algorithm.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="'broken_algorithm:Own' raised ZeroDivisionError: division by zero"):
        registration_of("broken_algorithm:Own")


def test_nested_classes_are_named_with_dots():
    assert is_reference("a.b:C.D")
    assert not any(map(is_reference, ("a:", ":C", "ALE/Pong-v5", "a:C-v0", "a:C:D", "a b:C", "a..b:C", "1:C")))
    assert registration_of(f"{__name__}:Nested.Own").algorithm is Nested.Own


class Nested:
    """A class that contains an algorithm."""

    class Own(A2C):
        """A2C as a nested class."""
