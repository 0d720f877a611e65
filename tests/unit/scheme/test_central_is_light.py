"""Check that schemes without workers on Ray never import Ray."""

from __future__ import annotations

SCRIPT = """
import sys, threading
import pytorchrl as prl
envs = prl.VecEnv.create_factory("CartPole-v1", vec_env_size=2)
for settings in (
        {}, {"col_communication": "asynchronous"}, {"grad_communication": "asynchronous"},
        {"num_col_workers": 2, "num_grad_workers": 2, "runtime": "threads"}):
    scheme = prl.Scheme(
        prl.PPO.create_factory(num_epochs=1),
        prl.OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
        prl.GAEBuffer.create_factory(16), envs, envs, seed=1, **settings)
    for _ in range(6):
        scheme.step()
    scheme.start_evaluation(2)
    assert scheme.wait_evaluation(60.0).returns, settings
    scheme.stop()
    assert scheme.version >= 6, settings
    loaded = [name for name in sys.modules if name.split(".")[0] == "ray"]
    assert not loaded, (settings, loaded)
    assert threading.active_count() == 1, (settings, threading.enumerate())
"""


def test_central_schemes_do_not_import_ray(run_forked):
    result = run_forked("-c", SCRIPT)
    assert result.returncode == 0, result.stderr
