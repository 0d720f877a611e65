"""Mutations of the kinds that no test noticed when they were first planted, for `mutation_table.py`.

For each kind, the list contains files, the tests as in `Mutation.tests`, and the changes: (old text, new text), or
(old text, new text, the reason why no test can notice the mutation).
"""

from __future__ import annotations

KINDS: dict[str, list[tuple[str, str, list[tuple[str, str] | tuple[str, str, str]]]]] = {
    "each environment explores by itself": [
        ("agent/algorithms/epsilon.py", "agent/algorithms/test_dqn.py -k explores or random_actions", [
            ("rand(num_envs, ", "rand(1, "),
            ("explores.all())", "explores.any())"),
            ("explores.any()", "explores.all()"),
            ("random, greedy()", "greedy(), random"),
            ("num_envs, mask)\n ", "num_envs, None)\n "),
            ("num_envs, mask", "1, None if mask is None else mask[:1]).expand(num_envs"),
            ("or min(draws", "or max(draws"),
            ("draws < epsilon", "np.full(num_envs, draws[0] < epsilon)"),
            ("explores.all():", "explores.any():"),
            ("action, self._best(small, inputs)", "self._best(small, inputs), action"),
            ("self._uniform.take(num_envs * self.actor.num_actions).reshape(num_envs, -1).argmax(-1",
             "np.repeat(self._uniform.take(self.actor.num_actions).argmax(-1), num_envs"),
        ]),
        ("agent/algorithms/r2d2.py", "agent/algorithms/test_r2d2.py -k explores", [
            ("_explore(len(done), ", "_explore(1, "),
            (", allowed, lambda", ", None, lambda"),
            ("len(done), allowed", "1, None if allowed is None else allowed[:1]).expand(len(done)).contiguous("),
        ]),
    ],
    "a discounted return at the end of a rollout": [
        ("agent/actors/normalizers.py", "agent/actors/test_normalizers.py -k discounted", [
            ("xp.where(ended[-1], 0.0, sums[-1])", "sums[-1]"),
            ("where(ended[-", "where(rollout.terminated[-"),
            ("(ended[-1], ", "(ended[0], "),
            ("= decay[-1] *", "= gamma *"),
            ("xp.flip(ended[:-1], (0,)), 0.0", "xp.flip(ended[1:], (0,)), 0.0"),
            ("(rollout.terminated | rollout.truncated)", "rollout.terminated"),
            ("where(valid, reward", "where(True, reward"),
        ]),
    ],
    "the state of collectors that are gone": [
        ("agent/storages/ring.py", "agent/storages/test_ring.py agent/storages/test_replay.py", [
            (".ids[-1] >", ".ids[0] >"),
            ("] >= self.first", "] > self.first"),
            ("if head.ids[-1] >= self.first", ""),
            ("  self._heads = {source: _Head", "  self._heads |= {source: _Head"),
            ("pop(source, None", "get(source", "only the order of the sources differs"),
            (" or len(head.ids) != len(rows)", ""),
            ("(head.ids >= self.first) & (head.places < 0) & (head.done", "(head.places < 0) & (head.done"),
        ]),
        ("agent/storages/sequences.py",
         "agent/storages/test_sequences.py -k gone or reset or restored or list_implementation", [
            ("self._episodes = {other: self._episodes[other] for other in ring.sources}", "pass"),
            ("inserted.continued[e] and ", ""),
            ("self._episodes.get(source", "next(iter(self._episodes.values())"),
            ('episodes"]}\n\n', 'episodes"][:1]}\n\n'),
        ]),
    ],
    "a storage after a reset, and its saved state": [
        ("agent/storages/ring.py", "agent/storages/test_replay.py agent/storages/test_sequences.py -k reset", [
            ('            self.columns["drawable"][:] = False\n', ""),
            ("self.evict(self.total - self.first)", "pass"),
        ]),
        ("agent/storages/per.py",
         "agent/storages/test_per.py agent/storages/test_replay.py -k collectors or reset or nothing", [
            ("self.priority_sums.clear()", "pass"),
            ('self.__dict__.pop("priority_minima", None)', "pass"),
            ("sums.clear()\n", "sums.clear()\n        self._max_priority = _FIRST_PRIORITY\n"),
            (" if self.num_items else 0.0", ""),
        ]),
        ("agent/storages/sequences.py", "agent/storages/test_sequences.py -k reset or gone", [
            (", self._episodes = SlotPool(), {}", " = SlotPool()"),
            ("state_slots, self._episodes = SlotPool(),", "_episodes ="),
            ('}\n        self.__dict__.pop("windows", None)\n', "}\n"),
        ]),
        ("agent/storages/replay.py",
         "agent/storages/test_replay.py agent/storages/test_own_storages.py -k loaded or listed or reset", [
            ("ring.first %", "ring.total %", "no row between the newest and the oldest one can be drawn"),
            (", -int(oldest", ", int(oldest"),
            ("self.num_learned_from}", "0}"),
        ]),
    ],
    "counts of transitions with reset steps": [
        ("agent/storages/ring.py", "agent/storages/test_replay.py -k reset_steps or list_implementation", [
            ("valid > column", "~column"),
            ("-= num_valid\n  ", "-= count\n  "),
            ('inserted"] += num_valid\n      ', 'inserted"] += count\n      '),
            ('resident"] += num_valid\n      ', 'resident"] += count\n      '),
            ('int(np.count_nonzero(column["drawable"][rows]))', "num_valid"),
            ("else num_valid\n ", "else count\n "),
            ('on &= column["valid"][np.maximum(link, 0)]', "pass"),
        ]),
    ],
    "first priorities with errors of the collector": [
        ("agent/storages/per.py",
         "agent/storages/test_per.py agent/storages/test_replay.py scheme/test_initial_priority.py -k "
         "collectors or errors or survive or rows_without or largest or restored", [
            ("self._priorities(inserted.errors)", "np.abs(inserted.errors) + self.options.epsilon"),
            ('if not np.isfinite(errors).all():\n            raise NonFiniteDataError("TD '
             'errors must be finite")\n        priorities',
             "priorities"),
            (" ** self.options.alpha,", ","),
            ("where(valid, ", "where(True, "),
            ("num_envs, rollout.num_steps).T", "num_steps, rollout.num_envs)"),
            ("max(self._max_priority, float(priorities.max(initial=0.0)", "float(priorities.max(initial=0.0"),
            ('rows = rows[ring.columns["drawable"][rows]]', "pass"),
            ('_max_priority, self._num_stale = contents["max_priority"],', "_num_stale ="),
        ]),
        ("agent/storages/replay.py", "scheme/test_initial_priority.py -k acting_weights", [
            (").T.reshape(", ").reshape("),
        ]),
    ],
    "the smallest priority that a request carries": [
        ("scheme/replay/sampler.py",
         "scheme/replay/test_sampler.py scheme/replay/test_storage_options.py -k smallest or schedule", [
            ("= min(state.", "= max(state."),
            ("min(state.smallest for state in states)", "states[0].smallest"),
            (".smallest for", ".mass for"),
            ("dict(parameters)", "{}"),
        ]),
        ("scheme/replay/shard_states.py",
         "scheme/replay/test_shard_states.py scheme/replay/test_sampler.py -k newer or smallest", [
            ('float("inf")', "0.0"),
            ("answers > self", "answers < self"),
            ("state.answers > self._states[index].answers", "True"),
        ]),
        ("scheme/replay/r_worker.py", "scheme/replay/test_r_worker.py", [
            ("min(smallest, own)", "smallest"),
            ('getattr(storage, "min_priority", 1.0),', "1.0,"),
            ('parameters["beta"]', "options.beta"),
        ]),
    ],
    "counts after a shard was replaced": [
        ("scheme/replay/inserter.py", "scheme/replay/test_inserter.py", [
            ("_evicted[index] = self._resident", "_resident"),
            ("self._resident[index] = 0", "0"),
            ("_evicted[index] = state.evicted\n        self._resident", "_resident"),
            ("steps - evicted\n", "steps\n"),
            ("_evicted[index], self._resident[index] = state.evicted,", "_resident[index] ="),
            (", self._resident[index] = state.evicted, state.resident", " = state.evicted"),
            ("self._in_flight[index].clear()", "pass"),
        ]),
    ],
    "random numbers of a shard and of its replacement": [
        ("scheme/replay/r_worker.py", "scheme/replay/test_r_worker.py -k own_numbers", [
            ("index_worker, incarnation)", "index_worker)"),
            ("index_worker, incarnation", "incarnation"),
            ("index_parent, index_worker,", "index_worker,"),
            ("=self._seed)", "=0)"),
        ]),
    ],
    "bounds of the replay ratio with several passes": [
        ("scheme/replay/shards.py", "scheme/replay/test_shards.py -k ratio or exactly or learning", [
            (" * num_passes", ""),
            ("(batch_steps or batch_size)", "batch_size"),
            (" + num_requested * self._batch_steps", ""),
            ("requested + self._batch_steps <= self", "requested < self"),
            ("trained + self._batch_steps <=", "trained <="),
            (" - self._learning_starts\n", "\n"),
            ("(added - self._learning_starts)", "added"),
            ("added < self.", "added <= self."),
            ("not self.is_draining and ", ""),
        ]),
        ("scheme/replay/sampler.py", "scheme/replay/test_sampler.py -k pass or drain", [
            ("(batch.num_samples * self._num_passes)\n  ", "(batch.num_samples)\n  "),
            ("-batch.num_samples * self._num_passes)\n  ", "-batch.num_samples)\n  "),
            ("self._states.train(-batch.num_samples * self._num_passes)", "pass"),
        ]),
    ],
    "statistics of priorities, with alpha and several policies": [
        ("scheme/replay/r_worker.py", "scheme/replay/test_r_worker.py -k statistics or reports", [
            ("** (1.0 / alpha) ", ""),
            ("(1.0 / alpha)", "alpha"),
            ("] = min(\n   ", "] = max(\n   "),
            (" = sum(own[name", " = max(own[name"),
            (' "evicted_unused")', ")"),
            ('"evicted_unused",', '"evicted",'),
            ('["sampled"],', '["inserted"],'),
        ]),
    ],
    "arrays that are read-only, and late priorities": [
        ("scheme/replay/sampler.py",
         "scheme/replay/test_sampler.py scheme/replay/test_shards.py -k copies or errors or merged", [
            ("np.array(value)", "value"),
            (", np.float32", ""),
            ("(np.concatenate(parts) for parts in zip(*self._unsent[index], strict=True))", "self._unsent[index][-1]"),
            ("_unsent[index].clear()\n            self._updates", "_updates"),
            ("request.incarnation == self._states.incarnation(request.shard)", "True"),
            ("incarnation != self._states.incarnation(index)", "False"),
        ]),
    ],
    "the early end of a rollout": [
        ("scheme/collection/c_worker.py", "scheme/collection/test_c_worker.py -k preempted", [
            ("max(1, min_steps)", "min_steps"),
            (">= min_steps", "> min_steps"),
            ("num_steps is None and ", ""),
            (" and storage.num_steps != num_steps\n", "\n"),
            ("sequence + 1,", "sequence,"),
            (".sequence, min_steps", ".sequence + 1, min_steps"),
        ]),
        ("scheme/collection/strategies.py",
         "scheme/collection/test_strategies.py -k rounded or simultaneously or before_enough", [
            ("max(1, round", "max(0, round"),
            ("_num_requests[index], self.", "_num_requests[index] + 1, self."),
            (") >= self._num_enough", ") > self._num_enough"),
        ]),
    ],
    "traffic that is counted once": [
        ("scheme/collection/c_worker.py", "scheme/collection/test_c_worker.py -k traffic", [
            (", self._weights_traffic = self._weights_traffic, NO_TRAFFIC", " = self._weights_traffic"),
            ("_weights_traffic += ", "_weights_traffic = "),
            ("WEIGHTS: self.take_weights_traffic()", ""),
            ("self.version\n  ", "self.version + 0 * self.take_weights_traffic().messages\n  "),
        ]),
        ("scheme/gradients/g_worker.py", "scheme/gradients/test_g_worker.py -k report", [
            ("WEIGHTS] += self", "WEIGHTS] = self"),
            ("self.stats.traffic[WEIGHTS] += self.local_worker.take_weights_traffic()", "pass"),
        ]),
        ("scheme/gradients/worker_stats.py", "scheme/gradients/test_worker_stats.py", [
            ("self.traffic[WEIGHTS] + ", ""),
            ("] += traffic", "] = traffic"),
            ("DATA] += Traffic", "DATA] = Traffic"),
            (" # the worker's total so far", "+ self._envs_restarted.get((header.worker, header.incarnation), 0)"),
            ("self.moments = []", "pass"),
            (", self._episodes = self._episodes, []", " = self._episodes"),
        ]),
        ("scheme/replay/inserter.py", "scheme/replay/test_inserter.py -k traffic", [
            ("**header.traffic, ", ""),
            (", DATA: state.traffic", ""),
        ]),
    ],
    "rounds requested ahead, and a lost worker": [
        ("scheme/collection/strategies.py",
         "scheme/collection/test_strategies.py -k lost_worker or rounds_requested or rest_of or partial", [
            (" - len(self._arrived.get(index, ()))", ""),
            ("self._num_pending - len(self._arrived.get(index, ()))", "1"),
            ("_num_pending -= 1\n ", "_num_pending = 0\n "),
            ("not self._num_pending", "True"),
            ("(missing := self._missing()) or self._supervisor.is_replacing", "missing := self._missing()"),
            ("0 if self._supervisor.is_replacing else ", ""),
            (" if self._supervisor.is_replacing else len(self._supervisor.gone)", ""),
            (" if is_awaited else 0.0", ""),
            ("self._delivered[index] = 0", "pass"),
            ("self.delivered_by_lost += self._delivered[index]", "pass"),
        ]),
    ],
    "partial rounds in a drain": [
        ("scheme/collection/strategies.py", "scheme/collection/test_strategies.py -k drain or again", [
            ("        self._deliver_late([rollout for rollouts in self._arrived.values() for "
             "rollout in rollouts], deliver)\n",
             ""),
            (")\n        self._arrived.clear()\n", ")\n"),
            ("\n        self._num_pending = 0\n", "\n"),
            ("        self._owed.cancel()\n ", " "),
            (")\n        self._rests.clear()\n", ")\n"),
            ("   self._move_rests()\n        super().drain", "   super().drain"),
            ("   self._move_rests()\n        super().finish", "   super().finish"),
            ("rollouts, *(", "("),
            ("      self._is_draining = False\n\n    def", "      pass\n\n    def"),
            ("\n        self._is_started = False", ""),
            ("0 if self._is_draining else ", ""),
        ]),
    ],
    "fractions that are rounded": [
        ("scheme/collection/strategies.py", "scheme/collection/test_strategies.py -k rounded", [
            (" round(options", " int(options"),
            (" round(options", " math.ceil(options"),
            ("gone) - 1e-9)\n", "gone))\n"),
        ]),
        ("scheme/gradients/batch_plan.py", "scheme/gradients/test_batch_plan.py -k share or prefetched", [
            (" round(barrier", " int(barrier"),
            ("rollout_size)", "rollout_size + 0.5)"),
            ("barrier.col_fraction_workers == 1.0", "True"),
        ]),
        ("scheme/collection/owed_steps.py", "scheme/collection/test_strategies.py -k owed", [
            (".num_steps\n ", ".num_env_steps\n "),
            (" and not is_rest", ""),
            ("index < first}", "index <= first}"),
        ]),
    ],
    "several rounds of one worker in a train batch": [
        ("scheme/gradients/batch_source.py", "scheme/gradients/test_train_batch.py -k rounds_of", [
            ("._replace(rollout=copied(queued.rollout))", ""),
            (" kept += [queued", " kept = [queued"),
            ("kept, *batch.rollouts", "batch.rollouts, *kept"),
            ("batch.size + ", ""),
            ("in newest]\n ", "in batch.rollouts]\n "),
            ("size >= self.", "size > self."),
        ]),
        ("scheme/collection/strategies.py", "scheme/gradients/test_train_batch.py -k rest_of", [
            ("copied(self._collect_one()", "self._collect_one("),
            ("*rests, self._collect_one()", "self._collect_one(), *rests"),
        ]),
        ("scheme/transport/receive.py", "scheme/transport/test_receive.py -k copied", [
            ("replace(rollout, data=rollout.data.map(Tensor.clone))", "rollout"),
        ]),
    ],
    "new steps of mixed train batches": [
        ("scheme/gradients/train_batch.py", "scheme/gradients/test_train_batch.py", [
            ("self.uses > 1 or start", "start"),
            (" > 1 or start", " > 0 or start"),
            ("end * new // total - start", "(end - start)"),
            ("end * new // total - start * new // total", "-(-end * new // total) - -(-start * new // total)"),
            (" if not queued.is_old", ""),
            ("return min(queued", "return max(queued"),
        ]),
        ("scheme/gradients/batch_source.py", "scheme/gradients/test_train_batch.py -k minibatches or dropped_once", [
            (" self._drawn_steps = 0\n", " 0\n"),
            ("num_new != batch.num_new_samples", "False"),
            ("current.uses == 1", "True"),
            ("not queued.is_old", "True"),
            (".num_new_steps\n", ".num_steps\n"),
            ("-= num_new_steps", "= 0"),
            ("self._drawn_steps + ", ""),
            (")\n        self._unused_steps = 0\n\n", ")\n\n"),
        ]),
    ],
    "requests that wait for updates": [
        ("scheme/gradients/sample_queue.py",
         "scheme/gradients/test_sample_queue.py -k requests or lifts or incomplete", [
            ("max(0, self._updates_per_use - (self._worker.version - self._in_use_since))", "self._updates_per_use"),
            ("max(0, self._updates_per_use - (self._worker.version - self._in_use_since)",
             "self._updates_per_use - (self._worker.version - self._in_use_since"),
            ("max(0, self._updates_per_use - (self._worker.version - self._in_use_since))", "0"),
            ("_in_use_since = self._worker.version\n   ",
             "_in_use_since = self._in_use_since or self._worker.version\n   "),
            ("self._in_use_since is None\n", "False\n"),
            ("_in_use_since = None\n            self._arrived", "_arrived"),
            (")\n            self._in_use_since = None\n", ")\n"),
            (" + self._buffer.uses_left", ""),
            ("qsize() <= 1\n  ", "qsize() < 1\n  "),
            ("num_in_flight < self.", "num_in_flight <= self."),
            ("floor(coming + 1e-9", "ceil(coming"),
            ("self._builder.clear()", "pass"),
        ]),
    ],
    "signals that overtake a request": [
        ("scheme/gradients/g_worker.py", "scheme/gradients/test_g_worker.py -k announced", [
            ("number == self._preparing", "True"),
            ("number == self", "number >= self"),
            ("        self._preparing = number\n", ""),
            ("preempt_running", "preempt_next"),
        ]),
        ("scheme/updates/decentralized.py",
         "scheme/test_rank_preemption.py scheme/updates/test_decentralized.py -k preempt or number", [
            ("        self._num_prepared += 1\n", ""),
            (") >= enough ", ") > enough "),
            ("_num_prepared))", "_num_prepared + 1))"),
        ]),
        ("scheme/gradients/process_group.py", "scheme/gradients/test_process_group.py -k generation or late_signal", [
            ("max(self._left, generation)", "generation"),
            ("self._generation <= self._left\n", "False\n"),
            ("._generation <= self._left\n", "._generation < self._left\n"),
            (" if self._generation <= self._left else None", ""),
        ]),
        ("scheme/collection/collector_thread.py", "scheme/test_drain.py -k announcements or any_number", [
            ("max(self._drain_announced, number)", "number"),
            ("_drain_announced > self.", "_drain_announced >= self."),
            ("= self.is_used_up = False\n", "= False\n"),
            ("_is_finishing = self._has_all = self.", ""),
            ("_drains = number\n\n", "_drains += 1\n\n"),
        ]),
    ],
    "fractions of old rollouts": [
        ("scheme/gradients/sample_queue.py",
         "scheme/gradients/test_train_batch.py scheme/gradients/test_sample_queue.py -k mixed or rounded or "
         "incomplete or enough_whole", [
            ("_num_new + 1e-9)", "_num_new)"),
            ("int(self._proportion * self._num_new + 1e-9", "round(self._proportion * self._num_new"),
            ("int(self._proportion * self._num_new + 1e-9", "math.ceil(self._proportion * self._num_new"),
            ("_slots) >= (self.", "_slots) > (self."),
            ("_num_new += 1\n ", "_num_new = self._num_stored\n "),
            ("self._slots), ", "self._slots[-2:]), "),
            ("self._builder.pending_share", "0.0"),
            ("(1.0 + options.replay_proportion)", "1.0"),
            (" self._pending_steps /", " len(self._pending) /"),
        ]),
    ],
    "moments after a failed exchange": [
        ("scheme/gradients/process_group.py", "scheme/gradients/test_process_group.py -k moments", [
            (", self._unshared = self._unshared, []", " = self._unshared"),
            ("self._unshared or ", ""),
            (" or moments)", ")"),
            (" += moments\n", " = [*moments]\n"),
            ("self._joined().num_votes", "shares"),
            ("self._unshared = []", "pass"),
            (" int(voted)\n", " max(self.num_votes, int(voted))\n"),
        ]),
        ("scheme/gradients/g_worker.py", "scheme/gradients/test_g_worker.py scheme/test_drain.py -k moments", [
            (", self.stats.moments = self.stats.moments, []", " = self.stats.moments"),
            ("            self._group.discard()\n", ""),
            ("local_worker.merge_moments(self._group.share()", "_group.share("),
            ("self._gradients.used.last", "True"),
        ]),
    ],
    "snapshots of the ledger": [
        ("scheme/ledger.py", "scheme/test_ledger.py", [
            ("_latest = None\n            self._dropped", "_dropped"),
            ('self._latest = None\n            self._places["consumed', 'self._places["consumed'),
            ('self._latest = None\n            self._places["collected', 'self._places["collected'),
            ("  with self._lock:\n                self._latest = None\n                "
             "self._places[source] -= num_steps\n                self._places",
             "  with self._lock:\n                self._places[source] -= num_steps\n                self._places"),
            ("  with self._lock:\n                self._latest = None\n                "
             "self._places[source] -= num_steps\n                self._dropped",
             "  with self._lock:\n                self._places[source] -= num_steps\n                self._dropped"),
            ("dict(self._dropped)", "self._dropped"),
            ("return self._latest if collected is None else self._latest._replace(collected=collected)",
             "self._latest = self._latest if collected is None else "
             "self._latest._replace(collected=collected)\n            return self._latest"),
            ("_dropped = Counter", "_dropped += Counter"),
            ('in_flight", "queued"', 'queued",'),
            ("own.consumed,", "sum([part.consumed for part in parts]),"),
        ]),
    ],
    "breakups spread over a long run": [
        ("scheme/updates/decentralized.py",
         "scheme/updates/test_decentralized.py -k breakups or each_loss or new_group", [
            (" self._num_breakups = 0\n", " 0\n"),
            ("= 1 if self._num_lost else self._num_breakups +", "+="),
            (" = 1 if self", " = 0 if self"),
            ("> _MAX_BREAKUPS", ">= _MAX_BREAKUPS"),
            ("            self._num_lost = 0\n", ""),
            ("        self._num_lost += 1\n", ""),
            ("_skip, self._used_up = live, False", "_used_up = live"),
            (", self._aborted = self._aborted, []", " = self._aborted"),
        ]),
    ],
    "automatic compression with several readers": [
        ("scheme/transport/encoder.py", "scheme/transport/test_encoder.py -k auto", [
            ("/ self._num_readers ", ""),
            ("encode_s / self._num_readers + self._decode_s", "(encode_s + self._decode_s) / self._num_readers"),
            (" + self._decode_s", ""),
            (" or self._is_measured", ""),
            ("self._encodings <= _FIRST_TIMED or self._is_measured", "True"),
        ]),
        ("scheme/transport/weight_sync.py", "scheme/transport/test_weight_sync.py", [
            ("len(workers)", "1"),
            ("sum(links) / len", "min"),
            ("sum(links) / len", "max"),
            ("_sent.sent\n ", "_sent.raw\n "),
            ("            self._needs_link = False\n", ""),
            ("self.traffic += Traffic(encodes", "self.traffic = Traffic(encodes"),
        ]),
    ],
    "own codecs that return views": [
        ("scheme/transport/codecs.py", "scheme/transport/test_codecs.py", [
            ("array(part) if np.may_share_memory(part, flat) else np.ascontiguousarray", "ascontiguousarray"),
            (") if np.may_share_memory(part, flat) else np.ascontiguousarray(part)",
             ", order='K') if np.may_share_memory(part, flat) else part"),
            (" if is_own else array.copy()", ""),
            ("array.flags.writeable and ", ""),
            (" and not any(np.may_share_memory(array, part) for part in self.arrays)", ""),
            ("nbytes < array.", "nbytes <= array."),
            ("np.ascontiguousarray(array).reshape(-1", "array.reshape(-1, order='A'"),
            (" if self.fallback is None else self.fallback.pack(array)", ""),
            (" if array.flags.writeable else array.copy()", ".copy() if array.flags.writeable else array"),
            ("size != size", "size < size"),
        ]),
    ],
    "waits for a lost worker": [
        ("scheme/transport/requests.py", "scheme/transport/test_requests.py", [
            ("        self._asked_s.pop(index, None)\n", ""),
            (".pop(index) ", "[index] "),
            ("max(0.0, self._asked_s.pop(index) - seconds)", "self._asked_s.pop(index) - seconds"),
            ("index] += self", "index] = self"),
            ("self._asked_s.clear()", "pass"),
            ("index not in self._supervisor.gone", "True"),
            ("future not in self._open", "False"),
            ("index in self._open.values(", "bool(self._open"),
            ("owner != index", "owner == index"),
        ]),
        ("scheme/supervision/supervisor.py",
         "scheme/supervision/test_supervisor.py -k deadline or time_limit or slowly", [
            ("_since.pop(index, None)\n        self._untried", "_untried"),
            (".setdefault(index, self._runtime.now()", "[index] = self._runtime.now("),
            ("self._since[index] = self._runtime.now()", "pass"),
            ("max(self._longest_start_s, self.waited_s(index)", "self.waited_s(index"),
            ("max(self._longest_s, seconds)", "seconds"),
        ]),
    ],
    "losses spread over a long time": [
        ("scheme/supervision/supervisor.py",
         "scheme/supervision/test_supervisor.py -k budget or spread or pauses or in_between or never_lives", [
            ("history and now - history[0][0] > _WINDOW_S", "False"),
            (" while history", " if history"),
            ("history[0][0", "history[-1][0"),
            (" _WINDOW_S:\n", " _WINDOW_S / 10:\n"),
            (">= _MAX_RESTARTS", "> _MAX_RESTARTS"),
            ("append((now, str(", "append((now + pause, str("),
            ("        self._fruitless[index] = 0\n", ""),
            ("self._results[index] = 0\n        ", ""),
            ("and max(latest", "and min(latest"),
            ("len(latest) == _MAX_SHORT_LIVES", "True"),
            ("[index] += 1\n\n", "[index] = 1\n\n"),
        ]),
    ],
    "other episodes in each evaluation": [
        ("scheme/supervision/evaluation.py",
         "scheme/supervision/test_evaluation.py training/test_evaluate.py -k each_evaluation or its_weights "
         "or during or kept or builds", [
            ("        self._rounds += 1\n", ""),
            ("self._rounds)", "1)"),
            ("            kept.reseed(seed)\n", ""),
            ("derive_seed(seed, Stream.EVALUATION, 0)", "0"),
            ("seed=seed)\n\n", "seed=0)\n\n"),
            (" and kept.num_envs == num_envs", ""),
            (", self._running = self._running, None", " = self._running"),
        ]),
    ],
    "sampled actions after annealed exploration": [
        ("scheme/supervision/evaluation.py", "scheme/supervision/test_evaluation.py -k stochastic or its_weights", [
            ("        self._algo.follow_schedules(_AFTER_TRAINING, 1)  # use the final value of annealed exploration\n",
             ""),
            ("_AFTER_TRAINING,", "0,"),
            ("deterministic,", "True,"),
            ("        self._algo.load_acting_state(weights.state)\n", ""),
        ]),
        ("agent/acting.py", "agent/test_acting.py -k sampled or own_seed or policy_chooses or asked_to", [
            ("        algorithm.follow_schedules(_AFTER_TRAINING, 1)  # use the final value of annealed exploration\n",
             ""),
            ("deterministic,", "True,"),
            ("derive_seed(seed, ", "derive_seed(0, "),
            ("ACTING, index))\n", "ACTING, 0))\n"),
            ('"test_epsilon": 0.0, ', ""),
        ]),
    ],
    "a replay that is stopped early": [
        ("runtime/journal.py", "runtime/test_journal.py", [
            ("_events.clear()\n        self._turns", "_turns"),
            ("\n        self._turns.clear()", ""),
            (")\n        self._simulation.notify(self._changed)\n", ")\n"),
            ("self._released = True", "pass"),
            ("error\n        self._simulation.notify(self._changed)\n", "error\n"),
            ("        self._failure = error\n", ""),
            ("if not self._released:\n            ", ""),
            (" and not self._released", ""),
        ]),
        ("scheme/collection/collector_thread.py", "scheme/test_drain.py -k end_a_replay", [
            ("        self._journal.release()\n", ""),
            ("            self._journal.fail(failure)\n", ""),
        ]),
    ],
    "a checkpoint that was renamed": [
        ("learner/checkpoints.py", "learner/test_kept_checkpoints.py", [
            (" != env_steps_of", " > env_steps_of"),
            (" != env_steps_of", " < env_steps_of"),
            (", reverse=True", ""),
            ("damaged[0]) ", "damaged[-1]) "),
            ("not os.path.lexists(path)", "True"),
            (" if multiple", ""),
            ("version <= own]", "version < own]"),
            (") > self._best", ") >= self._best"),
        ]),
    ],
    "the last checkpoint, due at the end": [
        ("learner/learner.py",
         "callbacks/test_base.py learner/test_background_checkpoints.py learner/test_learner.py -k checkpoint "
         "or evaluation or record or dry_run", [
            (" and last_steps != self.env_steps", ""),
            ("                self._files.wait()  # `last_checkpoint` changes when the file is written\n", ""),
            ("        self._due.after_checkpoint(self.env_steps)\n", ""),
            ('           self._callbacks.call("on_checkpoint', '       self._callbacks.call("on_checkpoint'),
            ("self.env_steps > self._due.recorded_steps", "True"),
            ('self._callbacks.respond_to("on_checkpoint")', "False"),
            ("None and self.updates:", "None:"),
        ]),
        ("learner/measurements.py", "learner/test_measurements.py", [
            ("_checkpoint_every, env_steps)\n        self._plan()\n\n   ", "_checkpoint_every, env_steps)\n\n   "),
            ("_eval_every, env_steps)\n        self._plan()\n\n   ", "_eval_every, env_steps)\n\n   "),
            ("env_steps > self.recorded_steps and ", ""),
            ("checkpoint, self.", ""),
        ]),
    ],
    "the bias of few resamples": [
        ("analysis/bootstrap.py", "analysis/test_bootstrap.py -k loops", [
            (" - (runs - 1) * variance / count", ""),
            ("parts - (runs", "parts + (runs"),
            ("np.maximum(parts - (runs - 1) * variance / count, 0.0)", "parts - (runs - 1) * variance / count"),
            (" (runs - 1) ", " runs "),
            (" * runs / (runs - 1)", ""),
            (" (runs - 1))", " runs)"),
        ]),
    ],
    "names of the outputs of files": [
        ("export/inputs.py", "export/test_export.py -k outputs", [
            ("next_memory/", "memory/"),
            ("policy.initial_memory(1", "reversed(policy.initial_memory(1)"),
            (" in self.memory.items()},\n", " in reversed(self.memory.items())},\n"),
            ('"batch", *array.shape[1:]', "*array.shape"),
            ("memory.values(", "reversed(memory.values()"),
        ]),
        ("export/formats.py", "export/test_export.py -k outputs", [
            (", output_names=list(traced.outputs)", ""),
            (".outputs))\n ", ".outputs)[:1])\n "),
        ]),
    ],
    "the largest difference over all steps": [
        ("export/checks.py", "export/test_export.py -k the_check or rounding", [
            ("np.maximum(largest, errors.max()", "errors.max("),
            ("errors.max()", "errors.min()"),
            ("total += count", "total = count"),
            ("different += ", "different = "),
            (".max(axis=1)", "[:, 0]"),
            ("max(1.0, float(np.abs(step.action).max()))", "1.0"),
            ("float(np.maximum(largest, ", "max(largest, float("),
            ("np.where(step.first[:, None], np.float32(0), state)", "state"),
            ("show_reward(memory, step.reward)", "pass"),
        ]),
    ],
    "states of callbacks after a resume": [
        ("callbacks/shipped.py", "callbacks/test_shipped.py -k plateau or best_model", [
            (', self._best_at = state["best"], state["best_at', ' = state["best'),
            (', self._best_at = state["best"],', "_at ="),
            ("self._best_at}", "0.0}"),
            (", self._best_at = run.return_mean, run.env_steps", " = run.return_mean"),
            ("return_mean > self._best", "return_mean >= self._best"),
            ("_best_at >= self.", "_best_at > self."),
            ('self.best = state["best"]', "pass"),
        ]),
        ("callbacks/base.py", "callbacks/test_reports.py -k states", [
            (".pop(place)[", "[place]["),
            (" if owner == name", ""),
            ("state := callback.state()", "(state := callback.state()) or True"),
        ]),
    ],
    "the same evaluation in two records": [
        ("callbacks/base.py", "callbacks/test_base.py -k once", [
            (" and evaluation is not self._evaluation", ""),
            ("            self._evaluation = evaluation\n", ""),
            ("evaluation is not self._evaluation", "self._evaluation is None"),
        ]),
    ],
    "losses since the last call": [
        ("callbacks/base.py", "callbacks/test_base.py -k once", [
            (" - self._num_lost", ""),
            (", self._num_lost = num_lost - self._num_lost, ", " = num_lost - self._"),
            ("num_lost - self._num_lost", "1"),
            ("num_lost > self.", "num_lost >= self."),
        ]),
    ],
    "references in another order": [
        ("cli/compare.py", "cli/test_compare.py -k tasks or gap or refused", [
            ("[references[task] for task in tasks]", "list(references.values())"),
            ("references[task]", "next(iter(references.values()))"),
            (".rpartition(", ".partition("),
            ("low < high:\n", "low <= high:\n"),
            ("task for task in tasks if task not in references]", "] if references else list(tasks)"),
            ("bounds=(0.0, math", "bounds=(-math.inf, math"),
        ]),
    ],
    "each flag of enjoy alone": [
        ("cli/enjoy.py", "cli/test_main.py -k each_flag", [
            (" given.seed,", " 0,"),
            ('"seed": given.seed, ', ""),
            ("not given.stochastic}", "True}"),
            (" given.episodes,", " 1,"),
        ]),
        ("cli/saved_agent.py", "cli/test_main.py -k each_flag or wrong_arguments", [
            ("model=given.model, ", ""),
            ("text) >= 2**", "text) > 2**"),
        ]),
    ],
    "statistics of returns": [
        ("cli/enjoy.py", "cli/test_main.py -k prints_the_statistics", [
            (".pstdev(returns", ".stdev(returns"),
            (".pstdev(returns", ".pvariance(returns"),
            (" deviation, ", " mean, "),
            ("fmean(lengths),", "fmean(returns),"),
            ("{max(returns", "{min(returns"),
            (": {mean:.2f}", ": {statistics.median(returns):.2f}"),
        ]),
    ],
    "flags in any order": [
        ("cli/train.py", "cli/test_main.py -k any_order", [
            ('not before.startswith("--") or ', ""),
            ("return next(filter(_is_algorithm, _free_words(arguments)),",
             "return next(filter(_is_algorithm, arguments),"),
            (' or before.startswith("--no-")', ""),
            ("or before in _WITHOUT_VALUE", ""),
            (".remove(algorithm)", " = [word for word in others if word != algorithm]"),
            ('        if word.startswith(f"{flag}="):\n            return word.removeprefix(f"{flag}=")\n', ""),
            ("word == flag:", "word.startswith(flag):"),
            (" if name not in vars(given)", ""),
        ]),
    ],
}
