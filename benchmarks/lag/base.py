"""Make the base decoder from which the runs of the lag study start: supervised learning from noisy answers.

    python benchmarks/lag/base.py [--task sort] [--out FOLDER]

The answers of the training data are right, but each token is replaced by a random one with probability `NOISE`. The
decoder therefore knows the task, and its answers are wrong as often as the data. A call takes ten seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Before torch is loaded, select kernels that all x86 processors with AVX2 have: each of them computes the same bits.
os.environ.update(ATEN_CPU_CAPABILITY="avx2", MKL_CBWR="AVX2", ONEDNN_MAX_CPU_ISA="AVX2")

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from pytorchrl.agent.actors import DecoderActor
from pytorchrl.agent.actors.decoder import LENGTH
from pytorchrl.agent.algorithms import GRPO
from pytorchrl.agent.data import Obs
from pytorchrl.agent.env.tokens import TokenEnv
from pytorchrl.envs.tasks import Addition, Copy, SortDigits
from pytorchrl.files.tensors import MODEL_FORMAT, save

TASKS = {"sort": (SortDigits, {"num_digits": 4}), "add": (Addition, {"num_digits": 2}), "copy": (Copy, {"longest": 12})}
NOISE, STEPS, BATCH, LR = 0.35, 700, 128, 2e-3


class CountingDecoder(DecoderActor):
    """A decoder that counts the tokens whose keys and values are computed again, all actors together."""

    num_recomputed = 0

    def recomputed(self, rhs: Obs) -> Obs:
        """Return memory in which all keys and values are those of the current weights."""
        CountingDecoder.num_recomputed += int(rhs[LENGTH].sum())
        return super().recomputed(rhs)


def right_answer(name: str, prompt: list[int]) -> list[int]:
    """Return the right answer to a prompt."""
    if name == "sort":
        return sorted(prompt[:-1])
    if name == "copy":
        return [*prompt[:-1], Copy.end]
    size = (len(prompt) - 2) // 2
    total = sum(int("".join(map(str, digits))) for digits in (prompt[:size], prompt[size + 1:-1]))
    return [int(digit) for digit in reversed(f"{total:0{size + 1}d}")]


def actor_factory(name: str, checkpoint: str | None = None) -> object:
    """Return the factory of the study's decoder for a task."""
    task, kwargs = TASKS[name]
    envs = TokenEnv.create_factory(task, kwargs)
    built = task(**kwargs)
    return CountingDecoder.create_factory(envs.observation_space, envs.action_space,
                                          context=built.max_prompt + built.max_answer, checkpoint=checkpoint)


def train_base(name: str, steps: int = STEPS, seed: int = 0) -> GRPO:
    """Train the decoder on noisy answers, and return it as part of an algorithm."""
    task, kwargs = TASKS[name]
    built, rng = task(**kwargs), np.random.default_rng(seed)
    actor = actor_factory(name)(device="cpu", seed=seed)
    algorithm = GRPO.create_factory()(device="cpu", actor=actor, seed=seed)
    optimizer = torch.optim.Adam(actor.parameters(), lr=LR)
    length = built.max_prompt + built.max_answer
    for _ in range(steps):
        tokens, wanted = torch.zeros(length, BATCH, dtype=torch.int64), torch.zeros(length, BATCH, dtype=torch.bool)
        for row in range(BATCH):
            prompt = list(built.prompt(rng))
            answer = right_answer(name, prompt)
            noisy = [int(rng.integers(built.num_tokens)) if rng.random() < NOISE else token for token in answer]
            text = [*prompt, *noisy]
            tokens[:len(text), row] = torch.tensor(text)
            wanted[len(prompt) - 1:len(text) - 1, row] = True
        done = torch.zeros(length - 1, BATCH, dtype=torch.bool)
        done[0] = True
        features, _ = actor.policy_features({"obs": tokens[:-1]}, {}, done)
        loss = F.cross_entropy(actor.policy_head(features[wanted[:-1]]), tokens[1:][wanted[:-1]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return algorithm


def path_of(name: str, folder: Path) -> Path:
    """Return the file of the base decoder of a task."""
    return folder / f"base_{name}.pt"


def save_base(name: str, folder: Path) -> None:
    """Make the base decoder of a task unless its file exists; control tasks have none."""
    path = path_of(name, folder)
    if name in TASKS and not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        state = {"format": MODEL_FORMAT, "version": 0, "acting_state": train_base(name).acting_state()}
        save(str(path), state)


def main() -> None:
    """Parse the command line, train, and save the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="sort")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    save_base(options.task, options.out)
    print(f"saved {path_of(options.task, options.out)}", file=sys.stderr)


if __name__ == "__main__":
    main()
