"""Compare dropout and normalization in critics with formulas of the papers, computed by loops in float64."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from pytorchrl.agent.actors import OffPolicyActor
from pytorchrl.agent.actors.critic_layers import WARM_UP, BatchRenorm, CriticLayers, CriticOptions, Dropout

SPACE, BOX = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Box(-1, 1, (2,), np.float32)
ROWS, FEATURES = 6, 4


def renorm(num_passes, *, mean=None, variance=None):
    """Return a layer in float64, after a number of passes, with random parameters and the given running moments."""
    layer, rng = BatchRenorm(FEATURES).double(), np.random.default_rng(4)
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(rng.uniform(0.5, 2.0, FEATURES)))
        layer.bias.copy_(torch.as_tensor(rng.normal(size=FEATURES)))
    layer.num_batches_tracked.fill_(num_passes)
    layer.running_mean.copy_(torch.as_tensor(np.zeros(FEATURES) if mean is None else mean))
    layer.running_var.copy_(torch.as_tensor(np.ones(FEATURES) if variance is None else variance))
    return layer


def corrections(x, mean, variance, num_passes):
    """Return r and d of Ioffe 2017, algorithm 1, for each feature."""
    found = []
    for j in range(FEATURES):
        if num_passes < WARM_UP:
            found.append((1.0, 0.0))
            continue
        own = sum(x[:, j]) / ROWS
        deviation = (sum((value - own) ** 2 for value in x[:, j]) / ROWS + 1e-3) ** 0.5
        running = (variance[j] + 1e-3) ** 0.5
        found.append((min(max(deviation / running, 1 / 3), 3.0), min(max((own - mean[j]) / running, -5.0), 5.0)))
    return np.array(found).T


def normalized(x, weight, bias, r, d):
    out = np.empty_like(x)
    for j in range(FEATURES):
        own = sum(x[:, j]) / ROWS
        deviation = (sum((value - own) ** 2 for value in x[:, j]) / ROWS + 1e-3) ** 0.5
        for i in range(ROWS):
            out[i, j] = weight[j] * ((x[i, j] - own) / deviation * r[j] + d[j]) + bias[j]
    return out


# Running moments for which r and d are within their limits, and for which each limit is reached.
MOMENTS = {"inside": ([0.2, -0.3, 0.1, 0.0], [0.8, 1.5, 2.0, 0.6]),
           "at the limits": ([50.0, -50.0, 3.0, -3.0], [1e-4, 90.0, 1e-4, 90.0])}


@pytest.mark.parametrize("num_passes", [0, WARM_UP - 1, WARM_UP])
@pytest.mark.parametrize("case", MOMENTS)
def test_batch_renormalization_is_algorithm_1_of_ioffe(case, num_passes):
    mean, variance = (np.array(values) for values in MOMENTS[case])
    layer = renorm(num_passes, mean=mean, variance=variance)
    rng = np.random.default_rng(1)
    x, out_weight = rng.normal(1.0, 1.5, (ROWS, FEATURES)), rng.normal(size=(ROWS, FEATURES))
    r, d = corrections(x, mean, variance, num_passes)
    assert (case == "inside") == bool(((r > 1 / 3) & (r < 3) & (np.abs(d) < 5)).all()) or num_passes < WARM_UP
    weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    inputs = torch.as_tensor(x).requires_grad_()
    outputs = layer(inputs)
    np.testing.assert_allclose(outputs.detach().numpy(), normalized(x, weight, bias, r, d), rtol=1e-10)
    (outputs * torch.as_tensor(out_weight)).sum().backward()
    for tensor, at in ((inputs, 0), (layer.weight, 1), (layer.bias, 2)):  # r and d are constants of the gradient
        arguments = [x, weight, bias]
        for place in np.ndindex(arguments[at].shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = [value.copy() for value in arguments]
                moved[at][place] += step
                ends.append((normalized(*moved, r, d) * out_weight).sum())
            assert float(tensor.grad[place]) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-7)
    assert int(layer.num_batches_tracked) == num_passes + 1
    np.testing.assert_allclose(layer.running_mean.numpy(), 0.99 * mean + 0.01 * x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(layer.running_var.numpy(), 0.99 * variance + 0.01 * x.var(0), rtol=1e-12)


def test_evaluation_uses_running_moments_and_changes_nothing():
    mean, variance = (np.array(values) for values in MOMENTS["inside"])
    layer = renorm(7, mean=mean, variance=variance).eval()
    x = np.random.default_rng(1).normal(size=(ROWS, FEATURES))
    expected = layer.weight.detach().numpy() * (x - mean) / np.sqrt(variance + 1e-3) + layer.bias.detach().numpy()
    np.testing.assert_allclose(layer(torch.as_tensor(x)).detach().numpy(), expected, rtol=1e-10)
    assert (layer.running_mean.tolist(), int(layer.num_batches_tracked)) == (mean.tolist(), 7)


def test_moments_of_a_constant_distribution_are_learned():
    """After the warm-up, batch statistics and running moments agree, so training and evaluation agree, too."""
    layer, generator = renorm(0), torch.Generator().manual_seed(0)
    for _ in range(1500):
        layer(3.0 + 2.0 * torch.randn(64, FEATURES, generator=generator, dtype=torch.float64))
    torch.testing.assert_close(layer.running_mean, torch.full_like(layer.running_mean, 3.0), atol=0.1, rtol=0)
    torch.testing.assert_close(layer.running_var, torch.full_like(layer.running_var, 4.0 * 63 / 64), atol=0.2, rtol=0)
    layer.num_batches_tracked.fill_(WARM_UP)
    x = 3.0 + 2.0 * torch.randn(64, FEATURES, generator=generator, dtype=torch.float64)
    assert layer.eval()(x).allclose(layer.train()(x), atol=1e-9)


def layers_of(**options):
    found = CriticLayers(3, (5, 4), "relu", CriticOptions(**options), torch.Generator().manual_seed(2))
    rng = np.random.default_rng(8)
    with torch.no_grad():
        for parameter in found.parameters():  # also those that start as 0 or 1
            parameter.copy_(torch.as_tensor(rng.normal(size=parameter.shape)))
    return found.double()


def array(tensor):
    return tensor.detach().numpy()


def test_masks_of_dropout_are_hashes_of_a_counter_with_a_random_start():
    """Compare with a loop over whole numbers of 32 bits without a sign."""
    torch.manual_seed(3)
    found = Dropout(0.3).mask(torch.empty(4, 5))
    torch.manual_seed(3)
    start, expected = int(torch.randint(-2**31, 2**31, (1,), dtype=torch.int32)), []
    for i in range(20):
        bits = (start + i * 0x9E3779B9) % 2**32
        bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) % 2**32
        bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) % 2**32
        # the sign bit of the signed number is 1 in the upper half
        expected.append(1 / 0.7 if (bits + 2**31) % 2**32 >= round(0.3 * 2**32) else 0.0)
    torch.testing.assert_close(found, torch.tensor(expected).view(4, 5))
    assert 0.0 in expected


@pytest.mark.parametrize("p", [0.01, 0.5])
def test_masks_of_dropout_look_independent(p):
    """Compare the share of zeros, and products of neighbors in rows, columns and passes, with 5 standard errors."""
    torch.manual_seed(1)
    dropout, like = Dropout(p), torch.empty(256, 64)
    zeros = torch.stack([dropout.mask(like) for _ in range(100)]).eq(0).double() - p
    size, variance = zeros.numel(), p * (1 - p)
    assert abs(float(zeros.mean())) < 5 * (variance / size) ** 0.5
    for axis in range(3):
        for distance in (1, 2, 16):
            first, second = zeros.narrow(axis, 0, zeros.shape[axis] - distance), zeros.narrow(
                axis, distance, zeros.shape[axis] - distance)
            assert abs(float((first * second).mean())) < 5 * variance / first.numel() ** 0.5


@pytest.mark.parametrize("training", [False, True])
def test_the_layers_of_droq_are_linear_dropout_layer_normalization_relu(training):
    layers = layers_of(critic_norm="layer", critic_dropout=0.4).train(training)
    x = np.random.default_rng(1).normal(size=(ROWS, 3))
    torch.manual_seed(5)
    found = array(layers(torch.as_tensor(x)))
    torch.manual_seed(5)
    for layer, norm in zip(layers.layers, layers.norms, strict=True):
        x = x @ array(layer.weight).T + array(layer.bias)
        if training:
            kept = array(Dropout(0.4).mask(torch.ones(x.shape, dtype=torch.float64)))
            assert set(kept.round(6).flatten()) == {0.0, round(1 / 0.6, 6)}
            x = x * kept
        for i in range(ROWS):
            centered = x[i] - x[i].mean()
            x[i] = array(norm.weight) * centered / np.sqrt((centered**2).mean() + 1e-5) + array(norm.bias)
        x = np.maximum(x, 0.0)
    np.testing.assert_allclose(found, x, rtol=1e-8, atol=1e-10)


def test_the_layers_of_crossq_normalize_the_inputs_and_after_each_activation():
    layers = layers_of(critic_norm="batch").train()
    x = np.random.default_rng(1).normal(size=(ROWS, 3))
    found = array(layers(torch.as_tensor(x)))

    def batch_norm(x, norm):
        return array(norm.weight) * (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3) + array(norm.bias)

    first, *rest = layers.batch_norms
    x = batch_norm(x, first)
    for layer, norm in zip(layers.layers, rest, strict=True):
        x = batch_norm(np.maximum(x @ array(layer.weight).T + array(layer.bias), 0.0), norm)
    np.testing.assert_allclose(found, x, rtol=1e-8)


def make_actor(**options):
    return OffPolicyActor.create_factory(SPACE, BOX, **{"hidden_sizes": (6, 7), **options})(seed=1)


@pytest.mark.parametrize("options", [{"critic_norm": "layer"}, {"critic_norm": "batch"}, {"critic_dropout": 0.5},
                                     {"critic_hidden_sizes": (8, 9, 10)}], ids=lambda options: next(iter(options)))
def test_each_option_changes_the_critics_but_not_the_policy(options):
    plain, changed = make_actor(), make_actor(**options)
    obs = {"obs": torch.randn(5, 3)}
    assert torch.equal(plain.act(obs, deterministic=True), changed.act(obs, deterministic=True))
    for actor in (plain, changed):
        actor.train()
    torch.manual_seed(0)
    action = torch.rand(5, 2)
    assert not torch.allclose(plain.get_q_scores(obs, action), changed.get_q_scores(obs, action))
    sizes = [layer.out_features for layer in changed.critics[0].layers.layers]
    assert sizes == list(options.get("critic_hidden_sizes", (6, 7)))


def test_plain_critics_have_the_parameters_that_they_had_before():
    assert [name for name, _ in make_actor().critics[0].named_parameters()] == [
        "layers.layers.0.weight", "layers.layers.0.bias", "layers.layers.1.weight", "layers.layers.1.bias",
        "head.weight", "head.bias"]
