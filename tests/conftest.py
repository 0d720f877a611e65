"""Fixtures and hooks that several folders of tests share."""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import gc
import glob
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import forkserver
from tests.distribution import BriefReports, Distribution
from tests.forkserver import ForkServer, write_executable

ROOT = Path(__file__).parent.parent


# Number of CPUs that the shared Ray cluster offers, regardless of how many the machine has.
RAY_CPUS = 4
# Name under which the main process tells the processes of pytest-xdist the value of the fixture `forked_python`.
FORKED_PYTHON = "forked_python"
# Folders of tests in the order in which they run; quick tests run before tests that take minutes.
FOLDERS = ("unit", "emulated_gpu", "integration", "examples", "docs", "learning")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background processes, and their children, ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def seeds(usual, all_of_them):
    """Return seeds for `parametrize`: the usual ones unmarked, and the others with the marker `thorough`.

    `usual` is a number, which stands for that many first seeds, or the seeds themselves.
    """
    chosen = range(usual) if isinstance(usual, int) else usual
    return [*chosen, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(all_of_them)
                       if seed not in chosen)]


def pairwise(combinations):
    """Return combinations for `parametrize`: a few that contain each pair of values unmarked, the others `thorough`.

    `combinations` are all combinations of four settings with two values each, in the order of `itertools.product`. The
    number of a combination then has one bit per setting, and each two bits take all four pairs of values among the
    numbers with no bit or with three bits set.
    """
    return [combination if number.bit_count() in (0, 3) else pytest.param(
        *combination.values, id=combination.id, marks=[*combination.marks, pytest.mark.thorough])
        for number, combination in enumerate(combinations)]


def pytest_collection():
    """Suspend garbage collection while tests are collected, because nothing of what is built then becomes garbage."""
    gc.disable()


def pytest_collection_finish():
    """Exclude what was collected, a million objects, from garbage collection from now on, and collect less often."""
    gc.freeze()
    gc.set_threshold(forkserver.GC_THRESHOLD)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Run quick unit tests first. With several processes, one of them starts Ray and runs all tests that need it.

    With the marker `every(n)`, all cases of a test but every n-th are thorough. If n and the number of values of each
    parameter have no common divisor, the other cases contain each value.
    """
    numbers = collections.Counter()
    for item in items:
        marker = item.get_closest_marker("every")
        if marker is not None and item.get_closest_marker("thorough") is None:
            test = item.nodeid.partition("[")[0]
            if numbers[test] % marker.args[0]:
                item.add_marker(pytest.mark.thorough)
            numbers[test] += 1
        for name in ("ray", "compiled"):
            if item.get_closest_marker(name) is not None:
                item.add_marker(pytest.mark.xdist_group(name))
        if (marker := item.get_closest_marker("gpu")) is not None:
            import torch  # only here, because importing it takes seconds

            needed = marker.kwargs.get("count", 1)
            item.add_marker(pytest.mark.skipif(
                torch.cuda.device_count() < needed, reason=f"torch sees too few GPUs here; needed: {needed}"))
        if item.get_closest_marker("compiled") is not None:  # whichever of these tests imports the compiler first
            item.add_marker(pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"))
    items.sort(key=place_of)


def place_of(item):
    """Return the sort key of a test; tests with equal keys keep their order."""
    folder = item.path.relative_to(ROOT / "tests").parts[0] if item.path.is_relative_to(ROOT / "tests") else "unit"
    # With several processes, the tests with Ray start first, because they take longest.
    if item.get_closest_marker("ray") is not None:
        return 0 if "PYTEST_XDIST_WORKER" in os.environ else 2, False, FOLDERS.index(folder)
    is_slow = item.get_closest_marker("slow") is not None
    # Long tests start before the short ones of later folders, so that all processes end at about the same time.
    return 1 if folder == "unit" and not is_slow else 3, not is_slow, FOLDERS.index(folder)


@pytest.fixture(autouse=True)
def never_compile(monkeypatch):
    """Let `compile="auto"` never compile: many tests have a large `target_steps`, and stop after a few updates."""
    rule = sys.modules.get("pytorchrl.agent.algorithms.compile_rule")
    if rule is not None:
        monkeypatch.setattr(rule, "has_compiler", lambda: False)


def pytest_runtest_setup(item):
    """Fail if pytest or pytest-xdist ignores test groups; otherwise, each process would start its own Ray cluster."""
    group = item.get_closest_marker("xdist_group")
    is_checked = group is not None and getattr(item.config.option, "loadgroup", False)
    if is_checked and not item.nodeid.endswith(f"@{group.args[0]}"):
        pytest.fail(f"pytest {pytest.__version__} ignores groups with this pytest-xdist; install the versions of "
                    "constraints.txt", pytrace=False)


class Failures:
    """A plugin that shows each failure immediately; with several processes, pytest shows failures only at the end."""

    def __init__(self, config):
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.failed:
            reporter = self._config.pluginmanager.get_plugin("terminalreporter")
            reporter.ensure_newline()
            reporter.write_line(f"FAILED {report.nodeid} ({report.when})\n{report.longreprtext}", red=True)


class Watchdog:
    """A plugin that ends this process with the stacks of all threads if a test hangs beyond its timeout.

    The plugin pytest-timeout raises an exception in the main thread once, at the timeout. The test goes on if code
    catches this exception, if the cleanup after it hangs, or if the main thread is not executing Python code. The
    watchdog waits twice as long, needs no Python code, and names the test. pytest-xdist then reports that the process
    crashed in this test, and runs the other tests in a new process.
    """

    def __init__(self):
        self._stderr = os.dup(sys.__stderr__.fileno())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        marker = item.get_closest_marker("timeout")
        usual_s = float(item.config.getoption("timeout") or item.config.getini("timeout"))
        timeout_s = marker.args[0] if marker else usual_s
        faulthandler.dump_traceback_later(2 * timeout_s + 60, exit=True, file=self._stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


class SharedForks:
    """A plugin that starts one fork server for all processes of pytest-xdist, which are forks; see `forkserver.py`."""

    def __init__(self, config):
        self._server = ForkServer(process_environment())
        config.option.tx = [f"{tx}//python={self._server.python}" if tx == "popen" else tx for tx in config.option.tx]

    @pytest.hookimpl(optionalhook=True)  # only pytest-xdist has this hook
    def pytest_configure_node(self, node):
        node.workerinput[FORKED_PYTHON] = self._server.python

    def pytest_unconfigure(self):
        self._server.close()


def pytest_configure(config):
    config.pluginmanager.register(Watchdog())
    if not hasattr(config, "workerinput"):  # only the main process writes to the terminal
        config.pluginmanager.register(Failures(config))
        if config.getoption("dist", "no") != "no":
            config.pluginmanager.register(SharedForks(config))
            config.pluginmanager.register(Distribution(config))
        return
    config.pluginmanager.register(BriefReports())
    # Only one thread of the simulated runtime runs at a time. A simulation takes a tenth less time if all of its
    # threads use the same core. The first process is not bound to a core, because it runs the tests with Ray.
    number, cores = int(config.workerinput["workerid"].removeprefix("gw")), sorted(os.sched_getaffinity(0))
    if number:
        os.sched_setaffinity(0, {cores[(number - 1) % len(cores)]})


class FakeScheme:
    """A scheme without workers: each step "collects" and uses `steps_per_update` env steps."""

    learns_offline = False

    def __init__(self, *, steps_per_update=10, on_step=None, on_start=None, can_test=True):
        self.steps_per_update, self._on_step, self._on_start = steps_per_update, on_step, on_start
        self.seed, self.version, self.used = 7, 0, 0
        self.settings = {"col_communication": "asynchronous", "grad_communication": "synchronous", "record": None,
                         "replay": None, "device": "cpu", "runtime": "threads", "num_col_workers": 1,
                         "num_grad_workers": 1}
        self.updates_per_train_batch, self.num_parameters = None, 100
        self.agent = SimpleNamespace(
            algo_factory=SimpleNamespace(options=None), test_envs_factory=object() if can_test else None, as_dict=dict,
            train_envs_factory=SimpleNamespace(
                observation_space=None, action_space=None, num_envs=1))
        self.calls = []
        self.lost = 0
        self.finished = []
        self.evaluations = []
        self._stopped = False
        self.replay_is_over = None

    def start(self, target_steps, announce=None):
        if announce is not None:
            announce("starting ...")
        self.calls.append(("start", target_steps))
        if self._on_start:
            self._on_start()

    def step(self):
        if self._on_step:
            self._on_step(self)
        self.version += 1
        self.used += self.steps_per_update
        self.finished.append(SimpleNamespace(env_return=float(self.version), length=10, policy_returns=None))
        return {"loss": float(self.version), "entropy": 0.5}

    @property
    def env_steps(self):
        return self.used + 5

    def ledger(self):
        dropped = {"policy_lag": 0, "shutdown": 5 if self._stopped else 0}
        return {"collected": self.used + 5, "in_flight": 0 if self._stopped else 5, "queued": 0,
                "consumed_unique": self.used - self.lost, "consumed": 4 * self.used, "resident": 0,
                "evicted": 0, "dropped": dropped}

    def metrics(self):
        return {"updates": self.version, "policy_lag": {"mean": 0.5, "max": 2, "p50": 0.0, "p90": 1.0},
                "queue_size": 1, "workers": 0, "workers_missing": 0, "envs_restarted": 0}

    def episodes(self):
        finished, self.finished = self.finished, []
        return finished

    def update_algorithm_parameter(self, name, value):
        self.calls.append(("update_algorithm_parameter", name, value))

    def save_model(self, path):
        self.calls.append(("save_model", path))
        Path(path).write_bytes(b"model")
        return path

    def start_evaluation(self, num_episodes, timeout_s=None):
        from pytorchrl.agent.data import Evaluation  # imports torch, which the main process lacks

        self.calls.append(("start_evaluation", num_episodes))
        self.evaluations.append(Evaluation(self.version, (float(self.version),) * num_episodes, (3,) * num_episodes))

    def poll_evaluation(self):
        return self.evaluations.pop() if self.evaluations else None

    def wait_evaluation(self, timeout_s):
        return self.poll_evaluation()

    def stop(self):
        self.calls.append(("stop",))
        self._stopped = True
        return self.ledger()


@pytest.fixture
def fake_scheme():
    """Return the class `FakeScheme`."""
    return FakeScheme


@pytest.fixture
def run_python(tmp_path):
    """Return a function that runs a script in a new process, with one torch thread, in an empty folder."""
    return partial(run_process, sys.executable, tmp_path)


def run_process(python, folder, *arguments, timeout=60, **options):
    """Run a script with the executable `python`, and return its exit code and output."""
    return subprocess.run(
        [python, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, check=False,
        **{"cwd": folder, "env": process_environment(), **options})


@pytest.fixture(scope="session")
def ray_python(forked_python, tmp_path_factory):
    """Path of an executable with which Ray starts its workers and agents as forks, and other processes afresh."""
    return write_executable(
        tmp_path_factory.mktemp("ray") / "python",
        '[ "$1" = -u ] && shift\n'  # Ray starts its agents with this flag, without which their output is buffered
        'case "$1" in */default_worker.py|*/dashboard/agent.py|*/runtime_env/agent/main.py)\n'
        f'exec {shlex.quote(forked_python)} "$@";; esac\n'
        f'exec {shlex.quote(sys.executable)} "$@"')


@pytest.fixture(scope="session")
def shared_ray(ray_python):
    """A Ray cluster for this session, started by the first test that needs it. Workers are forks."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    # By default, Ray's workers have a lower priority than all other processes, and starve on a busy machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    directory = tempfile.mkdtemp(prefix="prl-test-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", ray_python)  # Ray starts its processes with this executable
        ray.init(
            address="local", num_cpus=RAY_CPUS, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
            object_store_memory=200 * 2**20, _temp_dir=directory)
    yield ray
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def forked_python(request):
    """Path of an executable that runs a script in a fork of a process that has imported torch and pytorchrl."""
    shared = getattr(request.config, "workerinput", {}).get(FORKED_PYTHON)
    server = None if shared else ForkServer(process_environment())
    forkserver.current = shared or server.python
    yield forkserver.current
    if server is not None:
        server.close()


@pytest.fixture
def quick_processes(forked_python, monkeypatch):
    """Make the worker processes of a test forks like those of `run_forked`, and send classes of tests by value."""
    import cloudpickle

    monkeypatch.setattr(sys, "executable", forked_python)  # the runtime starts its fork server with it
    modules = [module for name, module in sys.modules.items() if name.startswith("tests.") and hasattr(
        module, "__file__")]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def run_forked(tmp_path, forked_python):
    """Return a function that runs a script with `forked_python`, and otherwise behaves like `run_python`."""
    return partial(run_process, forked_python, tmp_path)


@pytest.fixture
def run_on_ray(run_forked, shared_ray):
    """Return a function like `run_forked`, except that its scripts join the Ray cluster of the tests."""
    return partial(run_forked, env=process_environment(RAY_ADDRESS=shared_ray.get_runtime_context().gcs_address))


@pytest.fixture
def run_with_ray(run_forked, ray_python):
    """Return a function like `run_forked`, except that a Ray that the script starts forks its workers, too."""
    return partial(run_forked, env=process_environment(FORK_EXECUTABLE=ray_python))


@pytest.fixture
def start_python(tmp_path):
    """Return a function that starts a script in a separate process, which is killed after the test if it still runs."""
    with started_processes(sys.executable, tmp_path) as start:
        yield start


@pytest.fixture
def start_forked(tmp_path, forked_python):
    """Return a function like `start_python`, except that the script runs in a fork, which has imported torch."""
    with started_processes(forked_python, tmp_path) as start:
        yield start


@contextlib.contextmanager
def started_processes(python, folder):
    """Yield a function that starts a script with the executable `python`, and kill its processes at the end.

    The keywords of the function are environment variables of the script.
    """
    started = []

    def start(*arguments, **variables):
        process = subprocess.Popen(
            [python, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=folder, env=process_environment(**variables), start_new_session=True)
        started.append(process)
        return process
    try:
        yield start
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def process_environment(**variables):
    """Return the environment of this process, with the package on the path, one thread for torch, and `variables`."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}


def processes_of(directory):
    """Return the command lines, on the whole machine, that contain a directory."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as file:
                command = file.read()
        except OSError:  # the process has ended
            continue
        if directory.encode() in command:
            found.append(command)
    return found


class ManualClock:
    """A clock that the test advances."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def result_of(completed):
    """Return the JSON that a successful script printed after "result: ", ignoring all other lines of its output."""
    printed = f"exit status {completed.returncode}\n{completed.stdout}\n{completed.stderr[-5000:]}"
    assert completed.returncode == 0, printed
    lines = [line.removeprefix("result: ") for line in completed.stdout.splitlines() if line.startswith("result: ")]
    assert len(lines) == 1, printed
    return json.loads(lines[0])
