"""Tests of the enums of options."""

from __future__ import annotations

import pytest

from pytorchrl.errors import ConfigError
from pytorchrl.scheme.architectures import PRESETS
from pytorchrl.scheme.options.base import ASYNC, CENTRAL, PARALLEL, SYNC, Communication, Execution, check_execution
from pytorchrl.scheme.options.settings import Settings
from pytorchrl.training.configuration import load_config, save_config
from pytorchrl.training.training import make_learner


@pytest.mark.parametrize("choice", [SYNC, ASYNC, CENTRAL, PARALLEL])
def test_a_choice_equals_its_text(choice):
    assert type(choice)(str(choice)) is choice
    assert choice == str(choice)


@pytest.mark.parametrize(("text", "near"), [("central", "Central"), ("Parallels", "Parallel")])
def test_a_wrong_choice_is_refused_with_a_suggestion(text, near):
    with pytest.raises(ConfigError, match=rf"execution must be one of .*, got '{text}'; did you mean '{near}'\?"):
        Execution(text)


@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize("execution", ["Central", PARALLEL])
def test_only_one_worker_can_be_central(execution, num_workers):
    if execution == "Central" and num_workers > 1:
        with pytest.raises(ConfigError, match=f"grad_execution='Central' contradicts num_grad_workers={num_workers}"):
            check_execution("grad", execution, num_workers)
    else:
        assert check_execution("grad", execution, num_workers) is Execution(execution)


@pytest.mark.parametrize(("word", "member"), [
    ("sync", SYNC), ("async", ASYNC), ("synchronous", SYNC), ("asynchronous", ASYNC), (SYNC, SYNC)])
def test_short_forms_of_communication_are_understood_everywhere(word, member, tmp_path):
    text = str(word)
    assert Communication(word) is member
    assert Settings.from_keywords({"col_communication": word})[0].flat()["col_communication"] == member.value
    file = tmp_path / "run.toml"
    for name in ("col_communication", "grad_communication"):  # files that are written contain the full word
        save_config(file, "ppo", "CartPole-v1", {name: word})
        assert f'{name} = "{member.value}"' in file.read_text()
        file.write_text(f'algorithm = "ppo"\nenv = "CartPole-v1"\n{name} = "{text}"\n')
        assert load_config(file)[name] is member
    learner, _ = make_learner("ppo", "CartPole-v1", col_communication=word, log_dir=tmp_path / "run", progress=False)
    assert learner.scheme.settings["col_communication"] == member.value
    assert learner._recipe["options"]["col_communication"] == member.value
    problems = PRESETS["impala"].problems(None, {"col_communication": word})
    assert bool(problems) == (member is SYNC)


@pytest.mark.parametrize("word", ["asink", "asyn", "a", "", "hronous", "Async", True, None])
def test_other_words_are_refused(word):
    with pytest.raises(ConfigError, match=r"must be one of \['synchronous', 'asynchronous'\]"):
        Communication(word)
