"""Train two policies in one environment: a speaker sees the goal, and a listener has to move there (PettingZoo).

The speaker and the listener have different observations and actions, so each has its own policy. Both receive the same
reward. The mean return of random actions is about -80 per episode; trained policies reach about -35.

    pip install -e '.[pettingzoo]'    # in the source folder
    python examples/multi_agent.py --algorithm dqn
"""

from __future__ import annotations

import argparse
import functools

from pytorchrl import (
    DQN,
    PPO,
    GAEBuffer,
    Learner,
    MultiAgentVecEnv,
    OnPolicyActor,
    QActor,
    ReplayBuffer,
    Scheme,
    multi_agent,
)


def main() -> None:
    args = parse_args()

    # The name of an agent's policy is the agent's name without its number: "speaker" for "speaker_0". Agents with the
    # same policy would share its networks, and their data would be in the same batches.
    envs = MultiAgentVecEnv.create_factory(
        "mpe2.simple_speaker_listener_v4", {"max_cycles": 25}, vec_env_size=8,
        policy_of=lambda agent: agent.split("_")[0])

    # Both policies use the same options here. To give each policy its own options, pass a mapping from policy to
    # factory.
    if args.algorithm == "ppo":
        agent = multi_agent(
            envs, PPO.create_factory(lr=1e-3, gamma=0.95, num_epochs=8, num_mini_batch=4),
            functools.partial(OnPolicyActor.create_factory, hidden_sizes=(64, 64)), GAEBuffer.create_factory(size=100))
    else:
        agent = multi_agent(
            envs, DQN.create_factory(lr=1e-3, gamma=0.95, start_steps=1000, epsilon_steps=10_000, update_every=8,
                                     mini_batch_size=128,
                                     polyak=0.99, target_update_interval=1),
            functools.partial(QActor.create_factory, hidden_sizes=(64, 64)),
            ReplayBuffer.create_factory(50_000, rollout_size=5))

    scheme = Scheme(*agent, envs, envs, seed=args.seed)
    with Learner(scheme, target_steps=500 if args.smoke else 30_000, log_dir=args.log_dir) as learner:
        learner.train()
        evaluation = learner.evaluate(num_episodes=4 if args.smoke else 100)
        metrics = learner.get_metrics()["scheme"]

    print(f"{learner.env_steps:,} env steps in {learner.seconds:.1f} s, {learner.updates:,} updates")
    for policy, returns in evaluation.policy_returns.items():
        print(f"{policy}: {metrics[f'agent_steps/{policy}']:,} steps of its agents, mean return "
              f"{sum(returns) / len(returns):.1f}")
    print(f"mean return of all agents together in {len(evaluation.returns)} evaluation episodes: "
          f"{evaluation.return_mean:.1f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Two policies that learn to cooperate.")
    parser.add_argument("--algorithm", choices=("ppo", "dqn"), default="ppo", help="algorithm of both policies")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
