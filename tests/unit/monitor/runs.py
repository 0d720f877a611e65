"""Hand-made run directories for tests of the monitor."""

from __future__ import annotations

import json

HOSTILE = "<img src=x onerror=alert(1)>\"'</script><b>\x1b[2J\x07\u202e[red]"
VERSIONS = {"python": "3.11", "torch": "2.9"}


def row(worker, env_steps, restarts=0, lag=None):
    summary = None if lag is None else {"mean": lag, "max": 4 * lag, "p50": lag, "p90": 2 * lag}
    return {"worker": worker, "env_steps": env_steps, "restarts": restarts, "policy_lag": summary}


def record(seconds, env_steps, *, grads=None, workers=(), **scheme):
    """Return a record after `seconds`; the level times grow with the seconds."""
    grads = 10 * int(seconds) if grads is None else grads
    return {
        "env_steps": env_steps, "updates": grads, "seconds": float(seconds), "env_steps_per_s": 100.0,
        "return_mean": 10.0 + seconds, "return_episodes": 5, "policy_lag": {"mean": 1.5, "max": 9, "p50": 1, "p90": 3},
        "ledger": {"collected": env_steps + 10, "in_flight": 10, "queued": 0, "consumed_unique": env_steps,
                   "consumed": 4 * env_steps, "dropped": {"nan": 0, "worker_lost": 3}},
        "algorithm": {"loss": 1.0 / (1 + seconds)},
        "scheme": {
            "grads_received": grads, "grads_held": 0, "weight_pushes": grads, "bytes_in": 1000 * int(seconds),
            "bytes_out": 0, "queue_size": 2, "queue": {"count": 1, "mean": 1.0}, "queue_peak": 5, "workers": 2,
            "workers_missing": 0,
            "workers_restarted": 0, "envs_restarted": 0, "requests_in_flight": 4,
            "policy_lag_histogram": [[0, 5], [1, 3], [2, 2]], "grad_lag": {"mean": 0.5, "max": 1, "p50": 0, "p90": 1},
            "by_worker": [{"worker": "GWorker 0", "gradients": grads, "restarts": 0}, *workers],
            "time_s": {
                "collection": {"environment": 1.5 * seconds, "inference": 0.3 * seconds, "idle": 0.2 * seconds},
                "gradients": {"wait": 0.6 * seconds, "grad": 0.4 * seconds, "idle": 0.0},
                "update": {"wait": 0.9 * seconds, "apply": 0.1 * seconds, "idle": 0.0}},
            **scheme}}


def description(env="CartPole-v1", **settings):
    return {
        "format": 1, "recipe": {"algorithm": "ppo", "env": env, "options": {"num_envs": 4}}, "target_steps": 10_000,
        "seed": 3, "versions": VERSIONS, "started": "2026-01-02T03:04:05+0000",
        "scheme": {"col_communication": "asynchronous", "num_col_workers": 2, "queue_size": 8,
                   "grad_communication": "synchronous", "grad_execution": "Central", "num_replay_workers": None,
                   **settings}}


def make_run(path, records=(), run=None, result=None):
    """Write the files of a run into `path` and return it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.json").write_text(json.dumps(description() if run is None else run))
    (path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    if result is not None:
        (path / "result.json").write_text(json.dumps(result))
    return path


def two_workers(first, second, restarts=0):
    return (row("GWorker 0/CWorker 1", first, lag=1.0), row("GWorker 0/CWorker 2", second, restarts, lag=2.0))


def usual_records():
    """Return records in which worker 2 is lost at 15 s and replaced at 20 s."""
    return [
        record(5, 500, workers=two_workers(300, 200)),
        record(15, 1500, workers=two_workers(1000, 500), workers_missing=1),
        record(20, 2000, workers=two_workers(1500, 500, restarts=1), workers_restarted=1),
        record(30, 4000, workers=two_workers(2500, 1500, restarts=1), workers_restarted=1)]


def hostile_run(path):
    """Write a run whose every text is hostile."""
    run = description(HOSTILE)
    run["recipe"]["algorithm"] = run["started"] = run["seed"] = HOSTILE
    run["versions"] = run["recipe"]["options"] = run["scheme"][HOSTILE] = {HOSTILE: HOSTILE}
    run["scheme"]["num_replay_workers"] = HOSTILE
    records = usual_records()
    for one in records:
        one["ledger"][HOSTILE], one["ledger"]["dropped"][HOSTILE], one["algorithm"][HOSTILE] = 5, 6, 7.0
        one["scheme"]["by_worker"][1]["worker"] = HOSTILE
        one["scheme"]["time_s"]["update"][HOSTILE] = one["seconds"]
    records[-1]["scheme"]["by_worker"][1]["restarts"] = records[-1]["scheme"]["workers_restarted"] = 2
    return make_run(path, records, run)
