"""A3C: gradient workers that each collect, compute a gradient, and get new weights when it has been applied.

No gradient worker waits for another, so a gradient is applied to parameters that may have moved since it was computed:
its gradient lag, about the number of the other workers. `--max-grad-lag` weakens gradients that are further behind.

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

    with Learner(scheme, target_steps=4_000 if args.smoke else 500_000, log_dir=args.log_dir) as learner:
        learner.train()
        evaluation = learner.evaluate(num_episodes=5 if args.smoke else 100)
        metrics = learner.get_metrics()["scheme"]

    print(f"{learner.env_steps:,} env steps in {learner.seconds:.1f} s, {learner.updates:,} updates")
    print(f"gradient lag in updates: mean {metrics['grad_lag']['mean']:.1f}, largest {metrics['grad_lag']['max']}")
    print(f"gradients by worker: {metrics['grads_by_worker']}, {metrics['grads_late']} of them late")
    print(f"mean return of {len(evaluation.returns)} evaluation episodes: {evaluation.return_mean:.1f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A2C with asynchronous gradient workers, which is A3C.")
    parser.add_argument("--num-grad-workers", type=int, default=2, help="Ray workers that compute gradients, 2 or more")
    parser.add_argument("--max-grad-lag", type=int, default=None,
                        help="updates behind from which on a gradient counts less")
    parser.add_argument("--seed", type=int, default=None, help="of everything; without one it is drawn")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without one nothing is kept")
    parser.add_argument("--smoke", action="store_true", help="a few updates only, to see that it runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
