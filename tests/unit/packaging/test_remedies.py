"""Do what errors advise, and check that it helps; every text with a remedy in the package is executed by some test.

`OPTIONS` has wrong options of `train`, `CALLS` has other wrong calls; each with the calls that the error asks for. What
these calls cover is found by comparing the errors with the texts in the source. `ELSEWHERE` names the tests that
execute other remedies, and `NOT_EXECUTED` the reasons for the rest.
"""

from __future__ import annotations

import threading
import warnings

import pytest

from pytorchrl.agent.actors import MLP
from pytorchrl.envs.testing import CountingEnv
from pytorchrl.scheme.transport import codecs
from pytorchrl.training.training import make_learner
from tests.conftest import ROOT
from tests.unit.packaging.remedied_calls import calls, error_of, file_calls, problems_with_calls
from tests.unit.packaging.remedied_runs import more_calls
from tests.unit.packaging.remedied_tokens import token_calls
from tests.unit.packaging.remedies import remedies
from tests.unit.packaging.source import reads_source

OUT = object()  # leaves an option out
CARTPOLE, PENDULUM = "CartPole-v1", "Pendulum-v1"
COLLECTORS, GRADIENTS = {"num_col_workers": 2}, {"num_grad_workers": 2}
REMOTE = COLLECTORS | GRADIENTS
ASYNC = {"col_communication": "asynchronous"}
SHARDS = ASYNC | {"num_replay_workers": 2}
ASYNC_GRADIENTS = GRADIENTS | {"grad_communication": "asynchronous"}
MICROBATCHES = {"train_batch_size": 64, "microbatch_size": 16, "num_epochs": 1, "num_mini_batch": 1,
                "advantage_normalization": "none"}
CENTRAL = ASYNC | COLLECTORS | {"inference": "central"}


def without(*names):
    return dict.fromkeys(names, OUT)


def ppo(wrong, *fixes, env=CARTPOLE):
    return "ppo", env, wrong, fixes


def dqn(wrong, *fixes):
    return "dqn", CARTPOLE, wrong, fixes


# (algorithm, environment, wrong options, changes of the options that the error asks for)
OPTIONS = [
    # Networks
    ppo({"block": "simba", "hidden_sizes": (64, 32)}, {"hidden_sizes": (64, 64)}, without("block")),
    ppo({"block": "simba", "activation": "elu"}, without("activation"), {"block": "mlp"}),
    ppo({"block": "simba", "feature_extractor": MLP}, without("block")),
    # Between levels of the scheme
    *(ppo(REMOTE | {f"compress_{kind}_to_send": f"auto:{codec}", "record": "run.json"},
          {f"compress_{kind}_to_send": codec}, {f"compress_{kind}_to_send": "lz4"})
      for kind, codec in (("weights", "bf16"), ("weights", "fp16"), ("grads", "bf16"), ("grads", "fp16"),
                          ("grads", "int8"), ("grads", "topk"))),
    dqn(SHARDS | {"record": "run.json"}, without("num_replay_workers"), without("record")),
    ppo({"col_worker_resources": {"num_cpus": 2}}, COLLECTORS, {"col_execution": "Parallel"},
        without("col_worker_resources")),
    ppo({"grad_worker_resources": {"num_cpus": 2}}, GRADIENTS, {"grad_execution": "Parallel"},
        without("grad_worker_resources")),
    ppo({"address": "127.0.0.1:6379", "runtime": "ray"}, without("address")),
    ppo(COLLECTORS | {"placement": "colocate"}, REMOTE, without("placement")),
    ppo({"faults": "kill col.1 @ step 5", "runtime": "processes"}, COLLECTORS | {"faults": "kill col.1 @ step 5"},
        without("faults")),
    ppo(COLLECTORS | {"faults": "kill col.9 @ step 5", "runtime": "simulated"}, {"faults": "kill col.2 @ step 5"}),
    ppo({"col_num_threads": 2}, COLLECTORS | {"runtime": "ray"}, COLLECTORS | {"runtime": "processes"},
        {"col_execution": "Parallel"}),
    ppo({"grad_communication": "asynchronous", "max_grad_lag": 2}, without("max_grad_lag"), GRADIENTS),
    ppo(ASYNC_GRADIENTS | {"aggregate": 3}, {"aggregate": 2}),
    ppo({"distribute_gradients": True}, GRADIENTS, without("distribute_gradients")),
    ppo(GRADIENTS | {"distribute_gradients": True, "compress_grads_to_send": "lz4"}, without("distribute_gradients"),
        without("compress_grads_to_send")),
    ppo({"compress_grads_to_send": "lz4"}, GRADIENTS, {"grad_execution": "Parallel"},
        without("compress_grads_to_send")),
    ppo({"compress_data_to_send": "lz4"}, COLLECTORS, {"col_execution": "Parallel"}, without("compress_data_to_send")),
    ppo({"compress_weights_to_send": "lz4"}, COLLECTORS, GRADIENTS, without("compress_weights_to_send")),
    ppo(ASYNC | {"inference": "central"}, COLLECTORS, {"col_execution": "Parallel"}, without("inference")),
    ppo(CENTRAL | {"compress_weights_to_send": "lz4"}, without("inference"), without("compress_weights_to_send")),
    ppo(GRADIENTS | {"distribute_gradients": True, "col_fraction_workers": 0.5, "on_straggler": "finish",
                     "train_batch_size": 1024}, without("on_straggler"), without("train_batch_size")),
    ppo(MICROBATCHES | {"prefetch": 1}, COLLECTORS, {"col_execution": "Parallel"}, without("prefetch")),
    ppo({"num_grad_workers": 2, "num_col_workers": (1, 2, 3)}, {"num_col_workers": (1, 2)}),
    # Within collection
    ppo(CENTRAL | {"compress_data_to_send": "lz4"}, without("inference"), without("compress_data_to_send")),
    ppo(CENTRAL | {"inference_batch": 3}, {"inference_batch": 2}),
    ppo(ASYNC | COLLECTORS | {"broadcast_interval": 2, "max_weight_sync_delay": 3}, without("broadcast_interval"),
        without("max_weight_sync_delay")),
    ppo({"fraction_samples": 0.5}, COLLECTORS | {"col_fraction_workers": 0.5}, without("fraction_samples")),
    ppo(ASYNC | {"replay_proportion": 1.0}, {"replay_slots": 4}, without("replay_proportion")),
    ppo(ASYNC | {"ramp": True, "buffer": "circular"}, without("ramp"), without("buffer")),
    ppo(ASYNC | {"on_policy_lag": "wait"}, {"max_policy_lag": 8}, without("on_policy_lag")),
    ppo(ASYNC | {"on_policy_lag": "wait", "max_policy_lag": 8, "buffer": "circular"}, {"on_policy_lag": "drop"}),
    ppo(COLLECTORS | {"inference": "central"}, ASYNC, without("inference") | {"backend": "async"}),
    ppo(COLLECTORS | {"prefetch": 1}, MICROBATCHES, without("prefetch")),
    ppo({"norm_over": "microbatch"}, MICROBATCHES, without("norm_over")),
    ppo(COLLECTORS | MICROBATCHES | {"prefetch": 1, "col_fraction_workers": 0.5}, without("prefetch"),
        without("col_fraction_workers")),
    ppo(CENTRAL | {"on_policy_lag": "wait", "max_policy_lag": 8}, {"on_policy_lag": "drop"}),
    *(ppo(ASYNC | COLLECTORS | {"on_policy_lag": "wait", "max_policy_lag": 80, name: 3}, without(name))
      for name in ("broadcast_interval", "max_weight_sync_delay")),
    ppo(CENTRAL | {"col_in_flight": 2}, without("col_in_flight"), without("inference")),
    ppo({"train_batch_size": 16, "microbatch_size": 64, "num_mini_batch": 1, "num_epochs": 1},
        {"microbatch_size": 16}),
    ppo(MICROBATCHES | {"norm_over": "microbatch", "num_epochs": 4}, {"num_epochs": 1, "num_mini_batch": 1},
        {"norm_over": "batch"}),
    ppo(COLLECTORS | MICROBATCHES | {"prefetch": 1, "num_epochs": 4}, without("prefetch")),
    # Replay shards
    dqn({"num_replay_workers": 2}, ASYNC, without("num_replay_workers")),
    dqn({"learning_starts": 100}, SHARDS, without("learning_starts"), without("learning_starts") | {"start_steps": 9}),
    dqn({"routing": "random"}, SHARDS, without("routing")),
    dqn(ASYNC | {"num_replay_workers": 1, "replay_worker_resources": {"num_cpus": 2}}, {"num_replay_workers": 2},
        without("replay_worker_resources")),
    dqn(SHARDS | {"min_replay_ratio": 2.0, "max_replay_ratio": 1.0}, {"min_replay_ratio": 0.5}),
    dqn(SHARDS | {"replay_size": 1000, "learning_starts": 2000}, {"replay_size": 4000}),
    dqn(SHARDS | {"initial_priority": "worker"}, without("initial_priority"), {"prioritized": True}),
    dqn({"alpha": 0.5}, {"prioritized": True}, without("alpha")),
    dqn(ASYNC | {"num_passes": 2}, without("num_passes")),
    dqn(CENTRAL | {"epsilon_per_worker": True}, {"epsilon_per_worker": False}),
    ("td3", PENDULUM, CENTRAL | {"noise": "ou"}, [{"noise": "gaussian"}]),
    ("r2d2", CARTPOLE, SHARDS | {"routing": "random"}, [without("routing")]),
    # Gradients
    ppo(ASYNC_GRADIENTS | {"lag_policy": "drop"}, {"max_grad_lag": 4}),
    ppo(ASYNC_GRADIENTS | {"distribute_gradients": True}, without("distribute_gradients"),
        without("grad_communication")),
    ppo({"max_grad_lag": 4}, ASYNC_GRADIENTS, without("max_grad_lag")),
    ppo({"num_grad_workers": 2, "grad_execution": "Central"}, {"grad_execution": "Parallel"},
        {"num_grad_workers": 1}),
    # Devices and resources
    ppo({"grad_device": "cpu"}, GRADIENTS, without("grad_device")),
    ppo({"col_device": "cpu"}, COLLECTORS, ASYNC, without("col_device")),
    ppo(COLLECTORS | {"col_worker_resources": {"num_gpus": 1}}, {"col_worker_resources": {}}),
    ppo({"device": "tpu"}, {"device": "cpu"}),
    # Records
    ppo({"record": "a.json", "replay": "b.json"}, without("replay")),
    ppo({"record": "a.json", "log_dir": "new", "checkpoint_every": 10}, without("record"),
        without("checkpoint_every")),
    # Architectures
    ("appo", CARTPOLE, {"preset": "appo", "col_communication": "synchronous"}, [without("col_communication"),
                                                                                without("preset")]),
    ppo({"preset": "ddppo", "num_grad_workers": 1}, GRADIENTS),
    # Learner
    ppo({"log_dir": "new", "checkpoint_every": 10, "keep_best_checkpoint": True}, {"eval_every": 10},
        without("keep_best_checkpoint")),
    ppo({"overwrite": True}, {"log_dir": "new"}, without("overwrite")),
    ppo({"resume": True}, {"log_dir": "new"}, without("resume")),
    ppo({"eval_timeout_s": 3.0}, {"eval_every": 10}, without("eval_timeout_s")),
    ppo({"info_keywords": ("lives",)}, {"log_dir": "new"}, without("info_keywords")),
    # Algorithms, actors and storages
    ppo({"num_mini_batch": 4, "mini_batch_size": 64}, without("num_mini_batch"), without("mini_batch_size")),
    ppo({"num_mini_batch": 4000}, {"num_mini_batch": 4}, {"num_envs": 40}),
    ppo({"compile": True, "recurrent_net": "gru"}, {"compile": False}, {"recurrent_net": None}),
    ("appo", CARTPOLE, {"compile": True, "target_network": True}, [without("compile"), without("target_network")]),
    ("r2d2", CARTPOLE, {"compile": True}, [{"compile": False}]),
    ("impala", CARTPOLE, {"advantage_normalization": "batch"}, [{"advantage_normalization": "none"}]),
    ("sac", CARTPOLE, {"policy": "deterministic"}, []),
    ("td3", PENDULUM, {"log_std_bound": "tanh"}, [without("log_std_bound")]),
    ("sac", PENDULUM, {"target_entropy_scale": 0.5}, [without("target_entropy_scale") | {"target_entropy": -1.0}]),
    ("sac", PENDULUM, {"critic_subset": 3}, [{"num_critics": 3}]),
    ("sac", PENDULUM, {"critic_norm": "batch", "mini_batch_size": 1}, [{"mini_batch_size": 256}]),
    ("sac", PENDULUM, {"critic_dropout": 0.1, "critic_hidden_sizes": ()}, [{"critic_hidden_sizes": (8,)}]),
    ("sac", CARTPOLE, {"critic_norm": "layer"}, [without("critic_norm")]),
    ("sac", PENDULUM, {"length": 8}, [{"recurrent_net": "gru"}, {"recurrent_net": "lstm"}]),
    ("sac", PENDULUM, {"recurrent_net": "gru", "alpha": 0.5}, [{"prioritized": True}]),
    ("sac", PENDULUM, {"recurrent_net": "gru", "critic_norm": "batch"}, [{"critic_norm": "layer"}]),
    ("sac", PENDULUM, {"recurrent_net": "gru", "target_networks": False}, [
        {"target_networks": True}, {"recurrent_net": None}]),
    dqn({"prev_action_reward": True}, without("prev_action_reward")),
    ("sac", PENDULUM, {"drop_atoms": 3}, [without("drop_atoms")]),
    ("sac", PENDULUM, {"distribution": "quantile", "num_atoms": 2}, [{"drop_atoms": 0}]),
    ("sac", CARTPOLE, {"distribution": "quantile"}, []),
    dqn({"distribution": "quantile", "loss": "mse"}, without("loss"), without("distribution")),
    dqn({"distribution": "categorical", "v_min": 500.0, "v_max": 0.0}, {"v_min": 0.0, "v_max": 500.0}),
    ppo({"feature_extractor": "cnn"}, {"feature_extractor": "mlp"}, {"feature_extractor": "auto"}),
    ppo({"sequence_length": 16}, {"recurrent_net": "gru"}),
    ppo({"recurrent_net": "gru", "sequence_length": 16, "num_mini_batch": OUT, "mini_batch_size": 8},
        {"sequence_length": 8}, {"mini_batch_size": 16}),
    ppo({"recurrent_net": "gru", "num_envs": 2, "num_mini_batch": 4}, {"sequence_length": 32}, {"num_envs": 4},
        {"num_mini_batch": 2}),
    dqn({"polyak": 1.0}, {"polyak": 0.995}),
    ("r2d2", CARTPOLE, {"preset": "apex"}, [{"preset": "r2d2"}]),
    ppo({"eval_every": 16, "num_envs": OUT}, without("eval_every"), env=CountingEnv()),
    dqn({"replay_size": 10, "num_envs": 4, "num_steps": 4}, {"replay_size": 16000}),
    ("r2d2", CARTPOLE, {"replay_size": 20}, [{"replay_size": 4000}]),
    ("r2d2", CARTPOLE, {"replay_size": 100, "num_envs": 8}, [{"replay_size": 4000}]),
    ppo({"frame_stack": 2}, {"frame_stack": 1}, env="FrozenLake-v1"),
    ppo({"runtime": "threads", "faults": "kill col.1 @ step 5"} | COLLECTORS, {"runtime": "ray"},
        {"runtime": "processes"}, {"runtime": "simulated"}),
]


def accept(algorithm, env, options):
    """Check a call of `train` without starting it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_learner(algorithm, env, **{"seed": 1, "progress": False, **{
            name: value for name, value in options.items() if value is not OUT}})


def problems_with_options(messages):
    """Make the calls of `OPTIONS`; add the errors to `messages`, and return what did not go as expected."""
    found = []
    for algorithm, env, wrong, fixes in OPTIONS:
        message = error_of(accept, algorithm, env, wrong)
        messages.append(message or "")
        if message is None:
            found.append(f"{algorithm} {wrong} is accepted")
        found += [f"{algorithm} {wrong} with {fix}: {error}" for fix in fixes
                  if (error := error_of(accept, algorithm, env, wrong | fix))]
    return found


# A part of a text -> the test that executes its remedy.
ELSEWHERE = {
    "uses no rewards; leave n_step out":
        "scheme/gradients/test_dataset_source.py::test_what_errors_about_data_sets_ask_for_works",
    "same spaces as the recorded one":
        "scheme/gradients/test_dataset_source.py::test_what_errors_about_data_sets_ask_for_works",
    "give the environment in which the data set was recorded":
        "scheme/gradients/test_dataset_source.py::test_what_errors_about_data_sets_ask_for_works",
    "learns from a data set, but there is none":
        "scheme/gradients/test_dataset_source.py::test_what_errors_about_data_sets_ask_for_works",
    "several policies; leave dataset out":
        "training/test_dataset_runs.py::test_what_errors_of_train_ask_for_works",
    "would have no effect, because nothing is collected if there is a dataset":
        "scheme/gradients/test_dataset_source.py::test_what_errors_about_data_sets_ask_for_works",
    "write data sets with `pytorchrl dataset`":
        "scheme/gradients/test_dataset_source.py::test_what_errors_about_data_sets_ask_for_works",
    "steps of the dataset; raise size to ":
        "scheme/gradients/test_dataset_source.py::test_what_errors_about_data_sets_ask_for_works",
    "set this variable before Python starts":
        "scheme/test_numerics.py::test_it_may_be_too_late_for_deterministic_kernels",
    "change tensors in place, such as by copy_":
        "agent/env/tensors/test_recording.py::test_tensors_that_are_changed_in_place_are_recorded",
    "pass mask=info['action_mask']": "agent/test_acting.py::test_masks_are_obeyed",
    "pass mask=, (B, n) bool": "agent/test_acting.py::test_masks_are_obeyed",
    "give feature_extractor='cnn' or 'impala'":
        "agent/actors/test_extractors.py::test_a_leaf_with_the_shape_but_not_the_values_of_an_image_warns",
    "already has this name; choose a different one":
        "agent/algorithms/test_registry.py::test_rerunning_a_cell_replaces_its_class_but_other_classes_are_refused",
    "or set compile=False": "agent/algorithms/test_compiled_replay.py::test_losses_that_cannot_be_compiled_are_refused",
    "which would be constant in the graph":
        "agent/algorithms/test_compiled_replay.py::test_losses_that_cannot_be_compiled_are_refused",
    "supports only ": "agent/env/test_remedies.py::"
                      "test_an_autoreset_mode_that_a_vector_environment_lacks_works_with_the_backend_that_the_error_names",
    "cannot be sent to the processes of backend='async'":
        "agent/env/test_first_episodes.py::test_what_cannot_be_sent_to_processes_is_refused_before_they_start",
    **dict.fromkeys(("does not support max_episode_steps", "on_env_error='restart' needs single environments",
                     "env_timeout_s=", "wrappers need single environments"), "agent/env/test_remedies.py::"
                    "test_options_of_single_environments_work_with_the_backend_that_the_error_names"),
    "from the standard input": "agent/env/test_main_guard.py::test_a_script_with_guard_trains",
    "move the training code into a function": "agent/env/test_main_guard.py::test_a_script_with_guard_trains",
    "set on_env_error='restart' to restart environments":
        "agent/env/test_first_episodes.py::test_the_remedy_restarts_environments_in_their_first_episode",
    "would leave no trainable policy": "agent/multi/test_algorithm.py::test_policies_that_do_not_learn_still_act",
    "appeared after the first reset":
        "agent/multi/test_env.py::test_masks_of_agents_that_appear_later_exist_from_the_start",
    "of the agent whose turn it is": "agent/multi/test_turns.py::test_games_with_turns_train_and_play",
    "set recurrent_net=None": "agent/multi/test_turns.py::test_turns_that_cannot_be_learned_are_refused",
    "raise num_steps": "agent/multi/test_turns.py::test_turns_that_cannot_be_learned_are_refused",
    "define every method that": "agent/storages/test_own_storages.py::test_a_storage_from_scratch_collects_and_learns",
    "stacks do not shift": "agent/storages/test_replay.py::test_images_that_are_not_stacks_are_stored_unchanged",
    "needs observations with three axes":
        "agent/storages/test_replay.py::test_images_that_are_not_stacks_are_stored_unchanged",
    "does not fit in a replay of size": "agent/storages/test_replay.py::test_rollouts_that_do_not_fit_are_refused",
    "cannot load the state of one with size": "agent/storages/test_replay.py::test_a_state_of_another_size_is_refused",
    "call get_all_buffer_data() first":
        "agent/storages/test_on_policy.py::test_full_storage_refuses_another_transition",
    **dict.fromkeys((
        "only a scheme finds the environment's compute_reward", "with which relabel computes rewards",
        "relabel is for a single policy", "two equal spaces of arrays", "states depend on the original goals",
        "one number for each of N goals", "of this step was", "because replay stores no info"),
        "scheme/test_hindsight.py::test_what_errors_advise_helps"),
    "set the option to the same function":
        "agent/test_schedules.py::test_a_state_with_a_function_that_the_options_lack_is_refused",
    **dict.fromkeys(("axis cannot be logarithmic", "for a logarithmic axis"),
                    "analysis/test_plotting.py::test_wrong_pictures_are_refused"),
    **dict.fromkeys(("the groups must have the same tasks", "has different numbers of runs on its tasks"),
                    "analysis/test_runs.py::test_groups_that_cannot_be_compared_are_refused"),
    "to use the records that it has":
        "analysis/test_runs.py::test_records_that_changed_after_the_run_ended_are_refused",
    "pass --reference": "cli/test_compare.py::test_scores_of_several_tasks_are_normalized",
    "is swept by the configuration": "training/test_configuration.py::test_flags_that_contradict_a_sweep_are_refused",
    "accepts neither overwrite nor resume":
        "training/test_configuration.py::test_flags_that_contradict_a_sweep_are_refused",
    "exists already": "export/test_export.py::test_errors_name_the_remedy",
    "differ from those at the checkpoint":
        "learner/test_files.py::test_damaged_records_are_refused_when_a_run_is_resumed",
    "is in use by another run": "learner/test_checkpoints.py::test_two_runs_cannot_use_one_directory",
    "has used log_dir":
        "learner/test_checkpoints.py::test_a_run_that_began_after_a_learner_was_built_is_not_overwritten",
    "evaluate it without recording": "training/test_several_policies.py::test_videos_are_refused",
    "request less or use fewer workers":
        "runtime/processes/test_runtime.py::test_more_workers_than_cores_and_absent_workers_are_allowed",
    "use fewer workers, about one per core": "runtime/test_machine.py::test_workers_of_all_kinds_count_together",
    "set their device to 'cpu'": "runtime/ray/test_runtime.py::test_workers_on_a_gpu_are_refused_without_a_free_gpu",
    "weight_norm='buffer' with several policies":
        "scheme/test_multi_agent.py::test_weights_over_the_whole_buffer_require_one_shard",
    "does not correct for their age":
        "scheme/test_agent_parts.py::test_a_long_queue_warns_if_the_algorithm_does_not_correct_for_lag",
    "policies of DecoderActor cannot be exported": "export/test_export.py::test_decoders_are_refused",
    "give DecoderActor a context as large as prompt and answer":
        "agent/actors/test_decoder.py::test_a_sequence_beyond_the_context_is_refused",
    "is slow on this processor": "scheme/test_rules.py::test_bfloat16_on_a_processor_that_lacks_it_warns",
    "only emulates bfloat16": "scheme/test_rules.py::test_bfloat16_on_a_gpu_that_lacks_it_warns",
    "is sent to every worker; load large data": "scheme/test_agent_parts.py::test_a_large_factory_warns_with_its_size",
    "MB can be sent": "scheme/test_agent_parts.py::test_a_large_factory_warns_with_its_size",
    "was built without CUDA": "scheme/test_devices.py::test_a_torch_without_cuda_is_reported",
    "a run that resumes cannot be recorded":
        "scheme/test_checkpoint.py::test_invalid_checkpoints_and_calls_are_refused",
    "the checkpoint is from another run":
        "scheme/test_resize_and_resume.py::test_a_central_run_does_not_resume_with_remote_workers",
    "the number of collection workers can only":
        "scheme/test_resize.py::test_colocated_workers_cannot_become_more",
    **dict.fromkeys(("so parallel gradient workers would have", "a record of asynchronous collection could not"),
                    "agent/test_modes.py::"
                    "test_layers_that_would_be_wrong_are_refused_and_frozen_layers_are_no_mistake"),
    "no slice with a valid sample": "scheme/gradients/test_microbatch.py::test_a_gradient_without_samples_is_ignored",
    "requests no GPU, so Ray": "scheme/test_devices.py::test_a_machine_without_a_gpu_may_request_remote_gpus",
    "'cuda' is the first assigned GPU": "scheme/test_devices.py::test_a_machine_without_a_gpu_may_request_remote_gpus",
    "give on_policy_lag='wait', which delays":
        "scheme/test_learner_thread.py::test_a_learner_that_drops_most_steps_warns_once",
    "increase size or collect shorter": "scheme/replay/test_rollouts.py::test_a_rollout_that_does_not_fit_is_refused",
    "cannot load a state of": "scheme/replay/test_rollouts.py::test_a_restored_replay_continues_identically",
    "so it has no update": "play/test_replay.py::test_an_update_after_the_end_is_refused",
    "which is missing; put the file back": "play/test_replay.py::test_a_recorded_run_is_made_again",
    "so it depended on the speeds": "play/test_replay.py::test_runs_that_cannot_be_repeated_are_refused",
    "--pdb and --out concern one update": "play/test_replay.py::test_the_command_shows_an_update_and_a_difference",
    "is for ReplayBuffer, PERBuffer and": "scheme/test_replay_batches.py::test_unused_or_invalid_settings_are_refused",
    "dropped while its workers were running":
        "learner/test_learner.py::test_context_manager_stops_also_after_an_error_and_keeps_the_error",
    "cannot be drained": "scheme/test_drain.py::test_a_recorded_run_cannot_be_drained",
    "use a schedule, or grad_communication='synchronous'":
        "scheme/recording/test_record.py::test_parameter_changes_are_refused_with_a_gradient_thread",
    "follows a schedule, which ends with the run":
        "scheme/test_trees_by_hand.py::test_a_learner_drives_a_tree_and_resumes_it",
    "import the module in your program first":
        "training/test_named_code.py::test_missing_and_local_modules_have_one_text_for_all_readers",
    "correct this import, or install versions":
        "support/test_code.py::test_an_import_that_fails_is_not_always_an_absent_package",
    "start threads with Runtime.start_thread":
        "runtime/test_simulation.py::test_a_foreign_thread_is_refused",
    "add a machine, request less":
        "scheme/test_lacking_resources.py::test_continuing_with_fewer_workers_needs_no_resources",
    "rename it in": "training/test_own_algorithms.py::test_an_option_of_another_part_is_refused",
    "leave out kind='batch'": "scheme/test_r2d2_rollouts.py::test_a_preset_omits_options_that_whole_rollouts_lack",
    "and forbid actions by action masks": "agent/env/test_values.py::test_the_method_action_masks_is_read",
    "pass its first item": "training/test_reports.py::"
                           "test_act_refuses_the_tuple_of_reset_and_observations_that_are_not_finite",
    "but this process is daemonic":
        "training/test_reports.py::test_processes_of_environments_are_refused_in_a_daemonic_process",
    "return one array with a flag":
        "training/test_reports.py::test_ragged_masks_in_info_are_refused_with_the_remedy",
    "build networks without .double()":
        "training/test_reports.py::test_networks_of_another_precision_are_refused_with_the_remedy",
    "give the file model.pt of the run": "training/test_reports.py::test_a_checkpoint_is_not_taken_for_a_model",
    **dict.fromkeys(("the default dtype of torch is", "the default device of torch is", "gradients are disabled here"),
                    "training/test_reports.py::test_settings_of_torch_that_prevent_training_are_refused"),
    "because there are no evaluations during":
        "callbacks/test_reports.py::test_callbacks_that_wait_for_evaluations_are_refused_without_them",
    **dict.fromkeys(("envs must be a factory of environments", "the agent was trained with"),
                    "training/test_reports.py::"
                    "test_an_evaluation_in_other_environments_needs_a_factory_and_equal_spaces"),
    "so it cannot be the horizontal axis": "analysis/test_plotting.py::test_wrong_pictures_are_refused",
    **dict.fromkeys(("or give on_policy_lag='wait', which", "give queue_policy='block', which",
                     "raise max_grad_lag, or give lag", "raise target_kl, or lower lr", "made in \0 env steps",
                     "train batches old at their first use", "no episode has ended in"),
                    "monitor/test_findings.py::test_the_advice_of_a_finding_helps"),
    **dict.fromkeys(("there are two environments", "the environment is missing"),
                    "cli/test_main.py::test_the_environment_is_the_second_word_or_a_flag"),
    "needs the records of the run": "support/test_display.py::test_an_agent_plots_and_reports_its_run",
    "has auto_reset=False, so no episode":
        "agent/env/tensors/test_objects.py::"
        "test_a_vector_environment_of_an_unknown_mode_is_refused_when_it_resets_at_once",
    "Gymnasium's TimeLimit counts": "agent/env/tensors/test_objects.py::test_the_time_limit_of_gymnasium_is_refused",
    "or leave vec_env_size out (with train":
        "agent/env/tensors/test_objects.py::test_a_scheme_trains_in_a_given_vector_but_not_with_several_workers",
    **dict.fromkeys(("builds a vector of environments; leave", "does not support max_episode_steps; set its own"),
                    "agent/env/tensors/test_objects.py::"
                    "test_options_of_single_environments_are_refused_with_a_remedy"),
    **dict.fromkeys(("; return \0[:, 0]", "return tensors of one device", "as flags, got", "states no actions",
                     "states no observation_space", "expected a dictionary as extras"),
                    "agent/env/tensors/test_objects.py::test_wrong_environments_are_named_in_the_first_rollout"),
    "and no last one in extras": "agent/env/tensors/test_objects.py::"
                                 "test_an_episode_that_is_cut_off_needs_its_last_observation_or_is_counted",
    "step returns its last observation": "agent/env/tensors/test_inspection.py::test_what_looks_wrong_is_said_once",
    "resets itself, so the last":
        "agent/env/tensors/test_jax.py::test_the_form_of_brax_has_limits_of_its_own_or_of_the_option",
    "expected a discrete or continuous action space":
        "agent/env/tensors/test_jax.py::test_spaces_of_actions_are_converted_or_refused",
    "call remember(obs, rhs, done)":
        "agent/algorithms/test_unrolling.py::"
        "test_networks_with_memory_do_not_take_observations_or_the_memory_of_another_network",
    "save it with the encoding UTF-8": "training/test_configuration.py::test_a_file_may_begin_with_a_byte_order_mark",
}
# A part of a text -> why no test executes its remedy.
NOT_EXECUTED = {
    "stores each frame of a stack once, on the host": "needs a GPU",
    **dict.fromkeys((
        "or give a callable that returns a module", "and write them as a data set", "or install its package"),
        "is a part of a text, or none of an error"),
    **dict.fromkeys((
        "pytorchrl.\0 is deprecated", "use the version that wrote it"), "needs another version of the package"),
    **dict.fromkeys((
        "EnvPool supports only", "install a C++ compiler", "Atari games cannot be recorded", "runtime='ray' needs Ray",
        "Ray did not start", "on one node, which together", "but this process already uses the Ray cluster",
        "the largest node has"),
        "needs another machine, cluster or package"),
    **dict.fromkeys((
        "or let keep_bad_batches save the batches", "all episodes so far have had the same return",
        "look in the log for the reason", "look in the log for their errors"),
        "asks for a look at the user's own code or at the log"),
    "build networks in build_networks": "needs a GPU",
    "call join_group() first": "names what the update worker of each tree does",
}


@reads_source
@pytest.mark.timeout(360)
def test_every_remedy_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(codecs, "_codecs", dict(codecs._codecs))  # the calls register codecs
    threads = set(threading.enumerate())
    messages = []
    found = problems_with_calls(
        [*calls(tmp_path), *token_calls(tmp_path), *file_calls(tmp_path), *more_calls(tmp_path)], messages)
    found += problems_with_options(messages)
    assert not found, "\n".join(found)
    new = {thread for thread in set(threading.enumerate()) - threads if thread.is_alive()}
    assert [thread for thread in new if type(thread).__name__ != "TMonitor"] == []  # a scheme runs, not tqdm of videos
    lines = [line for message in messages for line in message.splitlines()]
    missing = [remedy for remedy in remedies() if not any(map(remedy.is_in, lines))]
    named = {**ELSEWHERE, **NOT_EXECUTED}
    unknown = [f"{remedy.place}: {remedy.shown}" for remedy in missing
               if not any(part in remedy.text for part in named)]
    assert not unknown, "add calls that do what these errors ask for:\n" + "\n".join(unknown)
    assert [part for part in named if not any(part in remedy.text for remedy in missing)] == []


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_a_test_that_executes_a_remedy_exists(test):
    file, name = test.split("::")
    assert f"\ndef {name}(" in (ROOT / "tests" / "unit" / file).read_text(encoding="utf-8")
