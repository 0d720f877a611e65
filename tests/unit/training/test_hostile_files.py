"""Give hostile files to every function that reads a run, in a process with little memory, and expect clear errors."""

from __future__ import annotations

import itertools
import json
import os
import shutil

import pytest

from pytorchrl import GAEBuffer, Learner, OnPolicyActor, PPO, Scheme, VecEnv

# Reads the runs in the folder of argument 1 with every reader, and prints a list of [run, reader, outcome].
# Another 1 GiB of memory is allowed after the imports.
SCRIPT = '''
import contextlib, gc, io, json, resource, signal, sys
from pathlib import Path
import pytorchrl as prl
from pytorchrl import cli
from pytorchrl.training.configuration import load_config
from pytorchrl.errors import PyTorchRLError
from pytorchrl.learner.files import RunFiles

def command(*arguments):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(list(arguments))
    if code == 2:
        raise PyTorchRLError(err.getvalue())
    if code:
        raise RuntimeError(f"exit code {code}: {err.getvalue()}")

READERS = {
    "load": lambda run: prl.load(run).evaluate(1),
    "resume": lambda run: RunFiles(run).newest_checkpoint(),
    "config": lambda run: load_config(run / "run.json"),
    "enjoy": lambda run: command("enjoy", str(run), "--episodes", "1"),
    "report": lambda run: command("report", str(run), "--out", str(run / "report.html")),
    "plot": lambda run: command("plot", str(run)),
    "compare": lambda run: command("compare", f"a={run}", f"b={run}", *["--json"] * (run.name not in DRAWN)),
}
DRAWN = {"control characters"}  # drawing takes most of the time, and depends only on the names of environments
prl.load(sys.argv[2]).evaluate(1)  # everything is imported before memory is limited
command("report", sys.argv[2], "--out", sys.argv[2] + "/report.html")
command("plot", sys.argv[2])
gc.freeze()  # the collections below skip what is imported
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), resource.RLIM_INFINITY))
for run in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
    for name, read in READERS.items():
        signal.alarm(100)  # ends the process if a reader hangs
        try:
            read(run)
            outcome = "read"
        except PyTorchRLError as error:
            outcome = "error" if str(error).strip() else "empty error"
        except BaseException as error:
            outcome = f"raw {type(error).__name__}: {str(error)[:300]}"
        print(json.dumps([run.name, name, outcome]), flush=True)
    gc.collect()  # parts of networks that did not fit into memory
'''
FORMS = ("pipe", "sparse", "directory", "endless", "random")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Return the directory of a valid run with a checkpoint."""
    path = tmp_path_factory.mktemp("runs") / "good"
    envs = VecEnv.create_factory("CartPole-v1")
    actor = OnPolicyActor.create_factory(envs.observation_space, envs.action_space, hidden_sizes=(4,))
    scheme = Scheme(PPO.create_factory(num_epochs=1, num_mini_batch=1), actor, GAEBuffer.create_factory(64), envs, envs,
                    seed=1)
    with Learner(scheme, 256, path, progress=False, tensorboard=False, checkpoint_every=128) as learner:
        learner.train()
    return path


def descriptions(good, folder):
    """Return name -> contents of a hostile `run.json`."""
    run = json.loads((good / "run.json").read_text())
    del run["sha256"]

    def changed(**values):
        return json.dumps({**run, **values}).encode()

    def part(factory, **options):
        agent = json.loads(json.dumps(run["agent"]))
        agent[factory]["options"] |= options
        return changed(agent=agent)

    def env(env_fn, **options):
        return part("train_envs_factory", env_fn=env_fn, **options)

    def actor(**options):
        return part("actor_factory", **options)
    return {
        "empty": b"", "binary": os.urandom(1000), "list": b"[]", "number": b"1", "null": b"null",
        "deep": b"[" * 10**6, "deep object": b'{"recipe":' * 10**5, "long number": b'{"seed": ' + b"9" * 10**6 + b"}",
        "nan": changed(seed=float("nan")), "utf-16": json.dumps(run).encode("utf-16"), "zeros": bytes(10**6),
        "seed text": changed(seed="1; touch canary"), "agent list": changed(agent=[1]),
        "agent text": changed(agent="x"), "agent empty parts": changed(agent={"algo_factory": {}}),
        "function": env({"__code__": "os:system"}),
        "partial": env({"__partial__": [{"__code__": "os:system"}, ["touch canary"], {}]}),
        "eval": env({"__code__": "builtins:eval"}), "module beside": env("evil:CartPole-v1"),
        "module dotted": env("evil.package"), "module in runs": env(f"{folder.name}.evil:CartPole-v1"),
        "unknown class": part("algo_factory", noise_std={"__code__": "evil:Class"}),
        "huge network": actor(hidden_sizes=[10**6, 10**6]), "size of 64 bits": actor(hidden_sizes=[2**63]),
        "negative size": actor(hidden_sizes=[-1]), "huge vector": env("CartPole-v1", vec_env_size=10**12),
        "control characters": env("\x1b]0;owned\x07\x1b[2J"),
        "wrong place": actor(observation_space={"__space__": ["action_space", "x", "y"]}),
        "bad schedule": part("algo_factory", lr={"schedule": ["linear"] * 1000}),
        "wrong checksum": json.dumps({**run, "sha256": "0" * 64}).encode(),
        "checksum list": json.dumps({**run, "sha256": []}).encode(),
    }


def make_hostile(path, form):
    """Replace a file by another kind of file."""
    path.unlink()
    if form == "pipe":
        os.mkfifo(path)
    elif form == "directory":
        path.mkdir()
    elif form == "endless":
        path.symlink_to("/dev/zero")
    elif form == "random":
        path.write_bytes(os.urandom(100_000))
    else:
        with open(path, "wb") as opened:
            opened.truncate(20 << 30)  # a sparse file, which needs no room on the disk


def hostile_runs(good, folder):
    """Make a copy of the run for each hostile file, and return their names."""
    for name, content in descriptions(good, folder).items():
        shutil.copytree(good, folder / name)
        (folder / name / "run.json").write_bytes(content)
    for file, form in itertools.product(("run.json", "model.pt", "metrics.jsonl"), FORMS):
        shutil.copytree(good, folder / f"{file} {form}")
        make_hostile(folder / f"{file} {form}" / file, form)
    for form in FORMS:
        shutil.copytree(good, folder / f"checkpoint {form}")
        for path in (folder / f"checkpoint {form}" / "checkpoints").iterdir():
            make_hostile(path, form)
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.timeout(600)
def test_hostile_files_give_errors_in_little_memory_and_execute_nothing(good, tmp_path, run_forked):
    folder = tmp_path / "downloads"
    folder.mkdir()
    names = hostile_runs(good, folder)
    for place in (tmp_path, folder, *(folder / name for name in names)):
        (place / "evil.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'canary')!r}).touch()\n")
    (tmp_path / "read.py").write_text(SCRIPT)
    result = run_forked("read.py", folder, good, cwd=tmp_path, timeout=500)
    assert result.returncode == 0, result.stdout[-500:] + result.stderr[-3000:]
    found = [json.loads(line) for line in result.stdout.splitlines()]
    outcomes = {(name, reader): outcome for name, reader, outcome in found}
    raw = [entry for entry in found if entry[2] not in ("read", "error")]
    assert raw == [], "\n".join(map(str, raw))
    assert len(names) >= 40
    assert len(outcomes) == 7 * len(names)
    assert not list(tmp_path.rglob("canary"))
    # Everything that needs the hostile file is refused. `report` tolerates damage, because it also shows running runs.
    # Training environments are not built for playing, so their number does not matter.
    of_agent = {name for name in names if not name.startswith(("metrics", "checkpoint"))} - {"huge vector"}
    for reader in ("load", "enjoy"):
        assert {name for name in names if outcomes[name, reader] == "error"} == of_agent
    assert {name for name in names if outcomes[name, "plot"] == "error"} >= {
        name for name in names if name.startswith("metrics")}
    assert {name for name in names if outcomes[name, "resume"] == "error"} >= {
        name for name in names if name.startswith(("metrics", "checkpoint"))}
