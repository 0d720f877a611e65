"""Every public factory can be pickled, compares by value, and prints the call that creates an equal factory."""

from __future__ import annotations

import inspect
import pickle

import pytest
from gymnasium.spaces import Box, Discrete
from numpy import float32

import pytorchrl as prl
from pytorchrl.agent.actors.base import Actor
from pytorchrl.agent.algorithms.base import Algorithm
from pytorchrl.agent.factories import ActorFactory, AlgorithmFactory, StorageFactory
from pytorchrl.agent.options import Factory, Part
from pytorchrl.agent.storages.base import Storage
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.errors import ConfigError
from pytorchrl.scheme import CWorkerSet, GWorkerSet, RWorkerSet

SPACE, ACTIONS, CONTINUOUS = Box(0.0, 1.0, (4,)), Discrete(2), Box(-1.0, 1.0, (2,))
ENVS = prl.VecEnv.create_factory("CartPole-v1", vec_env_size=2)
ON_POLICY = (prl.PPO.create_factory(lr=prl.linear(0.001, 0.0), clip_param=0.3),
             prl.OnPolicyActor.create_factory(SPACE, ACTIONS, hidden_sizes=(8,)), prl.GAEBuffer.create_factory(size=64))
OFF_POLICY = (prl.DQN.create_factory(mini_batch_size=8), prl.QActor.create_factory(SPACE, ACTIONS, dueling=True),
              prl.ReplayBuffer.create_factory(size=64))
SHARDS = RWorkerSet.create_factory(2, *OFF_POLICY, routing="random", replay_worker_resources={"num_cpus": 1})
COLLECTORS = CWorkerSet.create_factory((2, 3), *ON_POLICY, ENVS, compress_data_to_send="lz4")
FACTORIES = {
    "VecEnv": ENVS, "GRPO": prl.GRPO.create_factory(correction="tis"),
    "DecoderActor": prl.DecoderActor.create_factory(ACTIONS, ACTIONS, width=8),
    "GroupBuffer": prl.GroupBuffer.create_factory(64, group_size=4),
    **{owner.__name__: owner.create_factory() for owner in (
        prl.A2C, prl.APPO, prl.DDPG, prl.IMPALA, prl.MPO, prl.PQN, prl.R2D2, prl.SAC, prl.TD3)},
    "PPO": ON_POLICY[0], "OnPolicyActor": ON_POLICY[1], "GAEBuffer": ON_POLICY[2],
    "DQN": OFF_POLICY[0], "QActor": OFF_POLICY[1], "ReplayBuffer": OFF_POLICY[2],
    "OffPolicyActor": prl.OffPolicyActor.create_factory(SPACE, CONTINUOUS),
    **{owner.__name__: owner.create_factory(size=64) for owner in (
        prl.PERBuffer, prl.RolloutSequenceBuffer, prl.SequenceBuffer, prl.VTraceBuffer, prl.VanillaOnPolicyBuffer)},
    "CWorkerSet": COLLECTORS, "RWorkerSet": SHARDS,
    "GWorkerSet": GWorkerSet.create_factory(2, COLLECTORS, 0.5, "Parallel", grad_device="cpu"),
    "GWorkerSet with default resources": GWorkerSet.create_factory(1, CWorkerSet.create_factory(1, *ON_POLICY, ENVS)),
    "GWorkerSet with shards": GWorkerSet.create_factory(
        1, CWorkerSet.create_factory(1, *OFF_POLICY, ENVS, initial_priority="worker"),
        col_communication="asynchronous", replay_workers_factory=SHARDS, queue_size=3, prefetch=2),
}
NAMES = {**vars(prl), **{name: getattr(prl, name) for name in prl.__all__}, "Box": Box, "Discrete": Discrete,
         "float32": float32, "CWorkerSet": CWorkerSet, "GWorkerSet": GWorkerSet, "RWorkerSet": RWorkerSet}


def test_every_public_part_has_a_case():
    parts = {name for name in prl.__all__ if isinstance(owner := getattr(prl, name), type) and issubclass(owner, Part)}
    assert parts - set(FACTORIES) == {"MultiAgentVecEnv", "TokenEnv"}, "only code, such as a task, cannot be printed"


@pytest.mark.parametrize("name", FACTORIES)
def test_factory_can_be_pickled_compared_and_printed(name):
    factory = FACTORIES[name]
    copies = pickle.loads(pickle.dumps(factory)), eval(repr(factory), NAMES)
    assert copies == (factory, factory)
    assert repr(copies[0]) == repr(factory)
    assert repr(factory).startswith(f"{name.split()[0]}.create_factory(")
    if isinstance(factory, Factory) and "size" in factory.options.declarations():
        assert factory != type(factory)(factory.cls, factory.options.replaced(size=65))


INTERFACES = {Algorithm: AlgorithmFactory, Actor: ActorFactory, Storage: StorageFactory}


@pytest.mark.parametrize("factory", [factory for factory in FACTORIES.values() if type(factory) is Factory]
                         + [factory for factory in synthetic_agent() if type(factory) is Factory], ids=repr)
def test_parts_take_the_arguments_that_the_interface_of_their_factory_states(factory):
    interface = next((found for base, found in INTERFACES.items() if issubclass(factory.cls, base)), ActorFactory)
    _, *stated = inspect.signature(interface.__call__).parameters
    assert inspect.signature(factory.cls).bind(factory.options, **dict.fromkeys(stated))


def test_a_factory_with_other_options_checks_them():
    factory = FACTORIES["PPO"]
    changed = factory.with_options(clip_param=0.1)
    assert type(changed) is type(factory)
    assert changed.options == factory.options.replaced(clip_param=0.1) != factory.options
    assert ENVS.with_options(vec_env_size=3).num_envs == 3
    with pytest.raises(ConfigError, match="clip_param"):
        factory.with_options(clip_param=-1.0)


def test_printed_call_of_worker_sets_has_only_options_that_differ_from_their_defaults():
    parts = ", ".join(map(repr, OFF_POLICY))
    assert repr(SHARDS) == (
        f"RWorkerSet.create_factory(2, {parts}, replay_worker_resources={{'num_cpus': 1}}, routing='random')")
    assert repr(FACTORIES["GWorkerSet"]) == (
        f"GWorkerSet.create_factory(2, {COLLECTORS}, grad_device='cpu', col_execution='Parallel', "
        "col_fraction_workers=0.5)")
