"""Train CartPole with A3C: asynchronous gradient workers, each of which collects its own steps.

After computing a gradient, a worker waits only until this gradient is applied, and then receives the new weights.

Gradient workers do not wait for each other, so parameters may change between the computation of a gradient and its
application. The number of updates in between is the gradient lag, which is close to the number of other gradient
workers. Gradients whose lag exceeds `--max-grad-lag` are scaled down.

    python examples/a3c.py --num-grad-workers 4 --max-grad-lag 4
"""

from __future__ import annotations

import argparse

from pytorchrl import A2C, GAEBuffer, Learner, OnPolicyActor, Scheme, VecEnv, linear


def main() -> None:
    args = parse_args()

    train_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=8)
    test_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=5)
    actor = OnPolicyActor.create_factory(train_envs.observation_space, train_envs.action_space)
    algorithm = A2C.create_factory(lr=linear(2e-3, 0.0), entropy_coef=0.0)
    storage = GAEBuffer.create_factory(size=16, gae_lambda=1.0)

    scheme = Scheme.a3c(
        algorithm, actor, storage, train_envs, test_envs, num_grad_workers=args.num_grad_workers, updates_per_step=10,
        max_grad_lag=args.max_grad_lag, lag_policy="apply" if args.max_grad_lag is None else "scale", seed=args.seed)

    with Learner(scheme, target_steps=500 if args.smoke else 500_000, log_dir=args.log_dir) as learner:
        learner.train()
        evaluation = learner.evaluate(num_episodes=5 if args.smoke else 100)
        metrics = learner.get_metrics()["scheme"]

    print(f"{learner.env_steps:,} env steps in {learner.seconds:.1f} s, {learner.updates:,} updates")
    print(f"gradient lag in updates: mean {metrics['grad_lag']['mean']:.1f}, largest {metrics['grad_lag']['max']}")
    print(f"gradients by worker: {metrics['grads_by_worker']}, {metrics['grads_late']} of them late")
    print(f"mean return of {len(evaluation.returns)} evaluation episodes: {evaluation.return_mean:.1f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A2C with asynchronous gradient workers, which is A3C.")
    parser.add_argument("--num-grad-workers", type=int, default=2, help="gradient workers on Ray, 2 or more")
    parser.add_argument("--max-grad-lag", type=int, default=None,
                        help="gradient lag, in updates, above which gradients are scaled down")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
