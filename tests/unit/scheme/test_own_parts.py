"""Check user-defined parts in schemes: loss terms are reported, storages are sampled, and mistakes raise clear errors.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from pytorchrl import (
    ASYNC,
    DQN,
    PPO,
    R2D2,
    GAEBuffer,
    Learner,
    MultiAgentVecEnv,
    OnPolicyActor,
    QActor,
    ReplayBuffer,
    Scheme,
    SequenceBuffer,
    VecEnv,
    multi_agent,
)
from pytorchrl.envs.testing import CountingEnv, MatchingGame
from pytorchrl.errors import ContractError
from pytorchrl.scheme.updates import remote

TWO_WORKERS = {"num_col_workers": 2, "col_communication": ASYNC}
SCHEMES = {
    "central": {}, "async collection": TWO_WORKERS, "two gradient workers": {"num_grad_workers": 2},
    "decentralized": {"num_grad_workers": 2, "distribute_gradients": True},
    "async gradients": {"num_grad_workers": 2, "grad_communication": ASYNC}, "microbatches": {"microbatch_size": 5},
}


class Decoding(OnPolicyActor):
    def build_networks(self, generator):
        super().build_networks(generator)
        self.decoder = nn.Linear(self.policy.out_features, 2)


class Reconstructing(PPO):
    def terms(self, evaluated, batch, parameters):
        terms, measures = super().terms(evaluated, batch, parameters)
        wanted = 0.1 * batch.obs["obs"][:, 2:]  # scaled targets: the step within the episode and the previous action
        error = (self.actor.decoder(evaluated.features) - wanted).square().mean(-1)
        return {**terms, "reconstruction": error}, measures

    def loss_weights(self, parameters):
        return {**super().loss_weights(parameters), "reconstruction": 0.5}


@pytest.fixture
def make_own(make_scheme):
    """Return a function that makes schemes with the given algorithm and actor classes."""
    def make(algo=Reconstructing, actor=Decoding, num_envs=2, **settings):
        envs = VecEnv.create_factory(CountingEnv, None, num_envs)
        return make_scheme(
            envs=envs, algo=algo.create_factory(num_epochs=1, num_mini_batch=1, lr=1e-2),
            actor=actor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,)), **settings)
    return make


@pytest.mark.parametrize("settings", SCHEMES.values(), ids=SCHEMES.keys())
def test_a_term_is_reported_by_name_and_trains_its_head(make_own, settings):
    scheme = make_own(**settings)
    first = next(info for _ in range(20) if (info := scheme.step()).get("reconstruction"))
    before = scheme.acting_state()["all"].clone()
    for _ in range(10):
        info = scheme.step()
    assert math.isfinite(info["reconstruction"])
    assert first["reconstruction"] > 0
    moved = (scheme.acting_state()["all"] - before)[-2:]
    assert float(moved.abs().min()) > 0  # the decoder's two biases are the last parameters


def test_the_term_is_a_column_of_the_metrics(make_own, tmp_path):
    with Learner(make_own(), target_steps=64, log_dir=tmp_path, progress=False) as learner:
        learner.train()
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file() and path.suffix in (".csv", ".jsonl",
                                                                                                    ".json")]
    assert any("reconstruction" in text for text in files)


class Squeezing(PPO):
    """PPO with a loss term that keeps the features small."""

    def terms(self, evaluated, batch, parameters):
        terms, measures = super().terms(evaluated, batch, parameters)
        return {**terms, "size": evaluated.features.square().mean(-1)}, measures

    def loss_weights(self, parameters):
        return {**super().loss_weights(parameters), "size": 10.0}


def test_one_policy_of_several_can_have_a_loss_term():
    envs = MultiAgentVecEnv.create_factory(MatchingGame, None, vec_env_size=2, policy_of="independent")
    first, *others = envs.policies
    agent = multi_agent(envs,
                        {first: Squeezing.create_factory(lr=1e-2),
                         **dict.fromkeys(others, PPO.create_factory(lr=1e-2))},
                        functools.partial(OnPolicyActor.create_factory, hidden_sizes=(8,)),
                        GAEBuffer.create_factory(size=8))
    scheme = Scheme(*agent, envs, runtime="threads", seed=1)
    infos = [scheme.step() for _ in range(40)]
    scheme.stop()
    assert infos[-1][f"size/{first}"] < 0.5 * infos[0][f"size/{first}"]
    assert not any(f"size/{other}" in infos[0] for other in others)


class Oldest(ReplayBuffer):
    """A replay that only samples from the older half of its transitions."""

    def draw(self, count):
        rows = self.drawable_rows()
        chosen = torch.randint(-(-len(rows) // 2), (count,), generator=self.generator).numpy()
        return rows[chosen], np.ones(count)


@pytest.mark.parametrize("settings", [{}, TWO_WORKERS, {**TWO_WORKERS, "num_replay_workers": 2}], ids=str)
def test_a_user_defined_replay_is_sampled(settings):
    """Check that a user-defined replay decides which transitions are sampled.

    Column 2 of an observation is the step within the episode. Episodes never end, so the mean of the sampled values
    shows how old the samples are.
    """
    means = {}
    for storage in (Oldest, ReplayBuffer):
        envs = VecEnv.create_factory(CountingEnv, {"episode_length": 10**6}, 1)
        drawn = []

        class Watching(DQN):
            def losses(self, batch, drawn=drawn):
                drawn.extend(batch.obs["obs"][:, 2].tolist())
                return super().losses(batch)
        scheme = Scheme(
            Watching.create_factory(start_steps=64, update_every=8, mini_batch_size=16),
            QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,)),
            storage.create_factory(4000, rollout_size=8), envs, runtime="simulated", seed=1, **settings)
        for _ in range(30):
            scheme.step()
        scheme.stop()
        means[storage] = sum(drawn) / len(drawn)
    assert means[Oldest] < 0.7 * means[ReplayBuffer]


# Mistakes in user-defined parts


class WrongStep(PPO):
    def acting_step(self, *args, **kwargs):
        step = super().acting_step(*args, **kwargs)
        return step._replace(other={name: row[:1] for name, row in step.other.items()})


class WrongTerm(Reconstructing):
    def terms(self, *args):
        terms, measures = super().terms(*args)
        return {**terms, "reconstruction": terms["reconstruction"].mean()}, measures


class WrongEstimate(GAEBuffer):
    def estimate(self, rollout, recompute=False):
        return tuple(array.astype(np.float64) for array in super().estimate(rollout, recompute))


WRONG = {
    "an acting step": ({"algo": WrongStep}, r"WrongStep.acting_step\(\) returned 'dist_params'"),
    "a term": ({"algo": WrongTerm}, r"WrongTerm.terms\(\) returned 'reconstruction' as a tensor of shape \(\)"),
    "an estimate": ({"storage": WrongEstimate}, r"WrongEstimate.estimate\(\) returned advantages .*float64"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("settings", [{}, TWO_WORKERS, {"num_grad_workers": 2, "grad_communication": ASYNC}], ids=str)
@pytest.mark.parametrize(("parts", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_contract_violation_is_reported_with_its_class(make_own, parts, message, settings):
    scheme = make_own(**parts, **settings)

    def go_on():
        for _ in range(100):
            scheme.step()
    with pytest.raises(ContractError, match=message):
        go_on()


class WrongLoss(DQN):
    def losses(self, batch):
        losses, measures, _ = super().losses(batch)
        return losses, measures


@pytest.mark.timeout(60)
def test_a_contract_violation_in_a_replay_algorithm_is_reported():
    envs = VecEnv.create_factory(CountingEnv, None, 2)
    scheme = Scheme(
        WrongLoss.create_factory(start_steps=8),
        QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,)),
        ReplayBuffer.create_factory(64, rollout_size=4), envs, runtime="threads", seed=1, **TWO_WORKERS)

    def go_on():
        for _ in range(100):
            scheme.step()
    try:
        with pytest.raises(ContractError, match=r"WrongLoss.losses\(\) returned a tuple; expected three values"):
            go_on()
    finally:
        scheme.stop()


class LateRewards(GAEBuffer):
    """A storage whose rollouts have float64 rewards, except the first one."""

    num_rollouts = 0

    def get_all_buffer_data(self, copy=True):
        rollout, self.num_rollouts = super().get_all_buffer_data(copy), self.num_rollouts + 1
        return replace(rollout, reward=rollout.reward.double()) if self.num_rollouts > 1 else rollout

    def estimate(self, rollout, recompute=False):
        return super().estimate(replace(rollout, reward=rollout.reward.float()), recompute)


class LateStarts(GAEBuffer):
    """A storage whose batches have integers in `done`, except the first one of each pass."""

    def generate_batches(self, *args, **kwargs):
        for number, batch in enumerate(super().generate_batches(*args, **kwargs)):
            yield replace(batch, done=batch.done.int()) if number else batch


@pytest.mark.parametrize(("storage", "message"), [
    (LateRewards, r"LateRewards.get_all_buffer_data\(\) returned 'reward' as .* float64; expected dtype float32"),
    (LateStarts, r"LateStarts.generate_batches\(\) returned 'done' as a tensor .* int32; expected dtype bool"),
])
@pytest.mark.parametrize("settings", [{}, TWO_WORKERS], ids=["central", "async collection"])
def test_a_storage_that_changes_its_data_late_is_found_by_check_data(make_scheme, storage, message, settings):
    scheme = make_scheme(CountingEnv, storage=storage, **settings)
    for _ in range(6):
        scheme.step()  # by default, only the first batch is checked, so that neither change is noticed
    scheme.stop()
    scheme = make_scheme(CountingEnv, storage=storage, check_data="always", **settings)  # builds the agent anew
    with pytest.raises(ContractError, match=message):
        [scheme.step() for _ in range(20)]


@pytest.mark.parametrize("settings", SCHEMES.values(), ids=SCHEMES)
def test_data_of_the_library_pass_check_data(make_scheme, settings):
    scheme = make_scheme(CountingEnv, check_data="always", **settings)
    for _ in range(6):
        assert math.isfinite(scheme.step()["loss"])


REPLAYS = {"central": {}, "async collection": TWO_WORKERS, "one shard": {**TWO_WORKERS, "num_replay_workers": 1},
           "two shards": {**TWO_WORKERS, "num_replay_workers": 2}}


@pytest.fixture
def make_dqn():
    """Return a function that makes a scheme that learns with DQN, or with R2D2 from a replay of sequences."""
    schemes = []

    def make(storage=ReplayBuffer, **settings):
        envs, has_memory = VecEnv.create_factory(CountingEnv, None, 2), issubclass(storage, SequenceBuffer)
        schemes.append(Scheme(
            (R2D2 if has_memory else DQN).create_factory(start_steps=16, update_every=8, mini_batch_size=8),
            QActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,),
                                  recurrent_net="gru" if has_memory else None),
            storage.create_factory(256, rollout_size=4,
                                   **({"length": 5, "burn_in": 3, "period": 5} if has_memory else {})),
            envs, runtime="threads", seed=1, **settings))
        return schemes[-1]
    yield make
    for scheme in schemes:
        scheme.stop()


class DoubleReturns(ReplayBuffer):
    def sample(self, batch_size):
        batch = super().sample(batch_size)
        return batch and replace(batch, ret=batch.ret.double())


class ColumnsOfWeights(ReplayBuffer):
    def sample(self, batch_size):
        batch = super().sample(batch_size)
        return batch and replace(batch, weight=batch.weight[:, None])


class LateActions(ReplayBuffer):
    """A replay whose actions are real numbers, except in its first batch."""

    num_batches = 0

    def sample(self, batch_size):
        batch, self.num_batches = super().sample(batch_size), self.num_batches + 1
        return replace(batch, action=batch.action.float()) if self.num_batches > 1 else batch


class WrongSamples(ReplayBuffer):
    def sample(self, batch_size):
        batch = super().sample(batch_size)
        return batch and replace(batch, num_samples=2)


class ShortSequences(SequenceBuffer):
    def sample(self, batch_size):
        batch = super().sample(batch_size)
        return batch and replace(batch, valid=batch.valid[1:])


WRONG_REPLAYS = {
    DoubleReturns: r"DoubleReturns.generate_batches\(\) returned 'ret' as a tensor of shape \(8,\) and dtype float64; "
                   r"expected a tensor of shape \(8,\) and dtype float32",
    ColumnsOfWeights: r"returned 'weight' as a tensor of shape \(8, 1\) .*; expected a tensor of shape \(8,\) and",
    LateActions: r"returned 'action' as a tensor .* float32; expected dtype int64, 1 axes .* as at first",
    WrongSamples: r"returned a batch with num_samples=2; expected the number of its valid samples, 8",
    ShortSequences: r"returned 'valid' as a tensor of shape \(4, 8\) .*; expected .* \(5, 8\) and dtype bool",
}


@pytest.mark.parametrize("storage", WRONG_REPLAYS, ids=lambda storage: storage.__name__)
@pytest.mark.parametrize("settings", REPLAYS.values(), ids=REPLAYS)
def test_a_replay_with_wrong_data_is_found_by_check_data(make_dqn, storage, settings):
    scheme = make_dqn(storage, check_data="always", **settings)
    with pytest.raises(ContractError, match=WRONG_REPLAYS[storage]):
        [scheme.step() for _ in range(20)]


@pytest.mark.parametrize("storage", [ReplayBuffer, SequenceBuffer])
@pytest.mark.parametrize("settings", REPLAYS.values(), ids=REPLAYS)
def test_replay_of_the_library_passes_check_data(make_dqn, storage, settings):
    scheme = make_dqn(storage, check_data="always", **settings)
    while scheme.version < 4:
        scheme.step()


@pytest.mark.parametrize("shards", [0, 2])
def test_replay_of_several_policies_passes_check_data(shards):
    envs = MultiAgentVecEnv.create_factory(MatchingGame, None, vec_env_size=2, policy_of="independent")
    algo = DQN.create_factory(start_steps=16, update_every=8, mini_batch_size=8)
    agent = multi_agent(envs, algo, functools.partial(QActor.create_factory, hidden_sizes=(4,)),
                        ReplayBuffer.create_factory(64, rollout_size=4))
    scheme = Scheme(*agent, envs, runtime="threads", seed=1, check_data="always",
                    **({**TWO_WORKERS, "num_replay_workers": shards} if shards else {}))
    try:
        while scheme.version < 4:
            scheme.step()
    finally:
        scheme.stop()


class DoubleGradients(PPO):
    def compute_gradients(self, batch):
        gradients, info = super().compute_gradients(batch)
        return [gradient.double() for gradient in gradients], info


@pytest.mark.parametrize("settings", SCHEMES.values(), ids=SCHEMES)
def test_gradients_with_a_wrong_dtype_are_found_by_check_data(make_scheme, settings):
    scheme = make_scheme(algo=DoubleGradients.create_factory(), check_data="always", **settings)
    message = r"DoubleGradients.compute_gradients\(\) returned 'gradient 0' as .* float64; expected .* float32"
    with pytest.raises(ContractError, match=message):
        scheme.step()


def test_gradients_are_checked_when_they_arrive(make_scheme, monkeypatch):
    def received(message, now, right=remote.receive):
        gradients, traffic = right(message, now)
        return replace(gradients, vectors=[vector[1:] for vector in gradients.vectors]), traffic
    monkeypatch.setattr(remote, "receive", received)
    scheme = make_scheme(num_grad_workers=2, check_data="always")
    with pytest.raises(ContractError, match=r"PPO.compute_gradients\(\) in GWorker [12] returned 'gradient 0' as"):
        scheme.step()


class DoubleState(PPO):
    """An algorithm whose acting state is float64 after the first update."""

    is_updated = False

    def apply_gradients(self, gradients=None):
        self.is_updated = True
        return super().apply_gradients(gradients)

    def acting_state(self):
        state = super().acting_state()
        return {name: tensor.double() for name, tensor in state.items()} if self.is_updated else state


@pytest.mark.parametrize("settings", [{"num_col_workers": 2}, TWO_WORKERS, {"num_grad_workers": 2}], ids=str)
def test_weights_with_a_wrong_dtype_are_found_by_check_data(make_scheme, settings):
    scheme = make_scheme(algo=DoubleState.create_factory(), **settings)
    for _ in range(4):
        scheme.step()
    scheme.stop()
    scheme = make_scheme(algo=DoubleState.create_factory(), check_data="always", **settings)
    message = r"DoubleState.acting_state\(\) returned 'all' as a numpy array .* float64; expected dtype float32"
    with pytest.raises(ContractError, match=message):
        [scheme.step() for _ in range(200)]
