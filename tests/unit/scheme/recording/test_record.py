"""A run that was recorded, on threads or simulated, is repeated from its record: bit for bit, or the first difference is named."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch

from pytorchrl import ASYNC, PPO, SYNC, Learner, VecEnv, linear
from pytorchrl.envs.testing import FaultyEnv
from pytorchrl.errors import ConfigError, EnvError, NonFiniteUpdateError, ReplayError, WorkerLostError

ALL_ASYNC = {"num_col_workers": 3, "col_communication": ASYNC, "num_grad_workers": 2, "grad_communication": ASYNC}
ASYNC_COLLECTION = {"num_col_workers": 3, "col_communication": ASYNC}


def run_on(scheme):
    """More updates than any record has."""
    for _ in range(1000):
        scheme.step()


HEAD = '{"format":"pytorchrl record 1","settings":%s,"agent":{},"machine":{},"target_steps":1}\n'


class Runs:
    """Makes a run with a record, and the same again from it."""

    def __init__(self, make_scheme, path):
        self.make, self.path = make_scheme, str(path)

    def record(self, updates=25, between=None, **settings):
        """What a recorded run came to."""
        scheme = self.make(record=self.path, **settings)
        return self._run(scheme, lambda: scheme.version >= updates, between)

    def replay(self, between=None, **settings):
        """What it came to when repeated."""
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
        if scheme._worker._in_thread:  # which went on after the user's last look
            metrics = scheme.metrics()
        return {"version": scheme._worker.actor_version, "error": error, "lag": metrics["policy_lag"],
                "grad_lag": metrics["grad_lag"], "numbers": [metrics[name] for name in ("queue", "passes_cancelled")],
                "restarts": metrics["workers_restarted"],
                "state": {name: torch.as_tensor(value) for name, value in weights.state.items()}}

    def lines(self):
        """[worker, incarnation, events, turns] of the whole record."""
        with open(self.path, encoding="utf-8") as file:
            return [part for line in list(file)[1:-1] for part in json.loads(line)]

    def alter(self, change):
        """Let `change(part)` change each part of the record in place, until it returns true."""
        with open(self.path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        assert any(change(part) for line in lines[1:-1] for part in line)
        with open(self.path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def twice(self, **settings):
        """Record, replay, compare; both."""
        first = self.record(**settings)
        settings.pop("updates", None)
        again = self.replay(**settings)
        assert again["version"] == first["version"]
        assert first["state"].keys() == again["state"].keys()
        for name, value in first["state"].items():
            assert torch.equal(value, again["state"][name]), name
        assert (type(again["error"]), again["lag"], again["grad_lag"]) == (type(first["error"]), first["lag"], first["grad_lag"])
        return first, again


@pytest.fixture
def runs(make_scheme, tmp_path):
    return Runs(make_scheme, tmp_path / "run.jsonl")


@pytest.mark.parametrize("runtime", ["threads", "simulated"])
def test_every_pattern_is_repeated_bit_for_bit(runs, pattern, runtime):
    runs.twice(runtime=runtime, **pattern)


def test_the_record_is_what_is_repeated_not_the_schedule_of_the_simulation(runs, make_scheme):
    """Without the record the simulated runtime would go another way."""
    first, _ = runs.twice(runtime="simulated", schedule_seed=11, **ALL_ASYNC)
    scheme = make_scheme(runtime="simulated", schedule_seed=12, **ALL_ASYNC)
    while scheme.version < 25:
        scheme.step()
    assert not torch.equal(scheme.acting_state()["all"], first["state"]["all"])


def between_queue_and_learner(rng):
    """Random settings of what lies there; what it does depends on who comes first."""
    settings = {"queue_policy": rng.choice(("block", "drop_oldest", "drop_newest")), "queue_size": rng.choice((1, 2, 4)),
                "col_in_flight": rng.choice((1, 2)), "num_passes": rng.choice((1, 2, 3)),
                "minibatch_buffer_size": rng.choice((1, 2, 3)), "buffer": rng.choice(("ring", "ring", "circular")),
                "train_batch_size": rng.choice((None, 20, 40)), "max_policy_lag": rng.choice((None, 6, 20))}
    if settings["buffer"] == "ring":
        settings["ramp"] = rng.choice((None, True, False))
        if settings["max_policy_lag"] is not None:
            settings["on_policy_lag"] = rng.choice(("drop", "wait"))
    if settings.get("on_policy_lag") != "wait":
        settings["max_weight_sync_delay"] = rng.choice((None, 30))
    if rng.random() < 0.5:
        settings |= {"replay_proportion": rng.choice((0.5, 2.0)), "replay_slots": 4}
    return settings


def scenario(seed):
    """Settings of a random asynchronous run with a fault."""
    rng = random.Random(f"record {seed}")
    col, grad = rng.choice((2, 3)), rng.choice((1, 2, 3))
    settings = {"num_col_workers": col, "num_grad_workers": grad, "grad_communication": rng.choice((SYNC, ASYNC)),
                "col_communication": rng.choice((SYNC, ASYNC, ASYNC)), "runtime": "simulated", "schedule_seed": seed,
                "on_worker_failure": rng.choice(("restart", "restart", "ignore", "raise")), "worker_timeout_s": 3.0}
    if settings["col_communication"] is ASYNC:
        settings |= {"col_in_flight": rng.choice((1, 2)), "queue_size": rng.choice((1, 4)), "broadcast_interval": rng.choice((1, 3))}
    elif rng.random() < 0.5:
        settings |= {"col_fraction_workers": 0.5, "fraction_samples": 0.5}
    settings["costs"] = {name: ("exponential", 10 ** rng.uniform(-4, -1)) for name in ("message", "step", "grad", "update")}
    if grad > 1 and settings["grad_communication"] is ASYNC and rng.random() < 0.7:
        settings |= {"aggregate": rng.randint(1, grad), "max_grad_lag": rng.choice((0, 1)),
                     "lag_policy": rng.choice(("apply", "scale", "drop")), "updates_per_step": rng.choice((1, 3))}
    worker = rng.choice(("col.1", "col.2", "grad.1" if grad > 1 else "col.1"))
    action = rng.choice(("kill", "kill", "hang", "delay", "nan"))
    if action in ("delay", "nan") and grad > 1 and settings["grad_communication"] is SYNC:
        settings["distribute_gradients"] = rng.random() < 0.5  # a rank that is lost ends the run, at a deadline of the others
    settings["faults"] = {
        "kill": f"kill {worker} p=0.03", "hang": f"hang {worker} @ {'grad' if 'grad' in worker else 'step'} {rng.randint(1, 20)}",
        "delay": "delay col.* 2s p=0.05", "nan": "nan grad.* p=0.2"}[action]
    return settings


@pytest.mark.parametrize("seed", range(25))
def test_random_runs_of_the_learners_buffers_are_repeated(runs, seed):
    """Which item was dropped, which slot had one, who was asked: all of it follows from the turns, and happens again.

    How many items had been dropped when an update was reported does not: the collecting thread goes on beside the report.
    """
    rng = random.Random(f"buffers {seed}")
    settings = {"num_col_workers": rng.choice((2, 3)), "col_communication": ASYNC, "grad_communication": ASYNC,
                "num_grad_workers": rng.choice((1, 1, 2)), **between_queue_and_learner(rng)}
    where = {"runtime": "simulated", "schedule_seed": seed, "costs": {
        name: ("exponential", 10 ** rng.uniform(-4, -1)) for name in ("message", "step", "grad", "update")}}
    if rng.random() < 0.5:
        settings["faults"] = rng.choice(("kill col.1 p=0.01", "nan grad.* p=0.1", "delay col.* 2s p=0.05"))
    if rng.random() < 0.2 and "kill" not in settings.get("faults", ""):
        where = {"runtime": "threads"}
    first, again = runs.twice(updates=40, **settings, **where)
    if settings["num_grad_workers"] == 1:
        assert again["numbers"] == first["numbers"]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_sum_in_the_same_order(runs, size):
    """Over gloo, whose own order is another from four ranks on."""
    runs.twice(runtime="threads", num_grad_workers=size, distribute_gradients=True, updates=12)


@pytest.mark.parametrize("communication", [SYNC, ASYNC])
def test_advantages_normalised_over_all_workers(runs, communication):
    """What a worker has told of its advantages holds for the others also if it is lost before its gradient."""
    algo = PPO.create_factory(num_epochs=1, num_mini_batch=2, lr=1e-3, advantage_normalization="batch")
    for number in range(1, 7):
        runs.path = f"{runs.path}{number}"
        runs.twice(runtime="simulated", algo=algo, num_grad_workers=2, num_col_workers=2, col_communication=communication,
                   faults=f"kill grad.1 @ grad {number}")


@pytest.mark.parametrize("seed", range(60))
def test_random_runs_with_faults_are_repeated(runs, seed):
    """Workers lost, hung, replaced or done without, rounds cut short, updates skipped, runs that end with an error."""
    runs.twice(updates=8, **scenario(seed))


def test_a_lost_worker_is_lost_again_at_the_same_event(runs):
    """Also one whose loss has no cause within the run, as when a process is killed from outside."""
    killed = []

    def kill(scheme):
        if scheme.version > 5 and not killed:
            handle = scheme._worker.local_worker.remote_workers[1]
            killed.append(handle.runtime.kill(handle))
    settings = {"queue_size": 2, **ASYNC_COLLECTION}
    first = runs.record(between=kill, updates=40, runtime="simulated", costs={"grad": 0.2}, **settings)
    assert [event for part in runs.lines() for event in part[2] if event[0] in ("lost", "replaced")
            ] == [["lost", 1], ["replaced", 1]]
    again = runs.replay(**settings)
    assert first["restarts"] == again["restarts"] == 1
    assert torch.equal(first["state"]["all"], again["state"]["all"])


def test_an_error_is_raised_again_where_it_was_raised(runs):
    settings = {"env_fn": FaultyEnv, "env_kwargs": {"fault": "step", "at": 60}, **ALL_ASYNC}
    first, again = runs.twice(runtime="threads", updates=1000, **settings)
    assert isinstance(first["error"], EnvError)
    assert str(again["error"]) == str(first["error"])


@pytest.mark.parametrize("workers", [
    ALL_ASYNC, ASYNC_COLLECTION, {"num_grad_workers": 2}, {"num_col_workers": 2}, {"num_grad_workers": 2, "distribute_gradients": True},
], ids=["all-async", "async-collection", "parallel", "parallel-collection", "decentralised"])
@pytest.mark.parametrize("name", ["lr", "entropy_coef"])
def test_what_the_user_changes_is_changed_at_the_same_update(runs, workers, name):
    """Also where the user looks at the weights in one of the runs only, and where a change is refused."""
    algo = PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=linear(1e-2, 0.0))

    def change(scheme):
        if scheme.version == 5:
            scheme.update_algorithm_parameter(name, 1e-4)
            with pytest.raises(ConfigError):
                scheme.update_algorithm_parameter(name, -1.0)

    def look_and_change(scheme):
        scheme.acting_state()
        change(scheme)
    first = runs.record(between=look_and_change, algo=algo, runtime="threads", **workers)
    again = runs.replay(between=change, algo=algo, **workers)
    assert torch.equal(first["state"]["all"], again["state"]["all"])
    with pytest.raises(ReplayError, match=f"recorded was parameter {name} 0.0001, now"):
        runs.replay(algo=algo, **workers)
    with pytest.raises(ReplayError, match=f"recorded was .*, now it is parameter {name} 0.0001"):
        runs.replay(between=lambda scheme: scheme.update_algorithm_parameter(name, 1e-4) if scheme.version == 3 else None,
                    algo=algo, **workers)


def test_what_cannot_be_placed_between_two_updates_is_refused(make_scheme, tmp_path):
    """Gradients are computed beside the user's call, which would fall into the middle of one."""
    scheme = make_scheme(record=tmp_path / "run", grad_communication=ASYNC)
    scheme.step()
    with pytest.raises(ConfigError, match=r"entropy_coef cannot be changed while a run .* is recorded"):
        scheme.update_algorithm_parameter("entropy_coef", 0.1)


def test_a_run_that_was_killed_is_repeated_as_far_as_its_record_goes(runs, monkeypatch):
    """The last line may be half written."""
    monkeypatch.setattr("pytorchrl.scheme.recording.record._WRITE_INTERVAL_S", 0.0)
    first = runs.record(runtime="threads", **ALL_ASYNC)
    with open(runs.path, encoding="utf-8") as file:
        whole = file.read()
    cut = whole[:whole.rindex('["UWorker"') + 9]
    with open(runs.path, "w", encoding="utf-8") as file:
        file.write(cut)
    again = runs.replay(**ALL_ASYNC)
    assert first["version"] - 2 <= again["version"] < first["version"]


def test_after_its_end_a_replayed_run_does_not_go_on(runs, make_scheme):
    runs.record(updates=3, runtime="threads", **ALL_ASYNC)
    scheme = make_scheme(runtime=None, replay=runs.path, **ALL_ASYNC)
    while not scheme.replay_is_over:
        scheme.step()
    with pytest.raises(ReplayError, match="ends after 3 updates"):
        scheme.step()


@pytest.mark.parametrize("workers", [{}, {"grad_communication": ASYNC}, ALL_ASYNC], ids=["sync", "thread", "all"])
def test_a_run_that_ends_with_skipped_updates_ends_there(runs, workers):
    first = runs.record(runtime="simulated", schedule_seed=5, faults="nan grad.* p=0.5", updates=6, **workers)
    again = runs.replay(faults="nan grad.* p=0.5", **workers)
    assert first["version"] == again["version"]


def test_a_record_without_an_update_is_over_at_once(runs, make_scheme):
    make_scheme(record=runs.path).start().stop()
    scheme = make_scheme(runtime=None, replay=runs.path)
    assert scheme.replay_is_over
    with pytest.raises(ReplayError, match="ends after 0 updates"):
        scheme.step()


@pytest.mark.parametrize("workers", [{}, ALL_ASYNC], ids=["sync", "all"])
def test_an_interrupted_run_is_over_at_its_last_update(runs, make_scheme, workers):
    scheme = make_scheme(record=runs.path, **workers)
    for _ in range(4):
        scheme.step()
    scheme._worker.updater.before_step = _interrupt
    with pytest.raises(KeyboardInterrupt):
        scheme.step()
    scheme.stop()
    assert runs.replay(**workers)["version"] == 4


def _interrupt():
    raise KeyboardInterrupt


def test_an_error_that_does_not_come_again_is_told(runs, monkeypatch):
    """It was about the machine, or time; the replay does not go on without it for ever."""
    right = PPO.compute_gradients

    calls = iter(range(10**6))

    def compute(self, batch):
        if next(calls) == 9:
            raise EnvError("out of memory, say")
        return right(self, batch)
    with monkeypatch.context() as patch:
        patch.setattr(PPO, "compute_gradients", compute)
        assert runs.record()["error"] is not None
    with pytest.raises(ReplayError, match="after 9 updates did not occur again"):
        runs.replay()


def test_a_worker_may_be_replaced_as_often_as_time_allowed(runs):
    """In a replayed run no time passes, so its budget of restarts would be spent too soon."""
    settings = {"num_col_workers": 2, "faults": "kill col.2 p=0.01"}
    first = runs.record(runtime="simulated", costs={"grad": 30.0}, updates=1200, **settings)
    assert first["error"] is None
    assert first["restarts"] > 11
    assert runs.replay(**settings)["restarts"] == first["restarts"]


def test_an_error_of_the_collecting_thread_is_not_hidden_by_a_turn(runs, monkeypatch):
    runs.record(runtime="threads", **ASYNC_COLLECTION)
    monkeypatch.setattr("pytorchrl.scheme.collection.strategies._numbers_of", lambda rollout: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runs.replay(**ASYNC_COLLECTION)


def test_a_replay_may_be_left_before_its_end(runs, make_scheme, check_ledger):
    runs.record(runtime="threads", **ALL_ASYNC)
    scheme = make_scheme(runtime=None, replay=runs.path, **ALL_ASYNC)
    for _ in range(5):
        scheme.step()
    scheme.stop()
    check_ledger(scheme)


# The first difference is named.


def test_another_event_is_named(runs):
    runs.record(runtime="threads", **ALL_ASYNC)

    def change(part):  # one of the answers that the driver took came from the other worker
        answers = [event for event in part[2] if part[0] == "UWorker" and event[0] == "answer"]
        for event in answers:
            event[1] = 1 - event[1]
        return bool(answers)
    runs.alter(change)
    with pytest.raises(ReplayError, match=r"(differs from its record at event \d+ of UWorker: recorded was answer|follow its record)"):
        runs.replay(**ALL_ASYNC)


def test_another_turn_is_named(runs):
    runs.record(runtime="threads", **ASYNC_COLLECTION)

    def change(part):
        if part[0] == "GWorker 0" and sum(part[3]) > 0 and part[2]:
            part[3][part[3].index(max(part[3]))] += 1000
            return True
        return False
    runs.alter(change)
    with pytest.raises(ReplayError, match=r"(?s)event .* of GWorker 0: recorded was|waits for its turn to write the parameters of GWorker 0"):
        runs.replay(**ASYNC_COLLECTION)


def test_an_environment_that_does_not_repeat_is_named(runs):
    class Drawn(FaultyEnv):
        offsets = iter([0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1])  # the probes' and the first run's; the second run's

        def __init__(self):
            super().__init__("step", at=10**6)
            self._offset = next(self.offsets)
    settings = {"envs": VecEnv.create_factory(Drawn), **ASYNC_COLLECTION}
    runs.record(runtime="threads", **settings)
    Drawn.offsets = iter([1] * 100)
    with pytest.raises(ReplayError, match="at event 1 of GWorker 0: recorded was answer"):
        runs.replay(**settings)


def test_other_parameters_at_the_end_are_told(runs):
    runs.record(runtime="threads", **ALL_ASYNC)
    with open(runs.path, encoding="utf-8") as file:
        text = file.read()
    with open(runs.path, "w", encoding="utf-8") as file:
        file.write(re.sub(r'"checksum":\d+', '"checksum":1', text))
    with pytest.raises(ReplayError, match="ends with other parameters"):
        runs.replay(**ALL_ASYNC)


def test_a_worker_that_is_not_there_is_named(runs):
    runs.record(runtime="threads", **ASYNC_COLLECTION)
    runs.alter(lambda part: part[0] == "GWorker 0" and (part[2].insert(0, ["replaced", 99]) or True))
    with pytest.raises(ReplayError, match="recorded was replaced 99"):
        runs.replay(**ASYNC_COLLECTION)


def test_other_numbers_in_an_update_are_named(runs, monkeypatch):
    runs.record(runtime="threads", **ASYNC_COLLECTION)
    right = PPO.compute_gradients

    def compute(self, batch):
        grads, info = right(self, batch)
        return [grad * (1 + 1e-6) for grad in grads], info
    monkeypatch.setattr(PPO, "compute_gradients", compute)
    with pytest.raises(ReplayError, match="at event 1 of UWorker: recorded was update 1"):
        runs.replay(**ASYNC_COLLECTION)


# The file.


def test_a_record_is_of_its_run_only(runs, make_scheme):
    runs.record(updates=3, runtime="threads", **ALL_ASYNC)
    with pytest.raises(ConfigError, match=r"num_col_workers was 3, now it is 2.*algo_factory: lr was 0.001, now it is 0.01"):
        make_scheme(runtime=None, replay=runs.path, algo=PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=1e-2),
                    **(ALL_ASYNC | {"num_col_workers": 2}))
    with pytest.raises(ConfigError, match="seed was 1, now it is 2"):
        make_scheme(runtime=None, replay=runs.path, seed=2, **ALL_ASYNC)
    assert make_scheme(runtime=None, replay=runs.path, seed=None, **ALL_ASYNC).seed == 1
    with pytest.raises(ConfigError, match="has target_steps=1, got 500; give the same"):
        make_scheme(runtime=None, replay=runs.path, **ALL_ASYNC).start(500)


def test_a_record_from_another_machine_warns(runs, make_scheme):
    runs.record(updates=3, runtime="threads", **ALL_ASYNC)
    with open(runs.path, encoding="utf-8") as file:
        text = file.read()
    with open(runs.path, "w", encoding="utf-8") as file:
        file.write(re.sub(r'"torch":"[^"]*"', '"torch":"1.0"', text))
    with pytest.warns(UserWarning, match="made with torch 1.0 instead of"):
        make_scheme(runtime=None, replay=runs.path, **ALL_ASYNC)


@pytest.mark.parametrize("content", [None, "", "{}", "[1]", "nonsense\n", '{"format": "other"}\n',
                                     '{"format": "pytorchrl record 1"}\n[1, 2]\n', "\0\n", HEAD % '[]', HEAD % '{}',
                                     HEAD % '{"seed":"1"}', HEAD % '{"seed":1}' + '[["UWorker",0,[["update"]],[]]]\n',
                                     HEAD % '{"seed":1}' + '[["UWorker",0,[["update","x"]],[]]]\n',
                                     HEAD % '{"seed":1}' + '[["UWorker",0,[],["x"]]]\n',
                                     HEAD % '{"seed":1}' + '[["UWorker",[],[],[]]]\n',
                                     HEAD.replace('"agent":{}', '"agent":{"algo_factory":[]}') % '{"seed":1}',
                                     HEAD.replace('"machine":{}', '"machine":null') % '{"seed":1}'])
def test_what_is_no_record_is_refused(make_scheme, tmp_path, content):
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"replay .*file"):
        make_scheme(runtime=None, replay=path)


def test_a_record_is_never_overwritten_and_its_place_is_checked(make_scheme, tmp_path):
    (tmp_path / "there").write_text("precious")
    with pytest.raises(ConfigError, match="exists already"):
        make_scheme(record=tmp_path / "there").start()
    assert (tmp_path / "there").read_text() == "precious"
    with pytest.raises(ConfigError, match="cannot be written"):
        make_scheme(record=tmp_path / "no folder" / "file").start()
    for wrong in (3, "", True):
        with pytest.raises(ConfigError, match="record must be a string, a path or None"):
            make_scheme(record=wrong)


def test_a_start_that_fails_leaves_no_record(make_scheme, tmp_path):
    class WorksOnce:
        made = 0

        def __call__(self):
            WorksOnce.made += 1
            return FaultyEnv("constructor" if WorksOnce.made > 1 else "step", at=10**6)
    scheme = make_scheme(WorksOnce(), record=tmp_path / "run", **ALL_ASYNC)
    with pytest.raises(EnvError):
        scheme.step()
    assert not (tmp_path / "run").exists()


def test_a_full_disk_ends_the_record_not_the_run(make_scheme, caplog, tmp_path):
    scheme = make_scheme(record=tmp_path / "run")
    scheme.start()
    scheme._worker._record._file.close()
    scheme._worker._record._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - closed by the record
    scheme.step()
    scheme.stop()
    assert "cannot be written" in caplog.text


def test_contradictions_are_refused(make_scheme, runs):
    runs.record(updates=2)
    for settings, text in (
            ({"runtime": "threads"}, "leave out runtime='threads'"), ({"runtime": None, "record": "x"}, "leave one out"),
            ({"runtime": None, "schedule_seed": 3}, "schedule_seed would be ignored"),
            ({"runtime": None, "costs": {"step": 1.0}}, "costs would be ignored")):
        with pytest.raises(ConfigError, match=text):
            make_scheme(replay=runs.path, **settings)


def test_a_record_is_small(runs):
    """Less than a hundred bytes an event, whatever the rollouts and gradients weigh."""
    runs.record(updates=50, runtime="threads", hidden=(256, 256), **ALL_ASYNC)
    events = sum(len(part[2]) for part in runs.lines())
    with open(runs.path, encoding="utf-8") as file:
        size = len(file.read()) - len(file.name)
    assert events > 100
    assert size / events < 100


def test_a_learner_replays_to_the_end_of_the_record(make_scheme, tmp_path):
    """With a schedule that follows the target."""
    algo = PPO.create_factory(num_epochs=2, num_mini_batch=2, lr=linear(1e-2, 0.0))
    results = []
    for settings in ({"record": tmp_path / "run.jsonl", "runtime": "threads"}, {"replay": tmp_path / "run.jsonl", "runtime": None}):
        scheme = make_scheme(algo=algo, **ALL_ASYNC, **settings)
        with Learner(scheme, 2_000, progress=False) as learner:
            learner.train()
            results.append((learner.updates, scheme.acting_state()["all"]))
    assert results[0][0] == results[1][0] > 10
    assert torch.equal(results[0][1], results[1][1])
