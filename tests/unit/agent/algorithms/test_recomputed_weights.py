"""Check networks whose layers recompute their weights or have hooks, such as those with weight normalization."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from pytorchrl import DQN, SAC, OffPolicyActor, OnPolicyActor, QActor
from tests.unit.agent.algorithms import replay_agents as replay


def with_hook(layer):
    """Add a hook that negates the outputs."""
    layer.register_forward_hook(lambda layer, inputs, outputs: -outputs)


def with_scaled_bias(layer):
    """Double the bias by a parametrization."""
    nn.utils.parametrize.register_parametrization(layer, "bias", Double())


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


CHANGES = {
    "weight_norm": parametrizations.weight_norm, "old_weight_norm": nn.utils.weight_norm,
    "spectral_norm": parametrizations.spectral_norm, "old_spectral_norm": nn.utils.spectral_norm,
    "pruning": lambda layer: prune.ln_structured(layer, "weight", 0.5, 2, 1), "bias": with_scaled_bias,
    "hook": with_hook, "pre_hook": lambda layer: layer.register_forward_pre_hook(lambda layer, x: (-x[0],)),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning"),
    pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES),
    pytest.mark.parametrize("where", ["hidden", "head"]),
]


def layers_of(trunk, head, where):
    return [head] if where == "head" else trunk.extractor.layers


def randomize(module):
    """Change all parameters in place, as updates do; spectral normalization no longer changes with each call."""
    module.eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))


def outputs_of(trunk, head, x, activation):
    """Return the outputs of a network, each of whose layers is called as a module."""
    with torch.no_grad():
        for layer in trunk.extractor.layers:
            x = activation(layer(x))
        return head(x)


def test_on_policy_actors_act_and_learn_with_the_current_weights(change, where, build, collect, learn, made_up_steps):
    class Changed(OnPolicyActor):
        def build_networks(self, generator):
            super().build_networks(generator)
            for trunk, head in ((self.policy, self.policy_head), (self.value, self.value_head)):
                for layer in layers_of(trunk, head, where):
                    change(layer)

    parts = build(actor_class=Changed, num_mini_batch=1, num_epochs=2)
    actor = parts.actor
    randomize(actor)
    obs = {"obs": torch.linspace(-1, 1, 12).view(4, 3)}
    params = outputs_of(actor.policy, actor.policy_head, obs["obs"], torch.tanh)
    value = outputs_of(actor.value, actor.value_head, obs["obs"], torch.tanh)[:, 0]
    with torch.no_grad():
        torch.testing.assert_close(actor.act(obs, {}, None)[2], params)
        torch.testing.assert_close(actor.get_value(obs, {}, None)[0]["value"], value)
        torch.testing.assert_close(actor.evaluate(obs, {}, None, torch.zeros(4, dtype=torch.int64))[2], value)
    step = parts.algorithm.acting_step({"obs": obs["obs"].numpy()}, {}, np.zeros(4, bool))
    np.testing.assert_allclose(step.other["dist_params"], params, rtol=1e-5, atol=1e-6)
    before = {name: parameter.clone() for name, parameter in actor.named_parameters()}
    infos = learn(parts, [collect(parts, made_up_steps(4))])
    assert infos[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert [name for name, parameter in actor.named_parameters() if torch.equal(parameter, before[name])] == []


def agent_of(cls, base, space, network, where, change):
    class Changed(base):
        def build_networks(self, generator):
            super().build_networks(generator)
            for layer in layers_of(*network(self), where):
                change(layer)

    actor = Changed.create_factory(replay.SPACE, space, hidden_sizes=(6,))(seed=2)
    algorithm = cls.create_factory(start_steps=0, update_every=1, num_updates=1)(actor=actor, seed=5)
    randomize(actor)
    return algorithm, outputs_of(*network(actor), torch.from_numpy(replay.OBS["obs"]), torch.relu)


def check_learning(algorithm, network):
    before = {name: parameter.clone() for name, parameter in network.named_parameters()}
    replay.update(algorithm, times=2)
    assert [name for name, parameter in network.named_parameters() if torch.equal(parameter, before[name])] == []


def test_dqn_acts_and_learns_with_the_current_weights(change, where):
    algorithm, values = agent_of(
        DQN, QActor, replay.DISCRETE, lambda actor: (actor.q.trunk, actor.q.advantage_head), where, change)
    obs = {"obs": torch.from_numpy(replay.OBS["obs"])}
    with torch.no_grad():
        torch.testing.assert_close(algorithm.actor.get_q_scores(obs), values)
    np.testing.assert_array_equal(replay.act(algorithm, deterministic=True), values.argmax(-1))
    check_learning(algorithm, algorithm.actor.q)


def test_sac_acts_and_learns_with_the_current_weights(change, where):
    algorithm, outputs = agent_of(
        SAC, OffPolicyActor, replay.BOX, lambda actor: (actor.policy.trunk, actor.policy.head), where, change)
    expected = torch.tanh(outputs[:, :2])
    with torch.no_grad():
        torch.testing.assert_close(
            algorithm.actor.act({"obs": torch.from_numpy(replay.OBS["obs"])}, deterministic=True), expected)
    np.testing.assert_allclose(replay.act(algorithm, deterministic=True), expected, rtol=1e-5, atol=1e-6)
    check_learning(algorithm, algorithm.actor.policy)
