"""Write the files of one run: its description, records, models, checkpoints and result."""

from __future__ import annotations

import copy
import functools
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pytorchrl.agent.data import Evaluation
from pytorchrl.agent.env.vec_env import EnvFactory
from pytorchrl.agent.factories import Agent
from pytorchrl.agent.option_values.descriptions import mapping, spaces_of, to_json
from pytorchrl.errors import CheckpointError, ConfigError, WeightsError
from pytorchrl.files.atomic import read_json, saved_int
from pytorchrl.files.lines import check_appended
from pytorchrl.files.run_directory import CHECKPOINTS, LEGS, METRICS_FILE, MODEL_NAME, RESULT_FILE, RUN_FILE, Lock
from pytorchrl.learner import checkpoints
from pytorchrl.learner.checkpoints import CheckpointFiles, RunState, Written
from pytorchrl.learner.options import LearnerOptions
from pytorchrl.learner.reporting import EpisodeWindow, Means, Recorder, description, write_json
from pytorchrl.scheme.options.base import as_keywords
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.threads import Background
from pytorchrl.support.untyped import StateDict

if TYPE_CHECKING:
    from pytorchrl.scheme import Scheme

logger = get_logger(__name__)

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class RunFiles:
    """The files of a run in `log_dir`. Without a `log_dir`, methods write nothing, and `save_model` is refused.

    Attributes:
        last_checkpoint: Env steps, bytes and seconds of the last checkpoint; None before the first checkpoint.
    """

    def __init__(self, log_dir: Path | None) -> None:
        self._log_dir = log_dir
        self._lock: Lock | None = None
        self._recorder: Recorder | None = None
        self._checkpoints: CheckpointFiles | None = None
        self._evaluation: Evaluation | None = None
        self._writing = Background("checkpoint writer")
        self._traces = self._current_traces()
        self._damaged: tuple[Path, ...] = ()
        self._resumed_from: Path | None = None
        self._description: dict[str, object] = {}
        self.last_checkpoint: dict[str, float] | None = None

    def lock(self) -> bool:
        """Lock the directory, and return whether another run has used it since this object was built.

        Raises:
            ConfigError: Another run uses the directory.
        """
        if self._log_dir is not None:
            self._lock = Lock(self._log_dir)
        return self._current_traces() != self._traces

    def _current_traces(self) -> list[tuple[str, int, int]]:
        """Return (name, inode, modification time) of `run.json` and of each checkpoint.

        If these values change, another run has used the directory.
        """
        if self._log_dir is None:
            return []
        files = [self._log_dir / RUN_FILE, *checkpoints.paths(self._log_dir / CHECKPOINTS)]
        found = [(file.name, file.stat()) for file in files if file.exists()]
        return [(name, status.st_ino, status.st_mtime_ns) for name, status in found]

    def resume(self, scheme: Scheme, *, is_wanted: bool = True, is_changed: bool = False) -> StateDict | None:
        """Make a scheme continue from the newest checkpoint that can be read.

        Args:
            scheme: The scheme. It may already have been resumed from an older checkpoint.
            is_wanted: Whether the option `resume` is set.
            is_changed: Whether another run has used the directory since this object was built.

        Returns:
            The learner's state in the checkpoint; None if the run is new.

        Raises:
            CheckpointError: No checkpoint can be read, the newest readable one does not fit the scheme, or someone has
                changed the records in `metrics.jsonl` that were written before this checkpoint.
            ConfigError: Another run has used the directory, and either `is_wanted` is false or no checkpoint exists.
        """
        newest = self.newest_checkpoint() if is_wanted else None
        if newest is not None:
            self._resumed_from = newest.path
            return self.resume_from(scheme, newest.state)
        if is_changed:
            self.close()
            raise ConfigError(f"another run has used log_dir {str(self._log_dir)!r} since this learner was built; "
                              "build a new learner, with resume=True to continue that run, or with another log_dir")
        return None

    def resume_from(self, scheme: Scheme, state: RunState) -> StateDict:
        """Make a scheme continue from the state of a run, and return the learner's part of the state.

        Raises:
            CheckpointError: The state does not fit the scheme.
        """
        try:
            with self.resuming():
                scheme.resume(state.scheme)
            _check_learner(state.learner)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise CheckpointError(f"{str(self._resumed_from)!r} does not contain the state of a run: {error!r}",
                                  ) from error
        return state.learner

    @contextmanager
    def resuming(self) -> Iterator[None]:
        """If the run resumes from a checkpoint, add the path of the checkpoint to errors raised in the `with` block.

        Raises:
            CheckpointError: The checkpoint does not fit the run.
        """
        try:
            yield
        except (CheckpointError, WeightsError) as error:
            if self._resumed_from is None:  # a new run: the error is about a saved model
                raise
            raise CheckpointError(f"{str(self._resumed_from)!r} cannot be resumed: {error}") from error

    def begin(
        self, scheme: Scheme, recipe: Mapping[str, object], options: LearnerOptions, *, resumed: StateDict | None,
    ) -> None:
        """Write `run.json` and open the records.

        Args:
            scheme: The scheme of the run, which must have started.
            recipe: The options that were given to `train`, as JSON; empty for an agent that was composed in Python.
            options: Options of the learner.
            resumed: The learner's state in the checkpoint from which the run is resumed; None: the run is new.
        """
        if self._log_dir is None:
            return
        checkpoints.set_aside(self._damaged)
        newest = None if resumed is None else Written(resumed["env_steps"], scheme.version)
        self._checkpoints = CheckpointFiles(self._log_dir / CHECKPOINTS, options, newest)
        self._description = {**described_run(scheme, recipe, options), LEGS: self._legs(newest, options.target_steps)}
        write_json(self._log_dir / RUN_FILE, self._description)
        (self._log_dir / RESULT_FILE).unlink(missing_ok=True)  # an earlier part of this run may have written a result
        self._recorder = Recorder(self._log_dir, tensorboard=options.tensorboard,
                                  after=None if resumed is None else resumed["env_steps"],
                                  resumed=None if resumed is None else resumed["records"])

    def _legs(self, start: Written | None, target_steps: int) -> list[dict[str, int]]:
        """Return the legs of the run, which begin with a new run and with each resume: updates before, `target_steps`.

        Args:
            start: The checkpoint from which the run is resumed; None: the run is new.
            target_steps: The target of the new leg.
        """
        assert self._log_dir is not None
        leg = {"updates": 0 if start is None else start.version, "target_steps": target_steps}
        return [*([] if start is None else legs_of(self._log_dir, leg["updates"])), leg]

    def newest_checkpoint(self) -> checkpoints.Newest | None:
        """Return the newest readable checkpoint; None if there are no checkpoints.

        Also check that nobody has changed the records in `metrics.jsonl` that were written before the checkpoint.

        Raises:
            CheckpointError: None of the checkpoints can be read, or the records differ from those at the checkpoint.
        """
        if self._log_dir is None:
            return None
        newest, records = checkpoints.newest(self._log_dir / CHECKPOINTS), self._log_dir / METRICS_FILE
        if newest is None:
            return None
        state, self._damaged = newest.state.learner.get("records"), newest.damaged
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{str(newest.path)!r} contains {state!r:.100} instead of the state of the records")
        if records.exists():
            check_appended(records, state)
        elif str(state.get("bytes")) != "0":
            logger.warning("%s is missing; new records begin at the checkpoint", records)
        return newest

    def record(self, metrics: Mapping[str, object]) -> None:
        """Append a record of metrics."""
        if self._recorder is not None:
            self._replace_description()
            self._recorder.write(metrics)

    def _replace_description(self) -> None:
        """Write `run.json` again if somebody has removed it, because other files of a run are useless without it."""
        if self._log_dir is None or (self._log_dir / RUN_FILE).exists():
            return
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            write_json(self._log_dir / RUN_FILE, self._description)
            logger.warning("%s was removed during the run, and is written again", self._log_dir / RUN_FILE)
        except OSError as error:
            logger.warning("%s was removed during the run, and cannot be written again: %s", self._log_dir / RUN_FILE,
                           error)

    def save_model(self, scheme: Scheme, name: str = MODEL_NAME, *, evaluated: bool = False) -> str:
        """Write the agent to `name.pt`, and return the path; if `evaluated`, write the weights of the last evaluation.

        Raises:
            ConfigError: There is no `log_dir`, the name could lead out of it, or there was no evaluation.
        """
        if self._log_dir is None:
            raise ConfigError("save_model needs a log_dir; pass one to the Learner")
        if not isinstance(name, str) or not _MODEL_NAME.fullmatch(name):
            raise ConfigError(f"a model's name must match {_MODEL_NAME.pattern}, got {name!r}")
        save = scheme.save_evaluated_model if evaluated else scheme.save_model
        return save(str(self._log_dir / f"{name}.pt"))

    def save_last_model(self, scheme: Scheme) -> None:
        """Write the agent if there is a `log_dir`; a failure is only logged, because the agent is still in memory."""
        try:
            if self._log_dir is not None:
                self.save_model(scheme)
        except OSError as error:
            logger.warning("the model could not be written: %s; the agent is in memory only", error)

    def checkpoint(
        self, env_steps: int, scheme: Mapping[str, object], learner: Mapping[str, object], started_at: float,
        version: int = 0,
    ) -> None:
        """Write a checkpoint in the background, after the previous one; a failure to write is logged.

        Args:
            env_steps: Env steps of the run so far.
            scheme: The state of the scheme. It is not copied, so it must not be changed after this call.
            learner: The state of the learner, which is copied.
            started_at: `time.perf_counter()` at the start of the checkpoint.
            version: Number of updates so far.
        """
        if self._checkpoints is None or self._recorder is None:
            return
        state = self.state(scheme, learner)._asdict()
        self._writing.start(functools.partial(
            self._write_checkpoint, self._checkpoints, Written(env_steps, version), state, started_at))

    def state(self, scheme: Mapping[str, object], learner: Mapping[str, object]) -> RunState:
        """Return the contents of a checkpoint; see `checkpoint` for the arguments."""
        records = {} if self._recorder is None else {"records": self._recorder.state}
        return RunState(dict(scheme), {**copy.deepcopy(dict(learner)), **records})

    def _write_checkpoint(
        self, files: CheckpointFiles, written: Written, state: Mapping[str, object], started_at: float,
    ) -> None:
        try:
            size = files.write(written, state)
        except OSError as error:
            logger.warning("the checkpoint after %d env steps could not be written: %s", written.env_steps, error)
            return
        self.last_checkpoint = {
            "env_steps": written.env_steps, "bytes": size, "seconds": time.perf_counter() - started_at}

    def wait(self) -> None:
        """Wait until the last checkpoint has been written; raise any error except `OSError`, which is only logged."""
        self._writing.wait()

    def rate(self, evaluation: Evaluation | None) -> None:
        """Record the mean return of a new evaluation, to determine the best checkpoint."""
        if self._checkpoints is None or evaluation is None or evaluation is self._evaluation:
            return
        self._evaluation = evaluation
        try:
            self._checkpoints.rate(evaluation.version, evaluation.return_mean)
        except OSError as error:
            logger.warning("the best checkpoint could not be recorded: %s", error)

    def end(self, summary: Mapping[str, object]) -> None:
        """Write `result.json` after the last record, with the size and the checksum of all records."""
        self.wait()
        if self._log_dir is not None:
            self._replace_description()
            records = {} if self._recorder is None else {"records": self._recorder.state}
            write_json(self._log_dir / RESULT_FILE, {**summary, **records})

    def close(self) -> None:
        """Wait for the last checkpoint, close the records and release the lock; idempotent."""
        try:
            self.wait()
        finally:
            for file in (self._recorder, self._lock):
                if file is not None:
                    file.close()


def legs_of(log_dir: Path, before: float = math.inf) -> list[dict[str, int]]:
    """Return the legs of a run that began before so many updates, as `run.json` describes them; [] if it lacks them."""
    try:
        legs = cast("list[dict[str, int]]", mapping(read_json(log_dir / RUN_FILE))[LEGS])
        found = [{name: saved_int(leg[name]) for name in ("updates", "target_steps")} for leg in legs]
    except (OSError, LookupError, TypeError, ValueError, ConfigError, CheckpointError):
        return []
    return [leg for leg in found if leg["updates"] < before]


def _check_learner(learner: StateDict) -> None:
    """Raise an error if the saved state of a learner lacks a value, or has a value that a learner cannot use."""
    for name in ("env_steps", "recorded_steps"):
        learner[name] = saved_int(learner[name])
    learner["checkpoints"] = [(saved_int(start), saved_int(end)) for start, end in learner["checkpoints"]]
    callbacks = learner["callbacks"]
    if not isinstance(callbacks, (list, tuple)) or not all(
            isinstance(saved, Mapping) and isinstance(saved["callback"], str) and isinstance(saved["state"], Mapping)
            for saved in callbacks):
        raise TypeError(f"the states of callbacks must be mappings, got {callbacks!r:.100}")
    episodes, means = EpisodeWindow(), Means()
    episodes.restore(learner["episodes"])
    means.restore(learner["means"])
    numbers = [learner["seconds"], episodes.return_mean, episodes.length_mean, *episodes.policy_return_means.values(),
               *means.peek().values()]
    for number in numbers:
        if number is not None:
            math.isfinite(number)  # raises TypeError if it is not a number


def described_run(scheme: Scheme, recipe: Mapping[str, object], options: LearnerOptions) -> dict[str, object]:
    """Return the contents of `run.json` for a scheme that has started; see `RunFiles.begin` for the arguments."""
    settings = {"scheme": scheme.settings, "agent": _described_agent(scheme.agent),
                "learner": _described_options(options)}
    return description(recipe, options.target_steps, scheme.seed, settings)


def _described_agent(agent: Agent) -> dict[str, object]:
    """Return all factories of an agent as JSON, with all their options except `log_dir` of the environments."""
    spaces = spaces_of(agent.train_envs_factory)
    return {name: _described_envs(factory) if isinstance(factory, EnvFactory) else to_json(factory, spaces)
            for name, factory in agent.as_dict().items() if factory is not None}


def _described_envs(envs: EnvFactory) -> object:
    described = mapping(to_json(envs))
    return {**described, "options": {
        name: option for name, option in mapping(described["options"]).items() if name != "log_dir"}}


def _described_options(options: LearnerOptions) -> dict[str, object]:
    """Return the options of a learner as JSON, except `log_dir` and `target_steps`."""
    return {name: to_json(value) for name, value in as_keywords(options).items()
            if name not in ("log_dir", "target_steps")}
