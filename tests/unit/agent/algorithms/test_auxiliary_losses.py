"""Test a user-defined loss term: gradients of whole, sliced and masked batches, compilation, and errors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from pytorchrl import A2C, APPO, IMPALA, PPO, OnPolicyActor
from pytorchrl.agent.options import option
from pytorchrl.errors import ContractError
from pytorchrl.scheme.gradients.microbatch import GradAccumulator

MEMORY = {"recurrent_net": "gru", "recurrent_size": 5}
COEF = 0.7


def with_reconstruction(base):
    """Return a subclass of `base` with an additional loss term: the squared error of decoded observations."""
    class Reconstructing(base):
        @dataclass(frozen=True, kw_only=True)
        class Options(base.Options):
            reconstruction_coef: float = option(COEF, help="Weight.", low=0.0, updatable=True)

        def terms(self, evaluated, batch, parameters):
            terms, measures = super().terms(evaluated, batch, parameters)
            error = (self.actor.decoder(evaluated.features) - batch.obs["obs"]).square().mean(-1)
            return {**terms, "reconstruction": error}, {**measures, "size": batch.action.float()}

        def loss_weights(self, parameters):
            return {**super().loss_weights(parameters), "reconstruction": parameters["reconstruction_coef"]}
    return Reconstructing


class DecodingActor(OnPolicyActor):
    """An actor with an additional head, which decodes features to observations."""

    def build_networks(self, generator):
        super().build_networks(generator)
        self.decoder = nn.Linear(self.policy.out_features, 3)


@pytest.fixture
def make_batch(build, collect, made_up_steps):
    """Return a function that builds the parts of a worker, with a `DecodingActor`, and one batch."""
    def make(cls, masked=False, ragged=False, **options):
        parts = build(cls, num_epochs=1, num_mini_batch=1, actor_class=DecodingActor, **options)
        parts.storage.insert_data_slice([collect(parts, made_up_steps(4, masked=masked, next_step=ragged))])
        parts.storage.before_gradients()
        batch, = parts.algorithm.batches(parts.storage)
        return parts, batch
    return make


def by_autograd(parts, base, batch):
    """Return the gradient of base loss + COEF * reconstruction, and the reconstruction error, over valid samples."""
    actor, algorithm = parts.actor, parts.algorithm
    plain = base.create_factory(**{
        field: getattr(algorithm.options, field) for field in base.Options.__dataclass_fields__})(actor=actor, seed=0)
    gradient = plain.compute_gradients(batch)[0][0].clone()
    trunk, _ = actor.policy(batch.obs, batch.rhs.get("policy"), batch.done)
    errors = (actor.decoder(trunk) - batch.obs["obs"]).square().mean(-1)
    valid = torch.ones_like(batch.done) if batch.valid is None else batch.valid
    error = errors[valid].mean()
    params = plain.groups["all"].params
    parts = torch.autograd.grad(COEF * error, params, materialize_grads=True)
    return gradient + torch.cat([part.reshape(-1) for part in parts]), float(error.detach())


@pytest.mark.parametrize("base", [PPO, A2C, IMPALA, APPO])
@pytest.mark.parametrize("actor", [{}, {"shared_policy_value_network": True}, MEMORY], ids=["mlp", "shared", "gru"])
@pytest.mark.parametrize("steps", [{}, {"masked": True, "ragged": True}], ids=["plain", "masked and ragged"])
def test_gradient_is_that_of_the_summed_loss(make_batch, base, actor, steps):
    parts, batch = make_batch(with_reconstruction(base), actor=actor, **steps)
    gradients, info = parts.algorithm.compute_gradients(batch)
    gradient = gradients[0].clone()
    size = parts.algorithm.groups["all"].split(gradient)
    assert float(size["decoder.weight"].abs().max()) > 0  # the decoder is trained
    expected, error = by_autograd(parts, base, batch)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
    assert info["reconstruction"] == pytest.approx(error, rel=1e-5)
    actions = batch.action if batch.valid is None else batch.action[batch.valid]
    assert info["size"] == pytest.approx(float(actions.float().mean()))


@pytest.mark.parametrize("actor", [{}, MEMORY], ids=["mlp", "gru"])
def test_slices_give_the_gradient_of_the_whole_batch(make_batch, actor):
    parts, batch = make_batch(with_reconstruction(PPO), actor=actor, ragged=True)
    gradients, whole_info = parts.algorithm.compute_gradients(batch)
    whole = gradients[0].clone()
    total = GradAccumulator(9, parts.algorithm.loss_reduction)
    for part in total.slices(parts.algorithm.prepare_batch(batch), torch.device("cpu")):
        total.add(*reversed_(parts.algorithm.compute_gradients(part), part.num_samples))
    assert total.num_parts > 2
    torch.testing.assert_close(total.result()[0], whole, rtol=1e-5, atol=1e-6)
    assert total.info() == pytest.approx(whole_info, rel=1e-4, abs=1e-5)


def reversed_(result, num_samples):
    gradients, info = result
    return gradients, num_samples, info


def test_one_forward_pass_serves_the_loss_and_the_term(make_batch):
    parts, batch = make_batch(with_reconstruction(PPO))
    calls = []
    for module in (parts.actor.policy.extractor, parts.actor.value.extractor):
        forward = module.forward
        module.forward = lambda x, forward=forward: calls.append(len(x)) or forward(x)
    for _ in range(2):  # the first batch is also validated, without an additional forward pass
        calls.clear()
        parts.algorithm.compute_gradients(batch)
        assert calls == [batch.num_samples] * 2


def test_a_weight_follows_its_option(make_batch):
    parts, batch = make_batch(with_reconstruction(PPO))
    losses = []
    for coefficient in (0.0, 1.0, 3.0):
        parts.algorithm.update_algorithm_parameter("reconstruction_coef", coefficient)
        _, info = parts.algorithm.compute_gradients(batch)
        losses.append(info["loss"] - coefficient * info["reconstruction"])
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-5)


def test_a_weight_may_be_a_numpy_scalar(make_batch):
    class Weighted(with_reconstruction(PPO)):
        def loss_weights(self, parameters):
            return {name: np.float32(weight) for name, weight in super().loss_weights(parameters).items()}

    (plain, batch), (parts, _) = make_batch(with_reconstruction(PPO)), make_batch(Weighted)
    expected, _ = plain.algorithm.compute_gradients(batch)
    torch.testing.assert_close(parts.algorithm.compute_gradients(batch)[0], expected)


@pytest.mark.compiled
def test_compiled_gradient_equals_the_uncompiled_one(make_batch, traced_only):
    (plain, batch), (compiled, _) = (make_batch(with_reconstruction(PPO), compile=flag) for flag in (False, True))
    for coefficient in (COEF, 5.0):
        for parts in (plain, compiled):
            parts.algorithm.update_algorithm_parameter("reconstruction_coef", coefficient)
        expected, wanted = plain.algorithm.compute_gradients(batch)
        gradients, info = compiled.algorithm.compute_gradients(batch)
        torch.testing.assert_close(gradients[0], expected[0], rtol=1e-4, atol=1e-6)
        assert info == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        assert "reconstruction" in info


def test_features_are_float32_under_mixed_precision(make_batch):
    parts, batch = make_batch(with_reconstruction(PPO), mixed_precision=True)
    _, info = parts.algorithm.compute_gradients(batch)  # the float32 decoder raises for features of another dtype
    assert info["reconstruction"] > 0


# Mistakes


def returns(terms=lambda terms: terms, measures=lambda measures: measures, weights=lambda weights: weights):
    """Return a subclass of PPO whose hooks modify the results of the base class."""
    class MyPPO(PPO):
        def terms(self, *args):
            found, others = super().terms(*args)
            return terms(found), measures(others)

        def loss_weights(self, parameters):
            return weights(super().loss_weights(parameters))
    return MyPPO


MISTAKES = {
    "a term without a weight": (returns(terms=lambda found: {**found, "mine": found["entropy"]}),
                                r"MyPPO.terms\(\) returned the terms .*'mine'.*MyPPO.loss_weights\(\) returned weights "
                                r"of"),
    "a weight without a term": (returns(weights=lambda found: {**found, "mine": 1.0}), r"weights of .*'mine'"),
    "a missing term": (returns(terms=lambda found: {"policy_loss": found["policy_loss"]}),
                       "return the same names from both"),
    "a mean": (returns(terms=lambda found: {**found, "entropy": found["entropy"].mean()}),
               r"MyPPO.terms\(\) returned 'entropy' as a tensor of shape \(\) and dtype float32; expected a tensor of "
               r"shape \(32,\) and dtype float32: one number for each sample"),
    "a column": (returns(terms=lambda found: {**found, "entropy": found["entropy"][:, None]}), r"shape \(32, 1\)"),
    "float64": (returns(terms=lambda found: {**found, "entropy": found["entropy"].double()}),
                "dtype float64; expected"),
    "a float64 measure": (returns(measures=lambda found: {"kl": found["kl"].double()}), "'kl' as .*float64"),
    "a number": (returns(terms=lambda found: {**found, "entropy": 0.5}), "'entropy' as 0.5"),
    "lists": (returns(terms=lambda found: list(found.values())), "a list and a dict; expected two dictionaries"),
    "a weight that is text": (returns(weights=lambda found: {**found, "entropy": "big"}), r"MyPPO.loss_weights\(\)"),
    "a name twice": (returns(measures=lambda found: {"entropy": found["kl"]}), "the duplicate name entropy"),
    "the name of the loss": (returns(measures=lambda found: {"loss": found["kl"]}), "the duplicate name loss"),
    "no gradient": (returns(terms=lambda found: {name: term.detach() for name, term in found.items()}),
                    "terms without a gradient"),
}


@pytest.mark.parametrize(("cls", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_contract_violations_are_reported(make_batch, cls, message):
    parts, batch = make_batch(cls)
    with pytest.raises(ContractError, match=message):
        parts.algorithm.compute_gradients(batch)


def test_an_info_names_attribute_does_not_disable_checks(make_batch):
    """Check that an attribute `info_names` neither replaces the names that `terms` returns nor disables checks."""
    cls = type("MyPPO", (PPO,), {"info_names": ("loss", "mine")})
    parts, batch = make_batch(cls)
    _, info = parts.algorithm.compute_gradients(batch)
    assert [*info] == ["loss", "policy_loss", "value_loss", "entropy", "kl", "clip_fraction"]
    cls.terms = lambda self, *args: PPO.terms(self, *args)[0]
    parts, batch = make_batch(cls)
    with pytest.raises(ContractError, match=r"MyPPO.terms\(\) returned a dict; expected two dictionaries"):
        parts.algorithm.compute_gradients(batch)


@pytest.mark.parametrize(("returned", "described"), [
    (None, "None"), (torch.tensor(1.0), r"a tensor of shape \(\) and dtype float32"), ([{}, {}], "a list"),
    (({}, {}, {}), "a tuple")])
def test_a_result_that_is_not_a_pair_is_described(make_batch, returned, described):
    parts, batch = make_batch(type("MyPPO", (PPO,), {"terms": lambda self, *args: returned}))
    with pytest.raises(ContractError, match=rf"MyPPO.terms\(\) returned {described}; expected two dictionaries"):
        parts.algorithm.compute_gradients(batch)


@pytest.mark.compiled
def test_contract_violations_are_reported_when_compiled(make_batch):
    parts, batch = make_batch(returns(terms=lambda found: {**found, "entropy": found["entropy"].mean()}), compile=True)
    with pytest.raises(ContractError, match=r"MyPPO.terms\(\) returned 'entropy' as a tensor of shape \(\)"):
        parts.algorithm.compute_gradients(batch)


def test_a_wrong_shape_from_evaluate_target_is_reported(build, collect, made_up_steps):
    cls = type("MyImpala", (IMPALA,), {"evaluate_target": lambda self, obs, rhs, done, action, mask: [
        row[..., None] for row in IMPALA.evaluate_target(self, obs, rhs, done, action, mask)]})
    parts = build(cls)
    parts.storage.insert_data_slice([collect(parts, made_up_steps(4))])
    with pytest.raises(ContractError, match=r"MyImpala.evaluate_target\(\) returned a tensor of shape \(8, 4, 1\)"):
        parts.storage.before_gradients()


def test_only_the_first_batch_is_checked(make_batch, monkeypatch):
    calls = []
    for module, name in (("rollouts", "check_terms"), ("on_policy", "check_evaluated")):
        check = getattr(__import__("pytorchrl.agent.contracts", fromlist=[name]), name)
        monkeypatch.setattr(f"pytorchrl.agent.algorithms.{module}.{name}",
                            lambda *args, name=name, check=check: calls.append(name) or check(*args))
    parts, batch = make_batch(PPO)
    for _ in range(3):
        parts.algorithm.compute_gradients(batch)
    assert calls == ["check_evaluated", "check_terms"]
