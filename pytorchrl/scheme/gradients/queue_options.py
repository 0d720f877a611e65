"""Options of the queue of train batches between asynchronous collection and the learner."""

from __future__ import annotations

from dataclasses import dataclass

from pytorchrl.agent.options import option
from pytorchrl.errors import ConfigError
from pytorchrl.scheme.base.options import QueueOptions

QUEUE_POLICIES = ("block", "drop_oldest", "drop_newest")
STARVED_POLICIES = ("raise", "warn", "wait")
LAG_POLICIES = ("drop", "wait")
BUFFERS = ("ring", "circular")


@dataclass(frozen=True, kw_only=True)
class SampleQueueOptions(QueueOptions):
    """Options of the queue of train batches between asynchronous collection and the learner."""

    queue_policy: str = option(
        "block", choices=QUEUE_POLICIES, help="Reaction to a full queue: \"block\" makes collection wait; "
        "\"drop_oldest\" and \"drop_newest\" drop a train batch.")
    on_starved: str = option(
        "raise", choices=STARVED_POLICIES, help="Reaction of an asynchronous learner that gets no data for "
        "queue_timeout_s: \"raise\" an error, \"warn\" once and keep waiting, or \"wait\" without a warning.")
    minibatch_buffer_size: int = option(
        1, low=1, help="Number of train batches that an asynchronous learner uses alternately, each num_passes times.")
    num_passes: int = option(
        1, low=1, help="Number of uses of a train batch; in each use, the algorithm makes one update for each minibatch"
        " of each epoch.")
    ramp: bool | None = option(
        None, help="Whether the first train batch is used once, the second one twice, and so on up to num_passes, so "
        "that new train batches are needed at equal intervals; None: True if minibatch_buffer_size > 1.")
    buffer: str = option(
        "ring", choices=BUFFERS, help="Order of train batches: \"ring\" uses them alternately; \"circular\" keeps the "
        "newest minibatch_buffer_size train batches and samples from them.")
    replay_proportion: float = option(
        0.0, low=0.0, help="Number of old rollouts for each new rollout in train batches.")
    replay_slots: int = option(
        0, low=0, help="Number of the newest rollouts that are kept, to be used again according to replay_proportion.")
    max_policy_lag: int | None = option(
        None, low=0, help="Largest age, in updates, of the weights with which a rollout was collected, when an "
        "asynchronous learner first uses the rollout; at later uses, the limit applies to the whole train batch. "
        "None: no limit.")
    on_policy_lag: str = option(
        "drop", choices=LAG_POLICIES, help="Treatment of rollouts that exceed max_policy_lag: \"drop\" drops "
        "them; \"wait\" also delays requests for rollouts that would be too old at their first use.")

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        super().__post_init__()
        is_circular, waits = self.buffer == "circular", self.on_policy_lag == "wait"
        problems = [text for wrong, text in (
            ((self.replay_proportion > 0) != bool(self.replay_slots),
             f"replay_proportion={self.replay_proportion} and replay_slots={self.replay_slots!r} go together; give "
             "both or none"),
            (self.ramp is not None and is_circular,
             f"ramp={self.ramp} is for buffer='ring', and has no effect with buffer='circular'; leave ramp out"),
            (waits and self.max_policy_lag is None, "on_policy_lag='wait' needs max_policy_lag, got None"),
            (waits and is_circular,
             "on_policy_lag='wait' counts future uses, which buffer='circular' draws at random; give "
             "on_policy_lag='drop'"),
        ) if wrong]
        if problems:
            raise ConfigError("; ".join(problems))
