"""Tests that errors, files and fault plans use the same names for workers."""

from __future__ import annotations

import numpy as np
import pytest

from pytorchrl.agent.env import VecEnv
from pytorchrl.envs.testing import FaultyEnv
from pytorchrl.errors import EnvError
from pytorchrl.runtime.costs import Costs
from pytorchrl.runtime.faults import FaultPlan
from pytorchrl.support.worker_names import collection_worker, gradient_worker, in_file_name, replay_worker


def test_workers_are_named_by_level_and_number():
    assert (gradient_worker(1), collection_worker(1, 2), replay_worker(0, 3)) == (
        "GWorker 1", "GWorker 1/CWorker 2", "GWorker 0/RWorker 3")
    assert in_file_name(collection_worker(1, 12)) == "GWorker_1_CWorker_12"


def test_errors_files_and_fault_plans_use_worker_names(tmp_path):
    name = collection_worker(1, 2)
    place = {"index_grad_worker": 1, "index_col_worker": 2, "seed": 1}
    envs = VecEnv.create_factory(
        FaultyEnv, {"fault": "step", "at": 0}, vec_env_size=1, on_env_error="raise", log_dir=str(tmp_path))
    env = envs(**place)
    env.reset()
    with pytest.raises(EnvError, match=f"^{name}, env 0: step raised"):
        env.step(np.zeros(1, int))
    env.close()
    assert [path.name for path in tmp_path.iterdir()] == [f"monitor_train_{in_file_name(name)}.csv"]
    assert FaultPlan(f"kill {name} @ step 4", 0).points(name, 0, None) is not None
    assert FaultPlan(f"kill {name} @ step 4", 0).points(collection_worker(2, 1), 0, None) is None
    assert Costs({f"step@{name}": 3.0}, 0).draw("step", name) == 3.0
