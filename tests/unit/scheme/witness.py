"""An account of a simulated run that does not rely on what the scheme reports, for comparing both.

A `Witness` sees what happens in the parts that a user provides (see `witness_agent`): each step of an environment with
the weights that chose its action, the data and the weights of each gradient, the gradients in each update, the steps in
each normalizer, and the values of a schedule. The messages of the scheme are compared with this account as they arrive,
and the ledger and the metrics at the end of the run.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from pytorchrl.support.worker_names import collection_worker, gradient_worker

NUM_SLOTS = 4
"""Largest number of gradient workers, including the local one."""
TARGET_STEPS = 10**6
PER_GRADIENT_WORKER = 64
"""Incarnations of a collection worker for each incarnation of its gradient worker."""


class WitnessError(AssertionError):
    """Raised if the scheme contradicts the account of the witness."""


def place_of(number):
    """Return (gradient worker, collection worker, incarnation) of the environments that took a numbered step."""
    path = int(number) >> 28
    return path >> 24, path >> 12 & 0xFFF, path & 0xFFF


def sender_of(place):
    """Return (gradient worker, incarnation) of the gradient worker above a collection worker."""
    return place[0], place[2] // PER_GRADIENT_WORKER


@dataclass
class Computed:
    """A gradient when it was computed."""

    sender: tuple[int, int]
    mark: tuple[int, ...]
    """The weights; the first number is their version."""
    num_samples: int
    num_new: int
    """Samples that no earlier gradient used."""
    last: bool
    moments: set[int]
    """Steps whose moments are due when this gradient is applied; empty unless it ends its train batch."""
    delivered: int
    """Steps that this gradient worker had received."""
    inserted: int
    """Steps that this gradient worker had learned from."""


@dataclass
class Sender:
    """Record of one incarnation of a gradient worker."""

    algorithm: object = None
    first_version: int = 0
    """Version of the weights until the first gradient."""
    inserted: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    lags: list[tuple[int, int, int]] = field(default_factory=list)
    """(collection worker, lag when queued, lag at first use) of each rollout since the latest report."""
    moments: set[int] = field(default_factory=set)
    """Steps of the current train batch, whose moments are not yet due."""
    newest: Computed | None = None
    arrived: Computed | None = None


@dataclass
class Asked:
    """A request to a worker, when it was submitted."""

    version: int | None
    """Version of the weights of the worker that asks; None if unknown."""
    has_weights: bool
    mark: tuple[int, ...] | None = None
    """The learner's weights, if a gradient is requested."""
    is_begun: bool = False


class Witness:
    """The account of one run. `note` stores the first contradiction, and `check` raises it.

    Attributes:
        coincidences: Kinds of coincidence of two events that occurred in this run; see `witnessed_runs`.
    """

    def __init__(self, settings, agent, action):
        self.settings, self.agent = settings, agent
        self.is_kept, self.mixes_old = "capacity" in agent, bool(settings.get("replay_slots"))
        self.has_nan = action == "nan"
        self.is_parallel = settings["num_grad_workers"] > 1
        self.is_decentralized = settings.get("distribute_gradients", False)
        self.is_async = self.is_parallel and settings["grad_communication"] == "asynchronous"
        self.broken = None
        self.coincidences = set()
        self.made, self.delivered = Counter(), Counter()  # place -> steps that were made, and that arrived
        self.acted = {}  # step -> mark of the weights that chose the action
        self.queued_at = {}  # first step of a rollout -> the learner's version when the rollout arrived
        self.last_used = {}  # place -> latest step that was learned from
        self.senders = defaultdict(Sender)
        self.computed = {}  # number of a gradient -> the gradient
        self.arrived = deque()  # numbers of gradients that were neither applied nor dropped
        self.applied = set()
        self.num_consumed = self.version = 0
        self.lags, self.grad_lags = [], []  # all lags in reports, and of all applied gradients
        self.marks = defaultdict(list, {0: [(0, 1, 0, 0)]})  # version -> marks of the learner's weights
        self.rate, self.rates = 0.0, defaultdict(set, {0: {0.0}})  # version -> values of the schedule
        self.updating = None  # the algorithm that makes an update now
        self.due, self.merged = None, []  # moments that this update must merge, and those that it has merged
        self.may_merge = set()
        self.asked = defaultdict(deque)  # name of a worker -> its unanswered requests
        self.floor = {}  # name of a worker -> least version from which its current incarnation may start
        self.incarnations = Counter()  # index of a gradient worker -> its incarnation
        self.lost = set()  # names of workers that have ended and have not been replaced
        self.num_lost = Counter()  # "CWorker" or "GWorker" -> losses

    def note(self, condition, *what):
        if not condition and self.broken is None:
            self.broken = WitnessError(" ".join(map(str, what)))

    def check(self):
        if self.broken is not None:
            raise self.broken

    # Collection

    def step(self, numbers, actions):
        """Record a step of environments; the actions contain the marks of the weights and the schedule's value."""
        self.settle()
        place = place_of(numbers[0])
        name = collection_worker(*place[:2])
        for number, (*numbers_of_mark, rate) in zip(numbers.tolist(), actions.tolist(), strict=True):
            mark = tuple(map(int, numbers_of_mark))
            self._check_weights(name, "acted", mark, rate)
            if not self.made[place]:
                floor = max(self.floor.get(name, 0), self.floor.get(gradient_worker(place[0]), 0))
                self.note(mark[0] >= floor, "the replacement", name, "acted with version", mark[0], "instead of", floor)
            self.acted[number] = mark
            self.made[place] += 1

    def _check_weights(self, name, verb, mark, rate):
        self.note(mark in self.marks[mark[0]], name, verb, "with weights that the learner never had:", mark,
                  "instead of one of", self.marks[mark[0]])
        self.note(rate in self.rates[0 if self.is_decentralized else mark[0]], name, verb, "with the schedule's value",
                  rate, "instead of one of", self.rates[mark[0]], "in version", mark[0])

    def version_of(self, index):
        """Return the version of the weights of a gradient worker; None if it has not learned from anything yet."""
        algorithm = self.senders[index, self.incarnations[index]].algorithm
        return None if algorithm is None else algorithm.updates

    def deliver(self, name, rollout):
        """Compare a rollout of a worker that arrives at its gradient worker with the steps that were made."""
        self.note(self.asked[name], name, "answers without a request")
        asked = self.asked[name].popleft() if self.asked[name] else Asked(None, False)
        numbers = rollout.data.reward.reshape(-1).tolist()
        if not numbers:
            return
        place = place_of(numbers[0])
        self.delivered[place] += len(numbers)
        self.queued_at[numbers[0]] = self.version_of(place[0])
        versions = {self.acted[number][0] for number in numbers}
        header = rollout.header
        self.note(versions == {header.weights_version}, "a rollout of", name, "was made with versions", versions,
                  "and reports", header.weights_version)
        self.note(header.num_env_steps == len(numbers), "a rollout of", len(numbers), "steps reports",
                  header.num_env_steps)
        if asked.version is not None and not self.settings.get("max_weight_sync_delay"):
            oldest = asked.version - self.settings.get("broadcast_interval", 1) + 1
            self.note(oldest <= min(versions) <= asked.version, "a rollout of", name, "was requested at version",
                      asked.version, "and made with version", min(versions))

    def insert(self, algorithm, rollouts):
        """Record rollouts from which a learner will learn; new ones must be recent enough and in order."""
        for numbers in filter(None, rollouts):
            place = place_of(numbers[0])
            sender = self.senders[sender_of(place)]
            if sender.algorithm is None:
                sender.algorithm, sender.first_version = algorithm, algorithm.updates
            if numbers[0] in sender.inserted:
                continue
            sender.inserted.update(numbers)
            sender.moments.update(numbers)
            acted, now = self.acted[numbers[0]][0], algorithm.updates
            queued = self.queued_at.get(numbers[0], now)  # rollouts of a local worker are not delivered
            queued = sender.first_version if queued is None else queued
            sender.lags.append((place[1], queued - acted, now - acted))
            limit = self.settings.get("max_policy_lag")
            self.note(limit is None or self.mixes_old or now - acted <= limit, "a rollout of lag", now - acted,
                      "was used, but the limit is", limit)
            in_any_order = self.mixes_old or self.settings.get("buffer") == "circular"
            self.note(in_any_order or numbers[0] > self.last_used.get(place, -1), "rollouts of",
                      collection_worker(*place[:2]), "were used in another order than they were made")
            self.last_used[place] = numbers[-1]

    # Gradients

    def compute(self, algorithm, batch):
        """Record a gradient of the batch, check its weights, and return its number."""
        self.settle()
        numbers = batch.action.tolist()
        key = sender_of(place_of(numbers[0]))
        sender, mark, name = self.senders[key], algorithm.mark, gradient_worker(key[0])
        self.note({sender_of(place_of(number)) for number in numbers} == {key}, "a gradient of", name,
                  "uses data of another worker")
        self._check_weights(name, "computed", mark, algorithm.parameters["rate"])
        self.note(self.is_async or algorithm.parameters["rate"] == self.rate, name, "computed with the schedule's "
                  "value", algorithm.parameters["rate"], "instead of", self.rate)
        self.note(sender.newest is not None or mark[0] >= self.floor.get(name, 0), "the replacement", name,
                  "computed with version", mark[0], "instead of", self.floor.get(name, 0))
        new = set(numbers) - sender.used
        sender.used |= new
        delivered = sum(steps for place, steps in self.delivered.items() if sender_of(place) == key)
        sender.newest = Computed(key, mark, len(numbers), 0 if self.is_kept else len(new), batch.last,
                                 sender.moments if batch.last else set(), delivered, len(sender.inserted))
        if batch.last:
            sender.moments = set()
        number = len(self.computed) + 1
        self.computed[number] = sender.newest
        return number

    def receive(self, message):
        """Compare a gradient that arrives at the update worker with the gradient that was computed."""
        self.settle()
        name, asked = gradient_worker(message.worker), None
        if message.worker and not self.is_decentralized:
            self.note(self.asked[name], name, "answers without a request")
            asked = self.asked[name].popleft().mark if self.asked[name] else None
        if "number" not in message.info:  # there was no data
            self.note(message.num_samples == 0, "a gradient without a number has samples")
            return
        number = round(message.info["number"])
        gradient = self.computed[number]
        sender = self.senders[gradient.sender]
        sender.arrived = gradient
        self.arrived.append(number)
        self.may_merge |= gradient.moments | sender.moments
        for what, said, seen in (
                ("sender", (message.worker, message.incarnation), gradient.sender),
                ("version", message.weights_version, gradient.mark[0]),
                ("number of samples", message.num_samples, gradient.num_samples),
                ("number of new samples", message.num_new_samples, gradient.num_new),
                ("end of a train batch", message.last, gradient.last)):
            is_known = what != "number of new samples" or not self.mixes_old
            self.note(not is_known or said == seen, "a gradient of", name, "reports the wrong", what, said,
                      "instead of", seen)
        self.note(asked is None or asked == gradient.mark, name, "was asked for a gradient of the weights", asked,
                  "and computed it with", gradient.mark)
        if message.report is not None:
            self.report(gradient.sender, message.report)

    def report(self, key, report):
        """Compare the lags in a report of a gradient worker with those of the rollouts that it has learned from."""
        sender = self.senders[key]
        self.lags += [lag for _, _, lag in report.lags]
        self.note(self.mixes_old or list(report.lags) == sender.lags, gradient_worker(key[0]), "reports the lags",
                  report.lags, "instead of", sender.lags)
        sender.lags = []

    # Updates

    def follow(self, algorithm, env_steps, rate):
        """Check for how many env steps the schedule's value is set before an update."""
        self.settle()
        steps = self.num_consumed
        if self.is_kept:
            steps = sum(sender.arrived.inserted for sender in self.senders.values() if sender.arrived is not None)
        is_known = not self.mixes_old and not (self.num_lost["GWorker"] and (self.is_kept or self.is_decentralized))
        self.note(not is_known or env_steps == rate == steps, "the schedule's value is that of step", env_steps,
                  "instead of", steps, "before update", self.version)
        self.rate = rate
        self.rates[0 if self.is_decentralized else algorithm.updates].add(rate)

    def apply(self, algorithm, found):
        """Check the gradients in an update, as pairs of number and share, after the weights have changed."""
        self.settle()
        mark, numbers = algorithm.mark, [round(number) for number, _ in found]
        version = mark[0] - 1
        self._expect(algorithm, numbers)
        if mark[:2] in {known[:2] for known in self.marks[mark[0]]}:
            self.note(self.is_decentralized, "update", version, "was made twice")  # another rank has made it, too
            return
        known = all(abs(number - whole) < 1e-6 for (number, _), whole in zip(found, numbers, strict=True)) \
            and all(number in self.computed for number in numbers)
        self.note(known, "update", version, "mixes gradients:", found)
        self.note(not self.marks[mark[0]] or self.num_lost["GWorker"], "ranks made different updates", version)
        if not known:
            return
        gradients = [self.computed[number] for number in numbers]
        self.note(self.applied.isdisjoint(numbers), "gradients", numbers, "contain one that was applied before")
        self.applied.update(numbers)
        lags = [version - gradient.mark[0] for gradient in gradients]
        total = sum(gradient.num_samples for gradient in gradients)
        for (_, share), gradient, lag in zip(found, gradients, lags, strict=True):
            expected = gradient.num_samples / total * self._factor(lag)
            self.note(abs(share - expected) < 1e-6 and expected > 0, "a gradient of", gradient.num_samples, "of", total,
                      "samples and lag", lag, "has the share", share, "instead of", expected)
        self._check_order(numbers, version)
        self.grad_lags += lags
        self.num_consumed += sum(gradient.num_new for gradient in gradients)
        self.version = max(self.version, mark[0])
        self.rates[mark[0]].add(self.rate)

    def _factor(self, lag):
        limit, policy = self.settings.get("max_grad_lag"), self.settings.get("lag_policy", "apply")
        if not self.is_async or limit is None or lag <= limit or policy == "apply":
            return 1.0
        return (1 + limit) / (1 + lag) if policy == "scale" else 0.0

    def _check_order(self, numbers, version):
        """Check that an update contains the gradients that arrived first, except those that are dropped."""
        if self.is_decentralized:
            return
        left = set(numbers)
        while self.arrived and (left or not self.is_async):
            number = self.arrived.popleft()
            lag = version - self.computed[number].mark[0]
            is_dropped = self._factor(lag) == 0.0 or (not self.is_async and self.num_lost["GWorker"]) or self.has_nan
            self.note(number in left or is_dropped, "update", version, "is made of the gradients", numbers,
                      "although gradient", number, "arrived before")
            left.discard(number)
        self.note(not left, "update", version, "is made of gradients that did not arrive:", left)

    def _expect(self, algorithm, numbers):
        self.updating, self.merged = algorithm, []
        self.due = set().union(*(self.computed[number].moments for number in numbers if number in self.computed))

    def skip(self, algorithm):
        """Record an update that is not made, because its gradient is not finite."""
        self.settle()
        self.updating, self.due, self.merged = algorithm, None, []

    def merge(self, actor, numbers):
        """Record steps whose moments are merged into a normalizer."""
        self.note(actor.merged.isdisjoint(numbers), "the moments of steps are merged twice:", numbers)
        self.merged += numbers

    def settle(self):
        """Add the weights after the latest update to the account, and check which moments the update has merged."""
        if self.updating is None:
            return
        mark, merged, due, self.updating = self.updating.mark, set(self.merged), self.due, None
        if mark not in self.marks[mark[0]]:
            self.marks[mark[0]].append(mark)
        is_known = due is not None and not (self.num_lost["GWorker"] and not self.is_async) and not self.mixes_old
        self.note(not is_known or merged == due, "an update merges the moments of the steps", sorted(merged),
                  "instead of", sorted(due or ()))
        self.note(self.is_decentralized or merged <= self.may_merge, "an update merges the moments of steps whose "
                  "gradients did not arrive:", sorted(merged - self.may_merge))
