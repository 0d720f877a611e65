"""Map option names that are used elsewhere to the options of this package.

The names come from RLlib (its current version and its old policy optimizers), Stable-Baselines3, CleanRL, Sample
Factory, and the `train` function of this package, which renames some options of the parts. Error
messages (see `pytorchrl.agent.names`) and the documentation use this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

HOMES = MappingProxyType({
    "algorithm": "algorithm", "actor": "actor", "rollouts": "storage of rollouts", "replay": "replay storage",
    "environments": "vector of environments", "scheme": "scheme", "learner": "learner",
})
"""Kind of part that has an option -> noun in messages; `replay` is for storages that draw transitions repeatedly."""


@dataclass(frozen=True)
class Here:
    """The option or options of this package that a name from another library may mean.

    Attributes:
        at: Options as `home.name`, where `home` is a key of `HOMES`; `a + b` means that both options are needed, and
            `a | b` that either is enough. Empty if there is no such option.
        note: How the option differs in unit or meaning; if there is no option, a remedy. Names of options are in
            backticks.
    """

    at: str = ""
    note: str = ""

    @property
    def options(self) -> tuple[tuple[str, str], ...]:
        """The options in `at` as pairs (home, name)."""
        return tuple((home, name) for home, _, name in (
            option.strip().partition(".") for option in self.at.replace("+", "|").split("|") if option.strip()))

    @property
    def needs_all(self) -> bool:
        """Whether all of the options are needed together."""
        return "+" in self.at


def _at(*places: str, note: str = "") -> tuple[Here, ...]:
    """Return one `Here` for each of `places`, in order of preference; all have the same note."""
    return tuple(Here(place, note) for place in places)


def _no_option(note: str) -> tuple[Here, ...]:
    return (Here(note=note),)


_LEARNING_RATES = _at("algorithm.lr", "algorithm.lr_q + algorithm.lr_pi")
_FALLING = _at("algorithm.lr", "algorithm.lr_q + algorithm.lr_pi", note="a schedule such as linear(3e-4, 0.0)")
_ROLLOUT = _at("replay.rollout_size | rollouts.size", note="steps of each environment")
_REPLAY_SIZE = _at("replay.size | scheme.size")
_SAMPLES = (
    Here("algorithm.mini_batch_size"),
    Here("algorithm.num_mini_batch", "counts the mini-batches of a pass, not their samples"),
    Here("scheme.train_batch_size", "steps of a train batch; the algorithm splits it into mini-batches"),
)
_EPOCHS = _at("algorithm.num_epochs", "scheme.num_passes")
_UPDATES_OF_TARGETS = _at("algorithm.target_update_interval", note="counts updates, not env steps")
_RANDOM_STEPS = _at("algorithm.start_steps", "scheme.learning_starts")
_ENTROPY = (Here("algorithm.entropy_coef"), Here("algorithm.initial_alpha", "`learn_alpha`=False keeps it constant"))
_HALF_SQUARES = _at("algorithm.value_loss_coef", note="weight of half the mean squared error")
_LAMBDA = _at("rollouts.gae_lambda", "rollouts.vtrace_lambda")
_COLLECTORS = _at("scheme.num_col_workers", note="1 collects in the learner's process, like 0 in RLlib")
_ENVS = _at("environments.vec_env_size", note="environments of each collection worker")
_ENV = _at("environments.env_fn")
_PRIORITIZED = (Here("replay.prioritized | scheme.prioritized"),
                Here(note="`PERBuffer` draws by priority, `ReplayBuffer` uniformly"))
_EPSILON = (Here("replay.epsilon | scheme.epsilon"),)
_EVAL_EVERY = _at("learner.eval_every", note="counts env steps of all environments")
_NETWORK = _no_option("the network is chosen from the observations; see `hidden_sizes`, `feature_extractor`, "
                      "`recurrent_net`")
_ENTRIES = _no_option("its entries are options themselves: `hidden_sizes` for net_arch or fcnet_hiddens, "
                      "`activation`, `feature_extractor`, `recurrent_net` for use_lstm, `optimizer`")
_OWN_STORAGE = _no_option("give a storage's factory to `Scheme`, such as ReplayBuffer.create_factory(...)")
_TRACKING = _no_option("`log_dir` contains metrics.jsonl and TensorBoard files, which trackers can follow")
_VIDEO = _no_option("`pytorchrl enjoy RUN_DIR --video DIR` records videos of a trained agent")
_CALLBACK = _at("learner.callbacks", note="objects of classes derived from pytorchrl.callbacks.Callback")
_FILES = _no_option("`pytorchrl train --config FILE` reads a configuration file")
_DISTRIBUTIONAL = _no_option("there is no distributional Q-learning")
_LOGGING = _no_option("set the level of the logger 'pytorchrl' in Python's logging")
_RESOURCES_OF = _at("scheme.col_worker_resources", note="a mapping such as {\"num_cpus\": 1}")
_LEARNER_RESOURCES = _at("scheme.grad_worker_resources", note="a mapping such as {\"num_gpus\": 1}")

# Option names from RLlib's old policy optimizers, and from the first version of the worker-tree interface.
_OPTIMISERS: dict[str, tuple[Here, ...]] = {
    "grads_per_step": _at("scheme.updates_per_step"),
    "buffer_size": _REPLAY_SIZE,
    "num_replay_buffer_shards": _at("scheme.num_replay_workers"),
    "num_shards": _at("scheme.num_replay_workers"),
    "prioritized_replay": _PRIORITIZED,
    "prioritized_replay_alpha": _at("replay.alpha | scheme.alpha"),
    "prioritized_replay_beta": _at("replay.beta | scheme.beta"),
    "prioritized_replay_eps": _EPSILON,
    "sample_batch_size": _ROLLOUT,
    "batch_replay": _no_option("the storage decides; `RolloutSequenceBuffer` and `VTraceBuffer` replay whole rollouts"),
    "num_sgd_iter": (
        Here("algorithm.num_epochs | scheme.num_passes", "`num_epochs` counts passes over a rollout, `num_passes` "
                                                         "uses of a queued train batch"),),
    "learner_queue_size": _at("scheme.queue_size"),
    "learner_queue_timeout": _at("scheme.queue_timeout_s", note="seconds"),
    "sample_queue_depth": _at("scheme.col_in_flight"),
    "replay_queue_depth": _at("scheme.prefetch"),
    "workers": _at("scheme.num_col_workers | scheme.num_grad_workers"),
    "local_device": _at("scheme.device"),
    "initial_weights": _at("actor.checkpoint", note="path of a saved model"),
    "col_workers_factory": _no_option("`Scheme` builds the worker sets itself from `num_col_workers` and "
                                      "`num_grad_workers`"),
}
_STABLE_BASELINES: dict[str, tuple[Here, ...]] = {
    "policy": _NETWORK,
    "learning_rate": _LEARNING_RATES,
    "n_steps": (
        Here("rollouts.size", "steps of each environment"),
        Here("replay.n_step | replay.rollout_size", "rewards summed before the bootstrap, and steps of each "
                                                    "environment in a rollout")),
    "batch_size": _SAMPLES,
    "n_epochs": _EPOCHS,
    "clip_range": _at("algorithm.clip_param"),
    "clip_range_vf": _at("algorithm.clip_param_vf", note="needs `use_clipped_value_loss`=True"),
    "normalize_advantage": _at("algorithm.advantage_normalization", note="\"minibatch\", \"batch\" or \"none\""),
    "ent_coef": _ENTROPY,
    "vf_coef": _HALF_SQUARES,
    "use_sde": _no_option("there is no state-dependent exploration"),
    "sde_sample_freq": _no_option("there is no state-dependent exploration"),
    "rollout_buffer_class": _OWN_STORAGE,
    "rollout_buffer_kwargs": _OWN_STORAGE,
    "replay_buffer_class": _OWN_STORAGE,
    "replay_buffer_kwargs": _OWN_STORAGE,
    "optimize_memory_usage": _at("replay.stacked_frames", note="every observation is always stored only once"),
    "stats_window_size": _no_option("means of returns are over the last 100 episodes"),
    "tensorboard_log": _at("learner.log_dir", note="with `tensorboard`=True"),
    "tb_log_name": _at("learner.log_dir"),
    "policy_kwargs": _ENTRIES,
    "verbose": _at("learner.progress", note="True or False"),
    "progress_bar": _at("learner.progress"),
    "total_timesteps": _at("learner.target_steps"),
    "log_interval": _at("learner.log_every", note="counts env steps"),
    "reset_num_timesteps": _at("learner.resume", note="True continues from the newest checkpoint"),
    "callback": _CALLBACK,
    "learning_starts": _at("algorithm.start_steps"),
    "tau": _at("algorithm.polyak", note="`polyak` = 1 - tau"),
    "train_freq": _at("algorithm.update_every", note="counts env steps of all environments"),
    "gradient_steps": _at("algorithm.num_updates"),
    "action_noise": _at("algorithm.noise", note="\"gaussian\", \"ou\" or \"none\""),
    "exploration_fraction": _at("algorithm.epsilon_steps", note="`epsilon_steps` = exploration_fraction * "
                                                                "target_steps"),
    "exploration_initial_eps": _at("algorithm.initial_epsilon"),
    "exploration_final_eps": _at("algorithm.final_epsilon"),
    "target_policy_noise": _at("algorithm.target_noise"),
    "target_noise_clip": _at("algorithm.noise_clip"),
    "rms_prop_eps": _at("algorithm.rmsprop_eps"),
    "use_rms_prop": _at("algorithm.optimizer", note="`optimizer`=\"rmsprop_tf\""),
    "n_envs": _ENVS,
    "env_id": _ENV,
    "env_name": _ENV,
    "vec_env_cls": _at("environments.backend", note="\"sync\" for DummyVecEnv, \"async\" for SubprocVecEnv"),
    "wrapper_class": _at("environments.wrappers", note="a tuple of functions from environment to environment"),
    "monitor_dir": _at("environments.log_dir", "learner.log_dir"),
    "eval_freq": _EVAL_EVERY,
    "n_eval_episodes": _at("learner.eval_episodes"),
    "eval_env": _no_option("evaluations use the test environments that are given to `Scheme`; `train` creates them "
                           "from the training environment"),
    "save_freq": _at("learner.checkpoint_every", note="counts env steps of all environments"),
    "save_path": _at("learner.log_dir"),
    "net_arch": _at("actor.hidden_sizes"),
    "activation_fn": _at("actor.activation", note="by name, such as \"relu\""),
    "ortho_init": _at("actor.policy_gain", note="initial weights are always orthogonal"),
    "features_extractor_class": _at("actor.feature_extractor"),
    "features_extractor_kwargs": _at("actor.feature_extractor", note="a function of a space, with its arguments bound"),
    "share_features_extractor": _at("actor.shared_policy_value_network"),
    "optimizer_class": _at("algorithm.optimizer", note="a name, a class of torch.optim or a function of params and lr"),
    "optimizer_kwargs": _no_option("its entries are options themselves: `adam_eps`, `weight_decay`, `momentum`, "
                                   "`rmsprop_eps`, `rmsprop_decay`"),
    "n_critics": _at("actor.num_critics"),
    "lstm_hidden_size": _at("actor.recurrent_size"),
    "norm_obs": _at("actor.normalize_obs"),
    "norm_reward": _at("actor.normalize_reward"),
    "n_stack": _at("environments.frame_stack"),
    "frame_skip": _no_option("environments and their wrappers skip frames, see `env_kwargs` and `wrappers`"),
}
_RLLIB: dict[str, tuple[Here, ...]] = {
    "num_env_runners": _COLLECTORS,
    "num_workers": _at("scheme.num_col_workers | scheme.num_grad_workers",
                       note="1 works in the learner's process, like 0 in RLlib"),
    "num_rollout_workers": _COLLECTORS,
    "num_envs_per_env_runner": _ENVS,
    "num_envs_per_worker": _ENVS,
    "rollout_fragment_length": _ROLLOUT,
    "train_batch_size": _at("scheme.train_batch_size"),
    "train_batch_size_per_learner": _at("scheme.train_batch_size"),
    "minibatch_size": _SAMPLES,
    "sgd_minibatch_size": _SAMPLES,
    "lambda": _LAMBDA,
    "lambda_": _LAMBDA,
    "use_gae": _at("rollouts.gae_lambda", note="1.0 sums all rewards"),
    "kl_coeff": _at("algorithm.kl_coef", note="`target_kl` of PPO ends an epoch instead"),
    "use_kl_loss": _at("algorithm.kl_coef", note="above 0"),
    "entropy_coeff": _ENTROPY,
    "entropy_coeff_schedule": _at("algorithm.entropy_coef", note="a schedule such as linear(0.01, 0.0)"),
    "vf_loss_coeff": _HALF_SQUARES,
    "vf_clip_param": _at("algorithm.clip_param_vf", note="needs `use_clipped_value_loss`=True"),
    "vf_share_layers": _at("actor.shared_policy_value_network"),
    "grad_clip": _at("algorithm.max_grad_norm", note="the global norm"),
    "lr_schedule": _FALLING,
    "num_learners": _at("scheme.num_grad_workers", note="1 learns in this process, like 0 in RLlib"),
    "num_gpus": _at("scheme.device", note="`device`=\"cuda\""),
    "num_gpus_per_learner": _LEARNER_RESOURCES,
    "num_cpus_per_learner": _LEARNER_RESOURCES,
    "num_cpus_per_env_runner": _RESOURCES_OF,
    "num_cpus_per_worker": _RESOURCES_OF,
    "num_gpus_per_env_runner": _RESOURCES_OF,
    "num_gpus_per_worker": _RESOURCES_OF,
    "framework": _no_option("all networks are PyTorch networks"),
    "num_aggregation_workers": _no_option("collection workers send whole rollouts, and the learner joins them"),
    "replay_buffer_num_slots": _at("scheme.replay_slots"),
    "max_requests_in_flight_per_env_runner": _at("scheme.col_in_flight"),
    "max_sample_requests_in_flight_per_worker": _at("scheme.col_in_flight"),
    "sample_async": _at("scheme.col_communication", note="`col_communication`=\"asynchronous\""),
    "vtrace": _no_option("IMPALA and APPO always apply V-trace corrections"),
    "vtrace_clip_rho_threshold": _at("rollouts.rho_bar"),
    "vtrace_clip_pg_rho_threshold": _at("rollouts.rho_bar", note="one bound for values and policy gradients"),
    "opt_type": _at("algorithm.optimizer"),
    "decay": _at("algorithm.rmsprop_decay"),
    "replay_buffer_config": _no_option("its entries are options themselves: `size` (in `train` `replay_size`), "
                                       "`prioritized`, `alpha`, `beta`"),
    "capacity": _REPLAY_SIZE,
    "double_q": _at("algorithm.double"),
    "hiddens": _at("actor.hidden_sizes"),
    "fcnet_hiddens": _at("actor.hidden_sizes"),
    "fcnet_activation": _at("actor.activation"),
    "post_fcnet_hiddens": _at("actor.hidden_sizes"),
    "conv_filters": _at("actor.feature_extractor", note="\"cnn\", \"impala\", \"fixup\" or a function that builds one"),
    "model": _ENTRIES,
    "use_lstm": _at("actor.recurrent_net", note="`recurrent_net`=\"lstm\""),
    "lstm_cell_size": _at("actor.recurrent_size"),
    "lstm_use_prev_action": _at("actor.prev_action_reward"),
    "lstm_use_prev_reward": _at("actor.prev_action_reward"),
    "max_seq_len": _at("rollouts.sequence_length", "replay.length"),
    "target_network_update_freq": _UPDATES_OF_TARGETS,
    "target_update_freq": _UPDATES_OF_TARGETS,
    "num_steps_sampled_before_learning_starts": _RANDOM_STEPS,
    "training_intensity": _at("scheme.min_replay_ratio | scheme.max_replay_ratio",
                              note="env steps trained on per collected env step; with shards"),
    "twin_q": _at("actor.num_critics", note="2 critics"),
    "actor_lr": _at("algorithm.lr_pi"),
    "critic_lr": _at("algorithm.lr_q"),
    "alpha_lr": _at("algorithm.lr_alpha"),
    "epsilon": (Here("algorithm.initial_epsilon | replay.epsilon", "probability of a random action, and the constant "
                                                                   "added to errors in priorities"),
                Here("algorithm.rmsprop_eps | algorithm.adam_eps", "the constant in an optimizer's denominator")),
    "worker_side_prioritization": _at("scheme.initial_priority", note="`initial_priority`=\"worker\""),
    "num_atoms": _DISTRIBUTIONAL,
    "evaluation_interval": _EVAL_EVERY,
    "evaluation_duration": _at("learner.eval_episodes"),
    "evaluation_num_env_runners": _no_option("one worker evaluates in parallel with training"),
    "observation_filter": _at("actor.normalize_obs", note="True or False"),
    "clip_rewards": _at("environments.reward_transform", note="\"sign\" or \"clip\""),
    "horizon": _at("environments.max_episode_steps"),
    "batch_mode": _no_option("rollouts have a fixed length, whether episodes end in them or not"),
    "compress_observations": _at("scheme.compress_data_to_send"),
    "remote_worker_envs": _at("environments.backend", note="`backend`=\"async\""),
    "env_config": _at("environments.env_kwargs"),
    "ignore_worker_failures": _at("scheme.on_worker_failure", note="\"restart\", \"ignore\" or \"raise\""),
    "ignore_env_runner_failures": _at("scheme.on_worker_failure", note="\"restart\", \"ignore\" or \"raise\""),
    "recreate_failed_workers": _at("scheme.on_worker_failure", note="\"restart\", \"ignore\" or \"raise\""),
    "restart_failed_env_runners": _at("scheme.on_worker_failure", note="\"restart\", \"ignore\" or \"raise\""),
    "restart_failed_sub_environments": _at("environments.on_env_error", note="`on_env_error`=\"restart\""),
    "sample_timeout_s": _at("scheme.worker_timeout_s"),
    "log_level": _LOGGING,
    "callbacks": _CALLBACK,
    "callbacks_class": _CALLBACK,
    "policy_mapping_fn": _at("environments.policy_of"),
    "policies_to_train": _no_option("multi_agent(..., trainable=...) names the policies that learn"),
    "timesteps_total": _at("learner.target_steps"),
    "checkpoint_freq": _at("learner.checkpoint_every", note="counts env steps"),
    "checkpoint_frequency": _at("learner.checkpoint_every", note="counts env steps"),
    "storage_path": _at("learner.log_dir"),
    "local_dir": _at("learner.log_dir"),
    "config": _FILES,
}
_CLEANRL: dict[str, tuple[Here, ...]] = {
    "exp_name": _at("learner.log_dir"),
    "run_name": _at("learner.log_dir"),
    "torch_deterministic": _no_option("`seed` fixes every draw; docs/reproducibility.md lists the exact guarantees"),
    "cuda": _at("scheme.device", note="`device`=\"cuda\""),
    "track": _TRACKING,
    "wandb_project_name": _TRACKING,
    "wandb_entity": _TRACKING,
    "capture_video": _VIDEO,
    "save_model": _at("learner.log_dir", note="contains model.pt after training"),
    "upload_model": _no_option("nothing is uploaded; `log_dir` contains model.pt"),
    "hf_entity": _no_option("nothing is uploaded; `log_dir` contains model.pt"),
    "anneal_lr": _FALLING,
    "num_minibatches": _at("algorithm.num_mini_batch"),
    "update_epochs": _EPOCHS,
    "norm_adv": _at("algorithm.advantage_normalization", note="\"minibatch\", \"batch\" or \"none\""),
    "clip_coef": _at("algorithm.clip_param"),
    "clip_vloss": _at("algorithm.use_clipped_value_loss"),
    "num_iterations": _at("learner.target_steps", note="counts env steps"),
    "start_e": _at("algorithm.initial_epsilon"),
    "end_e": _at("algorithm.final_epsilon"),
    "train_frequency": _at("algorithm.update_every", note="counts env steps of all environments"),
    "target_network_frequency": _UPDATES_OF_TARGETS,
    "policy_lr": _at("algorithm.lr_pi"),
    "q_lr": _at("algorithm.lr_q"),
    "policy_frequency": _at("algorithm.policy_delay"),
    "autotune": _at("algorithm.learn_alpha"),
    "policy_noise": _at("algorithm.target_noise"),
    "exploration_noise": _at("algorithm.noise_std"),
    "n_atoms": _DISTRIBUTIONAL,
    "v_min": _DISTRIBUTIONAL,
    "v_max": _DISTRIBUTIONAL,
}
_SAMPLE_FACTORY: dict[str, tuple[Here, ...]] = {
    "train_for_env_steps": _at("learner.target_steps"),
    "rollout": _ROLLOUT,
    "num_batches_per_epoch": _at("algorithm.num_mini_batch"),
    "exploration_loss_coeff": _ENTROPY,
    "value_loss_coeff": _HALF_SQUARES,
    "kl_loss_coeff": _at("algorithm.kl_coef"),
    "use_rnn": _at("actor.recurrent_net", note="\"gru\" or \"lstm\""),
    "rnn_size": _at("actor.recurrent_size"),
    "normalize_input": _at("actor.normalize_obs"),
}
# Names of options of this package, for parts that lack the option or use a different name for it.
_OWN: dict[str, tuple[Here, ...]] = {
    "num_envs": _ENVS,
    "num_steps": _ROLLOUT,
    "replay_size": _REPLAY_SIZE,
    "priority_epsilon": _EPSILON,
    "prioritized": _PRIORITIZED,
    "alpha": (Here("replay.alpha | scheme.alpha"),
              Here("algorithm.initial_alpha", "`learn_alpha`=False keeps it constant")),
    "lr": _LEARNING_RATES,
    "gamma": _at("algorithm.gamma"),
    "num_epochs": _EPOCHS,
    "num_mini_batch": _at("algorithm.num_mini_batch"),
    "mini_batch_size": _SAMPLES,
    "entropy_coef": _ENTROPY,
    "max_grad_norm": _at("algorithm.max_grad_norm"),
    "gae_lambda": _LAMBDA,
    "hidden_sizes": _at("actor.hidden_sizes"),
    "target_steps": _at("learner.target_steps"),
    "log_dir": _at("learner.log_dir"),
    "num_col_workers": _at("scheme.num_col_workers"),
    "num_grad_workers": _at("scheme.num_grad_workers"),
    "device": _at("scheme.device"),
    "seed": _at("scheme.seed"),
}

ELSEWHERE: Mapping[str, tuple[Here, ...]] = MappingProxyType(
    {**_OWN, **_SAMPLE_FACTORY, **_CLEANRL, **_RLLIB, **_STABLE_BASELINES, **_OPTIMISERS})
"""Name in another library, or in another part of this package -> meanings, in order of preference."""

OF_OTHER_LIBRARIES = tuple(sorted({*_OPTIMISERS, *_STABLE_BASELINES, *_RLLIB, *_CLEANRL, *_SAMPLE_FACTORY}))
"""The names from other libraries; all other names in `ELSEWHERE` are names of this package."""
