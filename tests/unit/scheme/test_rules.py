"""Check that a scheme rejects wrong settings before it starts anything; each row of `ROWS` is one case."""

from __future__ import annotations

import re
import threading
import warnings

import pytest

from pytorchrl import A2C, ASYNC, PPO, GAEBuffer, OnPolicyActor, Scheme, VecEnv
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.errors import ConfigError, DeviceError

PARALLEL = {"num_col_workers": 2, "num_grad_workers": 2}
COUNTS = ("num_col_workers", "num_grad_workers", "col_in_flight", "queue_size", "broadcast_interval", "num_threads",
          "minibatch_buffer_size", "num_passes", "updates_per_step", "aggregate")
WAIT = {"col_communication": "asynchronous", "max_policy_lag": 3, "on_policy_lag": "wait"}
BY_PIECES = {"train_batch_size": 64, "microbatch_size": 16}
ASYNC_GRADS = {"num_grad_workers": 4, "grad_communication": "asynchronous"}
NAN = float("nan")

# (settings, class of the error, pattern of its message)
ROWS = [
    *(({name: value}, ConfigError, rf"{name} must be a whole number >= 1.*, got {value!r}".replace("(", r"\("))
      for name in COUNTS for value in (0, -1, 1.5, "2", True, None)
      if value is not None or name not in ("col_in_flight", "queue_size")),
    *(({name: value}, ConfigError, rf"{name} must be (a number > 0.0 and <= 1.0|finite), got {value!r}")
      for name in ("col_fraction_workers", "fraction_samples") for value in (0, -0.1, 1.2, NAN, "0.5", True, None)),
    *(({"distribute_gradients": value}, ConfigError,
       f"distribute_gradients must be True or False, got {value!r}") for value in (1, "no", None)),
    *(({name: value}, ConfigError, rf"{name} must be False, True \(lz4\), 'none', 'lz4', 'zstd'.*, got {value!r}")
      for name in ("compress_data_to_send", "compress_grads_to_send", "compress_weights_to_send")
      for value in ("no", "", "auto:", "auto:none", "auto:auto", "lz4:auto")),
    *(({name: value}, ConfigError, rf"{name} must be True or False or a string, got {value!r}")
      for name in ("compress_data_to_send", "compress_grads_to_send", "compress_weights_to_send")
      for value in (1, 0, None, 2.5)),
    ({"num_grad_workers": 2, "compress_grads_to_send": "int4"}, ConfigError,
     "compress_grads_to_send.*got 'int4'; did you mean 'int8'"),
    *(({"num_col_workers": 2, "compress_data_to_send": value}, ConfigError,
       f"compress_data_to_send='{value}': .* is lossy.*log-prob.*give False, True \\(lz4\\), 'none', 'lz4', 'zstd', "
       "'auto'")
      for value in ("fp16", "bf16", "int8", "topk", "auto:bf16")),
    *(({"num_col_workers": 2, "compress_weights_to_send": value}, ConfigError,
       f"compress_weights_to_send='{value}': .* is for gradients.*'fp16', 'bf16', 'auto'") for value in ("int8", "topk",
                                                                                                         "auto:topk")),
    *(({**PARALLEL, f"compress_{kind}_to_send": "auto:bf16", name: "run.json"}, ConfigError,
       f"compress_{kind}_to_send='auto:bf16' decides from measured times.*give 'bf16'")
      for kind in ("grads", "weights") for name in ("record", "replay")),
    *(({name: "asink"}, ConfigError,
       rf"{name} must be one of \['synchronous', 'asynchronous'\], got 'asink'")
      for name in ("col_communication", "grad_communication")),
    *(({name: value}, ConfigError, f"{name}.*got {value!r}")
      for name in ("col_communication", "grad_communication") for value in (None, 3, True)),
    *(({name: "central"}, ConfigError,
       rf"{name} must be one of \['Central', 'Parallel'\] or None, got 'central'; did you mean 'Central'\?")
      for name in ("col_execution", "grad_execution")),
    ({"num_col_workers": 2, "col_execution": "Central"}, ConfigError, "col_execution='Central'.*num_col_workers=2"),
    ({"num_grad_workers": 3, "grad_execution": "Central"}, ConfigError, "grad_execution.*num_grad_workers=3"),
    *(({"queue_timeout_s": value}, ConfigError, f"queue_timeout_s must be (a number > 0.0|finite), got {value!r}")
      for value in (0, -1, NAN, float("inf"), "60", None, True)),
    ({"runtime": "rey"}, ConfigError, "runtime must be one of .*'ray', 'processes', 'threads'.*got 'rey'"),
    ({"runtime": "threads", "address": "10.0.0.1:6379"}, ConfigError,
     "address='10.0.0.1:6379': only with runtime='ray' and remote workers"),
    *(({"placement": value}, ConfigError,
       rf"placement must be one of \[None, 'colocate'\], got {value!r}") for value in ("spread", "", True)),
    *(({"num_grad_workers": 2, "num_col_workers": 2, "placement": "colocate", "runtime": runtime}, ConfigError,
       "placement='colocate': only with runtime='ray' and remote workers; change that, or leave placement out")
      for runtime in ("threads", "simulated")),
    *(({**workers, "placement": "colocate"}, ConfigError, "placement='colocate' places each gradient worker")
      for workers in ({"num_grad_workers": 2}, {"num_col_workers": 2})),
    ({"placement": "colocate"}, ConfigError,
     "placement='colocate': only with runtime='ray' and remote workers; change that, or leave placement out"),
    *(({"device": value}, DeviceError, f"device must be one of the devices visible to torch, .*cpu.*got {value!r}")
      for value in ("cuda:7", "gpu", "")),
    ({"device": 0}, ConfigError, "device must be a string or None, got 0"),
    *(({"seed": value}, ConfigError, f"seed must be a whole number .*got {value!r}")
      for value in (-1, 2**64, "42", 1.0, True)),
    *(({"keep_bad_batches": value}, ConfigError, f"keep_bad_batches must be a string, a path or None, got {value!r}")
      for value in (3, True, b"x")),
    ({"keep_bad_batches": ""}, ConfigError, "keep_bad_batches must be a directory or None, got ''"),
    ({"keep_bad_batches": __file__}, ConfigError, "keep_bad_batches must be a directory.*test_rules.py"),
    ({"keep_bad_batches": f"{__file__}/below"}, ConfigError,
     "keep_bad_batches.*cannot be a directory: .*Not a directory"),
    ({"keep_bad_batches": "a\0b"}, ConfigError, "keep_bad_batches.*cannot be a directory: .*null byte"),
    ({"keep_bad_batches": "a" * 300}, ConfigError, "keep_bad_batches.*cannot be a directory: .*too long"),
    # Asynchronous gradients
    *(({"max_grad_lag": value}, ConfigError, f"max_grad_lag must be a whole number >= 0 or None, got {value!r}")
      for value in (-1, 1.5, "2", True)),
    ({**ASYNC_GRADS, "max_grad_lag": 1, "lag_policy": "slow"}, ConfigError,
     r"lag_policy must be one of \['apply', 'scale', 'drop'\], got 'slow'"),
    *(({**ASYNC_GRADS, "lag_policy": value}, ConfigError, f"lag_policy='{value}' needs max_grad_lag, got None")
      for value in ("drop", "scale")),
    ({**ASYNC_GRADS, "aggregate": 5}, ConfigError, r"aggregate must be from 1 to num_grad_workers \(4\), got 5"),
    *(({**where, name: value}, ConfigError,
       f"{name}={value!r}: only with grad_communication='asynchronous'; change that, or leave {name} out")
      for name, value in (("aggregate", 2), ("max_grad_lag", 0)) for where in ({}, {"num_grad_workers": 2})),
    *(({"grad_communication": "asynchronous", name: value}, ConfigError,
       f"{name}={value!r} is for grad_communication='asynchronous' with num_grad_workers >= 2")
      for name, value in (("aggregate", 2), ("max_grad_lag", 0))),
    ({"max_grad_lag": 1, "lag_policy": "drop"}, ConfigError,
     "lag_policy='drop': only with grad_communication='asynchronous'; change that, or leave lag_policy out"),
    # Resources
    ({"col_worker_resources": 2}, ConfigError, "col_worker_resources must be a mapping"),
    ({"col_worker_resources": None}, ConfigError, "col_worker_resources must be a mapping"),
    ({"col_worker_resources": {"num_gpus": 1.5}}, ConfigError, "col_worker_resources.*num_gpus.*got 1.5"),
    ({"grad_worker_resources": {"memory": -1}}, ConfigError, "grad_worker_resources.*memory.*got -1"),
    ({"grad_worker_resources": {"num_cpus": NAN}}, ConfigError, "grad_worker_resources must be finite, got.*nan"),
    ({"grad_worker_resources": {"num_cpus": "1"}}, ConfigError,
     "grad_worker_resources must be a mapping of strings to numbers.*got .*'1'"),
    *(({"col_num_threads": 2, **where}, ConfigError,
       "col_num_threads=2 is for collection workers in separate processes")
      for where in ({}, {"num_col_workers": 2, "runtime": "threads"}, {"num_grad_workers": 2})),
    ({"num_col_workers": 2, "col_num_threads": 0}, ConfigError, "col_num_threads.*got 0"),
    # Contradictions between two settings; the message names both
    ({"num_grad_workers": 2, "distribute_gradients": True, "grad_communication": "asynchronous"}, ConfigError,
     "distribute_gradients.*grad_communication='asynchronous'"),
    ({"distribute_gradients": True}, ConfigError, "distribute_gradients.*num_grad_workers"),
    ({"num_grad_workers": 2, "distribute_gradients": True, "compress_grads_to_send": True}, ConfigError,
     "compress_grads_to_send.*distribute_gradients"),
    ({"compress_grads_to_send": True}, ConfigError, "compress_grads_to_send.*num_grad_workers"),
    ({"compress_data_to_send": True}, ConfigError, "compress_data_to_send.*num_col_workers"),
    ({"compress_weights_to_send": "bf16"}, ConfigError, "compress_weights_to_send='bf16'.*num_col_workers"),
    ({"compress_weights_to_send": "auto", "col_communication": "asynchronous"}, ConfigError,
     "compress_weights_to_send='auto'.*num_col"),
    ({"num_grad_workers": 2, "distribute_gradients": True, "compress_weights_to_send": "bf16"}, ConfigError,
     "compress_weights_to_send.*without distribute_gradients"),
    *(({"num_grad_workers": 2, "distribute_gradients": True, "compress_grads_to_send": value}, ConfigError,
       f"compress_grads_to_send='{value}' contradicts distribute_gradients") for value in ("bf16", "topk", "auto")),
    ({"num_col_workers": 2, "fraction_samples": 0.5}, ConfigError, "fraction_samples.*col_fraction_workers"),
    ({"num_col_workers": 2, "on_straggler": "finish"}, ConfigError, "on_straggler needs col_fraction_workers < 1"),
    ({"num_col_workers": 2, "col_fraction_workers": 0.5, "on_straggler": "finnish"}, ConfigError,
     r"on_straggler must be one of \['cut', 'finish'\], got 'finnish'; did you mean 'finish'"),
    ({"num_col_workers": 2, "col_communication": "asynchronous", "on_straggler": "finish"}, ConfigError,
     "on_straggler='finish'.*col_communication"),
    ({"num_grad_workers": 3, "distribute_gradients": True, "col_fraction_workers": 0.5, "on_straggler": "finish",
      "train_batch_size": 50}, ConfigError, "on_straggler='finish' contradicts train_batch_size"),
    ({"num_col_workers": 2, "col_fraction_workers": 0.5, "col_communication": "asynchronous"}, ConfigError,
     "col_fraction_workers.*col_communication"),
    *(({"num_col_workers": 2, name: 3}, ConfigError, f"{name}=3.*col_communication") for name in (
        "col_in_flight", "queue_size", "broadcast_interval", "minibatch_buffer_size", "num_passes",
        "max_policy_lag", "max_weight_sync_delay")),
    *(({name: value}, ConfigError, f"{name}='?{value}'?.*col_communication") for name, value in (
        ("queue_policy", "drop_oldest"), ("on_starved", "warn"), ("ramp", True), ("buffer", "circular"),
        ("on_policy_lag", "wait"))),
    ({"queue_policy": "drop"}, ConfigError,
     "queue_policy must be one of .'block', 'drop_oldest', 'drop_newest'., got 'drop'"),
    ({"on_starved": "ignore"}, ConfigError, "on_starved must be one of .'raise', 'warn', 'wait'., got 'ignore'"),
    ({"buffer": "square"}, ConfigError, "buffer must be one of .'ring', 'circular'., got 'square'"),
    ({"on_policy_lag": "later"}, ConfigError, "on_policy_lag must be one of .'drop', 'wait'.*, got 'later'"),
    *(({"runtime": "simulated", "faults": f"delay col.* 2s; {fault}", **settings}, ConfigError,
       f"^faults has '{re.escape(fault)}', which cannot happen: .* the workers are GWorker [01]")
      for fault, settings in (
        ("kill col.9", {"num_col_workers": 2}), ("kill col.0", {"num_col_workers": 2}),
        ("kill col.2.1", {"num_col_workers": 2}), ("raise col.1 @ step 3", {}), ("kill col.0.1", PARALLEL),
        ("kill grad.1 @ update 5", {"num_grad_workers": 2}), ("nan grad.0", {"num_grad_workers": 2}),
        ("hang GWorker 3", {"num_grad_workers": 2}), ("kill grad.1 @ grad 3", {"num_col_workers": 2}),
        ("kill grad.0 @ update 1", {"num_grad_workers": 2, "distribute_gradients": True}),
        ("kill shard.1", {"num_col_workers": 2}))),
    ({"col_communication": "asynchronous", "on_policy_lag": "drop"}, ConfigError,
     "on_policy_lag='drop' needs max_policy_lag, got None"),
    ({"ramp": 1}, ConfigError, "ramp must be True or False or None, got 1"),
    *(({name: value}, ConfigError, f"{name} must be a whole number >= {low}.*, got {value}") for name, value, low in (
        ("max_weight_sync_delay", 0, 1), ("max_weight_sync_delay", True, 1),
        ("max_policy_lag", -1, 0), ("max_policy_lag", False, 0), ("replay_slots", -1, 0), ("replay_slots", None, 0))),
    *(({"replay_proportion": value}, ConfigError,
       "replay_proportion must be (a number >= 0.0|finite), got") for value in (
        -0.5, True, "1", float("inf"), float("nan"))),
    ({"col_communication": "asynchronous", "replay_proportion": 0.5}, ConfigError,
     "replay_proportion=0.5 and replay_slots=0 go together"),
    ({"col_communication": "asynchronous", "replay_slots": 5}, ConfigError,
     "replay_proportion=0.0 and replay_slots=5 go together"),
    ({"col_communication": "asynchronous", "train_batch_size": 80, "replay_proportion": 1.0, "replay_slots": 5},
     ConfigError,
     "replay_slots 5 x rollout 16 = 80 must exceed train_batch_size 80"),
    ({"col_communication": "asynchronous", "replay_proportion": 1.0, "replay_slots": 1}, ConfigError,
     "must exceed train_batch_size 16"),
    ({"col_communication": "asynchronous", "buffer": "circular", "ramp": False}, ConfigError,
     "ramp=False is for buffer='ring'"),
    ({"col_communication": "asynchronous", "on_policy_lag": "wait"}, ConfigError,
     "on_policy_lag='wait' needs max_policy_lag, got None"),
    ({**WAIT, "broadcast_interval": 2}, ConfigError, "leave out broadcast_interval"),
    ({**WAIT, "max_weight_sync_delay": 50}, ConfigError, "leave out broadcast_interval and max_weight_sync_delay"),
    ({**WAIT, "buffer": "circular"}, ConfigError, "which buffer='circular' draws at random"),
    ({"col_communication": "asynchronous", "max_weight_sync_delay": 50, "broadcast_interval": 2}, ConfigError,
     "max_weight_sync_delay replaces broadcast_interval; set only one of them"),
    *(({name: value}, ConfigError, f"{name} must be a whole number >= 1 or None, got {value!r}")
      for name in ("train_batch_size", "microbatch_size") for value in (0, -1, 1.5, "2", True)),
    *(({**BY_PIECES, "prefetch": value}, ConfigError, f"prefetch must be a whole number >= 0 or None, got {value!r}")
      for value in (-1, "1", True, 0.5)),
    ({**BY_PIECES, "prefetch": 2}, ConfigError, "prefetch must be 0, 1 or None, got 2"),
    *(({**BY_PIECES, "norm_over": value}, ConfigError,
       rf"norm_over must be one of \['batch', 'microbatch'\], got {value!r}")
      for value in ("slice", None, 1)),
    ({"train_batch_size": 1000, "microbatch_size": 2000}, ConfigError,
     "microbatch_size must not exceed train_batch_size, got 2000 > 1000"),
    *(({**settings, name: value}, ConfigError,
       f"^{name}={value!r}: only in microbatches, with train_batch_size and microbatch_size; give both")
      for name, value in (("prefetch", 1), ("prefetch", 0), ("norm_over", "microbatch"))
      for settings in ({}, {"microbatch_size": 10}, {"train_batch_size": 10})),
    *(({"microbatch_size": 10, "col_communication": "asynchronous", name: value}, ConfigError,
       f"^{name}={value!r}: only with col_communication='synchronous'.*; change that, or leave {name} out")
      for name, value in (("prefetch", 1), ("prefetch", 0), ("norm_over", "microbatch"))),
    ({**BY_PIECES, "prefetch": 1}, ConfigError, "prefetch=1 needs num_col_workers >= 2"),
    ({**BY_PIECES, "prefetch": 1, "num_col_workers": 2, "col_fraction_workers": 0.5}, ConfigError,
     "prefetch=1 contradicts col_fraction_workers"),
    ({**BY_PIECES, "prefetch": 1, "num_col_workers": 2}, ConfigError,
     "prefetch=1 has no effect.*num_epochs=4"),
    ({**BY_PIECES, "norm_over": "microbatch"}, ConfigError,
     "norm_over='microbatch' contradicts PPO: num_epochs=4 and num_mini_batch=4 use"),
]


@pytest.fixture(scope="module")
def parts():
    envs = VecEnv.create_factory(CountingEnv, vec_env_size=2)
    return (PPO.create_factory(), OnPolicyActor.create_factory(envs.observation_space, envs.action_space),
            GAEBuffer.create_factory(8), envs)


@pytest.fixture(autouse=True)
def nothing_starts():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def refusal(parts, settings):
    """Return the error that a scheme with these settings raises; None if it raises none."""
    try:
        Scheme(*parts, **settings)
    except ConfigError as error:
        return error
    return None


def test_a_wrong_setting_is_refused(parts):
    for settings, error, message in ROWS:
        found = refusal(parts, settings)
        assert type(found) is error, (settings, found)
        assert re.search(message, str(found)), (settings, found)


def test_several_problems_are_reported_at_once(parts):
    with pytest.raises(ConfigError) as caught:
        Scheme(*parts, num_col_workers=0, queue_size="a", col_fraction_workers=2, grad_communication="no", seed=-1,
               grad_worker_resources={"memory": -1, "num_gpus": 1.5}, queue_timeout_s=0, keep_bad_batches=3)
    for name in ("num_col_workers", "queue_size", "col_fraction_workers", "grad_communication", "seed", "memory",
                 "num_gpus", "queue_timeout_s", "keep_bad_batches"):
        assert name in str(caught.value)


def test_several_contradictions_are_reported_at_once(parts):
    with pytest.raises(ConfigError) as caught:
        Scheme(*parts, compress_grads_to_send=True, compress_data_to_send=True, queue_size=2, distribute_gradients=True)
    for name in ("compress_grads_to_send", "compress_data_to_send", "queue_size", "distribute_gradients"):
        assert name in str(caught.value)


def test_a_warning_points_to_the_line_that_created_the_scheme(parts):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Scheme(*parts, col_fraction_workers=0.5)
    assert [(warning.filename,
             "has no effect with num_col_workers=1" in str(warning.message)) for warning in caught] == [(__file__,
                                                                                                         True)]


def test_a_misspelled_setting_is_refused(parts):
    with pytest.raises(ConfigError, match="Scheme has no option 'num_col_worker'; did you mean 'num_col_workers'"):
        Scheme(*parts, num_col_worker=2)


@pytest.mark.parametrize("settings", [
    {}, PARALLEL, {"col_communication": "asynchronous", "queue_size": 1}, {"col_execution": "Central"},
    {"num_col_workers": 2, "col_execution": "Parallel", "col_fraction_workers": 0.5, "fraction_samples": 0.5},
    {"num_col_workers": 2, "col_fraction_workers": 0.5, "on_straggler": "finish", "train_batch_size": 50},
    {"num_grad_workers": 2, "distribute_gradients": True}, {"seed": 0}, {"seed": 2**63 - 1}, {"device": "cpu"},
    {"train_batch_size": 50}, {"microbatch_size": 5}, {"train_batch_size": 50, "microbatch_size": 50}, BY_PIECES,
    {"microbatch_size": 5, "col_communication": "asynchronous"},
    {"num_col_workers": 2, "col_worker_resources": {"num_cpus": 0}},
    {"num_col_workers": 2, "col_device": "cuda", "col_worker_resources": {"num_gpus": 2.0, "special": 1}},
    {**PARALLEL, "compress_grads_to_send": True, "compress_data_to_send": True}, WAIT,
    {"compress_data_to_send": "none"},
    {**PARALLEL, "compress_grads_to_send": "topk", "compress_data_to_send": "zstd",
     "compress_weights_to_send": "auto:bf16"},
    {**PARALLEL, "distribute_gradients": True, "compress_weights_to_send": "bf16"},
    {**PARALLEL, "compress_grads_to_send": "int8", "compress_data_to_send": "auto", "runtime": "simulated"},
    {"col_communication": "asynchronous", "train_batch_size": 80, "replay_proportion": 1, "replay_slots": 6,
     "max_policy_lag": 0,
     "num_passes": 2, "minibatch_buffer_size": 3, "ramp": False, "queue_policy": "drop_newest", "on_starved": "wait"},
], ids=str)
def test_right_settings_are_accepted(parts, settings):
    Scheme(*parts, **settings)


def test_a_directory_for_bad_batches_is_created_only_when_needed(parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scheme = Scheme(*parts, keep_bad_batches="new/folder")
    # The path is absolute, because workers may have another working directory
    assert scheme.settings["keep_bad_batches"] == str(tmp_path / "new" / "folder")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path))
    with pytest.raises(ConfigError, match=r"keep_bad_batches .* cannot be written: this user may not write to "):
        Scheme(*parts, keep_bad_batches=tmp_path / "new")


def test_a_fraction_without_effect_warns(parts):
    with pytest.warns(UserWarning, match="col_fraction_workers < 1 has no effect with num_col_workers=1"):
        Scheme(*parts, col_fraction_workers=0.5)


@pytest.mark.cpu("a warning about the processor")
@pytest.mark.parametrize(("capability", "warned"), [("AVX2", True), ("AVX512", False)])
def test_bfloat16_on_a_processor_that_lacks_it_warns(parts, monkeypatch, capability, warned):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        Scheme(PPO.create_factory(mixed_precision=True), *parts[1:])
    assert [str(each.message).split()[0] for each in seen] == ["mixed_precision=True"] * warned


@pytest.mark.parametrize(("capability", "warned"), [((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_bfloat16_on_a_gpu_that_lacks_it_warns(parts, monkeypatch, capability, warned):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        Scheme(PPO.create_factory(mixed_precision=True), *parts[1:], device="cuda:0")
        Scheme(*parts, device="cuda:0")
    assert ["is slow on cuda:0" in str(each.message) for each in seen] == [True] * warned


def test_asynchronous_settings_have_an_effect_with_a_single_asynchronous_collector(parts):
    """Check that settings of the queue are accepted with one asynchronous collector, because it uses the queue too."""
    scheme = Scheme(*parts, col_communication=ASYNC, queue_size=2, col_in_flight=1, broadcast_interval=3)
    assert scheme.settings["queue_size"] == 2


def test_a2c_accepts_the_same_settings(parts):
    Scheme(A2C.create_factory(), *parts[1:], **PARALLEL)


@pytest.mark.parametrize(("settings", "message"), [
    ({"col_worker_resources": {"num_cpus": 2}}, "col_worker_resources is for remote collection workers"),
    ({"grad_worker_resources": {"num_cpus": 2}}, "grad_worker_resources is for remote gradient workers"),
    ({"address": "10.0.0.1:6379"},
     "address='10.0.0.1:6379': only with runtime='ray' and remote workers; change that, or leave address out"),
    ({"num_col_workers": 2, "col_worker_resources": {"num_cpu": 1}}, "did you mean 'num_cpus'"),
    ({"fraction_samples": 0.5}, "fraction_samples needs col_fraction_workers < 1"),
])
def test_settings_that_would_be_ignored_are_refused(make_scheme, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_scheme(**({"runtime": None} | settings))


def test_settings_contain_the_runtime(make_scheme):
    assert make_scheme(runtime=None).settings["runtime"] == "threads"
    assert make_scheme(runtime=None, num_col_workers=2).settings["runtime"] == "ray"
