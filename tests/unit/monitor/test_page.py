"""Tests of the page about runs: contents, escaping, and independence of other files."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re

import pytest

from pytorchrl.errors import ConfigError
from pytorchrl.monitor.page import report, write_report
from pytorchrl.monitor.style import report_script
from pytorchrl.monitor.view import read_run
from tests.unit.monitor.runs import HOSTILE, description, hostile_run, make_run, usual_records

# Every tag that a page may contain.
TAGS = {
    "html", "head", "meta", "link", "title", "style", "body", "header", "h1", "h2", "h3", "p", "b",
    "i", "br", "span", "div", "section", "button", "script", "noscript", "svg", "line", "polyline", "details",
    "summary", "table", "thead", "tbody", "tr", "th", "td", "video", "img", "a", "ul", "li", "code", "label", "select",
    "option", "input",
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


def data_of(text):
    return json.loads(re.search('<script id="data" type="application/json">([^<]*)</script>', text)[1])


def test_a_report_contains_the_parts_of_a_run(tmp_path):
    run = make_run(tmp_path / "a", usual_records(), result={"env_steps": 4000, "seconds": 30.0})
    page = Page(text := report([read_run(run)]))
    text_only = " ".join(page.text)
    for part in ("training: mean return of the last 100 episodes", "ledger, in env steps",
                 "time of each level, at the end", "GWorker 0/CWorker 2", "policy lag, in updates",
                 "faults and restarts", "versions", "num_col_workers", "2 of 8, mean 1.0, peak 5", "2 to 3",
                 "lost workers restarted: 1 (GWorker 0/CWorker 2)", "dropped: worker_lost", "loss"):
        assert part in text_only
    assert set(page.tags) <= TAGS
    charts = data_of(text)["charts"]
    assert text.count(" data-chart=") == len(charts) == 3  # return, share of dropped steps, loss
    assert charts[0]["lines"] == [{"group": 0, "label": "a", "env_steps": [[500, 1500, 2000, 4000], [15, 25, 30, 40]],
                                   "seconds": [[5, 15, 20, 30], [15, 25, 30, 40]]}]


def test_numbers_that_never_change_get_no_chart(tmp_path):
    page = Page(text := report([read_run(make_run(tmp_path / "a", usual_records()))]))
    assert ("constant: env steps per second 100, policy lag since the start: mean 1.5, queued train batches: mean 1"
            in page.text)
    assert "queued train batches: mean" not in [chart["title"] for chart in data_of(text)["charts"]]


def test_only_options_that_the_user_gave_are_called_given(tmp_path):
    run = description()
    run["recipe"] |= {"given": ["lr", "log_dir"], "options": {"lr": 0.1, "num_steps": 17, "log_dir": "x"}}
    text = report([read_run(make_run(tmp_path / "a", usual_records(), run))])
    pattern = "options given</h3>.*?<table>(.*?)</table>.*?options of the preset.*?<table>(.*?)</table>"
    given, preset = re.search(pattern, text, re.DOTALL).groups()
    assert (given, preset) == ("<tbody><tr><td>lr</td><td>0.1</td></tr></tbody>",
                               "<tbody><tr><td>num_steps</td><td>17</td></tr></tbody>")


def test_a_report_says_where_the_run_comes_from(tmp_path):
    run = {**description(), "origin": {"command": "pytorchrl train ppo --env X", "commit": "abc-dirty", "machine": {
        "name": "box", "cores": 8, "gpus": ["H200", "H200"]}}}
    page = Page(report([read_run(make_run(tmp_path / "a", usual_records(), run))]))
    for part in ("pytorchrl train ppo --env X", "abc-dirty", "box, 8 cores, 2 H200"):
        assert part in page.text


def wrong_run(path):
    """Write a run in which most steps were dropped."""
    records = usual_records()
    records[-1]["ledger"] |= {"collected": 4000, "dropped": {"policy_lag": 3300}}
    return make_run(path, records, result={"env_steps": 4000})


def test_a_run_that_goes_wrong_is_red(tmp_path):
    wrong, right = (read_run(run) for run in (wrong_run(tmp_path / "a"), make_run(tmp_path / "b", usual_records())))
    sentence = "3,300 of 4,000 env steps were dropped"
    for views, name in (([wrong], "What looks wrong"), ([wrong, right], "1 of 2 runs look wrong")):
        page = Page(text := report(views))
        assert ("class", "wrong") in page.attributes
        assert name in page.text
        assert sentence in "".join(page.text)
        assert 'class="label bad">dropped: policy_lag<' in text
    assert ("class", "wrong") not in Page(report([right])).attributes


def test_a_report_shows_how_many_batches_of_shards_wait(tmp_path):
    run = read_run(make_run(tmp_path / "a", usual_records(), description(num_replay_workers=3)))
    assert "3 shards, 2 batches wait, peak 5" in report([run])


def test_a_report_needs_nothing_else(tmp_path):
    text = report([read_run(make_run(tmp_path / "a", usual_records()))])
    page = Page(text)
    text = text.replace("https://github.com/leeoniya/uPlot", "")  # in the comment that names uPlot
    assert "http://" not in text
    assert "https://" not in text
    assert [value for name, value in page.attributes if name in ("src", "href")] == ["data:,"]
    assert "prefers-color-scheme:dark" in text
    assert "data-theme=dark" in text


def test_hostile_texts_become_no_markup(tmp_path):
    names = ("a", HOSTILE.replace("/", ""))
    page = Page(report([read_run(hostile_run(tmp_path / name)) for name in names]))
    assert set(page.tags) <= TAGS - {"img"}
    assert page.tags.count("script") == 2  # the data, which are no script, and the script
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    texts = [*page.text, *(value for _, value in page.attributes if value)]
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", "".join(texts))
    assert sum("<img src=x onerror=alert(1)>" in text for text in texts) > 10
    assert page.text.count(report_script()) == 1


def runs_of_groups(path):
    """Write four runs with one learning rate, and two with another."""
    runs = []
    for place in range(6):
        run = description()
        run["seed"] = place
        run["recipe"]["options"] = {"lr": 0.1 if place < 4 else 0.2, "seed": place}
        records = usual_records()
        for one in records:
            one["return_mean"] += place
        runs.append(make_run(path / f"run{place}", records, run))
    return [read_run(run) for run in runs]


def test_seeds_form_groups_with_bands_and_intervals(tmp_path):
    page = Page(text := report(runs_of_groups(tmp_path)))
    assert page.text[0] != ""
    assert "6 runs on CartPole-v1" in page.text
    data = data_of(text)
    assert [group["label"] for group in data["groups"]] == ["ppo lr=0.1", "ppo lr=0.2"]
    first, *singles = data["charts"][0]["lines"][:5]
    assert first["label"] == "ppo lr=0.1 (4 runs)"
    x, middle, low, high = first["env_steps"]
    assert (x[0], x[-1], middle[-1]) == (500, 4000, 41.5)
    assert low[-1] < 41.5 < high[-1]
    assert [(line["label"], line["hidden"]) for line in singles] == [(f"run{place}", True) for place in range(4)]
    second = data["charts"][0]["lines"][5]
    assert len(second["env_steps"]) == 2  # no band for two runs
    assert not data["charts"][0]["lines"][6]["hidden"]
    rows = re.findall("<tr>(.*?)</tr>", text)
    assert re.findall('data-v="([^"]*)"', rows[1]) == ["4", "41.5", *re.findall('data-v="([^"]*)"', rows[1])[2:3],
                                                       "40", "43", "4000"]
    assert "interval is given from 4 runs on" in text


def test_the_table_of_runs_has_the_settings_that_differ(tmp_path):
    text = report(runs_of_groups(tmp_path))
    table = text[text.index('<div id="runs">'):text.index("<h2>Curves")]
    names = re.findall('<button type="button">([^<]*)</button>', table)
    assert names == ["run", "state", "seed", "final return", "lr", "env steps", "time", "steps/s", "lag", "dropped"]
    assert table.count('href="#run-') == 6
    assert all(f'<details class="run" id="run-{place}">' in text for place in range(6))


def test_groups_can_be_named(tmp_path):
    views = runs_of_groups(tmp_path)[:3]
    data = data_of(report(views, {"new <net>": [views[0].run_dir], "old": [view.run_dir for view in views[1:]]}))
    assert [group["label"] for group in data["groups"]] == ["new <net>", "old"]


def test_each_environment_has_its_own_chart_of_returns(tmp_path):
    views = [read_run(make_run(tmp_path / env, usual_records(), description(env))) for env in ("A-v1", "B-v1")]
    titles = [chart["title"] for chart in data_of(report(views))["charts"]]
    assert titles[:2] == [f"training: mean return of the last 100 episodes on {env}" for env in ("A-v1", "B-v1")]


def test_a_page_about_very_many_runs_stays_small(tmp_path):
    view = read_run(wrong_run(tmp_path / "run"))
    points = [(one, one) for one in range(300)]
    records = [{**usual_records()[-1], "env_steps": x, "seconds": float(y), "return_mean": y / 7} for x, y in points]
    views = [dataclasses.replace(view, run_dir=tmp_path / f"run{place}", records=tuple(records)) for place in range(60)]
    text = report(views)
    assert len(text) < 500_000
    assert "details by <code>pytorchrl report" in text
    assert text.count('id="run-') == 60


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
