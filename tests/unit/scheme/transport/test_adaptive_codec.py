"""Check which messages an adaptive codec encodes, on simulated links."""

from __future__ import annotations

import itertools
import random

import pytest

from pytorchrl.scheme.transport.adaptive_codec import AdaptiveCodec

LINKS = {"memory": 5e9, "1 Gbit/s": 1.25e8, "100 Mbit/s": 1.25e7}  # bytes per second
# (compression ratio, bytes encoded per second, bytes decoded per second)
CODECS = {"pictures": (50.0, 8e9, 9e9), "gradient": (2.35, 2e9, 9e9), "floats": (1.08, 6e8, 1.5e9),
          "half": (2.0, 1e10, 1e10)}


def run(adaptive, bandwidth, codec, messages=3000, raw=1_000_000, latency=0.0, noise=0.0, seed=0):
    """Send messages over a simulated link.

    Returns:
        (seconds with the decisions of `adaptive`, seconds if no message is encoded, seconds if every message is
        encoded, share of messages that were encoded, decisions).
    """
    ratio, encode, decode = codec
    rng, chosen = random.Random(seed), []
    adaptive.link_s = 1.0 / bandwidth
    totals = [0.0, 0.0, 0.0]
    for _ in range(messages):
        slowness = 1.0 + noise * rng.expovariate(1.0)
        codec_s = (raw / encode + raw / decode) * slowness
        plain_s, encoded_s = latency + raw / bandwidth, latency + raw / ratio / bandwidth + codec_s
        chosen.append(adaptive.next())
        if chosen[-1]:
            adaptive.record(raw, int(raw / ratio), codec_s)
        for place, seconds in enumerate((encoded_s if chosen[-1] else plain_s, plain_s, encoded_s)):
            totals[place] += seconds
    return *totals, sum(chosen) / len(chosen), chosen


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("latency", [0.0, 1e-3])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("bandwidth", LINKS.values(), ids=LINKS)
def test_auto_is_at_most_three_percent_slower_than_the_better_choice(bandwidth, codec, latency, noise):
    ours, plain, encoded, share, _ = run(AdaptiveCodec(), bandwidth, codec, latency=latency, noise=noise)
    assert ours <= 1.03 * min(plain, encoded)
    if max(plain, encoded) > 1.3 * min(plain, encoded):
        assert share < 0.05 if plain < encoded else share > 0.95


def test_a_codec_that_does_not_pay_is_timed_occasionally():
    *_, chosen = run(AdaptiveCodec(), 1.25e7, (1.001, 6e8, 1.5e9), messages=400)
    assert [number for number, encoded in enumerate(chosen) if encoded] == [0, 1, 2, 67, 132, 197, 262, 327, 392]


def test_a_codec_that_costs_more_is_timed_more_rarely():
    """Check that a slow codec is timed with only one in a thousand messages.

    The codec takes 100 ms per message, and the link takes 10 ms. Timing may cost one percent of the time on the link.
    """
    *_, chosen = run(AdaptiveCodec(), 1e8, (1.0, 2e7, 2e7), messages=3000)
    timed = [number for number, encoded in enumerate(chosen) if encoded][2:]
    assert [later - earlier for earlier, later in itertools.pairwise(timed)] == [1001, 1001]


def test_data_that_become_compressible_are_detected():
    adaptive = AdaptiveCodec()
    assert run(adaptive, 1.25e7, (1.0, 6e8, 1.5e9))[3] < 0.05
    *_, chosen = run(adaptive, 1.25e7, CODECS["pictures"], messages=1000)
    assert chosen.count(False) <= 2 * 64
    assert all(chosen[-800:])


def test_an_unmeasured_link_counts_as_fast():
    adaptive, chosen = AdaptiveCodec(), []
    for _ in range(2000):
        chosen.append(adaptive.next())
        if chosen[-1]:
            adaptive.record(100, 1, 1e-9)
    assert chosen == [True] * 3 + [False] * 1997
    adaptive.link_s = 1e-7
    assert adaptive.next()


def test_one_pause_of_the_machine_changes_nothing():
    adaptive = AdaptiveCodec()
    run(adaptive, 1.25e8, CODECS["half"], messages=500)
    assert adaptive.saves_time
    adaptive.record(1_000_000, 500_000, 5.0)
    assert adaptive.saves_time


def test_empty_messages_are_ignored():
    adaptive = AdaptiveCodec()
    for _ in range(5):
        adaptive.record(0, 0, 1.0)
    assert adaptive.next()
    assert not adaptive.saves_time
