"""Map names of options in other libraries, and in `train`, to the options of this package.

The names come from Stable-Baselines3, RLlib (its current version and its old policy optimizers), CleanRL, Sample
Factory, the older PyTorchRL (the predecessor of this package), and the function `train`, which has its own names for
some options. Error messages (see `pytorchrl.agent.names`) and the documentation use this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pytorchrl.agent.meanings import Here, at, no_option

_LEARNING_RATES = at("algorithm.lr", "algorithm.lr_q + algorithm.lr_pi")
_FALLING = at("algorithm.lr", "algorithm.lr_q + algorithm.lr_pi", note="a schedule such as linear(3e-4, 0.0)")
_ROLLOUT = at("replay.rollout_size | rollouts.size", note="steps of each environment")
_REPLAY_SIZE = at("replay.size | scheme.size")
_SAMPLES = (
    Here("algorithm.mini_batch_size"),
    Here("algorithm.num_mini_batch", "counts the mini-batches of a pass, not their samples"),
    Here("scheme.train_batch_size", "steps of a train batch; the algorithm splits it into mini-batches"),
)
_EPOCHS = at("algorithm.num_epochs", "scheme.num_passes")
_UPDATES_OF_TARGETS = at("algorithm.target_update_interval", note="counts updates, not env steps")
_RANDOM_STEPS = at("algorithm.start_steps", "scheme.learning_starts")
_ENTROPY = (Here("algorithm.entropy_coef"), Here("algorithm.initial_alpha", "`learn_alpha`=False keeps it constant"))
_HALF_SQUARES = at("algorithm.value_loss_coef", note="weight of half the mean squared error")
_LAMBDA = at("rollouts.gae_lambda", "rollouts.vtrace_lambda")
_COLLECTORS = at("scheme.num_col_workers", note="1 collects in the learner's process, like 0 in RLlib")
_ENVS = at("environments.vec_env_size", note="environments of each collection worker")
_ENV = at("environments.env_fn")
_PRIORITIZED = (Here("replay.prioritized | scheme.prioritized"),
                Here(note="`PERBuffer` draws by priority, `ReplayBuffer` uniformly"))
_EPSILON = (Here("replay.epsilon | scheme.epsilon"),)
_EVAL_EVERY = at("learner.eval_every", note="counts env steps of all environments")
_NETWORK = no_option("the network is chosen from the observations; see `hidden_sizes`, `feature_extractor`, "
                      "`recurrent_net`")
_ENTRIES = no_option("its entries are options themselves: `hidden_sizes` for net_arch or fcnet_hiddens, "
                      "`activation`, `feature_extractor`, `recurrent_net` for use_lstm, `optimizer`")
_OWN_STORAGE = no_option("give a storage's factory to `Scheme`, such as ReplayBuffer.create_factory(...)")
_TRACKING = at("learner.callbacks", note="with WandbLog or MlflowLog of pytorchrl.callbacks")
_BEST_MODEL = at("learner.callbacks", note="with SaveBestModel of pytorchrl.callbacks")
_VIDEO = no_option("`pytorchrl enjoy RUN_DIR --video DIR` records videos of a trained agent")
_CALLBACK = at("learner.callbacks", note="objects of classes derived from pytorchrl.callbacks.Callback")
_FILES = no_option("`pytorchrl train --config FILE` reads a configuration file")
_DISTRIBUTIONAL = no_option("there is no distributional Q-learning")
_LOGGING = no_option("set the level of the logger 'pytorchrl' in Python's logging")
_SETS = no_option("`Scheme` builds the worker sets itself from `num_col_workers` and `num_grad_workers`")
_RESOURCES_OF = at("scheme.col_worker_resources", note="a mapping such as {\"num_cpus\": 1}")
_LEARNER_RESOURCES = at("scheme.grad_worker_resources", note="a mapping such as {\"num_gpus\": 1}")

_AUTORESTART = at("scheme.on_worker_failure", note="\"restart\", \"ignore\" or \"raise\"")
_ALWAYS_CLIPPED = no_option("actors always clip actions to the bounds, and normalized observations to [-10, 10]")
_OWN_LOSS = no_option("an algorithm of your own adds terms to a loss; see docs/auxiliary_loss.md")
_BETAS = no_option("give `optimizer` a function of params and lr, such as "
                   "functools.partial(torch.optim.Adam, betas=(0.9, 0.99))")
_WHOLE_CHECKPOINTS = no_option("checkpoints always contain the replay memory and the normalizers")
_NO_SDE = no_option("there is no state-dependent exploration")
_NO_KL_SCHEDULE = no_option(
    "no schedule depends on the KL divergence; `target_kl` skips the rest of a rollout's updates")
_IMAGES = no_option("see `normalize_obs`; images of type uint8 are always divided by 255")
_INITIAL_WEIGHTS = no_option("initial weights of on-policy actors are orthogonal; `policy_gain` scales those of the "
                             "policy's head")
_ALWAYS_REPORTED = no_option("all statistics are always reported; see docs/statistics.md")

# These are option names of RLlib's old policy optimizers and of the older PyTorchRL, this package's predecessor.
_PREDECESSORS: dict[str, tuple[Here, ...]] = {
    "grads_per_step": at("scheme.updates_per_step"),
    "buffer_size": _REPLAY_SIZE,
    "num_replay_buffer_shards": at("scheme.num_replay_workers"),
    "num_shards": at("scheme.num_replay_workers"),
    "prioritized_replay": _PRIORITIZED,
    "prioritized_replay_alpha": at("replay.alpha | scheme.alpha"),
    "prioritized_replay_beta": at("replay.beta | scheme.beta"),
    "prioritized_replay_eps": _EPSILON,
    "sample_batch_size": _ROLLOUT,
    "batch_replay": no_option("the storage decides; `RolloutSequenceBuffer` and `VTraceBuffer` replay whole rollouts"),
    "num_sgd_iter": (
        Here("algorithm.num_epochs | scheme.num_passes", "`num_epochs` counts passes over a rollout, `num_passes` "
                                                         "uses of a queued train batch"),),
    "learner_queue_size": at("scheme.queue_size"),
    "learner_queue_timeout": at("scheme.queue_timeout_s", note="seconds"),
    "sample_queue_depth": at("scheme.col_in_flight"),
    "replay_queue_depth": at("scheme.prefetch"),
    "workers": at("scheme.num_col_workers | scheme.num_grad_workers"),
    "local_device": at("scheme.device"),
    "initial_weights": at("actor.checkpoint", note="path of a saved model"),
    "col_workers_factory": _SETS,
    "grad_workers_factory": _SETS,
    "debug": _ALWAYS_REPORTED,
    "col_workers_communication": at("scheme.col_communication"),
    "col_workers_resources": at("scheme.col_worker_resources"),
    "col_preemption_thresholds": at("scheme.col_fraction_workers | scheme.fraction_samples", note="two options"),
    "col_fraction_samples": at("scheme.fraction_samples"),
    "col_compress_data": at("scheme.compress_data_to_send", note="True or a codec"),
    "grad_workers_communication": at("scheme.grad_communication"),
    "grad_workers_resources": at("scheme.grad_worker_resources"),
    "grad_compress_data": at("scheme.compress_grads_to_send", note="True or a codec"),
    "decentralized_update_execution": at("scheme.distribute_gradients"),
    "eps": at("algorithm.adam_eps"),
    "test_every": at("learner.eval_every", note="counts env steps, not updates"),
    "num_test_episodes": at("learner.eval_episodes"),
    "epsilon_decay": at("algorithm.epsilon_steps", note="epsilon decreases linearly, not by a factor"),
    "policy_loss_addons": _OWN_LOSS,
    "input_space": at("actor.observation_space"),
    "feature_extractor_network": at("actor.feature_extractor", note="\"cnn\", \"impala\", \"fixup\" or a function that "
                                                                  "builds one"),
    "feature_extractor_kwargs": at("actor.feature_extractor", note="a function of a space, with its arguments bound"),
    "recurrent_nets": at("actor.recurrent_net", note="\"gru\" or \"lstm\""),
    "recurrent_nets_kwargs": at("actor.recurrent_size"),
    "restart_model": at("actor.checkpoint", note="path of a saved model"),
}
_STABLE_BASELINES: dict[str, tuple[Here, ...]] = {
    "policy": _NETWORK,
    "network": _NETWORK,  # in OpenAI Baselines
    "learning_rate": _LEARNING_RATES,
    "n_steps": (
        Here("rollouts.size", "steps of each environment"),
        Here("replay.n_step | replay.rollout_size", "rewards summed before the bootstrap, and steps of each "
                                                    "environment in a rollout")),
    "batch_size": _SAMPLES,
    "n_epochs": _EPOCHS,
    "clip_range": at("algorithm.clip_param"),
    "clip_range_vf": at("algorithm.clip_param_vf", note="needs `use_clipped_value_loss`=True"),
    "normalize_advantage": at("algorithm.advantage_normalization", note="\"minibatch\", \"batch\" or \"none\""),
    "ent_coef": _ENTROPY,
    "vf_coef": _HALF_SQUARES,
    **dict.fromkeys(("use_sde", "sde_sample_freq", "use_expln", "full_std", "use_sde_at_warmup"), _NO_SDE),
    **dict.fromkeys((
        "rollout_buffer_class", "rollout_buffer_kwargs", "replay_buffer_class", "replay_buffer_kwargs"), _OWN_STORAGE),
    "optimize_memory_usage": at("replay.stacked_frames", note="every observation is always stored only once"),
    "stats_window_size": no_option("means of returns are over the last 100 episodes"),
    "tensorboard_log": at("learner.log_dir", note="with `tensorboard`=True"),
    "tb_log_name": at("learner.log_dir"),
    "policy_kwargs": _ENTRIES,
    "verbose": at("learner.progress", note="True or False"),
    "progress_bar": at("learner.progress"),
    "total_timesteps": at("learner.target_steps"),
    "log_interval": at("learner.log_every", note="counts env steps"),
    "reset_num_timesteps": at("learner.resume", note="True continues from the newest checkpoint"),
    "callback": _CALLBACK,
    "learning_starts": at("algorithm.start_steps"),
    "tau": at("algorithm.polyak", note="`polyak` = 1 - tau"),
    "train_freq": at("algorithm.update_every", note="counts env steps of all environments"),
    "gradient_steps": at("algorithm.num_updates"),
    "action_noise": at("algorithm.noise", note="\"gaussian\", \"ou\" or \"none\""),
    "exploration_fraction": at("algorithm.epsilon_steps", note="`epsilon_steps` = exploration_fraction * "
                                                                "target_steps"),
    "exploration_initial_eps": at("algorithm.initial_epsilon"),
    "exploration_final_eps": at("algorithm.final_epsilon"),
    "target_policy_noise": at("algorithm.target_noise"),
    "target_noise_clip": at("algorithm.noise_clip"),
    "rms_prop_eps": at("algorithm.rmsprop_eps"),
    "use_rms_prop": at("algorithm.optimizer", note="`optimizer`=\"rmsprop_tf\""),
    "n_envs": _ENVS,
    **dict.fromkeys(("env_id", "env_name"), _ENV),
    "vec_env_cls": at("environments.backend", note="\"sync\" for DummyVecEnv, \"async\" for SubprocVecEnv"),
    "wrapper_class": at("environments.wrappers", note="a tuple of functions from environment to environment"),
    "monitor_dir": at("environments.log_dir", "learner.log_dir"),
    "eval_freq": _EVAL_EVERY,
    "n_eval_episodes": at("learner.eval_episodes"),
    "eval_env": no_option("evaluations use the test environments that are given to `Scheme`; `train` creates them "
                           "from the training environment"),
    "save_freq": at("learner.checkpoint_every", note="counts env steps of all environments"),
    "save_path": at("learner.log_dir"),
    "net_arch": at("actor.hidden_sizes"),
    "activation_fn": at("actor.activation", note="by name, such as \"relu\""),
    "ortho_init": at("actor.policy_gain", note="initial weights are always orthogonal"),
    "features_extractor_class": at("actor.feature_extractor"),
    "features_extractor_kwargs": at("actor.feature_extractor", note="a function of a space, with its arguments bound"),
    "share_features_extractor": at("actor.shared_policy_value_network"),
    "optimizer_class": at("algorithm.optimizer", note="a name, a class of torch.optim or a function of params and lr"),
    "optimizer_kwargs": no_option("its entries are options themselves: `adam_eps`, `weight_decay`, `momentum`, "
                                   "`rmsprop_eps`, `rmsprop_decay`"),
    "n_critics": at("actor.num_critics"),
    "lstm_hidden_size": at("actor.recurrent_size"),
    "norm_obs": at("actor.normalize_obs"),
    "norm_reward": at("actor.normalize_reward"),
    "n_stack": at("environments.frame_stack"),
    "clip_obs": _ALWAYS_CLIPPED,
    "clip_reward": no_option("normalized rewards are always clipped to [-10, 10]; see also `reward_transform`"),
    "normalize_images": _IMAGES,
    "squash_output": no_option("SAC squashes its actions; the policies of other algorithms are not squashed"),
    "best_model_save_path": _BEST_MODEL,
    "callback_on_new_best": _CALLBACK,
    "log_path": at("learner.log_dir"),
    **dict.fromkeys(("save_replay_buffer", "save_vecnormalize"), _WHOLE_CHECKPOINTS),
    "frame_skip": no_option("environments and their wrappers skip frames, see `env_kwargs` and `wrappers`"),
}
_RLLIB: dict[str, tuple[Here, ...]] = {
    "num_env_runners": _COLLECTORS,
    "num_workers": at("scheme.num_col_workers | scheme.num_grad_workers",
                       note="1 works in the learner's process, like 0 in RLlib"),
    "num_rollout_workers": _COLLECTORS,
    **dict.fromkeys(("num_envs_per_env_runner", "num_envs_per_worker"), _ENVS),
    "rollout_fragment_length": _ROLLOUT,
    "train_batch_size": at("scheme.train_batch_size"),
    "train_batch_size_per_learner": at("scheme.train_batch_size"),
    **dict.fromkeys(("minibatch_size", "sgd_minibatch_size"), _SAMPLES),
    **dict.fromkeys(("lambda", "lambda_"), _LAMBDA),
    "use_gae": at("rollouts.gae_lambda", note="1.0 sums all rewards"),
    "kl_coeff": at("algorithm.kl_coef", note="`target_kl` of PPO limits it instead"),
    "use_kl_loss": at("algorithm.kl_coef", note="above 0"),
    "entropy_coeff": _ENTROPY,
    "entropy_coeff_schedule": at("algorithm.entropy_coef", note="a schedule such as linear(0.01, 0.0)"),
    "vf_loss_coeff": _HALF_SQUARES,
    "vf_clip_param": at("algorithm.clip_param_vf", note="needs `use_clipped_value_loss`=True"),
    "vf_share_layers": at("actor.shared_policy_value_network"),
    "grad_clip": at("algorithm.max_grad_norm", note="the global norm"),
    "lr_schedule": _FALLING,
    "num_learners": at("scheme.num_grad_workers", note="1 learns in this process, like 0 in RLlib"),
    "num_gpus": at("scheme.device", note="`device`=\"cuda\""),
    **dict.fromkeys(("num_gpus_per_learner", "num_cpus_per_learner"), _LEARNER_RESOURCES),
    **dict.fromkeys((
        "num_cpus_per_env_runner", "num_cpus_per_worker", "num_gpus_per_env_runner", "num_gpus_per_worker",
    ), _RESOURCES_OF),
    "framework": no_option("all networks are PyTorch networks"),
    **dict.fromkeys(("num_aggregation_workers", "num_aggregator_actors_per_learner"), no_option(
        "collection workers send whole rollouts, and the learner joins them")),
    "replay_buffer_num_slots": at("scheme.replay_slots"),
    "max_requests_in_flight_per_env_runner": at("scheme.col_in_flight"),
    "max_sample_requests_in_flight_per_worker": at("scheme.col_in_flight"),
    "sample_async": at("scheme.col_communication", note="`col_communication`=\"asynchronous\""),
    "use_critic": no_option("on-policy algorithms always learn values"),
    "grad_clip_by": no_option("`max_grad_norm` limits the global norm"),
    "shuffle_batch_per_epoch": no_option("each epoch draws new mini-batches"),
    "use_circular_buffer": at("scheme.minibatch_buffer_size | scheme.num_passes", note="numbers"),
    "circular_buffer_num_batches": at("scheme.minibatch_buffer_size"),
    "circular_buffer_iterations_per_batch": at("scheme.num_passes"),
    "simple_queue_size": at("scheme.queue_size"),
    "target_worker_clipping": at("algorithm.is_clip"),
    "adam_epsilon": at("algorithm.adam_eps"),
    "td_error_loss_fn": at("algorithm.loss", note="\"huber\" or \"mse\""),
    "burn_in_len": at("replay.burn_in"),
    "store_buffer_in_checkpoints": _WHOLE_CHECKPOINTS,
    "normalize_actions": no_option("only SAC, TD3 and DDPG scale their actions to the bounds"),
    "clip_actions": _ALWAYS_CLIPPED,
    "gym_env_vectorize_mode": at("environments.backend", note="\"sync\", \"async\" or \"vector\""),
    "evaluation_parallel_to_training": no_option("one worker evaluates in parallel with training"),
    "explore": no_option("training always explores; evaluations always take the policy's best actions"),
    "vtrace": no_option("IMPALA and APPO always apply V-trace corrections"),
    "vtrace_clip_rho_threshold": at("rollouts.rho_bar"),
    "vtrace_clip_pg_rho_threshold": at("rollouts.rho_bar", note="one bound for values and policy gradients"),
    "opt_type": at("algorithm.optimizer"),
    "decay": at("algorithm.rmsprop_decay"),
    "replay_buffer_config": no_option("its entries are options themselves: `size` (in `train` `replay_size`), "
                                       "`prioritized`, `alpha`, `beta`"),
    "capacity": _REPLAY_SIZE,
    "double_q": at("algorithm.double"),
    "fcnet_activation": at("actor.activation"),
    **dict.fromkeys((
        "hiddens", "fcnet_hiddens", "post_fcnet_hiddens", "head_fcnet_hiddens"), at("actor.hidden_sizes")),
    "conv_filters": at("actor.feature_extractor", note="\"cnn\", \"impala\", \"fixup\" or a function that builds one"),
    "use_lstm": at("actor.recurrent_net", note="`recurrent_net`=\"lstm\""),
    **dict.fromkeys(("model", "q_model_config", "policy_model_config"), _ENTRIES),
    "lstm_cell_size": at("actor.recurrent_size"),
    **dict.fromkeys(("lstm_use_prev_action", "lstm_use_prev_reward"), at("actor.prev_action_reward")),
    "max_seq_len": at("rollouts.sequence_length", "replay.length"),
    **dict.fromkeys(("target_network_update_freq", "target_update_freq"), _UPDATES_OF_TARGETS),
    "num_steps_sampled_before_learning_starts": _RANDOM_STEPS,
    "training_intensity": at("scheme.min_replay_ratio | scheme.max_replay_ratio",
                              note="env steps trained on per collected env step; with shards"),
    "twin_q": at("actor.num_critics", note="2 critics"),
    "actor_lr": at("algorithm.lr_pi"),
    "critic_lr": at("algorithm.lr_q"),
    "alpha_lr": at("algorithm.lr_alpha"),
    "epsilon": (Here("algorithm.initial_epsilon | replay.epsilon", "probability of a random action, and the constant "
                                                                   "added to errors in priorities"),
                Here("algorithm.rmsprop_eps | algorithm.adam_eps", "the constant in an optimizer's denominator")),
    "worker_side_prioritization": at("scheme.initial_priority", note="`initial_priority`=\"worker\""),
    "num_atoms": _DISTRIBUTIONAL,
    "evaluation_interval": _EVAL_EVERY,
    "evaluation_duration": at("learner.eval_episodes"),
    "evaluation_num_env_runners": no_option("one worker evaluates in parallel with training"),
    "observation_filter": at("actor.normalize_obs", note="True or False"),
    "clip_rewards": at("environments.reward_transform", note="\"sign\" or \"clip\""),
    "horizon": at("environments.max_episode_steps"),
    "batch_mode": no_option("rollouts have a fixed length, whether episodes end in them or not"),
    "compress_observations": at("scheme.compress_data_to_send"),
    "remote_worker_envs": at("environments.backend", note="`backend`=\"async\""),
    "env_config": at("environments.env_kwargs"),
    **dict.fromkeys((
        "ignore_worker_failures", "ignore_env_runner_failures", "recreate_failed_workers",
        "restart_failed_env_runners"), _AUTORESTART),
    "restart_failed_sub_environments": at("environments.on_env_error", note="`on_env_error`=\"restart\""),
    "sample_timeout_s": at("scheme.worker_timeout_s"),
    "log_level": _LOGGING,
    "callbacks": _CALLBACK,
    "callbacks_class": _CALLBACK,
    "policy_mapping_fn": at("environments.policy_of"),
    "policies_to_train": no_option("multi_agent(..., trainable=...) names the policies that learn"),
    "timesteps_total": at("learner.target_steps"),
    **dict.fromkeys((
        "checkpoint_freq", "checkpoint_frequency"), at("learner.checkpoint_every", note="counts env steps")),
    "num_to_keep": at("learner.keep_checkpoints"),
    **dict.fromkeys(("storage_path", "local_dir"), at("learner.log_dir")),
    "config": _FILES,
}
_CLEANRL: dict[str, tuple[Here, ...]] = {
    **dict.fromkeys(("exp_name", "run_name"), at("learner.log_dir")),
    "torch_deterministic": no_option("`seed` fixes every draw; docs/reproducibility.md lists the exact guarantees"),
    "cuda": at("scheme.device", note="`device`=\"cuda\""),
    **dict.fromkeys(("track", "wandb_project_name", "wandb_entity"), _TRACKING),
    "capture_video": _VIDEO,
    "save_model": at("learner.log_dir", note="contains model.pt after training"),
    **dict.fromkeys(("upload_model", "hf_entity"), no_option("nothing is uploaded; `log_dir` contains model.pt")),
    "anneal_lr": _FALLING,
    "num_minibatches": at("algorithm.num_mini_batch"),
    "update_epochs": _EPOCHS,
    "norm_adv": at("algorithm.advantage_normalization", note="\"minibatch\", \"batch\" or \"none\""),
    "clip_coef": at("algorithm.clip_param"),
    "clip_vloss": at("algorithm.use_clipped_value_loss"),
    "num_iterations": at("learner.target_steps", note="counts env steps"),
    "start_e": at("algorithm.initial_epsilon"),
    "end_e": at("algorithm.final_epsilon"),
    "train_frequency": at("algorithm.update_every", note="counts env steps of all environments"),
    "target_network_frequency": _UPDATES_OF_TARGETS,
    "policy_lr": at("algorithm.lr_pi"),
    "q_lr": at("algorithm.lr_q"),
    "policy_frequency": at("algorithm.policy_delay"),
    "autotune": at("algorithm.learn_alpha"),
    "policy_noise": at("algorithm.target_noise"),
    "exploration_noise": at("algorithm.noise_std"),
    **dict.fromkeys(("n_atoms", "v_min", "v_max"), _DISTRIBUTIONAL),
}
_SAMPLE_FACTORY: dict[str, tuple[Here, ...]] = {
    "train_for_env_steps": at("learner.target_steps"),
    "rollout": _ROLLOUT,
    "num_batches_per_epoch": at("algorithm.num_mini_batch"),
    "exploration_loss_coeff": _ENTROPY,
    "value_loss_coeff": _HALF_SQUARES,
    "kl_loss_coeff": at("algorithm.kl_coef"),
    "use_rnn": at("actor.recurrent_net", note="\"gru\" or \"lstm\""),
    "rnn_size": at("actor.recurrent_size"),
    "normalize_input": at("actor.normalize_obs"),
    "algo": no_option("the algorithm is the first argument of train(...) and of the command line"),
    "async_rl": at("scheme.col_communication", note="`col_communication`=\"asynchronous\""),
    "serial_mode": at("scheme.num_col_workers", note="1, with synchronous communication, which is the default"),
    "num_batches_to_accumulate": at("scheme.queue_size"),
    "worker_num_splits": no_option("workers compute their own actions; see `inference`"),
    "policy_workers_per_policy": at("scheme.inference", note="\"central\": the learner's device computes the actions"),
    "batched_sampling": no_option("the environments of a worker always act in one batch"),
    "num_policies": at("environments.policy_of", note="policies of several agents"),
    "recurrence": at("rollouts.sequence_length"),
    "shuffle_minibatches": no_option("mini-batches are always drawn at random"),
    "reward_scale": at("environments.reward_transform", note="a factor"),
    "reward_clip": at("environments.reward_transform", note="\"clip\" limits rewards to [-1, 1]"),
    "value_bootstrap": no_option("targets always include the value of the last observation of a truncated episode"),
    "normalize_returns": at("actor.normalize_reward", note="divides rewards by the deviation of discounted returns"),
    "exploration_loss": no_option("the exploration loss is the entropy; see `entropy_coef`"),
    "ppo_clip_ratio": at("algorithm.clip_param", note="ratios are clipped to [1 - `clip_param`, 1 + `clip_param`]"),
    "ppo_clip_value": at("algorithm.clip_param_vf", note="needs `use_clipped_value_loss`=True"),
    "with_vtrace": no_option("IMPALA and APPO always apply V-trace corrections"),
    "vtrace_rho": at("rollouts.rho_bar"),
    "vtrace_c": at("rollouts.c_bar"),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), _BETAS),
    **dict.fromkeys(("lr_schedule_kl_threshold", "lr_adaptive_min", "lr_adaptive_max"), _NO_KL_SCHEDULE),
    **dict.fromkeys(("obs_subtract_mean", "obs_scale"), _IMAGES),
    "normalize_input_keys": no_option("`normalize_obs` applies to all numeric observations except images"),
    "decorrelate_experience_max_seconds": no_option("environments start at the same time, each with its own seed"),
    "actor_worker_gpus": at("scheme.col_device"),
    "set_workers_cpu_affinity": no_option("the operating system assigns cores to workers"),
    "force_envs_single_thread": at("scheme.col_num_threads", note="PyTorch threads of a collection worker"),
    **dict.fromkeys(("experiment", "train_dir"), at("learner.log_dir")),
    "restart_behavior": at("learner.resume | learner.overwrite", note="True"),
    "save_every_sec": at("learner.checkpoint_every", note="counts env steps"),
    **dict.fromkeys(("save_best_every_sec", "save_best_metric"), _BEST_MODEL),
    "train_for_seconds": no_option("`target_steps` ends a run; a callback may call run.request_stop(...)"),
    "experiment_summaries_interval": at("learner.log_every_s"),
    "stats_avg": no_option("means of returns are over the last 100 episodes"),
    "with_wandb": _TRACKING,
    **dict.fromkeys(("encoder_mlp_layers", "decoder_mlp_layers"), at("actor.hidden_sizes")),
    "encoder_conv_architecture": at("actor.feature_extractor", note="\"cnn\", \"impala\", \"fixup\" or a function that "
                                                                  "builds one"),
    "rnn_type": at("actor.recurrent_net", note="\"gru\" or \"lstm\""),
    "rnn_num_layers": no_option("`recurrent_net` has one layer"),
    "nonlinearity": at("actor.activation"),
    "policy_initialization": _INITIAL_WEIGHTS,
    "policy_init_gain": at("actor.policy_gain"),
    "actor_critic_share_weights": at("actor.shared_policy_value_network"),
    "adaptive_stddev": no_option("the deviation of a Gaussian policy is one learned vector; see `log_std_init`"),
    "initial_stddev": at("actor.log_std_init", note="the logarithm"),
    "env_framestack": at("environments.frame_stack"),
    "env_frameskip": no_option("environments and their wrappers skip frames, see `env_kwargs` and `wrappers`"),
}
# A user may pass these options of this package to a component that lacks them or has other names for them.
_OWN: dict[str, tuple[Here, ...]] = {
    "num_envs": _ENVS,
    "num_steps": _ROLLOUT,
    "replay_size": _REPLAY_SIZE,
    "priority_epsilon": _EPSILON,
    "prioritized": _PRIORITIZED,
    "alpha": (Here("replay.alpha | scheme.alpha"),
              Here("algorithm.initial_alpha", "`learn_alpha`=False keeps it constant")),
    "lr": _LEARNING_RATES,
    "gamma": at("algorithm.gamma"),
    "num_epochs": _EPOCHS,
    "num_mini_batch": at("algorithm.num_mini_batch"),
    "mini_batch_size": _SAMPLES,
    "entropy_coef": _ENTROPY,
    "max_grad_norm": at("algorithm.max_grad_norm"),
    "gae_lambda": _LAMBDA,
    "hidden_sizes": at("actor.hidden_sizes"),
    "target_steps": at("learner.target_steps"),
    "log_dir": at("learner.log_dir"),
    "num_col_workers": at("scheme.num_col_workers"),
    "num_grad_workers": at("scheme.num_grad_workers"),
    "device": at("scheme.device"),
    "seed": at("scheme.seed"),
}
# Users try these common words for networks before they know the name of the option.
_COMMON: dict[str, tuple[Here, ...]] = {
    **dict.fromkeys(("net", "encoder", "extractor", "backbone"), at(
        "actor.feature_extractor", note="a function of a space that builds a network")),
    "actor": no_option("`feature_extractor` and `hidden_sizes` change its networks; an actor of your own is the "
                       "`actor_factory` of `Scheme`, see docs/own_actor.md"),
}

ELSEWHERE: Mapping[str, tuple[Here, ...]] = MappingProxyType(
    {**_COMMON, **_OWN, **_SAMPLE_FACTORY, **_CLEANRL, **_RLLIB, **_STABLE_BASELINES, **_PREDECESSORS})
"""Name of an option in another library or in another part of this package -> meanings, in order of preference."""

OF_OTHER_LIBRARIES = tuple(sorted({*_PREDECESSORS, *_STABLE_BASELINES, *_RLLIB, *_CLEANRL, *_SAMPLE_FACTORY}))
"""The names from other libraries; all other names in `ELSEWHERE` are names of this package."""
