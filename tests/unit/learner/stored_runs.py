"""Small runs that earlier versions and this one have written, stored as text.

    PYTHONPATH=CHECKOUT python tests/unit/learner/stored_runs.py VERSION

makes the runs with the version of the library in the directory CHECKOUT, and stores them in `runs_of_versions`. Each
stored file contains the files of a run, the numbers at its end, and the numbers after this version resumed the run. The
script uses only functions that all versions have.
"""

from __future__ import annotations

import base64
import json
import lzma
import sys
import tempfile
from pathlib import Path

STORED = Path(__file__).parent / "runs_of_versions"
STEPS, RESUMED_STEPS = 64, 96
FILES = ("run.json", "metrics.jsonl", "model.pt", f"checkpoints/step-{STEPS:012d}.pt")
COMMON = {"env": "CartPole-v1", "num_envs": 2, "hidden_sizes": (4,), "seed": 3, "progress": False, "tensorboard": False,
          "num_threads": 1, "log_every": 16, "checkpoint_every": 32}
RUNS = {
    "ppo": {"num_steps": 8, "num_epochs": 2, "num_mini_batch": 2, "normalize_obs": True},
    "dqn": {"replay_size": 40, "start_steps": 16, "update_every": 8, "num_updates": 4, "mini_batch_size": 8,
            "prioritized": True},
}
COLUMNS = 100


def train(algorithm, directory, **options):
    """Train one of the runs in a directory, and return the trained agent."""
    import pytorchrl

    return pytorchrl.train(algorithm, log_dir=str(directory), **COMMON, **RUNS[algorithm], **options)


def numbers_of(agent):
    """Return the numbers of a finished run, as JSON has them."""
    names = ("env_steps", "updates", "return_mean", "return_episodes", "ledger")
    return {**{name: agent.summary[name] for name in names},
            "acting_state": {name: tensor.tolist() for name, tensor in agent.acting_state.items()}}


def unpack(path, directory):
    """Write the files of a stored run to a directory, and return the numbers after its end and after resuming it."""
    stored = json.loads(path.read_text(encoding="ascii"))
    for name, lines in stored["files"].items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(lzma.decompress(base64.urlsafe_b64decode("".join(lines))))
    return stored["at_the_end"], stored["resumed"]


def store(version):
    """Make all runs with the imported version of the library, and store them."""
    STORED.mkdir(exist_ok=True)
    for algorithm in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            found = {"at_the_end": numbers_of(train(algorithm, folder, target_steps=STEPS)), "files": {}}
            for name in FILES:
                packed = lzma.compress((Path(folder) / name).read_bytes(), preset=9)
                text = base64.urlsafe_b64encode(packed).decode("ascii")
                found["files"][name] = [text[start:start + COLUMNS] for start in range(0, len(text), COLUMNS)]
            found["resumed"] = numbers_of(train(algorithm, folder, target_steps=RESUMED_STEPS, resume=True))
        (STORED / f"{version}-{algorithm}.json").write_text(json.dumps(found, indent=0) + "\n", encoding="ascii")


if __name__ == "__main__":
    store(sys.argv[1])
