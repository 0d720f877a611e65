"""Tests that the files of unit tests mirror the modules of the package, so that a module's tests are easy to find."""

from __future__ import annotations

from tests.conftest import ROOT
from tests.unit.packaging.source import MODULES, PACKAGE

UNIT = ROOT / "tests" / "unit"
# Folder -> its modules without a test file of their own -> the test files that cover them, both without their suffixes.
COVERED_BY = {
    # The project as a whole:
    "": {"__main__": ["cli/test_process"], "errors": ["scheme/transport/test_messages"]},
    # Bases are tested through their subclasses, and declarations through the parts that declare them:
    "agent": {
        "contracts": ["agent/algorithms/test_own_replay_algorithms", "scheme/test_own_parts"],
        "cuda_graphs": ["agent/algorithms/test_cuda_graphs"],
        "factories": ["scheme/test_agent_parts"],
        "fit": ["scheme/test_fit"],
        "moments": ["agent/algorithms/test_on_policy", "agent/storages/test_returns"],
        "names_elsewhere": ["agent/test_names"],
        "noise": ["agent/algorithms/test_compiled_replay"],
        "policy": ["agent/test_acting", "export/test_export"],
        "synthetic": ["scheme/test_architectures", "scheme/test_simulated"],
        "updatable": ["agent/test_schedules"],
    },
    "agent/actors": {
        "base": ["agent/actors/test_on_policy_actor", "agent/actors/test_replay_actor"],
        "off_policy_actor": ["agent/actors/test_replay_actor"],
        "q_actor": ["agent/actors/test_replay_actor"],
        "resnets": ["agent/actors/test_extractors", "agent/actors/test_trunk"],
        "small_memory": ["agent/actors/test_small_policy"],
        "squashed": ["agent/actors/test_replay_actor"],
        "value_actor": ["agent/algorithms/test_offline_losses"],
    },
    # Losses of similar algorithms are compared with one reference:
    "agent/algorithms": {
        "a2c": ["agent/algorithms/test_on_policy_losses"],
        "appo": ["agent/algorithms/test_impala_appo"],
        "base": ["agent/algorithms/test_on_policy", "agent/algorithms/test_replay"],
        "bc": ["agent/algorithms/test_offline_losses"],
        "duals": ["agent/algorithms/test_mpo"],
        "epsilon": ["agent/algorithms/test_dqn"],
        "impala": ["agent/algorithms/test_impala_appo"],
        "iql": ["agent/algorithms/test_offline_losses"],
        "ppo": ["agent/algorithms/test_on_policy_losses"],
        "rollouts": ["agent/algorithms/test_on_policy", "agent/algorithms/test_on_policy_losses"],
        "variants": ["training/test_variants"],
        "vtrace": ["agent/algorithms/test_impala_appo"],
    },
    # Backends and single environments are tested through the vector environments that consist of them:
    "agent/env": {
        "aliases": ["packaging/test_imports"],
        "envpool": ["agent/env/test_backends"],
        "images": ["agent/actors/test_extractors", "agent/env/test_spaces"],
        "single": ["agent/env/test_backends", "agent/env/test_vec_env"],
    },
    "agent/multi": {"actor": ["agent/multi/test_algorithm"], "building": ["agent/multi/test_env"]},
    # Parts of a storage are tested through the storage:
    "agent/storages": {
        "base": ["agent/storages/test_own_storages"],
        "group_rows": ["agent/storages/test_groups"],
        "observation_columns": ["agent/storages/test_replay", "agent/storages/test_replay_of_environments"],
        "rollout_rows": ["agent/storages/test_replay_of_environments"],
        "samples": ["agent/storages/test_on_policy"],
        "sequence_batch": ["agent/storages/test_sequences"],
    },
    "callbacks": {
        "search": ["callbacks/test_shipped"],
        "time_limit": ["learner/test_time_limits"],
        "trackers": ["callbacks/test_shipped"],
    },
    # Commands are tested through the command line:
    "cli": {
        "audit": ["play/test_audit"],
        "board": ["cli/test_watch"],
        "dataset": ["play/test_dataset"],
        "enjoy": ["cli/test_main"],
        "export": ["export/test_export"],
        "groups": ["cli/test_compare"],
        "output": ["cli/test_terminal"],
        "parsing": ["cli/test_main"],
        "plot": ["cli/test_main"],
        "replay": ["play/test_replay"],
        "report": ["cli/test_watch"],
        "saved_agent": ["cli/test_main"],
        "sweep": ["training/test_configuration"],
        "train": ["cli/test_main"],
    },
    "envs": {
        "box2d": ["envs/test_suites"], "classic": ["envs/test_suites"], "lookup": ["envs/test_suites"],
        "mujoco": ["envs/test_suites"],
    },
    "export": {
        "checks": ["export/test_export"], "formats": ["export/test_export"], "graph": ["export/test_export"],
        "inputs": ["export/test_export"],
    },
    "files": {"tensors": ["files/test_atomic", "learner/test_checkpoints"]},
    "learner": {"options": ["learner/test_learner", "learner/test_files"]},
    "monitor": {
        "live": ["monitor/test_screen"], "run_section": ["monitor/test_page"],
        "time_shares": ["profile/test_profiling"],
    },
    # The interface of all runtimes is tested through each of them:
    "runtime": {"base": ["runtime/test_queues", "runtime/test_threads"]},
    "runtime/processes": {
        "remote_calls": ["runtime/processes/test_runtime"], "start": ["runtime/processes/test_runtime"],
    },
    "runtime/ray": {"resource_fitting": ["runtime/ray/test_runtime"]},
    # The parts of collection and of gradient workers are tested through workers or whole schemes that contain them:
    "scheme": {"elastic": ["scheme/test_resize", "scheme/test_resize_and_resume"]},
    "scheme/collection": {
        "c_worker_set": ["scheme/collection/test_c_worker", "scheme/test_devices"],
        "collector_thread": ["scheme/collection/test_strategies", "scheme/test_learner_thread"],
        "env_worker": ["scheme/collection/test_central_inference"],
        "owed_steps": ["scheme/test_preemption"],
        "resizing": ["scheme/test_resize"],
    },
    "scheme/gradients": {
        "assembly": ["scheme/gradients/test_microbatching"],
        "batch_source": ["scheme/gradients/test_sample_queue", "scheme/test_learner_thread"],
        "defaults": ["scheme/test_mini_batch_size", "scheme/test_settings"],
        "g_worker_set": ["scheme/test_trees_by_hand", "scheme/test_checkpoint_faults"],
        "gradient_computer": ["scheme/gradients/test_microbatching"],
        "loader": ["scheme/gradients/test_staging"],
        "placement": ["scheme/test_devices"],
        "recipe": ["scheme/gradients/test_microbatching"],
        "replay_source": ["scheme/test_in_flight", "scheme/test_r2d2_rollouts"],
    },
    "scheme/options": {
        "keywords": ["scheme/test_settings"],
        "replay": ["scheme/replay/test_r_worker_set"],
        "run": ["scheme/recording/test_record_file"],
        "updates": ["scheme/test_settings", "scheme/updates/test_asynchronous"],
    },
    # Strategies of updates are compared with one another:
    "scheme/updates": {
        "central": ["scheme/updates/test_u_worker", "scheme/test_equivalence"],
        "remote": ["scheme/updates/test_asynchronous"],
        "synchronous": ["scheme/test_equivalence", "scheme/updates/test_nan_policy"],
    },
    "support": {
        "problems": ["scheme/test_check"],
        "signals": ["scheme/test_signals"],
        "terminal": ["cli/test_terminal"],
        "untyped": ["packaging/test_structure"],
        "work": ["profile/test_work_shares"],
    },
    "training": {"recipes": ["training/test_configuration"]},
}


def own_test(folder, module):
    return UNIT / folder / f"test_{module}.py"


def test_each_module_has_a_test_file_or_names_those_that_cover_it():
    missing = {}
    for path in MODULES:
        folder = path.parent.relative_to(PACKAGE)
        if path.stem != "__init__" and not own_test(folder, path.stem).is_file():
            missing.setdefault(folder.as_posix().strip("."), set()).add(path.stem)
    assert missing == {folder: set(modules) for folder, modules in COVERED_BY.items()}, "add a test file or an entry"


def test_the_listed_test_files_exist():
    listed = {test for modules in COVERED_BY.values() for tests in modules.values() for test in tests}
    assert [test for test in sorted(listed) if not (UNIT / f"{test}.py").is_file()] == []
    assert all(tests for modules in COVERED_BY.values() for tests in modules.values())


def test_each_folder_of_tests_mirrors_a_folder_of_the_package():
    found = {path.parent.relative_to(UNIT) for path in UNIT.rglob("test_*.py")}
    assert {folder.as_posix() for folder in found if not (PACKAGE / folder).is_dir()} == {"packaging"}
