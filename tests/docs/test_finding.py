"""Tests that a reader finds things: in the sidebar, by the search of the site, and with few clicks."""

from __future__ import annotations

import dataclasses
import json
import posixpath
import re
import shutil
import subprocess
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest

import pytorchrl
from pytorchrl.agent import storages
from pytorchrl.training.composition import option_specs
from tests.conftest import ROOT

pytest.importorskip("myst_nb")
pytest.importorskip("furo")
pytestmark = [pytest.mark.site, pytest.mark.timeout(600), pytest.mark.xdist_group("site")]

MOST_ENTRIES = 34
MOST_BELOW_ONE_PAGE = 24
OWNERS = (
    "Learner", "PPO", "A2C", "IMPALA", "APPO", "DQN", "PQN", "R2D2", "DDPG", "TD3", "SAC", "MPO", "OnPolicyActor",
    "QActor", "OffPolicyActor", "GAEBuffer", "VanillaOnPolicyBuffer", "VTraceBuffer", "ReplayBuffer", "PERBuffer",
    "SequenceBuffer", "UniformSequenceBuffer", "RolloutSequenceBuffer", "VecEnv")
# Query -> a pattern of the page with the anchor that must be the first result.
SEARCHES = {
    "num_envs": "options/environments#VecEnv-vec_env_size", "target_steps": "options/learner#Learner-target_steps",
    "num_col_workers": "options/scheme#Scheme-num_col_workers", "log_dir": "options/learner#Learner-log_dir",
    "max_policy_lag": "options/scheme#Scheme-max_policy_lag", "clip_param": r"algorithms/\w+#\w+-clip_param",
    "replay_size": r"options/storages#\w+-size", "checkpoint_every": "options/learner#Learner-checkpoint_every",
    "hidden_sizes": r"options/actors#\w+-hidden_sizes", "--num-envs": "flags#num-envs",
    "learning_rate": r"options/names_elsewhere#elsewhere-learning_rate-\d+", "install": "install", "slow": "profiling",
    "save": "checkpoints", "which scheme": "which_scheme", "gpu": "devices",
    "device": "options/scheme#Scheme-device", "target_kl": r"algorithms/\w+#\w+-target_kl",
    "lr": r"algorithms/\w+#\w+-lr",
}
# Questions of a newcomer -> the texts of the links to click, from the first page, and words of the answer.
QUESTIONS = {
    "How do I install it?": (["Install"], "pip install"),
    "How do I train a first agent?": (["Your first agent"], "target_steps=10_000"),
    "Which algorithm should I use?": (["Which algorithm?"], "fast environment"),
    "How do I use my own environment?": (["Your own environment"], "class Corridor"),
    "How do I use my own network?": (["Your own network"], "out_features"),
    "How do I change the loss?": (["Your own algorithm"], "policy_loss"),
    "How do I save, and continue later?": (["Save, stop and resume"], "checkpoint_every"),
    "How do I load an agent and act?": (["Load an agent and act"], "prl.load"),
    "It does not learn: what now?": (["It does not learn"], "pytorchrl doctor"),
    "Why is it slow?": (["Why is it slow?"], "pytorchrl profile"),
    "Which scheme should I choose?": (["Which scheme?"], "situation"),
    "How do I use several cores?": (["More environments and workers"], "num_col_workers=2"),
    "How do I use a GPU?": (["GPUs"], "cuda"),
    "How do I train several agents?": (["Several agents"], "PettingZoo"),
    "How do I run on a cluster?": (["Several machines"], "Slurm"),
    "What happens if a worker crashes?": (["Failures and their costs"], "on_worker_failure"),
    "How do I see what a run does?": (["Watching runs"], "pytorchrl watch"),
    "How do I compare two options fairly?": (["Compare runs"], "pytorchrl compare"),
    "What does the option gae_lambda mean?": (["Options", "GAEBuffer"], "gae_lambda"),
    "I know Stable-Baselines3: what is different?":
        (["Coming from another library", "From Stable-Baselines3"], "learning_rate"),
    "How do I search for hyperparameters?": (["Search hyperparameters"], "Optuna"),
}


class Links(HTMLParser):
    """Parser that collects the links of a page, by their texts, and those of the sidebar separately."""

    def __init__(self):
        super().__init__()
        self.links, self.sidebar, self._href, self._text, self._depth = [], [], None, "", 0

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "div":
            self._depth += bool(self._depth) or "sidebar-tree" in (given.get("class") or "")
        if tag == "a":
            self._href, self._text = given.get("href", ""), ""

    def handle_data(self, data):
        self._text += data

    def handle_endtag(self, tag):
        if tag == "div" and self._depth:
            self._depth -= 1
        if tag == "a" and self._href is not None:
            self.links.append((" ".join(self._text.split()), self._href))
            self.sidebar += [self.links[-1]] * bool(self._depth)
            self._href = None


def links_of(site, page):
    parser = Links()
    parser.feed((site / page).read_text(encoding="utf-8"))
    return parser


def follow(site, texts):
    """Return the page to which links with these texts lead, from the first page."""
    page = "index.html"
    for text in texts:
        found = [link for name, link in links_of(site, page).links if name == text]
        assert found, f"{page} has no link {text!r}"
        page = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(urlsplit(found[0]).path)))
    return page


@pytest.fixture(scope="module")
def index(site):
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    return json.loads(re.fullmatch(r"Search\.setIndex\((.*)\)", text, re.DOTALL)[1])


def test_sidebar_is_short(site):
    pages = [page.relative_to(site).as_posix() for page in site.rglob("*.html")]
    entries = {page: len(links_of(site, page).sidebar) for page in pages}
    assert 25 <= entries["index.html"] <= MOST_ENTRIES
    assert max(entries.values()) <= MOST_ENTRIES + MOST_BELOW_ONE_PAGE


def test_every_page_is_in_its_own_sidebar(site):
    """A page that no page lists could be reached by the search only; the sidebar marks the current page by `#`."""
    pages = [page.relative_to(site).as_posix() for page in site.rglob("*.html")]
    missing = {page for page in pages if "#" not in [link for _, link in links_of(site, page).sidebar]}
    # The page of benchmarks leads to its log.
    others = {"index.html", "search.html", "benchmarks/log.html"}
    assert {page for page in missing if not page.startswith("_modules/")} == others


def class_of(owner):
    return getattr(pytorchrl if hasattr(pytorchrl, owner) else storages, owner)


def test_every_option_has_an_anchor_to_which_the_search_leads_first(site, index):
    """The scores of exact main entries, 100, are above those of all other results: names of objects, titles, text."""
    entries = index["indexentries"]
    found = 0
    for owner in OWNERS:
        for field in dataclasses.fields(class_of(owner).Options):
            targets = [(index["docnames"][page], anchor) for page, anchor, _ in entries[field.name.lower()]]
            (page,) = {page for page, anchor in targets if anchor == f"{owner}-{field.name}"}
            assert f'id="{owner}-{field.name}"' in (site / f"{page}.html").read_text(encoding="utf-8")
            found += 1
    assert found > 150
    for algorithm in ("ppo", "impala", "appo", "dqn", "r2d2", "sac"):
        for name in option_specs(algorithm):
            assert [anchor for _, anchor, is_main in entries[name] if is_main], name


def test_every_option_is_in_the_list_from_a_to_z(site):
    links = {text for text, _ in links_of(site, "options/index.html").links}
    assert links >= {*OWNERS, "Scheme", "MultiAgentVecEnv"}
    page = (site / "options/index.html").read_text(encoding="utf-8")
    for owner in OWNERS:
        for field in dataclasses.fields(class_of(owner).Options):
            assert f"#{owner}-{field.name}" in page


@pytest.mark.skipif(shutil.which("node") is None, reason="the search of the site is a script, which node executes")
def test_search_finds_options_and_pages_first(site):
    command = ["node", ROOT / "tests/docs/search.js", site, *SEARCHES]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    first = {query: found[0][0] for query, found in zip(SEARCHES, json.loads(result.stdout), strict=True)}
    assert {query: page for query, page in first.items() if not re.fullmatch(SEARCHES[query], page)} == {}


@pytest.mark.parametrize("question", QUESTIONS)
def test_newcomer_finds_the_answer_with_few_clicks(site, question):
    clicks, answer = QUESTIONS[question]
    assert len(clicks) <= 3
    page = re.sub("<[^>]*>", "", (site / follow(site, clicks)).read_text(encoding="utf-8"))
    assert answer in page
