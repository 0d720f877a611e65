"""Tests of the command line in this process: every error message and every exit code."""

from __future__ import annotations

import json
import re
import signal
import sys
import warnings
from types import SimpleNamespace

import gymnasium as gym
import pytest

import pytorchrl
from pytorchrl import errors
from pytorchrl.agent.algorithms.registry import names, registered
from pytorchrl.cli import enjoy, main, parsing, saved_agent
from pytorchrl.cli.parsing import flag_of, in_flags, is_common
from pytorchrl.cli.train import parse
from pytorchrl.agent.option_values.text import form_of
from pytorchrl.training.composition import option_specs
from pytorchrl.envs.testing import FaultyEnv
from pytorchrl.errors import install_hint
from pytorchrl.scheme import ASYNC, SYNC
from pytorchrl.support.signals import Interrupts
from pytorchrl.training.training import load

TRAIN = ["train", "ppo", "--env", "CartPole-v1"]
TINY = ["--target-steps", "64", "--num-envs", "2", "--num-steps", "32", "--num-epochs", "1", "--num-mini-batch", "2",
        "--no-tensorboard", "--no-progress"]


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_every_command_has_help(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert {"train", "profile", "enjoy", "plot"} <= set(out.split())
    for command in (TRAIN[:2], ["enjoy"], ["plot"], ["train"]):
        code, out, _ = run(capsys, *command, "--help")
        assert code == 0
        assert "usage: pytorchrl" in out
    assert run(capsys, "--version")[1] == f"pytorchrl {pytorchrl.__version__}\n"


def test_help_of_train_groups_flags_and_shows_defaults(capsys):
    _, out, _ = run(capsys, *TRAIN, "--help-all")
    for text in ("collection: workers that step environments", "runtime: processes", "algorithm:", "storage:", "actor:",
                 "environments:",
                 "--num-col-workers INT", "--optimizer adam|adamw|radam|sgd", "--clip-param NUMBER|SCHEDULE",
                 "--col-communication synchronous|asynchronous", "--hidden-sizes INT,..."):
        assert text in out
    assert "--env-fn" not in out
    # The help shows the defaults of the environment's preset.
    assert "[linear:0.001:0]" in out
    atari = " ".join(run(capsys, "train", "ppo", "--env", "ALE/Pong-v5", "--help-all")[1].split())
    for flag, value in (("lr", "linear:0.00025:0"), ("reward-transform", "sign"), ("end-on-life-loss", "yes"),
                        ("backend", "vector")):
        assert f"[{value}]" in atari.split(f"--{flag} ", 1)[1].split(" --")[0], flag


# Flags of the command itself, which are not options of `train`.
OF_COMMAND = {"--help", "--help-all", "--env", "--json", "--debug", "--watch", "--config", "--save-config",
              "--dry-run", "--max-runs", "--trust"}


def flags_in(out):
    return set(re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", out, re.MULTILINE)) - OF_COMMAND


@pytest.mark.parametrize("algorithm", registered())
def test_the_short_help_lists_common_flags_and_the_long_one_all(capsys, algorithm):
    short, full = (flags_in(run(capsys, "train", algorithm, words)[1]) for words in ("--help", "--help-all"))
    with_flag = {name for name, spec in option_specs(algorithm).items() if form_of(spec.hint)}
    assert full == {flag_of(name) for name in with_flag}
    assert short == {flag_of(name) for name, spec in option_specs(algorithm).items() if is_common(spec)} & full
    assert {"--target-steps", "--log-dir", "--seed", "--num-envs", "--num-col-workers"} <= short
    assert run(capsys, "train", "--help-all")[1].startswith("usage:")


@pytest.mark.parametrize("words", [(), *((name,) for name in names()), ("ppo", "CartPole-v1")])
def test_the_short_help_has_fifteen_flags_and_three_examples_on_one_screen(capsys, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    out = run(capsys, "train", *words, "--help")[1]
    assert len(out.splitlines()) <= 45
    assert max(map(len, out.splitlines())) <= 80
    flags = re.findall(r"^  (--[a-z-]+)", out, re.MULTILINE)
    assert len(set(flags) - {"--help-all"}) in (15, 16), flags  # two learning rates instead of one
    examples = re.findall(r"^  pytorchrl (train .*)$", out, re.MULTILINE)
    assert len(examples) == 3
    for example in examples:  # which must be commands that work
        given = parse("train", "Train", example.split()[1:])
        assert given.env in ("CartPole-v1", "Pendulum-v1", "tokens/SortDigits", "my_envs:Maze")
    if words and words[-1] != "CartPole-v1":
        assert f"pytorchrl train {words[0]} " in out


@pytest.mark.parametrize("algorithm", registered())
def test_help_has_the_words_of_the_command_line(capsys, algorithm):
    specs = option_specs(algorithm)
    for words in ("--help", "--help-all"):
        out = run(capsys, "train", algorithm, words)[1]
        assert re.findall(r"\bNone\b|\bTrue\b|\bFalse\b|\btuple\b|Scheme\.|`", out) == []
        # An option is named by its flag, except in names of the values of other options.
        assert [name for name in re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", out) if name in specs] == []


@pytest.mark.parametrize(("text", "shown"), [
    ("Largest norm; None means no limit", "largest norm; none means no limit"),
    ('With "worker" or buffer="circular", True', "with worker or --buffer circular, yes"),
    ("needs num_envs > 1 and x_y", "needs --num-envs > 1 and x_y"),
    ("GPU's info['lives'] of PyTorch's `step()`", "GPU's info['lives'] of PyTorch's step()"),
    ("PyTorch threads", "PyTorch threads"),
])
def test_help_of_an_option_is_said_in_flags(text, shown):
    assert in_flags(text, {"num_envs", "buffer"}) == shown


@pytest.mark.parametrize("words", [
    ["ppo", "X-v0"], ["ppo", "--lr", "1e-3", "X-v0"], ["ppo", "--json", "X-v0", "--lr=1e-3"], ["X-v0", "ppo"],
    ["ppo", "X-v0", "--env", "X-v0"], ["ppo", "X-v0", "--preset", "ppo"], ["ppo", "--env", "X-v0"],
    ["--config", "run.toml", "X-v0"], ["--config", "run.toml", "ppo", "X-v0"]])
def test_the_environment_is_the_second_word_or_a_flag(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('algorithm = "ppo"\nenv = "Y-v0"\n')
    given = parse("train", "Train", words)
    assert (given.algorithm, given.env) == ("ppo", "X-v0")
    assert "env_word" not in vars(given)


def test_the_preset_in_the_help_is_that_of_the_environment(capsys):
    by_flag, by_word = (run(capsys, "train", "ppo", *words, "--help")[1]
                        for words in (["--env", "CartPole-v1"], ["CartPole-v1"]))
    assert by_flag == by_word
    assert "the preset 'classic'" in by_flag


@pytest.mark.parametrize("flag", ["--col-communication", "--grad-communication"])
def test_async_and_sync_are_understood(flag, tmp_path):
    for word, member in (("async", ASYNC), ("sync", SYNC), ("asynchronous", ASYNC), ("synchronous", SYNC)):
        given = parse("train", "Train", ["ppo", "CartPole-v1", flag, word])
        assert getattr(given, flag[2:].replace("-", "_")) is member


def test_common_flags_are_flags_of_some_algorithm_and_groups_have_titles():
    specs = [spec for algorithm in registered() for spec in option_specs(algorithm).values()]
    assert {spec.name for spec in specs} >= parsing._SHORT
    assert {spec.group for spec in specs} == set(parsing.titles())


@pytest.mark.parametrize(("flag", "values"), [
    ("preset", "none|a3c|ddppo|microbatch|impala|appo|apex|r2d2|rapid"),
    ("runtime", "none|ray|processes|threads|simulated"),
    ("queue-policy", "block|drop_oldest"), ("on-policy-lag", "drop|wait"), ("recurrent-net", "none|gru|lstm"),
    ("on-worker-failure", "restart|ignore|raise"), ("routing", "round_robin|"), ("eval-every", "none|INT"),
])
def test_help_lists_the_choices_of_a_flag(capsys, flag, values):
    lines = run(capsys, "train", "ppo", "--help-all")[1].splitlines()
    assert any(line.startswith(f"  --{flag} {values}") for line in lines)


@pytest.mark.parametrize(("arguments", "message"), [
    (["trian"], "did you mean 'train'"),  # codespell:ignore trian
    (["train"], "usage"),
    (["train", "--env", "CartPole-v1"],
     "algorithm must be one of a2c, appo, bc, ddpg, dqn, grpo, impala, iql, mpo, ppo, pqn, r2d2, sac, td3, "),
    (["train", "pppo", "--env", "CartPole-v1"], "got 'pppo'"),
    (["train", "PPO", "--env", "CartPole-v1"], "got 'PPO'; did you mean 'ppo'?"),
    ([*TRAIN, "--lrr", "1e-3"], "unknown flag '--lrr'; did you mean --lr?"),
    ([*TRAIN, "--num-col-worker=2"], "did you mean --num-col-workers?"),
    ([*TRAIN, "--learning-rate", "1e-3"], "did you mean --lr?"),
    ([*TRAIN, "--size=5"], "did you mean --num-steps?"),
    ([*TRAIN, "--buffer-size", "5"], "unknown flag '--buffer-size'; in this package, use 'size' of the replay storage"),
    ([*TRAIN, "--confg", "my.toml"], "unknown flag '--confg'; did you mean --config?"),
    ([*TRAIN, "--wrapper-class=x"], "unknown flag '--wrapper-class=x'; did you mean --wrappers ("),
    ([*TRAIN, "--total-timesteps", "5", "--tau=1"],
     "unknown flag '--total-timesteps'; did you mean --target-steps?; unknown flag '--tau=1'; in this package, use "
     "'polyak' of another algorithm ("),
    (["train", "ppo", "--env-id", "CartPole-v1"], "unknown flag '--env-id'; did you mean --env?"),
    ([*TRAIN, "--lr"], "--lr: expected one argument"),
    ([*TRAIN, "--hidden-sizes"], "--hidden-sizes: expected at least one argument"),
    ([*TRAIN, "stray"], "there are two environments, 'stray' and --env 'CartPole-v1'; give one of them"),
    (["train", "ppo", "CartPole-v1", "stray"], "unexpected argument 'stray'"),
    (["train", "ppo"], "the environment is missing; give it as in `pytorchrl train ppo CartPole-v1`, or with --env"),
    (["train", "td3"], "`pytorchrl train td3 Pendulum-v1`"),
    ([*TRAIN, "--learn", "1"], "unknown flag '--learn'"),  # flags cannot be abbreviated
    (["enjoy"], "RUN_DIR"),
    (["plot"], "RUN_DIR"),
    (["enjoy", "x", "--episodes", "0"], "whole number >= 1"),
    (["enjoy", "x", "--seed", "-1"], "--seed"), (["enjoy", "x", "--seed", str(2**63)], "from 0 to 2**63 - 1"),
    (["enjoy", "x", "--sed", "1"], "did you mean --seed?"),
])
def test_wrong_arguments_print_usage_and_a_suggestion(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert message in err + out
    assert "usage:" in err + out
    assert "Traceback" not in err


@pytest.mark.parametrize(("flags", "sizes"), [
    (["--hidden-sizes", "64", "32"], (64, 32)), (["--hidden-sizes", "64,32"], (64, 32)),
    (["--hidden-sizes=64,32"], (64, 32)),
    (["--hidden-sizes", "[64,", "32]"], (64, 32)), (["--hidden-sizes", "64,32", "16"], (64, 32, 16)),
    (["--hidden-sizes", ""], ()),
])
def test_several_values_may_be_separate_arguments(flags, sizes):
    for words in (["ppo", "--env", "CartPole-v1", *flags], ["--env", "CartPole-v1", *flags, "ppo"],
                  [*flags, "--env", "CartPole-v1", "ppo"]):
        given = parse("train", "Train", words)
        assert (given.algorithm, given.env, given.hidden_sizes) == ("ppo", "CartPole-v1", sizes)
    assert parse("train", "Train", ["ppo", "--info-keywords", "lives", "score", "--env",
                                    "X-v0"]).info_keywords == ("lives", "score")


@pytest.mark.parametrize(("words", "expected"), [
    (["--env-kwargs", '{"x": 1}', "--env", "X-v0", "ppo"], {"env_kwargs": {"x": 1}}),
    (["--env-kwargs", '{"x": "ppo"}', "dqn", "--env", "X-v0"], {"algorithm": "dqn", "env_kwargs": {"x": "ppo"}}),
    (["ppo", "--env-kwargs={}", "--env=X-v0"], {"env_kwargs": {}}),
    (["--preset", "impala", "appo", "--env", "X-v0"], {"algorithm": "appo", "preset": "impala"}),
    (["--env", "my_envs:Maze", "--no-progress", "ppo"], {"env": "my_envs:Maze", "progress": False}),
    (["--json", "ppo", "--lr=0.5", "--env", "X-v0"], {"json": True, "lr": 0.5}),
    (["--lr=0.5", "ppo", "--log-dir", "ppo", "--env", "X-v0"], {"log_dir": "ppo"}),
    (["--config", "run.toml", "--env-kwargs", '{"x": 1}'], {"algorithm": "a2c", "env": "Y-v0", "env_kwargs": {"x": 1}}),
    (["--config", "run.toml", "--env", "X-v0", "--lr", "0.25"], {"algorithm": "a2c", "lr": 0.25, "gamma": 0.5}),
    (["--config=run.toml", "--env=X-v0"], {"algorithm": "a2c", "lr": 0.125}),
    (["--no-progress", "mine_in_any_order:Mine", "--env", "X-v0"], {"algorithm": "mine_in_any_order:Mine"}),
    (["--json", "mine_in_any_order:Mine", "--env", "X-v0"], {"algorithm": "mine_in_any_order:Mine", "json": True}),
])
def test_flags_may_have_any_order(tmp_path, monkeypatch, words, expected):
    """Check the arguments that are searched before they are parsed: the algorithm, and the values of some flags."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('algorithm = "a2c"\nenv = "Y-v0"\nlr = 0.125\ngamma = 0.5\n')
    (tmp_path / "mine_in_any_order.py").write_text("from pytorchrl import PPO as Mine\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    given = vars(parse("train", "Train", words))
    expected = {"algorithm": "ppo", "env": "X-v0", **expected}
    assert {name: given[name] for name in expected} == expected


@pytest.mark.parametrize(("flags", "message"), [
    (["--lr", "nan"], "lr must be finite"),
    (["--lr", "inf"], "lr must be finite"),
    (["--lr", "-0.1"], "lr must be a number >= 0.0 or a schedule, got -0.1"),
    (["--lr", "-1e-3"], "lr must be a number >= 0.0 or a schedule, got -0.001"),
    (["--lr", "-inf"], "lr must be finite"),
    (["--num-steps", "0"], "num_steps must be a whole number >= 1"),
    (["--num-envs", "0"], "num_envs must be a whole number >= 1"),
    (["--log-dir", ""], "log_dir must be a directory"),
    (["--overwrite"], "overwrite=True renames the run in log_dir, so it needs a log_dir"),
    (["--eval-episodes", "5"], "eval_episodes needs eval_every"),
    (["--info-keywords", "lives"], "info_keywords needs a log_dir"),
    (["--lr", "fast"], "--lr: expected NUMBER or a schedule (linear:START:END[:STEPS]"),
    (["--lr", "linear:1e-3"], "linear:START:END"),
    (["--lr", "linear:1e-3:-1"], "lr must be >= 0.0"),
    (["--lr", "linear:a:b"], "a schedule is made of numbers"),
    (["--lr", "linear:1:0:0"], "env steps of a schedule must be whole numbers >= 1"),
    (["--lr", "piecewise:0:1e-3:1e6:-1"], "lr must be >= 0.0"),
    (["--lr", "[(5, 1e-3), (6, 0)]"], "must start at 0 and increase"),
    (["--gamma", "1.5"], "gamma must be a number >= 0.0 and <= 1.0, got 1.5"),
    (["--gae-lambda", "nan"], "gae_lambda must be finite"),
    (["--clip-param", "0"], "clip_param must be a number > 0.0"),
    (["--num-epochs", "1.5"], "--num-epochs: expected INT, got '1.5'"),
    (["--num-mini-batch", "0"], "num_mini_batch must be a whole number >= 1"),
    (["--mini-batch-size", "0"], "mini_batch_size must be a whole number >= 1"),
    (["--mini-batch-size", "1025"], "mini_batch_size must not exceed the batch: batch 1024"),
    (["--mini-batch-size", "64", "--num-mini-batch", "4"], "num_mini_batch=4 and mini_batch_size=64 both set"),
    (["--num-mini-batch", "4096"], "batch 1024 = 1 collection workers x 8 environments x 128 steps"),
    (["--optimizer", "adm"], "did you mean 'adam'"),
    (["--compile", "maybe"], "compile must be one of [False, True, 'auto'], got 'maybe'"),
    (["--hidden-sizes", "64,x"], "--hidden-sizes: expected INT,..."),
    (["--hidden-sizes", "64", "x"], "--hidden-sizes: expected INT,..., got 'x'"),
    (["--activation", "ReLU6"], "activation must be one of ['tanh', 'relu'"),
    (["--recurrent-net", "yes"], "recurrent_net must be one of [None, 'gru', 'lstm'], got 'yes'"),
    (["--hidden-sizes", "0"], "hidden_sizes must be a tuple or list of whole numbers >= 1"),
    (["--env-kwargs", "{"], "expected a JSON object"),
    (["--num-col-workers", "0"], "num_col_workers must be a whole number >= 1"),
    (["--num-col-workers", "True"], "expected INT"),
    (["--col-communication", "asink"], "['synchronous', 'asynchronous'], got 'asink'"),
    (["--col-fraction-workers", "1.2"], "> 0.0 and <= 1.0, got 1.2"),
    (["--fraction-samples", "nan"], "must be finite, got nan"),
    (["--col-execution", "Paralel"], "['Central', 'Parallel'], got 'Paralel'"),  # codespell:ignore
    (["--distribute-gradients", "--num-grad-workers", "2", "--grad-communication", "asynchronous"],
     "distribute_gradients=True contradicts grad_communication"),
    (["--compress-data-to-send"], "compress_data_to_send=True needs num_col_workers >= 2 or col_execution='Parallel'"),
    (["--compress-weights-to-send", "bf16"], "compress_weights_to_send='bf16' needs remote workers"),
    (["--compress-grads-to-send", "int4"], "compress_grads_to_send must be False, True (lz4), 'none', 'lz4'"),
    (["--col-worker-resources", '{"num_gpus": 1.5}'], "num_gpus"),
    (["--device", "gpu"], "['cpu'"),
    (["--device", "cuda:97"], "got 'cuda:97'"),
    (["--seed", "-1"], "seed must be a whole number >= 0"),
    (["--seed", str(2**64)], "seed must be a whole number >= 0"),
    (["--target-steps", "-1"], "target_steps must be a whole number >= 0, got -1"),
    (["--target-steps", "many"], "--target-steps: expected INT"),
    (["--eval-every", "0"], "eval_every must be a whole number >= 1"),
    (["--checkpoint", "/nothing/here.pt"], "there is no model"),
])
def test_wrong_values_are_refused_with_the_allowed_values(capsys, flags, message):
    code, out, err = run(capsys, *TRAIN, *flags)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("env", "message"), [
    ("CartPol-v1", "did you mean 'CartPole-v1'"), ("", "environment"), ("nothing/Like-v0", "environment"),
    ("no_such_module:Env-v0", "no_such_module"),
])
def test_unknown_environments_are_refused(capsys, env, message):
    code, _, err = run(capsys, "train", "ppo", "--env", env)
    assert code == 2
    assert message in err


def test_log_dir_that_is_a_file_or_holds_a_run_is_refused(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert run(capsys, *TRAIN, "--log-dir", tmp_path / "file")[0] == 2
    (tmp_path / "run.json").write_text("{}")
    code, _, err = run(capsys, *TRAIN, "--log-dir", tmp_path)
    assert code == 2
    assert "--overwrite" in err


def test_debug_prints_a_traceback_and_keeps_the_exit_code(capsys):
    code, _, err = run(capsys, *TRAIN, "--lr", "-1", "--debug")
    assert code == 2
    assert "Traceback" in err
    assert "in create_factory" in err


def test_sigterm_during_training_ends_with_143(monkeypatch, capsys):
    interrupts = Interrupts()
    interrupts.received = signal.SIGTERM
    monkeypatch.setattr("pytorchrl.cli.plot.run", lambda _arguments: interrupts.raise_received())
    assert run(capsys, "plot") == (143, "", "")


@pytest.mark.parametrize(("error", "code"), [
    (errors.ConfigError("x"), 2), (errors.FactoryError("x"), 2), (errors.SpaceError("x"), 2),
    (errors.InsufficientResourcesError("x"), 2), (errors.CheckpointError("x"), 2), (errors.WorkerLostError("x"), 1),
    (errors.NonFiniteDataError("x"), 1), (ZeroDivisionError("x"), 1), (KeyboardInterrupt(), 130),
    (SystemExit(0), 1), (SystemExit(143), 1),
])
def test_exit_codes_depend_on_the_error(monkeypatch, capsys, error, code):
    def fail(_arguments):
        raise error
    monkeypatch.setattr("pytorchrl.cli.plot.run", fail)
    assert run(capsys, "plot")[0] == code


def test_a_dry_run_checks_and_starts_only(capsys, tmp_path):
    code, out, _ = run(capsys, *TRAIN, *TINY, "--target-steps", 0, "--json", "--log-dir", tmp_path)
    assert code == 0
    assert (json.loads(out)["env_steps"], json.loads(out)["updates"]) == (0, 0)


def test_json_is_the_last_line_with_exactly_the_published_fields(capsys):
    code, out, err = run(capsys, *TRAIN, *TINY, "--json", "--seed", "08", "--lr", "1e-3")
    assert code == 0
    summary = json.loads(out.splitlines()[-1])
    assert set(summary) == {
        "env_steps", "seconds", "env_steps_per_s", "updates", "return_mean", "return_episodes", "policy_lag",
        "findings", "ledger", "seed", "scheme", "log_dir"}
    assert set(summary["policy_lag"]) == {"mean", "max", "p50", "p90"}
    ledger = summary["ledger"]
    assert set(ledger) == {
        "collected", "in_flight", "queued", "consumed_unique", "consumed", "resident", "evicted", "dropped"}
    places = sum(ledger[name] for name in ("in_flight", "queued", "consumed_unique", "resident", "evicted"))
    assert ledger["collected"] == places + sum(ledger["dropped"].values())
    assert ledger["in_flight"] == ledger["queued"] == 0
    assert summary["env_steps"] >= 64
    assert (summary["seed"], summary["scheme"]["num_col_workers"]) == (8, 1)
    assert err == ""


def test_train_enjoy_and_plot_work_on_one_run(capsys, tmp_path):
    run_dir = tmp_path / "läuft gut"
    code, out, _ = run(capsys, *TRAIN, *TINY, "--log-dir", run_dir, "--target-steps", "1e3", "--log-every", 100)
    assert code == 0
    assert str(run_dir) in out
    code, out, _ = run(capsys, "enjoy", run_dir, "--episodes", 5, "--json")
    assert code == 0
    played = json.loads(out)
    assert (played["episodes"], len(played["returns"])) == (5, 5)
    assert played["return_mean"] == pytest.approx(sum(played["returns"]) / 5)
    again = json.loads(run(capsys, "enjoy", run_dir, "--episodes", 5, "--json")[1])
    assert again == played  # both commands play with the seed of the run
    other = json.loads(run(capsys, "enjoy", run_dir, "--episodes", 5, "--json", "--seed", 5, "--stochastic")[1])
    assert other != played
    assert "mean return of 2 evaluation episodes" in run(capsys, "enjoy", run_dir, "--episodes", 2)[1]
    code, _, err = run(capsys, "plot", run_dir)
    assert (code, err) == (0, "")
    assert (run_dir / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert run(capsys, "plot", run_dir, run_dir, "-o", tmp_path / "a.png", "--y", "algorithm/loss")[0] == 0
    code, _, err = run(capsys, "plot", run_dir, "--y", "algorithm/los")
    assert code == 2
    assert "algorithm/loss" in err


def test_stochastic_samples_actions(capsys, tmp_path):
    """Check that `--stochastic` changes the returns, and that `load` and `enjoy` give equal returns in both modes."""
    assert run(capsys, *TRAIN, *TINY, "--seed", 1, "--log-dir", tmp_path)[0] == 0
    played = {deterministic: json.loads(run(capsys, "enjoy", tmp_path, "--episodes", 5, "--json", *flags)[1])["returns"]
              for deterministic, flags in ((True, ()), (False, ("--stochastic",)))}
    agent = load(tmp_path)
    for deterministic, returns in played.items():
        assert returns == list(agent.evaluate(5, deterministic=deterministic).returns)
    assert played[True] != played[False]


@pytest.fixture
def played(monkeypatch):
    """Let `enjoy` play with an agent that only records how it plays; return the list of these records."""
    calls, agent = [], SimpleNamespace()

    def evaluate(num_episodes, **how):
        calls.append((num_episodes, how))
        return pytorchrl.scheme.Evaluation(0, (1.0, 2.0, 6.0)[:num_episodes], (3, 5, 100)[:num_episodes])
    agent.evaluate = evaluate
    monkeypatch.setattr(saved_agent, "load", lambda run_dir, **how: calls.append((run_dir, how)) or agent)
    monkeypatch.setattr(enjoy, "show_episodes", lambda agent, num_episodes, **how: evaluate(num_episodes, **how))
    return calls


@pytest.mark.parametrize(("flags", "episodes", "seed", "deterministic"), [
    ([], 10, None, True), (["--seed", "5"], 10, 5, True), (["--stochastic"], 10, None, False),
    (["--episodes", "3"], 3, None, True), (["--seed", str(2**63 - 1)], 10, 2**63 - 1, True)])
def test_each_flag_of_enjoy_works_alone(capsys, played, flags, episodes, seed, deterministic):
    how = {"seed": seed, "deterministic": deterministic}
    assert run(capsys, "enjoy", "x", *flags, "--model", "best")[0] == 0
    assert played == [("x", {"model": "best", "algorithm": None, "trust": False}), (episodes, how)]
    del played[:]
    assert run(capsys, "enjoy", "x", *flags, "--render", "human")[0] == 0
    assert played == [("x", {"model": "model", "algorithm": None, "trust": False}), (episodes, how)]


def test_enjoy_prints_the_statistics_of_the_returns(capsys, played):
    found = json.loads(run(capsys, "enjoy", "x", "--json")[1])
    assert found["return_std"] == pytest.approx((14 / 3)**0.5)  # the mean square of the deviations -2, -1 and 3
    assert (found["return_mean"], found["length_mean"], found["episodes"]) == (3.0, 36.0, 3)
    assert run(capsys, "enjoy", "x")[1] == (
        "mean return of 3 evaluation episodes: 3.00 (standard deviation 2.16, from 1.0 to 6.0)\n")
    assert json.loads(run(capsys, "enjoy", "x", "--json", "--episodes", 1)[1])["return_std"] == 0.0


@pytest.mark.parametrize(("flags", "deterministic"), [((), True), (("--stochastic",), False)])
def test_a_video_shows_sampled_actions_only_with_stochastic(capsys, tmp_path, monkeypatch, flags, deterministic):
    asked = []

    def record_video(agent, video_dir, **options):
        asked.append(options)
        return agent.evaluate(options["num_episodes"], deterministic=options["deterministic"], seed=options["seed"])
    monkeypatch.setattr(enjoy, "record_video", record_video)
    assert run(capsys, *TRAIN, *TINY, "--log-dir", tmp_path)[0] == 0
    assert run(capsys, "enjoy", tmp_path, "--video", tmp_path / "films", "--episodes", 2, "--seed", 3, *flags)[0] == 0
    assert asked == [{"num_episodes": 2, "seed": 3, "deterministic": deterministic}]


def test_the_rendered_episodes_are_those_that_are_counted(capsys, tmp_path, monkeypatch):
    folders = []

    def record_video(agent, video_dir, **options):
        folders.append(video_dir)
        return agent.evaluate(options["num_episodes"], seed=99)
    monkeypatch.setattr(enjoy, "record_video", record_video)
    monkeypatch.setattr(enjoy, "show_episodes", lambda agent, **options: record_video(agent, "window", **options))
    assert run(capsys, *TRAIN, *TINY, "--log-dir", tmp_path)[0] == 0
    counted = list(load(tmp_path).evaluate(3, seed=99).returns)
    command = ("enjoy", tmp_path, "--episodes", 3, "--seed", 3)
    assert json.loads(run(capsys, *command, "--json")[1])["returns"] != counted
    videos, films = str(tmp_path / "videos"), str(tmp_path / "films")
    for flags, folder in ((("--render", "video"), videos), (("--render", "human"), None),
                          (("--render", "video", "--out", films), films)):
        found = json.loads(run(capsys, *command, *flags, "--json")[1])
        assert (found["returns"], found.get("videos")) == (counted, folder)
    assert folders == [videos, "window", films]
    out = run(capsys, *command, "--video", films)[1]
    assert f"mean return of 3 evaluation episodes: {sum(counted) / 3:.2f} " in out
    assert out.splitlines()[-1] == f"filmed in {films}"


@pytest.mark.parametrize(("flags", "text"), [
    (("--out", "films"), "--out films needs --render video"),
    (("--out", "films", "--render", "human"), "--out films needs --render video"),
    (("--video", "films", "--render", "video"), "give only one of the two"),
    (("--render", "mp4"), "invalid choice: 'mp4'")])
def test_wrong_flags_of_rendering_are_refused(capsys, flags, text):
    code, _, err = run(capsys, "enjoy", "x", *flags)
    assert code == 2
    assert text in err


@pytest.mark.parametrize("command", ["enjoy", "plot"])
def test_a_folder_without_a_run_is_refused(capsys, tmp_path, command):
    code, _, err = run(capsys, command, tmp_path)
    assert code == 2
    assert "contains no run" in err


def test_an_error_of_an_environment_in_training_exits_with_1(capsys, monkeypatch):
    from pytorchrl.agent.env import VecEnv

    step, count = VecEnv.step, [0]

    def fail(self, action):
        count[0] += 1
        if count[0] > 40:
            raise errors.EnvError("GWorker 0/CWorker 0: the simulator is gone")
        return step(self, action)
    monkeypatch.setattr(VecEnv, "step", fail)
    code, _, err = run(capsys, *TRAIN, *TINY, "--target-steps", 1000)
    assert code == 1
    assert "the simulator is gone" in err
    count[0] = 100
    assert run(capsys, *TRAIN, *TINY)[0] == 2  # an environment that fails immediately counts as a usage error


@pytest.fixture
def broken_env():
    gym.register("Faulty-v0", FaultyEnv)
    yield "Faulty-v0"
    del gym.registry["Faulty-v0"]


@pytest.mark.parametrize(("flags", "message"), [
    *((["--env-kwargs", json.dumps({"fault": fault})], text) for fault, text in (
        ("constructor", "faulty constructor"), ("reset", "faulty reset"), ("reset_without_seed", "seed"),
        ("reset_without_info", "reset"), ("step", "faulty step"))),
    (["--env-kwargs", '{"fault": "step", "foo": 1}'], "foo"),
    (["--env-kwargs", '{"fault": "step", "at": 99}', "--end-on-life-loss"], "info['lives']"),
])
def test_an_environment_that_never_worked_is_refused(capsys, broken_env, flags, message):
    code, out, err = run(capsys, *TRAIN[:3], broken_env, *TINY, *flags)
    assert (code, out) == (2, "")
    assert message in err


def test_warnings_are_printed_regardless_of_python_warning_filters(capsys):
    flags = ["--col-fraction-workers", "0.5", "--target-steps", "0"]
    for action in ("error", "ignore"):
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            code, _, err = run(capsys, *TRAIN, *TINY, *flags)
        assert code == 0
        assert err.startswith("pytorchrl: warning: ")
        assert len(err.splitlines()) == 1


def test_an_error_for_video_names_its_missing_extra(capsys, tmp_path, monkeypatch):
    run(capsys, *TRAIN, *TINY, "--log-dir", tmp_path / "run")
    monkeypatch.setattr("pytorchrl.play.video.importlib.util.find_spec", lambda _name: None)
    code, _, err = run(capsys, "enjoy", tmp_path / "run", "--video", tmp_path / "films")
    assert code == 2
    assert install_hint("video") in err


def test_an_error_for_plots_names_their_missing_extra(capsys, tmp_path, monkeypatch):
    import sys
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "metrics.jsonl").write_text('{"env_steps": 1, "return_mean": 2}\n')
    code, _, err = run(capsys, "plot", tmp_path)
    assert code == 2
    assert install_hint("plots") in err
