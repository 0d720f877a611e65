"""What replay notes of its items where it is asked to, beside dictionaries of every item, draw and priority."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pytorchrl.agent.storages import PERBuffer, ReplayBuffer, RolloutSequenceBuffer, SequenceBuffer

SHORT = {"length": 4, "burn_in": 2, "period": 2, "n_step": 2}


def drawable(storage):
    """Ids of what can be drawn."""
    ring = storage.ring
    if not ring.columns:
        return set()
    places = np.flatnonzero(ring.columns["drawable"])
    return set(ring.ids(places).tolist())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("cls", "options", "frames"), [
    (ReplayBuffer, {}, 0), (ReplayBuffer, {}, 3), (PERBuffer, {"alpha": 0.6}, 0), (SequenceBuffer, SHORT, 0),
    (RolloutSequenceBuffer, {}, 0)], ids=["uniform", "pictures", "priorities", "sequences", "rollouts"])
def test_notes_are_those_of_every_item(build_replay, make_collector, cls, options, frames, seed):
    state_size = 2 if cls is SequenceBuffer else 0
    collector = make_collector(seed=seed, num_steps=8, num_frames=frames, padding="copy", state_size=state_size)
    storage = build_replay(cls, 90, num_envs=2, seed=seed, state_size=state_size, **options)
    rng = np.random.default_rng(seed)
    storage.keep_notes()
    hits, gone, changes = Counter(), [], []
    for _ in range(60):
        before = drawable(storage)
        storage.insert_data_slice([collector.collect(int(rng.integers(1, 8)))], sources=["one"])
        gone += [hits.pop(item, 0) for item in before - drawable(storage)]
        if (batch := storage.sample(int(rng.integers(1, 12)))) is None:
            continue
        ids = batch.ids.numpy()
        hits.update(ids.tolist())
        if storage.has_priorities:
            rows = np.unique(ids % storage.options.size)
            root = 1.0 / storage.options.alpha
            old = storage.priority_sums.get(rows) ** root
            storage.update_priorities(ids, rng.standard_normal(len(ids)))
            changes += (storage.priority_sums.get(rows) ** root - old).tolist()
    if seed % 2:
        gone += [hits.pop(item, 0) for item in drawable(storage)]
        storage.reset()
    notes = storage.take_notes()
    assert Counter(notes["evicted_hits"].tolist()) == Counter(gone)
    assert max(gone) > 1
    assert notes["priority_change"].tolist() == pytest.approx(changes)
    assert bool(changes) is storage.has_priorities
    assert [len(values) for values in storage.take_notes().values()] == [0, 0]


def test_nothing_is_noted_unless_it_is_asked_for(build_replay, make_collector):
    storage, collector = build_replay(PERBuffer, 20, num_envs=2), make_collector()
    for _ in range(10):
        storage.insert_data_slice([collector.collect()])
        storage.update_priorities(storage.sample(4).ids.numpy(), np.ones(4))
    assert [len(values) for values in storage.take_notes().values()] == [0, 0]
    storage.keep_notes()
    storage.sample(4)
    storage.insert_data_slice([collector.collect()])
    assert 0 < storage.take_notes()["evicted_hits"].sum() <= 4
