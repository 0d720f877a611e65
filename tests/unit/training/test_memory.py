"""Test that `train` combines algorithms of replay with memory: storages, options, refusals, and resumed runs."""

from __future__ import annotations

import pytest

import pytorchrl
from pytorchrl.agent.storages import PERBuffer, ReplayBuffer, SequenceBuffer, UniformSequenceBuffer
from pytorchrl.errors import ConfigError
from pytorchrl.training.composition import compose, option_specs
from pytorchrl.training.training import make_learner

NAMES = ["sac", "td3", "ddpg"]
TINY = {"target_steps": 60, "start_steps": 20, "mini_batch_size": 4, "hidden_sizes": (4,), "recurrent_size": 4,
        "length": 4, "burn_in": 2, "period": 2, "progress": False, "seed": 1}


def storage_of(name, env="Pendulum-v1", **options):
    return compose(name, env, options)[0].storage_factory


@pytest.mark.parametrize("name", NAMES)
def test_memory_chooses_the_storage_of_sequences_that_draws_as_the_usual_one(name):
    assert storage_of(name).cls is ReplayBuffer
    assert storage_of(name, prioritized=True).cls is PERBuffer
    uniform, prioritized = (storage_of(name, recurrent_net="lstm", **options) for options in (
        {}, {"prioritized": True, "priority_eta": 0.5}))
    assert (uniform.cls, prioritized.cls) == (UniformSequenceBuffer, SequenceBuffer)
    assert (uniform.options.n_step, uniform.options.length, uniform.options.burn_in) == (1, 16, 8)
    # The defaults are those that --help shows, which differ from R2D2's.
    usual = PERBuffer.Options(size=1)
    assert all(getattr(prioritized.options, name) == getattr(usual, name) for name in ("n_step", "alpha", "beta"))
    assert prioritized.options.priority_eta == 0.5
    assert {"length", "burn_in", "period", "priority_eta"} <= option_specs(name).keys()
    assert "length" not in option_specs("dqn")


@pytest.mark.parametrize(("options", "message"), [
    ({"length": 8}, r"length would be ignored: without memory, single transitions are drawn; add recurrent_net='gru'"),
    ({"recurrent_net": "gru", "alpha": 0.5}, r"alpha would be ignored: sequences are drawn uniformly; add prioritized"),
    ({"recurrent_net": "gru", "priority_eta": 0.5}, r"priority_eta would be ignored: sequences are drawn uniformly"),
    ({"recurrent_net": "gru", "length": 8, "period": 9}, r"period must not exceed length, got 9 > 8"),
    ({"recurrent_net": "gru", "compile": True}, r"compile=True with an actor with memory is for gradients on a GPU"),
    ({"recurrent_net": "gru", "critic_norm": "batch"}, r"critic_norm='batch' does not support the sequences"),
    ({"recurrent_net": "gru", "target_networks": False}, r"target_networks=False.*does not support the sequences"),
    ({"recurrent_size": 8}, r"recurrent_size=8 needs recurrent_net='gru' or 'lstm', got None"),
], ids=str)
def test_what_has_no_effect_or_does_not_fit_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        pytorchrl.train("sac", "Pendulum-v1", progress=False, target_steps=10, **options)


def test_several_policies_with_memory_are_refused():
    with pytest.raises(ConfigError, match=r"replay of several policies supports ReplayBuffer.*got UniformSequenceBuff"):
        pytorchrl.train("sac", "mpe2.simple_spread_v3", recurrent_net="gru", target_steps=10, progress=False)


@pytest.mark.parametrize(("name", "net", "options"), [
    ("sac", "gru", {}), ("td3", "lstm", {"prioritized": True}), ("ddpg", "gru", {"noise": "ou"})])
def test_a_run_with_memory_resumes_bit_for_bit(name, net, options, tmp_path):
    options = {**TINY, **options, "recurrent_net": net, "checkpoint_every": 40}
    whole = pytorchrl.train(name, "Pendulum-v1", log_dir=tmp_path / "whole", **options)
    with make_learner(name, "Pendulum-v1", log_dir=tmp_path / "parts", **options)[0] as learner:
        while learner.env_steps < 50:
            learner.step()
    resumed = pytorchrl.train(name, "Pendulum-v1", log_dir=tmp_path / "parts", resume=True, **options)
    assert whole.summary["updates"] > 10
    assert all((resumed.acting_state[name] == tensor).all() for name, tensor in whole.acting_state.items())
    (own, memory), (other, after) = (agent.act([0.1, 0.2, 0.3]) for agent in (
        whole, pytorchrl.load(tmp_path / "parts")))
    assert own == other
    assert (memory["pi"] == after["pi"]).all()
    assert memory["pi"].any()


@pytest.mark.parametrize("preset", ["r2d2", "apex"])
def test_architectures_with_shards_train_a_memory(preset):
    agent = pytorchrl.train(
        "sac", "Pendulum-v1", recurrent_net="gru", preset=preset, num_replay_workers=2, runtime="simulated",
        costs={"step": 1e-3, "grad": 1e-3}, replay_size=2000, **{**TINY, "target_steps": 200})
    assert agent.summary["updates"] > 0
    with pytest.raises(ConfigError, match=r"r2d2 provides sequences.*, but SAC learns from single transitions"):
        pytorchrl.train("sac", "Pendulum-v1", preset="r2d2", target_steps=10, progress=False)


def test_discrete_actions_and_masks_train_with_memory():
    from tests.unit.envs.memory_tasks import MaskedRecall
    agent = pytorchrl.train("sac", MaskedRecall, recurrent_net="gru", num_envs=2, **TINY)
    assert agent.summary["updates"] > 0
    assert set(agent.evaluate(3).lengths) == {7}
