"""Check that each option is declared at one level, and that the three forms of a scheme's settings are equivalent."""

from __future__ import annotations

import inspect
import itertools
import typing

import pytest
import torch

from pytorchrl import APPO, ASYNC, CENTRAL, DQN, IMPALA, PARALLEL, R2D2, SYNC, PERBuffer, QActor, Scheme, SequenceBuffer
from pytorchrl import OnPolicyActor, PPO, VecEnv, VTraceBuffer
from pytorchrl.agent.options import Options
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError
from pytorchrl.runtime import SimulatedRuntime
from pytorchrl.scheme import (
    AsynchronousCollection,
    AsynchronousGradients,
    CWorkerSet,
    DecentralizedGradients,
    GWorkerSet,
    Ray,
    ReplayCollection,
    RWorkerSet,
    Simulated,
    SynchronousCollection,
    SynchronousGradients,
    Threads,
)
from pytorchrl.scheme.architectures import PRESETS
from pytorchrl.scheme.options.base import own_names
from pytorchrl.scheme.options.collection import COLLECTION_KINDS
from pytorchrl.scheme.options.keywords import SchemeKeywords
from pytorchrl.scheme.options.settings import (
    LEVELS,
    STORAGE_KEYWORDS,
    declaration_of,
    default_of_keyword,
    known_keywords,
    names_of_level,
)
from pytorchrl.scheme.options.updates import GRADIENT_KINDS
from tests.conftest import pairwise

OPTIONS = [name for level in LEVELS for name in names_of_level(level)]
KINDS = (*COLLECTION_KINDS, *GRADIENT_KINDS, Ray, Threads, Simulated)


# Each option is declared once


def test_each_option_is_declared_in_one_class():
    declared = [(name, owner) for owners in LEVELS.values() for owner in owners for name in own_names(owner)]
    assert len(declared) == len({name for name, _ in declared}) > 60


def test_each_option_has_a_default_and_a_help_text():
    for name in OPTIONS:
        declaration = declaration_of(name)
        assert not declaration.is_required, name
        assert declaration.help[0].isupper() or declaration.help[0] == '"', name
        assert declaration.help.endswith("."), name


def test_a_kind_itself_declares_no_options():
    for kind in KINDS:
        assert own_names(kind) == [], kind
        for name, declaration in kind.declarations().items():
            assert declaration.field.metadata == declaration_of(name).field.metadata, (kind, name)


def test_the_keywords_are_the_options():
    assert set(known_keywords()) == {*OPTIONS, *STORAGE_KEYWORDS}
    assert set(typing.get_type_hints(SchemeKeywords, include_extras=False)) == set(known_keywords()) - {"runtime"}


def test_the_type_of_a_keyword_equals_that_of_the_option():
    """Check that a keyword accepts all types of its option.

    The keyword may also accept strings, such as names of enum members.
    """
    def members(hint):
        return set(typing.get_args(hint)) if isinstance(hint, type(int | str)) else {hint}
    for name in sorted(set(OPTIONS) - {"runtime"}):
        of_keyword = typing.get_type_hints(SchemeKeywords)[name]
        of_option = declaration_of(name).type
        if name == "num_replay_workers":
            of_option = of_option | None
        assert members(of_option) <= members(of_keyword), name
        assert members(of_keyword) - members(of_option) <= {str}, name


def test_the_constructor_is_short():
    parameters = inspect.signature(Scheme.__init__).parameters
    assert len([name for name in parameters if name not in ("self", "settings")]) <= 14


def test_a_default_given_by_name_changes_nothing():
    agent = synthetic_agent(4)
    for name in sorted(set(OPTIONS)):
        scheme = Scheme(*agent, **{"seed": 1, name: default_of_keyword(name)})
        assert scheme.settings | {"seed": 1} == Scheme(*agent, seed=1).settings, name


def test_stored_settings_recreate_the_scheme():
    """Check that the settings stored in run.json recreate the same scheme."""
    for settings in ({}, {"num_col_workers": 2, "col_communication": ASYNC, "max_policy_lag": 3},
                     {"num_grad_workers": 2}):
        first = Scheme(*synthetic_agent(4), **{"seed": 1, **settings})
        assert Scheme(*synthetic_agent(4), **first.settings).settings == first.settings


# Three forms of the same settings


def kinds_of(scheme):
    return {"collection": scheme.nested.collection, "gradients": scheme.nested.gradients,
            "runtime": scheme.nested.runtime,
            "supervision": scheme.nested.supervision}


def by_factories(agent, flat):
    """Build a scheme with the settings `flat` from nested factories."""
    flat = dict(flat)
    given = {name: value for name, value in flat.items() if name not in ("num_col_workers", "num_grad_workers",
                                                                         "num_replay_workers")}

    def take(kind):
        return {name: given.pop(name) for name in list(given) if name in kind.declarations()}
    num_col, num_grad = flat.get("num_col_workers", 1), flat.get("num_grad_workers", 1)
    shards = None
    if "num_replay_workers" in flat:
        shards = RWorkerSet.create_factory(flat["num_replay_workers"], *agent[:3], **take(RWorkerSet.Options))
    collection = CWorkerSet.create_factory(num_col, *agent, **take(CWorkerSet.ReplayOptions))
    communication = given.pop("col_communication", SYNC)
    of_set = {**take(SynchronousCollection), **take(AsynchronousCollection), **take(ReplayCollection),
              **take(GWorkerSet.Options)}
    gradients = GWorkerSet.create_factory(
        num_grad, collection, col_execution=PARALLEL if num_col > 1 else CENTRAL, col_communication=communication,
        replay_workers_factory=shards, **of_set)
    return Scheme.from_factory(gradients, grad_execution=PARALLEL if num_grad > 1 else CENTRAL, **given)


def trained(scheme, updates=8):
    """Train a scheme until `updates` updates are made; return its final parameters, ledger and settings."""
    while scheme.version < updates:
        scheme.step()
    state = scheme.acting_state()
    return state, scheme.stop(), scheme.settings


PATTERNS = [
    pytest.param({"num_col_workers": col, "col_communication": col_async, "num_grad_workers": grad,
                  "grad_communication": grad_async}, id=f"{col}-{col_async}-{grad}-{grad_async}")
    for col, col_async, grad, grad_async in itertools.product((1, 3), (SYNC, ASYNC), (1, 2), (SYNC, ASYNC))]
ARCHITECTURES = {
    "a3c": {"updates_per_step": 1}, "ddppo": {}, "microbatch": {"train_batch_size": 64, "microbatch_size": 16},
    "impala": {"train_batch_size": 32}, "appo": {"train_batch_size": 32},
    "apex": {"train_batch_size": 8, "learning_starts": 16},
    "r2d2": {"train_batch_size": 4, "learning_starts": 16}, "rapid": {}}


def agent_of(name):
    envs = VecEnv.create_factory(CountingEnv, vec_env_size=2)
    spaces = (envs.observation_space, envs.action_space)
    if name in ("impala", "appo", "rapid"):
        algorithm = (IMPALA if name == "impala" else APPO).create_factory()
        return algorithm, OnPolicyActor.create_factory(*spaces, hidden_sizes=(8,)), VTraceBuffer.create_factory(8), envs
    if name == "apex":
        return (DQN.create_factory(epsilon_per_worker=True), QActor.create_factory(*spaces, hidden_sizes=(8,)),
                PERBuffer.create_factory(200), envs)
    if name == "r2d2":
        actor = QActor.create_factory(*spaces, hidden_sizes=(8,), recurrent_net="gru", recurrent_size=8)
        return (R2D2.create_factory(), actor,
                SequenceBuffer.create_factory(400, length=4, period=2), envs)
    from pytorchrl import GAEBuffer
    algorithm = PPO.create_factory(num_epochs=1, num_mini_batch=1)
    return algorithm, OnPolicyActor.create_factory(*spaces, hidden_sizes=(8,)), GAEBuffer.create_factory(8), envs


def assert_same(first, *others):
    state, ledger, settings = first
    for other_state, other_ledger, other_settings in others:
        assert other_settings == settings
        assert other_ledger == ledger
        assert all(torch.equal(value, other_state[key]) for key, value in state.items())


@pytest.mark.parametrize("shape", pairwise(PATTERNS))
def test_three_forms_of_a_pattern_train_to_the_same_parameters(shape):
    flat = {**shape, "runtime": "simulated", "seed": 3}
    agent = synthetic_agent(4)
    scheme = Scheme(*agent, **flat)
    assert_same(trained(scheme), trained(Scheme(*agent, **kinds_of(scheme), seed=3)),
                trained(by_factories(agent, flat)))


@pytest.mark.parametrize("name", PRESETS)
def test_three_forms_of_an_architecture_train_to_the_same_parameters(name):
    agent = agent_of(name)
    given = {**ARCHITECTURES[name], "runtime": "simulated", "seed": 3}
    scheme = getattr(Scheme, name)(*agent, **given)
    updates, flat = scheme.settings["updates_per_step"], PRESETS[name].settings(given)
    if name == "apex":
        flat["initial_priority"] = "worker"
    assert_same(
        trained(scheme), trained(Scheme(*agent, **kinds_of(scheme), seed=3, updates_per_step=updates)),
        trained(by_factories(agent, flat)))


def test_a_tuple_sets_collection_workers_per_gradient_worker(monkeypatch):
    started = []
    start_actor = SimulatedRuntime.start_actor
    monkeypatch.setattr(SimulatedRuntime, "start_actor", lambda self, cls, params, *, name, resources: (
        started.append(name), start_actor(self, cls, params, name=name, resources=resources))[1])
    flat = {"num_col_workers": (1, 3), "col_execution": PARALLEL, "num_grad_workers": 2, "runtime": "simulated",
            "seed": 1}
    scheme = Scheme(*synthetic_agent(4), **flat)
    scheme.step()
    assert scheme.settings["num_col_workers"] == [1, 3]
    assert sorted(name for name in started if "CWorker" in name) == [
        "GWorker 1/CWorker 1", "GWorker 2/CWorker 1", "GWorker 2/CWorker 2", "GWorker 2/CWorker 3"]
    ledger = scheme.stop()
    assert ledger["collected"] == sum(ledger["dropped"].values()) + ledger["consumed_unique"]


@pytest.mark.parametrize("level", ["col", "grad"])
def test_one_worker_can_be_remote(level):
    scheme = Scheme(*synthetic_agent(4), **{f"{level}_execution": PARALLEL}, runtime="simulated", seed=1)
    worker = scheme.update_worker
    scheme.step()
    owner = worker if level == "grad" else worker.local_worker
    assert len(owner.remote_workers) == 1
    assert scheme.has_remote_workers
    scheme.stop()


def test_keywords_that_repeat_a_kind_are_refused():
    kinds = {"collection": (SynchronousCollection(), {"queue_size": 3}),
             "gradients": (SynchronousGradients(), {"aggregate": 2}),
             "runtime": (Threads(), {"schedule_seed": 1})}
    for level, (kind, keywords) in kinds.items():
        with pytest.raises(ConfigError, match=f"{next(iter(keywords))} and {level}= are two forms of the same "
                                              f"settings"):
            Scheme(*synthetic_agent(4), **{level: kind}, **keywords)


@pytest.mark.parametrize(("kind", "name"), [
    (SynchronousCollection, "queue_size"), (AsynchronousCollection, "col_fraction_workers"),
    (ReplayCollection, "queue_policy"),
    (SynchronousGradients, "aggregate"), (DecentralizedGradients, "max_grad_lag"), (Threads, "address"),
    (Ray, "costs")])
def test_a_kind_has_no_options_without_effect(kind, name):
    assert issubclass(kind, Options)
    assert name not in kind.declarations()
    with pytest.raises(TypeError, match=name):
        kind(**{name: 1})


def test_kinds_are_printed_as_they_are_written():
    assert "queue_size=3" in repr(AsynchronousCollection(queue_size=3))
    assert AsynchronousGradients(num_grad_workers=2, aggregate=2).changed() == ("aggregate", "num_grad_workers")
