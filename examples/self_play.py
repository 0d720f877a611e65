"""Train Tic-tac-toe or Connect Four by self-play, and let the trained policy play against random moves (PettingZoo).

One policy plays for both sides and learns from both. With `--policies independent`, each side has a policy of its own.
The script prints how often each side wins, draws and loses against an opponent that makes random moves.

    pip install -e '.[pettingzoo]' pygame    # in the source folder
    python examples/self_play.py --game connect_four
"""

from __future__ import annotations

import argparse
import functools
import importlib

import numpy as np

import pytorchrl

GAMES = {"tictactoe": "tictactoe_v3", "connect_four": "connect_four_v3"}


def make_game(name):
    """Return a game in which the agents of a step are both players, and the one whose turn it is not has no moves."""
    from pettingzoo.utils.conversions import turn_based_aec_to_parallel

    return turn_based_aec_to_parallel(importlib.import_module(f"pettingzoo.classic.{GAMES[name]}").env())


def play(agent, name, side, num_games, rng):
    """Play games against random moves; `side` is 0 if the agent begins, else 1.

    Returns:
        The numbers of games that the agent won, drew and lost.
    """
    game, results = make_game(name), []
    own = game.possible_agents[side]
    while len(results) < num_games:
        obs = game.reset(seed=int(rng.integers(2**31)))[0]
        total = 0.0
        while game.agents:
            chosen = agent.act(obs)  # only the player whose turn it is gets an action
            for player in game.agents:
                if player != own or player not in chosen:
                    allowed = np.flatnonzero(obs[player]["action_mask"])
                    chosen[player] = int(rng.choice(allowed)) if len(allowed) else 0
            obs, rewards = game.step(chosen)[:2]
            total += rewards.get(own, 0.0)
        results.append(np.sign(total))
    return tuple(results.count(result) for result in (1, 0, -1))


def main() -> None:
    args = parse_args()
    agent = pytorchrl.train(
        "ppo", functools.partial(make_game, args.game), policies=args.policies, num_envs=16, num_steps=64, num_epochs=4,
        num_mini_batch=8, lr=pytorchrl.linear(1e-3, 0.0), gamma=1.0, entropy_coef=0.02, hidden_sizes=(128, 128),
        target_steps=2_048 if args.smoke else args.target_steps, seed=args.seed, log_dir=args.log_dir)
    rng = np.random.default_rng(args.seed)
    for side, name in enumerate(("first", "second")):
        wins, draws, losses = play(agent, args.game, side, 4 if args.smoke else args.games, rng)
        print(f"as the {name} player: {wins} wins, {draws} draws, {losses} losses")
    print(f"{agent.summary['env_steps']:,} env steps, {agent.summary['updates']:,} updates")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A policy that learns a game by playing against itself.")
    parser.add_argument("--game", choices=GAMES, default="tictactoe", help="the game")
    parser.add_argument("--policies", choices=("shared", "independent"), default="shared", help="policies of the sides")
    parser.add_argument("--target-steps", type=int, default=300_000, help="moves of both sides in training")
    parser.add_argument("--games", type=int, default=500, help="games against random moves, for each side")
    parser.add_argument("--seed", type=int, default=None, help="seed of all random numbers; drawn if not given")
    parser.add_argument("--log-dir", default=None, help="directory for metrics and model; without it nothing is saved")
    parser.add_argument("--smoke", action="store_true", help="run a few updates only, as a test")
    return parser.parse_args()


if __name__ == "__main__":
    main()
