"""Each thing has one name: words and parameters that mean the same as a word of the glossary are refused.

The glossary, docs/glossary.md, explains the words that are used.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.unit.packaging.source import MODULES, PACKAGE, name_of, nodes_of, reads_source

pytestmark = reads_source
# Refused word, a pattern that is searched in all text of the package -> the word to use.
WORDS = {
    r"normalis": "normaliz, as in normalize_obs",
    r"num_gradient_workers|n_grad_workers": "num_grad_workers",
    r"num_collection_workers|num_cworkers": "num_col_workers for the option, num_collectors for a count",
    r"num_rollout_workers|rollout[ _]workers?\b|\bsampl(?:er|ing) workers?\b": "collection worker",
    r"\blearner workers?\b|\bgradients? processes\b": "gradient worker",
    r"\b(?:n|nb)_(?:envs|steps|workers|epochs)\b|\b(?:envs|workers|steps)_count\b": "num_<name>",
    r"\bnum_environments\b": "num_envs",
    r"\b\w+_(?:sec|secs|seconds)\s*[:=]\s*(?:float|int)\b": "a name that ends in _s",
    r"\b(?:worker|env)_idx\b|\bidx_\w+": "index_<name> or rank",
    r"\breplay workers?\b(?! resources)": "replay shard",
}
# Modules whose parameters are called `timeout` -> why the name does not end in a unit.
TIMEOUTS = {"pytorchrl.runtime.simulated": "the signatures of `queue.Queue` and `threading.Event`",
            "pytorchrl.runtime.collective": "a `timedelta`, whose unit is part of its type"}


def refused(text):
    """Return the refused words in a text, each with the word to use."""
    return [f"{found.group()} -> {right}" for word, right in WORDS.items() for found in re.finditer(word, text)]


@pytest.mark.parametrize("text", [
    "def normalise(obs)", "num_gradient_workers: int", "the rollout workers wait", "n_envs", "timeout_sec: float",
    "env_idx"])
def test_a_refused_word_is_found(text):
    assert len(refused(text)) == 1


def test_package_uses_the_words_of_the_glossary():
    found = [f"{path.relative_to(PACKAGE.parent)}: {word}" for path in MODULES
             for word in refused(path.read_text(encoding="utf-8"))]
    assert found == []


def test_parameters_that_are_times_name_their_unit():
    found = [f"{name_of(path)}.{node.name}" for path in MODULES if name_of(path) not in TIMEOUTS
             for node in nodes_of(path) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
             for parameter in (*node.args.args, *node.args.kwonlyargs)
             if parameter.arg == "timeout" or re.fullmatch(r"(?!is_)\w+_timeout", parameter.arg)]
    assert found == []
