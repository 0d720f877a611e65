"""Measure how close training comes to the best possible speed of one core: that of matrix products and environments.

    python benchmarks/roofline.py [--tasks sac-pendulum,ppo-pong] [--seconds 20] [--dtype float32,bfloat16]

A task is an algorithm with its preset for an environment, in one process with one thread and compiled updates. The
script counts the matrix products that the algorithm needs per env step, with shapes from the agent's networks: forward
passes, gradients of weights and inputs, passes of target networks, acting. In turns, it times each product alone (the
lower quartile of its repetitions), the environments alone with random actions, and training. Each turn of training
begins and ends with a new rollout. All times are CPU times of the process, so other programs have little effect.

The products are an optimistic bound: their operands are in the cache, and losses, optimizers, storage and random
numbers take no time. For each task and dtype, the script prints one line of JSON. All rates are env steps per
core-second; an env step of Atari is four frames. `both` is the rate of the products and the environments together. With
bfloat16, training uses `mixed_precision` if the algorithm has this option; `training` names its precision. The shares
are medians of the ratios of all rounds of turns. The script asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from results import origin, print_result

# Task -> (algorithm, environment, options that replace those of the preset). DQN is measured after epsilon has reached
# its final value.
TASKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sac-pendulum": ("sac", "Pendulum-v1", {}),
    "sac-halfcheetah": ("sac", "HalfCheetah-v5", {"start_steps": 1000}),
    "td3-pendulum": ("td3", "Pendulum-v1", {}),
    "td3-halfcheetah": ("td3", "HalfCheetah-v5", {"start_steps": 1000}),
    "dqn-cartpole": ("dqn", "CartPole-v1", {"epsilon_steps": 1000}),
    "ppo-cartpole": ("ppo", "CartPole-v1", {}),
    "ppo-halfcheetah": ("ppo", "HalfCheetah-v5", {}),
    "ppo-pong": ("ppo", "ALE/Pong-v5", {}),
}
ROUNDS, WARM_UP_UPDATES = 5, 40
FORWARD, WEIGHTS, INPUTS = "forward", "weights", "inputs"


@dataclass(frozen=True)
class Layer:
    """A linear layer or a convolution.

    Attributes:
        weight: Shape of the weight.
        image: (height, width) of the inputs of a convolution; () for a linear layer.
        stride: Stride of a convolution.
        used: Number of input columns whose gradient is needed if only a part is needed; 0: all columns.
    """

    weight: tuple[int, ...]
    image: tuple[int, ...] = ()
    stride: int = 1
    used: int = 0


Product = tuple[Layer, str, int]
"""A layer, the kind of product (FORWARD, WEIGHTS or INPUTS), and the number of rows."""
Count = dict[Product, float]
"""Product -> how often it is needed per env step."""


def layers_of(network: Any, image: tuple[int, ...] = ()) -> list[Layer]:
    """Return the layers of a network in the order of its forward pass; `image` is (height, width) of its input."""
    from torch import nn

    found = []
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            stride = int(module.stride[0])
            found.append(Layer(tuple(module.weight.shape), image, stride))
            image = tuple((size - kernel) // stride + 1 for size, kernel in zip(image, module.kernel_size, strict=True))
        elif isinstance(module, nn.Linear):
            found.append(Layer(tuple(module.weight.shape)))
    return found


def passes(layers: list[Layer], rows: int, times: float, *kinds: str) -> list[tuple[Product, float]]:
    """Return the products of `times` passes; the gradient of the first layer's inputs is not needed."""
    return [((layer, kind, rows), times) for place, layer in enumerate(layers) for kind in kinds
            if kind != INPUTS or place]


def products_of(algorithm: Any, storage: Any, envs: int) -> Count:
    """Return the products of one env step."""
    find = products_of_on_policy if hasattr(algorithm, "num_epochs") else products_of_replay
    count: Count = {}
    for product, times in find(algorithm, storage, envs):
        count[product] = count.get(product, 0.0) + times
    return count


def products_of_replay(algorithm: Any, storage: Any, envs: int) -> Iterator[tuple[Product, float]]:
    """Yield the products per env step of SAC, TD3 or DQN, which the docstrings of their `losses` describe."""
    actor, options = algorithm.actor, algorithm.options
    rows, updates = options.mini_batch_size, options.num_updates / options.update_every
    if not hasattr(actor, "critics"):
        q = layers_of(actor.q)
        yield from passes(q, envs, (1 - options.final_epsilon) / envs, FORWARD)
        yield from passes(q, rows, updates * (2 if options.double else 1), FORWARD)  # the target
        yield from passes(q, rows, updates, FORWARD, WEIGHTS, INPUTS)
        return
    policy, critics = layers_of(actor.policy), [layers_of(critic) for critic in actor.critics]
    yield from passes(policy, envs, 1 / envs, FORWARD)
    yield from passes(policy, rows, updates, FORWARD)  # actions of the target
    for critic in critics:
        yield from passes(critic, rows, 2 * updates, FORWARD)  # the target and the loss
        yield from passes(critic, rows, updates, WEIGHTS, INPUTS)
    updates /= getattr(options, "policy_delay", 1)
    for critic in critics[:1] if actor.is_deterministic else critics:
        yield from passes(critic, rows, updates, FORWARD, INPUTS)
        # The loss of the policy needs the gradient of the actions, but not of the observations.
        yield (Layer(critic[0].weight, used=actor.action_size), INPUTS, rows), updates
    yield from passes(policy, rows, updates, FORWARD, WEIGHTS, INPUTS)


def products_of_on_policy(algorithm: Any, storage: Any, envs: int) -> Iterator[tuple[Product, float]]:
    """Yield the products per env step of PPO: acting, values of the rollout, and all epochs."""
    actor, steps = algorithm.actor, storage.size * envs
    image = tuple(actor.options.observation_space["obs"].shape[1:])
    policy = layers_of(actor.policy, image) + layers_of(actor.policy_head)
    value = [] if actor.value is None else layers_of(actor.value, image)
    value_head = layers_of(actor.value_head)
    rows, is_shared = algorithm.mini_batch_size or steps // algorithm.num_mini_batch, not value
    yield from passes(policy, envs, 1 / envs, FORWARD)
    yield from passes(value + value_head, envs if is_shared else steps, 1 / (envs if is_shared else steps), FORWARD)
    for layers in (policy, value + value_head):
        yield from passes(layers, rows, algorithm.num_epochs / rows, FORWARD, WEIGHTS, INPUTS)
    if is_shared:  # the policy's features, to which the value head is applied, need their gradient
        yield (value_head[0], INPUTS, rows), algorithm.num_epochs / rows


def operation(product: Product, dtype: Any) -> Callable[[], Any]:
    """Return a function that computes a product of random operands."""
    import torch

    layer, kind, rows = product
    weight = torch.randn(layer.weight).to(dtype)
    if not layer.image:
        x, grad = torch.randn(rows, layer.weight[1]).to(dtype), torch.randn(rows, layer.weight[0]).to(dtype)
        bias, out = torch.randn(layer.weight[0]).to(dtype), weight[:, -layer.used:]
        return {FORWARD: lambda: torch.addmm(bias, x, weight.t()), WEIGHTS: lambda: torch.mm(grad.t(), x),
                INPUTS: lambda: torch.mm(grad, out)}[kind]
    last = torch.channels_last
    weight = weight.contiguous(memory_format=last)
    x = torch.randn(rows, layer.weight[1], *layer.image).to(dtype).contiguous(memory_format=last)
    y = torch.nn.functional.conv2d(x, weight, stride=layer.stride)
    mask = (kind == INPUTS, kind == WEIGHTS, False)
    if kind == FORWARD:
        return lambda: torch.nn.functional.conv2d(x, weight, stride=layer.stride)
    return lambda: torch.ops.aten.convolution_backward(
        y, x, weight, None, [layer.stride] * 2, [0, 0], [1, 1], False, [0, 0], 1, mask)


def lower_quartile(function: Callable[[], Any], seconds: float) -> float:
    """Return the lower quartile of the CPU seconds of a call, over repetitions that take `seconds` seconds."""
    function()
    found, end = [], time.process_time() + seconds
    while not found or time.process_time() < end:
        start = time.process_time()
        for _ in range(5):
            function()
        found.append((time.process_time() - start) / 5)
    return sorted(found)[len(found) // 4]


def steps_of_envs(vector: Any) -> Iterator[int]:
    """Step Gymnasium's environments with random actions, without this library, and yield the number of env steps."""
    actions = [vector.action_space.sample() for _ in range(64)]
    singles = getattr(vector, "envs", [])
    for envs in singles or [vector]:
        envs.reset(seed=0)
    while True:
        for action in actions:
            if not singles:
                vector.step(action)
            for env, own in zip(singles, action, strict=False):
                if any(env.step(own)[2:4]):
                    env.reset()
        yield len(actions) * vector.num_envs


def steps_of_training(scheme: Any) -> Iterator[int]:
    """Train until a new rollout is due, again and again, and yield the number of env steps."""
    last = scheme.env_steps
    while True:
        scheme.step()
        if scheme.is_between_train_batches:
            last, before = scheme.env_steps, last
            yield last - before


def rate(steps: Iterator[int], seconds: float) -> float:
    """Return the env steps per core-second, over at least `seconds` seconds."""
    start, total = time.process_time(), 0
    while time.process_time() - start < seconds or not total:
        total += next(steps)
    return total / (time.process_time() - start)


def measure(task: str, dtype: str, seconds: float) -> dict[str, Any]:
    """Measure one task in this process: `seconds` seconds of training, and a quarter as many of each bound."""
    import torch

    from pytorchrl.training.composition import option_specs
    from pytorchrl.training.training import make_learner

    torch.set_num_threads(1)
    algorithm, env, options = TASKS[task]
    options = {**options, "compile": True}
    if dtype == "bfloat16" and "mixed_precision" in option_specs(algorithm):
        options["mixed_precision"] = True
    learner, agent = make_learner(algorithm, env, progress=False, target_steps=10**9, seed=1, **options)
    scheme, envs = learner.scheme, agent.train_envs_factory(seed=1)
    built = agent.algo_factory(device="cpu", actor=agent.actor_factory(device="cpu", seed=1), seed=1)
    products = products_of(built, agent.storage_factory.options, envs.num_envs)
    operations = {product: operation(product, getattr(torch, dtype)) for product in products}
    learner.start()
    while scheme.version < WARM_UP_UPDATES or not scheme.is_between_train_batches:
        scheme.step()
    stepping, training = steps_of_envs(envs.vector), steps_of_training(scheme)
    rounds: list[tuple[float, float, float]] = []
    for _ in range(ROUNDS):
        part = seconds / ROUNDS
        took = {product: lower_quartile(run, part / 4 / len(products)) for product, run in operations.items()}
        rounds.append((1 / sum(products[product] * took[product] for product in products),
                       rate(stepping, part / 4), rate(training, part)))
    learner.stop()
    return {"task": task, "dtype": dtype, "training": "bfloat16" if "mixed_precision" in options else "float32",
            **summary(rounds)}


def summary(rounds: list[tuple[float, float, float]]) -> dict[str, float]:
    """Return medians over rounds of (products, environment, training): rates, and the shares that training reaches."""
    both = [1 / (1 / products + 1 / envs) for products, envs, _ in rounds]
    products, envs, ours = (statistics.median(column) for column in zip(*rounds, strict=True))
    shares = [(row[2] / row[0], row[2] / bound) for row, bound in zip(rounds, both, strict=True)]
    of_products, of_both = (round(statistics.median(column), 3) for column in zip(*shares, strict=True))
    return {"ours": round(ours, 1), "products": round(products, 1), "environment": round(envs, 1),
            "both": round(statistics.median(both), 1), "share_of_products": of_products, "share_of_both": of_both}


def main() -> None:
    """Parse the command line, and measure each task in its own process, in which each library uses one thread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS), help="tasks, separated by commas")
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU seconds of training, per task and dtype")
    parser.add_argument("--dtype", default="float32,bfloat16", help="dtypes of the products, separated by commas")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print_result(measure(options.tasks, options.dtype, options.seconds), indent=None)
        return
    for task in options.tasks.split(","):
        for dtype in options.dtype.split(","):
            done = subprocess.run(
                [sys.executable, __file__, "--one", "--tasks", task, "--dtype", dtype, "--seconds",
                 str(options.seconds)],
                stdout=subprocess.PIPE, text=True, check=False,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
            failure = json.dumps({**origin(), "task": task, "error": done.returncode})
            print(*done.stdout.splitlines()[-1:] or [failure], flush=True)


if __name__ == "__main__":
    main()
