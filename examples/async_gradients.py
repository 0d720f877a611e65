"""A3C: gradient workers that each collect, compute a gradient, and get new weights when it has been applied.

No gradient worker waits for another, so a gradient is applied to parameters that may have moved since it was computed:
its gradient lag, about the number of the other workers.

    python examples/async_gradients.py --num-grad-workers 4
"""

from __future__ import annotations

import argparse

from pytorchrl import A2C, ASYNC, GAEBuffer, Learner, OnPolicyActor, Scheme, VecEnv, linear


def main() -> None:
    args = parse_args()

    train_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=8)
    test_envs = VecEnv.create_factory("CartPole-v1", vec_env_size=5)
    actor = OnPolicyActor.create_factory(train_envs.observation_space, train_envs.action_space)
    algorithm = A2C.create_factory(lr=linear(2e-3, 0.0), entropy_coef=0.0)
    storage = GAEBuffer.create_factory(size=16, gae_lambda=1.0)

    scheme = Scheme(
        algorithm, actor, storage, train_envs, test_envs, num_grad_workers=args.num_grad_workers,
        grad_communication=ASYNC, seed=args.seed)

    with Learner(scheme, target_steps=4_000 if args.smoke else 500_000, log_dir=args.log_dir) as learner:
        learner.train()
        evaluation = learner.evaluate(num_episodes=5 if args.smoke else 100)
        lag = learner.get_metrics()["scheme"]["grad_lag"]

    print(f"{learner.env_steps:,} env steps in {learner.seconds:.1f} s, {learner.updates:,} updates")
    print(f"gradient lag in updates: mean {lag['mean']:.1f}, largest {lag['max']}")
    print(f"mean return of {len(evaluation.returns)} evaluation episodes: {evaluation.return_mean:.1f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A2C with asynchronous gradient workers, which is A3C.")
    parser.add_argument("--num-grad-workers", type=int, default=2, help="Ray workers that compute gradients, 2 or more")
    parser.add_argument("--seed", type=int, default=None, help="of everything; without one it is drawn")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without one nothing is kept")
    parser.add_argument("--smoke", action="store_true", help="a few updates only, to see that it runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
