"""Tests of every algorithm with every storage, actor and action space.

Each combination either trains, or raises an error at construction that lists valid combinations.
"""

from __future__ import annotations

import functools
import itertools
import re

import gymnasium as gym
import numpy as np
import pytest

from pytorchrl import (
    A2C, APPO, DDPG, DQN, IMPALA, MPO, PPO, PQN, R2D2, SAC, TD3, GAEBuffer, MultiAgentVecEnv, OffPolicyActor,
    OnPolicyActor,
    PERBuffer, QActor,
    ReplayBuffer, RolloutSequenceBuffer, Scheme, SequenceBuffer, VecEnv, VTraceBuffer, multi_agent,
)
from pytorchrl.agent.algorithms import Algorithm
from pytorchrl.agent.data import DataKind
from pytorchrl.agent.storages import Storage, UniformSequenceBuffer
from pytorchrl.envs.testing import CountingEnv, MatchingGame
from pytorchrl.errors import ConfigError
from tests.unit.scheme.conftest import chessboard

ON_POLICY, REPLAY = {"num_epochs": 1, "num_mini_batch": 1}, {"start_steps": 0, "mini_batch_size": 4, "update_every": 4,
                                                             "num_updates": 1}
ALGORITHMS = {
    **{cls.__name__: cls.create_factory(**ON_POLICY) for cls in (PPO, A2C, IMPALA, APPO, PQN)},
    **{cls.__name__: cls.create_factory(**REPLAY) for cls in (DQN, R2D2, DDPG, TD3, SAC, MPO)}}
STORAGES = {
    **{cls.__name__: cls.create_factory(4) for cls in (GAEBuffer, VTraceBuffer)},
    **{cls.__name__: cls.create_factory(64, rollout_size=4) for cls in (ReplayBuffer, PERBuffer)},
    "RolloutSequenceBuffer": RolloutSequenceBuffer.create_factory(64, rollout_size=4, n_step=1),
    "SequenceBuffer": SequenceBuffer.create_factory(128, rollout_size=4, length=4, burn_in=2, period=4, n_step=1),
    "UniformSequenceBuffer": UniformSequenceBuffer.create_factory(128, rollout_size=4, length=4, burn_in=2, period=4)}
MEMORY = {"recurrent_net": "gru", "recurrent_size": 3}
ACTORS = {
    "OnPolicyActor": (OnPolicyActor, {}),
    "OnPolicyActor with memory": (OnPolicyActor, MEMORY),
    "QActor": (QActor, {}),
    "QActor with memory": (QActor, MEMORY),
    "OffPolicyActor": (OffPolicyActor, {}),
    "OffPolicyActor, deterministic": (OffPolicyActor, {"policy": "deterministic"}),
    "OffPolicyActor, gaussian": (OffPolicyActor, {"policy": "gaussian"}),
    "OffPolicyActor with memory": (OffPolicyActor, MEMORY),
    "OffPolicyActor, deterministic with memory": (OffPolicyActor, {"policy": "deterministic", **MEMORY})}
SPACES = {
    "Discrete": gym.spaces.Discrete(3),
    "Discrete from 2": gym.spaces.Discrete(3, start=2),
    "MultiDiscrete": gym.spaces.MultiDiscrete([2, 3]),
    "MultiBinary": gym.spaces.MultiBinary(3),
    "Box": gym.spaces.Box(-2.0, 3.0, (2,), np.float32),
    "Box of float64": gym.spaces.Box(-2.0, 3.0, (1, 2), np.float64),
    "Box of shape ()": gym.spaces.Box(-2.0, 3.0, (), np.float32),
    "Box of whole numbers": gym.spaces.Box(-2, 3, (2,), np.int64),
    "Box without bounds": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "Tuple": gym.spaces.Tuple((gym.spaces.Discrete(2), gym.spaces.Discrete(2))),
    "Dict": gym.spaces.Dict({"a": gym.spaces.Discrete(2)}),
    "Text": gym.spaces.Text(3)}
BOXES = ("Box", "Box of float64", "Box of shape ()")
DISCRETE = ("Discrete", "Discrete from 2")
KEPT = ("ReplayBuffer", "PERBuffer")
SEQUENCES = ("RolloutSequenceBuffer", "SequenceBuffer", "UniformSequenceBuffer")
# The expected combinations, deliberately not derived from the declarations of the classes.
TRAINING = {
    *itertools.product(("PPO", "A2C"), ("GAEBuffer",), ("OnPolicyActor", "OnPolicyActor with memory"),
                       (*DISCRETE, "MultiDiscrete", "MultiBinary", *BOXES, "Box without bounds")),
    *itertools.product(("IMPALA", "APPO"), ("VTraceBuffer",), ("OnPolicyActor", "OnPolicyActor with memory"),
                       (*DISCRETE, "MultiDiscrete", "MultiBinary", *BOXES, "Box without bounds")),
    *itertools.product(("DQN",), KEPT, ("QActor",), DISCRETE),
    *itertools.product(("PQN",), ("GAEBuffer",), ("QActor",), DISCRETE),
    *itertools.product(("R2D2",), SEQUENCES, ("QActor with memory",), DISCRETE),
    *itertools.product(("DDPG", "TD3"), KEPT, ("OffPolicyActor, deterministic",), BOXES),
    *itertools.product(("DDPG", "TD3"), SEQUENCES, ("OffPolicyActor, deterministic with memory",), BOXES),
    *itertools.product(("SAC", "MPO"), KEPT, ("OffPolicyActor",), (*DISCRETE, *BOXES)),
    *itertools.product(("MPO",), KEPT, ("OffPolicyActor, gaussian",), BOXES),
    *itertools.product(("SAC",), SEQUENCES, ("OffPolicyActor with memory",), (*DISCRETE, *BOXES))}
pytestmark = pytest.mark.xdist_group("fit")  # the tests share the results that `outcome` has kept
UNUSABLE = ("Box of whole numbers", "Tuple", "Dict", "Text")
"""Action spaces that no actor accepts."""


class TinyEnv(gym.Env):
    """An environment with the given action space, and episodes of five steps."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._num_steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        # `VecEnv` passes an action of shape () as a scalar. Convert it, because Gymnasium's Box would warn otherwise.
        assert self.action_space.contains(np.asarray(action) if self.action_space.shape == () else action)
        self._num_steps += 1
        return np.full(2, self._num_steps / 5, np.float32), 1.0, self._num_steps == 5, False, {}


@functools.cache
def envs_of(space):
    return VecEnv.create_factory(TinyEnv, {"action_space": SPACES[space]}, 2)


@functools.cache
def actor_of(actor, space):
    cls, options = ACTORS[actor]
    return cls.create_factory(envs_of(space).observation_space, envs_of(space).action_space, hidden_sizes=(4,),
                              **options)


@functools.cache
def outcome(algorithm, storage, actor, space):
    """Return the error that building the scheme raised, or None if the scheme was built and made three updates."""
    try:
        scheme = Scheme(ALGORITHMS[algorithm], actor_of(actor, space), STORAGES[storage], envs_of(space), seed=1)
    except ConfigError as error:
        return error
    for _ in range(50):
        scheme.step()
        if scheme.version >= 3:
            break
    scheme.stop()
    assert scheme.version >= 3
    return None


def listed(text, pattern):
    """Return the names that an error message lists after a pattern."""
    found = re.search(pattern + r": ([^;\n]+)", text)
    return [] if found is None else re.split(r", (?=[A-Z])", found[1])


def actor_called(recipe):
    if "with recurrent_net" in recipe and "None" not in recipe:
        return "QActor with memory"
    return "OffPolicyActor, deterministic" if "deterministic" in recipe else recipe.split()[0]


def suggestions(combination, text):
    """Yield the combinations with the suggested storages and actors, and then those with the suggested algorithms."""
    algorithm, storage, actor, space = combination
    storages = [name for name in listed(text, f"storages for {algorithm}") if name in STORAGES]
    actors = [actor_called(name) for name in listed(text, f"actors for {algorithm}") if name.split()[0] in ACTORS]
    needed = re.search(rf"{algorithm} needs (\w+ with \w+=[^,]+), got", text)
    if needed:  # the other options stay as they are
        memory = " with memory" if "with memory" in actor and needed[1].startswith("OffPolicyActor with policy") else ""
        actors = [actor_called(needed[1]) + memory]
    yield [(algorithm, new_storage, new_actor,
            space) for new_storage in storages or [storage] for new_actor in actors or [actor]
           if storages or actors]
    yield [(name, storage, actor, space) for name in listed(text,
                                                            r"algorithms for this \w+ and \w+") if name in ALGORITHMS]


@pytest.mark.parametrize(("algorithm", "space"), chessboard(ALGORITHMS, SPACES))
def test_parts_train_or_are_refused_with_alternatives(algorithm, space):
    refused = trained = 0
    for storage, actor in itertools.product(STORAGES, ACTORS):
        combination = (algorithm, storage, actor, space)
        error = outcome(*combination)
        assert (error is None) is (combination in TRAINING), (combination, error)
        trained, refused = trained + (error is None), refused + (error is not None)
        if error is None or space in UNUSABLE:
            continue
        found = [each for each in suggestions(combination, str(error)) if each]
        assert found or re.search(r"(algorithms|actors) for such \w+ actions: \w|use QActor and DQN|leave it out$",
                                  str(error)), error
        for each in itertools.chain(*found):
            assert outcome(*each) is None, (combination, error, each)
    assert trained + refused == len(STORAGES) * len(ACTORS) == 63
    assert trained == sum(1 for name, *_, of in TRAINING if (name, of) == (algorithm, space))


def test_every_combination_is_tested():
    table = set(itertools.product(ALGORITHMS, STORAGES, ACTORS, SPACES))
    assert len(table) == 8316
    assert len(TRAINING & table) == len(TRAINING) == 147


# User-defined classes


def parts(**changed):
    envs = VecEnv.create_factory(CountingEnv)
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space)
    return {"algo_factory": PPO.create_factory(), "actor_factory": actor,
            "storage_factory": GAEBuffer.create_factory(8),
            "train_envs_factory": envs, **changed}


class OwnPPO(PPO):
    """A subclass that inherits all declarations of PPO."""


class OwnBuffer(GAEBuffer):
    """A subclass that inherits all declarations of GAEBuffer."""


class OwnActor(OnPolicyActor):
    """A subclass that inherits all declarations of OnPolicyActor."""


def test_a_subclass_inherits_compatibility_and_is_listed():
    envs = VecEnv.create_factory(CountingEnv)
    own = OwnActor.create_factory(envs.observation_space, envs.action_space)
    for algorithm, actor, storage in itertools.product((PPO, OwnPPO), (parts()["actor_factory"], own),
                                                       (GAEBuffer, OwnBuffer)):
        Scheme(algorithm.create_factory(), actor, storage.create_factory(8), envs)
    with pytest.raises(ConfigError, match=r"storages for OwnPPO: .*\bOwnBuffer\b.*; algorithms for this OnPolicyActor "
                                          r"and V.*: .*\bAPPO\b.*\bIMPALA\b"):
        Scheme(**parts(algo_factory=OwnPPO.create_factory(), storage_factory=VTraceBuffer.create_factory(8)))
    with pytest.raises(ConfigError,
                       match=r"algorithms for this OnPolicyActor and OwnBuffer: .*\bA2C\b.*\bOwnPPO\b.*\bPPO\b"):
        Scheme(**parts(algo_factory=IMPALA.create_factory(), storage_factory=OwnBuffer.create_factory(8)))
    with pytest.raises(ConfigError, match=r"OwnPPO cannot train QActor; actors for OwnPPO: .*\bOwnActor\b"):
        Scheme(**parts(algo_factory=OwnPPO.create_factory(),
                       actor_factory=QActor.create_factory(envs.observation_space, envs.action_space)))


class Undeclared(Algorithm):
    """An algorithm that declares neither its data nor its actors."""

    acting_step = finish_rollout = batches = compute_gradients = None


class OnlyKind(Undeclared):
    """An algorithm that declares what it learns from, but not which actors it trains."""

    learns_from = DataKind.ROLLOUTS


class UndeclaredStorage(Storage):
    """A storage that does not declare the kind of data it provides."""

    Options = GAEBuffer.Options
    create_factory = classmethod(GAEBuffer.create_factory.__func__)
    insert_data_slice = generate_batches = reset = counters = None


@pytest.mark.parametrize(("changed", "text"), [
    ({"algo_factory": Undeclared.create_factory()},
     r"Undeclared must declare learns_from, .* got None; .* DataKind.ROLLOUTS \(rollouts with advantages\), "
     r"DataKind.OLDER_ROLLOUTS"),
    ({"algo_factory": OnlyKind.create_factory()},
     "OnlyKind must declare actor_class, the class of actor that it trains, got None"),
    ({"storage_factory": UndeclaredStorage.create_factory(8)},
     r"UndeclaredStorage must declare provides, .* got None; .* DataKind.ROLLOUTS"),
])
def test_a_class_without_a_declaration_is_refused(changed, text):
    with pytest.raises(ConfigError, match=text):
        Scheme(**parts(**changed))


def test_the_scheme_checks_the_parts_of_each_policy():
    """Check that the scheme rejects an algorithm that was replaced after `multi_agent` checked the combination."""
    envs = MultiAgentVecEnv.create_factory(MatchingGame, policy_of=lambda agent: agent)
    algorithms, actors, storages = multi_agent(envs, PPO.create_factory(), OnPolicyActor.create_factory,
                                               GAEBuffer.create_factory(8))
    Scheme(algorithms, actors, storages, envs)
    wrong = type(algorithms)(algorithms.cls, type(algorithms.options)(
        policies={**algorithms.options.policies, "agent_1": IMPALA.create_factory(num_epochs=4, num_mini_batch=4)},
        agents=algorithms.options.agents, trainable=algorithms.options.trainable))
    with pytest.raises(ConfigError, match=r"policy 'agent_1': IMPALA learns from .*, but GAEBuffer provides .*; "
                                          r"storages for IMPALA: .*VTraceBuffer"):
        Scheme(wrong, actors, storages, envs)


# Options that contradict options of another part


def scheme_of(algorithm, actor, storage, envs, **settings):
    factory = algorithm.actor_class.create_factory(envs.observation_space, envs.action_space, **actor)
    return Scheme(algorithm.create_factory(**settings.pop("algo", {})), factory, storage, envs, **settings)


@pytest.mark.parametrize("settings", [{}, {"num_grad_workers": 2, "num_col_workers": 2}], ids=["one process", "on Ray"])
@pytest.mark.parametrize(("algorithm", "algo", "actor", "storage", "text"), [
    (PPO, {"compile": True, "num_mini_batch": 1}, {"recurrent_net": "gru"}, GAEBuffer.create_factory(8),
     "compile=True with an actor with memory is for gradients on a GPU"),
    (PPO, {}, {}, GAEBuffer.create_factory(8, sequence_length=4), "sequence_length=4 needs an actor with memory"),
    (PPO, {"num_mini_batch": 3}, {"recurrent_net": "lstm"}, GAEBuffer.create_factory(8),
     "2 environments yield 2 sequences per rollout, which is fewer than num_mini_batch=3"),
    (IMPALA, {"mini_batch_size": 3}, {"recurrent_net": "gru"}, VTraceBuffer.create_factory(8, sequence_length=4),
     "mini_batch_size=3 is less than a sequence, which has 4 steps"),
    (DQN, {}, {}, ReplayBuffer.create_factory(20, rollout_size=11),
     "size 20 is less than a rollout of 2 environments x rollout_size 11"),
], ids=["compile", "sequence_length", "num_mini_batch", "mini_batch_size", "size"])
def test_contradictions_between_parts_are_refused_when_a_scheme_is_built(algorithm, algo, actor, storage, text,
                                                                         settings, monkeypatch):
    monkeypatch.setattr("pytorchrl.scheme.scheme.make_runtime", lambda *args,
                        **kwargs: pytest.fail("a runtime was started"))
    envs = VecEnv.create_factory(CountingEnv, vec_env_size=2)
    with pytest.raises(ConfigError, match=text):
        scheme_of(algorithm, actor, storage, envs, algo=algo, **settings)


def test_a_target_entropy_from_the_number_of_actions_is_refused_over_a_box():
    envs = VecEnv.create_factory("Pendulum-v1")
    with pytest.raises(ConfigError, match=r"target_entropy_scale=0.5 is for Discrete actions, got Box"):
        scheme_of(SAC, {}, ReplayBuffer.create_factory(100), envs, algo={"target_entropy_scale": 0.5})
    with pytest.raises(ConfigError, match=r"target_entropy_scale needs target_entropy=None, got -1\.0"):
        SAC.create_factory(target_entropy=-1.0, target_entropy_scale=0.5)


def test_all_contradictions_are_reported_at_once():
    envs = VecEnv.create_factory(CountingEnv, vec_env_size=2)
    with pytest.raises(ConfigError, match=r"mini_batch_size=3 is less than a sequence.*\n- compile=True with an actor "
                                          r"with memory is for gradients on a GPU"):
        scheme_of(PPO, {"recurrent_net": "gru"}, GAEBuffer.create_factory(8), envs,
                  algo={"compile": True, "mini_batch_size": 3})


class OwnMemory(OnPolicyActor):
    """An actor with custom networks; its options do not say whether it has memory."""

    def build_networks(self, generator):
        super().build_networks(generator)


def test_memory_of_custom_networks_is_checked_after_they_are_built():
    envs = VecEnv.create_factory(CountingEnv, vec_env_size=2)
    own = OwnMemory.create_factory(envs.observation_space, envs.action_space)
    scheme = Scheme(PPO.create_factory(), own, GAEBuffer.create_factory(8, sequence_length=4), envs)
    with pytest.raises(ConfigError, match="sequence_length=4 needs an actor with memory"):
        scheme.start()
