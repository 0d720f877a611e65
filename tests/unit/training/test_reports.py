"""Try what people reported about runs of other libraries; tests/reports.md names the reports."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import multiprocessing
import os
import random
import re
import shutil
import threading
import weakref
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import weight_norm

from pytorchrl import ConfigError, OnPolicyActor, VecEnv, load, train
from pytorchrl.agent.env.spaces import mask_flags
from pytorchrl.analysis.runs import read_curve
from pytorchrl.callbacks import Callback
from pytorchrl.errors import CheckpointError, EnvError, FactoryError, SpaceError, WeightsError

TINY = {"num_envs": 2, "num_steps": 16, "num_epochs": 1, "num_mini_batch": 1, "hidden_sizes": (8,), "progress": False,
        "tensorboard": False}


def weights_of(seed, **options):
    return train("ppo", "CartPole-v1", target_steps=96, seed=seed, **TINY, **options).acting_state


def are_equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def test_trials_in_threads_are_as_reproducible_as_one_after_the_other():
    found = {}
    threads = [threading.Thread(target=lambda seed=seed: found.update({seed: weights_of(seed)})) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(are_equal(found[seed], weights_of(seed)) for seed in range(2))
    assert not are_equal(found[0], found[1])


def test_runs_one_after_the_other_keep_no_files_threads_or_random_state():
    def resources():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), set(threading.enumerate())

    def random_state():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    weights_of(0)
    before, drawn = resources(), random_state()
    for seed in range(3):
        train("ppo", "CartPole-v1", target_steps=32, seed=seed, **TINY).evaluate(1, deterministic=False)
    assert resources() == before
    assert random_state() == drawn


class Reusing(gym.Env):
    """Returns the same array and the same info in every call, and overwrites both."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, is_nested):
        box = gym.spaces.Box(-10, 10, (2,), np.float32)
        self.observation_space = gym.spaces.Dict(a=gym.spaces.Tuple((box, box))) if is_nested else box
        self.array, self.info, self.is_nested = np.zeros(2, np.float32), {}, is_nested

    def reset(self, *, seed=None, options=None):
        return self.show(-7)

    def step(self, action):
        obs, info = self.show(self.number + 1 if self.number > 0 else 1)
        return obs, 1.0, self.number == 3, False, info

    def show(self, number):
        self.number = self.array[:] = self.info["number"] = number
        return ({"a": (self.array, self.array)} if self.is_nested else self.array), self.info


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_the_last_observation_and_info_survive_a_reset_that_overwrites_them(autoreset, is_nested, tmp_path):
    factory = VecEnv.create_factory(Reusing, {"is_nested": is_nested}, 2, autoreset=autoreset, log_dir=str(tmp_path),
                                    info_keywords=("number",))
    envs = factory(seed=0)
    envs.reset()
    step = [envs.step(np.zeros(2, np.int64)) for _ in range(3)][-1]
    last = step.final_obs if autoreset == "same_step" else step.obs
    assert {value for array in last.values() for value in array.ravel().tolist()} == {3.0}
    envs.close()
    (file,) = tmp_path.iterdir()
    assert [line.rpartition(",")[2] for line in file.read_text(encoding="utf-8").splitlines()] == ["number", "3", "3"]


@pytest.mark.parametrize(("inner", "outer", "length"), [(10, 3, 3), (10, None, 10), (10, 50, 10)])
def test_the_shortest_of_nested_time_limits_ends_episodes(inner, outer, length):
    def make():
        return gym.wrappers.TimeLimit(gym.make("Pendulum-v1"), inner)
    agent = train("ppo", make, target_steps=32, max_episode_steps=outer, seed=0, **TINY)
    assert set(agent.evaluate(2).lengths) == {length}


@pytest.mark.parametrize(("options", "message"), [
    ({"replay_size": 7, "num_envs": 3}, "size 7 is less than a rollout of 3 environments x rollout_size 4"),
    ({"replay_size": 8, "mini_batch_size": 64}, None), ({"replay_size": 8, "n_step": 10}, None),
    ({"replay_size": 10, "start_steps": 100}, None)], ids=str)
def test_replays_of_odd_sizes_train_or_are_refused(options, message):
    options = {"num_envs": 1, "start_steps": 4, "mini_batch_size": 4, "hidden_sizes": (8,), **options}

    def run():
        return train("dqn", "CartPole-v1", target_steps=120, seed=0, progress=False, **options)
    if message is None:
        ledger = run().summary["ledger"]
        assert ledger["resident"] <= options["replay_size"]
        assert ledger["collected"] == ledger["resident"] + ledger["evicted"]
    else:
        with pytest.raises(ConfigError, match=message):
            run()


class Small(gym.Env):
    """Five steps of zeros per episode."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)

    def __init__(self, action_space=None):
        self.action_space = action_space or gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.number = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.number += 1
        return np.zeros(3, np.float32), 1.0, self.number == 5, False, {}


REPLAY = {"num_envs": 1, "start_steps": 8, "mini_batch_size": 4, "replay_size": 200, "hidden_sizes": (8,),
          "progress": False}


@contextlib.contextmanager
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("setting", "message"), [
    (float64_by_default, r"default dtype of torch is torch.float64.*call torch.set_default_dtype\(torch.float32\)"),
    (lambda: torch.device("meta"), r"default device of torch is 'meta'.*call torch.set_default_device\('cpu'\)"),
    (torch.no_grad, "gradients are disabled here"), (torch.inference_mode, "gradients are disabled here")],
    ids=["dtype", "device", "no_grad", "inference_mode"])
def test_settings_of_torch_that_prevent_training_are_refused(setting, message):
    with setting(), pytest.raises(ConfigError, match=message):
        weights_of(0)
    weights_of(0)


def test_networks_of_another_precision_are_refused_with_the_remedy():
    with pytest.raises(WeightsError, match=r"'policy.extractor.layer.weight' must be float32, .*; build networks with"):
        trained_with(lambda space: Precise(space).double())
    trained_with(Precise)


class Precise(nn.Module):
    """An extractor of any precision."""

    def __init__(self, space):
        super().__init__()
        self.layer, self.out_features = nn.Linear(3, 8), 8

    def forward(self, obs):
        return self.layer(obs.to(self.layer.weight.dtype)).float()


class Extractor(nn.Module):
    """A linear layer and tanh, with changes that the tests give."""

    def __init__(self, space, wrap=lambda layer: layer, linear=None):
        super().__init__()
        self.layer, self.out_features = wrap(nn.Linear(3, 8) if linear is None else linear(8)), 8

    def forward(self, obs):
        return torch.tanh(self.layer(obs))


class Counting(Small):
    """Its observations count the steps, so they are not only zeros."""

    def step(self, action):
        obs, *others = super().step(action)
        return (obs + np.float32(0.1 * self.number), *others)


def trained_with(extractor, algorithm="ppo", env=Small, **options):
    """Train with a feature extractor; return all that were built, that of the first actor first."""
    built = []

    def build(space):
        built.append(extractor(space))
        return built[-1]
    defaults = TINY if algorithm == "ppo" else REPLAY
    train(algorithm, env, feature_extractor=build, **{"target_steps": 32, "seed": 0, **defaults, **options})
    return built


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_lazy_layers_of_a_feature_extractor_get_their_sizes_and_learn(algorithm):
    lazy = trained_with(functools.partial(Extractor, linear=nn.LazyLinear), algorithm)[0]
    assert lazy.layer.weight.shape == (8, 3)
    assert lazy.layer.bias.abs().max() > 0


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_frozen_layers_of_a_feature_extractor_stay_as_they_are(algorithm):
    """Weight decay would change them, because all parameters are in one vector."""
    def frozen(space):
        extractor = Extractor(space)
        extractor.layer.requires_grad_(False)
        extractor.before = extractor.layer.weight.detach().clone()
        return extractor
    for extractor in trained_with(frozen, algorithm, optimizer="adamw", weight_decay=0.5, lr=0.1):
        assert torch.equal(extractor.layer.weight, extractor.before)


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
@pytest.mark.parametrize("is_outermost", [False, True])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_layers_with_hooks_learn(algorithm, is_outermost):
    """A hook computes the weight of `weight_norm`, which cannot be copied after a pass with gradients."""
    scales = []

    def build(space):
        extractor = weight_norm(nn.Linear(3, 8)) if is_outermost else Extractor(space, weight_norm)
        scales.append((extractor if is_outermost else extractor.layer).weight_g.detach().clone())
        return extractor
    built = trained_with(build, algorithm, env=Counting, target_steps=96)[0]
    assert not torch.equal((built if is_outermost else built.layer).weight_g, scales[0])


@pytest.mark.parametrize(("changes", "message"), [
    ({"__init__": lambda self, space: (Extractor.__init__(self, space), setattr(self, "out_features", 9))[0]},
     r"has out_features=9, so it must return a tensor of shape \(1, 9\), got \(1, 8\)"),
    ({"forward": lambda self, obs: Extractor.forward(self, obs).squeeze(0)}, r"shape \(1, 8\), got \(8,\)"),
    ({"forward": lambda self, obs: [obs]}, "got list"),
    ({"forward": lambda self, obs: Extractor.forward(self, obs.mul_(2))}, "changes obs in place")],
    ids=["size", "squeeze", "list", "in place"])
def test_a_feature_extractor_is_tried_before_anything_starts(changes, message):
    with pytest.raises(ConfigError, match=message):
        trained_with(type("Own", (Extractor,), changes))


class FromFile(Extractor):
    """Reads its weights from a file."""

    path: ClassVar[Path]

    def __init__(self, space):
        super().__init__(space)
        self.layer.load_state_dict(torch.load(FromFile.path))


def test_weights_that_a_feature_extractor_no_longer_finds_are_named(tmp_path):
    FromFile.path = tmp_path / "weights.pt"
    torch.save(nn.Linear(3, 8).state_dict(), FromFile.path)
    train("ppo", Small, target_steps=32, log_dir=tmp_path / "run", feature_extractor=FromFile, **TINY)
    assert load(tmp_path / "run").evaluate(1).return_mean == 5.0
    FromFile.path.unlink()
    with pytest.raises(FileNotFoundError):  # errors of the user's own code are shown as they are
        train("ppo", Small, feature_extractor=FromFile, **TINY)
    with pytest.raises(CheckpointError, match=r"describes cannot be built: FileNotFoundError: .*weights\.pt"):
        load(tmp_path / "run")


@pytest.mark.parametrize(("shape", "remedy"), [
    ((32, 24), "ReshapeObservation"), ((4, 20, 20, 3), "frame_stack"), ((32, 15), None), ((2, 3, 4, 5), None)])
def test_bytes_with_too_few_or_too_many_axes_for_an_image_are_named(shape, remedy, recwarn):
    space = gym.spaces.Box(0, 255, shape, np.uint8)
    OnPolicyActor.create_factory(space, gym.spaces.Discrete(2))
    found = [str(warning.message) for warning in recwarn]
    assert [remedy in text for text in found] == ([] if remedy is None else [True])
    OnPolicyActor.create_factory(space, gym.spaces.Discrete(2), feature_extractor="mlp")
    assert len(recwarn) == len(found)


class Changing(Small):
    """Replaces one of its spaces when the second episode begins."""

    def __init__(self, name, first, second):
        super().__init__()
        self.name, self.second, self.episodes = name, second, 0
        setattr(self, name, first)

    def reset(self, *, seed=None, options=None):
        self.number, self.episodes = 0, self.episodes + 1
        if self.episodes == 2:
            setattr(self, self.name, self.second)
        return self.observation_space.sample(), {}

    def step(self, action):
        _, *others = super().step(action)
        return self.observation_space.sample(), *others


def box(bound=1.0, size=3):
    return gym.spaces.Box(-bound, bound, (size,), np.float32)


@pytest.mark.parametrize("on_env_error", ["raise", "restart"])
@pytest.mark.parametrize(("name", "first", "second"), [
    ("action_space", gym.spaces.Discrete(2), gym.spaces.Discrete(1)), ("action_space", box(), box(0.5)),
    ("observation_space", box(), box(size=4)),
    ("observation_space", gym.spaces.Dict(a=box()), gym.spaces.Dict(a=box(), b=box())),
    ("observation_space", gym.spaces.Tuple((box(), gym.spaces.Discrete(2))),
     gym.spaces.Tuple((box(), gym.spaces.Discrete(3))))], ids=str)
def test_spaces_that_change_between_episodes_are_refused(name, first, second, on_env_error):
    env = {"name": name, "first": first, "second": second}
    with pytest.raises(EnvError, match=rf"reset: the environment has changed its {name} from .* masks"):
        train("ppo", Changing, env_kwargs=env, target_steps=64, on_env_error=on_env_error, **TINY)


@pytest.mark.parametrize(("name", "first", "second"), [
    ("action_space", box(), box()), ("observation_space", box(), box(5.0)),
    ("observation_space", gym.spaces.Dict(a=gym.spaces.Tuple((box(),))),
     gym.spaces.Dict(a=gym.spaces.Tuple((box(2.0),))))], ids=["equal", "bounds", "nested bounds"])
def test_spaces_may_be_replaced_by_equal_ones_and_bounds_of_observations_may_change(name, first, second):
    env = {"name": name, "first": first, "second": second}
    assert train("ppo", Changing, env_kwargs=env, target_steps=64, **TINY).summary["return_mean"] == 5.0


def test_functions_and_wrappers_that_return_no_environment_are_named():
    def forgets(env):
        gym.wrappers.TimeLimit(env, 3)
    with pytest.raises(FactoryError, match=r"got NoneType from .*forgets; end it with `return env`"):
        train("ppo", Small, wrappers=(forgets,), **TINY)
    with pytest.raises(FactoryError, match=r"got .*Small from .*, which is a class: return an environment, Small\(\)"):
        train("ppo", lambda: Small, **TINY)


def test_act_refuses_the_tuple_of_reset_and_observations_that_are_not_finite():
    agent = train("ppo", Small, target_steps=32, **TINY)
    env = Small()
    with pytest.raises(ConfigError, match="got the tuple that reset or step returns; pass its first item"):
        agent.act(env.reset())
    with pytest.raises(ConfigError, match="got the tuple"):
        agent.act(env.step(0))
    with pytest.raises(ConfigError, match="got a list of parts with different lengths"):
        agent.act([[0.0, 0.0], [0.0]])
    with pytest.raises(ConfigError, match="does not fit the observation space; env 0: obs is nan"):
        agent.act(np.array([0.0, np.nan, 0.0]))
    assert agent.act(env.reset()[0]) in (0, 1)


class Masked(Small):
    """States the masks of two components as two lists, in the method of sb3-contrib."""

    def __init__(self, masks):
        super().__init__(gym.spaces.MultiDiscrete([3, len(masks[1])]))
        self.masks, self.played = masks, set()

    def action_masks(self):
        return self.masks

    def step(self, action):
        assert all(mask[part] for mask, part in zip(self.masks, action, strict=True))
        return super().step(action)


@pytest.mark.parametrize("masks", [[[1, 0, 1], [0, 1]], [[1, 0, 1], [0, 1, 1]]], ids=["ragged", "rectangular"])
def test_the_masks_of_components_are_joined(masks):
    agent = train("ppo", Masked, env_kwargs={"masks": masks}, target_steps=96, **TINY)
    assert agent.evaluate(2, deterministic=False).return_mean == 5.0


def test_ragged_masks_in_info_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"parts of different lengths; return one array .* one after the other"):
        mask_flags([[[1, 0, 1], [0, 1]]], gym.spaces.MultiDiscrete([3, 2]))
    assert mask_flags([[1, 0, 1, 0, 1]], gym.spaces.MultiDiscrete([3, 2])).tolist() == [[1, 0, 1, 0, 1]]


def test_paths_and_devices_may_be_objects(tmp_path):
    weights_of(0, log_dir=tmp_path / "run")
    first = weights_of(0, device=torch.device("cpu"), checkpoint=tmp_path / "run" / "model.pt")
    assert are_equal(first, weights_of(0, device="cpu", checkpoint=str(tmp_path / "run" / "model.pt")))


def test_a_checkpoint_is_not_taken_for_a_model(tmp_path):
    weights_of(0, log_dir=tmp_path, checkpoint_every=48)
    (checkpoint, *_) = (tmp_path / "checkpoints").iterdir()
    with pytest.raises(CheckpointError, match=r"is a checkpoint of a run, and not a model; give the file model\.pt"):
        weights_of(0, checkpoint=str(checkpoint))
    weights_of(0, checkpoint=str(tmp_path / "model.pt"))
    with pytest.raises(CheckpointError, match=re.escape(f"name the directory of the run, '{tmp_path}'")):
        load(checkpoint)
    with pytest.raises(CheckpointError, match=r"no model .*model\.pt\.pt'; give its name without \.pt"):
        load(tmp_path, model="model.pt")


def test_a_directory_that_is_removed_during_a_run_is_made_again(tmp_path, caplog):
    class Removes(Callback):
        def on_step(self, run, info):
            if run.env_steps == 64:
                shutil.rmtree(tmp_path / "run")
    train("ppo", "CartPole-v1", target_steps=160, log_dir=tmp_path / "run", log_every=32, seed=0,
          callbacks=[Removes()], **TINY)
    assert "run.json was removed during the run, and is written again" in caplog.text
    records = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(records[-1])["env_steps"] == 160
    assert load(tmp_path / "run").evaluate(1).return_mean > 0


def test_a_run_without_episodes_is_plotted_neither_silently_nor_with_a_list_of_all_numbers(tmp_path):
    train("ppo", Endless, target_steps=64, log_dir=tmp_path, seed=0, **TINY)
    with pytest.raises(ConfigError, match=r"because no episode has ended; .* train with max_episode_steps$"):
        read_curve(tmp_path, "env_steps", "return_mean")
    with pytest.raises(ConfigError, match=r"it has .*algorithm/loss.* and others$") as error:
        read_curve(tmp_path, "env_steps", "algorithm/lost")
    assert len(str(error.value)) < 400


class Endless(Small):
    """Its episodes never end."""

    def step(self, action):
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, False, truncated, info


def test_processes_of_environments_are_refused_in_a_daemonic_process(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    with pytest.raises(ConfigError, match=r"daemonic, as those of multiprocessing\.Pool are.*use backend='sync'"):
        train("ppo", "CartPole-v1", backend="async", **TINY)
    weights_of(0, backend="sync")


class Filming(Small):
    """Returns a new array in the info of each step, and remembers which of them are still alive."""

    frames: ClassVar[list[weakref.ref[np.ndarray]]] = []

    def step(self, action):
        *result, _ = super().step(action)
        frame = np.zeros(10)
        Filming.frames.append(weakref.ref(frame))
        return *result, {"frame": frame}


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_arrays_in_infos_are_not_kept(algorithm):
    agent = train(algorithm, Filming, target_steps=96, seed=0, **(TINY if algorithm == "ppo" else REPLAY))
    assert agent.evaluate(3).lengths == (5, 5, 5)
    gc.collect()
    assert len(Filming.frames) > 100
    assert not any(frame() is not None for frame in Filming.frames)
    Filming.frames.clear()


@pytest.mark.parametrize("algorithm", ["ppo", "dqn", "sac"])
def test_arithmetic_of_numpy_that_raises_errors_does_not_disturb(algorithm):
    """Gradients of dead units underflow, and bounds of spaces overflow, without being mistakes."""
    with np.errstate(all="raise"):
        space = gym.spaces.Box(-1, 1, (2,), np.float32) if algorithm == "sac" else None
        train(algorithm, Small, env_kwargs={"action_space": space}, target_steps=48,
              **{**(TINY if algorithm == "ppo" else REPLAY), "normalize_obs": True})


def test_an_evaluation_in_other_environments_needs_a_factory_and_equal_spaces():
    agent = train("ppo", Small, target_steps=32, **TINY)
    for wrong in ("CartPole-v1", Small(), Small):
        with pytest.raises(ConfigError, match=r"envs must be a factory of environments, got .*; give VecEnv\.create_f"):
            agent.evaluate(1, envs=wrong)
    with pytest.raises(SpaceError, match=r"action_space differs: the agent was trained with Discrete.2., envs have D"):
        agent.evaluate(1, envs=VecEnv.create_factory(Small, {"action_space": gym.spaces.Discrete(3)}))
    with pytest.raises(SpaceError, match=r"observation_space differs.*; give environments with equal spaces"):
        agent.evaluate(1, envs=VecEnv.create_factory("CartPole-v1"))
    assert agent.evaluate(1, envs=VecEnv.create_factory(Small)).return_mean == 5.0
    wider = {"name": "observation_space", "first": box(9.0), "second": box(9.0)}
    assert agent.evaluate(1, envs=VecEnv.create_factory(Changing, wider)).return_mean == 5.0
