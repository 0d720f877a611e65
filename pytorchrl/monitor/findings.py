"""Find what goes wrong in a run, from one record of its metrics: a word for the progress line, and a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pytorchrl.files.reading import count, item, mapping, number

# Shares of the target after which something that is missing is worth a word while the run continues.
_EARLY, _HALF = 0.1, 0.5
# Fewer episodes may have equal returns by chance.
_LEAST_EPISODES = 20
# More restarts of environments are worth a sentence; rare ones are normal for some simulators.
_ENV_STEPS_PER_RESTART, _LEAST_RESTARTS = 1000, 3
# Reasons for which steps are dropped at the end of every run.
_OF_THE_END = ("shutdown",)
_REMEDIES = {
    "policy_lag": "raise max_policy_lag, or give on_policy_lag='wait', which delays collection instead",
    "queue_full": "give queue_policy='block', which delays collection instead, or use fewer collection workers",
    "gradient_lag": "raise max_grad_lag, or give lag_policy='scale', which uses old gradients with a smaller weight",
    "early_stop": "raise target_kl, or lower lr",
    "nan": "lower lr, or check the rewards and observations",
    "worker_lost": "look in the log for the reason why workers were lost",
}


class RunFinding(NamedTuple):
    """Something that goes wrong in a run."""

    word: str
    """One or two words for the progress line."""
    sentence: str
    """What is wrong, and what to do."""


Found = Iterator[RunFinding]


def find(record: Mapping[str, object], target_steps: int, *, has_ended: bool) -> list[RunFinding]:
    """Return what goes wrong in a run, the most serious first; empty if nothing looks wrong.

    Args:
        record: A line of `metrics.jsonl`, or the same figures in memory. Figures that are missing are not judged.
        target_steps: Env steps after which the run ends.
        has_ended: Whether the run has ended. While it continues, what may still come, such as the first episode, is
            only reported when it is late.
    """
    record = dict(record)
    done = 1.0 if has_ended else count(record, "env_steps") / max(1, target_steps)
    if not count(record, "ledger", "collected"):
        return []
    return [*_nan(record), *_lag(record, done), *_dropped(record, done), *_updates(record, done, target_steps),
            *_episodes(record, done), *_faults(record, done)]


def dropped_share(record: Mapping[str, object]) -> float:
    """Return the share of collected env steps that were dropped before the end of the run, in [0, 1]."""
    collected = count(dict(record), "ledger", "collected")
    return sum(_reasons(record).values()) / collected if collected else 0.0


def _reasons(record: Mapping[str, object]) -> dict[str, int]:
    reasons = mapping(dict(record), "ledger", "dropped")
    return {reason: count(reasons, reason) for reason in reasons if reason not in _OF_THE_END}


def _nan(record: Mapping[str, object]) -> Found:
    if skipped := count(record, "scheme", "updates_skipped_nan"):
        yield RunFinding("NaN", f"{skipped:,} of {skipped + count(record, 'updates'):,} updates were skipped, because "
                         "the loss or the gradient was NaN or infinite; lower lr, or let keep_bad_batches save the "
                         "batches")


def _lag(record: Mapping[str, object], done: float) -> Found:
    lag, tolerated = number(record, "batch_lag", "mean"), number(record, "batch_lag", "tolerated")
    if done < _EARLY or lag is None or tolerated is None or lag <= tolerated:
        return
    waits = (number(record, "scheme", "policy_lag_queue_mean") or 0.0) > (
        number(record, "scheme", "policy_lag_collect_mean") or 0.0)
    remedy = "lower queue_size" if waits else "use fewer collection workers, or a train_batch_size of several rollouts"
    yield RunFinding("lag", f"the data are {lag:.1f} train batches old at their first use, and this algorithm "
                     f"tolerates {tolerated:g}; {remedy}, or use APPO or IMPALA, which correct for lag")


def _dropped(record: Mapping[str, object], done: float) -> Found:
    reasons, collected = _reasons(record), count(record, "ledger", "collected")
    dropped = sum(reasons.values())
    if done < _EARLY or 2 * dropped <= collected:
        return
    main = max(reasons, key=lambda reason: reasons[reason])
    yield RunFinding("dropped", f"{dropped:,} of {collected:,} env steps were dropped, most of them because of {main}; "
                     f"{_REMEDIES.get(main, 'see the ledger')}")


def _updates(record: Mapping[str, object], done: float, target_steps: int) -> Found:
    updates, steps = count(record, "updates"), count(record, "env_steps")
    # Collection goes on until the first update is possible, even beyond the target.
    is_late = not updates or (updates == 1 and steps > 2 * target_steps)
    if done >= _HALF and is_late and not [*_nan(record), *_dropped(record, done)]:
        made = "1 update was" if updates else "no update was"
        yield RunFinding("no updates", f"{made} made in {steps:,} env steps, with a target of {target_steps:,}; lower "
                         "start_steps, num_steps or train_batch_size, or raise target_steps")


def _episodes(record: Mapping[str, object], done: float) -> Found:
    episodes = count(record, "return_episodes")
    lowest, highest = (number(record, "return_range", end) for end in ("min", "max"))
    if done < _HALF:
        return
    if not episodes and item(record, "return_episodes") is not None:
        yield RunFinding("no episodes", f"no episode has ended in {count(record, 'env_steps'):,} env steps, so there "
                         "is no return; raise target_steps, or give max_episode_steps")
    elif episodes >= _LEAST_EPISODES and lowest is not None and lowest == highest:
        yield RunFinding("constant return", f"all episodes so far have had the same return, {lowest:g}, so there was "
                         "nothing to learn from; check the rewards, or raise the exploration")


def _faults(record: Mapping[str, object], done: float) -> Found:
    missing, restarts = count(record, "scheme", "workers_missing"), count(record, "scheme", "envs_restarted")
    if done >= 1.0 and missing:
        yield RunFinding("workers", f"{missing} of {count(record, 'scheme', 'workers')} remote workers are lost and "
                         "were not replaced; look in the log for the reason")
    if restarts >= _LEAST_RESTARTS and restarts * _ENV_STEPS_PER_RESTART > count(record, "env_steps"):
        yield RunFinding("environments", f"environments failed and were restarted {restarts:,} times; look in the log "
                         "for their errors, or give on_env_error='raise'")
