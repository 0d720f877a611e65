"""Check that each worker with an actor of its own acts on its own CUDA stream, and the learner on the default one."""

from __future__ import annotations

import pytest
import torch

from pytorchrl import ASYNC, IMPALA, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv, VTraceBuffer

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
TWO = {"num_col_workers": 2}
seen = {"act": set(), "grad": set(), "weights": set()}


def see(task):
    seen[task].add(torch.cuda.current_stream(GPU))


class StreamActor(OnPolicyActor):
    """An actor that notes the current stream at each action."""

    def act(self, *args, **kwargs):
        see("act")
        return super().act(*args, **kwargs)

class Noting:
    """Part of an algorithm that notes the current stream at each gradient and at each change of the weights."""

    def compute_gradients(self, batch):
        see("grad")
        return super().compute_gradients(batch)

    def load_acting_state(self, state):
        see("weights")
        super().load_acting_state(state)


class StreamPPO(Noting, PPO):
    """PPO that notes streams."""


class StreamIMPALA(Noting, IMPALA):
    """IMPALA that notes streams."""


@pytest.fixture
def run():
    """Return a function that runs a scheme and returns its final parameters."""
    schemes = []

    def make(algorithm, storage, **settings):
        for streams in seen.values():
            streams.clear()
        envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
        actor = StreamActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(8,))
        schemes.append(Scheme(algorithm.create_factory(), actor, storage.create_factory(8), envs, device=GPU, seed=1,
                              **{"runtime": "simulated"} | settings))
        for _ in range(12):
            schemes[-1].step()
        return schemes[-1].acting_state()
    yield make
    for scheme in schemes:
        scheme.stop()


@pytest.mark.parametrize(("algorithm", "storage", "settings", "number"), [
    (PPO, GAEBuffer, TWO, 2), (IMPALA, VTraceBuffer, {"col_communication": ASYNC}, 1),
    (IMPALA, VTraceBuffer, {"col_communication": ASYNC, **TWO}, 2),
    (IMPALA, VTraceBuffer, {"col_communication": ASYNC, **TWO, "inference": "central"}, 1),
    (IMPALA, VTraceBuffer, {"col_communication": ASYNC, "num_grad_workers": 2}, 2),
], ids=str)
@pytest.mark.parametrize("runtime", ["threads", "simulated"])
def test_each_actor_has_its_own_stream(run, runtime, algorithm, storage, settings, number):
    """Check it, and that the streams do not change the results of the simulated runtime."""
    kind = {PPO: StreamPPO, IMPALA: StreamIMPALA}[algorithm]
    if "inference" not in settings:
        settings = {**settings, "col_device": GPU}
    state = run(kind, storage, runtime=runtime, **settings)
    default = torch.cuda.default_stream(GPU)
    assert len(seen["act"]) == number
    assert default not in seen["act"]
    assert seen["grad"] == {default}
    assert seen["weights"] >= seen["act"]
    assert torch.cuda.current_stream(GPU) == default
    if runtime == "simulated":
        expected = run(algorithm, storage, **settings)
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_a_learner_that_collects_itself_uses_one_stream(run):
    run(StreamPPO, GAEBuffer)
    assert seen["act"] == seen["grad"] == {torch.cuda.default_stream(GPU)}
