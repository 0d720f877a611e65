import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from pytorchrl.agent.env.spaces import ObservationReader, action_start, flatten_action_space, flatten_space
from pytorchrl.errors import SpaceError

NESTED = spaces.Dict({
    "camera": spaces.Dict({"left": spaces.Box(0, 255, (8, 6, 3), np.uint8)}),
    "parts": spaces.Tuple((spaces.Discrete(4, start=2), spaces.Box(-np.inf, 1.0, (2,), np.float64))),
    "flags": spaces.MultiBinary(3),
    "action_mask": spaces.MultiBinary(5),
})


def batch(space, num_envs):
    batched = gym.vector.utils.batch_space(space, num_envs)
    batched.seed(0)
    return batched.sample()


def test_flatten_space_returns_the_leaves_that_networks_see():
    leaves = flatten_space(NESTED)
    assert set(leaves) == {"camera/left", "parts/0", "parts/1", "flags"}
    assert leaves["camera/left"].shape == (3, 8, 6)
    assert leaves["camera/left"].dtype == np.uint8
    assert leaves["parts/0"] == spaces.Discrete(4)
    assert leaves["parts/1"].dtype == np.float32
    assert leaves["flags"] == NESTED["flags"]


def test_flatten_space_names_a_plain_space_obs_and_keeps_it():
    box = spaces.Box(-1, 1, (4,), np.float32)
    assert flatten_space(box) == {"obs": box}
    assert flatten_space(flatten_space(NESTED)) == flatten_space(NESTED)
    wide = flatten_space(spaces.Box(-1e300, 1e300, (1,), np.float64))["obs"]
    assert (wide.low[0], wide.high[0]) == (-np.inf, np.inf)


def test_flatten_space_keeps_images_with_channels_first():
    assert flatten_space(spaces.Box(0, 255, (4, 84, 84), np.uint8))["obs"].shape == (4, 84, 84)
    assert flatten_space(spaces.Box(0, 255, (84, 84, 4), np.uint8))["obs"].shape == (4, 84, 84)
    for dtype in (np.float32, np.float64):
        image = flatten_space(spaces.Box(0.0, 1.0, (20, 16, 3), dtype))["obs"]
        assert (image.shape, image.dtype) == ((3, 20, 16), np.float32)
        for no_image in (spaces.Box(0.0, 1.0, (20, 15, 3), dtype), spaces.Box(-1.0, 1.0, (20, 16, 3), dtype)):
            assert flatten_space(no_image)["obs"].shape == no_image.shape


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_reader_puts_the_channels_of_images_of_floats_first(dtype):
    space = spaces.Box(0.0, 1.0, (20, 16, 3), dtype)
    observations = batch(space, 2)
    seen = ObservationReader(space).read(observations)["obs"]
    assert seen.dtype == np.float32
    np.testing.assert_array_equal(seen, np.moveaxis(observations, -1, 1).astype(np.float32))
    rows = ObservationReader(space).read_rows(list(observations))["obs"]
    np.testing.assert_array_equal(rows, seen)


def test_flatten_space_names_the_leaf_that_it_refuses():
    with pytest.raises(SpaceError, match=r"'inner/words' is a Text.*Box, Discrete"):
        flatten_space(spaces.Dict({"inner": spaces.Dict({"words": spaces.Text(5)})}))
    with pytest.raises(SpaceError, match="'obs' is a Sequence"):
        flatten_space(spaces.Sequence(spaces.Discrete(3)))
    with pytest.raises(SpaceError, match="no leaves other than 'action_mask'"):
        flatten_space(spaces.Dict({"action_mask": spaces.MultiBinary(2)}))
    match = r"leaf 'obs' is Box.*, whose shape \(0,\) has no elements; a wrapper can drop it"
    with pytest.raises(SpaceError, match=match):
        flatten_space(spaces.Box(-1, 1, (0,)))
    with pytest.raises(SpaceError, match=r"leaf 'a/b' is Box.*\(2, 0\)"):
        flatten_space(spaces.Dict({"a": spaces.Dict({"b": spaces.Box(-1, 1, (2, 0))}), "c": spaces.Discrete(2)}))
    with pytest.raises(SpaceError, match="two leaves"):
        flatten_space(spaces.Dict({"a/b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})}))


def test_action_spaces_start_at_zero():
    assert flatten_action_space(spaces.Discrete(3, start=-1)) == spaces.Discrete(3)
    assert flatten_action_space(spaces.MultiDiscrete([2, 3], start=[1, 0])) == spaces.MultiDiscrete([2, 3])
    assert action_start(spaces.Discrete(3, start=-1)) == -1
    assert action_start(spaces.MultiDiscrete([2, 3], start=[1, 0])).tolist() == [1, 0]
    assert action_start(spaces.Discrete(3)) is None
    assert action_start(spaces.Box(-1, 1, (2,))) is None
    match = r"the action space is Box.*shape \(3, 0\) has no elements; there would be nothing to decide"
    with pytest.raises(SpaceError, match=match):
        flatten_action_space(spaces.Box(-1, 1, (3, 0)))
    with pytest.raises(SpaceError, match="action space is Dict"):
        flatten_action_space(spaces.Dict({"a": spaces.Discrete(2)}))


def test_reader_of_a_plain_box_copies_nothing():
    reader = ObservationReader(spaces.Box(-1, 1, (4,), np.float32))
    array = np.zeros((3, 4), np.float32)
    assert reader.is_plain
    assert reader.read(array)["obs"] is array
    assert reader.mask(array) is None


def test_reader_returns_leaves_that_match_the_flat_space():
    reader, raw = ObservationReader(NESTED), batch(NESTED, 3)
    leaves = reader.read(raw)
    assert set(leaves) == set(reader.space)
    for name, leaf in leaves.items():
        assert leaf.shape == (3, *reader.space[name].shape)
        assert leaf.dtype == reader.space[name].dtype
    np.testing.assert_array_equal(leaves["camera/left"][1, 2], raw["camera"]["left"][1, :, :, 2])
    np.testing.assert_array_equal(leaves["parts/0"], raw["parts"][0] - 2)
    np.testing.assert_array_equal(reader.mask(raw), raw["action_mask"].astype(bool))
    assert reader.mask(raw).dtype == np.bool_


def test_reader_reads_single_observations_as_it_reads_batches():
    reader, raw = ObservationReader(NESTED), batch(NESTED, 2)
    rows = list(gym.vector.utils.iterate(gym.vector.utils.batch_space(NESTED, 2), raw))
    leaves, stacked = reader.read(raw), reader.read_rows(rows)
    for name in leaves:
        np.testing.assert_array_equal(leaves[name], stacked[name])
        assert stacked[name].dtype == reader.space[name].dtype


def test_reader_of_a_plain_discrete_shifts_values_to_start_at_zero():
    reader = ObservationReader(spaces.Discrete(5, start=3))
    assert reader.read(np.array([3, 7]))["obs"].tolist() == [0, 4]
