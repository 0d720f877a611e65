import gymnasium as gym
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode

from pytorchrl.agent.env import VecEnv
from pytorchrl.envs import atari_factory

GAME = "ALE/Breakout-v5"
pytestmark = pytest.mark.xdist_group("atari")  # the tests share the results of `breakout`


@pytest.fixture(scope="module")
def breakout():
    """Return the results of 280 random steps of the same two games in training mode and in test mode."""
    factory = atari_factory(GAME, 2)
    actions = np.random.default_rng(1).integers(0, 4, (280, 2))

    def run(mode, factory=factory):
        env = factory(seed=3, mode=mode)
        env.seeds = [3, 77]
        obs, _ = env.reset()
        steps = [env.step(action) for action in actions]
        env.close()
        return obs["obs"], steps

    return {"train": run("train"), "test": run("test"), "actions": actions, "run": run}


def test_preprocessing_options_have_their_documented_values():
    factory = atari_factory(GAME, 2)
    assert factory.observation_space["obs"].shape == (4, 84, 84)
    assert factory.observation_space["obs"].dtype == np.uint8
    kwargs = factory.options.env_kwargs
    assert kwargs == {
        "repeat_action_probability": 0.0, "noop_max": 30, "use_fire_reset": True, "reward_clipping": False,
        "episodic_life": False, "life_loss_info": False}
    assert atari_factory(GAME, 1, sticky=True).options.env_kwargs["repeat_action_probability"] == 0.25
    assert atari_factory(GAME, 1, env_kwargs={"full_action_space": True}).action_space.n == 18
    env = factory(seed=0)
    assert env.autoreset_mode is AutoresetMode.SAME_STEP
    env.close()


def test_lost_lives_terminate_in_training_only_and_the_game_continues(breakout):
    trained, tested = breakout["train"][1], breakout["test"][1]
    losses = sum(step.terminated.sum() for step in trained)
    games = sum(step.terminated.sum() for step in tested)
    assert losses >= 3 * games >= 3
    for a, b in zip(trained, tested, strict=True):
        np.testing.assert_array_equal(a.obs["obs"], b.obs["obs"])
        np.testing.assert_array_equal(a.final_index, b.final_index)
        np.testing.assert_array_equal(a.first, a.terminated | a.truncated)
        np.testing.assert_array_equal(b.first, b.terminated | b.truncated)
        np.testing.assert_array_equal(a.final_index, np.flatnonzero(b.terminated))
        assert [e[:2] for e in a.episodes] == [e[:2] for e in b.episodes]


def test_lost_lives_match_those_of_ale(breakout):
    envs = AtariVectorEnv(
        "breakout", 2, num_threads=1, life_loss_info=True, reward_clipping=False, autoreset_mode="SameStep")
    envs.reset(seed=np.array([3, 77]))
    for action, step in zip(breakout["actions"], breakout["train"][1], strict=True):
        obs, reward, terminated, _, _ = envs.step(action)
        np.testing.assert_array_equal(obs, step.obs["obs"])
        np.testing.assert_array_equal(terminated, step.terminated)
        np.testing.assert_array_equal(np.sign(reward), step.reward)


def test_an_episode_is_a_whole_game_of_raw_rewards(breakout):
    _, steps = breakout["test"]
    total, length = np.zeros(2), np.zeros(2, int)
    expected = []
    for step in steps:
        total += step.reward
        length += 1
        for e in step.final_index:
            expected.append((total[e], length[e], e))
            total[e] = length[e] = 0
    assert len(expected) >= 2
    episodes = [e for step in steps for e in step.episodes]
    assert [(e.env_return, e.length, e.env_index) for e in episodes] == expected


def test_final_observations_are_the_last_frames_of_the_game(breakout):
    next_step = atari_factory(GAME, 2, autoreset="next_step")(seed=3, mode="test")
    next_step.seeds = [3, 77]
    next_step.reset()
    _, steps = breakout["test"]
    first_end = next(t for t, step in enumerate(steps) if step.final_index.size)
    for action in breakout["actions"][:first_end + 1]:
        last = next_step.step(action)
    index = steps[first_end].final_index
    np.testing.assert_array_equal(last.obs["obs"][index], steps[first_end].final_obs["obs"])
    assert not np.array_equal(last.obs["obs"][index], steps[first_end].obs["obs"][index])
    assert steps[first_end].final_obs["obs"].dtype == np.uint8
    next_step.close()


def test_rewards_match_a_single_environment_with_standard_wrappers():
    options = {"noop_max": 0, "use_fire_reset": False, "repeat_action_probability": 0.0}
    VecEnv.create_factory(GAME)  # importing the module registers the suite
    single = gym.wrappers.AtariPreprocessing(
        gym.make(GAME, frameskip=1, repeat_action_probability=0.0), noop_max=0, frame_skip=4)
    single.reset(seed=0)
    env = atari_factory(GAME, 1, env_kwargs=options)(seed=0, mode="test")
    env.reset()
    total = 0.0
    for action in np.random.default_rng(5).integers(0, 4, 250):
        step = env.step(np.array([action]))
        _, reward, terminated, _, _ = single.step(action)
        total += reward
        assert (step.reward[0], bool(step.terminated[0])) == (reward, terminated)
        if terminated:
            break
    assert total > 0
    env.close()


def test_max_episode_steps_counts_steps_not_frames():
    env = atari_factory("ALE/Pong-v5", 1, max_episode_steps=8, env_kwargs={"noop_max": 0})(seed=0)
    env.reset()
    steps = [env.step(np.array([0])) for _ in range(10)]
    env.close()
    ends = [t + 1 for t, step in enumerate(steps) if step.truncated[0]]
    assert ends == [8]
    assert steps[7].episodes[0].length == 8


def test_runs_are_reproducible_for_any_number_of_threads():
    factory = atari_factory("ALE/Pong-v5", 2, sticky=True)

    def run(**context):
        env = factory(**context)
        env.reset()
        rows = [env.step(np.array([2, 3])).obs["obs"].sum(axis=(1, 2, 3), dtype=np.int64) for _ in range(30)]
        env.close()
        return np.stack(rows)

    first = run(seed=0, num_threads=1)
    np.testing.assert_array_equal(first, run(seed=0, num_threads=2))
    assert not np.array_equal(first, run(seed=0, index_col_worker=1))


def test_a_plain_factory_of_an_atari_id_has_raw_rewards_and_same_step():
    env = VecEnv.create_factory(GAME)(seed=0)
    assert isinstance(env.vector, AtariVectorEnv)
    assert env.autoreset_mode is AutoresetMode.SAME_STEP
    env.close()
