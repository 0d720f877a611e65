"""Compare the compiled losses and gradients of replay algorithms with the uncompiled ones."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from pytorchrl.agent.actors import OffPolicyActor, OnPolicyActor, QActor, ValueActor
from pytorchrl.agent.algorithms import BC, DQN, IQL, MPO, R2D2, SAC, TD3, compiled
from pytorchrl.agent.algorithms.precision import BatchShape
from pytorchrl.agent.options import option
from pytorchrl.errors import ConfigError, NonFiniteUpdateError
from tests.unit.agent.algorithms.test_replay_losses import BOX, DISCRETE, make, make_batch

# Torch emits this warning when its compiler is imported.
pytestmark = pytest.mark.compiled

CASES = {
    "dqn": (DQN, QActor, DISCRETE, {"dueling": True, "noisy": True}, True),
    "c51": (DQN, QActor, DISCRETE, {"dueling": True, "noisy": True, "distribution": "categorical"}, True),
    "qr-dqn": (DQN, QActor, DISCRETE, {"distribution": "quantile", "num_atoms": 9}, True),
    "tqc": (SAC, OffPolicyActor, BOX, {"num_critics": 3, "distribution": "quantile", "num_atoms": 9}, False),
    "td3 c51": (TD3, OffPolicyActor, BOX, {"policy": "deterministic", "distribution": "categorical"}, False),
    "td3": (TD3, OffPolicyActor, BOX, {"policy": "deterministic"}, False),
    # With normalization, torch cannot save the graph, so each call checks whether the graph fits (`compile_graph`).
    "sac": (SAC, OffPolicyActor, BOX, {"normalize_obs": True, "hidden_sizes": (5,)}, False),
    "small sac": (SAC, OffPolicyActor, BOX, {"normalize_obs": True, "hidden_sizes": ()}, False),
    "simba": (SAC, OffPolicyActor, BOX, {"block": "simba", "activation": "relu", "hidden_sizes": (5,)}, False),
    "discrete sac": (SAC, OffPolicyActor, DISCRETE, {}, True),
    "redq": (SAC, OffPolicyActor, BOX, {"num_critics": 3, "critic_norm": "layer"}, False),
    "crossq": (SAC, OffPolicyActor, BOX, {"critic_norm": "batch"}, False),
    "td3 crossq": (TD3, OffPolicyActor, BOX, {"critic_norm": "batch", "policy": "deterministic"}, False),
    "iql": (IQL, ValueActor, BOX, {"normalize_obs": True}, False), "bc": (BC, OnPolicyActor, BOX, {}, False),
    "mpo": (MPO, OffPolicyActor, BOX, {"policy": "gaussian"}, False),
    "discrete mpo": (MPO, OffPolicyActor, DISCRETE, {}, True),
}
OPTIONS = {"redq": {"critic_subset": 2, "policy_delay": 2}, "crossq": {"target_networks": False, "policy_delay": 2},
           "td3 crossq": {"target_networks": False}}


def rows(batch, count):
    """Return the first `count` transitions of a batch."""
    cut = {field.name: value[:count] for field in dataclasses.fields(batch)
           if isinstance(value := getattr(batch, field.name), torch.Tensor)}
    return dataclasses.replace(batch, obs={"obs": batch.obs["obs"][:count]},
                               next_obs={"obs": batch.next_obs["obs"][:count]}, **cut)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "counts"), [
    pytest.param("small sac", (7, 7), id="small sac"),
    *(pytest.param(case, (7, 7, 5, 7, 5, 5), id=f"{case}-two sizes", marks=pytest.mark.thorough)
      for case in CASES if case not in OPTIONS),
    *(pytest.param(case, (7, 7, 7), id=case, marks=pytest.mark.thorough) for case in OPTIONS)])
def test_compiled_gradients_equal_the_uncompiled_ones(case, counts):
    cls, actor_class, space, actor, masked = CASES[case]
    plain, compiled = (make(cls, actor_class, space, actor, compile=flag, optimizer="sgd", **OPTIONS.get(case, {}))
                       for flag in (False, True))
    for seed, count in enumerate(counts):
        batch = rows(make_batch(space is DISCRETE, masked, seed), count)
        results = [algorithm.compute_gradients(batch) for algorithm in (plain, compiled)]
        (expected, wanted), (gradients, info) = results
        for gradient, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(info.pop("errors"), wanted.pop("errors"), rtol=1e-4, atol=1e-6)
        assert info == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        assert torch.equal(plain.update_generator.get_state(), compiled.update_generator.get_state())
        for algorithm in (plain, compiled):  # equal weights and moments, which differ from those at compilation
            algorithm.apply_gradients([gradient.clone() for gradient in expected])
        has_critics = space is BOX and actor_class is not OnPolicyActor
        for first, second in zip(plain.actor.critics.buffers() if has_critics else (),
                                 compiled.actor.critics.buffers() if has_critics else (), strict=True):
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)
        for algorithm in (plain, compiled):
            for moments in algorithm.actor.obs_moments:
                moments.merge((torch.tensor(5.0), torch.full((3,), float(seed)), torch.full((3,), 7.0)))


def test_gradients_are_compiled_from_the_first_batch_of_a_size(monkeypatch):
    calls = []
    monkeypatch.setattr(compiled, "compile_graph", lambda function, *args: lambda tensors, draws: calls.append(
        [draw.shape for draw in draws]) or function(tensors, draws))
    plain, compiling = (make(SAC, OffPolicyActor, BOX, compile=flag) for flag in (False, True))
    for count in (7, 5, 7, 5):
        batch = rows(make_batch(False), count)
        (expected, wanted), (gradients, info) = (
            algorithm.compute_gradients(batch) for algorithm in (plain, compiling))
        assert calls.pop() == [(count, 2), (count, 2)]
        assert not calls
        for gradient, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, other)
        assert info.keys() == wanted.keys()
        assert torch.equal(plain.update_generator.get_state(), compiling.update_generator.get_state())


def test_replaced_gradients_are_measured_again(monkeypatch):
    monkeypatch.setattr(compiled, "compile_graph", lambda function, *args: function)
    algorithm = make(SAC, OffPolicyActor, BOX, compile=True)
    gradients, _ = algorithm.compute_gradients(make_batch(False))
    gradients[0] = gradients[0] * 100
    expected = [float(gradient.norm()) for gradient in gradients]
    info = algorithm.apply_gradients(gradients)
    assert [info[f"grad_norm_{name}"] for name in algorithm.groups] == pytest.approx(expected)
    before = {name: group.data.clone() for name, group in algorithm.groups.items()}
    gradients, _ = algorithm.compute_gradients(make_batch(False))
    gradients[0] = gradients[0] * math.nan
    with pytest.raises(NonFiniteUpdateError):
        algorithm.apply_gradients()
    assert all(torch.equal(group.data, before[name]) for name, group in algorithm.groups.items())


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("cls", "own", "options"), [
    (SAC, {}, {}), (TD3, {"policy": "deterministic"}, {}),
    (SAC, {"critic_norm": "layer", "critic_dropout": 0.1}, {"critic_subset": 2, "policy_delay": 3}),
    (SAC, {"critic_norm": "batch"}, {"target_networks": False})], ids=["sac", "td3", "droq", "crossq"])
def test_a_resumed_algorithm_makes_the_same_compiled_updates_bit_for_bit(cls, own, options):
    actor = {**own, "hidden_sizes": (64, 64)}

    def update(algorithm, seed):
        algorithm.compute_gradients(make_batch(False, seed=seed))
        algorithm.apply_gradients()
    first, resumed = (make(cls, OffPolicyActor, BOX, actor, compile=True, **options) for _ in range(2))
    first.applies_at_once = resumed.applies_at_once = True
    for seed in range(4):
        update(first, seed)
    resumed.load_state_dict(first.state_dict())
    for seed in range(4, 8):
        for algorithm in (first, resumed):
            update(algorithm, seed)
    for name, group in first.groups.items():
        assert torch.equal(group.data, resumed.groups[name].data)
    assert all(map(torch.equal, first.actor.buffers(), resumed.actor.buffers()))
    assert torch.equal(first.update_generator.get_state(), resumed.update_generator.get_state())


class DrawsDirectly(SAC):
    """Draws noise from the generator directly."""

    def losses(self, batch):
        self.target_entropy += float(torch.rand((), generator=self.update_generator))
        return super().losses(batch)


class ReadsOption(SAC):
    """Reads an updatable option."""

    def losses(self, batch):
        losses, measures, errors = super().losses(batch)
        return {**losses, "pi": losses["pi"] * self.parameters["lr_pi"]}, measures, errors


class ReadsAllOptions(SAC):
    """Reads all updatable options at once."""

    def losses(self, batch):
        losses, measures, errors = super().losses(batch)
        return losses, {**measures, "sum": torch.tensor(sum({**self.parameters}.values()))}, errors


class ReadsDeclaredOption(SAC):
    """Reads an updatable option from `options`, where it is replaced when it changes."""

    def losses(self, batch):
        losses, measures, errors = super().losses(batch)
        return {**losses, "q": losses["q"] * self.options.lr_q}, measures, errors


class ReadsNone(SAC):
    """Reads an updatable option that is None, so that it is not in `parameters`."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options(SAC.Options):
        l2: float | None = option(None, help="Weight of a penalty.", low=0.0, updatable=True)

    def losses(self, batch):
        losses, measures, errors = super().losses(batch)
        return {**losses, "q": losses["q"] * (1 + self.parameters.get("l2", 0.0))}, measures, errors


class ReadsDeclaredNone(ReadsNone):
    """Reads the same option from `options`."""

    def losses(self, batch):
        losses, measures, errors = SAC.losses(self, batch)
        return {**losses, "q": losses["q"] * (1 + (self.options.l2 or 0.0))}, measures, errors


@pytest.mark.parametrize(("cls", "message"), [
    (ReadsNone, r"ReadsNone cannot be compiled.*\(l2\)"),
    (ReadsDeclaredNone, r"ReadsDeclaredNone cannot be compiled.*\(l2\)"),
    (ReadsAllOptions, r"ReadsAllOptions cannot be compiled.*lr_alpha, lr_pi, lr_q"),
    (ReadsDeclaredOption, r"ReadsDeclaredOption cannot be compiled.*\(lr_q\)"),
    (DrawsDirectly, r"DrawsDirectly cannot be compiled.*standard_normal, or set compile=False"),
    (ReadsOption, r"ReadsOption cannot be compiled.*\(lr_pi\).*set compile=False")])
def test_losses_that_cannot_be_compiled_are_refused(cls, message):
    make(cls, OffPolicyActor, BOX).compute_gradients(make_batch(False))
    algorithm = make(cls, OffPolicyActor, BOX, compile=True)
    generator = algorithm.update_generator
    with pytest.raises(ConfigError, match=message):
        algorithm.compute_gradients(make_batch(False))
    assert algorithm.update_generator is generator
    assert type(algorithm.parameters) is dict


def test_a_type_error_of_the_losses_is_not_replaced():
    class Broken(SAC):
        def losses(self, batch):
            return len(3)
    with pytest.raises(TypeError, match="has no len"):
        make(Broken, OffPolicyActor, BOX, compile=True).compute_gradients(make_batch(False))


def test_losses_with_memory_are_compiled_only_on_a_gpu():
    algorithm = make(R2D2, QActor, DISCRETE, {"recurrent_net": "gru"}, compile=True)
    with pytest.raises(ConfigError, match="actor with memory is for gradients on a GPU"):
        algorithm.compute_gradients(algorithm.example_batch(BatchShape(2, 3)))


def test_a_graph_belongs_to_a_size_and_layout_of_the_batch_and_to_the_training_modes(monkeypatch):
    graphs = []
    monkeypatch.setattr(compiled, "compile_graph", lambda function, *args: graphs.append(0) or function)
    algorithm = make(SAC, OffPolicyActor, BOX, compile=True)
    batch = make_batch(False)
    for other, count in ((batch, 1), (batch, 1), (rows(batch, 5), 2), (rows(batch, 5), 2), (batch, 2),
                         (dataclasses.replace(batch, ret=batch.ret.double()), 3)):
        algorithm.compute_gradients(other)
        assert len(graphs) == count
    algorithm.targets["q"].train(not algorithm.targets["q"].training)
    algorithm.compute_gradients(batch)
    assert len(graphs) == 4


def test_graphs_leave_out_groups_that_are_not_due(monkeypatch):
    graphs = []
    monkeypatch.setattr(compiled, "compile_graph", lambda function, *args: graphs.append(0) or function)
    compiling, plain = (make(TD3, OffPolicyActor, BOX, {"policy": "deterministic"}, compile=flag)
                        for flag in (True, False))
    compiling.applies_at_once = plain.applies_at_once = True
    for number in range(1, 8):
        (expected, wanted), (gradients, info) = (
            algorithm.compute_gradients(make_batch(False, seed=number)) for algorithm in (plain, compiling))
        assert info.keys() == wanted.keys()
        for gradient, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, other)
        for algorithm in (plain, compiling):
            algorithm.apply_gradients()
        assert len(graphs) == min(number, 2)
