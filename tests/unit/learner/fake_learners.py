"""Helpers that build a learner with a fake scheme and read its records."""

from __future__ import annotations

import json

from pytorchrl.learner.learner import Learner


def make(scheme, target_steps=100, log_dir=None, **options):
    return Learner(scheme, target_steps, log_dir, **{"progress": False, "tensorboard": False, **options})


def records(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
