"""Tools for tests that record and replay runs."""

from __future__ import annotations

import json

import pytest
import torch

from pytorchrl import ASYNC
from pytorchrl.errors import EnvError, NonFiniteUpdateError, WorkerLostError
from pytorchrl.files.lines import seal

ALL_ASYNC = {"num_col_workers": 3, "col_communication": ASYNC, "num_grad_workers": 2, "grad_communication": ASYNC}
ASYNC_COLLECTION = {"num_col_workers": 3, "col_communication": ASYNC}


def run_on(scheme):
    """Call `scheme.step` 1,000 times, more often than in any recorded run."""
    for _ in range(1000):
        scheme.step()


class Runs:
    """A tool that records runs in the file `path`, and replays them."""

    def __init__(self, make_scheme, path):
        self.make, self.path = make_scheme, str(path)

    def record(self, updates=15, between=None, **settings):
        """Record a run until `updates` updates are made, call `between(scheme)` after each step, and return the
        results."""
        scheme = self.make(record=self.path, **settings)
        return self._run(scheme, lambda: scheme.version >= updates, between)

    def replay(self, between=None, **settings):
        """Replay the record to its end, call `between(scheme)` after each step, and return the results."""
        settings.pop("runtime", None), settings.pop("schedule_seed", None), settings.pop("costs", None)
        scheme = self.make(runtime=None, replay=self.path, **settings)
        return self._run(scheme, lambda: scheme.replay_is_over, between)

    def _run(self, scheme, is_over, between):
        error = None
        try:
            while not is_over():
                scheme.step()
                if between is not None:
                    between(scheme)
        except (EnvError, WorkerLostError, NonFiniteUpdateError) as failure:
            error = failure
        return self._end(scheme, error)

    def _end(self, scheme, error):
        metrics, ledger = scheme.metrics(), scheme.stop()
        assert ledger["in_flight"] == ledger["queued"] == 0
        assert ledger["collected"] == ledger["consumed_unique"] + sum(ledger["dropped"].values())
        weights = scheme._worker.local_worker.get_weights()
        if scheme._worker._in_thread:  # the thread may have continued after `metrics` was read
            metrics = scheme.metrics()
        return {"version": scheme._worker.actor_version, "error": error, "lag": metrics["policy_lag"],
                "grad_lag": metrics["grad_lag"], "numbers": [metrics[name] for name in ("queue", "passes_cancelled")],
                "restarts": metrics["workers_restarted"],
                "state": {name: torch.as_tensor(value) for name, value in weights.state.items()}}

    def lines(self):
        """Return all entries of the record in the form [worker, incarnation, events, turns]."""
        with open(self.path, encoding="utf-8") as file:
            return [part for line in list(file)[1:-1] for part in json.loads(line)["parts"]]

    def alter(self, change):
        """Call `change(part)` for each part of the record until a call returns True, and save the record.

        `change` may modify the part in place.
        """
        self.rewrite(lambda lines: any(change(part) for line in lines[1:-1] for part in line["parts"]))

    def rewrite(self, change):
        """Call `change` with all lines of the record, which it may modify in place, and save them with new checksums.

        `change` must return something true.
        """
        with open(self.path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        assert change(lines)
        checksum = ""
        with open(self.path, "w", encoding="utf-8") as file:
            for line in lines:
                del line["sha256"]
                text, checksum = seal(json.dumps(line), checksum)
                file.write(text)

    def twice(self, **settings):
        """Record a run, replay it, check that the results are equal, and return both."""
        first = self.record(**settings)
        settings.pop("updates", None)
        again = self.replay(**settings)
        assert again["version"] == first["version"]
        assert first["state"].keys() == again["state"].keys()
        for name, value in first["state"].items():
            assert torch.equal(value, again["state"][name]), name
        assert (type(again["error"]), again["lag"], again["grad_lag"]) == (type(first["error"]), first["lag"],
                                                                           first["grad_lag"])
        return first, again


@pytest.fixture
def runs(make_scheme, tmp_path):
    return Runs(make_scheme, tmp_path / "run.jsonl")
