import numpy as np
import pytest
from gymnasium import spaces

from pytorchrl.agent.env.masks import ActionMasks
from pytorchrl.agent.env.spaces import ObservationReader
from pytorchrl.errors import EnvError

OBS = np.zeros((2, 1), np.float32)
GIVEN = np.array([[True, False], [False, False]])
BOTH, NEITHER = np.array([True, True]), np.array([False, False])


def masks(space=None, shows_last=False, has_one_choice=True):
    reader = ObservationReader(space or spaces.Box(0, 1, (1,)))
    actions = spaces.Discrete(2) if has_one_choice else spaces.MultiDiscrete([1, 1])
    return ActionMasks(reader, 2, "worker", shows_last=shows_last, action_space=actions)


def test_masks_in_the_observation_take_precedence_over_info():
    space = spaces.Dict({"x": spaces.Box(0, 1, (1,)), "action_mask": spaces.MultiBinary(2)})
    found = masks(space).reset({"x": OBS, "action_mask": GIVEN.astype(np.int8)}, {"action_mask": ~GIVEN})
    assert found.dtype == np.bool_
    assert found.tolist() == GIVEN.tolist()


def test_first_reset_determines_whether_info_has_masks():
    without = masks()
    assert without.reset(OBS, {}) is None
    assert without.read(OBS, {}) is None
    with pytest.raises(EnvError, match=r"worker: info\['action_mask'\] appeared in a step, but the first reset"):
        without.read(OBS, {"action_mask": GIVEN})
    having = masks()
    assert having.reset(OBS, {"action_mask": GIVEN}).tolist() == GIVEN.tolist()
    for info in ({}, {"action_mask": GIVEN, "_action_mask": np.array([True, False])}):
        with pytest.raises(EnvError, match=r"worker: expected info\['action_mask'\] in every step"):
            having.read(OBS, info)


@pytest.mark.parametrize(("shows_last", "has_one_choice", "truncated", "first_row"), [
    (True, True, NEITHER, [True, True]),    # after termination, the action is ignored
    (True, True, BOTH, [True, False]),      # after truncation, a learner bootstraps with the mask
    (True, False, BOTH, [True, True]),      # with several choices per action, learners do not bootstrap with masks
    (False, True, NEITHER, [True, False]),  # the mask belongs to the first observation of the next episode
])
def test_masks_after_an_end_allow_all_actions_unless_they_are_used(shows_last, has_one_choice, truncated, first_row):
    own = masks(shows_last=shows_last, has_one_choice=has_one_choice)
    own.reset(OBS, {"action_mask": GIVEN})
    found = own.read_at_end(OBS, {"action_mask": GIVEN}, BOTH, truncated)
    assert found.tolist() == [first_row, [True, True] if shows_last else [False, False]]


def test_final_masks_without_an_allowed_action_or_without_a_mask_allow_all():
    own = masks()
    own.reset(OBS, {"action_mask": GIVEN})
    infos = [{"action_mask": GIVEN[0]}, {}]
    found = own.final(None, np.array([0, 1]), lambda index: infos[index])
    assert found.tolist() == [[True, False], [True, True]]
    assert own.final(GIVEN[1:], np.array([], np.int64), infos.__getitem__).tolist() == [[True, True]]
    assert masks().final(None, np.array([0]), infos.__getitem__) is None


def test_masks_of_environments_that_raised_allow_all():
    own = masks()
    own.reset(OBS, {"action_mask": GIVEN})
    info = {"action_mask": GIVEN, "_action_mask": np.array([True, False])}
    own.complete(info, np.array([False, True]))
    assert own.read(OBS, info).tolist() == [[True, False], [True, True]]
    info = {}
    own.complete(info, BOTH)
    assert own.read(OBS, info).tolist() == [[True, True], [True, True]]
