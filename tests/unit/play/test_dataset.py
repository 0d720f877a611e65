"""Tests of data sets: they contain exactly the played steps, and damaged or hostile files are refused."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import os
import zipfile

import gymnasium as gym
import numpy as np
import pytest

import pytorchrl as prl
from pytorchrl.agent.dataset import checksum
from pytorchrl.cli import dataset as command
from pytorchrl.cli import main
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.play.dataset import Dataset, read_dataset, record_dataset
from tests.unit.learner.small_agents import AGENTS, TINY, agent_of, make_env

SINGLE = [name for name in AGENTS if name != "independent"]
SHORT = ["ppo", "ppo-images", "ppo-mixed", "ppo-gru"]


@pytest.fixture
def minari(tmp_path, monkeypatch):
    pytest.importorskip("h5py")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return pytest.importorskip("minari")


def arrays_of(data):
    """Return name -> array of a data set, with the leaves of observations."""
    return {**{field.name: getattr(data, field.name) for field in dataclasses.fields(Dataset)[2:-1]},
            **{f"observations/{leaf}": array for leaf, array in data.observations.items()},
            **{f"final_observations/{leaf}": array for leaf, array in data.final_observations.items()}}


def assert_equal(one, other):
    assert one.env == other.env
    first, second = arrays_of(one), arrays_of(other)
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert (array.dtype, array.shape) == (second[name].dtype, second[name].shape), name
        assert array.tobytes() == second[name].tobytes(), name


def leaves_of(obs, path=()):
    """Return leaf name -> value of a nested observation."""
    if not isinstance(obs, dict):
        return {"/".join(path) or "obs": obs}
    return {name: value for key, child in obs.items() for name, value in leaves_of(child, (*path, key)).items()}


def replay(env, data):
    """Play the recorded actions, and check that everything that the environment returns equals the data set."""
    for index, (start, length) in enumerate(zip(data.starts, data.lengths, strict=True)):
        obs, _ = env.reset(seed=int(data.seeds[index]))
        for step in range(start, start + length):
            found = leaves_of(obs)
            assert found.keys() == data.observations.keys()
            for leaf, value in found.items():
                assert np.array_equal(value, data.observations[leaf][step])
            obs, reward, terminated, truncated, _ = env.step(data.actions[step])
            assert (reward, terminated, truncated) == (
                data.rewards[step], data.terminations[step], data.truncations[step])
        for leaf, value in leaves_of(obs).items():
            assert np.array_equal(value, data.final_observations[leaf][index])


@pytest.mark.parametrize("name", SINGLE)
def test_a_file_contains_what_the_environment_returns_for_the_recorded_actions(name, tmp_path):
    recorded = record_dataset(agent_of(name), tmp_path / "new" / "data.npz", num_episodes=2)
    data = read_dataset(tmp_path / "new" / "data.npz")
    assert_equal(recorded, data)
    assert len(data.lengths) == 2
    assert data.seeds[0] != data.seeds[1]
    replay(make_env(name), data)


@pytest.mark.parametrize("name", [*SHORT, "sac"])
def test_minari_returns_the_same_arrays(name, minari):
    recorded = record_dataset(agent_of(name), "tests/data-v0", num_episodes=2)
    assert_equal(recorded, read_dataset("tests/data-v0"))
    loaded = minari.load_dataset("tests/data-v0")
    spaces = agent_of(name).agent.test_envs_factory.raw_spaces
    assert (loaded.observation_space, loaded.action_space) == (spaces.observation, spaces.action)
    assert loaded.total_steps == len(recorded.rewards)


@pytest.mark.parametrize("name", ["ppo", "ppo-gru", "ppo-continuous"])
def test_the_actions_are_the_best_actions_of_the_agent(name, tmp_path):
    agent = agent_of(name)
    data = record_dataset(agent, tmp_path / "data.npz", num_episodes=1)
    memory = None
    for obs, action in zip(data.observations["obs"], data.actions, strict=True):
        chosen = agent.act(obs, memory)
        chosen, memory = chosen if name == "ppo-gru" else (chosen, None)
        assert np.allclose(chosen, action, atol=1e-6)


def test_equal_seeds_write_equal_files(tmp_path):
    agent = agent_of("ppo")
    for name, options in (("a", {"seed": 5}), ("b", {"seed": 5}), ("c", {"seed": 6}), ("d", {}), ("e", {"seed": 3})):
        record_dataset(agent, tmp_path / f"{name}.npz", num_episodes=2, deterministic=False, **options)
    files = {path.stem: path.read_bytes() for path in tmp_path.iterdir()}
    assert files["a"] == files["b"]
    assert files["d"] == files["e"]  # 3 is the seed of the experiment
    assert len(set(files.values())) == 3


def test_sampled_actions_are_recorded_if_requested(tmp_path):
    best, drawn = (record_dataset(agent_of("ppo"), tmp_path / f"{best}.npz", num_episodes=1, deterministic=best)
                   for best in (True, False))
    assert best.seeds == drawn.seeds
    assert best.actions.tolist() != drawn.actions.tolist()


def test_stacked_frames_and_truncations_are_recorded(tmp_path):
    agent = prl.train("ppo", "Pendulum-v1", target_steps=0, frame_stack=3, max_episode_steps=7, **TINY)
    data = record_dataset(agent, tmp_path / "data.npz", num_episodes=2)
    assert data.observations["obs"].shape == (14, 9)
    assert np.flatnonzero(data.truncations).tolist() == [6, 13]
    assert not data.terminations.any()
    following = data.next_observations()
    assert np.array_equal(following[:6], data.observations["obs"][1:7])
    assert np.array_equal(following[[6, 13]], data.final_observations["obs"])
    assert data.returns.tolist() == pytest.approx([data.rewards[:7].sum(), data.rewards[7:].sum()])


def test_games_are_recorded_as_the_policy_sees_them(tmp_path):
    pytest.importorskip("ale_py")
    agent = prl.train("ppo", "ALE/Pong-v5", target_steps=0, max_episode_steps=6, num_envs=1, progress=False, seed=1)
    data = record_dataset(agent, tmp_path / "data.npz", num_episodes=1)
    assert data.observations["obs"].shape == (len(data.rewards), 4, 84, 84)
    assert data.observations["obs"].dtype == np.uint8
    assert [int(agent.act(obs)) for obs in data.observations["obs"]] == data.actions.tolist()


class Reusing(gym.Env):
    """An environment that returns the same array at each step, with other numbers."""

    observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = np.zeros(2, np.float32)
        return self.obs, {}

    def step(self, action):
        self.obs += 1
        return self.obs, 1.0, bool(self.obs[0] == 4), False, {}


def test_observations_whose_memory_is_reused_are_copied(tmp_path):
    data = record_dataset(prl.train("ppo", Reusing, target_steps=0, **TINY), tmp_path / "data.npz", num_episodes=1)
    assert data.observations["obs"][:, 0].tolist() == [0, 1, 2, 3]
    assert data.final_observations["obs"].tolist() == [[4, 4]]


def test_each_episode_is_reported(tmp_path):
    calls = []
    data = record_dataset(agent_of("ppo"), tmp_path / "data.npz", num_episodes=3,
                          on_episode=lambda episodes, steps: calls.append((episodes, steps)))
    assert calls == list(enumerate(np.cumsum(data.lengths).tolist(), 1))


def test_an_existing_data_set_is_replaced_only_if_requested(tmp_path, minari):
    for name in (tmp_path / "data.npz", "tests/data-v0"):
        record_dataset(agent_of("ppo"), name, num_episodes=1)
        with pytest.raises(ConfigError, match="already exists; choose another name or set overwrite=True"):
            record_dataset(agent_of("ppo"), name, num_episodes=2)
        assert len(read_dataset(name).lengths) == 1
        record_dataset(agent_of("ppo"), name, num_episodes=2, overwrite=True)
        assert len(read_dataset(name).lengths) == 2


@pytest.mark.parametrize(("path", "text"), [
    ("data.hdf5", "suffix '.npz'"), ("x/../data", "nor an id of Minari"), ("folder.npz", "already exists"),
    ("file/data.npz", "cannot be written")])
def test_a_wrong_path_is_refused_before_playing(path, text, tmp_path, monkeypatch, minari):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(prl.TrainedAgent, "evaluate", None)
    with pytest.raises(ConfigError, match=text):
        record_dataset(agent_of("ppo"), path, overwrite=True)


@pytest.mark.parametrize(("options", "text"), [
    ({"num_episodes": 0}, "whole number >= 1, got 0"), ({"seed": -1}, "seed must be")])
def test_wrong_options_are_refused(options, text, tmp_path):
    with pytest.raises(ConfigError, match=text):
        record_dataset(agent_of("ppo"), tmp_path / "data.npz", **options)
    assert list(tmp_path.iterdir()) == []


def test_several_agents_are_refused(tmp_path):
    pytest.importorskip("mpe2")
    with pytest.raises(ConfigError, match="only single-agent environments"):
        record_dataset(agent_of("independent"), tmp_path / "data.npz")


def test_missing_minari_is_named(monkeypatch):
    def fail(name):
        raise ImportError(name)
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ConfigError, match=r"does not end in '\.npz' .*extra `offline`: pip install"):
        read_dataset("tests/data-v0")


# ---- hostile and damaged files


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("written") / "data.npz"
    record_dataset(agent_of("ppo"), path, num_episodes=3)
    return path


def changed(path, written, compression=zipfile.ZIP_STORED, **arrays):
    """Write a copy of a data set with other arrays; `None` removes an array, bytes replace a whole member."""
    with np.load(written) as found:
        entries = {**found, **arrays}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, array in entries.items():
            if array is not None:
                content = io.BytesIO()
                if not isinstance(array, bytes):
                    np.save(content, array, allow_pickle=True)
                archive.writestr(f"{name}.npy", array if isinstance(array, bytes) else content.getvalue())
    return path


class Exploit:
    def __reduce__(self):
        return os.mkdir, ("exploited",)


def header(shape, descr="<f8"):
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": descr, "fortran_order": False, "shape": shape})
    return content.getvalue()


def test_an_unchanged_copy_is_read(written, tmp_path):
    assert_equal(read_dataset(changed(tmp_path / "copy.npz", written)), read_dataset(written))


@pytest.mark.parametrize("change", [
    lambda found: {"terminations": found["truncations"], "truncations": found["terminations"]},
    lambda found: {"rewards": found["rewards"] + 1}, lambda found: {"env": np.array("Other-v0")},
    lambda found: {"rewards": found["rewards"].reshape(-1, 1)}, lambda found: {"seeds": None},
    lambda found: {"more": np.zeros(3)}, lambda found: {"sha256": None}, lambda found: {"sha256": np.array("0" * 64)}])
def test_arrays_that_were_changed_or_exchanged_are_refused(change, written, tmp_path):
    with np.load(written) as found:
        path = changed(tmp_path / "copy.npz", written, **change(found))
    with pytest.raises(CheckpointError, match=r"copy\.npz' is not a readable data set: its arrays (differ|must be)"):
        read_dataset(path)


@pytest.mark.parametrize(("arrays", "text"), [
    ({"actions": np.array([Exploit()], dtype=object)}, "must contain"),
    ({"rewards": header((10**15,)) + bytes(80)}, "must contain 8,000,000,000,000,000 bytes"),
    ({"rewards": header((10**15,), "|V0")}, "must contain"),
    ({"rewards": header((-1, -8)) + bytes(64)}, "must contain"),
    ({"rewards": b"\x93NUMPY\x01\x00\x04\x00((((" + bytes(64)}, "not a readable data set"),
    ({"rewards": b"nothing"}, "magic string"),
    ({"rewards": b""}, "EOF|reading magic"),
    ({"format": np.array(3)}, "format 3, expected 1"),
    ({"format": None}, "format 0, expected 1"),
    ({"rewards": None}, "its arrays must be"),
    ({"more": np.zeros(3)}, "its arrays must be"),
    ({"rewards": np.zeros(5)}, r"\(5,\)"),
    ({"rewards": np.zeros((3, 3))}, "rewards must have the shape"),
    ({"rewards": np.array(1.0)}, "rewards must have the shape"),
    ({"lengths": np.array([1, 2, 3])}, "lengths must be at least 1 and add up"),
    ({"lengths": np.array([2**62, 2**62, 2**62])}, "lengths must be at least 1 and add up"),
    ({"lengths": np.zeros(0, np.int64), "seeds": np.zeros(0, np.int64),
      "final_observations/obs": np.zeros((0, 4), np.float32)}, "lengths must be at least 1"),
    ({"seeds": np.array([1.0, 2.0, 3.0])}, "seeds must have the shape"),
    ({"actions": np.array(["a"] * 3)}, "actions must have the shape"),
    ({"observations/obs": None}, "must have the same leaves"),
    ({"final_observations/obs": np.zeros((3, 5), np.float32)}, "final_observations 'obs' must have"),
    ({"final_observations/obs": np.zeros((3, 4))}, "final_observations 'obs' must have"),
])
def test_a_changed_file_is_refused(arrays, text, written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with np.load(written) as found:
        entries = {**found, **arrays}
    hashed = {name: array for name, array in entries.items()
              if isinstance(array, np.ndarray) and array.dtype != object and name != "sha256"}
    path = changed(tmp_path / "copy.npz", written, **arrays, sha256=np.array(checksum(hashed)))
    with pytest.raises(CheckpointError, match=text) as raised:
        read_dataset(path)
    assert "copy.npz" in str(raised.value)
    assert not (tmp_path / "exploited").exists()


def test_numbers_that_are_not_finite_and_names_that_cannot_be_printed_are_refused(written, tmp_path):
    data = read_dataset(written)
    bad = data.rewards.copy()
    bad[3] = np.nan
    leaf = data.observations["obs"].astype(np.float32)
    leaf[2, 1] = np.inf
    final = np.full_like(data.final_observations["obs"], np.nan)
    for change, text in (
            ({"rewards": bad}, r"rewards must be finite, got nan at \[3\]"),
            ({"observations": {"obs": leaf}}, r"observations 'obs' must be finite, got inf at \[2, 1\]"),
            ({"final_observations": {"obs": final}}, r"final_observations 'obs' must be finite, got nan at \[0, 0\]"),
            ({"actions": np.full(len(bad), np.nan)}, "actions must be finite"),
            ({"env": "\x1b[2JCartPole-v1"}, r"names must consist of printable characters, got '\\x1b"),
            ({"observations": {"a\n": leaf}, "final_observations": {"a\n": final}}, "printable characters")):
        with pytest.raises(ConfigError, match=text):
            dataclasses.replace(data, **change)
    with np.load(written) as found:
        hashed = {name: array for name, array in {**found, "rewards": bad}.items() if name != "sha256"}
    with pytest.raises(CheckpointError, match="rewards must be finite"):
        read_dataset(changed(tmp_path / "nan.npz", written, rewards=bad, sha256=np.array(checksum(hashed))))


def test_an_episode_without_an_end_is_refused(written):
    data = read_dataset(written)
    with pytest.raises(ConfigError, match="must be a termination or a truncation"):
        dataclasses.replace(data, terminations=np.zeros_like(data.terminations))


def test_a_compressed_file_is_refused(written, tmp_path):
    bomb = changed(tmp_path / "copy.npz", written, compression=zipfile.ZIP_DEFLATED, rewards=np.zeros(10**6))
    assert bomb.stat().st_size < 100_000
    with pytest.raises(CheckpointError, match="must not be compressed"):
        read_dataset(bomb)


def test_every_damaged_file_is_refused(written, tmp_path):
    """Check that a file is refused if its end is missing, and that a changed bit is found in all arrays."""
    content, path = written.read_bytes(), tmp_path / "data.npz"
    for size in (0, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match="not a readable data set"):
            read_dataset(path)
    with zipfile.ZipFile(written) as archive:
        members = [(member.header_offset, member.file_size) for member in archive.infolist()]
    for offset, size in members:
        damaged = bytearray(content)
        damaged[offset + size // 2 + 120] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="not a readable data set"):
            read_dataset(path)


def test_files_of_other_kinds_are_refused(tmp_path, minari):
    os.mkfifo(tmp_path / "pipe.npz")
    (tmp_path / "folder.npz").mkdir()
    for name, text in (("pipe.npz", "not a regular file"), ("folder.npz", "irectory"), ("none.npz", "No such file")):
        with pytest.raises(CheckpointError, match=text):
            read_dataset(tmp_path / name)
    with pytest.raises(CheckpointError, match="no local data set 'tests/none-v0'"):
        read_dataset("tests/none-v0")


def test_a_damaged_data_set_of_minari_is_refused(minari, tmp_path):
    record_dataset(agent_of("ppo"), "tests/data-v0", num_episodes=1)
    (file,) = (tmp_path / "minari").rglob("*.hdf5")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="not a readable data set"):
        read_dataset("tests/data-v0")


# ---- command line


def test_the_command_writes_a_data_set(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "_INTERVAL_S", 0.0)
    prl.train("ppo", "CartPole-v1", target_steps=64, log_dir=tmp_path / "run", **TINY)
    out = tmp_path / "data.npz"
    arguments = ["dataset", str(tmp_path / "run"), "--out", str(out), "--episodes", "2", "--seed", "4"]
    assert main(arguments) == 0
    printed, data = capsys.readouterr(), read_dataset(out)
    assert f"2 episodes, {len(data.rewards):,} steps, mean return {data.returns.mean():.2f}" in printed.out
    assert f"1 of 2 episodes, {data.lengths[0]} steps\n" in printed.err
    assert main(arguments) == 2
    assert "already exists" in capsys.readouterr().err
    assert main([*arguments, "--overwrite", "--stochastic"]) == 0
    assert_equal(record_dataset(prl.load(tmp_path / "run"), tmp_path / "other.npz", num_episodes=2, seed=4,
                                deterministic=False), read_dataset(out))
    assert json.loads((tmp_path / "run" / "run.json").read_text())  # the run is unchanged


def test_an_environment_that_fails_leaves_no_file(tmp_path):
    agent = prl.train("ppo", "CartPole-v1", target_steps=0, **TINY)

    class Broken(gym.Wrapper):
        def step(self, action):
            raise RuntimeError("the simulator is gone")
    options = dataclasses.replace(agent.agent.test_envs_factory.options, wrappers=(Broken,))
    agent.agent = dataclasses.replace(
        agent.agent, test_envs_factory=dataclasses.replace(agent.agent.test_envs_factory, options=options))
    with pytest.raises(prl.PyTorchRLError, match="the simulator is gone"):
        record_dataset(agent, tmp_path / "data.npz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::UserWarning")  # Minari misses descriptions
def test_an_episode_of_minari_without_an_end_is_truncated_and_an_early_end_refused(minari):
    def stored(name, terminations):
        observations = np.arange(8, dtype=np.float32).reshape(4, 2) / 8
        episodes = [minari.data_collector.EpisodeBuffer(
            id=index, seed=None, observations=observations, actions=[0, 1, 0], rewards=[1.0, 2.0, 3.0],
            terminations=ends, truncations=[False] * 3) for index, ends in enumerate(terminations)]
        minari.create_dataset_from_buffers(
            name, episodes, observation_space=gym.spaces.Box(0, 1, (2,)), action_space=gym.spaces.Discrete(2))
        return read_dataset(name)
    found = stored("cut-v0", [[False] * 3, [False, False, True]])
    assert found.lengths.tolist() == [3, 3]
    assert found.terminations.tolist() == [False] * 5 + [True]
    assert found.truncations.tolist() == [False, False, True] + [False] * 3
    np.testing.assert_array_equal(found.final_observations["obs"], [[0.75, 0.875]] * 2)
    with pytest.raises(CheckpointError, match="the last step of each episode, and no other step"):
        stored("early-v0", [[False, True, True]])
