"""Write the files of one run: its description, records, models, checkpoints and result."""

from __future__ import annotations

import math
import operator
import re
import time
from collections.abc import Mapping
from pathlib import Path

from pytorchrl import checkpoints
from pytorchrl.appended_files import check_appended
from pytorchrl.descriptions import describe_agent, describe_learner
from pytorchrl.errors import CheckpointError, ConfigError
from pytorchrl.learner_options import LearnerOptions
from pytorchrl.reporting import EpisodeWindow, Means, Recorder, description, write_json
from pytorchrl.run_directory import CHECKPOINTS, METRICS_FILE, MODEL_NAME, RESULT_FILE, RUN_FILE, Lock
from pytorchrl.scheme import Scheme
from pytorchrl.terminal import get_logger
from pytorchrl.untyped import StateDict

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
        self.last_checkpoint: dict[str, float] | None = None

    def lock(self) -> None:
        """Lock the directory; raise `ConfigError` if another run uses it."""
        if self._log_dir is not None:
            self._lock = Lock(self._log_dir)

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
        settings = {"scheme": scheme.settings, "agent": describe_agent(scheme.agent),
                    "learner": describe_learner(options)}
        write_json(self._log_dir / RUN_FILE, description(recipe, options.target_steps, scheme.seed, settings))
        (self._log_dir / RESULT_FILE).unlink(missing_ok=True)  # the result of a resumed run is outdated
        self._recorder = Recorder(self._log_dir, tensorboard=options.tensorboard,
                                  after=None if resumed is None else resumed["env_steps"],
                                  resumed=None if resumed is None else resumed.get("records"))

    def resume(self, scheme: Scheme) -> dict[str, object] | None:
        """Make a scheme continue from the newest checkpoint, and return the learner's state; None without checkpoints.

        Raises:
            CheckpointError: See `newest_checkpoint`; or the checkpoint is from another run or version.
        """
        found = self.newest_checkpoint()
        if found is None:
            return None
        assert self._log_dir is not None
        path = str(checkpoints.paths(self._log_dir / CHECKPOINTS)[0])
        try:
            scheme.resume(found["scheme"])
            learner = found["learner"]
            # These values are used only when the learner starts.
            for name in ("env_steps", "recorded_steps"):
                operator.index(learner[name])
            episodes, means = EpisodeWindow(), Means()
            episodes.restore(learner["episodes"])
            means.restore(learner.get("means", means.state()))
            numbers = [learner["seconds"], episodes.return_mean, episodes.length_mean,
                       *episodes.policy_return_means.values(), *means.peek().values()]
            all(math.isfinite(number) for number in numbers if number is not None)
        except CheckpointError as error:
            raise CheckpointError(f"{path!r} cannot be resumed: {error}") from error
        except ConfigError:
            raise
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{path!r} does not contain the state of a run: {error!r}") from error
        return dict(found["learner"])

    def newest_checkpoint(self) -> StateDict | None:
        """Return the newest checkpoint that can be read, if there is one, after a check of the records before it.

        Raises:
            CheckpointError: No checkpoint can be read, or the records differ from those at the checkpoint.
        """
        if self._log_dir is None:
            return None
        found, records = checkpoints.newest(self._log_dir / CHECKPOINTS), self._log_dir / METRICS_FILE
        if found is None:
            return None
        if not (isinstance(found.get("scheme"), Mapping) and isinstance(found.get("learner"), Mapping)):
            path = checkpoints.paths(self._log_dir / CHECKPOINTS)[0]
            raise CheckpointError(f"{str(path)!r} is not a checkpoint of a run: it lacks a scheme or a learner")
        state = found["learner"].get("records")
        if state is not None and records.exists():
            check_appended(records, state)
        elif state is not None and state["bytes"]:
            logger.warning("%s is missing; new records begin at the checkpoint", records)
        return found

    def record(self, metrics: Mapping[str, object]) -> None:
        """Append a record of metrics."""
        if self._recorder is not None:
            self._recorder.write(metrics)

    def save_model(self, scheme: Scheme, name: str = MODEL_NAME) -> str:
        """Write the agent to `name.pt` and return the path.

        Raises:
            ConfigError: There is no `log_dir`, or the name could lead out of it.
        """
        if self._log_dir is None:
            raise ConfigError("save_model needs a log_dir; pass one to the Learner")
        if not isinstance(name, str) or not _MODEL_NAME.fullmatch(name):
            raise ConfigError(f"a model's name must match {_MODEL_NAME.pattern}, got {name!r}")
        return scheme.save_model(str(self._log_dir / f"{name}.pt"))

    def save_last_model(self, scheme: Scheme) -> None:
        """Write the agent if there is a `log_dir`; a failure is logged, because the agent is still in memory."""
        try:
            if self._log_dir is not None:
                self.save_model(scheme)
        except OSError as error:
            logger.warning("the model could not be written: %s; the agent is in memory only", error)

    def checkpoint(
        self, env_steps: int, scheme: Mapping[str, object], learner: Mapping[str, object], started_at: float,
    ) -> None:
        """Write a checkpoint; a failure to write is logged.

        Args:
            env_steps: Env steps of the run so far.
            scheme: The state of the scheme.
            learner: The state of the learner.
            started_at: `time.perf_counter()` at the start of the checkpoint.
        """
        if self._log_dir is None or self._recorder is None:
            return
        state = {"scheme": scheme, "learner": {**learner, "records": self._recorder.state}}
        try:
            size = checkpoints.write(self._log_dir / CHECKPOINTS, env_steps, state)
        except OSError as error:
            logger.warning("the checkpoint after %d env steps could not be written: %s", env_steps, error)
            return
        self.last_checkpoint = {
            "env_steps": env_steps, "bytes": size, "seconds": time.perf_counter() - started_at}

    def end(self, summary: Mapping[str, object]) -> None:
        """Write the result of the run, with the size and the checksum of its records, which are then complete."""
        if self._log_dir is not None:
            records = {} if self._recorder is None else {"records": self._recorder.state}
            write_json(self._log_dir / RESULT_FILE, {**summary, **records})

    def close(self) -> None:
        """Close the records and release the lock; idempotent."""
        for file in (self._recorder, self._lock):
            if file is not None:
                file.close()
