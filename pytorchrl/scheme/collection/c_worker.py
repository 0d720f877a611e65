"""The collection worker, which acts in a vector of environments and fills a storage."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from pytorchrl.agent.contracts import check_state
from pytorchrl.agent.data import ActingStep, Episode, RolloutData
from pytorchrl.agent.env import VecEnv, check_finite
from pytorchrl.agent.env.tensors.vec_env import TensorVecEnv
from pytorchrl.agent.seeding import Stream, derive_seed, with_own_draws
from pytorchrl.errors import NonFiniteUpdateError
from pytorchrl.runtime import Journal
from pytorchrl.scheme.base.worker import Context, Worker
from pytorchrl.scheme.collection.recipe import CWorkerRecipe
from pytorchrl.scheme.devices import check_device
from pytorchrl.scheme.timing import Stopwatch
from pytorchrl.scheme.transport.encoder import NO_TRAFFIC, NOT_SENT, WEIGHTS, Encoder, Traffic
from pytorchrl.scheme.transport.messages import Moments, Rollout, RolloutHeader, Weights, WholeState
from pytorchrl.scheme.transport.receive import receive
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.untyped import UserPart
from pytorchrl.support.worker_names import collection_worker

if TYPE_CHECKING:
    from pytorchrl.agent.algorithms.base import Algorithm

logger = get_logger(__name__)


class Role(enum.Enum):
    """The job of a collection worker."""

    COLLECTOR = enum.auto()
    """The worker collects in a separate process or thread, and sends copies of the data."""
    LEARNER = enum.auto()
    """The worker collects in its gradient worker's thread, and passes on the storage's tensors without copying them."""
    SERVER = enum.auto()
    """The worker has no environments and never collects; only its parameters are used."""


def _ended_row(name_of: Callable[[int], str], final_index: Tensor, number: int) -> str:
    """Return the name of the row in which an episode of a rollout ended, given the episode's number."""
    return name_of(int(final_index[number, 1]))


def _steps_by_version(data: object) -> dict[int, int]:
    """Return the number of valid steps by the version of the weights; empty if a rollout does not contain versions."""
    if not isinstance(data, RolloutData) or data.versions is None:
        return {}
    versions, counts = np.unique(data.versions[data.valid].numpy(), return_counts=True)
    return dict(zip(versions.tolist(), counts.tolist(), strict=True))


class RolloutBuilder:
    """Builds the rollouts of one vector of environments from the steps in its storage.

    Args:
        algo: The algorithm that chose the actions.
        storage: The storage of the steps.
        place: Indices of the gradient worker and of the collection worker, and the incarnation of the latter.
        now: The clock.
        row_name: Function from a policy and the index of a row of its observations to the row's name in errors.
        encoder: Encoder for copies of the data; None: rollouts contain the storage's own tensors, not copies.
        finds_errors: Whether rollouts contain TD errors, which become the initial priorities in a replay buffer.

    Attributes:
        storage, row_name: As given.
        incarnation: Incarnation of the collection worker.
        sequence: Number of rollouts started so far.
        collected_steps: Number of env steps that `build` and `count_unfinished` have counted so far.
        delivered_steps: Number of env steps in the rollouts that `build` has returned.
    """

    def __init__(self, algo: Algorithm, storage: UserPart, place: tuple[int, int, int], now: Callable[[], float], *,
                 row_name: Callable[[str, int], str], encoder: Encoder | None, finds_errors: bool) -> None:
        self.storage, self._algo, self._now, self._encoder = storage, algo, now, encoder
        index_parent, self._index_worker, self.incarnation = place
        self._where = collection_worker(index_parent, self._index_worker)
        self.row_name, self._finds_errors = row_name, finds_errors
        self.sequence = self.collected_steps = self.delivered_steps = 0
        self._running = dict[str, np.ndarray]()  # discounted returns of the environments, for the reward normalizers

    def restart(self) -> None:
        """Discard the discounted returns of the current episodes, because the environments have been replaced."""
        self._running = {}

    def count_unfinished(self) -> int:
        """Count the env steps in the storage as collected, although no rollout will contain them.

        Returns:
            The number of env steps in the storage.
        """
        num_steps = int(self.storage.num_unfinished)
        self.collected_steps += num_steps
        return num_steps

    def discard_unfinished(self) -> int:
        """Count the env steps in the storage as collected and as delivered, because the caller books them as dropped.

        Returns:
            The number of env steps in the storage.
        """
        num_steps = self.count_unfinished()
        self.delivered_steps += num_steps
        return num_steps

    def _cancel(self) -> int:
        """Discard the steps that a rollout has left behind if the storage cancels them; return their number."""
        return self.discard_unfinished() if self.storage.cancels_unfinished else 0

    def build(self, version: int, episodes: Sequence[Episode], watch: Stopwatch, *, preempted: bool,
              elapsed_s: Callable[[], float] | None, traffic: Mapping[str, Traffic], envs_restarted: int,
              tensor_envs: TensorVecEnv | None = None) -> Rollout:
        """Take the steps out of the storage, count them, and return them as a rollout; call within `torch.no_grad()`.

        Args:
            version: Version of the oldest weights with which the steps were collected, unless the data contain the
                version of each step.
            episodes: Episodes that ended in these steps.
            watch: Stopwatch that timed the collection of these steps; this method adds its own times.
            preempted: Whether the rollout is shorter than requested.
            elapsed_s: Function that returns the seconds since the start of the rollout. The seconds that `watch`
                has not timed so far are added to its part "store". None: `watch` has timed all seconds.
            traffic: Traffic of the messages that the worker has received since its previous rollout.
            envs_restarted: Number of environments that this incarnation of the worker has replaced so far.
            tensor_envs: The environments, if their steps are on a device, and are read here.

        Raises:
            NonFiniteDataError: An observation or a reward is not finite.
            EnvError: A rollout on a device is wrong in another way; see `TensorVecEnv`.
        """
        data, cancelled = self.storage.get_all_buffer_data(copy=self._encoder is not None), self._cancel()
        host, num_env_steps, num_steps, size = data.host, data.num_valid(), data.num_steps, data.size
        by_version = _steps_by_version(data)
        self.collected_steps += num_env_steps
        if host is not None:
            episodes = host.episodes
            if tensor_envs is not None:
                tensor_envs.log(episodes)
        moments: dict[str, Moments] = {}
        if num_env_steps:
            parts = data.parts if host is None else {} if host.is_sound else data.to_numpy().parts
            for policy, part in parts.items():
                what = f"{self._where}, policy {policy!r}" if policy else self._where
                name_of = functools.partial(self.row_name, policy)
                check_finite({**part.obs, "reward": part.reward}, what, name_of=name_of)
                if part.final_index.shape[0]:
                    check_finite(part.final_obs, f"{what}, last observations of episodes", 0,
                                 functools.partial(_ended_row, name_of, part.final_index))
                if tensor_envs is not None:
                    tensor_envs.check_rollout(part.obs, part.final_obs)
            with watch.part("inference"):
                self._algo.finish_rollout(data)
                if self._finds_errors:
                    self.storage.add_errors(data)
            moments = cast("dict[str, Moments]", self._algo.moments_of(data, self._running))
        agent_steps = {policy: part.num_valid() for policy, part in data.parts.items() if policy}
        sent = NOT_SENT
        if self._encoder is not None:
            with watch.part("encode"):
                data, sent = self._encoder.pack(data.to_numpy().map)
        self.delivered_steps += num_env_steps
        if elapsed_s is not None:
            watch.add("store", max(0.0, elapsed_s() - sum(watch.seconds.values())))
        return Rollout(data, RolloutHeader(
            cancelled_steps=cancelled, num_env_steps=num_env_steps, collected_steps=self.collected_steps,
            weights_version=min(by_version, default=version), steps_by_version=by_version,
            worker=self._index_worker, sequence=self.sequence, incarnation=self.incarnation, episodes=tuple(episodes),
            moments=moments, agent_steps=agent_steps, timings=watch.seconds, num_steps=num_steps, size=size,
            preempted=preempted, sent=sent, traffic=traffic, envs_restarted=envs_restarted))


class CWorker(Worker):
    """A worker that collects rollouts.

    The local worker (index 0) shares its parameters with the gradient worker, even if the local worker does not
    collect.

    Args:
        index_worker: Index in the set: 0 is local to the gradient worker, 1..M are remote.
        recipe: Agent, options and seed of all collection workers; the result of `CWorkerSet.create_factory`.
        index_parent: Index of the gradient worker.
        role: The job of this worker.
        device: Device of the actor; see `check_device`.
        context: Runtime, incarnation and other surroundings of the worker; None: the defaults.

    Attributes:
        actor, algo, storage: The agent's parts.
        envs: The vector of environments; None if `role` is `Role.SERVER`.
        num_envs: Number of environments in the vector of each collection worker.
    """

    def __init__(self, index_worker: int, recipe: CWorkerRecipe, index_parent: int = 0, *,
                 role: Role = Role.COLLECTOR, device: str | None = None, context: Context | None = None) -> None:
        context = context or Context()
        super().__init__(index_worker, context.num_threads, context.numerics)
        runtime, incarnation = context.runtime, context.incarnation
        device = check_device(device, runtime.own_gpus(), "col_device", recipe.place_of(index_parent, index_worker)[0])
        path, envs = (index_parent, index_worker, incarnation), recipe.train_envs_factory
        self.index_parent, self.num_envs = index_parent, envs.num_envs
        self.actor = recipe.actor_factory(device=device, seed=derive_seed(recipe.seed, Stream.INIT))
        self.algo: UserPart = recipe.algo_factory(
            device=device, actor=self.actor, seed=derive_seed(recipe.seed, Stream.ACTING, *path))
        self.algo.take_place(*recipe.place_of(index_parent, index_worker))
        self._make_storage = functools.partial(recipe.make_storage, device, self.actor, self.algo)
        self.storage: UserPart = self._make_storage(path)
        can_stay = self.algo.device.type != "cpu" and recipe.can_stay_on_device(self.algo, self.storage)
        self._make_envs = recipe.env_maker(path, context.num_threads, self.algo.device if can_stay else None)
        self.envs: VecEnv | None = None if role is Role.SERVER else self._make_envs(seed=recipe.seed)
        self._choose: Callable[..., ActingStep] = self.algo.acting_step
        if isinstance(self.envs, TensorVecEnv) and self.algo.act_on_device is not None:
            self.storage.stay_on_device()
            self._choose = cast("Callable[..., ActingStep]", self.algo.act_on_device)  # with tensors in place of arrays
        self._envs_restarted = 0  # number of environments that were restarted before the latest `reseed`
        self.version = 0
        # The journal's lock is held while parameters are changed or copied, so no snapshot contains half an update. See
        # `invariant` for the relation of `version` and `_snapshot`.
        self.journal = context.journal or Journal()
        self._snapshot: Weights | None = None
        self._now = runtime.now
        self._point = runtime.points(collection_worker(index_parent, index_worker), incarnation)
        self.encoder: Encoder = Encoder(recipe.compression, runtime.now)
        self._weights_traffic = NO_TRAFFIC
        self._finds_errors, self._checks_data = recipe.finds_errors, recipe.checks_data
        self._builder = RolloutBuilder(
            self.algo, self.storage, path, runtime.now, row_name=envs.row_name,
            encoder=None if role is Role.LEARNER else self.encoder, finds_errors=recipe.finds_errors)
        # Other threads may call `interrupt` and `preempt`, which set the next two attributes. Collection reads these
        # attributes at each step.
        self._interrupted = False
        self._preemption: tuple[int, int] = (0, 0)
        self._reset_pending = True
        self._stream: torch.cuda.Stream | None = None
        if context.initial_weights is not None:
            self.set_weights(context.initial_weights)
        if role is Role.COLLECTOR:
            self.use_own_stream()

    def use_own_stream(self) -> None:
        """On a GPU, act on a CUDA stream of this worker, so that actions do not wait for the kernels of the learner.

        By default, all threads of a process use the same stream. The actor of this worker must be its own: other
        threads exchange weights with it through host memory.
        """
        if self.algo.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.algo.device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(self.algo.device))  # until the networks are built

    def acting_stream(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which this worker's stream, if it has one, is the current stream of the thread."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def invariant(self) -> bool:
        """Return whether the snapshot of the weights is not newer than the weights, which holds after every event."""
        return self._snapshot is None or self._snapshot.version <= self.version

    @property
    def collected_steps(self) -> int:
        """Number of env steps in all rollouts so far; after `close`, also those of the unfinished rollout."""
        return self._builder.collected_steps

    @property
    def version(self) -> int:
        """Number of updates that led to the current weights."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = self.algo.version = version

    @property
    def incarnation(self) -> int:
        """0 for the first worker with this index; each replacement has a larger number. `reseed` uses this number."""
        return self._builder.incarnation

    @incarnation.setter
    def incarnation(self, incarnation: int) -> None:
        self._builder.incarnation = incarnation

    def new_builder(self, path: tuple[int, int, int]) -> RolloutBuilder:
        """Return a rollout builder with its own storage for a remote worker, whose actions this worker chooses.

        Args:
            path: Indices of the gradient worker and of the remote worker, and the incarnation of the latter.
        """
        return RolloutBuilder(self.algo, self._make_storage(path), path, self._now, row_name=self._builder.row_name,
                              encoder=self.encoder, finds_errors=self._finds_errors)

    def get_weights(self) -> Weights:
        """Return a snapshot of the acting state; until the weights change, all calls return the same arrays.

        If collection workers compute TD errors, the snapshot also contains the learning state: target networks and
        critics.
        """
        with self.journal.lock:
            if self._snapshot is None or self._snapshot.version != self.version:
                state = {key: value.numpy() for key, value in self.algo.acting_state().items()}
                learning = self.learning_state() if self._finds_errors else {}
                self._snapshot = Weights(self.version, state, dict(self.algo.parameters), learning,
                                         dict(self.storage.parameters))
            elif (self._snapshot.parameters, self._snapshot.storage_parameters) != (self.algo.parameters,
                                                                                    self.storage.parameters):
                self._snapshot = replace(  # schedules change the algorithm's parameters, but not the version
                    self._snapshot, parameters=dict(self.algo.parameters),
                    storage_parameters=dict(self.storage.parameters))
            return self._snapshot

    def learning_state(self) -> dict[str, np.ndarray]:
        """Return copies of the arrays on which gradients depend but acting does not, such as target networks."""
        return {name: value.numpy() for name, value in self.algo.learning_state().items()}

    def set_weights(self, weights: Weights | Mapping[str, np.ndarray | Tensor]) -> None:
        """Copy weights into the actor.

        Args:
            weights: A `Weights` message, or the arrays that acting needs, by name: an `acting_state()` of the algorithm
                or a `state_dict()` of the actor. Only a message changes `version`.

        Raises:
            WeightsError: Names or shapes differ from those of the actor.
            ContractError: With `check_data="always"`, the dtype of an array in the message is wrong.
        """
        if isinstance(weights, Weights):
            weights, traffic = receive(weights, self._now)
            self._weights_traffic += traffic
            if self._checks_data:
                check_state(self.algo, "acting_state()", weights.state, self.algo.acting_state())
                check_state(self.algo, "learning_state()", weights.learning, self.algo.learning_state())
        with self.journal.writing(), self.acting_stream():
            state = weights.state if isinstance(weights, Weights) else weights
            self.algo.load_acting_state(state)
            if isinstance(weights, Weights):
                if weights.learning:
                    self.algo.load_learning_state(weights.learning)
                self.algo.parameters = dict(weights.parameters)
                self.storage.parameters = {**self.storage.parameters, **weights.storage_parameters}
                self.version = weights.version
            self._snapshot = None

    def take_weights_traffic(self) -> Traffic:
        """Return the total traffic of the weights received since the last call of this method."""
        traffic, self._weights_traffic = self._weights_traffic, NO_TRAFFIC
        return traffic

    def whole_state(self) -> WholeState:
        """Return everything that the next update depends on, except data."""
        with self.journal.lock:
            return WholeState(self.version, self.algo.state_dict())

    def load_whole_state(self, state: WholeState) -> None:
        """Load the state of another worker, except the state of random generators and exploration noise."""
        with self.journal.writing():
            self.algo.load_state_dict(with_own_draws(state.algorithm, self.algo.state_dict()))
            self.version, self._snapshot = state.version, None

    def collect(self, weights: Weights | None = None, num_steps: int | None = None) -> Rollout:
        """Collect one rollout.

        Args:
            weights: New weights; None: the weights do not change.
            num_steps: Number of steps in each environment; if a number is given, `preempt` has no effect. None: the
                rollout fills the storage.

        Returns:
            A rollout of the requested length, or a shorter one after `preempt` or `interrupt`.
        """
        start, watch = self._now(), Stopwatch(self._now)
        if weights is not None:
            with watch.part("decode"):
                self.set_weights(weights)
        self._builder.sequence += 1
        version = self.version
        with torch.no_grad(), self.acting_stream():
            episodes, preempted = self._fill_storage(watch, num_steps)
            self._reset_pending = self.storage.cancels_unfinished
            return self._builder.build(
                version, episodes, watch, preempted=preempted, elapsed_s=lambda: self._now() - start,
                traffic={WEIGHTS: self.take_weights_traffic()},
                envs_restarted=self._envs_restarted + (self.envs.num_restarts if self.envs is not None else 0),
                tensor_envs=self.envs if isinstance(self.envs, TensorVecEnv) else None)

    def _fill_storage(self, watch: Stopwatch, num_steps: int | None) -> tuple[list[Episode], bool]:
        """Step the environments until the rollout has the requested length, or is preempted or interrupted.

        Returns:
            The episodes that ended, and whether the rollout is shorter than requested.
        """
        storage, envs, choose, point, now = self.storage, self.envs, self._choose, self._point, self._now
        assert envs is not None, "this CWorker has no environments"
        episodes: list[Episode] = []
        if self._reset_pending:
            with watch.part("environment"):
                first = envs.reset()
            storage.start(*first)
            self._reset_pending = False
        acting_s = stepping_s = 0.0
        while not storage.full and storage.num_steps != num_steps:
            sequence, min_steps = self._preemption
            if self._interrupted or (
                    num_steps is None and sequence == self._builder.sequence and storage.num_steps >= min_steps):
                break
            obs, rhs, done, mask = storage.current()
            start = now()
            acting = choose(obs, rhs, done) if mask is None else choose(obs, rhs, done, mask=mask)
            acted = now()
            step = envs.step(acting.clipped_action)
            if point is not None:
                point("step")
            stepped = now()
            acting_s += acted - start
            stepping_s += stepped - acted
            storage.insert_transition(acting, step)
            if step.episodes:
                episodes.extend(step.episodes)
        watch.add("inference", acting_s)
        watch.add("environment", stepping_s)
        return episodes, not storage.full and storage.num_steps != num_steps

    def take_place(self, index: int, num_collectors: int) -> None:
        """Set this worker's index among all collection workers of the tree; see `Algorithm.take_place`."""
        self.algo.take_place(index, num_collectors)

    def reseed(self, seed: int, incarnation: int | None = None) -> None:
        """Seed random generators, and replace the environments, as if the worker had just been built with this seed.

        The parameters and collected data do not change. The environments are replaced and not only reset, because they
        may keep state across episodes.

        Args:
            seed: The seed.
            incarnation: New incarnation of this worker, for a run that resumes from a checkpoint; None: no change.
        """
        if incarnation is not None:
            self.incarnation = incarnation
        self.algo.reseed(derive_seed(seed, Stream.ACTING, self.index_parent, self.index_worker, self.incarnation))
        if self.envs is not None:
            self._envs_restarted += self.envs.num_restarts
            self.envs.close()
            self.envs = self._make_envs(seed=seed, incarnation=self.incarnation)
        self.discard_unfinished()
        self._builder.restart()

    def discard_unfinished(self) -> int:
        """Begin new episodes at the next collection; return the number of env steps that are lost, for the ledger."""
        is_collecting, self._reset_pending = not self._reset_pending, True
        return self._builder.discard_unfinished() if is_collecting else 0

    def preempt(self, sequence: int, min_steps: int) -> None:
        """End rollout number `sequence` as soon as it has `min_steps` steps in each environment."""
        self._preemption = (sequence, max(1, min_steps))

    def preempt_next(self, min_steps: int) -> None:
        """End the next rollout as soon as it has `min_steps` steps in each environment."""
        self.preempt(self._builder.sequence + 1, min_steps)

    def preempt_running(self, min_steps: int) -> None:
        """End the current rollout, if there is one, as soon as it has `min_steps` steps in each environment."""
        self.preempt(self._builder.sequence, min_steps)

    def interrupt(self) -> None:
        """Stop collection for good: end the current rollout before its next step; later rollouts contain no steps."""
        self._interrupted = True

    def update_algorithm_parameter(self, parameter_name: str, new_parameter_value: float) -> None:
        """Change one of the algorithm's updatable parameters; see `Algorithm.update_algorithm_parameter`."""
        with self.journal.writing():
            self.algo.update_algorithm_parameter(parameter_name, new_parameter_value)
            self._snapshot = None

    def apply_gradients(self, gradients: list[Tensor | None],
                        moments: Sequence[dict[str, Moments]] = ()) -> dict[str, float] | None:
        """Update the actor once, and merge the `moments` of rollouts (means and variances) into its normalizers.

        Returns:
            The algorithm's statistics; None if there was no update because the gradient was not finite.
        """
        info: dict[str, float] | None = None
        with self.journal.writing():
            try:
                info = self.algo.apply_gradients(gradients)
            except NonFiniteUpdateError:
                logger.debug("GWorker %d skips an update at version %d", self.index_parent, self.version, exc_info=True)
            else:
                self.version += 1
            if moments:  # moments are always finite, even if the gradient is not
                self.merge_moments(moments)
        return info

    def follow_schedules(self, env_steps: Callable[[], int], target_steps: int) -> None:
        """Set scheduled parameters of the algorithm and the storage to the values of their schedules.

        Args:
            env_steps: Function that returns the number of env steps so far.
            target_steps: Number of env steps of the whole experiment.
        """
        for part in (self.algo, self.storage):
            if part.schedules:
                with self.journal.writing():  # another thread may replace a schedule at the same time
                    part.follow_schedules(env_steps(), target_steps)

    def merge_moments(self, parts: Iterable[dict[str, Moments]]) -> None:
        """Merge moments of rollouts into the normalizers, without an update of the parameters."""
        with self.journal.writing():
            for part in parts:
                self.algo.merge_moments(part)
            self._snapshot = None

    def close(self) -> tuple[int, int]:
        """Close the environments, if they are open.

        Returns:
            The number of env steps since the worker was built, and the number of these steps that are not part of a
            rollout returned by `collect`.
        """
        if self.envs is not None:
            self.envs.close()
            self.envs = None
            if not self._reset_pending:
                self._builder.count_unfinished()
        return self.collected_steps, self.collected_steps - self._builder.delivered_steps
