"""Simulated collectors, and a reference replay made of plain lists."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pytorchrl.agent.data import ActingStep, Step
from pytorchrl.agent.storages.rollout_rows import RolloutRows
from tests.unit.agent.storages.comparison import assert_masks, assert_observations, assert_targets


class Row:
    """One transition as the collector recorded it."""

    def __init__(self, **content):
        self.__dict__.update(content)


class Collector:
    """Simulated collector that records random episodes of E environments, in a `RolloutRows` and in plain lists.

    Each transition has a unique number as its action. Images are random, and many are black. At the start of an
    episode, the frame stack is padded with zeros, copies of the first frame or noise, or it keeps the old frames.
    """

    def __init__(self, *, seed=0, num_envs=2, num_steps=5, same_step=True, num_frames=0, padding="zero",
                 with_mask=False,
                 p_end=0.15, p_life=0.0, p_cut=0.0, picture=(3, 3), first_number=0, state_size=0):
        self.rng = np.random.default_rng(seed)
        self.num_envs, self.num_steps, self.same_step = num_envs, num_steps, same_step
        self.num_frames, self.padding, self.picture = num_frames, padding, picture
        self.p_end, self.p_life, self.p_cut, self.with_mask = p_end, p_life, p_cut, with_mask
        self.number = first_number
        self.state_size = state_size
        self.rows = RolloutRows(num_steps, num_envs, {"q": torch.zeros(num_envs, state_size)} if state_size else {})
        self.made = [[] for _ in range(num_envs)]
        self.stacks = [np.zeros((num_frames, *picture), np.uint8) for _ in range(num_envs)]
        self.resetting = np.zeros(num_envs, bool)
        self.restart()

    def restart(self):
        """Reset all environments, and discard the running episodes."""
        self.resetting[:] = False
        self.obs = [self.observe(e, first=True) for e in range(self.num_envs)]
        self.mask = self.random_mask()
        self.rows.start(self.batch(self.obs), self.mask)
        for made in self.made:
            made.append(None)

    def observe(self, e, first):
        if not self.num_frames:
            return self.rng.standard_normal(3).astype(np.float32)
        frame = self.rng.integers(0, 256, self.picture, dtype=np.uint8) * np.uint8(self.rng.random() > 0.3)
        if first and self.padding == "zero":
            self.stacks[e] = np.zeros_like(self.stacks[e])
        if first and self.padding == "copy":
            self.stacks[e] = np.repeat(frame[None], self.num_frames, 0)
        if first and self.padding == "noise":
            self.stacks[e] = self.rng.integers(0, 256, self.stacks[e].shape, dtype=np.uint8)
        self.stacks[e] = np.concatenate([self.stacks[e][1:], frame[None]])
        return self.stacks[e]

    def random_mask(self):
        return self.rng.random((self.num_envs, 4)) < 0.7 if self.with_mask else None

    def batch(self, observations):
        return {"obs": np.stack(observations), "number": np.arange(len(observations)) + 10 * self.number}

    def collect(self, num_steps=None):
        """Return a rollout of `num_steps` steps, and append the rows of each environment to its list in `made`."""
        for _ in range(num_steps or self.num_steps):
            self.step()
        return self.rows.take(copy=True)

    def step(self):
        num_envs, rng = self.num_envs, self.rng
        before, mask, resetting = self.batch(self.obs), self.mask, self.resetting
        _, states, is_first, _ = self.rows.current()
        states, is_first = {name: state.copy() for name, state in states.items()}, is_first.copy()
        after_states = {name: rng.standard_normal(state.shape).astype(np.float32) for name, state in states.items()}
        actions = self.number + np.arange(num_envs)
        self.number += num_envs
        end, life = rng.random(num_envs) < self.p_end, rng.random(num_envs) < self.p_life
        end, life = end & ~resetting, life & ~end & ~resetting
        terminated = end & (rng.random(num_envs) < 0.5)
        truncated, terminated = end & ~terminated, terminated | life
        valid = ~resetting & ~(end & (rng.random(num_envs) < self.p_cut))
        reward = rng.standard_normal(num_envs).astype(np.float32)
        shown, finals, first = [], {}, np.zeros(num_envs, bool)
        for e in range(num_envs):
            first[e] = resetting[e] or life[e] or (end[e] and self.same_step)
            if end[e] and self.same_step:
                finals[e] = self.observe(e, first=False)
            shown.append(self.observe(e, first=bool(resetting[e] or e in finals)))
        self.obs, self.mask = shown, self.random_mask()
        self.resetting = end if not self.same_step else np.zeros(num_envs, bool)
        after, index = self.batch(shown), np.array(sorted(finals), np.int64)
        final_obs = {"obs": np.stack([finals[e] for e in index]), "number": -1 - actions[index]} if finals else {}
        final_mask = self.random_mask()
        for e in range(num_envs):
            final = {"obs": finals[e], "number": -1 - actions[e]} if e in finals else None
            self.made[e].append(Row(
                obs={name: leaf[e] for name, leaf in before.items()}, mask=None if mask is None else mask[e],
                action=actions[e], reward=reward[e], terminated=terminated[e], truncated=truncated[e], valid=valid[e],
                is_first=is_first[e], states={name: state[e] for name, state in states.items()},
                next_obs=final or {name: leaf[e] for name, leaf in after.items()},
                next_mask=None if mask is None else final_mask[e] if final else self.mask[e]))
        self.rows.insert(ActingStep(actions, actions, after_states, {}), Step(
            obs=after, reward=reward, terminated=terminated, truncated=truncated, valid=valid, first=first,
            final_index=index, final_obs=final_obs, mask=self.mask, episodes=[],
            final_mask=None if final_mask is None else final_mask[index]))


class PlainReplay:
    """Reference replay in plain lists: rows in the order of insertion, and all rows of each environment."""

    def __init__(self, capacity):
        self.capacity, self.rows, self.streams = capacity, [], {}

    def insert(self, collector, num_steps):
        """Insert the rows of the collector's latest `num_steps` steps.

        An environment whose previous row is evicted by then does not continue; a gap precedes its new rows.
        """
        new = [[row for row in made if row is not None][-num_steps:] for made in collector.made]
        self.rows += [row for rows in new for row in rows]
        kept = {id(row) for row in self.rows[-self.capacity:]}
        for made, rows in zip(collector.made, new, strict=True):
            first = made.index(rows[0])
            if id(made[first - 1]) not in kept and made[first - 1] is not None:
                made.insert(first, None)
            for row in rows:
                self.streams[row.action] = (made, made.index(row), len(made))
        known = {id(made): len(made) for made in collector.made}
        for action, (made, index, _) in self.streams.items():
            if id(made) in known:
                self.streams[action] = (made, index, known[id(made)])

    @property
    def resident(self):
        """All valid resident rows, as {action: row}."""
        return {row.action: row for row in self.rows[-self.capacity:] if row.valid}

    def sequences(self, length, burn_in, period, n_step):
        """Return all complete windows, as {first action after the burn-in: (rows, number of burn-in rows)}."""
        found, kept = {}, {id(row) for row in self.rows[-self.capacity:]}
        for made, head in {id(made): (made, head) for made, _, head in self.streams.values()}.values():
            for rows, from_start, is_over in episodes_of(made[:head]):
                skipped, k = 0 if from_start else burn_in, 0
                while True:
                    start = skipped + k * period
                    enough = len(rows) > start if is_over else len(rows) >= start + length + n_step - 1
                    if not enough or (k and is_over and start - period + length >= len(rows)):
                        break
                    warm = max(0, start - burn_in)
                    if id(rows[warm]) in kept:
                        found[rows[start].action] = rows[warm:start + length], start - warm
                    k += 1
        return found

    def window(self, row, n_step, gamma):
        """Return (n-step return, discount, next observation, next mask, number of steps) of a row, in float64."""
        made, index, head = self.streams[row.action]
        total, m = 0.0, 0
        while True:
            last = made[index + m]
            total += gamma**m * float(last.reward)
            m += 1
            following = made[index + m] if index + m < head else None
            if m == n_step or last.terminated or last.truncated or following is None or not following.valid:
                return total, 0.0 if last.terminated else gamma**m, last.next_obs, last.next_mask, m


def episodes_of(made):
    """Return (valid rows, whether the first row starts the episode, whether the episode is over) for each episode.

    `made` contains the rows of one environment; None marks a gap.
    """
    found, rows, from_start = [], [], False
    for row in [*made, None]:
        if rows and (row is None or row.is_first):  # the episode was interrupted
            found.append((rows, from_start, False))
            rows = []
        if row is None:
            continue
        if row.valid:
            from_start = from_start if rows else row.is_first
            rows.append(row)
        if rows and (not row.valid or row.terminated or row.truncated):
            found.append((rows, from_start, True))
            rows = []
    return found


@pytest.fixture
def make_collector():
    return Collector


@pytest.fixture
def make_plain_replay():
    return PlainReplay


@pytest.fixture
def build_replay():
    """Return a function that builds a replay storage with a stub actor and a stub algorithm."""
    def build(cls, size, gamma=0.9, num_envs=1, seed=0, state_size=0, **options):
        options.setdefault("rollout_size", 1)
        states = {"q": torch.zeros(1, state_size)} if state_size else {}
        return cls.create_factory(size, **options)(
            actor=SimpleNamespace(initial_states=lambda num_envs: states), algorithm=SimpleNamespace(gamma=gamma),
            num_envs=num_envs, seed=seed, device="cpu")
    return build


@pytest.fixture
def assert_batch_equals():
    """Return a function that compares a batch with a `PlainReplay`, transition by transition."""
    def check(batch, plain, n_step, gamma):
        resident = plain.resident
        rows, everywhere = [resident[action] for action in batch.action.tolist()], slice(None)
        returns, discounts, next_obs, next_masks, _ = zip(
            *(plain.window(row, n_step, gamma) for row in rows), strict=True)
        assert_observations(batch.obs, everywhere, [row.obs for row in rows])
        assert_observations(batch.next_obs, everywhere, next_obs)
        assert_targets(batch, everywhere, returns, discounts)
        assert_masks(batch.mask, everywhere, [row.mask for row in rows])
        assert_masks(batch.next_mask, everywhere, next_masks)
    return check
