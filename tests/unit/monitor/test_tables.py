"""Tests of tables: values by which they are sorted, columns that are left out, and escaping."""

from __future__ import annotations

from pytorchrl.monitor.tables import Cell, card, entries, figures, share_of_drops, sorted_table, table, words


def test_cells_have_the_values_by_which_rows_are_sorted():
    page = sorted_table((("name", False), ("return", True)), [
        [words("a<b"), figures("1,000", 1000.0)], [words("c"), figures("", None)]])
    assert '<th><button type="button">name</button></th><th class=n data-n=1>' in page
    assert '<td>a&lt;b</td><td class="n" data-v="1000">1,000</td>' in page
    assert '<td class="n" data-v="">-</td>' in page


def test_columns_without_content_are_left_out():
    row = [words("a"), figures("", None), Cell("")]
    page = sorted_table((("name", False), ("lag", True), ("more", False)), [row, row])
    assert page.count("<th>") == 1
    assert page.count("<td") == 2


def test_many_dropped_steps_are_red():
    assert "class=bad" in share_of_drops(0.51).html
    assert "class=bad" not in share_of_drops(0.5).html
    assert share_of_drops(0.0).html == ""


def test_plain_tables_and_cards_are_escaped():
    page = table(("<h>",), [("<td>",)])
    assert "<thead><tr><th>&lt;h&gt;</th></tr></thead><tbody><tr><td>&lt;td&gt;</td></tr></tbody>" in page
    assert "<h3>&amp;</h3>" in card("&", "")
    assert entries({"a": "x", "b": [1]}) == [("a", "x"), ("b", "[1]")]
