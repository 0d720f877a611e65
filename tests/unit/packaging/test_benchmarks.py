"""Tests that every benchmark starts, and that its results say which commit and machine they belong to."""

import argparse
import collections
import importlib.util
import io
import json
import re
import shutil
import statistics
import sys

import pytest
import torch

from pytorchrl.agent.algorithms import compile_rule
from pytorchrl.scheme.choices import decide_choices
from pytorchrl.training.training import make_learner
from tests.conftest import ROOT

BENCHMARKS = ROOT / "benchmarks"
DEFAULTS = ROOT / "docs" / "benchmarks" / "defaults.jsonl"
ASYNCHRONOUS = ROOT / "docs" / "benchmarks" / "asynchronous.jsonl"
COMPILE = ROOT / "docs" / "benchmarks" / "compile.jsonl"
SCORES = ROOT / "docs" / "benchmarks" / "scores.jsonl"
# Modules that benchmarks import; all other files are scripts.
MODULES = {
    "damages.py", "growth.py", "mutation_gpu.py", "mutation_kinds.py", "mutation_table.py", "process_table.py",
    "results.py", "turns.py"}
SCRIPTS = {path.name for path in BENCHMARKS.glob("*.py")} - MODULES
# Script -> package that it needs, and that the tests do not install.
NEEDS = {"rliable_check.py": "rliable"}
# Scripts that write text or files, and digests.py, whose results are equal for all commits.
WITHOUT_ORIGIN = {"digests.py", "golden.py", "history.py", "reading_sample.py", "report.py", "watching.py"}
# Script -> arguments of a run that takes at most three seconds of processor time.
QUICK = {
    "asynchronous.py": "--seeds 1 --steps 2100 --workers 2 --runtimes threads",
    "coverage.py": "--trials 2 --seeds 3 --tasks 1 --distributions normal",
    "defaults.py": "--tasks delay --seeds 1 --steps 1100",
    "env_backends.py": "--envs CartPole-v1 --sizes 2 --blocks 1 --steps 20",
    "exploration.py": "--seeds 1 --steps 1100",
    "exposure.py": "--runtime threads",
    "gpu.py": "--device cpu --tiny --minutes 1 --seconds 0.1 --tasks learner-pong --columns plain",
    "groups.py": "--seeds 1 --steps 1100",
    "her.py": "--tasks bits drawing --relabel future --steps 300 --draws 10",
    "lag.py": "--seeds 1 --steps 500",
    "message_paths.py": "",
    "mutations.py": "--list",
    "offline.py": "--tasks cartpole --seeds 1 --smoke",
    "option_path.py": "",
    "many_envs.py": "--envs 8 --kinds tensors --seconds 0.1",
    "memory.py": "--steps 600 --every 100 --runtimes threads --algorithms ppo",
    "patterns.py": "--runtime threads --steps 200 --seeds 1 --goal 0 --patterns central-sync/central-sync",
    "preemption.py": "--seconds 0.3 --step-ms 1 --fractions 0.25 --no-scores",
    "reading_sample.py": "--seed 1",
    "recurrent.py": "--tasks cartpole --sides gru sb3_contrib --rounds 1 --rollouts 1",
    "replay_shard.py": "--seconds 0.3 --size 1000 --batch 32",
    "report.py": "roofline.jsonl",
    "shelf.py": "--cases insertion --inserts 100",
    "simulation.py": "--col-workers 4 --grad-workers 2 --updates 2",
}
# The same for runs that take longer.
LONGER = {
    "a3c.py": "--workers 1,2 --seconds 0.2 --sleep-ms 1 --runtime threads",
    "broken_saves.py": "--every 1000",
    "damage.py": "--cases 5 --every 1000",
    "digests.py": "",
    "hangs.py": "--limit 0.3 --calls step --runtimes threads",
    "pairs.py": "--algorithms ddpg --sample 1",
    "microbatch.py": "--steps 64 --microbatch-sizes 0,32 --updates 1",
    "ranks.py": "--ranks 1,2 --seconds 0.3 --sleep-ms 1 --kills 0 --runtime threads",
    "soak.py": "--minutes 0.02 --runtime threads --workers 2 --sample-every 0.2",
    "start.py": "--repeat 1 --only import",
    "structure.py": "",
    "watching.py": "--smoke",
}
# Scripts without such a run -> why. Only their help is tested.
NO_RUN = {
    "an argument of another version or program": ["before.py", "golden.py", "peers.py", "rliable_check.py"],
    "Ray, and minutes at any size": ["central_inference.py", "checkpoints.py", "cluster.py", "codecs.py", "errors.py",
                                     "failures.py", "learner_feed.py", "processes.py", "ray_parts.py", "replay.py",
                                     "signals.py", "weights.py"],
    "a GPU": ["first_gpu.py"],
    "training until a score": ["pong.py", "scores.py", "solved.py"],
    "compilation before the measurement": ["compile_choice.py", "roofline.py", "second_core.py", "throughput.py"],
    "tested below": ["history.py"],
}
# Prints the help of each script in one process, and the failures afterwards.
HELP = """
import contextlib, io, json, runpy, sys
sys.path.insert(0, sys.argv[1])
wrong = {}
for name in sys.argv[2:]:
    sys.argv = [f"{sys.path[0]}/{name}", "--help"]
    path = list(sys.path)
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = "no exit"
    except SystemExit as end:
        code = end.code
    except Exception as error:
        code = repr(error)
    sys.path[:] = path
    if code or not output.getvalue().startswith(f"usage: {name}"):
        wrong[name] = [code, output.getvalue()[:200]]
print(json.dumps(wrong))
"""


def test_every_benchmark_prints_its_help(run_forked):
    missing = {name for name, package in NEEDS.items() if importlib.util.find_spec(package) is None}
    result = run_forked("-c", HELP, BENCHMARKS, *sorted(SCRIPTS - missing), cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == {}


@pytest.mark.parametrize(("name", "arguments"), [
    *(pytest.param(*case, id=case[0]) for case in QUICK.items()),
    *(pytest.param(*case, id=case[0], marks=pytest.mark.thorough) for case in LONGER.items())])
def test_benchmark_runs(name, arguments, run_forked, tmp_path):
    shutil.copy(ROOT / "docs" / "benchmarks" / "roofline.jsonl", tmp_path)
    result = run_forked(BENCHMARKS / name, *arguments.split(), cwd=tmp_path, timeout=150)
    assert result.returncode == 0, result.stderr
    assert result.stdout or name == "report.py"
    if name not in WITHOUT_ORIGIN and name != "mutations.py":
        assert '"commit": ' in result.stdout
        assert '"machine": {' in result.stdout


def test_every_benchmark_has_a_run_or_a_reason():
    without = [name for names in NO_RUN.values() for name in names]
    assert sorted([*QUICK, *LONGER, *without]) == sorted(SCRIPTS)


def test_every_benchmark_that_prints_json_states_its_origin():
    used = {name for name in SCRIPTS
            if re.search(r"^ *from results import ", (BENCHMARKS / name).read_text(encoding="utf-8"), re.MULTILINE)}
    assert used == SCRIPTS - WITHOUT_ORIGIN


def test_result_states_commit_and_machine(run_forked):
    code = "import sys; sys.path.insert(0, sys.argv[1]); from results import print_result; print_result({'rate': 1.5})"
    printed = json.loads(run_forked("-c", code, BENCHMARKS, timeout=60).stdout)
    assert printed["rate"] == 1.5
    assert re.fullmatch(r"[0-9a-f]{8}(-dirty)?", printed["commit"])
    assert set(printed["machine"]) == {"processor", "cores", "python", "torch"}
    assert printed["machine"]["cores"] > 0


def module_of(name):
    """Return a script of `benchmarks/` as a module."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(BENCHMARKS))  # scripts import each other
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


@pytest.fixture
def history():
    """Return the module benchmarks/history.py."""
    return module_of("history")


@pytest.fixture(scope="module")
def whole_runs():
    """Return the rounds of `compile_choice.py` with an empty cache: case -> env steps, commit, seed -> runs."""
    cases = {}
    for line in map(json.loads, COMPILE.read_text(encoding="utf-8").splitlines()):
        if line["cache"] == "cold":
            rounds = cases.setdefault(line["case"], {})
            rounds.setdefault((line["target_steps"], line["commit"], line["seed"]), []).append(line)
    return cases


def test_the_table_of_whole_runs_is_current(whole_runs):
    lines = [json.loads(line) for line in COMPILE.read_text(encoding="utf-8").splitlines()]
    assert COMPILE.with_suffix(".md").read_text(encoding="utf-8") == module_of("report").compile_table(lines)
    assert set(whole_runs) >= {"ppo-cartpole", "dqn-cartpole", "sac-halfcheetah", "td3-halfcheetah", "ppo-halfcheetah"}


def test_the_table_of_asynchronous_training_is_current(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    lines = ASYNCHRONOUS.read_text(encoding="utf-8").splitlines()
    text = module_of("asynchronous").table(lines)
    assert ASYNCHRONOUS.with_suffix(".md").read_text(encoding="utf-8") == text
    seeds = [int(row.split("|")[3]) for row in text.splitlines()[2:]]
    assert sum(seeds) == len({json.dumps(record) for record in map(json.loads, lines)})
    assert min(seeds) >= 3


def test_the_table_of_presets_of_kinds_is_current(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    lines = DEFAULTS.read_text(encoding="utf-8").splitlines()
    text = module_of("defaults").table(lines)
    assert DEFAULTS.with_suffix(".md").read_text(encoding="utf-8") == text
    runs = {}
    for record in map(json.loads, lines):
        runs.setdefault((record["task"], record["defaults"]), []).append(record["seed"])
    for (task, defaults), seeds in runs.items():
        if defaults in ("new", "old"):
            assert sorted(seeds) == [1, 2, 3, 4, 5], (task, defaults)


def test_the_tables_of_combinations_are_current_and_describe_each_switch():
    path, page = ROOT / "docs" / "benchmarks" / "pairs.jsonl", ROOT / "docs" / "combinations.md"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert path.with_suffix(".md").read_text(encoding="utf-8") == module_of("report").pairs_table(lines)
    described = "\n".join(line.split("|")[1] for line in page.read_text(encoding="utf-8").splitlines() if "|" in line)
    assert [name for name in module_of("pairs").SWITCHES if name not in described] == []


@pytest.mark.parametrize("name", ["roofline", "scores", "shelf"])
def test_other_tables_are_current(name):
    path, tables = ROOT / "docs" / "benchmarks" / f"{name}.jsonl", module_of("report").TABLES
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert path.with_suffix(".md").read_text(encoding="utf-8") == tables[name](lines)
    # The other tables have tests of their own.
    assert tables.keys() == {"compile", "one_core", "pairs", "roofline", "scores", "shelf"}


def test_the_table_of_programs_on_one_core_is_current():
    path = ROOT / "docs" / "benchmarks" / "one_core.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert path.with_suffix(".md").read_text(encoding="utf-8") == module_of("report").one_core_table(lines)
    for line in lines:
        assert re.fullmatch(r"[0-9a-f]{8}", line["commit"])
        assert line["machine"]["processor"]
        assert set(line["rates"]) - {"pytorchrl, bfloat16"} == {"pytorchrl", "stable-baselines3", "sbx", "script"}
    rounds = collections.Counter(line["task"] for line in lines)
    assert len(rounds) == 6
    assert min(rounds.values()) >= 3


def test_the_choice_to_compile_was_right_in_whole_runs(whole_runs):
    for case, rounds in whole_runs.items():
        ratios = []
        for runs in rounds.values():
            chosen, = {run["is_compiled"] for run in runs if run["variant"] == "default"}
            # Runs with equal choices are the same program, so the shortest of them is the least disturbed one.
            mine, others = ([run["whole_cpu_s"] for run in runs if run.get("is_compiled") is choice]
                            for choice in (chosen, not chosen))
            ratios += [min(mine) / min(others)] if others else []
            turns = {run["variant"]: run["whole_cpu_s"] for run in runs if run.get("together")}
            # On a Zen 5 (family 26), JAX multiplies float32 matrices twice as fast as torch, so SBX is ahead there.
            is_zen_5 = "family 26" in runs[0]["machine"]["processor"]
            assert "sbx" not in turns or is_zen_5 or turns["default"] < turns["sbx"], (case, runs)
        assert len(ratios) >= 1, case
        assert statistics.median(ratios) <= 1.05, (case, ratios)


def test_the_rule_compiles_runs_that_are_longer_than_the_measured_break_even(whole_runs, monkeypatch):
    monkeypatch.setattr(compile_rule, "has_compiler", lambda: True)
    report = module_of("report")
    for case, rounds in whole_runs.items():
        algorithm, env = case.split("-")
        found = [report.break_even(runs) for runs in rounds.values()]
        equal = statistics.median([steps for steps in found if steps is not None])
        for steps, expected in [(3 / 4 * equal, False), (4 / 3 * equal, True)]:
            learner, _ = make_learner(algorithm, report.ENV_NAMES[env], target_steps=int(steps), progress=False)
            decided = decide_choices(learner.scheme.agent, learner.scheme.nested, int(steps))
            assert decided.algo_factory.options.compile is expected, (case, steps)


def test_compiled_runs_take_as_long_as_others_where_their_lines_meet():
    def line(compiled, cpu_s, step, stopped_at, **changes):
        return {"is_compiled": compiled, "together": True, "cpu_s": cpu_s, "s_per_step": step,
                "stopped_at": stopped_at, **changes}

    equal = module_of("report").break_even
    runs = [line(False, 2.0, 0.02, 100), line(False, 4.0, 0.04, 100), line(True, 23.0, 0.01, 100)]
    # 23 + 0.01 n = 3 + 0.03 n for n = 1000 steps after the stop.
    assert equal([*runs, line(None, 9.0, 0.9, 100, variant="sbx")]) == pytest.approx(1100)
    assert equal([line(False, 5.0, 0.05, 90), line(True, 25.0, 0.01, 110)]) == pytest.approx(600)
    assert equal([*runs[:2], line(True, 23.0, 0.01, 100, together=False)]) is None
    assert equal(runs[:2]) is None


def test_the_history_is_complete_and_its_table_is_current(history):
    lines = [json.loads(line) for line in history.HISTORY.read_text(encoding="utf-8").splitlines()]
    assert len(lines) > 100
    for line in lines:
        assert list(line) == ["commit", "recorded", "date", "machine", "script", "name", "value", "unit", "source"]
        assert re.fullmatch(r"[0-9a-f]{8}(-dirty)?", line["commit"] or line["recorded"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", line["date"])
        assert line["script"].split()[0] in SCRIPTS
        assert isinstance(line["value"], (int, float))
        assert line["unit"]
    assert len({json.dumps(line) for line in lines}) == len(lines)
    assert history.HISTORY.with_suffix(".md").read_text(encoding="utf-8") == history.table(lines)


def test_every_stored_score_is_that_of_a_case_and_a_seed():
    lines = [json.loads(line) for line in SCORES.read_text(encoding="utf-8").splitlines()]
    cases = module_of("scores").CASES
    assert len({(line["case"], line["seed"]) for line in lines}) == len(lines)
    for line in lines:
        case = cases[line["case"]]
        assert (line["algorithm"], line["env"]) == (case.algorithm, case.env_name)
        assert 1 <= line["seed"] <= case.seeds
        assert line["env_steps"] >= case.steps
        assert line["curve"][-1][0] <= line["env_steps"]


def test_figures_of_a_benchmark_are_kept(history, monkeypatch, tmp_path):
    printed = [{"commit": "01234567", "machine": {"processor": "Zen 3", "cores": 2}, "task": "sac", "rate": 1.5},
               {"task": "dqn", "results": [{"case": "small", "rate": 2, "seconds": 9}, {"case": "large", "rate": 3}]}]
    path = tmp_path / "history.jsonl"
    for text in (json.dumps(printed[0], indent=1) + "\n", "a line of a log\n" + json.dumps(printed[1])):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        monkeypatch.setattr("sys.argv", ["history.py", "--keep", "a.py", "--figure", "rate=1/s",
                                         "--history", str(path)])
        history.main()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["commit"], line["machine"], line["name"], line["value"]) for line in lines] == [
        ("01234567", "Zen 3", "sac, rate", 1.5), (None, None, "dqn, results, small, rate", 2),
        (None, None, "dqn, results, large, rate", 3)]
    assert {(line["script"], line["unit"], line["recorded"]) for line in lines} == {("a.py", "1/s", None)}
    monkeypatch.setattr("sys.stdin", io.StringIO("{}"))
    with pytest.raises(SystemExit):
        history.main()


def test_a_benchmark_of_a_gpu_ends_in_time_and_names_what_it_left_out(run_forked, tmp_path):
    result = run_forked(BENCHMARKS / "gpu.py", "--device", "cpu", "--tiny", "--minutes", "0.0001", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout)
    cells = [f"{task} {column}" for task in printed["rows"] for column in printed["rows"][task] if column != "unit"]
    assert len(cells) == 8
    assert sorted(printed["left_out"]) == sorted(cells)
    assert all(f"{cell}: " in result.stderr for cell in cells)


def test_a_step_of_the_first_run_on_a_gpu_that_hangs_or_crashes_is_ended_and_reported(monkeypatch, tmp_path):
    first_gpu = module_of("first_gpu")
    hangs = "print('tests/a.py::test_b[x y] PASSED\\ntests/a.py::test_c', end='', flush=True); time.sleep(600)"
    codes = {"hangs": hangs, "crashes": "os.kill(os.getpid(), 11)", "passes": "print('tests/a.py::test_b PASSED')"}
    monkeypatch.setattr(first_gpu, "STEPS", {
        name: first_gpu.Step(0.1, figures=first_gpu.tests_figures, command=lambda options, limit_s, code=code: [
            sys.executable, "-c", f"import os, time; {code}"]) for name, code in codes.items()})
    options = argparse.Namespace(emulated=False, logs=tmp_path)
    found = {name: first_gpu.run(name, options, 2.0 if name == "hangs" else 100.0) for name in codes}
    assert [found[name]["result"] for name in codes] == ["failed", "failed", "passed"]
    assert found["hangs"]["error"] == "it was ended after 2 s"
    assert found["passes"]["passed"] == 1


def test_results_of_tests_are_read_although_the_last_one_did_not_end():
    output = ("tests/a.py::test_b[x y] PASSED [ 10%]\ntests/a.py::test_b[z] FAILED [ 20%]\n"
              "FAILED tests/a.py::test_b[z] - assert 1 == 2\ntests/a.py::test_c ")
    assert module_of("first_gpu").tests_figures(output) == {"passed": 1, "failed": 1, "failures": [
        "FAILED tests/a.py::test_b[z] - assert 1 == 2", "did not end: tests/a.py::test_c"]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU on this machine")
@pytest.mark.parametrize("name", ["first_gpu.py", "gpu.py"])
def test_a_benchmark_of_a_gpu_says_that_there_is_none(run_forked, name):
    result = run_forked(BENCHMARKS / name, timeout=60)
    assert result.returncode == 1
    assert "sees no GPU" in result.stderr
