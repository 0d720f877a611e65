"""Print digests of the results of 20 updates of each pattern and architecture in the simulated runtime.

    python benchmarks/digests.py > now.json
    python benchmarks/digests.py --tree ../before --against now.json

The digests show whether two source trees produce equal results. Each of the sixteen patterns trains a tiny PPO agent,
and each of the eight architectures trains an algorithm that suits it. The seeds are fixed. For each run, the JSON
object contains the number of updates, the ledger (without drop reasons whose count is 0), the SHA-256 of the acting
parameters, their norm, the norm of their change, and eight parameters. On one machine, the hashes of two trees are
equal if their parameters are equal bit for bit. Other processors and other versions of torch round differently; to
compare results from different machines or versions, use the other numbers, as `tests/unit/scheme/test_digests.py` does.
With `--against`, the exit code is 1 if anything differs, and the differences are printed on stderr.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parents[1]
UPDATES = 20
# Number of parameters to print, at evenly spaced positions.
NUM_SHOWN = 8


def runs() -> dict[str, tuple[str | None, dict[str, Any]]]:
    """Return a map from the name of each run to its architecture (None: plain `Scheme`) and settings."""
    found: dict[str, tuple[str | None, dict[str, Any]]] = {}
    for col, col_async, grad, grad_async in itertools.product((False, True), repeat=4):
        name = (f"{'parallel' if col else 'central'}-{'async' if col_async else 'sync'}_"
                f"{'parallel' if grad else 'central'}-{'async' if grad_async else 'sync'}")
        found[name] = None, {
            "num_col_workers": 3 if col else 1, "col_communication": "asynchronous" if col_async else "synchronous",
            "num_grad_workers": 2 if grad else 1, "grad_communication": "asynchronous" if grad_async else "synchronous"}
    replay = {"queue_size": 4, "train_batch_size": 16, "learning_starts": 40, "num_replay_workers": 2}
    return {
        **found,
        "a3c": ("a3c", {"num_grad_workers": 3, "updates_per_step": 1}),
        "ddppo": ("ddppo", {"num_grad_workers": 3}),
        "microbatch": ("microbatch", {"num_col_workers": 2, "train_batch_size": 64, "microbatch_size": 16}),
        "impala": ("impala", {"train_batch_size": 32}),
        "appo": ("appo", {"train_batch_size": 32}),
        "apex": ("apex", replay),
        "r2d2": ("r2d2", {**replay, "train_batch_size": 8}),
        "rapid": ("rapid", {"train_batch_size": 32}),
    }


def agent(architecture: str | None) -> tuple[Any, ...]:
    """Return the factories of a tiny agent for the architecture."""
    from pytorchrl import (
        A2C,
        APPO,
        DQN,
        IMPALA,
        PPO,
        R2D2,
        GAEBuffer,
        OnPolicyActor,
        PERBuffer,
        QActor,
        SequenceBuffer,
        VecEnv,
        VTraceBuffer,
    )

    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
    spaces = envs.observation_space, envs.action_space
    if architecture == "r2d2":
        return (R2D2.create_factory(start_steps=40, lr=1e-3),
                QActor.create_factory(*spaces, hidden_sizes=(4,), recurrent_net="gru", recurrent_size=4),
                SequenceBuffer.create_factory(400, rollout_size=4, length=4, burn_in=2, period=2, n_step=2), envs)
    if architecture == "apex":
        return (DQN.create_factory(start_steps=40, mini_batch_size=16, lr=1e-3),
                QActor.create_factory(*spaces, hidden_sizes=(8,)),
                PERBuffer.create_factory(400), envs)
    actor = OnPolicyActor.create_factory(*spaces, hidden_sizes=(8,))
    if architecture in ("impala", "appo", "rapid"):
        algorithm = IMPALA if architecture == "impala" else APPO
        return algorithm.create_factory(lr=1e-3), actor, VTraceBuffer.create_factory(8), envs
    if architecture == "a3c":
        return A2C.create_factory(lr=1e-3), actor, GAEBuffer.create_factory(8), envs
    return PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=1e-3), actor, GAEBuffer.create_factory(8), envs


def digest(name: str) -> dict[str, Any]:
    """Run one of `runs()` and return its digest."""
    from pytorchrl import Scheme

    architecture, settings = runs()[name]
    make = Scheme if architecture is None else getattr(Scheme, architecture)
    scheme = make(*agent(architecture), runtime="simulated", seed=1, schedule_seed=2, **settings)
    start = scheme.acting_state()
    while scheme.version < UPDATES:
        scheme.step()
    end, version = scheme.acting_state(), scheme.version
    ledger = dict(scheme.stop())
    ledger["dropped"] = {reason: steps for reason, steps in ledger["dropped"].items() if steps}
    hashed = hashlib.sha256()
    for key in sorted(end):
        hashed.update(f"{key} {tuple(end[key].shape)} {end[key].dtype}".encode())
        hashed.update(end[key].contiguous().numpy().tobytes())
    first, last = (torch.cat([state[key].double().flatten() for key in sorted(state)]) for state in (start, end))
    return {"updates": version, "ledger": ledger, "sha256": hashed.hexdigest(), "norm": float(last.norm()),
            "change": float((last - first).norm()), "some": last[::max(1, len(last) // NUM_SHOWN)][:NUM_SHOWN].tolist()}


def differences(found: dict[str, Any], against: dict[str, Any]) -> list[str]:
    """Return one line for each value that differs, and one line for each run that is missing on one side."""
    lines = [f"{name}: missing on one side" for name in sorted(found.keys() ^ against.keys())]
    for name in found.keys() & against.keys():
        lines += [f"{name}: {key} is {found[name][key]}, {against[name][key]} in the file"
                  for key in found[name] if found[name][key] != against[name].get(key)]
    return sorted(lines)


def main() -> int:
    """Parse the command line, run, and print the digests; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=lambda path: Path(path).resolve(),
                        help="folder of another source tree, whose package to run")
    parser.add_argument("--against", type=Path, help="output of this script, to compare with")
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs; all if no name is given")
    options = parser.parse_args()
    if options.tree is not None:
        environment = {**os.environ, "PYTHONPATH": str(options.tree), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        flags = [] if options.against is None else ["--against", str(options.against.resolve())]
        return subprocess.run([sys.executable, __file__, *flags, *options.names], cwd=options.tree, env=environment,
                              check=False).returncode
    import pytorchrl

    tree = Path(os.environ.get("PYTHONPATH", str(HERE)).split(os.pathsep)[0])
    if not Path(pytorchrl.__file__).is_relative_to(tree):
        raise SystemExit(f"{pytorchrl.__file__} is not in {tree}: another package of this name is first on the path")
    torch.set_num_threads(1)
    found = {name: digest(name) for name in options.names or runs()}
    print(json.dumps(found, indent=1))
    if options.against is None:
        return 0
    against = json.loads(options.against.read_text(encoding="utf-8"))
    lines = differences(found, {name: against[name] for name in options.names} if options.names else against)
    print("\n".join(lines) or "equal, bit for bit", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
