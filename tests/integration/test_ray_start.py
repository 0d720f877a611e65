"""Test the startup and shutdown of Ray: no processes or files are left behind, and errors state their cause."""

from __future__ import annotations

import glob
import json
import time

import pytest

from tests.conftest import processes_of, result_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(170)]

SCRIPT = """
import glob, json, os, sys, time
from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.errors import StartError
envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
scheme = Scheme(
    PPO.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
    GAEBuffer.create_factory(16), envs, seed=1, num_col_workers=2, **json.loads(sys.argv[1]))
assert "ray" not in sys.modules
start = time.monotonic()
try:
    scheme.step()
except StartError as error:
    result = {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    print("result:", json.dumps(result))
    scheme.stop()
    sys.exit()
# Other tests may run at the same time.
during = [name for name in glob.glob("/tmp/prl-*") if glob.glob(f"{name}/r/session_*_{os.getpid()}")]
modes = [oct(os.stat(name).st_mode & 0o777) for name in during]
commands = []
for path in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        command = open(path, "rb").read().decode(errors="replace")
    except OSError:  # the process has ended
        continue
    if any(name in command for name in during):
        commands.append(command)
start = time.monotonic()
ledger = scheme.stop()
seconds = time.monotonic() - start
import ray
try:
    ray.put(1)
except Exception as error:
    after = str(error)
else:
    after = "started"
result = {"directories": during, "modes": modes, "commands": commands,
          "seconds": seconds, "ledger": ledger, "after": after}
print("result:", json.dumps(result))
"""


def _run(run, settings):
    return result_of(run("-c", SCRIPT, json.dumps(settings), timeout=160))


def test_a_local_ray_leaves_no_processes_or_files(run_with_ray, child_processes):
    before = set(child_processes())
    result = _run(run_with_ray, {})
    assert len(result["directories"]) == 1
    assert result["modes"] == ["0o700"]
    assert any("gcs_server" in command for command in result["commands"])
    unused = ("dashboard/dashboard.py", "monitor.py", "log_monitor.py")
    assert not [command for command in result["commands"] if any(name in command for name in unused)]
    assert result["seconds"] <= 10
    assert "Ray has not been started" in result["after"]
    ledger = result["ledger"]
    assert ledger["collected"] == ledger["consumed_unique"] + ledger["dropped"]["shutdown"]
    assert not set(glob.glob("/tmp/prl-*")) & set(result["directories"])
    deadline = time.monotonic() + 10
    while (left := processes_of(result["directories"][0])) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
    assert set(child_processes()) <= before


def test_an_unreachable_cluster_is_an_error(run_forked):
    result = _run(run_forked, {"address": "127.0.0.1:1"})
    assert result["error"] == "RayConnectionError"
    assert "'127.0.0.1:1'" in result["text"]
    assert result["seconds"] <= 10


ANOTHER_CLUSTER = """
import json, os, ray
from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.errors import RayConnectionError
ray.init(address=os.environ.pop("RAY_ADDRESS"), log_to_driver=False)
host, port = ray.get_runtime_context().gcs_address.split(":")
envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
agent = (PPO.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
         GAEBuffer.create_factory(16), envs)
said = []
for address in (f"localhost:{port}", f"{host}:{port}", f"localhost:{int(port) + 1}", f"10.255.0.1:{port}"):
    scheme = Scheme(*agent, seed=1, num_col_workers=2, address=address)
    try:
        scheme.step()
    except RayConnectionError as error:
        said.append(str(error))
    else:
        said.append("used")
    scheme.stop()
print("result:", json.dumps(said))
"""


def test_an_address_of_another_cluster_is_used_or_refused(run_on_ray):
    """Check that an address is not ignored if Ray is already connected to a cluster: it is used or causes an error."""
    localhost, own, another_port, another_host = result_of(run_on_ray("-c", ANOTHER_CLUSTER, timeout=160))
    assert (localhost, own) == ("used", "used")
    for said in (another_port, another_host):
        assert "uses the Ray cluster at" in said
        assert "ray.shutdown()" in said


def test_resources_that_a_new_local_ray_lacks_are_refused(run_forked):
    result = _run(run_forked, {"col_worker_resources": {"num_gpus": 64}, "col_device": "cuda"})
    assert result["error"] == "InsufficientResourcesError"
    assert "num_gpus=64" in result["text"]
    assert not glob.glob("/tmp/prl-none-*")


NOT_IMPORTABLE = """
import os, sys, types
from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.agent.actors import MLP
from pytorchrl.errors import StartError
module = sys.modules["only_here"] = types.ModuleType("only_here")  # as one that the workers have no path to
class Extractor(MLP):
    pass
Extractor.__module__, module.Extractor = "only_here", Extractor
envs = VecEnv.create_factory("CartPole-v1", vec_env_size=2)
scheme = Scheme(
    PPO.create_factory(),
    OnPolicyActor.create_factory(envs.observation_space, envs.action_space, feature_extractor=Extractor),
    GAEBuffer.create_factory(16), envs, seed=1, num_col_workers=2)
try:
    scheme.step()
except StartError as error:
    print(error)
scheme.stop()
"""


def test_an_error_in_building_a_worker_is_reported(run_on_ray):
    result = run_on_ray("-c", NOT_IMPORTABLE, timeout=160)
    assert "CWorker 1 is lost" in result.stdout, result.stderr
    assert "its start failed: ModuleNotFoundError: No module named 'only_here'" in result.stdout


THREADS = """
import gymnasium, torch
from pytorchrl import PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv

class Threads(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,)), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.low, {}

    def step(self, action):
        return self.observation_space.low, float(torch.get_num_threads()), True, False, {}

envs = VecEnv.create_factory(Threads, vec_env_size=2)
scheme = Scheme(
    PPO.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
    GAEBuffer.create_factory(4), envs, seed=1, num_col_workers=2, num_threads=2, col_num_threads=3)
scheme.step()
print("result:", [sorted({episode.env_return for episode in scheme.episodes()}), torch.get_num_threads()])
scheme.stop()
"""


def test_threads_of_collection_workers(run_on_ray):
    assert result_of(run_on_ray("-c", THREADS, timeout=160)) == [[3.0], 2]


@pytest.mark.parametrize("is_shown", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_startup_reports_immediately_what_it_waits_for(request, is_shown):
    arguments = ["train", "ppo", "--env", "CartPole-v1", "--num-col-workers", "2", "--target-steps", "200",
                 "--num-steps", "32",
                 "--log-dir", "runs/"]
    run = request.getfixturevalue("run_with_ray" if is_shown else "run_on_ray")
    result = run("-m", "pytorchrl", *arguments, *[] if is_shown else ["--no-progress"], timeout=160)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines()
             if line.startswith(("saved in", "starting", "started")) or "steps/s" in line]
    if not is_shown:
        assert lines == []
        return
    assert lines[:3] == ["saved in runs/ppo-CartPole-v1-1", "starting Ray ...", "started 0 of 2 collection workers ..."]
    counts = [line for line in lines[3:] if line.startswith("started")]
    assert counts in (["started 2 of 2 collection workers"],
                      ["started 1 of 2 collection workers ...", "started 2 of 2 collection workers"])
    assert "steps/s" in lines[3 + len(counts)]
