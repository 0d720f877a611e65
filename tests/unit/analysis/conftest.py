"""Runs that are written by hand, for tests of grouping, scores and the commands."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def make_run(tmp_path):
    """Return a function that writes a run with straight learning curves and returns its directory."""
    def make(name, *, env="CartPole-v1", seed=1, final=10.0, steps=100, algorithm="ppo", records=11, scheme=None,
             **options):
        run_dir = tmp_path / name
        run_dir.mkdir(parents=True)
        recipe = {"algorithm": algorithm, "env": env, "options": {**options, "seed": seed, "log_dir": str(run_dir)}}
        (run_dir / "run.json").write_text(json.dumps(
            {"format": 1, "recipe": recipe, "seed": seed, "scheme": scheme or {}}))
        lines = [json.dumps({"env_steps": steps * index / (records - 1), "return_mean": final * index / (records - 1)})
                 for index in range(records)]
        (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return run_dir
    return make
