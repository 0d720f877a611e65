"""Tests of the bottleneck that a profile reports, with constructed times for each tip, and in simulated runs."""

from __future__ import annotations

import pytest

from pytorchrl import ASYNC, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.agent.synthetic import synthetic_agent
from pytorchrl.agent.option_values.text import form_of
from pytorchrl.agent.algorithms.registry import registered
from pytorchrl.errors import ArgumentError
from pytorchrl.training.composition import option_specs
from pytorchrl.profile.profiling import TIPS, between, explain, options_of, table
from pytorchrl.monitor.time_shares import DESCRIPTIONS, critical_parts, shares
from pytorchrl.scheme.timing import PARTS

FREE_GRADS = {"grad_communication": "asynchronous", "grad_execution": "Parallel", "num_grad_workers": 4}
ASYNC_COL = {"col_communication": "asynchronous"}
FULL = {"num_col_workers": 8}  # as many workers as CPU cores
BATCHES, PASSES = {"num_mini_batch": 4, "num_epochs": 3}, {"num_mini_batch": 1, "num_epochs": 3}
DISTRIBUTED = {"distribute_gradients": True}

# Cases: (the part that is the bottleneck, the options of the run, the option that the advice recommends).
CASES = [
    ("collection/environment", {}, "num_col_workers"),
    ("collection/environment", FULL | {"backend": "auto"}, "backend"),
    ("collection/environment", FULL | {"backend": "envpool"}, "num_col_workers"),
    ("collection/inference", {}, "num_envs"),
    ("collection/store", {}, "num_envs"),
    ("collection/encode", {"compress_data_to_send": True}, "compress_data_to_send"),
    ("collection/encode", {}, "num_col_workers"),
    ("collection/decode", ASYNC_COL, "broadcast_interval"),
    ("collection/decode", {}, "num_steps"),
    ("collection/send", {"bytes": 3e6}, "compress_data_to_send"),
    ("collection/send", {"bytes": 3e6, "compress_data_to_send": True}, "num_steps"),
    ("collection/send", {"bytes": 1e3}, "num_steps"),
    ("collection/idle", ASYNC_COL | {"on_policy_lag": "wait"}, "max_policy_lag"),
    ("collection/idle", ASYNC_COL | {"on_policy_lag": "drop"}, "col_in_flight"),
    ("collection/idle", {}, "col_fraction_workers"),
    ("collection/idle", {"col_fraction_workers": 0.5}, "col_communication"),
    ("gradients/wait", {"num_replay_workers": 2, "max_replay_ratio": 4.0, **ASYNC_COL}, "max_replay_ratio"),
    ("gradients/wait", {"num_replay_workers": 2, **ASYNC_COL}, "num_replay_workers"),
    ("gradients/decode", {"compress_data_to_send": True}, "compress_data_to_send"),
    ("gradients/decode", {}, "num_grad_workers"),
    ("gradients/copy", {"recompute_advantages": True}, "recompute_advantages"),
    ("gradients/copy", {"recompute_advantages": False}, "num_grad_workers"),
    ("gradients/grad", {"gpus": 1, "device": "cpu"}, "device"),
    ("gradients/grad", {"gpus": 1, "device": "cuda:0"}, "num_grad_workers"),
    ("gradients/grad", {"compile": False}, "compile"),
    ("gradients/grad", {"compile": True}, "num_grad_workers"),
    ("gradients/grad", FULL | {"compile": False}, "compile"),
    ("gradients/grad", FULL | {"compile": False, "recurrent_net": "gru", "num_epochs": 2}, "num_epochs"),
    ("gradients/grad", FULL | {"compile": True, "mixed_precision": False}, "mixed_precision"),
    ("gradients/grad", FULL | {"compile": True, "mixed_precision": True, "num_epochs": 2}, "num_epochs"),
    ("gradients/grad", FULL | {"num_epochs": 1}, "num_grad_workers"),
    ("gradients/average", DISTRIBUTED | BATCHES, "col_fraction_workers"),
    ("gradients/encode", {"compress_grads_to_send": True}, "compress_grads_to_send"),
    ("gradients/send", {}, "distribute_gradients"),
    ("gradients/idle", {"grad_execution": "Parallel"}, "grad_communication"),
    ("gradients/idle", {"grad_execution": "Parallel"} | DISTRIBUTED | BATCHES, "num_mini_batch"),
    ("update/decode", {"compress_grads_to_send": True}, "compress_grads_to_send"),
    ("update/decode", {}, "distribute_gradients"),
    ("update/apply", FREE_GRADS, "aggregate"),
    ("update/push", FREE_GRADS, "aggregate"),
    ("update/push", {}, "distribute_gradients"),
    ("update/idle", {}, "updates_per_step"),
    *((part, {**others, **options}, option) for part, others in (
        ("gradients/average", DISTRIBUTED | {"col_fraction_workers": 0.5}), ("gradients/apply", DISTRIBUTED),
        ("gradients/encode", {}),
        ("gradients/send", DISTRIBUTED), ("gradients/idle", FREE_GRADS), ("update/decode", FREE_GRADS),
        ("update/apply", {}), ("update/push", DISTRIBUTED))
      for options, option in ((BATCHES, "num_mini_batch"), (BATCHES | {"mini_batch_size": 64}, "mini_batch_size"),
                              (PASSES, "num_epochs"), ({}, "num_envs"))),
]


def seconds(part):
    """Return times that make `part` the bottleneck, whether the levels work concurrently or in turn."""
    level, name = part.split("/")
    time_s = {
        "update": {"update": {"wait": 4, name: 6}, "gradients": {"grad": 4, "idle": 6}, "collection": {"idle": 10}},
        "gradients": {"update": {"wait": 9, "apply": 1}, "gradients": {"wait": 3, "idle": 1, "grad": 0, name: 6},
                      "collection": {"environment": 3, "idle": 7}},
        "collection": {"update": {"wait": 9, "apply": 1}, "gradients": {"wait": 8, "grad": 1, "idle": 1},
                       "collection": {"environment": 0, "idle": 3, name: 7}},
    }[level]
    if part == "gradients/wait":
        time_s["gradients"] = {"wait": 6, "grad": 3, "idle": 1}
    elif part == "gradients/idle":
        time_s["gradients"] = {"wait": 2, "grad": 1, "idle": 7}
    elif part == "collection/idle":
        time_s["collection"] = {"environment": 3, "idle": 7}
    return {level: {**dict.fromkeys((*parts, "idle"), 0.0), **time_s[level]} for level, parts in PARTS.items()}


def explained(part, options):
    given = dict(options)
    gpus = given.pop("gpus", 0)
    return explain({"time_s": seconds(part), "bytes_in": 5 * given.pop("bytes", 0), "rollouts": 5}, given, cores=8,
                   gpus=gpus)


def test_a_rule_reports_its_part_and_option():
    for case in CASES:
        part, options, option = case
        finding = explained(part, options)
        assert (finding.part, finding.option) == (part, option), case
        assert part in finding.sentence, case
        assert "--" + option.replace("_", "-") in finding.advice, case
        assert 0.49 < finding.share < 0.71, case


def test_every_rule_has_a_case():
    advice = {(tip.part, tip.advice.split("{")[0]) for tip in TIPS}
    said = [(part, explained(part, options).advice) for part, options, _ in CASES]
    assert {(part, begin) for part, begin in advice for where,
            text in said if where == part and text.startswith(begin)} == advice


def test_every_part_has_a_rule_that_always_applies():
    own = {f"{level}/{part}" for level, parts in PARTS.items() for part in (*parts, "idle") if part != "wait"}
    assert {tip.part for tip in TIPS} == own | {"gradients/wait"} == set(DESCRIPTIONS)
    last = {tip.part: tip for tip in TIPS}
    assert all(tip.when({"cores": 1, "gpus": 0, "rollout_bytes": 0}) for tip in last.values())


def test_more_processes_are_advised_only_with_the_condition_that_cores_are_free():
    for part, options, option in CASES:
        for cores in (1, 64):
            given = {name: value for name, value in options.items() if name not in ("gpus", "bytes")}
            finding = explain({"time_s": seconds(part)}, given, cores=cores, gpus=0)
            if finding.option in ("num_col_workers", "num_grad_workers", "num_replay_workers"):
                assert ("(on a machine with more cores: all 1 that" in finding.advice) is (cores == 1), (part, option)


def test_the_cores_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr("pytorchrl.profile.profiling.usable_cores", lambda: 1)
    for options in ({}, {"compile": True}):
        assert "on a machine with more cores" in explain({"time_s": seconds("gradients/grad")}, options, gpus=0).advice


def test_every_option_of_a_rule_is_a_flag():
    flags = {name for algorithm in registered() for name,
             spec in option_specs(algorithm).items() if form_of(spec.hint)}
    assert {tip.option for tip in TIPS} <= flags


def test_compile_is_not_recommended_for_an_actor_with_memory():
    envs = VecEnv.create_factory("CartPole-v1")
    for memory, option in (None, "compile"), ("gru", "mixed_precision"):
        actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, recurrent_net=memory)
        scheme = Scheme(PPO.create_factory(compile=False, mixed_precision=False, num_mini_batch=1), actor,
                        GAEBuffer.create_factory(size=8), envs)
        assert explain({"time_s": seconds("gradients/grad")}, options_of(scheme), cores=1, gpus=0).option == option


def test_the_bottleneck_of_concurrent_levels_is_the_one_that_never_waits():
    def time_s(learner_waits, collectors_idle):
        return {"update": {"wait": 99, "apply": 1, "idle": 0},
                "gradients": {"wait": learner_waits, "grad": 100 - learner_waits, "idle": 0},
                "collection": {"environment": 100 - collectors_idle, "idle": collectors_idle}}

    for waits, idle, part in ((40, 1, "collection/environment"), (40, 39, "collection/environment"),
                              (3, 50, "gradients/grad"),
                              (9, 0, "gradients/grad"), (40, 45, "gradients/grad")):
        assert explain({"time_s": time_s(waits, idle)}, ASYNC_COL).part == part
    # If the levels take turns, the bottleneck is the part with the larger share of the total time.
    assert explain({"time_s": time_s(60, 40)}).part == "collection/environment"
    assert explain({"time_s": time_s(40, 60)}).part == "gradients/grad"


def test_critical_parts_of_alternating_levels_add_up_to_the_whole_time():
    time_s = {"update": {"wait": 90, "apply": 6, "idle": 4}, "gradients": {"wait": 50, "grad": 40, "idle": 10},
              "collection": {"environment": 60, "send": 20, "idle": 120}}
    parts = critical_parts(time_s, {})
    assert sum(parts.values()) == pytest.approx(1.0)
    # The idle time is the time that the learner waits minus the time that the collection workers work.
    assert parts["collection/idle"] == pytest.approx(0.5 - 0.4)


def test_there_is_no_bottleneck_before_an_update():
    with pytest.raises(ArgumentError, match="no update has been made"):
        explain({"time_s": {level: {} for level in PARTS}})


def test_between_is_the_difference():
    before = {"updates": 2, "rollouts": 1, "bytes_in": 10, "time_s": {"update": {"wait": 1.0, "idle": 0.5}}}
    after = {"updates": 5, "rollouts": 3, "bytes_in": 50, "time_s": {"update": {"wait": 4.0, "idle": 0.4}}, "queue": 1}
    assert between(before, after) == {
        "updates": 3, "rollouts": 2, "bytes_in": 40, "time_s": {"update": {"wait": 3.0, "idle": 0.0}}}


def test_a_table_shows_shares_of_parts_that_took_time():
    time_s = {"collection": {"environment": 15.0, "send": 0.0, "idle": 5.0}, "gradients": {}, "update": {"wait": 10.0}}
    assert shares(time_s) == {"collection": {"environment": 0.75, "send": 0.0, "idle": 0.25}, "gradients": {},
                              "update": {"wait": 1.0}}
    assert table(time_s).splitlines() == [
        "level       workers  part            seconds   share",
        "collection        2  environment       15.00   75.0%",
        "                     idle               5.00   25.0%",
        "update            1  wait              10.00  100.0%"]


@pytest.fixture
def find():
    """Return a function that simulates a run with the given costs and settings and returns its bottleneck."""
    schemes = []

    def find_(costs, **settings):
        costs = {"start": 0, "message": 0.001, "step": 0.01, "grad": 0.01, "update": 0.001} | costs
        schemes.append(Scheme(*synthetic_agent(4), runtime="simulated", seed=1, costs=costs, **settings))
        scheme = schemes[-1]
        while scheme.version < 10:
            scheme.step()
        before = scheme.metrics()
        while scheme.version < 40:
            scheme.step()
        return explain(between(before, scheme.metrics()), options_of(scheme), cores=64, gpus=0)
    yield find_
    for scheme in schemes:
        scheme.stop()


@pytest.mark.parametrize("settings", [
    {}, {"num_col_workers": 3}, {"num_col_workers": 3, "col_communication": ASYNC}, {"num_grad_workers": 2},
    {"num_grad_workers": 2, "grad_communication": ASYNC}, {"num_grad_workers": 2, "distribute_gradients": True}],
    ids=["central", "col-sync", "col-async", "grad-sync", "grad-async", "decentralized"])
@pytest.mark.parametrize(("costs", "part", "option"), [
    ({"step": 1.0}, "collection/environment", "num_col_workers"),
    ({"grad": 10.0}, "gradients/grad", "num_grad_workers")])
def test_slow_environments_and_networks_are_found_in_every_scheme(find, costs, part, option, settings):
    finding = find(costs, **settings)
    assert (finding.part, finding.option) == (part, option)


@pytest.mark.parametrize(("costs", "settings", "part", "option"), [
    ({"message": 0.5}, {"num_col_workers": 3}, "collection/send", "num_steps"),
    ({"message": 0.5}, {"num_grad_workers": 2}, "gradients/send", "distribute_gradients"),
    ({"step@*/CWorker 2": 1.0}, {"num_col_workers": 4}, "collection/idle", "col_fraction_workers"),
    ({"grad@GWorker 2": 9.0}, {"num_grad_workers": 4}, "gradients/idle", "grad_communication"),
    ({"step@GWorker 2/*": 1.0}, {"num_grad_workers": 4, "distribute_gradients": True}, "gradients/average",
     "col_fraction_workers"),
    ({"update": 2.0}, {"num_grad_workers": 4, "grad_communication": ASYNC}, "update/apply", "aggregate"),
    ({"update": 2.0}, {}, "update/apply", "num_envs"),
], ids=["link-to-collectors", "link-to-gradients", "straggler", "slow-gradient", "slow-rank", "updates-async",
        "updates"])
def test_other_bottlenecks_are_found(find, costs, settings, part, option):
    finding = find(costs, **settings)
    assert (finding.part, finding.option) == (part, option)
