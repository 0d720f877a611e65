"""Compare SAC, TD3 and DDPG with memory with plain loops over the steps of sequences, which compute in float64."""

from __future__ import annotations

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl.agent.actors import OffPolicyActor
from pytorchrl.agent.actors.trunk import remembered
from pytorchrl.agent.algorithms import DDPG, SAC, TD3
from pytorchrl.agent.data import DataKind, SequenceBatch, map_tensors
from pytorchrl.agent.fit import check_fit
from pytorchrl.agent.noise import standard_normal
from pytorchrl.agent.storages import ReplayBuffer
from pytorchrl.errors import ConfigError, ContractError
from tests.unit.agent.algorithms.test_replay_losses import with_other_targets

SPACE = gym.spaces.Box(-1, 1, (3,), np.float32)
BOX = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32))
NUM_ACTIONS, WARM, LENGTH, N_STEP, COUNT = 4, 3, 4, 2, 5
KINDS = {"sac": (SAC, BOX, {}), "discrete_sac": (SAC, gym.spaces.Discrete(NUM_ACTIONS), {}),
         "td3": (TD3, BOX, {"policy": "deterministic"}),
         "ddpg": (DDPG, BOX, {"policy": "deterministic", "num_critics": 1})}


def make(kind, net="gru", **options):
    """Return an algorithm whose target networks differ from the trained networks."""
    cls, space, of_actor = KINDS[kind]
    actor = OffPolicyActor.create_factory(
        SPACE, space, hidden_sizes=(5,), recurrent_net=net, recurrent_size=4, **of_actor)(seed=2)
    return with_other_targets(cls.create_factory(start_steps=0, **options)(actor=actor, seed=5))


def make_batch(algorithm, burn_in=WARM, masked=False, seed=3):
    """Return random sequences: complete sequences, sequences with a shorter burn-in, and padded sequences."""
    rng = np.random.default_rng(seed)
    rows = burn_in + LENGTH + N_STEP
    valid, num_steps = np.ones((LENGTH, COUNT), bool), rng.integers(1, N_STEP + 1, (LENGTH, COUNT))
    for b, steps in enumerate((LENGTH, 1, 3, LENGTH, 2)):
        valid[steps:, b] = False
        num_steps[:, b] = np.minimum(num_steps[:, b], np.maximum(1, steps - np.arange(LENGTH)))
    done = np.zeros((rows, COUNT), bool)
    if burn_in:
        done[0, 0] = done[1, 1] = done[burn_in, 2] = True
    mask = rng.random((rows, COUNT, NUM_ACTIONS)) < 0.6
    mask[..., 1] |= ~mask.any(-1)
    is_discrete = algorithm.actor.is_discrete
    action = rng.integers(0, NUM_ACTIONS, (LENGTH, COUNT)) if is_discrete else rng.uniform(-1, 1, (LENGTH, COUNT, 2))
    state = {name: torch.as_tensor(rng.normal(size=(COUNT, zeros.shape[1])))
             for name, zeros in algorithm.actor.initial_states(1).items()}
    return narrow(SequenceBatch(
        obs={"obs": torch.as_tensor(rng.normal(size=(rows, COUNT, 3)))}, done=torch.as_tensor(done), rhs=state,
        action=torch.as_tensor(action), ret=torch.as_tensor(3 * rng.normal(size=(LENGTH, COUNT))),
        discount=torch.as_tensor(rng.random((LENGTH, COUNT)) * (rng.random((LENGTH, COUNT)) > 0.2)),
        next_row=torch.as_tensor(burn_in + np.arange(LENGTH)[:, None] + num_steps), valid=torch.as_tensor(valid),
        weight=torch.as_tensor(rng.random(COUNT)), ids=torch.arange(COUNT), burn_in=burn_in,
        mask=torch.as_tensor(mask) if masked else None, num_samples=int(valid.sum())), torch.float32)


def narrow(batch, dtype):
    """Return a batch with floating-point tensors of another dtype."""
    return map_tensors(batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def outputs(trunk, batch, b, state):
    """Return the outputs of a memory for every row of sequence b, one step at a time; the burn-in has no gradient.

    The gates are computed from the weights as in the documentation of `torch.nn.GRU`, and the memory is set to 0 before
    a first observation.
    """
    memory, found = trunk.memory, []
    size = memory.size
    for row in range(len(batch.done)):
        if row == batch.burn_in:
            state = state.detach()
        if batch.done[row, b]:
            state = torch.zeros_like(state)
        x = batch.obs["obs"][row, b]
        for layer in trunk.extractor.layers:
            x = torch.relu(layer(x))
        given, before = memory.inputs(x), memory.recurrence(state)
        reset = torch.sigmoid(given[:size] + before[:size])
        update = torch.sigmoid(given[size:2 * size] + before[size:2 * size])
        candidate = torch.tanh(given[2 * size:] + reset * before[2 * size:])
        state = (1 - update) * candidate + update * state
        found.append(state)
    return found


def value_of(critic, features, action):
    """Return the value of an action, or the values of all actions of a Discrete space."""
    if hasattr(critic, "advantage_head"):
        return critic.advantage_head(features)
    x = torch.cat([features, action])
    for layer in critic.layers.layers:
        x = torch.relu(layer(x))
    return critic.head(x)[0]


class Loops:
    """The losses of one batch, computed by loops over sequences and steps."""

    def __init__(self, algorithm, batch):
        self.algorithm, self.batch, self.options = algorithm, narrow(batch, torch.float64), algorithm.options
        self.pi, self.critics = (
            copy.deepcopy(part).double() for part in (algorithm.actor.policy, algorithm.actor.critics))
        self.targets = {name: copy.deepcopy(target).double() for name, target in algorithm.targets.items()}
        self.alpha = float(algorithm.log_alpha.detach().exp()) if isinstance(algorithm, SAC) else 0.0
        self.noise = self._noise()
        self.count = int(batch.valid.sum())
        self.errors = np.zeros((LENGTH, COUNT))
        self.loss_q = self.loss_pi = self.entropy = torch.zeros((), dtype=torch.float64)
        for b in range(COUNT):
            self._sequence(b)

    def _noise(self):
        """Return the noise that the losses will draw, for next actions and then for actions, (L, B, 2) each."""
        generator = torch.Generator().manual_seed(7)
        self.algorithm.update_generator.manual_seed(7)
        return [standard_normal(torch.empty(LENGTH, COUNT, 2), generator).double() for _ in range(2)]

    def _sequence(self, b):
        batch, zeros = self.batch, torch.zeros(4, dtype=torch.float64)
        pi = outputs(self.pi.trunk, batch, b, batch.rhs["pi"][b])
        next_pi = outputs(self.targets["pi"].trunk, batch, b, batch.rhs["pi"][b]) if "pi" in self.targets else pi
        critics = [outputs(critic.trunk, batch, b, zeros) for critic in self.critics]
        targets = [outputs(critic.trunk, batch, b, zeros) for critic in self.targets["q"]]
        for t in range(LENGTH):
            if not batch.valid[t, b]:
                continue
            row, following = batch.burn_in + t, int(batch.next_row[t, b])
            now = [(critic, features[row]) for critic, features in zip(self.critics, critics, strict=True)]
            later = [(critic, features[following]) for critic, features in zip(self.targets["q"], targets, strict=True)]
            terms = self._discrete if self.algorithm.actor.is_discrete else (
                self._squashed if isinstance(self.algorithm, SAC) else self._deterministic)
            next_value, loss_pi, entropy = terms(pi[row], next_pi[following], now, later, t, b, following)
            target = (batch.ret[t, b] + batch.discount[t, b] * next_value).detach()
            action = batch.action[t, b]
            scores = [value_of(critic, features, action) for critic, features in now]
            scores = [score[action] if self.algorithm.actor.is_discrete else score for score in scores]
            self.errors[t, b] = sum(abs(float((score - target).detach())) for score in scores) / len(scores)
            self.loss_q = self.loss_q + batch.weight[b] * sum((score - target)**2 for score in scores) / 2 / self.count
            self.loss_pi = self.loss_pi + loss_pi / self.count
            self.entropy = self.entropy + entropy / self.count

    def _squashed(self, features, next_features, now, later, t, b, _following):
        def draw(outputs, noise):
            mean, log_std = outputs.chunk(2)
            std = log_std.clamp(-20, 2).exp()
            action = torch.tanh(mean + std * noise)
            density = torch.distributions.Normal(mean, std).log_prob(mean + std * noise)
            return action, (density - (1 - action**2).log()).sum()
        next_action, next_logp = draw(self.pi.head(next_features), self.noise[0][t, b])
        action, logp = draw(self.pi.head(features), self.noise[1][t, b])
        smallest = min(value_of(critic, own, next_action) for critic, own in later)
        best = min(value_of(critic, own.detach(), action) for critic, own in now)
        return smallest - self.alpha * next_logp, self.alpha * logp - best, -logp.detach()

    def _discrete(self, features, next_features, now, later, t, b, following):
        def probabilities(outputs, row):
            allowed = range(NUM_ACTIONS) if self.batch.mask is None else [
                a for a in range(NUM_ACTIONS) if self.batch.mask[row, b, a]]
            own = outputs[list(allowed)].softmax(-1)
            return list(zip(allowed, own, own.log(), strict=True))
        later = [value_of(critic, own, None) for critic, own in later]
        now = [value_of(critic, own, None).detach() for critic, own in now]
        next_value = sum(p * (min(q[a] for q in later) - self.alpha * logp)
                         for a, p, logp in probabilities(self.pi.head(next_features), following))
        chosen = probabilities(self.pi.head(features), self.batch.burn_in + t)
        loss = sum(p * (self.alpha * logp - min(q[a] for q in now)) for a, p, logp in chosen)
        return next_value, loss, -sum(p * logp for _, p, logp in chosen).detach()

    def _deterministic(self, features, next_features, now, later, t, b, _following):
        next_action = torch.tanh(self.targets["pi"].head(next_features))
        if isinstance(self.algorithm, TD3):
            noise = (self.noise[0][t, b] * self.options.target_noise).clamp(
                -self.options.noise_clip, self.options.noise_clip)
            next_action = (next_action + noise).clamp(-1, 1)
        smallest = min(value_of(critic, own, next_action) for critic, own in later)
        critic, own = now[0]
        return smallest, -value_of(critic, own.detach(), torch.tanh(self.pi.head(features))), torch.zeros(())


def gradient(loss, network):
    return torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, list(network.parameters()))])


@pytest.mark.parametrize("burn_in", [WARM, 0])
@pytest.mark.parametrize(("kind", "masked"), [*((kind, False) for kind in KINDS), ("discrete_sac", True)])
def test_losses_gradients_and_errors_match_loops_over_the_steps(kind, masked, burn_in):
    algorithm = make(kind)
    batch = make_batch(algorithm, burn_in, masked)
    loops = Loops(algorithm, batch)
    losses, measures, errors = algorithm.losses(batch)
    assert losses["q"].item() == pytest.approx(loops.loss_q.item(), rel=1e-5)
    assert losses["pi"].item() == pytest.approx(loops.loss_pi.item(), rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(errors.numpy()[batch.valid], loops.errors[batch.valid], rtol=1e-5)
    if isinstance(algorithm, SAC):
        assert float(measures["entropy"]) == pytest.approx(float(loops.entropy), rel=1e-5)
    for name, own, other in (("q", algorithm.actor.critics, loops.critics), ("pi", algorithm.actor.policy, loops.pi)):
        found = gradient(losses[name], own)
        expected = gradient(getattr(loops, f"loss_{name}"), other)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
        assert found.abs().max() > 1e-4


def copies(gradients):
    return [own.clone() for own in gradients]


@pytest.mark.parametrize("net", ["gru", "lstm"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_valid_steps_and_what_came_before_them_affect_gradients(kind, net):
    """Check that padding does not count, and that the stored state and the burn-in do."""
    algorithm = make(kind, net)
    batch = make_batch(algorithm)
    batch.done[:] = False
    batch.done[1] = True
    batch.valid[:] = torch.arange(LENGTH)[:, None] < 3
    batch.next_row.clamp_(max=WARM + 3)
    state = algorithm.update_generator.get_state()

    def found():
        algorithm.update_generator.set_state(state)
        return copies(algorithm.compute_gradients(batch)[0])

    first = found()
    batch.obs["obs"][0], batch.rhs["pi"][:] = 7.0, 5.0  # before the episode starts
    batch.obs["obs"][WARM + 4:], batch.ret[3:] = -9.0, 100.0
    assert all(map(torch.equal, first, found()))
    batch.obs["obs"][WARM - 1] += 1.0
    assert not any(map(torch.equal, first[:2], found()[:2]))
    batch.done[1] = False
    before = found()
    batch.rhs["pi"] += 1.0
    assert not torch.equal(before[1], found()[1])


@pytest.mark.parametrize("net", ["gru", "lstm"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_of_acting_is_that_of_learning_also_while_actions_are_random(kind, net):
    states, rng = [], np.random.default_rng(4)
    obs = rng.normal(size=(6, COUNT, 3)).astype(np.float32)
    done = np.zeros((6, COUNT), bool)
    done[0] = done[3, 1] = True
    for start_steps in (0, 100):
        algorithm = make(kind, net)
        algorithm.parameters["random_actions"] = float(bool(start_steps))
        rhs = {name: state.numpy() for name, state in algorithm.actor.initial_states(COUNT).items()}
        assert list(rhs) == ["pi"]
        for t in range(6):
            step = algorithm.acting_step({"obs": obs[t]}, rhs, done[t])
            rhs = step.rhs
        states.append(rhs["pi"])
    np.testing.assert_array_equal(*states)
    trunk = algorithm.actor.policy.trunk
    with torch.no_grad():
        features, after = trunk.forward({"obs": torch.as_tensor(obs)}, torch.zeros(COUNT, rhs["pi"].shape[1]),
                                        torch.as_tensor(done))
        greedy = algorithm.actor.act(remembered({trunk: features[-1]}), deterministic=True)
    np.testing.assert_allclose(after, states[0], atol=1e-6)
    step = algorithm.acting_step({"obs": obs[5]}, before_last(algorithm, obs, done), done[5], deterministic=True)
    np.testing.assert_allclose(step.action, greedy, atol=1e-6)


def before_last(algorithm, obs, done):
    rhs = {name: state.numpy() for name, state in algorithm.actor.initial_states(COUNT).items()}
    for t in range(len(obs) - 1):
        rhs = algorithm.acting_step({"obs": obs[t]}, rhs, done[t], deterministic=True).rhs
    return rhs


def test_networks_with_memory_do_not_take_observations_or_the_memory_of_another_network():
    """Check that a target network is never given the features of the online network."""
    algorithm = make("td3")
    assert algorithm.learns_from is DataKind.SEQUENCES
    actor, obs = algorithm.actor, {"obs": torch.zeros(COUNT, 3)}
    seen, _ = actor.remember(obs, actor.initial_states(COUNT), torch.ones(COUNT, dtype=torch.bool))
    assert actor.policy(seen).shape == (COUNT, 2)
    for network, given in ((actor.policy, obs), (algorithm.targets["pi"], seen), (actor.critics[0].trunk.encode, obs)):
        with pytest.raises(ConfigError, match=r"needs its state and `done` with every observation; call remember"):
            network(given)


def test_memory_has_its_own_parameters_in_the_policy_and_in_each_critic():
    algorithm = make("sac")
    memories = [network.trunk.memory for network in (algorithm.actor.policy, *algorithm.actor.critics)]
    assert len({part.inputs.weight.data_ptr() for part in memories}) == 3
    assert not torch.equal(memories[1].inputs.weight, memories[2].inputs.weight)
    for group, own in (("pi", memories[:1]), ("q", memories[1:])):
        trained = {id(parameter) for parameter in algorithm.groups[group].params}
        assert all(id(parameter) in trained for memory in own for parameter in memory.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision_supports_memory(kind):
    plain, mixed = make(kind), make(kind, mixed_precision=True)
    (expected, _), (found, info) = (one.compute_gradients(make_batch(one)) for one in (plain, mixed))
    assert info["errors"].dtype == found[0].dtype == torch.float32
    assert not torch.equal(found[0], expected[0])
    assert float(torch.linalg.vector_norm(found[0] - expected[0])) < 0.05 * float(torch.linalg.vector_norm(expected[0]))


def test_what_does_not_combine_with_memory_is_refused_by_name():
    def actor(**options):
        return OffPolicyActor.create_factory(SPACE, BOX, recurrent_net="gru", **options)

    with pytest.raises(ConfigError, match=r"critic_norm='batch' does not support the sequences.*critic_norm='layer'"):
        actor(critic_norm="batch")
    with pytest.raises(ConfigError, match=r"recurrent_size=8 needs recurrent_net='gru' or 'lstm', got None"):
        OffPolicyActor.create_factory(SPACE, BOX, recurrent_size=8)
    with pytest.raises(ConfigError, match=r"target_networks=False.*does not support.*set target_networks=True"):
        SAC.create_factory(target_networks=False)(actor=actor()(seed=1), seed=1)
    with pytest.raises(ConfigError, match=r"compile=True.*recurrent_net=None"):
        make("sac", compile=True).compute_gradients(make_batch(make("sac")))
    with pytest.raises(ConfigError, match=r"SAC learns from sequences .*, but ReplayBuffer provides single transitions"
                                          r".*; storages for SAC: .*SequenceBuffer"):
        check_fit(SAC.create_factory(), actor(), ReplayBuffer.create_factory(100))


class OwnCritics(OffPolicyActor):
    """An actor whose critics are linear layers, which have no memory."""

    def build_networks(self, generator):
        super().build_networks(generator)
        self.critics = torch.nn.ModuleList([torch.nn.Linear(5, 1)])


def test_networks_of_another_class_are_refused_with_memory():
    with pytest.raises(ContractError, match=r"OwnCritics.build_networks\(\).*Linear for recurrent_net.*ContinuousQNet"):
        OwnCritics.create_factory(SPACE, BOX, recurrent_net="gru")(seed=1)


@pytest.mark.parametrize("options", [{"critic_norm": "layer", "critic_dropout": 0.1}, {"num_critics": 3}], ids=str)
def test_options_of_critics_combine_with_memory(options):
    actor = OffPolicyActor.create_factory(SPACE, BOX, hidden_sizes=(5,), recurrent_net="gru", recurrent_size=4,
                                          **options)(seed=2)
    algorithm = SAC.create_factory(
        start_steps=0, critic_subset=2 if "num_critics" in options else None)(actor=actor, seed=5)
    batch = make_batch(algorithm)
    first = algorithm.losses(batch)[0]["q"].item()
    for _ in range(30):
        algorithm.apply_gradients(algorithm.compute_gradients(batch)[0])
    assert algorithm.losses(batch)[0]["q"].item() < first
