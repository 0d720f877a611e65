"""Measure the simulated runtime with a large worker tree, in which all levels are asynchronous.

    python benchmarks/simulation.py [--col-workers 1000] [--grad-workers 8] [--updates 500]

The agent is synthetic, so that environments and gradients cost almost no time. The script starts the workers, makes
`--updates` updates, and stops the workers. It prints one JSON object with seconds, virtual seconds, events and the
ledger, and asserts nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from results import print_result

from pytorchrl import ASYNC, Scheme
from pytorchrl.agent.synthetic import synthetic_agent


def simulate(col_workers: int, grad_workers: int, updates: int) -> dict[str, Any]:
    """Run one simulation, and return its measurements."""
    scheme = Scheme(
        *synthetic_agent(size=20), num_col_workers=col_workers, col_communication=ASYNC, col_in_flight=1, queue_size=64,
        num_grad_workers=grad_workers, grad_communication=ASYNC, runtime="simulated", seed=1,
        costs={"step": ("lognormal", 0.005, 0.3), "grad": 0.002})
    start = time.perf_counter()
    scheme.start()
    runtime: Any = scheme.runtime
    started, virtual = time.perf_counter(), runtime.now()
    num_tasks, shown = len(runtime.running), 0
    while scheme.version < updates:
        scheme.step()
        if scheme.version >= shown + 50:
            shown = scheme.version
            print(f"{shown} of {updates} updates", file=sys.stderr, flush=True)
    trained, virtual = time.perf_counter(), runtime.now() - virtual
    used, lag = scheme.ledger()["consumed_unique"], scheme.metrics()["policy_lag"]
    ledger = scheme.stop()
    places = ledger["consumed_unique"] + sum(ledger["dropped"].values())
    return {
        "workers_and_threads": num_tasks, "start_s": started - start, "updates": updates, "run_s": trained - started,
        "virtual_s": virtual, "virtual_s_per_s": virtual / (trained - started), "events": runtime.simulation.num_events,
        "env_steps_per_virtual_s": used / virtual, "policy_lag_mean": lag["mean"],
        "stop_s": time.perf_counter() - trained,
        "ledger_exact": ledger["collected"] == places and not ledger["in_flight"] and not ledger["queued"],
        "tasks_left": len(runtime.running),
    }


def main() -> None:
    """Parse the command line, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--col-workers", type=int, default=1000, help="collection workers of each gradient worker")
    parser.add_argument("--grad-workers", type=int, default=8)
    parser.add_argument("--updates", type=int, default=500)
    options = parser.parse_args()
    print_result(simulate(options.col_workers, options.grad_workers, options.updates))


if __name__ == "__main__":
    main()
