"""Check one record of a run's metrics: what goes wrong has a word for the progress line, and a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pytorchrl.files.reading import Record, count, item, mapping, number

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
    "cancelled": "leave out cancels_unfinished, so that unfinished episodes become part of later rollouts",
    "worker_lost": "look in the log for the reason why workers were lost",
}


class RunFinding(NamedTuple):
    """Something that goes wrong in a run."""

    word: str
    """One or two words for the progress line."""
    sentence: str
    """The fault and its remedy."""


class Check(NamedTuple):
    """A check of a run."""

    word: str
    """One or two words for what is checked."""
    fine: str
    """The statement that is true if nothing is wrong."""
    wrong: str | None
    """The fault and its remedy; "" if nothing is wrong, None if the record does not tell yet."""


def find(record: Mapping[str, object], target_steps: int, *, has_ended: bool) -> list[RunFinding]:
    """Return what goes wrong in a run, the most serious first; empty if nothing looks wrong; see `checks`."""
    return [RunFinding(check.word, check.wrong)
            for check in checks(record, target_steps, has_ended=has_ended) if check.wrong]


def checks(record: Mapping[str, object], target_steps: int, *, has_ended: bool) -> list[Check]:
    """Return all checks of a run, the most serious first.

    Args:
        record: A line of `metrics.jsonl`, or the same figures in memory. Figures that are missing are not judged.
        target_steps: Env steps after which the run ends.
        has_ended: Whether the run has ended. While it continues, what may still come, such as the first episode, is
            only reported when it is late.
    """
    record = dict(record)
    done = 1.0 if has_ended else count(record, "env_steps") / max(1, target_steps)
    has_data = count(record, "ledger", "collected") > 0
    return [Check(word, fine, wrong_in(record, target_steps) if has_data and done >= share else None)
            for word, fine, share, wrong_in in _CHECKS]


def dropped_share(record: Mapping[str, object]) -> float:
    """Return the share of collected env steps that were dropped before the end of the run, in [0, 1]."""
    collected = count(dict(record), "ledger", "collected")
    return sum(_reasons(record).values()) / collected if collected else 0.0


def _reasons(record: Mapping[str, object]) -> dict[str, int]:
    reasons = mapping(dict(record), "ledger", "dropped")
    return {reason: count(reasons, reason) for reason in reasons if reason not in _OF_THE_END}


# The following functions return `Check.wrong` of a record, given the target in env steps.

def _nan(record: Record, _: int) -> str | None:
    skipped = number(record, "scheme", "updates_skipped_nan")
    if not skipped:
        return None if skipped is None else ""
    return (f"{skipped:,.0f} of {skipped + count(record, 'updates'):,.0f} updates were skipped, because the loss or "
            "the gradient was NaN or infinite; lower lr, or let keep_bad_batches save the batches")


def _lag(record: Record, _: int) -> str | None:
    lag, tolerated = number(record, "batch_lag", "mean"), number(record, "batch_lag", "tolerated")
    # Without asynchronous collection there is no lag, and with replay, data of any age are used.
    if lag is None or tolerated is None or lag <= tolerated:
        return ""
    waits = (number(record, "scheme", "policy_lag_queue_mean") or 0.0) > (
        number(record, "scheme", "policy_lag_collect_mean") or 0.0)
    remedy = "lower queue_size" if waits else "use fewer collection workers, or a train_batch_size of several rollouts"
    return (f"the data are {lag:.1f} train batches old at their first use, and this algorithm tolerates "
            f"{tolerated:g}; {remedy}, or use APPO or IMPALA, which correct for lag")


def _dropped(record: Record, _: int) -> str | None:
    reasons, collected = _reasons(record), count(record, "ledger", "collected")
    dropped = sum(reasons.values())
    if 2 * dropped <= collected:
        return ""
    main = max(reasons, key=lambda reason: reasons[reason])
    return (f"{dropped:,} of {collected:,} env steps were dropped, most of them because of {main}; "
            f"{_REMEDIES.get(main, 'see the ledger')}")


def _updates(record: Record, target_steps: int) -> str | None:
    updates, steps = count(record, "updates"), count(record, "env_steps")
    # Collection goes on until the first update is possible, even beyond the target.
    if updates > 1 or (updates == 1 and steps <= 2 * target_steps):
        return ""
    if _nan(record, target_steps) or _dropped(record, target_steps):  # which say why there is no update
        return None
    made = "1 update was" if updates else "no update was"
    return (f"{made} made in {steps:,} env steps, with a target of {target_steps:,}; lower start_steps, num_steps or "
            "train_batch_size, or raise target_steps")


def _episodes(record: Record, _: int) -> str | None:
    if count(record, "return_episodes"):
        return ""
    if item(record, "return_episodes") is None:
        return None
    return (f"no episode has ended in {count(record, 'env_steps'):,} env steps, so there is no return; raise "
            "target_steps, or give max_episode_steps")


def _returns(record: Record, _: int) -> str | None:
    lowest, highest = (number(record, "return_range", end) for end in ("min", "max"))
    if lowest is not None and highest is not None and lowest != highest:
        return ""
    if lowest is None or highest is None or count(record, "return_episodes") < _LEAST_EPISODES:
        return None
    return (f"all episodes so far have had the same return, {lowest:g}, so there was nothing to learn from; check the "
            "rewards, or raise the exploration")


def _workers(record: Record, _: int) -> str | None:
    missing = count(record, "scheme", "workers_missing")
    if not missing:
        return ""
    return (f"{missing} of {count(record, 'scheme', 'workers')} remote workers are lost and were not replaced; look "
            "in the log for the reason")


def _environments(record: Record, _: int) -> str | None:
    restarts = count(record, "scheme", "envs_restarted")
    if restarts < _LEAST_RESTARTS or restarts * _ENV_STEPS_PER_RESTART <= count(record, "env_steps"):
        return ""
    return (f"environments failed and were restarted {restarts:,} times; look in the log for their errors, or give "
            "on_env_error='raise'")


# Word, what is so if nothing is wrong, the share of the target from which on the check can tell, and the check.
_CHECKS: tuple[tuple[str, str, float, Callable[[Record, int], str | None]], ...] = (
    ("NaN", "no loss and no gradient was NaN or infinite", 0.0, _nan),
    ("lag", "the data are not older than the algorithm tolerates", _EARLY, _lag),
    ("dropped", "at most half of the collected env steps were dropped", _EARLY, _dropped),
    ("no updates", "updates are made", _HALF, _updates),
    ("no episodes", "episodes end", _HALF, _episodes),
    ("constant return", "episodes have different returns", _HALF, _returns),
    ("workers", "no remote worker is missing at the end", 1.0, _workers),
    ("environments", "environments fail rarely or never", 0.0, _environments),
)
