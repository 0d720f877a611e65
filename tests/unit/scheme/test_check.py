"""Check that all mistakes in the options of a scheme or of `train` are reported at once, each once, with a remedy."""

from __future__ import annotations

import pickle
import re

import gymnasium as gym
import pytest

import pytorchrl
from pytorchrl import ASYNC, DQN, PPO, SAC, GAEBuffer, OnPolicyActor, PERBuffer, QActor, ReplayBuffer, Scheme, VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError, SpaceError
from pytorchrl.scheme import AsynchronousCollection, SynchronousCollection
from pytorchrl.scheme.check import check
from pytorchrl.scheme.options.settings import Settings
from pytorchrl.support.problems import Problems, error_of, problems_of

ENVS = VecEnv.create_factory(CountingEnv, vec_env_size=2)
SPACES = (ENVS.observation_space, ENVS.action_space)
AGENT = (PPO.create_factory(), OnPolicyActor.create_factory(*SPACES), GAEBuffer.create_factory(8), ENVS)
Q_AGENT = (DQN.create_factory(start_steps=10), QActor.create_factory(*SPACES), PERBuffer.create_factory(20_000), ENVS)

# Name -> (function that makes the mistakes, for each mistake: (its setting and its value or need, its remedy)).
WRONG = {
    "two misplaced options, too many minibatches": (
        lambda: pytorchrl.train("ppo", "CartPole-v1", broadcast_interval=4, queue_size=8, num_mini_batch=5000),
        [("broadcast_interval=4: only with col_communication='asynchronous'", "leave broadcast_interval out"),
         ("queue_size=8: only with col_communication='asynchronous'", "leave queue_size out"),
         ("num_mini_batch must not exceed the batch", "lower num_mini_batch")]),
    "an unknown name, a wrong value, a misplaced option, too many minibatches": (
        lambda: pytorchrl.train("ppo", "CartPole-v1", lrr=3, lr=-1, col_in_flight=4, num_mini_batch=5000),
        [("there is no option 'lrr'", "did you mean 'lr'"), ("lr must be a number >= 0.0", "got -1"),
         ("col_in_flight=4: only with col_communication='asynchronous'", "leave col_in_flight out"),
         ("num_mini_batch must not exceed the batch", "lower num_mini_batch")]),
    "a limit of an architecture, another algorithm, a wrong value, an option of the learner": (
        lambda: pytorchrl.train("ppo", "CartPole-v1", preset="rapid", num_grad_workers=1, gamma=2, eval_timeout_s=3,
                                eval_episodes=3),
        [("num_grad_workers=1 is too small", "give 2 or more"), ("rapid collects with .*, but PPO has", "use APPO"),
         ("gamma must be a number >= 0.0 and <= 1.0", "got 2"), ("eval_timeout_s needs eval_every", "or leave"),
         ("eval_episodes needs eval_every", "or leave eval_episodes out")]),
    "an unknown architecture, checkpoints without a directory, environments that cannot be built": (
        lambda: pytorchrl.train("ppo", "CartPole-v1", preset="impla", num_envs=0, checkpoint_every=10),
        [("preset must be one of", "got 'impla'"), ("num_envs must be a whole number >= 1", "got 0"),
         ("checkpoint_every needs a log_dir", "or leave checkpoint_every out")]),
    "contradictions of an algorithm, of a level and between levels": (
        lambda: pytorchrl.train("ppo", "CartPole-v1", clip_param_vf=0.3, fraction_samples=0.5,
                                compress_data_to_send="lz4"),
        [("clip_param_vf needs use_clipped_value_loss=True", "leave clip_param_vf out"),
         ("fraction_samples needs col_fraction_workers < 1", "leave fraction_samples out"),
         ("compress_data_to_send='lz4' needs num_col_workers >= 2", "leave compress_data_to_send out")]),
    "an option of prioritized replay, and of replay shards": (
        lambda: pytorchrl.train("dqn", "CartPole-v1", alpha=0.5, learning_starts=10, eval_every=5, record="file",
                                checkpoint_every=5, log_dir="nowhere"),
        [("alpha would be ignored", "add prioritized=True"),
         ("learning_starts=10: only with col_communication='asynchronous' and with num_replay_workers",
          "give start_steps of the algorithm"),
         ("a run that is recorded or replayed has no checkpoints", "leave checkpoint_every out")]),
    "four contradictions within a level": (
        lambda: Scheme(*AGENT, col_communication=ASYNC, on_policy_lag="wait", buffer="circular", ramp=True,
                       train_batch_size=4, microbatch_size=8),
        [("ramp=True is for buffer='ring'", "leave ramp out"),
         ("on_policy_lag='wait' needs max_policy_lag", "give max_policy_lag"),
         ("on_policy_lag='wait' counts future uses", "give on_policy_lag='drop'"),
         ("microbatch_size must not exceed train_batch_size", "lower microbatch_size")]),
    "wrong values, and a contradiction of others": (
        lambda: Scheme(*AGENT, seed=-1, device="tpu", compress_grads_to_send="lz4", num_threads=0),
        [("seed must be a whole number", "got -1"), ("device must be one of", "give one of these devices|install"),
         ("compress_grads_to_send='lz4' needs num_grad_workers >= 2", "leave compress_grads_to_send out"),
         ("num_threads must be a whole number >= 1", "got 0")]),
    "parts that do not fit, and contradictions of the settings": (
        lambda: Scheme(SAC.create_factory(), *Q_AGENT[1:], col_device="cpu", distribute_gradients=True,
                       num_replay_workers=1),
        [("SAC cannot train QActor", "actors for SAC"), ("distribute_gradients=True needs num_grad_workers", "give"),
         ("num_replay_workers needs col_communication='asynchronous'", "leave num_replay_workers out")]),
    "shards that are too small, routing, and an option that the storage lacks": (
        lambda: Scheme(*Q_AGENT[:2], ReplayBuffer.create_factory(1000), ENVS, col_communication=ASYNC,
                       num_replay_workers=2, size=300, train_batch_size=200, min_replay_ratio=2.0,
                       max_replay_ratio=1.0, alpha=0.3),
        [("min_replay_ratio 2.0 exceeds max_replay_ratio 1.0", "lower min_replay_ratio"),
         ("alpha would be ignored", "give a storage with priorities"),
         ("size 300 divided among 2 shards is 150 per shard", "raise size")]),
    "numbers for other workers, a device and resources without an effect": (
        lambda: Scheme(*AGENT, num_col_workers=(1, 2), grad_device="cpu", grad_worker_resources={"num_cpus": 2}),
        [("num_col_workers has 2 numbers for 1 gradient workers", "give one for each"),
         ("grad_device='cpu' is for remote gradient workers", "leave grad_device out"),
         ("grad_worker_resources is for remote gradient workers", "leave grad_worker_resources out")]),
}


@pytest.mark.parametrize("name", WRONG)
def test_every_mistake_is_reported_once_with_its_remedy(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    make, expected = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        make()
    first, *lines = str(caught.value).splitlines()
    assert first == f"{len(lines)} problems:"
    assert not list(tmp_path.iterdir())
    for mistake, remedy in expected:
        found = [line for line in lines if line.startswith("- ") and _matches(mistake, line)]
        assert len(found) == 1, (mistake, lines)
        assert _matches(remedy, found[0]), (remedy, found[0])
    assert len(lines) == len(expected), lines


def _matches(pattern, line):
    return re.search(pattern.replace("(", r"\("), line) is not None


def test_a_wrong_value_hides_the_contradictions_that_depend_on_it():
    """The default takes the place of a wrong value, which would contradict settings that the user's value fits."""
    with pytest.raises(ConfigError, match=r"^num_col_workers must be .*, got 'two'$"):
        Scheme(*AGENT, num_col_workers="two", compress_data_to_send="lz4", col_worker_resources={"num_cpus": 2})
    with pytest.raises(ConfigError, match=r"^col_communication must be .*, got 'asinc'"):
        Scheme(*AGENT, col_communication="asinc", queue_size=3)


def test_a_single_problem_keeps_its_class_and_its_sentence():
    with pytest.raises(SpaceError, match=r"^actor_factory was made for .*; create the actor with") as caught:
        Scheme(AGENT[0], OnPolicyActor.create_factory(gym.spaces.Box(-1, 1, (7,)), SPACES[1]), *AGENT[2:])
    (problem,) = problems_of(caught.value)
    assert (problem.options, str(problem)) == (("observation_space",), str(caught.value))


def test_check_returns_nothing_for_what_a_scheme_accepts():
    scheme = Scheme(*AGENT, num_col_workers=2, runtime="threads")
    assert check(scheme.agent, scheme.nested) == check(None, scheme.nested) == []


def test_levels_that_contradict_themselves_are_checked_against_other_levels():
    settings, problems = Settings.from_keywords(
        {"fraction_samples": 0.5, "prefetch": 1, "compress_data_to_send": "lz4"})
    assert problems.found == []
    assert isinstance(settings.collection, SynchronousCollection)
    names = [problem.options[0] for problem in check(None, settings)]
    assert names == ["fraction_samples", "prefetch", "compress_data_to_send"]


def test_options_that_a_user_builds_report_their_contradictions_at_once():
    with pytest.raises(ConfigError) as caught:
        AsynchronousCollection(on_policy_lag="wait", buffer="circular")
    assert len(problems_of(caught.value)) == 2
    assert caught.value.contradictory.buffer == "circular"


def test_problems_are_found_behind_wrong_values_and_survive_a_round_trip():
    def make(*, a=1, b=2):
        if a < 0:
            raise error_of([pytorchrl.errors.Problem("a is wrong", options=("a",))])
        return a, b
    problems = Problems()
    assert problems.build(make, {"a": -1, "b": 3}) == (1, 3)
    problems.add([pytorchrl.errors.Problem("a contradicts b", options=("a", "b")), pytorchrl.errors.Problem("c")])
    assert [problem.text for problem in problems.found] == ["a is wrong", "c"]
    with pytest.raises(ConfigError) as caught:
        problems.raise_all()
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems
