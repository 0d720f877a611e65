"""Each thing has one name: words and parameters that mean the same as a word of the glossary are refused.

The glossary, docs/glossary.md, explains the words that are used.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.conftest import ROOT
from tests.unit.packaging.source import MODULES, name_of, nodes_of, reads_source

pytestmark = reads_source
# Refused word, a pattern that is searched in all code and pages -> the word to use.
WORDS = {
    r"(?:[Nn]ormal|[Dd]ecentral|[Ii]nitial|[Ss]erial|[Ss]ynchron|[Oo]ptim|[Ss]ummar|[Rr]ecogn)is(?:e|ing|ation)":
        "the American spelling, as in normalize_obs",
    r"[Cc]olour|[Bb]ehaviour": "the American spelling",
    r"\bcancel(?:ed|ing)\b": "cancelled, as in `Future.cancelled`",
    r"(?<!-)\b[Mm]ini-batch(?!-size)": "minibatch",
    r"replay memory|replay memories": "replay buffer",
    r"\b[Ee]nvironment steps?\b": "env step",
    r"\bremote collectors?\b|\bcollectors? workers?\b": "collection worker",
    r"\b_?num_shards\b": "num_replay_workers",
    r"\b(?:seconds|time)_left\b": "time_left_s",
    r"num_gradient_workers|n_grad_workers": "num_grad_workers",
    r"num_collection_workers|num_cworkers": "num_col_workers for the option, num_collectors for a count",
    r"num_rollout_workers|rollout[ _]workers?\b|\bsampl(?:er|ing) workers?\b": "collection worker",
    r"\blearner workers?\b|\bgradients? processes\b": "gradient worker",
    r"\b(?:n|nb)_(?:envs|steps|workers|epochs)\b|\b(?:envs|workers|steps)_count\b": "num_<name>",
    r"\bnum_environments\b": "num_envs",
    r"\b\w+_(?:sec|secs|seconds)\s*[:=]\s*(?:float|int)\b": "a name that ends in _s",
    r"\b(?:worker|env)_idx\b|\bidx_\w+": "index_<name> or rank",
    r"\breplay workers?\b(?! resources)": "replay shard",
    r"\blearning threads?\b|\blearner's threads?\b": "learner thread",
    r"\btrees? of workers\b": "worker tree",
    r"(?:queued|dropped|between)[ _]items\b|(?:\b|_)items[ _](?:queued|dropped)\b":
        "train batch or batch; an item is what a replay buffer samples",
    r"\b(?:[Nn]umbers?|[Cc]ounts?) of (?:the |these )?replacements\b|\b[Rr]eplacements (?:so far|of environments)\b"
    r"|\bnum_replacements\b|[Ww]orkers replaced\b": "restart for the event; the replacement is the new worker",
    r"\b[Ee]nv workers?\b": "environment worker",
}
SUFFIXES = (".py", ".md", ".json", ".svg", ".ipynb")
FOLDERS = ("pytorchrl", "docs", "examples", "tests", "benchmarks")
# Files that contain refused words -> why.
EXEMPT = {
    "benchmarks/gpu.py": "options of Stable-Baselines3",
    "benchmarks/peers.py": "options of RLlib",
    "benchmarks/recurrent.py": "options of sb3-contrib",
    "benchmarks/throughput.py": "options of Stable-Baselines3",
    "docs/coming_from/": "names of other libraries",
    "pytorchrl/agent/names_elsewhere.json": "names of other libraries",
    "tests/unit/agent/test_names.py": "names of other libraries",
    "tests/unit/packaging/test_words.py": "the refused words themselves",
    "tests/unit/training/test_configuration.py": "names of other libraries",
}
# Modules whose parameters are called `timeout` -> why the name does not end in a unit.
TIMEOUTS = {"pytorchrl.runtime.simulated": "the signatures of `queue.Queue` and `threading.Event`",
            "pytorchrl.runtime.collective": "a `timedelta`, whose unit is part of its type"}


def refused(text):
    """Return the refused words in a text, each with the word to use."""
    return [f"{found.group()} -> {right}" for word, right in WORDS.items() for found in re.finditer(word, text)]


def files():
    """Yield the code and pages of the project."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix in SUFFIXES and "_build" not in path.parts and not name.startswith(tuple(EXEMPT)):
                yield path
    yield from (ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))


@pytest.mark.parametrize("text", [
    "def normalise(obs)", "num_gradient_workers: int", "the rollout workers wait", "n_envs", "timeout_sec: float",
    "env_idx", "decentralised updates", "coloured", "a canceled use", "of mini-batches", "a replay memory",
    "every environment step", "two remote collectors", "self._num_shards", "seconds_left",
    "the learning thread", "the learner's thread", "a tree of workers", "num_items_dropped", "is_between_items",
    "number of replacements", "Replacements so far", "2 workers replaced", "an env worker"])
def test_a_refused_word_is_found(text):
    assert len(refused(text)) == 1


@pytest.mark.parametrize("text", ["--num-mini-batch 4 --mini-batch-size 64", "future.cancelled()", "num_mini_batch"])
def test_names_that_cannot_change_are_allowed(text):
    assert refused(text) == []


def test_all_code_and_pages_use_the_words_of_the_glossary():
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files()}
    assert len(texts) > 500
    assert [f"{name}: {word}" for name, text in texts.items() for word in refused(text)] == []


def test_parameters_that_are_times_name_their_unit():
    found = [f"{name_of(path)}.{node.name}" for path in MODULES if name_of(path) not in TIMEOUTS
             for node in nodes_of(path) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
             for parameter in (*node.args.args, *node.args.kwonlyargs)
             if parameter.arg == "timeout" or re.fullmatch(r"(?!is_)\w+_timeout", parameter.arg)]
    assert found == []
