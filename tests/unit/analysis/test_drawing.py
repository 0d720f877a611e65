"""Tests of the layout of pictures: styles, letters, the key, and the distances between letters."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from pytorchrl.analysis.drawing import Canvas, KeyEntry, letters, plain, spread, style_of


def test_forty_two_groups_have_different_styles_and_neighbors_different_colors():
    styles = [style_of(place) for place in range(42)]
    assert len(set(styles)) == 42
    assert len({color for color, _ in styles}) == 7
    assert all(first[0] != second[0] for first, second in itertools.pairwise(styles))
    assert style_of(42) == style_of(0)


# What people without red or green cones see of linear RGB (Vienot, Brettel and Mollon, 1999).
BLIND = {"red": np.array([[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]]),
         "green": np.array([[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]]),
         "none": np.eye(3)}


@pytest.mark.parametrize("kind", BLIND)
def test_colors_differ_for_the_color_blind(kind):
    colors = np.array([[int(style_of(place)[0][start:start + 2], 16) for start in (1, 3, 5)] for place in range(7)])
    seen = (((colors / 255) ** 2.2) @ BLIND[kind].T).clip(0) ** (1 / 2.2)
    assert min(np.linalg.norm(first - second) for first, second in itertools.combinations(seen, 2)) > 0.12


def test_letters_are_unique():
    assert letters(3) == ["A", "B", "C"]
    assert letters(28)[25:] == ["Z", "AA", "AB"]
    assert len(set(letters(2000))) == 2000


@pytest.mark.parametrize(("places", "expected"), [
    ([], []), ([5.0], [5.0]), ([1.0, 5.0], [1.0, 5.0]), ([4.0, 4.0], [3.0, 5.0]), ([3.0, 4.0, 5.0], [2.0, 4.0, 6.0]),
    ([9.5, 9.5], [8.0, 10.0]), ([0.0, 9.0, 9.0, 9.0], [0.0, 6.0, 8.0, 10.0]), ([-3.0, -2.0], [0.0, 2.0]),
    ([12.0], [10.0]), ([4.0, 5.0, 5.5], [pytest.approx(2 + 5 / 6), pytest.approx(4 + 5 / 6), pytest.approx(6 + 5 / 6)]),
    ([1.0] * 6, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0])])
def test_letters_at_similar_heights_move_apart_within_the_axes(places, expected):
    assert spread(places, 2.0, 0.0, 10.0) == expected


def test_the_key_has_as_many_columns_as_fit_and_rows_of_similar_lengths():
    pytest.importorskip("matplotlib")
    for text, number, columns in (
            ("lr=1", 3, 3), ("lr=1", 9, 5), ("a longer label of a group", 4, 2), ("x" * 300, 2, 1)):
        canvas = Canvas(Path("a.png"), (6.0, 3.0), "")
        canvas.axes()
        canvas.add_key([KeyEntry(style_of(place), "", text) for place in range(number)])
        figure = canvas.lay_out()
        lefts = {round(artist.get_xdata()[0], 3) for artist in figure.artists}
        assert (len(figure.artists), len(lefts)) == (number, columns), text


def test_texts_are_shown_as_they_are():
    assert plain("$a$\nb") == r"\$a\$\nb"
