"""Tests of how objects are shown in terminals and notebooks; the names and texts in them are not trusted."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path

import numpy as np
import pytest

import pytorchrl as prl
from pytorchrl import ASYNC, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv, linear
from pytorchrl.agent.data import Evaluation
from pytorchrl.analysis import Run
from pytorchrl.scheme.options.collection import AsynchronousCollection
from pytorchrl.support.display import Displayed, WrittenFile, figure, in_notebook, shortened, wrapped

NASTY = "<script>alert(1)</script>\x1b[31m\n&\u202e"
TINY = {"num_envs": 2, "num_steps": 16, "num_epochs": 1, "num_mini_batch": 1, "target_steps": 64, "progress": False,
        "tensorboard": False}


class Shown(Displayed):
    def __init__(self, *rows):
        self.rows = rows

    def _rows(self):
        return list(self.rows)


def check_text(text, most_lines):
    """Check that a `repr` has at most `most_lines` lines of at most 80 columns, without characters that control."""
    lines = text.split("\n")
    assert len(lines) <= most_lines, text
    assert all(len(line) <= 80 and line.isprintable() for line in lines), text


def check_html(shown):
    """Check that HTML has closed elements, no scripts, no other files, and no color of its own; return its text."""
    opened, found = [], []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag, attributes):
            assert tag in {"div", "b", "table", "tbody", "tr", "th", "td", "progress"}, tag
            assert {name for name, _ in attributes} <= {"style", "value", "max"}, attributes
            assert all("#" not in (value or "") and "url" not in (value or "") for _, value in attributes)
            opened.append(tag)

        def handle_endtag(self, tag):
            assert opened.pop() == tag

        def handle_data(self, data):
            found.append(data)
    reader = Reader()
    reader.feed(shown)
    assert opened == []
    assert len(shown) < 4000
    assert "color:black" not in shown.replace(" ", "")
    return " ".join(found)


def make_scheme(make=Scheme, test_envs=None, **settings):
    envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
    return make(
        PPO.create_factory(lr=linear(1e-3, 0.0), gamma=0.98),
        OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,)),
        GAEBuffer.create_factory(size=16), envs, test_envs and envs, **settings)


def test_a_scheme_shows_what_was_set_and_nothing_else():
    parts = ["gamma=0.98", "lr=linear(0.001, 0.0)", "hidden_sizes=(8,)", "size=16", "'CartPole-v1'", "vec_env_size=2"]
    rows = {  # form -> scheme, the texts of its settings
        "nothing": (make_scheme(), []),
        "flat": (make_scheme(col_communication=ASYNC, queue_size=3, seed=1),
                 ["col_communication='asynchronous'", "queue_size=3", "seed=1"]),
        "a default": (make_scheme(num_col_workers=1), ["num_col_workers=1"]),
        "kinds": (make_scheme(collection=AsynchronousCollection(num_col_workers=2, queue_size=3), runtime="threads"),
                  ["collection=AsynchronousCollection(", "queue_size=3", "num_col_workers=2", "runtime='threads'"]),
        "preset": (make_scheme(Scheme.ddppo, num_grad_workers=3),
                   ["num_grad_workers=3", "col_fraction_workers=0.6", "col_communication='synchronous'",
                    "grad_communication='synchronous'", "distribute_gradients=True"]),
    }
    for form, (scheme, own) in rows.items():
        text = repr(scheme)
        check_text(text, 9)
        words = " ".join(text.split())
        for part in [*parts, *own]:
            assert part in words, (form, part, text)
        expected = {part.split("=")[0] for part in [*parts, *own] if "=" in part} | {"env_fn"}
        assert set(re.findall(r"(\w+)=", words)) == expected, form
        assert "Box" not in text
        assert words.removeprefix("Scheme ").split() == check_html(scheme._repr_html_()).removeprefix("Scheme ").split()


def test_printing_a_scheme_shows_every_setting():
    scheme = make_scheme(test_envs=True, num_col_workers=2, runtime="threads")
    check_text(str(scheme), 50)
    words = " ".join(str(scheme).split())
    assert all(f"{name}={value!r}" in words for name, value in scheme.settings.items())
    assert len(scheme.settings) > 60


def test_an_evaluation_shows_mean_deviation_and_number():
    returns = (10.0, 20.0, 60.0, 1.5)
    evaluation = Evaluation(7, returns, (1, 2, 3, 4), {"leader": (1.0, 3.0)})
    mean = sum(returns) / 4
    std = (sum((value - mean) ** 2 for value in returns) / 4) ** 0.5
    assert (round(mean, 2), round(std, 2)) == (22.88, 22.41)
    assert repr(evaluation) == str(evaluation) == (
        "Evaluation(return_mean=22.88, return_std=22.41, episodes=4, leader=2)")
    shown = check_html(evaluation._repr_html_())
    for text in ("22.88 ± 22.41", "1.5, 60", "leader 2", "2.5 env steps"):
        assert text in shown
    many = Evaluation(7, returns, (1, 2, 3, 4), {f"agent_{number}": (1.0,) for number in range(5000)})
    check_text(repr(many), 20)


def test_runs_and_texts_of_strangers_are_escaped():
    run = Run(Path("runs") / NASTY.replace("/", ""), NASTY, 3, {"algorithm": NASTY, "lr": 0.5})
    check_text(repr(run), 4)
    check_html(run._repr_html_())
    assert repr(Run(Path("runs/a"), "CartPole-v1", None, {})) == "Run('runs/a', env='CartPole-v1')"
    assert "lr" not in repr(run)
    nasty = Shown((NASTY, [NASTY, NASTY]), ("empty", []))
    check_text(repr(nasty), 5)
    assert "empty" not in repr(nasty)
    assert "empty" not in check_html(nasty._repr_html_())
    file = WrittenFile(Path(f"x{NASTY.replace('/', '')}.html"))
    assert "<script" not in file._repr_html_()
    check_text(repr(file), 1)


@pytest.mark.parametrize(("value", "text"), [
    (0.0, "0"), (58.3333, "58.33"), (0.00012347, "0.0001235"), (-187.25, "-187.2"), (999.99, "1000"),
    (12345.67, "12345.7"), (-1e6, "-1000000.0"), (float("nan"), "nan")])
def test_figures_have_four_digits(value, text):
    assert figure(value) == text
    if value == value:
        assert float(text) == pytest.approx(value, rel=5e-4)


def test_lines_are_broken_between_items_and_nothing_is_lost():
    items = [f"option_{number}={'x' * (7 * number % 90)}" for number in range(40)]
    text = wrapped("  options  ", items, ")")
    check_text(text, 60)
    assert text.replace("\n", "").replace(" ", "") == f"options{','.join(items)})"
    assert "and 9950 more" in wrapped("a ", ["b"] * 10_000)
    long = shortened(f"values={np.arange(10_000)!r}" + "z" * 10_000)
    assert (len(long), long[-3:]) == (100, "...")
    assert "\n" not in shortened("a\nb")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs") / "runs"
    return prl.train("ppo", "CartPole-v1", lr=linear(1e-3, 0.0), seed=1, log_dir=runs / "a", **TINY)


def test_an_agent_shows_what_was_given_to_train(trained):
    loaded = prl.load(trained.log_dir)
    for agent in (trained, loaded):
        text = repr(agent)
        check_text(text, 12)
        words = "".join(text.split())
        given = {**TINY, "lr": linear(1e-3, 0.0)}
        assert all(f"{name}={value!r}".replace(" ", "") in words for name, value in given.items()), text
        assert {item.split("=")[0].split()[-1] for item in text.split(",") if "=" in item} == set(given)  # no preset
        assert str(trained.log_dir) in words
        check_html(agent._repr_html_())
    assert f"64 env steps in {trained.summary['seconds']:.1f} s" in repr(trained)
    assert (trained.return_mean is None) or f"{figure(trained.return_mean)} (mean of the last" in repr(trained)
    assert "trained" not in repr(loaded)


def test_an_agent_without_train_shows_its_parts(tmp_path):
    with prl.Learner(make_scheme(test_envs=True), 32, log_dir=tmp_path / "run", progress=False,
                     tensorboard=False) as learner:
        learner.train()
    text = repr(prl.load(tmp_path / "run"))
    check_text(text, 12)
    for part in ("PPO(gamma=0.98)", "OnPolicyActor(hidden_sizes=(8,))", "GAEBuffer(size=16)"):
        assert part in text or part == "PPO(gamma=0.98)"
    assert "gamma=0.98" in text
    check_html(prl.load(tmp_path / "run")._repr_html_())


def test_an_agent_plots_and_reports_its_run(trained, tmp_path, monkeypatch):
    page = trained.report()
    assert page.path == trained.log_dir / "report.html"
    assert "CartPole-v1" in Path(page).read_text(encoding="utf-8")
    assert repr(page) == f"wrote {page.path}"
    assert f'href="{page.path.as_uri()}"' in page._repr_html_()
    monkeypatch.chdir(trained.log_dir.parents[1])
    assert 'href="runs/a/report.html"' in page._repr_html_()  # the form that JupyterLab can open
    pytest.importorskip("matplotlib")
    picture = prl.load(trained.log_dir).plot(tmp_path / "x.png", x="updates", y="env_steps_per_s")
    assert Path(picture).read_bytes().startswith(b"\x89PNG")
    assert picture._repr_html_().startswith(
        f'<img alt="{tmp_path / "x.png"}" style="max-width:100%" src="data:image/png;base64,')


def test_an_agent_without_a_directory_says_what_to_do():
    agent = prl.train("ppo", "CartPole-v1", **TINY)
    for method in (agent.plot, agent.report):
        with pytest.raises(prl.ConfigError, match=f"{method.__name__} needs the records .* train it with log_dir="):
            method()
    assert "log_dir" not in repr(agent)


def test_a_process_without_a_notebook_is_none():
    assert not in_notebook()
