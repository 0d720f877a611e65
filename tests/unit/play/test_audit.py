"""Test the audit of logged rows: planted lags, versions and mismatches are found exactly, and wrong rows are named."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pytorchrl.agent.algorithms.corrections import CORRECTIONS
from pytorchrl.cli import main
from pytorchrl.errors import ConfigError
from pytorchrl.play.audit import FIELDS, LIMITS, audit, read_rows

ROW = {"trainer_logprobs": [-1.0, -2.0], "inference_logprobs": [-1.1, -2.0], "advantages": 0.5, "versions": [3, 4],
       "end_version": 5, "version": 7}


def write(path, rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def planted(num_batches=12, seed=0, mismatch=0.0, shift=0.05):
    """Return rows of a known process, and all lags, log-ratios and batches.

    The log-probability of each token moves by `shift` times a random number for each update of lag, and by `mismatch`
    times another one for the generator's arithmetic.
    """
    rng, rows = np.random.default_rng(seed), []
    lags, ratios = {"generation": [], "queue": [], "total": []}, []
    for version in range(20, 20 + num_batches):
        for _ in range(int(rng.integers(2, 6))):
            size = int(rng.integers(1, 9))
            queue = int(rng.integers(0, 4))
            end = version - queue
            versions = np.minimum(end, end - rng.integers(0, 5) + np.arange(size) // 3)
            total = version - versions
            behavior = -rng.exponential(1.0, size) - 3.0
            logp = behavior + shift * total * rng.standard_normal(size) + mismatch * rng.standard_normal(size)
            mask = (rng.random(size) < 0.8).astype(int)
            rows.append({"trainer_logprobs": logp.tolist(), "inference_logprobs": behavior.tolist(),
                         "advantages": float(rng.standard_normal()), "mask": mask.tolist(),
                         "versions": versions.tolist(), "end_version": end, "version": version})
            for name, lag in (("generation", end - versions), ("queue", np.full(size, queue)), ("total", total)):
                lags[name].append(lag[mask == 1])
            ratios.append((version, total[mask == 1], (logp - behavior)[mask == 1]))
    return rows, {name: np.concatenate(found) for name, found in lags.items()}, ratios


@pytest.mark.parametrize("mismatch", [0.0, 0.3])
def test_a_planted_process_is_found_exactly(tmp_path, mismatch):
    rows, lags, ratios = planted(mismatch=mismatch)
    found = audit(read_rows(write(tmp_path / "rows.jsonl", rows)))
    assert (found.rows, found.tokens, found.batches) == (len(rows), len(lags["total"]), 12)
    for cause, values in lags.items():
        assert found.lags[cause]["mean"] == pytest.approx(values.mean())
        assert found.lags[cause]["max"] == values.max()
        assert found.lags[cause]["p50"] == sorted(values)[(len(values) - 1) // 2]
    assert found.lags["generation"]["mean"] + found.lags["queue"]["mean"] == pytest.approx(found.lags["total"]["mean"])
    sizes = []
    for version in {version for version, *_ in ratios}:
        weights = np.exp(np.concatenate([log for own, _, log in ratios if own == version]))
        sizes.append(weights.sum() ** 2 / len(weights) / (weights ** 2).sum())
    assert found.diagnostics["effective_sample_size"] == pytest.approx(min(sizes))
    log = np.concatenate([log for *_, log in ratios])
    assert found.diagnostics["kl"] == pytest.approx((np.exp(log) - 1 - log).mean())
    fresh = np.concatenate([np.abs(log)[lag == 0] for _, lag, log in ratios])
    assert found.diagnostics["mismatch"] == pytest.approx(fresh.mean())
    assert any("different policies" in alarm for alarm in found.alarms) == (mismatch > 0)
    weights = np.exp(log)
    assert found.corrections["mis"]["cut"] == pytest.approx((weights > 2).mean())
    assert found.corrections["mis"]["without_gradient"] == pytest.approx((weights > 2).mean())
    assert found.corrections["tis"]["weight"] == pytest.approx(np.minimum(weights, 2).mean())
    assert found.corrections["cispo"]["weight"] == pytest.approx(np.minimum(weights, 1.2).mean())
    assert found.corrections["ppo"]["cut"] == pytest.approx((np.abs(weights - 1) > 0.2).mean())
    assert set(found.corrections) == set(CORRECTIONS)


def test_rows_without_lag_have_no_effect_and_no_alarm(tmp_path):
    rows = [{**ROW, "inference_logprobs": ROW["trainer_logprobs"], "versions": 7, "end_version": 7} for _ in range(3)]
    found = audit(read_rows(write(tmp_path / "rows.jsonl", rows)))
    assert found.alarms == []
    assert found.diagnostics == {"effective_sample_size": 1.0, "kl": 0.0, "mismatch": 0.0}
    for effect in found.corrections.values():
        assert effect == {"cut": 0.0, "without_gradient": 0.0, "weight": pytest.approx(1.0)}
    assert found.lags["total"] == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "max": 0.0}


def test_a_quantile_is_a_lag_that_occurs_and_tokens_without_an_advantage_do_not_count(tmp_path):
    row = {"trainer_logprobs": [-1.0, -1.0], "inference_logprobs": [-1.0, -1.0], "advantages": [0.0, 2.0],
           "versions": [1, 2], "end_version": 2, "version": 2}
    found = audit(read_rows(write(tmp_path / "rows.jsonl", [row])))
    assert found.lags["total"] == {"mean": 0.5, "p50": 0.0, "p90": 1.0, "max": 1.0}
    assert found.corrections["tis"] == {"cut": 0.0, "without_gradient": 0.0, "weight": 1.0}


def test_batches_and_tokens_count_by_the_tokens_that_are_trained_on(tmp_path):
    row = {"trainer_logprobs": [-1.0, -1.0], "inference_logprobs": [-1.0, -1.0], "versions": 1}
    rows = [{**row, "advantages": [1.0, 0.0], "version": 1}, {**row, "advantages": 0.0, "version": 2},
            {**row, "advantages": 1.0, "mask": [0, 0], "version": 3},
            {**row, "inference_logprobs": [-3.0, -1.0], "advantages": [2.0, 0.0], "version": 4}]
    found = audit(read_rows(write(tmp_path / "rows.jsonl", rows)))
    assert (found.rows, found.tokens, found.batches) == (4, 6, 3)
    assert found.corrections["none"] == {"cut": 0.0, "without_gradient": 0.0, "weight": pytest.approx(1.0)}
    assert found.corrections["tis"]["weight"] == pytest.approx((1.0 + 2.0) / 2)
    assert found.corrections["mis"] == {"cut": pytest.approx(1 / 6), "without_gradient": 0.5, "weight": 0.5}
    assert audit(read_rows(write(tmp_path / "rows.jsonl", rows[::-1]))) == found
    with pytest.raises(ConfigError, match="the masks leave out all tokens; at least one must be 1"):
        audit(read_rows(write(tmp_path / "rows.jsonl", [rows[2]])))


def test_log_probabilities_that_are_far_apart_raise_alarms(tmp_path):
    for trainer, generator in (([-1.0, -1.0], [-1000.0, -1000.0]), ([-1000.0, -1.0], [-1.0, -1.0])):
        row = {"trainer_logprobs": trainer, "inference_logprobs": generator, "advantages": 1.0}
        found = audit(read_rows(write(tmp_path / "rows.jsonl", [row, row])))
        assert found.diagnostics["kl"] > 400
        assert found.diagnostics["effective_sample_size"] == pytest.approx(1.0 if trainer[0] == trainer[1] else 0.5)
        assert any(alarm.startswith("KL divergence") for alarm in found.alarms)


def test_corrections_of_sequences_use_the_mean_advantage_of_the_sequence(tmp_path):
    row = {"trainer_logprobs": [-1.0, -1.0], "inference_logprobs": [-1.1, -1.0], "advantages": [1.0, -0.1]}
    found = audit(read_rows(write(tmp_path / "rows.jsonl", [row]))).corrections
    assert found["gspo"]["weight"] == pytest.approx(np.exp(0.05))
    assert found["mis_sequence"]["weight"] == pytest.approx(np.exp(0.1))
    assert found["mis"]["weight"] == pytest.approx((np.exp(0.1) + 1) / 2)


def test_rows_as_trainers_write_them_are_accepted(tmp_path):
    expected = audit(read_rows(write(tmp_path / "rows.jsonl", [{**ROW, "mask": [1, 0]}])))
    path = tmp_path / "rows.jsonl"
    for strange in (None, float("nan"), float("-inf"), 3.0):
        row = {**ROW, "mask": [1, 0], "inference_logprobs": [-1.1, strange], "trainer_logprobs": [-1.0, strange],
               "old_per_token_logps": None}
        path.write_text("\ufeff" + json.dumps(row), encoding="utf-8")
        assert audit(read_rows(path)) == expected
    rounded = {**ROW, "trainer_logprobs": [1e-6, -1.0]}
    assert read_rows(write(path, [rounded]))[0].logp.tolist() == [1e-6, -1.0]
    verl = {"old_log_probs": [-1.0, -2.0], "rollout_log_probs": [-1.1, -2.0], "advantages": 0.5}
    both = {**verl, "trainer_logprobs": [-1.0, -2.0]}
    assert audit(read_rows(write(path, [verl]))) == audit(read_rows(write(path, [both])))


def test_texts_of_a_row_may_contain_any_end_of_a_line(tmp_path):
    row = json.dumps({**ROW, "text": "a\u2028b\u2029c\u0085d"}, ensure_ascii=False)
    assert len(read_rows(write(tmp_path / "rows.jsonl", [row, row]))) == 2


def test_names_of_other_trainers_are_accepted(tmp_path):
    rows, *_ = planted(2)
    expected = audit(read_rows(write(tmp_path / "rows.jsonl", rows)))
    for place in range(max(map(len, FIELDS.values()))):
        renamed = [{(FIELDS[name][place] if place < len(FIELDS[name]) else name): value for name, value in row.items()}
                   for row in rows]
        assert audit(read_rows(write(tmp_path / "rows.jsonl", renamed))) == expected


def test_optional_fields_may_be_missing(tmp_path):
    short = {name: ROW[name] for name in ("trainer_logprobs", "inference_logprobs", "advantages")}
    found = audit(read_rows(write(tmp_path / "rows.jsonl", [short, "", short])))
    assert (found.lags, found.batches, found.rows) == ({}, 1, 2)
    assert "mismatch" not in found.diagnostics
    other = audit(read_rows(write(tmp_path / "rows.jsonl", [{**short, "old_logprobs": [-1.5, -2.5]}])))
    assert other.corrections["decoupled"] != found.corrections["decoupled"]


MALFORMED = {
    "no JSON": ("{", "line 2: expected a JSON object, got '{'"),
    "no object": ("[1]", "line 2: expected a JSON object, got list"),
    "missing": ({**ROW, "inference_logprobs": ...}, r"line 2: 'inference_logprobs' is missing \(also accepted: 'samp"),
    "two names": ({**ROW, "log_probs": [-1.0, -1.0]}, "line 2: trainer_logprobs and log_probs are names of the same"),
    "no list": ({**ROW, "trainer_logprobs": -1.0}, "line 2: 'trainer_logprobs' must be a list with a number for each"),
    "text for all": ({**ROW, "advantages": "1.0"}, "line 2: 'advantages' must be a number, or a list with a number f"),
    "empty": ({**ROW, "trainer_logprobs": []}, r"line 2: 'trainer_logprobs' must be a list with a number .*, got \[\]"),
    "other length": ({**ROW, "inference_logprobs": [-1.0]}, "'inference_logprobs' has 1 numbers, but there are 2"),
    "text": ({**ROW, "trainer_logprobs": [-1.0, "x"]}, "'trainer_logprobs' must consist of finite numbers, got 'x'"),
    "not finite": ({**ROW, "advantages": [0.1, float("nan")]}, "'advantages' must consist of finite .* got nan"),
    "positive": ({**ROW, "inference_logprobs": [0.5, -1.0]}, r"'inference_logprobs' must be at most 0, .* got 0\.5"),
    "mask": ({**ROW, "mask": [1, 2]}, r"line 2: 'mask' must consist of 0 and 1, got 2\.0"),
    "fraction": ({**ROW, "versions": [3.5, 4]}, r"line 2: 'versions' must be whole numbers >= 0, got \[3\.5"),
    "future": ({**ROW, "versions": [3, 6]}, "'versions' contains 6, which is newer than the trainer's version 5"),
    "order": ({**ROW, "end_version": 9}, "line 2: 'end_version' 9 is newer than 'version' 7"),
    "negative": ({**ROW, "version": -1}, "line 2: 'version' must be a whole number >= 0, got -1"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_wrong_row_is_named_with_its_line_and_field(tmp_path, case):
    row, message = MALFORMED[case]
    if isinstance(row, dict):
        row = {name: value for name, value in row.items() if value is not ...}
    with pytest.raises(ConfigError, match=message) as refused:
        read_rows(write(tmp_path / "rows.jsonl", [ROW, row]))
    assert str(refused.value).startswith("rows.jsonl, line 2: ")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rows(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="contains no rows"):
        read_rows(write(tmp_path / "rows.jsonl", [""]))


def test_the_command_prints_tables_and_alarms(tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", planted(shift=0.4)[0])
    assert main(["audit", str(path)]) == 1
    out = capsys.readouterr().out
    assert "lag in updates" in out
    assert "alarm: effective sample size" in out
    assert all(name in out for name in CORRECTIONS)
    assert main(["audit", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["diagnostics"]["effective_sample_size"] < LIMITS["effective_sample_size"]
    assert main(["audit", str(write(path, [{**ROW, "inference_logprobs": ROW["trainer_logprobs"]}]))]) == 0
    assert "mismatch is unknown" in capsys.readouterr().out
    short = {name: ROW[name] for name in ("trainer_logprobs", "advantages")}
    assert main(["audit", str(write(path, [{**short, "inference_logprobs": [-1.0, -200.0]}]))]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.startswith("a3po")] == [["a3po", "-", "-", "-"]]
    assert max(map(len, lines)) < 100
    assert main(["audit", str(write(path, ["{"]))]) == 2
    assert "rows.jsonl, line 1: expected a JSON object" in capsys.readouterr().err
