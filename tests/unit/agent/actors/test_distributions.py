from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import distributions as reference

from pytorchrl.agent.actors.distributions import check_mask, distribution_of
from pytorchrl.errors import NonFiniteDataError, SpaceError

BOX = gym.spaces.Box(np.float32([-1, -2, -3]), np.float32([1, 2, 0.5]))


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _params(distribution, *lead, seed=1):
    outputs = torch.randn(*lead, distribution.num_outputs, generator=_generator(seed))
    for log_std in distribution.parameters():
        log_std.data.normal_(generator=_generator(seed))
    return distribution.params_of(outputs).detach()


def _reference(space, params):
    if isinstance(space, gym.spaces.Discrete):
        return reference.Categorical(logits=params)
    if isinstance(space, gym.spaces.MultiBinary):
        return reference.Independent(reference.Bernoulli(logits=params), 1)
    mean, log_std = params.chunk(2, -1)
    return reference.Independent(reference.Normal(mean, log_std.exp()), 1)


@pytest.mark.parametrize("lead", [(5,), (4, 3)])
@pytest.mark.parametrize("space", [gym.spaces.Discrete(4), gym.spaces.MultiBinary(3), BOX], ids=str)
def test_log_prob_and_entropy_agree_with_torch(space, lead):
    distribution = distribution_of(space)
    params = _params(distribution, *lead)
    action = distribution.sample(params, None, _generator())
    expected = _reference(space, params)
    logp, entropy = distribution.log_prob_entropy(params, action, None)
    torch.testing.assert_close(logp, expected.log_prob(action if action.is_floating_point() else action.float()))
    torch.testing.assert_close(entropy, expected.entropy())
    torch.testing.assert_close(distribution.log_prob(params, action, None), logp)
    assert logp.shape == entropy.shape == lead


@pytest.mark.parametrize("lead", [(5,), (4, 3)])
@pytest.mark.parametrize("space", [gym.spaces.Discrete(4), gym.spaces.MultiBinary(3), BOX], ids=str)
def test_kl_agrees_with_torch(space, lead):
    distribution = distribution_of(space)
    params, other = (_params(distribution, *lead, seed=seed) for seed in (1, 2))
    kl = distribution.kl(params, other, None)
    torch.testing.assert_close(kl, reference.kl_divergence(_reference(space, params), _reference(space, other)))
    assert kl.shape == lead
    assert (kl > 1e-3).all()
    torch.testing.assert_close(distribution.kl(params, params, None), torch.zeros(lead), atol=1e-6, rtol=0)


def test_kl_of_multi_discrete_is_the_sum_over_components():
    distribution = distribution_of(gym.spaces.MultiDiscrete([2, 5, 3]))
    params, other = (_params(distribution, 6, seed=seed) for seed in (1, 2))
    expected = sum(
        reference.kl_divergence(reference.Categorical(logits=p), reference.Categorical(logits=q))
        for p, q in zip(params.split([2, 5, 3], -1), other.split([2, 5, 3], -1), strict=True))
    torch.testing.assert_close(distribution.kl(params, other, None), expected)


@pytest.mark.parametrize("space", [gym.spaces.Discrete(4), gym.spaces.MultiDiscrete([2, 2])], ids=str)
def test_kl_counts_allowed_actions_only_and_has_a_finite_gradient(space):
    distribution = distribution_of(space)
    mask = torch.tensor([[True, False, True, True]])
    params, other = (_params(distribution, 1, seed=seed).requires_grad_() for seed in (1, 2))
    kl = distribution.kl(params, other, mask)
    if isinstance(space, gym.spaces.Discrete):
        keep = [0, 2, 3]
        p, q = (torch.log_softmax(logits[:, keep], -1) for logits in (params, other))
    else:
        # The first component allows only one action, so it adds nothing to the KL divergence.
        p, q = (torch.log_softmax(logits[:, 2:], -1) for logits in (params, other))
    torch.testing.assert_close(kl, (p.exp() * (p - q)).sum(-1))
    gradient, = torch.autograd.grad(kl.sum(), other)
    assert gradient.isfinite().all()
    assert gradient[0, 1] == 0.0


def test_multi_discrete_sums_over_components():
    distribution = distribution_of(gym.spaces.MultiDiscrete([2, 5, 3]))
    params = _params(distribution, 6)
    action = distribution.sample(params, None, _generator())
    parts = [reference.Categorical(logits=logits) for logits in params.split([2, 5, 3], -1)]
    logp, entropy = distribution.log_prob_entropy(params, action, None)
    torch.testing.assert_close(logp, sum(part.log_prob(action[:, i]) for i, part in enumerate(parts)))
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts))
    assert distribution.mode(params, None).tolist() == [
        list(row) for row in zip(*(part.logits.argmax(-1).tolist() for part in parts), strict=True)]


def test_masked_categorical_golden_values():
    distribution = distribution_of(gym.spaces.Discrete(4))
    logits, mask = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[True, False, True, False]])
    probabilities = [float(distribution.log_prob(logits, torch.tensor([a]), mask).exp()) for a in range(4)]
    assert probabilities == pytest.approx([0.119203, 0.0, 0.880797, 0.0], abs=1e-6)
    assert probabilities[1] == probabilities[3] == 0.0
    assert float(distribution.log_prob_entropy(logits, torch.tensor([0]), mask)[1]) == pytest.approx(0.365334, abs=1e-6)
    assert distribution.mode(logits, mask).tolist() == [2]


def test_masked_gradient_is_finite_and_zero_for_forbidden_actions():
    distribution = distribution_of(gym.spaces.Discrete(3))
    logits = torch.tensor([[0.3, -1.0, 2.0]], requires_grad=True)
    logp, entropy = distribution.log_prob_entropy(logits, torch.tensor([0]), torch.tensor([[True, True, False]]))
    (logp + entropy).sum().backward()
    assert bool(logits.grad.isfinite().all())
    assert logits.grad[0, 2] == 0.0
    assert logits.grad[0, 0] != 0.0


@pytest.mark.parametrize("space", [gym.spaces.Discrete(3), gym.spaces.MultiDiscrete([3, 2])], ids=str)
def test_forbidden_actions_are_never_sampled(space):
    distribution = distribution_of(space)
    mask = torch.ones(5000, distribution.mask_size, dtype=torch.bool)
    mask[:, 1] = False
    params = torch.zeros(5000, distribution.num_outputs)
    params[:, 1] = 100.0
    first = distribution.sample(params, mask, _generator()).reshape(5000, -1)[:, 0]
    assert set(first.tolist()) == {0, 2}


def test_an_all_true_mask_changes_nothing_if_component_sizes_differ():
    """Check that the padding for components with fewer actions is never sampled as an action."""
    distribution = distribution_of(gym.spaces.MultiDiscrete([2, 5, 3]))
    params, mask = _params(distribution, 2000), torch.ones(2000, 10, dtype=torch.bool)
    action = distribution.sample(params, None, _generator())
    assert torch.equal(distribution.sample(params, mask, _generator()), action)
    assert (action.amax(0) == torch.tensor([1, 4, 2])).all()
    for masked, plain in zip(distribution.log_prob_entropy(params, action, mask),
                             distribution.log_prob_entropy(params, action, None),
                             strict=True):
        assert torch.equal(masked, plain)
    mask[:, :2] = False
    with pytest.raises(NonFiniteDataError):
        distribution.check_mask(mask)


def test_the_most_likely_bit_is_1_above_one_half():
    bits = distribution_of(gym.spaces.MultiBinary(4)).mode(torch.tensor([[-0.5, 0.0, 0.01, 2.0]]), None)
    assert bits.tolist() == [[0, 0, 1, 1]]


def test_sample_frequencies_match_probabilities():
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    drawn = distribution_of(gym.spaces.Discrete(4)).sample(logits.expand(40_000, 4), None, _generator())
    torch.testing.assert_close(torch.bincount(drawn) / 40_000, logits.softmax(-1), atol=0.01, rtol=0)
    bits = distribution_of(gym.spaces.MultiBinary(2)).sample(torch.tensor([1.0, -2.0]).expand(40_000, 2), None,
                                                             _generator())
    torch.testing.assert_close(bits.float().mean(0), torch.tensor([1.0, -2.0]).sigmoid(), atol=0.01, rtol=0)
    gaussian = distribution_of(BOX)
    params = torch.tensor([1.0, -1.0, 0.0, 0.0, -1.0, 0.5]).expand(40_000, 6)
    actions = gaussian.sample(params, None, _generator())
    torch.testing.assert_close(actions.mean(0), params[0, :3], atol=0.03, rtol=0)
    torch.testing.assert_close(actions.std(0).log(), params[0, 3:], atol=0.03, rtol=0)


def test_sampling_is_repeatable_and_leaves_the_global_generator_alone():
    for space in (gym.spaces.Discrete(9), gym.spaces.MultiDiscrete([4, 4]), gym.spaces.MultiBinary(4), BOX):
        distribution = distribution_of(space)
        params, before = _params(distribution, 8), torch.get_rng_state()
        first, second = (distribution.sample(params, None, _generator(3)) for _ in range(2))
        assert torch.equal(first, second)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("high", [0.1, 0.4, 1 / 3, 0.7, 1e300, np.inf])
def test_clipped_actions_are_within_float64_bounds(high):
    space = gym.spaces.Box(np.array([-high, min(high / 2, 0.7)]), np.array([high, high]), dtype=np.float64)
    for end in (-torch.inf, torch.inf):
        clipped = distribution_of(space).clip(torch.full((2,), end)).numpy()
        assert space.contains(clipped.astype(np.float64))
        if high < 1:
            np.testing.assert_allclose(clipped, space.low if end < 0 else space.high, rtol=1e-7)


def test_actions_start_at_zero_and_are_clipped_to_bounds():
    # Environments add the `start` of the action space; the actor must not add it too.
    assert distribution_of(gym.spaces.Discrete(3, start=5)).clip(torch.tensor([0, 2])).tolist() == [0, 2]
    shifted = gym.spaces.MultiDiscrete([2, 3], start=[1, -1])
    assert distribution_of(shifted).clip(torch.tensor([[0, 2]])).tolist() == [[0, 2]]
    action = torch.tensor([[-9.0, 1.5, 9.0]])
    assert distribution_of(BOX).clip(action).tolist() == [[-1.0, 1.5, 0.5]]
    assert action.tolist() == [[-9.0, 1.5, 9.0]]


def test_actions_have_the_shape_and_dtype_of_their_space():
    for space in (gym.spaces.MultiDiscrete([[2, 3], [4, 5]]), gym.spaces.MultiBinary([2, 3]),
                  gym.spaces.Box(-1, 1, (2, 2), np.float32)):
        distribution = distribution_of(space)
        params = _params(distribution, 4)
        action = distribution.sample(params, None, _generator())
        assert action.shape == (4, *space.shape)
        assert distribution.mode(params, None).shape == action.shape
        assert action.dtype == (torch.float32 if isinstance(space, gym.spaces.Box) else torch.int64)
        assert distribution.log_prob(params, action, None).shape == (4,)


def test_all_false_mask_row_raises():
    mask = torch.tensor([[True, False], [False, False]])
    with pytest.raises(NonFiniteDataError, match=r"rows \[1\]"):
        check_mask(mask)
    check_mask(mask[:1])


def test_a_multi_discrete_component_without_allowed_actions_raises():
    distribution = distribution_of(gym.spaces.MultiDiscrete([2, 3]))
    allowed = torch.tensor([[True, False, False, False, True], [True, True, True, False, False]])
    distribution.check_mask(allowed)
    with pytest.raises(NonFiniteDataError, match=r"rows \[1\]"):
        distribution.check_mask(torch.tensor([[False, True, True, True, True], [True, True, False, False, False]]))


def test_log_probabilities_stay_on_the_device_of_the_parameters():
    """Check that log-probabilities are on the device of the parameters, even if the distribution is on the CPU."""
    distribution = distribution_of(gym.spaces.MultiDiscrete([2, 3]))
    params, action = torch.empty(4, 5, device="meta"), torch.empty(4, 2, dtype=torch.int64, device="meta")
    assert distribution.log_prob(params, action, None).device.type == "meta"


def test_masks_are_refused_for_continuous_actions():
    distribution = distribution_of(BOX)
    with pytest.raises(SpaceError, match="mask"):
        distribution.sample(_params(distribution, 1), torch.ones(1, 3, dtype=torch.bool), None)


@pytest.mark.parametrize("space", [
    gym.spaces.Text(3), gym.spaces.Box(0, 9, (2,), np.int64), gym.spaces.Dict(a=gym.spaces.Discrete(2))], ids=str)
def test_unsupported_action_space_raises(space):
    with pytest.raises(SpaceError, match="Discrete, MultiDiscrete"):
        distribution_of(space)
