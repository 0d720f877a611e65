"""Tests that every example runs with `--smoke` in an empty folder, and uses only public names.

Examples whose workers run on Ray are tested with the simulated runtime in place of Ray. Only those in `ON_RAY` and, in
the thorough form, all others run with Ray.
"""

from __future__ import annotations

import ast
import importlib.util
import json

import pytest

from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"
# Script -> (marks, optional package that the script needs); Ray Tune needs pandas.
SMOKE_RUNS = {
    "central_ppo.py": ([], None),
    "parallel_sync_ppo.py": ([pytest.mark.ray], None),
    "async_collection.py": ([pytest.mark.ray], None),
    "a3c.py": ([pytest.mark.ray], None),
    "apex.py": ([pytest.mark.ray], None),
    "appo.py": ([pytest.mark.ray], None),
    "ddppo.py": ([pytest.mark.ray], None),
    "impala.py": ([pytest.mark.ray], None),
    "rapid.py": ([pytest.mark.ray], None),
    "worker_tree.py": ([], None),
    "r2d2.py": ([pytest.mark.ray], None),
    "microbatch.py": ([], None),
    "multi_agent.py": ([], "mpe2"),
    "self_play.py": ([], "pygame"),
    "atari_ppo.py": ([], "ale_py"),
    "mujoco_ppo.py": ([], "mujoco"),
    "tensor_ppo.py": ([], None),
    "imitate.py": ([], None),
    "bit_flipping.py": ([], None),
    "optuna_search.py": ([], "optuna"),
    "tune_search.py": ([pytest.mark.ray], "pandas"),
}
# Script -> (env steps, updates) with `--smoke --seed 1`; the simulated runtime also makes asynchronous runs repeatable.
COUNTS = {
    "central_ppo.py": (982, 40),
    "parallel_sync_ppo.py": (987, 40),
    "async_collection.py": (738, 3),
    "a3c.py": (1228, 10),
    "apex.py": (307, 2),
    "appo.py": (615, 17),
    "ddppo.py": (972, 64),
    "impala.py": (741, 3),
    "rapid.py": (737, 3),
    "worker_tree.py": (742, 3),
    "r2d2.py": (308, 2),
    "microbatch.py": (1966, 1),
    "multi_agent.py": (800, 32),
    "self_play.py": (2048, 64),
    "atari_ppo.py": (128, 16),
    "mujoco_ppo.py": (256, 160),
    "tensor_ppo.py": (512, 64),
    "imitate.py": (982, 40),
    "bit_flipping.py": (512, 97),
    "optuna_search.py": (312, 100),
}
# Script -> ranges of the env steps and updates of runs on Ray whose counts vary. There, asynchronous workers collect
# until the target is reached, and slow workers are cut short. Ranges without an end depend on the speed of the workers.
RANGES_ON_RAY = {
    "async_collection.py": ((500, None), (2, None)),
    "a3c.py": ((500, None), (4, None)),
    "apex.py": ((300, None), (1, None)),
    "appo.py": ((500, None), (8, None)),
    "ddppo.py": ((500, 1024), (32, 64)),  # at most 2 rounds of 512 steps, each with 8 epochs of 4 minibatches
    "impala.py": ((500, None), (2, None)),
    "rapid.py": ((500, None), (2, None)),
    "r2d2.py": ((300, None), (1, None)),
    # Tune draws 1 to 10 epochs of 4 minibatches. A rollout has 64 rows, a few of which are no steps, so that 4 or 5
    # rollouts reach the target.
    "tune_search.py": ((256, 320), (16, 200)),
}
ON_RAY = {"parallel_sync_ppo.py", "tune_search.py"}
# Script -> arguments that make its workers run in the simulated runtime, if they do not run on Ray.
SIMULATED = {"worker_tree.py": ["--runtime", "simulated"]}
# Runs a script with the simulated runtime wherever a scheme would use Ray.
WITHOUT_RAY = """
import runpy, sys
from pytorchrl.runtime import RayRuntime, SimulatedRuntime
from pytorchrl.scheme import scheme
make = scheme.make_runtime
scheme.make_runtime = lambda options, **more: make(
    SimulatedRuntime.Options() if isinstance(options, RayRuntime.Options) else options, **more)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
assert "ray" not in sys.modules
"""
# Time limit of each example in seconds; a busy machine takes ten times as long as an idle one.
TIMEOUT_S = 300
pytestmark = pytest.mark.timeout(360)


def test_every_example_has_a_smoke_run():
    assert {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")} == set(SMOKE_RUNS)
    assert set(COUNTS) | ON_RAY == set(SMOKE_RUNS)


def runs():
    """Yield the cases of an example: its name, the package that it needs, and whether it runs with Ray."""
    for name, (marks, package) in SMOKE_RUNS.items():
        if pytest.mark.ray not in marks or name not in ON_RAY:
            yield pytest.param(name, package, False, id=name)
        if pytest.mark.ray in marks:
            more = [] if name in ON_RAY else [pytest.mark.thorough]
            yield pytest.param(name, package, True, id=f"{name}-ray", marks=[*marks, *more])


@pytest.mark.parametrize(("name", "package", "on_ray"), list(runs()))
def test_example_runs(name, package, on_ray, request, tmp_path):
    # Connect to the Ray cluster of the tests instead of starting another one.
    run = request.getfixturevalue("run_on_ray" if on_ray else "run_forked")
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    log_dir = tmp_path / "run"
    script = [EXAMPLES / name] if on_ray else ["-c", WITHOUT_RAY, EXAMPLES / name, *SIMULATED.get(name, [])]
    result = run(*script, "--smoke", "--seed", "1", "--log-dir", log_dir, timeout=TIMEOUT_S)
    assert result.returncode == 0, result.stderr
    assert "env steps" in result.stdout
    assert {"run.json", "metrics.jsonl", "model.pt", "result.json"} <= {path.name for path in log_dir.iterdir()}
    check_counts(name, json.loads((log_dir / "result.json").read_text()), on_ray)


def check_counts(name, result, on_ray):
    """Check the env steps and updates of a run, and that its ledger accounts for each collected step once."""
    ledger = result["ledger"]
    assert ledger["collected"] == sum(ledger["dropped"].values()) + sum(
        ledger[part] for part in ("in_flight", "queued", "consumed_unique", "resident", "evicted"))
    counts = result["env_steps"], result["updates"]
    if on_ray and name in RANGES_ON_RAY:
        for count, (least, most) in zip(counts, RANGES_ON_RAY[name], strict=True):
            assert count >= least
            assert most is None or count <= most
    else:
        assert counts == COUNTS[name]


@pytest.mark.parametrize("name", sorted(SMOKE_RUNS))
def test_example_uses_public_names_only(name):
    for node in ast.walk(ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))):
        used = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        imported = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        for word in [used, *imported]:
            assert not word.startswith("_") or word.startswith("__"), f"{name}:{node.lineno}: {word}"
