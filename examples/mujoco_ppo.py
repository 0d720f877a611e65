"""Train PPO on a MuJoCo robot with the settings of CleanRL's `ppo_continuous_action.py`.

Observations and rewards are normalized by running statistics. The statistics are part of the agent: they are saved with
the agent, and frozen during evaluation. This example needs the extra `mujoco`: `pip install -e '.[mujoco]'` in the
source folder.

    python examples/mujoco_ppo.py --log-dir runs/cheetah
    python examples/mujoco_ppo.py --env Hopper-v5
"""

from __future__ import annotations

import argparse

from pytorchrl import PPO, GAEBuffer, Learner, OnPolicyActor, Scheme, linear
from pytorchrl.envs import mujoco_factory


def main() -> None:
    args = parse_args()
    num_steps, num_mini_batch = (64, 4) if args.smoke else (2048, 32)
    target_steps = 256 if args.smoke else args.target_steps

    train_envs = mujoco_factory(args.env, 1)
    test_envs = mujoco_factory(args.env, 2)
    actor = OnPolicyActor.create_factory(
        train_envs.observation_space, train_envs.action_space, hidden_sizes=(64, 64), activation="tanh",
        normalize_obs=True, normalize_reward=True)
    # The value loss is half the mean squared error, as in CleanRL, so CleanRL's weight of 0.5 is used unchanged.
    algorithm = PPO.create_factory(
        lr=linear(3e-4, 0.0), gamma=0.99, num_epochs=10, num_mini_batch=num_mini_batch, clip_param=0.2,
        use_clipped_value_loss=True, entropy_coef=0.0, value_loss_coef=0.5, max_grad_norm=0.5)
    storage = GAEBuffer.create_factory(size=num_steps, gae_lambda=0.95)
    scheme = Scheme(algorithm, actor, storage, train_envs, test_envs, seed=args.seed)

    evaluations = {} if args.smoke else {"eval_every": 100_000, "eval_episodes": 4}
    with Learner(
        scheme, target_steps, args.log_dir, **evaluations,
    ) as learner:
        learner.train()
        if not args.smoke:  # an episode has 1,000 steps
            evaluation = learner.evaluate(num_episodes=10)
            print(f"mean return of {len(evaluation.returns)} evaluation episodes: {evaluation.return_mean:.0f}")

    print(f"{learner.env_steps:,} env steps in {learner.seconds:.1f} s, {learner.updates:,} updates")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO on a MuJoCo robot.")
    parser.add_argument("--env", default="HalfCheetah-v5", help="gymnasium id of the environment")
    parser.add_argument("--target-steps", type=int, default=1_000_000, help="env steps of the experiment")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
