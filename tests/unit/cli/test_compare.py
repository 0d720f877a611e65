"""Tests of `pytorchrl compare` and of groups in `pytorchrl plot`."""

from __future__ import annotations

import json
import re

import pytest

from pytorchrl import train
from pytorchrl.analysis import compare, iqm, normalize, read_curve
from pytorchrl.cli import main

PNG = b"\x89PNG\r\n\x1a\n"
FINALS = {"a": (80.0, 90.0, 95.0), "b": (60.0, 50.0, 70.0)}
PONG_FINALS = {"a": (170.0, 20.0, 120.0), "b": (10.0, 30.0, 90.0)}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Write three runs of each of two settings, in runs/a-1 to runs/b-3, and change to the folder."""
    monkeypatch.chdir(tmp_path)
    for env in ("CartPole-v1", "Pong"):
        folder = "runs" if env == "CartPole-v1" else "pong"
        for name, finals in (FINALS if folder == "runs" else PONG_FINALS).items():
            for seed, final in enumerate(finals, start=1):
                run_dir = tmp_path / folder / f"{name}-{seed}"
                run_dir.mkdir(parents=True)
                recipe = {"algorithm": "ppo", "env": env, "options": {"lr": len(folder) + ord(name)}}
                (run_dir / "run.json").write_text(json.dumps({"format": 1, "recipe": recipe, "seed": seed}))
                (run_dir / "metrics.jsonl").write_text("".join(
                    json.dumps({"env_steps": 10 * step, "return_mean": final * step / 10}) + "\n"
                    for step in range(11)))
    return sorted(map(str, (tmp_path / "runs").glob("*")))


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_compare_prints_statistics_and_comparisons_and_draws_a_picture_only_if_asked(capsys, runs, tmp_path):
    files = set(tmp_path.rglob("*"))
    code, out, err = run(capsys, "compare", "new=runs/a*", "old=runs/b*", "--baseline", "old")
    assert (code, err) == (0, "")
    lines = [line.split("  ") for line in out.splitlines()]
    assert any(line[0] == "new" and "88.3 [" in "".join(line) for line in lines)
    assert "CartPole-v1: scored at 100 env steps (all runs)\n" in out
    assert "compared with old:" in out
    assert "paired t" in out
    assert set(tmp_path.rglob("*")) == files
    code, out, err = run(capsys, "compare", "new one=runs/a*", "old=runs/b*", "-o", "c.png", "--title", "T", "--size",
                         "4x3")
    assert (code, err, out.splitlines()[-1]) == (0, "", "wrote c.png")
    assert (tmp_path / "c.png").read_bytes()[:8] == PNG
    assert "new one" in out


def test_compare_takes_the_length_of_the_shortest_run_and_says_so(capsys, runs, tmp_path):
    path = tmp_path / "runs" / "b-2" / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    code, out, _ = run(capsys, "compare", *runs)
    assert code == 0
    assert out.splitlines()[1] == "CartPole-v1: scored at 40 env steps (shortest run; longest: 100)"
    assert json.loads(run(capsys, "compare", *runs, "--json")[1])["scored_at"] == {"CartPole-v1": 40}
    assert "scored at 20 env steps\n" in run(capsys, "compare", *runs, "--at", 20)[1]


@pytest.mark.parametrize("columns", [80, 200])
def test_tables_fit_the_terminal(capsys, runs, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    long = "a name with words " * 7
    for names, flags in ((("a", "b"), []), ((long + "1", long + "2"), ["--reference", "CartPole-v1=-1e9:1e9"])):
        code, out, _ = run(capsys, "compare", f"{names[0]}=runs/a*", f"{names[1]}=runs/b*", *flags)
        assert code == 0
        assert max(map(len, out.splitlines())) <= columns
        assert len(re.findall("^group", out, re.MULTILINE)) == {80: 3, 200: 2}[columns]
        assert ("A  " + long.strip()[:40] in out) == (names[0] == long + "1")
        assert out.count("seeds for power 80%") == 1


def test_json_has_the_results_of_the_library(capsys, runs, tmp_path):
    code, out, err = run(capsys, "compare", *runs, "--json", "--statistic", "mean", "--confidence", 0.9)
    assert (code, err) == (0, "")
    found = json.loads(out)
    first, second = found["groups"]
    assert (first, second, found["baseline"]) == ("ppo lr=101", "ppo lr=102", "ppo lr=101")
    assert found["groups"][first]["scores"] == [list(FINALS["a"])]
    assert found["groups"][first]["iqm"]["value"] == float(iqm(FINALS["a"]))
    expected = compare(FINALS["b"], FINALS["a"], paired=True, confidence=0.9)
    one = found["comparisons"][second]
    assert one["paired"]
    assert one["difference"] == expected.mean_difference.as_dict()
    assert one["p_value"] == expected.p_value
    assert one["seeds_needed"] == expected.seeds_needed
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(("flags", "changed"), [
    (["--unpaired"], lambda a, b: a["comparisons"]["b"]["paired"] and not b["comparisons"]["b"]["paired"]),
    (["--score", "area"], lambda a, b: b["groups"]["a"]["mean"]["value"] == pytest.approx(
        a["groups"]["a"]["mean"]["value"] / 2)),
    (["--at", "50"], lambda a, b: b["groups"]["a"]["scores"] == [[40.0, 45.0, 47.5]]),
    (["--y", "env_steps"], lambda a, b: b["groups"]["a"]["scores"] == [[100.0] * 3]),
    (["--reference", "CartPole-v1=0:100"], lambda a, b: b["groups"]["a"]["gap"]["value"] == pytest.approx(35 / 300)),
])
def test_every_flag_has_an_effect(capsys, runs, flags, changed):
    groups = ("a=runs/a*", "b=runs/b*", "--json")
    plain, other = (json.loads(run(capsys, "compare", *groups, *extra)[1]) for extra in ([], flags))
    assert changed(plain, other)


def test_scores_of_several_tasks_are_normalized(capsys, runs):
    groups = ("a=runs/a*", "a=pong/a*", "b=runs/b*", "b=pong/b*")
    code, _, err = run(capsys, "compare", *groups)
    assert code == 2
    assert "pass --reference TASK=LOW:HIGH, with the scores that count as 0 and 1, for CartPole-v1, Pong" in err
    code, out, _ = run(capsys, "compare", *groups, "--json", "--reference", "Pong=0:200", "--reference",
                       "CartPole-v1=0:100")
    assert code == 0
    found = json.loads(out)
    assert found["groups"]["a"]["tasks"] == ["CartPole-v1", "Pong"]
    for group in ("a", "b"):
        both = normalize(list(zip(FINALS[group], PONG_FINALS[group], strict=True)), [(0, 100), (0, 200)])
        assert found["groups"][group]["iqm"]["value"] == pytest.approx(float(iqm(both)))
    code, _, err = run(capsys, "compare", *groups, "--reference", "Pong=0:200")
    assert code == 2
    assert "with the scores that count as 0 and 1, for CartPole-v1\n" in err


def test_an_optimality_gap_is_not_negative(capsys, runs):
    found = json.loads(run(capsys, "compare", "a=runs/a*", "--json", "--reference", "CartPole-v1=0:90")[1])
    gap = found["groups"]["a"]["gap"]
    assert gap["value"] == pytest.approx(10 / 90 / 3)
    assert gap["low"] == 0.0
    assert gap["high"] > 2 * gap["value"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["compare"], "RUNS"), (["compare", "a=nothing*"], "no run matches 'nothing*'"),
    (["compare", "a=runs/a*", "runs/b-1"], "either all runs have the form NAME=PATTERN"),
    (["compare", "a=runs/a*", "--by", "lr"], "without --by, or none"),
    (["compare", "a=runs/a*", "--baseline", "b"], "--baseline must be one of the groups 'a'; got 'b'"),
    (["compare", "a=runs/a*", "--reference", "Pong=0:1"], "--reference names the task 'Pong'"),
    (["compare", "a=runs/a*", "--reference", "Pong"], "expected TASK=LOW:HIGH with LOW < HIGH"),
    (["compare", "a=runs/a*", "--reference", "Pong=1:1"], "expected TASK=LOW:HIGH with LOW < HIGH"),
    (["compare", "a=runs/a*", "--reference", "x=y=0:1"], "--reference names the task 'x=y'"),
    (["compare", "a=runs/a*", "--confidence", "95"], "confidence must be between 0 and 1"),
    (["compare", "runs/c"], "contains no run"), (["compare", "runs/"], "is a directory of runs; name one of them"),
    (["compare", "a=runs/a*", "--size", "4x3"], "which is only written with --output FILE"),
    (["compare", "a=runs/a*", "--title", "T"], "which is only written with --output FILE"),
    (["compare", "a=runs/a*", "-o", "c.gif"], "ends in .png, .pdf, .svg; got 'c.gif'"),
    (["plot", "runs/a-1", "-o", "c.gif"], "ends in .png, .pdf, .svg; got 'c.gif'"),
    (["plot", "runs/a-1", "--size", "3"], "expected WIDTHxHEIGHT in inches, such as 7x4.5; got '3'"),
    (["plot", "runs/a-1", "--size", "0x3"], "from 2 to 40 inches"),
    (["plot", "runs/a-1", "--log", "y"], "'return_mean' must be above 0 for a logarithmic axis, and is 0 in"),
    (["plot", "runs/a-1", "--smooth", "2"], "below 1; got 2"), (["plot", "runs/a-1", "--by", "x"], "the setting 'x'"),
])
def test_wrong_arguments_are_refused(capsys, runs, arguments, message):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(("arguments", "groups"), [
    (["runs/a-1", "runs/a-2", "runs/b-1", "runs/b-1"], {"ppo lr=101": ["a-1", "a-2"], "ppo lr=102": ["b-1"]}),
    (["runs/*"], {"ppo lr=101": ["a-1", "a-2", "a-3"], "ppo lr=102": ["b-1", "b-2", "b-3"]}),
    (["runs/a-[12]", "--by", "run"], {"a-1": ["a-1"], "a-2": ["a-2"]}),
    (["x=runs/a-1", "x=runs/b*", "y=runs/a-2"], {"x": ["a-1", "b-1", "b-2", "b-3"], "y": ["a-2"]}),
    (["runs/*", "--by", "algorithm"], {"ppo": ["a-1", "a-2", "a-3", "b-1", "b-2", "b-3"]}),
    (["x=runs/a-1", "x=pong/a-1"], {"x CartPole-v1": ["a-1"], "x Pong": ["a-1"]}),
])
def test_plot_draws_one_line_per_group(capsys, runs, tmp_path, monkeypatch, arguments, groups):
    drawn = []
    monkeypatch.setattr("pytorchrl.cli.plot.plot_groups", lambda found, *_, **options: drawn.append((found, options)))
    assert run(capsys, "plot", *arguments, "--statistic", "mean", "--smooth", "0.1", "--confidence", "0.8")[0] == 0
    found, options = drawn[0]
    assert {label: [path.name for path in paths] for label, paths in found.items()} == groups
    assert (options["statistic"].__name__, options["smoothing"], options["confidence"]) == ("mean", 0.1, 0.8)
    picture = options["picture"]
    assert (picture.title, picture.size, picture.log) == (
        "CartPole-v1, Pong" if "x=pong/a-1" in arguments else "CartPole-v1", None, "")
    assert run(capsys, "plot", *arguments, "--title", "", "--size", "3.3x2.4", "--log", "x")[0] == 0
    picture = drawn[1][1]["picture"]
    assert (picture.title, picture.size, picture.log) == ("", (3.3, 2.4), "x")


def test_plot_writes_a_picture_of_groups(capsys, runs, tmp_path):
    assert run(capsys, "plot", *runs, "-o", "curves.png") == (0, "wrote curves.png\n", "")
    assert (tmp_path / "curves.png").read_bytes()[:8] == PNG


def test_the_name_of_a_group_has_no_control_characters(capsys, runs):
    _, out, _ = run(capsys, "compare", "a=runs/a*", "b\x1b[2J=runs/b*", "b=runs/b*")
    assert out == ""


@pytest.mark.parametrize("command", ["plot", "compare"])
def test_the_help_fits_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, command, "--help")
    assert max(map(len, out.splitlines())) <= 80
    assert "'new net=runs/a*'" in out


def test_the_help_names_a_number_of_evaluated_runs(capsys, tmp_path):
    _, out, _ = run(capsys, "compare", "--help")
    name = re.findall(r"e\.g\.\s+(\S+)\s+\[return_mean\]", out)[0]
    train("ppo", "CartPole-v1", target_steps=32, num_envs=2, num_steps=16, num_epochs=1, eval_every=32, eval_episodes=1,
          seed=1, log_dir=tmp_path, progress=False, tensorboard=False)
    assert len(read_curve(tmp_path, "env_steps", name)[1]) == 1
