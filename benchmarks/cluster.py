"""Measure the cost of losing a node: PPO trains on a Ray cluster of three nodes on this machine, and one node dies.

    python benchmarks/cluster.py [--cases collectors,rounds,gradients,colocated,no-room] [--seconds 5]
    [--default-health-checks]

The driver runs on a head node without CPUs, and the workers run on two nodes with four CPUs each. The script kills all
processes of one node: the node of gradient worker 1 or, if there are no remote gradient workers, the node of collection
worker 1. It then measures two durations, which both start at the kill:

    noticed_s  seconds until the supervisor logs that a worker of the top remote level is lost
    back_s     seconds until all lost workers of that level are replaced, and each replacement has sent a result

Ray's default health checks need fifteen seconds to detect a dead node. Unless --default-health-checks is given, a node
counts as dead after three failed checks at intervals of half a second. In `no-room`, the workers request all CPUs, so
that lost workers cannot be replaced; the script measures the time until training ends with an error.

The script shows its progress on stderr, prints one JSON object, and asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from typing import Any

# Ray reads these environment variables during its import. They set the directory of this run, require a token for
# connections, and turn off usage statistics.
os.environ["RAY_TMPDIR"] = os.environ.get("RAY_TMPDIR") or tempfile.mkdtemp(prefix="prl-", dir="/tmp")
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}

import ray
from failures import Noticed
from ray.cluster_utils import Cluster
from results import print_result

from pytorchrl import ASYNC, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.envs.testing import SleepEnv
from pytorchrl.errors import PyTorchRLError
from pytorchrl.runtime.ray.reaper import start_reaper

NUM_CPUS, STEP_S = 4, 0.005
QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_timeout_ms": 20_000,
         "health_check_failure_threshold": 3}
"""Options of Ray's health checks. The timeout can be long, because connections to dead processes fail immediately."""
COLLECTORS: dict[str, Any] = {"num_col_workers": 4}
GRADIENTS: dict[str, Any] = {"num_grad_workers": 2, "num_col_workers": 2, "grad_communication": ASYNC,
                             "col_communication": ASYNC}
CASES: dict[str, dict[str, Any]] = {
    "collectors": {**COLLECTORS, "col_communication": ASYNC},
    "rounds": COLLECTORS,
    "gradients": GRADIENTS,
    "colocated": {**GRADIENTS, "placement": "colocate"},
    "no-room": {**COLLECTORS, "col_communication": ASYNC, "col_worker_resources": {"num_cpus": 2},
                "worker_timeout_s": 5.0},
}


def patient(get_node: Any, patience_s: float = 180.0) -> Any:
    """Return a function that retries `get_node` for up to `patience_s` seconds."""
    def get(*arguments: Any) -> Any:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:  # noqa: PERF203 - the loop retries
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
    return get


def nodes_of(handles: list[Any]) -> list[str]:
    """Return the node of each worker, even if the workers are busy."""
    asked = [handle.native.__ray_call__.options(concurrency_group="control").remote(
        lambda _self: ray.get_runtime_context().get_node_id()) for handle in handles]
    return ray.get(asked, timeout=60)


def nodes_below(handles: list[Any]) -> list[list[str]]:
    """Return the nodes of the collection workers of each gradient worker."""
    asked = [handle.native.__ray_call__.options(concurrency_group="control").remote(
        lambda host: nodes_of(host._worker.remote_workers)) for handle in handles]
    return ray.get(asked, timeout=60)


def places(scheme: Scheme) -> dict[str, Any]:
    """Count the workers on each node, and the gradient workers that share a node with all of their collectors."""
    root = scheme.update_worker
    above, below = nodes_of(root.remote_workers), nodes_below(root.remote_workers) if root.remote_workers else []
    collectors = [node for nodes in below for node in nodes] if below else nodes_of(root.local_worker.remote_workers)
    return {"workers_by_node": sorted(Counter(above + collectors).values()), "first": (above or collectors)[0],
            "together": sum(set(nodes) == {node} for node, nodes in zip(above, below, strict=True))}


def supervisor_of(scheme: Scheme) -> Any:
    """Return the supervisor of the top remote level: gradient workers if any are remote, else collection workers."""
    root: Any = scheme.update_worker
    return root.strategy.supervisor if root.remote_workers else root.local_worker.collector.supervisor


def rate(scheme: Scheme, seconds: float) -> float:
    """Train for `seconds` seconds, and return the env steps used per second."""
    first, start = scheme.ledger()["consumed_unique"], time.time()
    while time.time() - start < seconds:
        scheme.step()
    return (scheme.ledger()["consumed_unique"] - first) / (time.time() - start)


def lose_node(scheme: Scheme, cluster: Cluster, seconds: float, noticed: Noticed) -> dict[str, Any]:
    """Train, kill a node, continue training, and return the measurements."""
    while scheme.version < 20:
        scheme.step()
    before, found = places(scheme), {"env_steps_per_s_before": rate(scheme, seconds)}
    first = before.pop("first")
    node = next(node for node in cluster.worker_nodes if node.node_id == first)
    version, num_noticed, start = scheme.version, len(noticed.at), time.time()
    cluster.remove_node(node, allow_graceful=False)
    try:
        supervisor = supervisor_of(scheme)
        while len(noticed.at) == num_noticed or supervisor.gone or supervisor._untried:
            scheme.step()
        found |= {"noticed_s": noticed.at[num_noticed] - start, "back_s": time.time() - start}
        found["env_steps_per_s_after"] = rate(scheme, seconds)
        after = places(scheme)
        after.pop("first")
        found |= {"before": before, "after": after, "workers_restarted": scheme.metrics()["workers_restarted"]}
    except PyTorchRLError as error:
        found |= {"before": before, "error": type(error).__name__, "text": str(error),
                  "error_after_s": time.time() - start}
    return {**found, "updates_after": scheme.version - version}


def measure(case: str, cluster: Cluster, seconds: float, noticed: Noticed) -> dict[str, Any]:
    """Return the measurements of one scheme that loses a node."""
    envs = VecEnv.create_factory(SleepEnv, {"step_s": STEP_S}, 2)
    scheme = Scheme(
        PPO.create_factory(num_epochs=1, num_mini_batch=1, lr=1e-3),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(16,)),
        GAEBuffer.create_factory(16),
        envs, seed=1, address=cluster.address, **CASES[case])
    try:
        found = lose_node(scheme, cluster, seconds, noticed)
    finally:
        start = time.time()
        ledger = scheme.stop()
    exact = ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values())
    return {"case": case, **found, "stop_s": time.time() - start, "ledger_exact": exact,
            "worker_lost_steps": ledger["dropped"]["worker_lost"]}


def measure_all(cases: list[str], seconds: float, default_health_checks: bool) -> list[dict[str, Any]]:
    """Measure each case on a cluster of nodes on this machine, and return the results."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray._private.services.get_node = patient(ray._private.services.get_node)
    reaper = start_reaper(os.environ["RAY_TMPDIR"])  # kills remaining processes, however this process ends
    cluster, noticed, found = Cluster(), Noticed(), []
    sizes: dict[str, Any] = {"object_store_memory": 100 * 2**20, "include_dashboard": False,
                             "include_log_monitor": False}
    try:
        cluster.add_node(num_cpus=0, no_monitor=True, _system_config={} if default_health_checks else QUICK, **sizes)
        for case in cases:
            while len(cluster.worker_nodes) < 2:
                cluster.add_node(num_cpus=NUM_CPUS, **sizes)
            found.append(measure(case, cluster, seconds, noticed))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()
        reaper.communicate()
    return found


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="cases, separated by commas")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of the measurements before and after")
    parser.add_argument("--default-health-checks", action="store_true",
                        help="keep Ray's default intervals of health checks")
    options = parser.parse_args()
    # Ray prints messages about lost nodes at any log level.
    with contextlib.redirect_stdout(sys.stderr):
        found = measure_all(options.cases.split(","), options.seconds, options.default_health_checks)
    print_result({"task": "cluster", "unit": "s", "results": found})


if __name__ == "__main__":
    main()
