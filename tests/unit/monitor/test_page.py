"""Tests of the page about runs: contents, escaping, and independence of other files."""

from __future__ import annotations

import html.parser
import json
import re

import pytest

from pytorchrl.errors import ConfigError
from pytorchrl.monitor.page import report, write_report
from pytorchrl.monitor.style import TOGGLE
from pytorchrl.monitor.view import read_run
from tests.unit.monitor.runs import HOSTILE, description, hostile_run, make_run, usual_records

# Every tag that a page may contain.
TAGS = {
    "html", "head", "meta", "link", "title", "style", "body", "header", "h1", "h2", "h3", "p", "b",
    "i", "br", "span", "div", "section", "button", "script", "svg", "text", "line", "polyline", "circle", "details",
    "summary", "table", "thead", "tbody", "tr", "th", "td", "video", "img", "a",
}


class Page(html.parser.HTMLParser):
    """Parser that collects tags, attributes and text as a browser would."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text.append(data)


def test_a_report_contains_the_parts_of_a_run(tmp_path):
    run = make_run(tmp_path / "a", usual_records(), result={"env_steps": 4000, "seconds": 30.0})
    page = Page(report([read_run(run)]))
    text = " ".join(page.text)
    for part in ("training: mean return", "ledger, in env steps", "time of each level, at the end",
                 "GWorker 0/CWorker 2", "policy lag, in updates", "faults and restarts", "versions", "num_col_workers",
                 "2 of 8, mean 1.0, peak 5", "2 to 3", "lost workers restarted: 1 (GWorker 0/CWorker 2)",
                 "dropped: worker_lost", "loss"):
        assert part in text
    assert set(page.tags) <= TAGS
    assert page.tags.count("polyline") >= 4


def test_a_report_shows_how_many_batches_of_shards_wait(tmp_path):
    run = read_run(make_run(tmp_path / "a", usual_records(), description(num_replay_workers=3)))
    assert "3 shards, 2 batches wait, peak 5" in report([run])


def test_a_report_needs_nothing_else(tmp_path):
    text = report([read_run(make_run(tmp_path / "a", usual_records()))])
    page = Page(text)
    assert "http://" not in text
    assert "https://" not in text
    assert [value for name, value in page.attributes if name in ("src", "href")] == ["data:,"]
    assert "prefers-color-scheme:dark" in text
    assert "data-theme=dark" in text


def test_hostile_texts_become_no_markup(tmp_path):
    names = ("a", HOSTILE.replace("/", ""))
    page = Page(report([read_run(hostile_run(tmp_path / name)) for name in names]))
    assert set(page.tags) <= TAGS - {"img"}
    assert page.tags.count("script") == 1
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    texts = [*page.text, *(value for _, value in page.attributes if value)]
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", "".join(texts))
    assert sum("<img src=x onerror=alert(1)>" in text for text in texts) > 10
    assert page.text.count(TOGGLE) == 1


def test_runs_are_compared_in_one_chart(tmp_path):
    views = [read_run(make_run(tmp_path / name, usual_records())) for name in ("a", "b")]
    text = report(views)
    assert text.index("<title>2 runs</title>") < text.index("<title>a</title>") < text.index("<title>b</title>")
    assert text.count("training: mean return of the last 100 episodes</h3>") == 1


def test_videos_are_embedded(tmp_path):
    run_dir = make_run(tmp_path / "a", usual_records())
    (run_dir / "videos").mkdir()
    (run_dir / "videos" / "one.mp4").write_bytes(b"film")
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (run_dir / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    text = report([read_run(run_dir)])
    assert 'src="data:video/mp4;base64,ZmlsbQ=="' in text
    assert text.count("<video") == 1


@pytest.mark.parametrize("records", [(), [{}], usual_records()[:1], [{"env_steps": 1, "return_mean": 1e300}]])
def test_a_run_with_few_figures_has_a_page(tmp_path, records):
    assert "</html>" in report([read_run(make_run(tmp_path / "a", records, run=json.loads("{}")))])


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report([read_run(make_run(tmp_path / "a"))], tmp_path / "a" / "run.json" / "page.html")
