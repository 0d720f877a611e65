"""Check that every keyword of `Scheme` has an observable effect, and that no keyword is missing from this file."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from pytorchrl import ASYNC, Scheme
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.runtime.simulated import SimulatedRuntime
from pytorchrl.scheme.options.settings import default_of_keyword, known_keywords

TESTS = Path(__file__).parents[2]
ONE_SLOW = {"costs": {"step@*/CWorker 2": 1.0}}
SLOW_LEARNER = {"costs": {"grad": 1.0}}
SLOW_ADDS = {"costs": {"add": 1.0}}
COLLECTORS = {"num_col_workers": 3}
LEARNER = {**COLLECTORS, "col_communication": ASYNC, "grad_communication": ASYNC}
SLOW_COLLECTORS = {**LEARNER, "costs": {"step": 0.5}}
A3C = {"num_grad_workers": 3, "grad_communication": ASYNC}
SHARDS = {**LEARNER, "num_replay_workers": 2, "train_batch_size": 8}

# Keyword -> (other settings, a value that differs from the default); the value must change the outcome of a run.
RUNS = {
    "num_col_workers": ({}, 2), "col_communication": (COLLECTORS, ASYNC),
    "col_fraction_workers": ({**COLLECTORS, **ONE_SLOW}, 0.6),
    "fraction_samples": ({**COLLECTORS, **ONE_SLOW, "col_fraction_workers": 0.6}, 0.75),
    "on_straggler": ({**COLLECTORS, **ONE_SLOW, "col_fraction_workers": 0.6}, "finish"),
    "num_replay_workers": (SHARDS, 3), "learning_starts": (SHARDS, 100), "add_in_flight": ({**SHARDS, **SLOW_ADDS}, 1),
    "routing": (SHARDS, "by_stream"), "size": (SHARDS, 40), "prefetch": (SHARDS, 1),
    "min_replay_ratio": ({**SHARDS, "costs": {"step": 0.05, "grad": 0.2}}, 2.0), "max_replay_ratio": (SHARDS, 0.5),
    "num_grad_workers": ({}, 2), "grad_communication": ({"num_grad_workers": 2}, ASYNC),
    "distribute_gradients": ({"num_grad_workers": 2}, True), "col_in_flight": (LEARNER, 2),
    "queue_size": ({**LEARNER, **SLOW_LEARNER}, 4),
    "queue_policy": ({**LEARNER, "costs": {"step": 0.1, "grad": 1.0}, "queue_size": 1}, "drop_oldest"),
    "train_batch_size": (LEARNER, 12), "minibatch_buffer_size": ({**LEARNER, "num_passes": 2}, 3),
    "num_passes": (LEARNER, 2),
    "ramp": ({**LEARNER, "num_passes": 3, "minibatch_buffer_size": 2}, False),
    "buffer": ({**LEARNER, "num_passes": 2}, "circular"),
    "max_policy_lag": ({**LEARNER, **SLOW_LEARNER}, 0), "on_policy_lag": ({**LEARNER, "max_policy_lag": 1}, "drop"),
    "inference": (LEARNER, "central"), "inference_batch": ({**LEARNER, "inference": "central"}, 1),
    "broadcast_interval": (LEARNER, 5), "max_weight_sync_delay": (LEARNER, 40), "updates_per_step": ({}, 3),
    "aggregate": (A3C, 2), "max_grad_lag": (A3C, 0), "lag_policy": ({**A3C, "max_grad_lag": 0}, "drop"),
    "schedule_seed": (LEARNER, 5), "costs": (LEARNER, {"grad": 1.0}), "faults": (LEARNER, "delay col.1 2s"),
    "on_worker_failure": ({**SLOW_COLLECTORS, "faults": "kill col.1 @ step 9"}, "ignore"),
    "worker_timeout_s": ({**LEARNER, "costs": {"step": 0.1, "grad": 1.0}, "faults": "hang col.1 @ step 9"}, 5.0),
}
# Keyword -> the test that shows its effect, for keywords whose effect cannot be shown by comparing two short runs.
ELSEWHERE = {
    "col_execution": "unit/scheme/test_settings.py::test_one_worker_can_be_remote",
    "grad_execution": "unit/scheme/test_settings.py::test_one_worker_can_be_remote",
    "compress_data_to_send": "unit/scheme/transport/test_compression.py::test_compress_data_to_send",
    "compress_grads_to_send": "unit/scheme/transport/test_compression.py::test_compress_grads_to_send",
    "compress_weights_to_send": "unit/scheme/transport/test_compression.py::test_compress_weights_to_send",
    "col_worker_resources": "unit/scheme/base/test_worker_set.py::test_resources_reach_the_workers",
    "grad_worker_resources": "unit/scheme/base/test_worker_set.py::test_resources_reach_the_workers",
    "replay_worker_resources": "unit/scheme/test_option_effects.py::test_resources_reach_the_shards",
    "initial_priority": "unit/scheme/test_initial_priority.py::test_max_uses_the_largest_priority_seen",
    "prioritized": "unit/scheme/replay/test_storage_options.py::test_prioritized_changes_the_storage",
    **dict.fromkeys(("alpha", "beta", "epsilon", "stratified"),
                    "unit/scheme/replay/test_storage_options.py::test_scheme_options_override_those_of_the_storage"),
    "queue_timeout_s": "unit/scheme/gradients/test_sample_queue.py::test_queue_timeout_s",
    "on_starved": "unit/scheme/test_learner_thread.py::test_a_starved_learner_may_keep_waiting",
    "microbatch_size": "unit/scheme/gradients/test_microbatching.py::test_sizes_of_microbatches_and_slices",
    "norm_over": ("unit/scheme/gradients/test_microbatching.py::"
                  "test_norm_over_changes_the_normalization_of_advantages"),
    "replay_proportion": "unit/scheme/test_learner_thread.py::test_old_rollouts_are_mixed_in",
    "replay_slots": "unit/scheme/test_learner_thread.py::test_old_rollouts_are_mixed_in",
    "device": "unit/scheme/test_scheme.py::test_device_reaches_actor_and_algorithm",
    "grad_device": "unit/scheme/test_devices.py::test_each_level_has_its_device",
    "col_device": "unit/scheme/test_devices.py::test_each_level_has_its_device",
    "num_threads": "unit/scheme/test_scheme.py::test_num_threads",
    "col_num_threads": "integration/test_ray_start.py::test_threads_of_collection_workers",
    "deterministic_kernels": "unit/scheme/test_numerics.py::test_settings_hold_in_the_program_until_the_scheme_stops",
    "tf32": "unit/scheme/test_numerics.py::test_settings_hold_in_the_program_until_the_scheme_stops",
    "seed": "unit/scheme/test_scheme.py::test_seed",
    "runtime": "unit/scheme/test_scheme.py::test_workers_run_on_the_given_runtime",
    "placement": "unit/runtime/ray/test_runtime.py::test_each_gradient_worker_has_its_own_placement_group",
    "address": "integration/test_ray_start.py::test_an_unreachable_cluster_is_an_error",
    "check_data": "unit/scheme/test_own_parts.py::test_a_storage_that_changes_its_data_late_is_found_by_check_data",
    "dataset": "unit/scheme/gradients/test_dataset_source.py::test_dataset",
    "keep_bad_batches": "unit/scheme/updates/test_nan_policy.py::test_the_worker_with_a_bad_batch_saves_it",
    "record": "unit/scheme/recording/test_record.py::test_every_pattern_is_replayed_bit_for_bit",
    "replay": "unit/scheme/recording/test_record.py::test_every_pattern_is_replayed_bit_for_bit",
}
KEYWORDS = list(known_keywords())


def test_no_keyword_is_missing():
    assert not RUNS.keys() & ELSEWHERE.keys()
    assert sorted(KEYWORDS) == sorted([*RUNS, *ELSEWHERE])


@pytest.mark.parametrize("name", ELSEWHERE)
def test_tests_listed_elsewhere_exist(name):
    path, test = ELSEWHERE[name].split("::")
    text = (TESTS / path).read_text()
    assert f"def {test}(" in text
    assert name in text


def reproducible_outcome(settings):
    """Return the `outcome` of the settings, after checking that a second run has the same outcome."""
    return _outcome_of_two_runs(json.dumps(settings, sort_keys=True))


@functools.cache
def _outcome_of_two_runs(settings):
    first, second = (outcome(json.loads(settings)) for _ in range(2))
    assert first == second
    return first


def outcome(settings):
    """Run a scheme until its 16th update, and return everything that can be observed about the run, as JSON."""
    scheme = Scheme(*synthetic_agent(4, capacity=400 if "num_replay_workers" in settings else None),
                    **{"seed": 1, "runtime": "simulated"} | settings)
    steps = 0
    while scheme.version < 16:
        scheme.step()
        steps += 1
    seen = json.dumps([steps, scheme.metrics(), scheme.ledger(), scheme.runtime.now()])
    scheme.stop()
    return seen


@pytest.mark.parametrize("name", RUNS)
def test_each_option_changes_the_run(name):
    others, value = RUNS[name]
    default = default_of_keyword(name)
    assert value not in (default, others.get(name))
    assert outcome({**others, name: value}) != reproducible_outcome(others)


def test_random_routing_depends_on_the_seed():
    random = {**SHARDS, "routing": "random"}
    usual = reproducible_outcome(random)
    others = [outcome({**SHARDS, "routing": routing}) for routing in ("round_robin", "least_loaded", "by_stream")]
    assert usual not in [*others, outcome({**random, "seed": 2})]


def test_resources_reach_the_shards(monkeypatch):
    asked = {}
    start_actor = SimulatedRuntime.start_actor
    monkeypatch.setattr(SimulatedRuntime, "start_actor", lambda self, cls, params, *, name, resources: (
        asked.__setitem__(name, dict(resources)), start_actor(self, cls, params, name=name, resources=resources))[1])
    for given in ({}, {"replay_worker_resources": {"num_cpus": 0.5}}):
        scheme = Scheme(*synthetic_agent(4, capacity=400), **SHARDS, **given, runtime="simulated", seed=1)
        scheme.start()
        scheme.stop()
        expected = given.get("replay_worker_resources", {"num_cpus": 0})
        assert asked["GWorker 0/RWorker 1"] == asked["GWorker 0/RWorker 2"] == expected
