from __future__ import annotations

import functools
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from pytorchrl.agent.actors import OnPolicyActor, QActor, trunk
from pytorchrl.agent.actors.blocks import DictNet
from pytorchrl.agent.actors.extractors import CNN, MLP, Embedding, encoder, is_image
from pytorchrl.agent.actors.resnets import FixupBlock, FixupCNN, ImpalaCNN
from pytorchrl.errors import SpaceError

IMAGE = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
SMALL = gym.spaces.Box(0, 255, (3, 40, 36), np.uint8)


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _images(space, count=2):
    return torch.randint(0, 256, (count, *space.shape), dtype=torch.uint8, generator=_generator())


def _assert_orthogonal(weight, gain):
    singular = torch.linalg.svdvals(weight.detach().flatten(1))
    torch.testing.assert_close(singular, torch.full_like(singular, gain), atol=1e-4, rtol=0)


def test_cnn_is_the_nature_network():
    net = CNN(IMAGE, generator=_generator())
    assert [tuple(p.shape) for p in net.parameters()] == [
        (32, 4, 8, 8), (32,), (64, 32, 4, 4), (64,), (64, 64, 3, 3), (64,), (512, 3136), (512,)]
    x = _images(IMAGE)
    hidden = x.float() / 255
    for layer, stride in ((net.conv1, 4), (net.conv2, 2), (net.conv3, 1)):
        hidden = F.relu(F.conv2d(hidden, layer.weight, layer.bias, stride=stride))
    expected = F.relu(F.linear(hidden.flatten(1), net.head.weight, net.head.bias))
    torch.testing.assert_close(net(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(net(x), net(x.float() / 255), atol=1e-5, rtol=1e-5)  # floats are not divided by 255


def test_impala_is_three_stages_of_two_residual_blocks():
    net = ImpalaCNN(SMALL, generator=_generator())
    x = _images(SMALL)
    hidden = x.float() / 255
    for (convolution, *blocks), channels in zip(net.stages, (16, 32, 32), strict=True):
        hidden = F.max_pool2d(convolution(hidden), 3, stride=2, padding=1)
        assert hidden.shape[1] == channels
        assert len(blocks) == 2
        for block in blocks:
            hidden = hidden + block.conv2(F.relu(block.conv1(F.relu(hidden))))
    expected = F.relu(net.head(F.relu(hidden).flatten(1)))
    torch.testing.assert_close(net(x), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("extractor", [CNN, ImpalaCNN, FixupCNN])
@pytest.mark.parametrize("size", [7, 256])
def test_image_extractors_have_the_requested_output_size(extractor, size):
    net = extractor(SMALL, out_features=size, generator=_generator())
    assert net(_images(SMALL)).shape == (2, size)
    assert net.out_features == size
    assert net.head.out_features == size


@pytest.mark.parametrize("extractor", [CNN, ImpalaCNN, FixupCNN, MLP])
def test_hidden_layers_start_orthogonal_with_zero_bias(extractor):
    net = extractor(SMALL, generator=_generator())
    for name, module in net.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) and not (extractor is FixupCNN and module.bias is None):
            _assert_orthogonal(module.weight, math.sqrt(2))
            assert not module.bias.any(), name


def test_fixup_blocks_start_as_the_identity():
    block = FixupBlock(16, _generator())
    x = torch.randn(2, 16, 5, 5, generator=_generator())
    assert torch.equal(block(x), x)
    _assert_orthogonal(block.conv1.weight, math.sqrt(2) / math.sqrt(6))
    block(x).sum().backward()
    assert block.conv2.weight.grad.any()  # the zero-initialized weight has a gradient


def test_mlp_computes_its_layers():
    for name, function in (("tanh", torch.tanh), ("relu", torch.relu)):
        net = MLP(gym.spaces.Box(-1, 1, (3,), np.float32), (8, 5), name, _generator())
        x = torch.randn(4, 3, generator=_generator())
        before = x.clone()
        expected = x
        for layer in net.layers:
            expected = function(layer(expected))
        torch.testing.assert_close(net(x), expected)
        assert torch.equal(x, before)
        assert net.out_features == 5


@pytest.mark.parametrize("name", ["relu", "tanh"])
def test_layer_normalization_precedes_each_activation_of_fully_connected_layers(name):
    net = MLP(gym.spaces.Box(-1, 1, (3,), np.float32), (8, 5), name, _generator(), "layer")
    plain = MLP(gym.spaces.Box(-1, 1, (3,), np.float32), (8, 5), name, _generator())
    assert all(map(torch.equal, net.layers.parameters(), plain.layers.parameters()))
    hidden = x = torch.randn(4, 3, generator=_generator())
    with torch.no_grad():
        for layer, norm in zip(net.layers, net.norms, strict=True):
            norm.weight.uniform_(0.5, 1.5, generator=_generator(1))
            norm.bias.uniform_(-1.0, 1.0, generator=_generator(2))
            rows = layer(hidden).double()
            rows = (rows - rows.mean(-1, keepdim=True)) / (rows.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
            hidden = getattr(torch, name)((rows * norm.weight + norm.bias).float())
        for once in (True, False):
            net.look_up_weights(once)
            torch.testing.assert_close(net(x), hidden)


def test_layer_normalization_precedes_each_activation_of_the_nature_network():
    net = CNN(SMALL, 7, _generator(), "layer")
    x = _images(SMALL)
    hidden = x.float() / 255
    for layer, norm, stride in zip((net.conv1, net.conv2, net.conv3), net.norms[:3], (4, 2, 1), strict=True):
        rows = F.conv2d(hidden, layer.weight, layer.bias, stride=stride)
        assert norm.normalized_shape == rows.shape[1:]
        mean, var = (getattr(rows.flatten(1), of)(1)[:, None, None, None] for of in ("mean", "var"))
        count = rows[0].numel()
        hidden = F.relu((rows - mean) / (var * (count - 1) / count + 1e-5).sqrt())
    rows = net.head(hidden.flatten(1))
    expected = F.relu((rows - rows.mean(1, keepdim=True)) / (rows.var(1, keepdim=True, correction=0) + 1e-5).sqrt())
    torch.testing.assert_close(net(x), expected, atol=1e-4, rtol=1e-4)


def test_layer_normalization_follows_the_linear_layer_of_residual_networks():
    net, plain = (ImpalaCNN(SMALL, 7, _generator(), norm) for norm in ("layer", None))
    x = _images(SMALL)
    plain.head.bias.data.fill_(100.0)  # so that no output is cut off by the ReLU
    rows = plain(x) - 100.0
    expected = F.relu((rows - rows.mean(1, keepdim=True)) / (rows.var(1, keepdim=True, correction=0) + 1e-5).sqrt())
    torch.testing.assert_close(net(x), expected, atol=1e-3, rtol=1e-3)


def test_equal_seeds_give_equal_weights_and_the_global_rng_is_not_used():
    before = torch.get_rng_state()
    for extractor in (CNN, FixupCNN, MLP):
        first, second = (extractor(SMALL, generator=_generator(5)) for _ in range(2))
        assert all(map(torch.equal, first.parameters(), second.parameters()))
    Embedding(3, 4, _generator())
    assert torch.equal(torch.get_rng_state(), before)


def test_encode_writes_every_space_as_numbers():
    assert encoder(gym.spaces.Discrete(3))(torch.tensor([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert encoder(gym.spaces.MultiDiscrete([2, 3]))(torch.tensor([[1, 0]])).tolist() == [[0, 1, 1, 0, 0]]
    two_axes = gym.spaces.MultiDiscrete([[2, 3], [3, 2]])
    assert encoder(two_axes)(torch.tensor([[[1, 2], [0, 1]]])).tolist() == [[0, 1, 0, 0, 1, 1, 0, 0, 0, 1]]
    assert encoder(gym.spaces.MultiBinary(2))(torch.tensor([[1, 0]], dtype=torch.int8)).tolist() == [[1, 0]]
    ram = gym.spaces.Box(0, 255, (2,), np.uint8)
    assert encoder(ram)(torch.tensor([[255, 51]], dtype=torch.uint8)).tolist() == [[1.0, pytest.approx(0.2)]]
    assert encoder(gym.spaces.Box(0, 9, (), np.float32))(torch.tensor([3.0, 4.0])).tolist() == [[3.0], [4.0]]


def test_dict_net_sees_every_leaf():
    vector = gym.spaces.Box(-1, 1, (3,), np.float32)
    net = DictNet({"a.b": MLP(vector, (4,), generator=_generator()), "c": MLP(vector, (5,), generator=_generator())},
                  hidden_sizes=(6,), generator=_generator())
    obs = {leaf: torch.randn(2, 3, generator=_generator()) for leaf in ("c", "a.b")}
    assert net(obs).shape == (2, net.out_features) == (2, 6)
    for leaf in obs:
        assert not torch.equal(net(obs), net({**obs, leaf: obs[leaf] + 1}))


def test_embedding_checks_indices():
    net = Embedding(gym.spaces.Discrete(5), 8, _generator())
    assert torch.equal(net(torch.tensor([4, 0])), net.table[[4, 0]])
    for index in (5, -1):
        with pytest.raises(IndexError, match="from 0 to 4"):
            net(torch.tensor([0, index]))
    with pytest.raises(SpaceError, match="Discrete"):
        Embedding(IMAGE)


def test_images_are_bytes_or_floats_from_0_to_1_with_three_axes_and_large_enough():
    assert is_image(IMAGE)
    assert is_image(SMALL)
    assert is_image(gym.spaces.Box(0, 255, (3, 16, 84), np.uint8))
    assert is_image(gym.spaces.Box(0, 1, (3, 84, 84), np.float32))
    assert not is_image(gym.spaces.Box(0, 255, (3, 15, 84), np.uint8))
    assert not is_image(gym.spaces.Box(-1, 1, (3, 84, 84), np.float32))
    assert not is_image(gym.spaces.Box(0, 1, (3, 84, 84), np.int64))
    assert not is_image(gym.spaces.Box(0, 255, (128,), np.uint8))


@pytest.mark.parametrize(("space", "network"), [
    (gym.spaces.Box(0, 255, (24, 24, 1), np.uint8), ImpalaCNN),
    (gym.spaces.Box(0.0, 1.0, (84, 84, 3), np.float64), CNN),
    (gym.spaces.Box(0.0, 1.0, (84, 84, 3), np.float32), CNN),
    (gym.spaces.Box(0, 255, (35, 84, 3), np.uint8), ImpalaCNN),
    (gym.spaces.Box(0, 255, (36, 36, 4), np.uint8), CNN), (gym.spaces.Box(0, 255, (15, 15, 3), np.uint8), MLP),
    (gym.spaces.Box(0.0, 1.0, (7, 7, 3), np.float32), MLP)])
def test_images_are_encoded_by_image_networks(space, network):
    for cls, parts in ((OnPolicyActor, ("policy",)), (QActor, ("q", "trunk"))):
        actor = cls.create_factory(space, gym.spaces.Discrete(2))(seed=1)
        trunk = functools.reduce(getattr, parts, actor)
        assert type(trunk.extractor) is network
        obs = {leaf: torch.zeros(2, *of.shape, dtype=torch.uint8 if of.dtype == np.uint8 else torch.float32)
               for leaf, of in actor.options.observation_space.items()}
        features, _ = trunk.forward(obs, None, None)
        assert features.shape == (2, trunk.out_features)


def test_a_leaf_with_the_shape_but_not_the_values_of_an_image_warns():
    for shape in ((84, 84, 3), (3, 84, 84)):
        text = (
            rf"leaf 'obs' has the shape of an image, \({', '.join(map(str, shape))}\).* 21168 inputs: .* got "
            r"float32 from -inf to inf")
        with pytest.warns(UserWarning, match=text):
            OnPolicyActor.create_factory(gym.spaces.Box(-np.inf, np.inf, shape, np.float32), gym.spaces.Discrete(2))
    with pytest.warns(UserWarning, match=r"\(64, 64, 2\).* 8192 inputs: .* \(C, H, W\), or .* 3 or 4 channels.* "
                                         r"got uint8 from 0 to 255"):
        OnPolicyActor.create_factory(gym.spaces.Box(0, 255, (64, 64, 2), np.uint8), gym.spaces.Discrete(2))
    for chosen in ("mlp", "cnn", "impala"):
        OnPolicyActor.create_factory(gym.spaces.Box(-1, 1, (3, 84, 84), np.float32), gym.spaces.Discrete(2),
                                     feature_extractor=chosen)


def test_images_too_small_for_the_layers_raise():
    CNN(gym.spaces.Box(0, 255, (1, 36, 36), np.uint8), generator=_generator())
    with pytest.raises(SpaceError, match="at least 36 x 36 pixels, got 35 x 84"):
        CNN(gym.spaces.Box(0, 255, (1, 35, 84), np.uint8))
    with pytest.raises(SpaceError, match=r"\(C, H, W\)"):
        ImpalaCNN(gym.spaces.Box(-1, 1, (3,), np.float32))


@pytest.mark.parametrize("extractor", [MLP, CNN, ImpalaCNN])
@pytest.mark.parametrize("high", [1, 10, 255])
def test_bytes_are_divided_by_the_upper_bound_of_their_space(extractor, high):
    """The features are those of floats between 0 and 1; divided by 255, grids of zeros and ones would be nearly 0."""
    byte, real = (gym.spaces.Box(0, top, (3, 36, 36), dtype) for top, dtype in ((high, np.uint8), (1, np.float32)))
    x = torch.randint(0, high + 1, (2, 3, 36, 36), generator=_generator(), dtype=torch.uint8)
    of_bytes, of_reals = (extractor(space, generator=_generator()) for space in (byte, real))
    torch.testing.assert_close(of_bytes(x), of_reals(x.float() / high), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("spaces", "options", "named"), [
    ({"a": gym.spaces.Discrete(3), "b": gym.spaces.Discrete(2**28)}, {}, "observation leaf 'b' is a Discrete with 26"),
    ({"b": gym.spaces.MultiDiscrete([2**27] * 2)}, {}, "a MultiDiscrete with .* 17,179,869,184 weights, 69 GB; at"),
    ({"obs": gym.spaces.Discrete(2**25)}, {}, None),
    ({"obs": gym.spaces.Discrete(2**28)}, {"feature_extractor": CNN}, None),
    ({"obs": IMAGE}, {}, None), ({"obs": IMAGE}, {"feature_extractor": "impala"}, None),
    ({"obs": IMAGE}, {"feature_extractor": "mlp"}, "a Box with 28,224 values"),
    ({"obs": gym.spaces.Box(0, 1, (200, 200), np.float32)}, {}, "a Box with 40,000 values"),
])
def test_a_layer_that_no_memory_holds_is_refused_before_anything_is_built(monkeypatch, spaces, options, named):
    if any(isinstance(space, gym.spaces.Box) for space in spaces.values()):
        monkeypatch.setattr(trunk, "_MOST_WEIGHTS", 10**6)  # the bounds of a Box take as much memory as its values
    for actor in (OnPolicyActor, QActor):
        build = functools.partial(actor.create_factory, spaces, gym.spaces.Discrete(2), hidden_sizes=(64,), **options)
        if named is None:
            build()
        else:
            with pytest.raises(SpaceError, match=named):
                build()
