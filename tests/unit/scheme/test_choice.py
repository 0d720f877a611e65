"""When it pays to encode, on simulated links."""

from __future__ import annotations

import itertools
import random

import pytest

from pytorchrl.scheme.transport.adaptive_codec import Choice

LINKS = {"memory": 5e9, "1 Gbit/s": 1.25e8, "100 Mbit/s": 1.25e7}  # bytes a second
# ratio, bytes a second to encode and to decode
CODECS = {"pictures": (50.0, 8e9, 9e9), "gradient": (2.35, 2e9, 9e9), "floats": (1.08, 6e8, 1.5e9), "half": (2.0, 1e10, 1e10)}


def run(choice, bandwidth, codec, messages=3000, raw=1_000_000, latency=0.0, noise=0.0, in_flight=1, seed=0):
    """(seconds by its choices, seconds without the codec, seconds with it, share that was encoded)."""
    ratio, encode, decode = codec
    rng, underway, chosen = random.Random(seed), [], []
    totals = [0.0, 0.0, 0.0]
    for _ in range(messages):
        encoded, slowness = choice.next(), 1.0 + noise * rng.expovariate(1.0)
        trial = encoded != choice.is_on
        costs = []
        for is_encoded in (False, True):
            sent = int(raw / ratio) if is_encoded else raw
            codec_s = raw / encode + raw / decode if is_encoded else 0.0
            costs.append((is_encoded, raw, sent, codec_s, (latency + sent / bandwidth) * slowness))
        for place, cost in enumerate((costs[encoded], *costs)):
            totals[place] += cost[3] + cost[4]
        chosen.append(encoded)
        underway.append((*costs[encoded], int(trial)))
        if len(underway) >= in_flight:
            choice.tell(*underway.pop(0))
    return *totals, sum(chosen) / len(chosen), chosen


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("latency", [0.0, 1e-3])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("bandwidth", LINKS.values(), ids=LINKS)
def test_never_more_than_three_percent_slower_than_the_better_way(bandwidth, codec, latency, noise):
    ours, plain, encoded, share, _ = run(Choice(), bandwidth, codec, latency=latency, noise=noise)
    assert ours <= 1.03 * min(plain, encoded)
    if max(plain, encoded) > 1.3 * min(plain, encoded):
        assert share < 0.05 if plain < encoded else share > 0.95


def test_several_messages_may_be_underway():
    ours, plain, encoded, *_ = run(Choice(), 1.25e8, CODECS["gradient"], in_flight=8)
    assert ours <= 1.03 * min(plain, encoded)


def test_both_ways_are_tried_and_the_slower_one_ever_more_rarely():
    *_, chosen = run(Choice(), 1.25e7, (1.001, 6e8, 1.5e9), messages=400)
    assert chosen[:3] == [True, True, False]
    tried = [number for number, encoded in enumerate(chosen) if encoded][2:]
    assert [later - earlier for earlier, later in itertools.pairwise(tried)] == [18, 35, 68, 69, 70, 71]
    # Where it costs more to try, less often.
    *_, chosen = run(Choice(), 1.25e8, CODECS["half"], messages=600)
    tried = [number for number, encoded in enumerate(chosen) if not encoded]
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert len(gaps) > 3
    assert all(gap > 80 for gap in gaps)


def test_a_first_trial_of_which_nobody_tells_is_made_again():
    choice = Choice()
    for _ in range(2):
        assert choice.next()
        choice.tell(True, 1000, 900, 1e-6, 1e-3)
    asked = [number for number in range(30) if not choice.next()]
    assert asked == [0, 8, 16, 24]


def test_trials_of_requests_and_of_answers_do_not_meet():
    tried = []
    for delay in (0, 4):
        *_, chosen = run(Choice(delay), 1.25e7, (1.001, 6e8, 1.5e9), messages=400)
        start = chosen.index(False)
        tried.append({start, *(number for number, encoded in enumerate(chosen) if encoded and number > start)})
    assert all(len(numbers) > 6 for numbers in tried)
    assert tried[0].isdisjoint(tried[1])


def test_a_trial_that_would_cost_much_waits():
    """Pictures over a slow link: without the codec a message takes forty times as long, or two seconds."""
    *_, chosen = run(Choice(), 1.25e7, CODECS["pictures"], messages=1000, raw=28_000_000)
    assert all(chosen)
    ours, _, encoded, *_ = run(Choice(), 1.25e7, CODECS["pictures"], messages=9000)
    assert ours <= 1.02 * encoded


@pytest.mark.parametrize(("before", "after"), [(5e9, 1.25e7), (1.25e7, 5e9)])
def test_a_link_that_changes_is_followed(before, after):
    choice, codec = Choice(), CODECS["gradient"]
    *_, share, _ = run(choice, before, codec)
    assert (share > 0.9) == (before < 1e9)
    ours, plain, encoded, _, chosen = run(choice, after, codec, messages=1000)
    assert ours <= 1.25 * min(plain, encoded)
    assert sum(chosen[-500:]) / 500 > 0.9 if after < 1e9 else sum(chosen[-500:]) / 500 < 0.1


def test_one_pause_of_the_machine_changes_nothing():
    choice = Choice()
    run(choice, 1.25e8, CODECS["half"], messages=500)
    assert choice.is_on
    choice.tell(True, 1_000_000, 500_000, 2e-4, 5.0)
    assert choice.is_on


def test_where_nothing_takes_time_nothing_is_encoded():
    """As in the simulated runtime, whose operations take none unless it is said."""
    choice, chosen = Choice(), []
    for _ in range(200):
        chosen.append(choice.next())
        choice.tell(chosen[-1], 100, 50 if chosen[-1] else 100, 0.0, 0.0, int(chosen[-1] != choice.is_on))
    assert sum(chosen) <= 2 + 200 / 8


def test_it_follows_from_what_it_is_told():
    first, second = (run(Choice(), 1.25e8, CODECS["gradient"], noise=0.5, in_flight=3) for _ in range(2))
    assert first == second


def test_empty_messages_say_nothing():
    choice = Choice()
    choice.tell(True, 0, 0, 1.0, 1.0)
    choice.tell(True, 0, 0, 1.0, 1.0)
    assert choice.next()
