"""Mutations for `mutations.py`: each has a text that occurs once in a file, its replacement, and the tests to run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A small, realistic defect: `old` in `file` is replaced by `new`."""

    file: str
    old: str
    new: str
    tests: str
    """Paths of tests, separated by spaces, optionally followed by ` -k EXPRESSION`."""
    equivalent: str = ""
    """The reason why no test can notice the mutation; empty if a test should notice it."""

    @property
    def files(self) -> list[str]:
        """The paths of the tests, without the `-k` expression."""
        return self.tests.partition(" -k ")[0].split()

    @property
    def only(self) -> str:
        """The `-k` expression that selects tests; empty for all tests."""
        return self.tests.partition(" -k ")[2]


def _of(file: str, tests: str, *changes: tuple[str, str] | tuple[str, str, str]) -> list[Mutation]:
    """Return the mutations of one file. A change is (old, new), or (old, new, why no test can notice the mutation)."""
    paths, dash, only = tests.partition(" -k ")
    tests = " ".join(f"tests/unit/{path}" for path in paths.split()) + dash + only
    return [Mutation(f"pytorchrl/{file}", old, new, tests, *reason) for old, new, *reason in changes]


_STORAGES = [
    *_of("agent/storages/ring.py",
         "agent/storages/test_ring.py agent/storages/test_replay.py agent/storages/test_replay_of_environments.py",
         ('for name in ("broken", "used"):', 'for name in ("broken",):'),
         ("shown = link[-1] == heads", "shown = link[-1] != heads"),
         ("gamma**k * column", "gamma**(k - 1) * column"),
         ('np.where(column["terminated"][last], 0.0, gamma**num_steps)', "gamma**num_steps"),
         ('~(column["terminated"][at] | column["truncated"][at])', '~column["terminated"][at]',
          "a row at which an episode ends links to an observation, not to a row"),
         ("if count > self.capacity:", "if count >= self.capacity:"),
         ("return ids >= self.first", "return ids > self.first"),
         ('self.counters["evicted"] += num_valid', 'self.counters["evicted"] += count'),
         ("return Inserted(rows, broken, previous < 0)", "return Inserted(rows, broken, previous >= 0)"),
         ("if not are_reused:", "if False:"),
         (" or head.ids[0] < self.first:", ":"),
         ("None if self._has_stacks or not heads.all() else", "None if self._has_stacks else"),
         ("None if self._has_stacks or not heads.all() else", "None if not heads.all() else"),
         ("head.after != _bytes(leaves, done, 0)", "head.after[1:] != _bytes(leaves, done, 0)[1:]")),
    *_of("agent/storages/sequences.py", "agent/storages/test_sequences.py",
         ("self._trained_from(k) + steps <= self.num_steps", "self._trained_from(k) + steps < self.num_steps"),
         ("k == 0 or self._trained_from(k - 1) + length < self.num_steps",
          "self._trained_from(k) + length <= self.num_steps"),
         ("begins[1:] |= last[:-1] | ~valid[:-1]", "begins[1:] |= ~valid[:-1]",
          "the row after an end begins an episode or is invalid"),
         ('here & ~(column["terminated"][row] | column["truncated"][row])', "here"),
         ("eta * absolute.max(0) + (1.0 - eta) * mean", "(1.0 - eta) * absolute.max(0) + eta * mean"),
         ("begin = book.warm[starts], burn_in - book.num_warm[starts]", "begin = book.warm[starts], 0 * starts"),
         ("found[name][known] = states[slots[known]]", "found[name][known] = 0.0")),
    *_of("agent/storages/trees.py", "agent/storages/test_trees.py",
         ("right = (mass >= left) & (self._nodes[nodes + 1] > 0.0)", "right = mass >= left"),
         ("mass -= np.where(right, left, 0.0)", "mass = mass"),
         ("np.minimum, np.inf", "np.maximum, 0.0"),
         ("end = self.capacity if end is None else end + self.capacity if end < 0 else end",
          "end = self.capacity if end is None else end"),
         ("self._num_leaves = 1 << (capacity - 1).bit_length()", "self._num_leaves = 1 << capacity.bit_length()",
          "only doubles the memory of a tree whose capacity is a power of two")),
    *_of("agent/storages/returns.py", "agent/storages/test_returns.py agent/storages/test_vtrace.py",
         ("(gamma * gae_lambda) * goes_on", "gamma * goes_on"),
         ("np.where(terminated, 0.0, next_value)", "next_value"),
         ("delta[~valid] = 0.0", "pass"),
         ("~(terminated | truncated) & valid", "~terminated & valid"),
         ("for limit in (rho_bar, c_bar)", "for limit in (c_bar, rho_bar)"),
         ("return (rho * advantage)", "return advantage")),
    *_of("agent/storages/per.py", "agent/storages/test_per.py",
         ("np.abs(errors).astype(np.float64) + self.options.epsilon", "np.abs(errors).astype(np.float64)"),
         ("known[known] = self.ring.columns", "known[known] |= self.ring.columns"),
         ('(leaves / smallest) ** -self.parameters["beta"]', '(leaves / smallest) ** self.parameters["beta"]'),
         ("(np.arange(count) + share) / count", "share"),
         ("np.where(np.asarray(leaves) > 0.0, leaves, np.inf)", "leaves"),
         ("self._max_priority = max(self._max_priority, float(priorities.max(initial=0.0)))", "pass"),
         ("self._num_stale += int(np.count_nonzero(~known))", "pass")),
    *_of("agent/storages/replay.py", "agent/storages/test_replay.py",
         ("for left in reversed(range(num_mini_batch * num_epochs))", "for left in reversed(range(num_mini_batch))"),
         ("batch.last = not left", "batch.last = False"),
         ('following = ring.columns["link"][window.last]', 'following = ring.columns["link"][rows]'),
         ("ring.take_mask(rows), ring.take_mask(following)", "ring.take_mask(rows), ring.take_mask(rows)")),
    *_of("agent/storages/samples.py", "agent/storages/test_on_policy.py",
         ('leaves["mask"] = leaves["mask"] | ~valid.unsqueeze(-1)', "pass"),
         ("for rollout in rollouts], fill=True)", "for rollout in rollouts])"),
         ("index=valid.any(0).nonzero().flatten()", "index=torch.arange(valid.shape[1])")),
]

_ALGORITHMS = [
    *_of("agent/algorithms/ppo.py", "agent/algorithms/test_on_policy_losses.py",
         ("log_ratio = torch.where(batch.valid, log_ratio, 0.0)", "pass"),
         ("torch.minimum(ratio * advantage", "torch.maximum(ratio * advantage"),
         ("torch.where(advantage < 0, bounded, surrogate)", "bounded"),
         ("error = torch.maximum(error, (clipped", "error = torch.minimum(error, (clipped"),
         ('info["kl"] > _KL_TOLERANCE *', 'info["kl"] >')),
    *_of("agent/algorithms/on_policy.py", "agent/algorithms/test_on_policy_losses.py",
         ("state[t + 1, e]", "state[t, e]")),
    *_of("agent/algorithms/optimizers.py", "agent/algorithms/test_flat_optimizer.py",
         ("moment.copy_(F.hardshrink(moment, _NEGLIGIBLE))", "pass"),
         ("_NEGLIGIBLE, _STEPS_PER_CLEANING = 1e-35, 64", "_NEGLIGIBLE, _STEPS_PER_CLEANING = 1e-35, 128")),
    *_of("agent/algorithms/replay.py", "agent/algorithms/test_replay.py agent/algorithms/test_replay_losses.py",
         ("due = self._num_stages(inserted) -", "due = self._num_stages(inserted) + 1 -"),
         ("self.targets[name].get_buffer(key).copy_(networks[name].get_buffer(key))", "pass"),
         ("lerp_(self.groups[name].data, 1 - polyak)", "lerp_(self.groups[name].data, polyak)"),
         ("if self.num_updates_made % self.options.target_update_interval == 0:", "if True:"),
         ("storage.num_learned_from = inserted", "pass"),
         ("is_random = self.parameters[START] > 0 and not deterministic", "is_random = self.parameters[START] > 0")),
    *_of("agent/algorithms/replay.py", "agent/algorithms/test_replay.py",
         ("// self.update_every", "// self.update_every + 1",
          "only differences of the number of stages are used, in which the additional one cancels")),
    *_of("agent/algorithms/r2d2.py", "agent/algorithms/test_r2d2.py agent/algorithms/test_previous_action_reward.py",
         ("None if deterministic else self.generator)", "self.generator)"),
         ("if self.parameters[START] > 0 and not deterministic:", "if self.parameters[START] > 0:"),
         ("states = self.actor.with_action(states, action)", "pass"),
         ("rescale(batch.ret + batch.discount * unrescale(value))", "rescale(batch.ret + batch.discount * value)"),
         ("if self.options.double else after", "if not self.options.double else after"),
         ('(0.5 if self.options.loss == "mse" else 1.0)', "1.0")),
    *_of("agent/algorithms/sac.py", "agent/algorithms/test_sac.py agent/algorithms/test_replay_losses.py",
         ("allowed = torch.where(allowed == 0, self.actor.action_size, allowed)", "pass"),
         (".amin(0) - alpha * next_logp", ".amin(0) + alpha * next_logp"),
         ("self.log_alpha * (entropy - self._target_entropy_of(batch))",
          "self.log_alpha * (self._target_entropy_of(batch) - entropy)"),
         ("actor.log_probs(next_obs, batch.next_mask)", "actor.log_probs(next_obs, batch.mask)")),
    *_of("agent/algorithms/dqn.py", "agent/algorithms/test_dqn.py agent/algorithms/test_replay_losses.py",
         ("0.4 ** (1 + 7 * index / max(1, num_collectors - 1))", "0.4 ** (1 + 7 * index / num_collectors)"),
         ("best = best_action(choosing, batch.next_mask)", "best = best_action(choosing, None)"),
         ("(batch.weight * self._loss(score", "(self._loss(score"),
         ("generator = None if deterministic else self.generator", "generator = self.generator")),
    *_of("agent/algorithms/ddpg.py", "agent/algorithms/test_ddpg.py agent/algorithms/test_replay_losses.py",
         ("noise.clamp_(-clip, clip)", "noise"),
         ("(self.num_updates_made + 1) % delay == 0", "self.num_updates_made % delay == 0"),
         ("return (action + noise).clamp_(-1.0, 1.0)", "return action + noise")),
    *_of("agent/algorithms/noise.py", "agent/algorithms/test_noise.py",
         ("math.sqrt(dt)", "dt"),
         ("self.state.masked_fill(done.unsqueeze(-1), 0.0)", "self.state")),
    *_of("agent/algorithms/appo.py", "agent/algorithms/test_impala_appo.py",
         ("torch.maximum(slow_logp,", "torch.minimum(slow_logp,"),
         ("self.kl_coef *= 0.5", "self.kl_coef *= 0.9")),
    *_of("agent/schedules.py", "agent/test_schedules.py",
         ("min(1.0, env_steps / (self.steps or max(1, target_steps)))",
          "env_steps / (self.steps or max(1, target_steps))"),
         ("remaining = 1.0 - min(", "remaining = min(")),
]

_ACTORS = [
    *_of("agent/actors/distributions.py", "agent/actors/test_distributions.py",
         (".view(shape) & present", ".view(shape)"),
         ("-(log_probs.exp() * log_probs).sum(-1)", "-log_probs.sum(-1)"),
         ("log_stds + (constant + 0.5 * self.num_outputs)", "log_stds + constant"),
         ("(params > 0).long()", "(params >= 1).long()"),
         ("+ 0.5 * squares - 0.5)", "+ 0.5 * squares)")),
    *_of("agent/actors/small_policy.py", "agent/actors/test_small_policy.py",
         (" or len(self._noise[-1]) != num_envs:", ":"),
         ("* np.exp(self._log_std)", "")),
    *_of("agent/recursion.py", "agent/test_recursion.py",
         ("rows[t] += decays[t] * rows[t + 1]", "rows[t] += decays[t + 1] * rows[t + 1]"),
         ("delta[t] += decay[t] * delta[t + 1]", "delta[t] += decay[t + 1] * delta[t + 1]")),
    *_of("agent/actors/normalisers.py", "agent/actors/test_normalisers.py",
         ("decay[1:][ended[:-1]] = 0.0", "pass"),
         ("np.where(valid, gamma, 1.0)", "np.full(valid.shape, gamma)"),
         ("self.scale.copy_((m2 / count", "self.scale.copy_((m2")),
    *_of("agent/actors/memory.py", "agent/actors/test_memory.py",
         ("self.cell(row, state.masked_fill(first, 0.0))", "self.cell(row, state)"),
         ("torch.lerp(candidate, state, update)", "torch.lerp(state, candidate, update)")),
]

_ENVIRONMENTS = [
    *_of("agent/env/autoreset.py",
         "agent/env/test_autoreset.py agent/env/test_vec_env.py agent/env/test_action_masks.py",
         ("self._previous_done = done\n", "self._previous_done = done | first\n"),
         ("array[index] for leaf, array in self._reader.read(observations)",
          "array[index[0]:index[-1] + 1] for leaf, array in self._reader.read(observations)"),
         ("np.where(done[:, None], reset_info[MASK_LEAF], info[MASK_LEAF])", "reset_info[MASK_LEAF]")),
    *_of("agent/env/statistics.py", "agent/env/test_statistics.py",
         ("self._returns += np.where(valid, reward, 0)", "self._returns += reward"),
         ("self._num_before[ended] = self._num_steps", "pass"),
         ("self._num_before += ~valid", "pass"),
         ("self._returns[ended] = 0.0", "pass")),
    *_of("agent/env/vec_env.py", "agent/env/test_vec_env.py agent/env/test_autoreset.py",
         ("truncated = truncated & ~terminated", "pass"),
         ("lost = (lives < self._lives) & ~done", "lost = lives < self._lives"),
         ("{} if is_training else options.test_env_kwargs", "options.test_env_kwargs"),
         ("action = action + self._action_start", "pass")),
    *_of("agent/env/restarts.py", "agent/env/test_restarts.py agent/env/test_restart_errors.py",
         ("if len(steps) >= self.limit:", "if len(steps) > self.limit:"),
         ("steps[0] <= now - WINDOW", "steps[0] < now"),
         ("spawn_key=(self._num_restarts,)", "spawn_key=()")),
]

_SCHEME = [
    *_of("scheme/gradients/sample_queue.py", "scheme/gradients/test_sample_queue.py",
         ("rollout.header.weights_version >= oldest_version", "rollout.header.weights_version > oldest_version"),
         ("if batch.version >= oldest_version:", "if batch.version > oldest_version:"),
         ("self._passes = min(self._passes + 1, self._num_passes)", "pass"),
         ("return updates <= self._options.max_policy_lag", "return updates < self._options.max_policy_lag"),
         ("oldest = min(batches", "oldest = max(batches")),
    *_of("scheme/collection/strategies.py",
         "scheme/collection/test_strategies.py scheme/test_preemption.py scheme/test_in_flight.py",
         ("return math.ceil(self._fraction_workers", "return math.floor(self._fraction_workers"),
         ("self._num_requests[index] = 0", "pass"),
         ("self._request_rounds(-(-num_steps // (self._num_asked * self._rollout_size)))",
          "self._request_rounds(num_steps // (self._num_asked * self._rollout_size))")),
    *_of("scheme/collection/c_worker.py", "scheme/collection/test_c_worker.py scheme/test_preemption.py",
         ("self.algo.parameters = dict(weights.parameters)", "pass"),
         ("(self._snapshot.parameters, self._snapshot.storage_parameters) != (", "() == ("),
         ("self.version = weights.version\n", "pass\n"),
         ("sequence == self._builder.sequence and storage.num_steps >= min_steps", "storage.num_steps >= min_steps")),
    *_of("scheme/collection/central_inference.py",
         "scheme/collection/test_central_inference.py scheme/recording/test_record.py -k central",
         ("if self._version is None:", "if True:"),
         ("self._batch or (num_live + 1) // 2", "self._batch or num_live"),
         ("self._ledger.drop(num_steps, \"in_flight\", DropReason.WORKER_LOST)", "pass"),
         ("self.delivered_by_lost += stream.builder.collected_steps", "pass"),
         ("        self._act_if_enough_wait()\n\n    def _begin_replacement", "\n    def _begin_replacement"),
         ("self._weights.local_worker.version - self._actor.version", "0"),
         ("self._weights.delivered(0, rollout.header.num_env_steps)", "pass"),
         ("for place, stream, own in zip(places,", "for place, stream, own in zip(sorted(places),"),
         ("self._ledger.collect(sum(rollout.header.num_env_steps for rollout in rollouts))", "pass")),
    *_of("scheme/collection/env_worker.py",
         "scheme/collection/test_central_inference.py scheme/recording/test_record.py -k central",
         ("self.made_steps += answer.num_env_steps", "pass"),
         ("return int(np.count_nonzero(self.step.valid))", "return len(self.step.valid)")),
    *_of("scheme/updates/decentralised.py", "scheme/updates/test_decentralised.py",
         ("parameters=own, storage_parameters=of_storage", ""),
         ("% self.check_interval == 0", "% self.check_interval == 1"),
         ("_MAX_BREAKUPS = 3", "_MAX_BREAKUPS = 4")),
    *_of("scheme/updates/u_worker.py", "scheme/updates/test_u_worker.py",
         ("self.statistics.tree_ledger.env_steps, self._target_steps", "self.statistics.updates, self._target_steps")),
    *_of("scheme/updates/asynchronous.py", "scheme/updates/test_asynchronous.py scheme/updates/test_normalizers.py",
         ("if gradients.last or skip:\n            self._moments[index].discard()", "if False:\n            pass"),
         ("(1 + self.max_grad_lag) / (1 + lag)", "self.max_grad_lag / lag"),
         ("lag > self.max_grad_lag", "lag >= self.max_grad_lag")),
    *_of("scheme/updates/averaging.py", "scheme/updates/test_averaging.py",
         ("share = weight * factor / total", "share = factor / len(vectors)"),
         ("if vector is not None and weight:", "if vector is not None:")),
    *_of("scheme/updates/lags.py", "scheme/updates/test_lags.py",
         ('["queue"] += lag_used - lag_queued', '["queue"] += lag_used'),
         ("for q in (0.5, 0.9)", "for q in (0.5, 0.95)")),
    *_of("scheme/updates/nan_policy.py", "scheme/updates/test_nan_policy.py",
         ("self._num_in_a_row > _MAX_SKIPPED_IN_A_ROW", "self._num_in_a_row >= _MAX_SKIPPED_IN_A_ROW")),
    *_of("scheme/replay/r_worker.py", "scheme/replay/test_r_worker.py",
         ("(min(smallest, own) / own)", "1.0")),
    *_of("scheme/supervision/evaluation.py", "scheme/supervision/test_evaluation.py",
         ("if remaining[episode.env_index] > 0:", "if remaining.sum() > 0:"),
         ("done = step.obs, step.mask, step.first", "_ = step.obs, step.mask, step.first"),
         ("remaining[:num_episodes % num_envs] += 1", "pass")),
    *_of("scheme/ledger.py", "scheme/test_ledger.py",
         ("self._places[source] -= num_steps\n                self._places[target] += num_steps",
          "self._places[target] += num_steps"),
         ("part.in_flight + part.sent for part", "part.in_flight for part")),
    *_of("scheme/transport/codecs.py", "scheme/transport/test_codecs.py",
         ("_TOP_SHARE = 10", "_TOP_SHARE = 11"),
         (".amax(1, keepdim=True) / 127.0", ".amax(1, keepdim=True) / 128.0")),
]

_RUNTIME_AND_COMMAND_LINE = [
    *_of("runtime/journal.py", "runtime/test_journal.py",
         ("if recorded != event:", "if recorded[:2] != event[:2]:"),
         ("self._turns.append(self.reads)", "self._turns.append(0)")),
    *_of("runtime/simulated.py", "runtime/test_simulated_runtime.py",
         ("if child.owner is actor:", "if False:"),
         ("for signal in actor.early:\n            signal()", "pass")),
    *_of("cli/enjoy.py", "cli/test_main.py -k stochastic",
         ("agent.evaluate(given.episodes, seed=given.seed, deterministic=not given.stochastic)",
          "agent.evaluate(given.episodes, seed=given.seed)")),
    *_of("targets.py", "learner/test_checkpoints.py -k evaluates",
         ("env_steps)\n        self.checkpoint = next_multiple(self._checkpoint_every, env_steps)",
          "0)\n        self.checkpoint = next_multiple(self._checkpoint_every, env_steps)")),
]

MUTATIONS = [*_STORAGES, *_ALGORITHMS, *_ACTORS, *_ENVIRONMENTS, *_SCHEME, *_RUNTIME_AND_COMMAND_LINE]
