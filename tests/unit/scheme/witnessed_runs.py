"""Run small schemes on random schedules with many faults beside a `Witness`, and compare both accounts.

A failure message names the seed of its schedule. `explore` with only that seed repeats the schedule, event by event.
"""

from __future__ import annotations

import random
import re
from collections import Counter

from pytorchrl import ASYNC, SYNC, Scheme
from pytorchrl.errors import CrashLoopError, InjectedFault, NonFiniteUpdateError, NoWorkersLeft
from pytorchrl.scheme.transport.messages import Rollout
from pytorchrl.support.worker_names import collection_worker, gradient_worker
from tests.unit.scheme.witness import PER_GRADIENT_WORKER, TARGET_STEPS, Asked, Witness, WitnessError, sender_of
from tests.unit.scheme.witness_agent import witnessed_agent

COINCIDENCES = (
    "a collection worker is lost in the middle of a rollout",
    "a collection worker is lost while weights are on their way to it",
    "a gradient worker is lost between a gradient and its answer",
    "a gradient worker is lost in the middle of its train batch",
    "a gradient worker is lost while its gradient waits for an update",
    "a gradient worker is lost while weights are on their way to it",
    "a worker answers after it was given up",
    "a worker is lost before another is replaced",
    "an update is made while weights are on their way to a replacement",
    "the replacement of a collection worker is lost, too",
    "the replacement of a gradient worker is lost, too",
    "two gradients are ready at once",
)
"""Coincidences of which a thousand schedules must contain each in at least twenty; `Seams` finds them."""
EXPECTED = {"raise": InjectedFault, "nan": NonFiniteUpdateError, "kill": (CrashLoopError, NoWorkersLeft),
            "shoot": (CrashLoopError, NoWorkersLeft), "hang": (CrashLoopError, NoWorkersLeft)}
UPDATES = 8


class Seams:
    """Connects a witness to the messages and the events of a running scheme, and counts coincidences."""

    def __init__(self, scheme, witness):
        self.witness, self.root, self.runtime = witness, scheme.start(TARGET_STEPS), scheme.runtime
        self.settings, self.simulation = scheme.settings, scheme.runtime.simulation
        statistics = self.root.statistics
        self._submit, self._outcome = self.runtime.submit, self.runtime.outcome
        self._receive, self._report = statistics.receive, statistics.local_report
        self.runtime.submit, self.runtime.outcome, statistics.receive = self.submit, self.outcome, self.receive
        if self._report is not None:
            statistics.local_report = self.report
        self.simulation.after_event = self.look
        self.incarnations = Counter()  # name of a collection worker -> its incarnation
        self.is_stopping, self.closed = False, set()

    # Messages

    def submit(self, handle, method, args, kwargs):
        self.witness.settle()
        if method in ("collect", "collect_and_grad"):
            parts = [int(index) for index in re.findall(r"\d+", handle.name)]
            version = self.witness.version if method == "collect_and_grad" else self.witness.version_of(parts[0])
            has_weights = bool(args) and args[0] is not None
            mark = self.root.local_worker.algo.mark if method == "collect_and_grad" else None
            self.witness.asked[handle.name].append(Asked(version, has_weights, mark))
        return self._submit(handle, method, args, kwargs)

    def outcome(self, future, timeout_s):
        outcome = self._outcome(future, timeout_s)
        if isinstance(outcome.value, Rollout):
            self.witness.deliver(future.worker, outcome.value)
        elif future.native.call.endswith((".close", ".stop")) and outcome.value is not None:
            self.closed.add(future.worker)
        return outcome

    def receive(self, gradients):
        self.witness.receive(gradients)
        self._receive(gradients)
        if self.witness.is_async and len(self.witness.arrived) > 1:
            self.happened("two gradients are ready at once")

    def report(self):
        report = self._report()
        self.witness.report((0, 0), report)
        return report

    def shoot(self, rng, num_shots=6):
        """Kill a worker at a random moment, preferably one whose gradient waits for its update, and repeat this."""
        grads = list(self.root.remote_workers)
        parents = [handle.native.worker for handle in grads if handle.native.worker is not None]
        handles = grads + [handle for parent in parents or [self.root.local_worker] for handle in parent.remote_workers]
        waiting = {self.witness.computed[number].sender[0] for number in self.witness.arrived}
        chosen = [grads[index - 1] for index in waiting if index] * (rng.random() < 0.7) or handles
        victim = rng.choice(chosen) if chosen and self.simulation.num_events else None
        running = self.simulation.current.owner  # this task is about to wait, so it cannot be ended from here
        is_running = victim is not None and victim.native in (running, getattr(running, "owner", None))
        if victim is not None and not is_running and not victim.name.endswith("CWorker 0"):
            self.runtime.kill(victim, 0.0)
        if num_shots and not self.is_stopping:
            self.simulation.later(rng.expovariate(1.5), lambda: self.shoot(rng, num_shots - 1))

    # Events

    def happened(self, what):
        assert what in COINCIDENCES
        self.witness.coincidences.add(what)

    def look(self):
        """Read the newest event of the schedule: the start and the end of workers, and the start of their calls."""
        witness = self.witness
        witness.settle()
        task, _, event = self.simulation.last_events[-1].partition(" ")[2].partition(": ")
        if event.startswith("start "):
            self.started(event.removeprefix("start "))
        elif event.startswith("end of "):
            self.ended(event.removeprefix("end of "))
        elif event.startswith("begin collect"):
            asked = next(asked for asked in witness.asked[task] if not asked.is_begun)
            asked.is_begun = True
            if asked.has_weights and witness.version and task in witness.floor and asked.version is not None:
                current = self.version_above(task)
                if current is not None and current > asked.version:
                    self.happened("an update is made while weights are on their way to a replacement")
                del witness.floor[task]
        elif event.startswith("end collect") and self.is_gone(task):
            self.happened("a worker answers after it was given up")

    def version_above(self, name):
        index = int(re.findall(r"\d+", name)[0])
        return self.witness.version_of(index) if "CWorker" in name else self.witness.version

    def supervisor_of(self, name):
        """Return the supervisor of a worker, and the index of the worker in its set."""
        parts = [int(index) for index in re.findall(r"\d+", name)]
        if "CWorker" not in name:
            return self.root.strategy.supervisor, parts[0] - 1
        parent = self.root.remote_workers[parts[0] - 1].native.worker if parts[0] else self.root.local_worker
        return (None, 0) if parent is None else (parent.collector.supervisor, parts[1] - 1)

    def is_gone(self, name):
        supervisor, index = self.supervisor_of(name)
        return supervisor is not None and index in supervisor.gone

    def started(self, name):
        witness = self.witness
        witness.asked[name].clear()
        witness.lost.discard(name)
        if "CWorker" in name:
            self.incarnations[name] += 1
            witness.floor[name] = self.version_above(name) or 0
            return
        index = int(name.split()[1])
        witness.incarnations[index] += 1
        for below in [below for below in witness.asked if below.startswith(f"{name}/")]:
            self.incarnations[below] = PER_GRADIENT_WORKER * witness.incarnations[index] - 1
        witness.floor[name] = witness.version - witness.is_decentralized

    def ended(self, name):
        witness = self.witness
        if self.is_stopping:
            return
        asked, kind = witness.asked[name], "collection" if "CWorker" in name else "gradient"
        if any(request.has_weights and not request.is_begun for request in asked):
            self.happened(f"a {kind} worker is lost while weights are on their way to it")
        if witness.lost:
            self.happened("a worker is lost before another is replaced")
        if name in witness.floor:
            self.happened(f"the replacement of a {kind} worker is lost, too")
        if kind == "gradient":
            index = int(name.split()[1])
            sender = witness.senders[index, witness.incarnations[index]]
            if any(witness.computed[number].sender == (index, witness.incarnations[index])
                   for number in witness.arrived) and witness.is_async:
                self.happened("a gradient worker is lost while its gradient waits for an update")
            if sender.moments and sender.newest is not None and not sender.newest.last:
                self.happened("a gradient worker is lost in the middle of its train batch")
            if sender.newest is not sender.arrived:
                self.happened("a gradient worker is lost between a gradient and its answer")
        elif asked and asked[0].is_begun:
            self.happened("a collection worker is lost in the middle of a rollout")
        witness.lost.add(name)
        witness.num_lost["CWorker" if kind == "collection" else "GWorker"] += 1


def dense_faults(rng, col, grad, action):
    """Return faults of one kind in several workers."""
    cols = [f"col.{index}" for index in range(1, col + 1)] if col > 1 else []
    grads = [f"grad.{index}" for index in range(1, grad + 1)] if grad > 1 else []
    faults = []
    for where in rng.sample(cols + grads, min(len(cols + grads), rng.choice((1, 2, 2, 3)))):
        point = "step" if "col" in where else "grad"
        if action == "delay":
            faults.append(f"delay {where} {rng.choice((0.3, 1.0))}s p=0.15")
        elif action == "hang":
            faults.append(f"hang {where} {rng.uniform(3.0, 3.6):.2f}s @ {point} {rng.randint(5, 12)}")
        elif rng.random() < 0.5:
            faults.append(f"kill {where} p={0.06 if 'col' in where else 0.1}")
        else:
            faults.append(f"kill {where} @ {point} {rng.randint(1, 10)}")
    return "; ".join(faults)


def scenario(seed):  # noqa: C901 - a sequence of independent choices
    """Return the settings, agent and kind of fault of a small random scheme, all determined by the seed."""
    rng = random.Random(f"witnessed {seed}")
    col, grad = rng.choice((1, 2, 3)), rng.choice((1, 2, 2, 3))
    col_async, grad_async = rng.choice((SYNC, ASYNC)), rng.choice((SYNC, ASYNC))
    settings = {"num_col_workers": col, "num_grad_workers": grad, "col_communication": col_async,
                "grad_communication": grad_async, "worker_timeout_s": 3.0, "queue_timeout_s": 30.0}
    if col_async is ASYNC:
        settings |= {"col_in_flight": rng.choice((1, 2, 3)), "queue_size": rng.choice((1, 2, 5)),
                     "broadcast_interval": rng.choice((1, 1, 3))}
    elif col > 1 and rng.random() < 0.2:
        settings |= {"col_fraction_workers": 0.5, "fraction_samples": 0.5}
    if grad > 1 and grad_async is SYNC and rng.random() < 0.4:
        settings["distribute_gradients"] = True
    if grad > 1 and grad_async is ASYNC:
        settings |= {"aggregate": rng.randint(1, grad), "updates_per_step": rng.choice((1, 1, 4)),
                     "on_worker_failure": rng.choice(("restart", "restart", "ignore"))}
        if rng.random() < 0.5:
            settings |= {"max_grad_lag": rng.choice((0, 1)), "lag_policy": rng.choice(("apply", "drop", "scale"))}
    settings["costs"] = {operation: ("exponential", 10 ** rng.uniform(low, high)) for operation, low, high in (
        ("start", -1, 0), ("message", -2, -0.5), ("step", -2, -0.7), ("grad", -2, -0.3), ("update", -2, -0.3))}
    action = rng.choice(("none", "delay", "kill", "kill", "shoot", "shoot", "hang", "hang", "nan"))
    if col_async is ASYNC and rng.random() < 0.5:
        settings |= {"queue_policy": rng.choice(("block", "drop_oldest", "drop_newest")),
                     "num_passes": rng.choice((1, 2)), "minibatch_buffer_size": rng.choice((1, 2)),
                     "buffer": rng.choice(("ring", "ring", "circular")), "train_batch_size": rng.choice((None, 6)),
                     "max_policy_lag": rng.choice((None, 1, 4))}
        if settings["max_policy_lag"] is not None and settings["buffer"] == "ring" and rng.random() < 0.5:
            settings |= {"on_policy_lag": "wait", "broadcast_interval": 1}
    if action == "nan":
        settings["faults"] = f"nan grad.* p={rng.choice((0.1, 0.3))}"
    elif action not in ("none", "shoot") and (faults := dense_faults(rng, col, grad, action)):
        settings["faults"] = faults
    agent = {"size": rng.choice((2, 3, 4)), "num_epochs": rng.choice((1, 2)), "num_mini_batch": rng.choice((1, 2))}
    if rng.random() < 0.15:
        agent |= {"capacity": rng.choice((6, 1000)), "learning_starts": rng.choice((0, 10))}
        for name in ("minibatch_buffer_size", "num_passes", "buffer"):
            settings.pop(name, None)
    return settings, agent, action


def run(seed, updates=UPDATES):
    """Run one schedule, and return its digest and the coincidences that occurred in it.

    Raises:
        WitnessError: The scheme contradicts the witness; the message contains the seed and the last events.
    """
    settings, agent, action = scenario(seed)
    witness = Witness(settings, agent, action)
    scheme = Scheme(*witnessed_agent(witness, **agent), seed=1, runtime="simulated", schedule_seed=seed, **settings)
    try:
        seams = Seams(scheme, witness)
        simulation = scheme.runtime.simulation
        if action == "shoot":
            rng = random.Random(f"shots {seed}")
            simulation.later(rng.expovariate(3.0), lambda: seams.shoot(rng))
        try:
            while scheme.version < updates:
                scheme.step()
                witness.check()
            compare_metrics(witness, scheme.metrics())
        except EXPECTED.get(action, ()):
            pass
        finally:
            seams.is_stopping = True
            final = scheme.stop()
        witness.check()
        compare_end(witness, seams, final)
        witness.check()
    except BaseException as error:
        events = "\n  ".join(list(simulation.last_events)[-12:])
        raise WitnessError(
            f"seed {seed}: {type(error).__name__}: {error}\nwith {settings}, {agent}\n  {events}") from error
    return simulation.digest, witness.coincidences


def compare_end(witness, seams, final):
    """Compare the final ledger with the account of the witness."""
    least = most = 0
    is_lost = {sender: sender[0] > 0 and (sender[1] != witness.incarnations[sender[0]]
                                          or gradient_worker(sender[0]) not in seams.closed)
               for sender in [*witness.senders, *map(sender_of, witness.made)]}
    for key, sender in witness.senders.items():
        if is_lost[key] and sender.arrived is not None:  # the ledger of a lost worker is that of its latest message
            least += sender.arrived.delivered
    for place, made in witness.made.items():
        name = collection_worker(*place[:2])
        is_local = place[1] == 0 and name not in witness.asked
        is_live = is_local or (name in seams.closed and place[2] == seams.incarnations[name])
        steps = made if is_live else witness.delivered[place]
        if is_lost[sender_of(place)]:
            most += made
        else:
            least, most = least + steps, most + steps
    places = sum(final[name] for name in ("in_flight", "queued", "consumed_unique", "resident", "evicted"))
    witness.note(final["collected"] == places + sum(final["dropped"].values()), "the final ledger does not balance:",
                 final)
    witness.note(least <= final["collected"] <= most, "the ledger counts", final["collected"], "collected steps, not",
                 least, "to", most)
    if not witness.mixes_old and not witness.is_kept and not (witness.is_decentralized and witness.num_lost["GWorker"]):
        witness.note(final["consumed_unique"] == witness.num_consumed, "the ledger counts", final["consumed_unique"],
                     "consumed steps instead of", witness.num_consumed)


def compare_metrics(witness, metrics):
    """Compare the means of all lags in the metrics with those of the witness."""
    for name, lags in (("policy_lag", witness.lags), ("grad_lag", witness.grad_lags)):
        mean = sum(lags) / max(1, len(lags))
        witness.note(abs(metrics[name]["mean"] - mean) < 1e-9, "the metrics have the mean", name,
                     metrics[name]["mean"], "instead of", mean)


def explore(seeds):
    """Run many schedules; return the set of their digests, and the number of runs with each coincidence."""
    digests, coincidences = set(), Counter(dict.fromkeys(COINCIDENCES, 0))
    for seed in seeds:
        digest, found = run(seed)
        digests.add(digest)
        coincidences.update(found)
    return digests, coincidences
