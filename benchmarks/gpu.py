"""Measure training on a GPU beside plain PyTorch loops and Stable-Baselines3 on the same GPU.

    python benchmarks/gpu.py [--tasks ppo-pong,sac-halfcheetah] [--seconds 20] [--device cuda:0] [--collectors 4]
    python benchmarks/gpu.py --minutes 5
    python benchmarks/gpu.py --device cpu --tiny

| task | what is measured |
|---|---|
| `ppo-pong`, `ppo-cartpole` | 8 environments x 128 steps, 4 epochs x 4 minibatches; the Nature CNN or an MLP of 64-64 |
| `sac-halfcheetah` | one environment, one update of 256 transitions per env step, networks of 256-256 |
| `impala-pong` | collection workers in processes of their own fill the sample queue, the learner empties it |
| `learner-pong` | updates of PPO with one batch of 256 images, without environments |

Rates are env steps per second, and updates per second for `learner-pong`. Each task has one row with these columns:
this library without options for speed, with `compile=True`, and with `compile=True` and `mixed_precision=True`; a loop
that is written directly in PyTorch, with the same environments, networks and sizes of batches; Stable-Baselines3, if it
is installed. A column that does not exist for a task is null. Both loops and Stable-Baselines3 use float32.

Each measurement runs in its own process, and does not include start-up, compilation and the first updates. The script
prints one line after each measurement, and one JSON object at the end. It asserts nothing.

With `--minutes`, everything ends within this time, start-up and compilation included. Each measurement may take an
equal share of the time that is left, and is ended afterwards. The default is then to measure fewer tasks, and not
Stable-Baselines3. `left_out` names the measurements that failed or were not made, with the reasons. `learner-pong` and
`ppo-cartpole` need only Gymnasium; the other tasks on Pong need ale-py, and `sac-halfcheetah` needs MuJoCo.

`--tiny` uses small sizes, to try the script on a machine without a GPU, and `--emulated` uses the GPU of
`tests/emulated_gpu`, which computes on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import print_result

OURS: dict[str, dict[str, Any]] = {
    "eager": {}, "compile": {"compile": True}, "compile_bfloat16": {"compile": True, "mixed_precision": True}}
COLUMNS = (*OURS, "plain", "stable_baselines3")
TASKS = ("ppo-pong", "ppo-cartpole", "sac-halfcheetah", "impala-pong", "learner-pong")
# The default with `--minutes`.
BRIEF_TASKS, BRIEF_COLUMNS = ("learner-pong", "sac-halfcheetah"), COLUMNS[:-1]
# Task or column -> the module that it needs besides Gymnasium.
NEEDS = {"ppo-pong": "ale_py", "impala-pong": "ale_py", "sac-halfcheetah": "mujoco",
         "stable_baselines3": "stable_baselines3"}
SECONDS = 20.0
# Part of the time of one measurement in which rates are measured; the rest is for start-up and compilation.
MEASURED = 1 / 6
RATES = {"learner-pong": "updates per second"}


@dataclass(frozen=True)
class Sizes:
    """Sizes of all tasks."""

    num_envs: int = 8
    num_steps: int = 128
    num_epochs: int = 4
    num_mini_batch: int = 4
    start_steps: int = 1000
    replay_size: int = 100_000
    replay_batch: int = 256
    learner_batch: int = 256
    warm_up_updates: int = 32


FULL = Sizes()
TINY = Sizes(num_envs=2, num_steps=8, num_epochs=1, num_mini_batch=2, start_steps=20, replay_size=1000, replay_batch=16,
             learner_batch=8, warm_up_updates=4)


def spaces_of_images() -> tuple[Any, Any]:
    """Return the observation space and the action space of `learner-pong`, which has no environment."""
    import numpy as np
    from gymnasium.spaces import Box, Discrete

    return Box(0, 255, (4, 84, 84), np.uint8), Discrete(6)


def environments(task: str, num_envs: int) -> Any:
    """Return the factory of a task's environments."""
    from pytorchrl import VecEnv
    from pytorchrl.envs import atari_factory

    if task.endswith("pong"):
        return atari_factory("ALE/Pong-v5", num_envs)
    return VecEnv.create_factory({"ppo-cartpole": "CartPole-v1", "sac-halfcheetah": "HalfCheetah-v5"}[task],
                                 vec_env_size=1 if task.startswith("sac") else num_envs)


def space_of(factory: Any) -> Any:
    """Return the observation space, which has only one leaf."""
    return factory.observation_space["obs"]


def rate(counts: Iterator[int], warm_up: int, seconds: float, device: str) -> float:
    """Return the sum of `counts` per second, without the first `warm_up` items."""
    import torch

    def synchronize() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)
    for _ in range(warm_up):
        next(counts)
    synchronize()
    total, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        total += next(counts)
    synchronize()
    return total / (time.perf_counter() - start)


# This library


def ours(task: str, column: str, options: argparse.Namespace, sizes: Sizes) -> float:
    """Return the rate of this library."""
    if task == "learner-pong":
        return rate(our_updates(OURS[column], options.device, sizes), sizes.warm_up_updates, options.seconds,
                    options.device)
    scheme = our_scheme(task, OURS[column], options, sizes)
    try:
        return rate(our_steps(scheme), sizes.warm_up_updates, options.seconds, options.device)
    finally:
        scheme.stop()


def our_scheme(task: str, algo: dict[str, Any], options: argparse.Namespace, sizes: Sizes) -> Any:
    """Return the scheme of a task."""
    from pytorchrl import IMPALA, PPO, SAC, OffPolicyActor, OnPolicyActor, Scheme
    from pytorchrl.agent.storages import GAEBuffer, ReplayBuffer, VTraceBuffer

    envs = environments(task, sizes.num_envs)
    if task == "sac-halfcheetah":
        return Scheme(
            SAC.create_factory(start_steps=sizes.start_steps, update_every=1, num_updates=1,
                               mini_batch_size=sizes.replay_batch, **algo),
            OffPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(256, 256)),
            ReplayBuffer.create_factory(sizes.replay_size, rollout_size=1), envs, device=options.device, seed=1)
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space)
    if task == "impala-pong":
        return Scheme.impala(
            IMPALA.create_factory(**algo), actor, VTraceBuffer.create_factory(sizes.num_steps // 4), envs,
            num_col_workers=options.collectors, runtime="processes", device=options.device, seed=1)
    return Scheme(
        PPO.create_factory(num_epochs=sizes.num_epochs, num_mini_batch=sizes.num_mini_batch, **algo), actor,
        GAEBuffer.create_factory(sizes.num_steps), envs, device=options.device, seed=1)


def our_steps(scheme: Any) -> Iterator[int]:
    """Make updates, and yield the number of env steps that each of them used for the first time."""
    used = 0
    while True:
        scheme.step()
        ledger = scheme.ledger()
        before, used = used, ledger["consumed_unique"] + ledger["resident"] + ledger["evicted"]
        yield used - before


def our_updates(algo: dict[str, Any], device: str, sizes: Sizes) -> Iterator[int]:
    """Make updates from one batch of random images, and yield 1 for each."""
    from pytorchrl import PPO, OnPolicyActor

    actor = OnPolicyActor.create_factory(*spaces_of_images())(device=device, seed=1)
    algorithm = PPO.create_factory(**algo)(actor=actor, device=device, seed=1)
    batch = batch_of_images(sizes.learner_batch, device)
    while True:
        algorithm.compute_gradients(batch)
        algorithm.apply_gradients()
        yield 1


def batch_of_images(size: int, device: str) -> Any:
    """Return a train batch of PPO with random images."""
    import torch

    from pytorchrl.agent.data import Batch

    obs, action, logp, value, ret, advantage = random_batch(size, device)
    return Batch(obs={"obs": obs}, done=torch.zeros_like(logp, dtype=torch.bool), rhs={}, mask=None, action=action,
                 valid=None, logp=logp, value=value, ret=ret, advantage=advantage, num_samples=size)


def random_batch(size: int, device: str) -> tuple[Any, ...]:
    """Return random images, actions, log-probabilities, values, returns and advantages."""
    import torch

    numbers = [torch.randn(size, device=device) for _ in range(4)]
    return (torch.randint(0, 256, (size, 4, 84, 84), dtype=torch.uint8, device=device),
            torch.randint(0, 6, (size,), device=device), numbers[0] - 2, *numbers[1:])


# Plain loops


def plain(task: str, options: argparse.Namespace, sizes: Sizes) -> float | None:
    """Return the rate of a loop that is written directly in PyTorch; None for a task without such a loop."""
    loops: dict[str, Callable[[], Iterator[int]]] = {
        "ppo-pong": lambda: plain_ppo(task, options.device, sizes),
        "ppo-cartpole": lambda: plain_ppo(task, options.device, sizes),
        "sac-halfcheetah": lambda: plain_sac(options.device, sizes),
        "learner-pong": lambda: plain_updates(options.device, sizes)}
    if task not in loops:
        return None
    warm_up = {"sac-halfcheetah": sizes.start_steps + sizes.warm_up_updates, "learner-pong": sizes.warm_up_updates}
    return rate(loops[task](), warm_up.get(task, 2), options.seconds, options.device)


def mlp(*sizes: int) -> Any:
    """Return a multi-layer perceptron with tanh (two hidden layers of 64) or ReLU."""
    from torch import nn

    layers: list[Any] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh() if sizes[1] == 64 else nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def policy_and_value(space: Any, num_actions: int, device: str) -> tuple[Any, Any]:
    """Return a function from observations to logits and values, and its parameters."""
    from torch import nn

    if len(space.shape) == 1:
        policy, value = (mlp(space.shape[0], 64, 64, size).to(device) for size in (num_actions, 1))
        return lambda obs: (policy(obs), value(obs)[:, 0]), [*policy.parameters(), *value.parameters()]
    body = nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3),
                         nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()).to(device)
    heads = nn.Linear(512, num_actions + 1).to(device)

    def both(obs: Any) -> tuple[Any, Any]:
        found = heads(body(obs.float() / 255.0))
        return found[:, :-1], found[:, -1]
    return both, [*body.parameters(), *heads.parameters()]


def ppo_update(network: Any, params: list[Any], optimizer: Any, batch: tuple[Any, ...]) -> None:
    """Make one update of PPO with Adam."""
    import torch
    from torch.distributions import Categorical

    obs, action, old, _, ret, advantage = batch
    logits, value = network(obs)
    policy = Categorical(logits=logits)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = (policy.log_prob(action) - old).exp()
    gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    loss = -gain + 0.5 * (value - ret).square().mean() - 0.01 * policy.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(params, 0.5)
    optimizer.step()


def plain_ppo(task: str, device: str, sizes: Sizes) -> Iterator[int]:
    """Train with PPO, and yield the number of env steps of each rollout."""
    import torch
    from torch.distributions import Categorical

    factory = environments(task, sizes.num_envs)
    envs, shape = factory(seed=1), (sizes.num_steps, sizes.num_envs)
    network, params = policy_and_value(space_of(factory), int(factory.action_space.n), device)
    optimizer = torch.optim.Adam(params, lr=3e-4)
    current = torch.from_numpy(envs.reset()[0]["obs"]).to(device)
    obs = torch.zeros((*shape, *current.shape[1:]), dtype=current.dtype, device=device)
    action = torch.zeros(shape, dtype=torch.int64, device=device)
    logp, value, reward, alive = (torch.zeros(shape, device=device) for _ in range(4))
    while True:
        for step in range(sizes.num_steps):
            with torch.no_grad():
                logits, value[step] = network(current)
                policy = Categorical(logits=logits)
                action[step] = policy.sample()
                obs[step], logp[step] = current, policy.log_prob(action[step])
            found = envs.step(action[step].cpu().numpy())
            reward[step] = torch.from_numpy(found.reward).to(device)
            alive[step] = torch.from_numpy(~(found.terminated | found.truncated)).to(device)
            current = torch.from_numpy(found.obs["obs"]).to(device)
        advantage, following = torch.zeros_like(value), 0.0
        with torch.no_grad():
            after = network(current)[1]
        for step in reversed(range(sizes.num_steps)):
            following = reward[step] + 0.99 * after * alive[step] - value[step] + 0.99 * 0.95 * alive[step] * following
            advantage[step], after = following, value[step]
        rows = [leaf.flatten(0, 1) for leaf in (obs, action, logp, value, advantage + value, advantage)]
        for _ in range(sizes.num_epochs):
            order = torch.randperm(len(rows[1]), device=device)
            for index in order.chunk(sizes.num_mini_batch):
                ppo_update(network, params, optimizer, tuple(leaf[index] for leaf in rows))
        yield sizes.num_steps * sizes.num_envs


def plain_updates(device: str, sizes: Sizes) -> Iterator[int]:
    """Make updates of PPO from one batch of random images, and yield 1 for each."""
    import torch

    network, params = policy_and_value(spaces_of_images()[0], 6, device)
    optimizer, batch = torch.optim.Adam(params, lr=3e-4), random_batch(sizes.learner_batch, device)
    while True:
        ppo_update(network, params, optimizer, batch)
        yield 1


def squashed(policy: Any, obs: Any) -> tuple[Any, Any]:
    """Return actions of a Gaussian policy with tanh, and their log-probabilities (B, 1)."""
    import math

    import torch
    import torch.nn.functional as F  # noqa: N812 # torch's own name for it

    mean, log_std = policy(obs).chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
    drawn = normal.rsample()
    jacobian = 2 * (math.log(2) - drawn - F.softplus(-2 * drawn))
    return drawn.tanh(), (normal.log_prob(drawn) - jacobian).sum(-1, keepdim=True)


def values(networks: list[Any], obs: Any, action: Any) -> list[Any]:
    """Return the value (B, 1) that each critic assigns to the actions."""
    import torch

    return [network(torch.cat([obs, action], -1)) for network in networks]


def descend(optimizer: Any, loss: Any) -> None:
    """Make one step of an optimizer."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def plain_sac(device: str, sizes: Sizes) -> Iterator[int]:
    """Train with SAC, and yield 1 for each env step; the replay is on the device."""
    import torch

    factory = environments("sac-halfcheetah", 1)
    envs, num_obs, num_actions = factory(seed=1), space_of(factory).shape[0], factory.action_space.shape[0]
    policy = mlp(num_obs, 256, 256, 2 * num_actions).to(device)
    critics, targets = ([mlp(num_obs + num_actions, 256, 256, 1).to(device) for _ in range(2)] for _ in range(2))
    for target, critic in zip(targets, critics, strict=True):
        target.load_state_dict(critic.state_dict())
    log_alpha = torch.zeros((), device=device, requires_grad=True)
    old, new = ([param for network in networks for param in network.parameters()] for networks in (targets, critics))
    optimizers = [torch.optim.Adam(params, lr=3e-4) for params in (policy.parameters(), new, [log_alpha])]
    replay = [torch.zeros(sizes.replay_size, size, device=device) for size in (num_obs, num_actions, 1, num_obs, 1)]
    current = torch.from_numpy(envs.reset()[0]["obs"]).to(device).float()
    for step in itertools.count():
        with torch.no_grad():
            action = squashed(policy, current)[0]
        found = envs.step(action.cpu().numpy())
        after, reward, alive = (torch.from_numpy(part).to(device).float() for part in (
            found.obs["obs"], found.reward, ~found.terminated))
        for column, row in zip(replay, (current, action, reward, after, 0.99 * alive), strict=True):
            column[step % sizes.replay_size] = row
        current = after
        if step >= sizes.start_steps:
            rows = torch.randint(0, min(step, sizes.replay_size), (sizes.replay_batch,), device=device)
            obs, action, reward, after, discount = (column[rows] for column in replay)
            with torch.no_grad():
                following, logp = squashed(policy, after)
                goal = reward + discount * (torch.min(*values(targets, after, following)) - log_alpha.exp() * logp)
            descend(optimizers[1], sum((value - goal).square().mean() for value in values(critics, obs, action)))
            action, logp = squashed(policy, obs)
            gain = torch.min(*values(critics, obs, action)) - log_alpha.exp().detach() * logp
            descend(optimizers[0], -gain.mean())
            descend(optimizers[2], -(log_alpha * (logp.detach() - num_actions)).mean())
            torch._foreach_lerp_([param.data for param in old], [param.data for param in new], 0.005)
        yield 1


# Stable-Baselines3


def stable_baselines3(task: str, options: argparse.Namespace, sizes: Sizes) -> float | None:
    """Return the rate of Stable-Baselines3; None for a task that it does not have."""
    from stable_baselines3 import PPO, SAC
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    if task == "sac-halfcheetah":
        model = SAC("MlpPolicy", "HalfCheetah-v5", learning_starts=sizes.start_steps, buffer_size=sizes.replay_size,
                    batch_size=sizes.replay_batch, device=options.device, seed=1)
    elif task.startswith("ppo"):
        common = {"n_steps": sizes.num_steps, "n_epochs": sizes.num_epochs, "device": options.device, "seed": 1,
                  "batch_size": sizes.num_envs * sizes.num_steps // sizes.num_mini_batch}
        if task == "ppo-cartpole":
            model = PPO("MlpPolicy", make_vec_env("CartPole-v1", sizes.num_envs), **common)
        else:
            import ale_py
            import gymnasium

            gymnasium.register_envs(ale_py)
            model = PPO("CnnPolicy", VecFrameStack(make_atari_env("PongNoFrameskip-v4", sizes.num_envs, seed=1), 4),
                        **common)
    else:
        return None

    class Clock(BaseCallback):  # type: ignore[misc] # the library has no types
        """Callback that measures the rate after a warm-up."""

        start = first = last = end = 0.0

        def _on_step(self) -> bool:
            return not self.start or time.perf_counter() - self.start < options.seconds

        def _on_rollout_start(self) -> None:
            if self.num_timesteps < max(sizes.start_steps, 2 * sizes.num_envs * sizes.num_steps):
                return
            if not self.start:
                self.start, self.first = time.perf_counter(), self.num_timesteps
            self.end, self.last = time.perf_counter(), self.num_timesteps

    clock = Clock()
    model.learn(10**9, callback=clock)
    return (clock.last - clock.first) / (clock.end - clock.start)


# The table


def in_process(task: str, column: str, arguments: list[str], limit_s: float | None) -> tuple[Any, str | None]:
    """Return the rate that a new process measures, and None; or None and the reason why there is no rate."""
    process = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), *arguments, "--one", f"{task} {column}"], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None, f"it took longer than {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # end the compiler's processes and workers, too
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for a driver may not end
            process.wait(5.0)
    if process.returncode:
        return None, (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    return json.loads(output.strip().splitlines()[-1]), None


def measure(task: str, column: str, options: argparse.Namespace) -> float | None:
    """Return one rate, measured in this process."""
    sizes = TINY if options.tiny else FULL
    if column in OURS:
        return ours(task, column, options, sizes)
    return plain(task, options, sizes) if column == "plain" else stable_baselines3(task, options, sizes)


def table(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Measure all rows, and return them with the measurements that are missing."""
    start = time.monotonic()
    missing = {name: f"{module} is not installed" for name, module in NEEDS.items()
               if importlib.util.find_spec(module) is None}
    rows: dict[str, dict[str, Any]] = {
        task: {"unit": RATES.get(task, "env steps per second"), **dict.fromkeys(options.columns)}
        for task in options.tasks}
    left_out = {f"{task} {column}": missing.get(task) or missing[column]
                for task in options.tasks for column in options.columns if task in missing or column in missing}
    # Measurements without compilation come first, and leave the rest of their time to the others.
    cells = sorted(((task, column) for task in options.tasks for column in options.columns
                    if f"{task} {column}" not in left_out), key=lambda cell: "compile" in OURS.get(cell[1], {}))
    seconds = options.seconds
    if options.minutes is not None and cells:
        seconds = min(seconds, MEASURED * 60 * options.minutes / len(cells))
    for number, (task, column) in enumerate(cells):
        before, limit_s = time.monotonic(), None
        if options.minutes is not None:
            limit_s = max(0.0, start + 60 * options.minutes - before) / (len(cells) - number)
        rows[task][column], reason = in_process(task, column, [*arguments, "--seconds", str(seconds)], limit_s)
        if reason is not None:
            left_out[f"{task} {column}"] = reason
        print(f"{task} {column}: {reason or rows[task][column]} ({time.monotonic() - before:.0f} s)",
              file=sys.stderr, flush=True)
    for cell, reason in left_out.items():
        print(f"left out: {cell}: {reason}", file=sys.stderr, flush=True)
    return {"seconds": seconds, "minutes": options.minutes, "rows": rows, "left_out": left_out}


def names(text: str) -> tuple[str, ...]:
    """Return the names in a text, which are separated by commas."""
    return tuple(text.split(","))


def main() -> None:
    """Parse the command line, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=names, help="tasks, separated by commas")
    parser.add_argument("--columns", type=names, help="columns, separated by commas")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of one measurement")
    parser.add_argument("--minutes", type=float, help="time in which everything must end")
    parser.add_argument("--device", default="cuda:0", help="device of the learner and of the plain loops")
    parser.add_argument("--collectors", type=int, default=4, help="collection workers of impala-pong")
    parser.add_argument("--tiny", action="store_true", help="use small sizes, to try the script")
    parser.add_argument("--emulated", action="store_true", help="use an emulated GPU, to try the script")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.emulated:
        sys.path.insert(0, str(Path(__file__).parent.parent))
        from tests.emulated_gpu.activation import activate
        from tests.emulated_gpu.build import build

        activate(build())
    if options.one is not None:
        print(json.dumps(measure(*options.one.split(), options)))
        return
    import torch

    if options.device != "cpu" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU, so there is nothing to measure on {options.device}; run this "
                 "script on a machine with a CUDA device, or try it with --device cpu --tiny")
    options.tasks = options.tasks or (TASKS if options.minutes is None else BRIEF_TASKS)
    options.columns = options.columns or (COLUMNS if options.minutes is None else BRIEF_COLUMNS)
    gpu = None if options.device == "cpu" else torch.cuda.get_device_name(options.device)
    print_result({"device": options.device, "gpu": gpu, "sizes": "tiny" if options.tiny else "full",
                  **table(options, sys.argv[1:])})


if __name__ == "__main__":
    main()
