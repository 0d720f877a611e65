"""Learner: drives one scheme to a number of env steps, and reports, records, evaluates and saves on the way."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from pytorchrl import checkpoints, run_directory
from pytorchrl.agent.names import checked_names
from pytorchrl.agent.options import Options as BaseOptions
from pytorchrl.agent.options import build_options, option
from pytorchrl.errors import ConfigError, StoppedError, WorkerLostError
from pytorchrl.interrupts import Interrupts, Unblocked
from pytorchrl.reporting import (
    EpisodeWindow,
    Means,
    Progress,
    RateWindow,
    Recorder,
    description,
    next_multiple,
    to_json,
    write_json,
)
from pytorchrl.run_directory import CHECKPOINTS, MODEL_NAME, RESULT_FILE, RUN_FILE, Lock, prepare_log_dir
from pytorchrl.scheme.ledger import LedgerSnapshot
from pytorchrl.scheme.rules import check_scheme
from pytorchrl.terminal import get_logger
from pytorchrl.tracebacks import brief_errors_of

if TYPE_CHECKING:
    from pytorchrl.scheme import Evaluation, Scheme

logger = get_logger(__name__)

# A terminal line four times a second looks alive; drawing one costs up to 5 ms.
_LOOK_INTERVAL_S = 0.25
_RECORDS_PER_RUN = 200
_EVALUATION_TIMEOUT_S = 600.0
_LAGS = ("mean", "max", "p50", "p90")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@brief_errors_of("__init__", "start", "step", "train", "evaluate", "save_model")
class Learner:
    """Drives a scheme until `target_steps` env steps have reached the learner.

    Nothing starts before the first `step()` or `train()`. As a context manager it stops the scheme at the end:

        with Learner(scheme, target_steps=100_000, log_dir="runs/a") as learner:
            learner.train()

    Args:
        scheme: What to drive. The learner owns it from here on and stops it.
        target_steps: Env steps of the whole experiment; 0 is a dry run that checks and starts everything.
        log_dir: Directory of this run (made if missing) for metrics and models; None writes no files. A path that ends in a slash,
            such as "runs/", is a directory of runs: this run gets a new numbered directory in it, whose path is `self.log_dir`.
        recipe: What `run.json` says about how the agent can be built again.
        run_name: Name of a numbered run: "runs/" becomes "runs/<run_name>-1"; None: "run". Only for a directory of runs.
        **options: Fields of `Options`, such as `eval_every`, `log_every`, `checkpoint_every` and `resume`.

    Raises:
        ConfigError: An option is wrong, or `log_dir` is a file, cannot be written, or holds a run.
        CheckpointError: The run is to be resumed, and its checkpoints are of another run or cannot be read.
    """

    home: ClassVar[str] = "learner"

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        """What a learner can be told."""

        target_steps: int = option(help="env steps of the whole experiment; 0 checks and starts only", low=0)
        log_dir: str | os.PathLike[str] | None = option(
            None, help="directory of this run; if it ends in a slash, such as runs/, a directory of runs, in which this run gets a "
            "new numbered directory; without log_dir, no files are written")
        eval_every: int | None = option(
            None, help="env steps between evaluations beside training, the last at its end; none: never", low=1)
        eval_episodes: int = option(10, help="episodes of one such evaluation", low=1)
        log_every: int | None = option(
            None, help="env steps between two records of metrics.jsonl; none: 200 records a run", low=1)
        tensorboard: bool = option(True, help="also write TensorBoard files, if it is installed")
        overwrite: bool = option(False, help="rename a run that log_dir holds already, instead of refusing it")
        progress: bool = option(True, help="show a progress line on stderr")
        checkpoint_every: int | None = option(
            None, help="env steps between checkpoints, from which resume goes on, the last at the end; none: never", low=1)
        resume: bool = option(
            False, help="go on from the newest checkpoint in log_dir; where there is no run yet, begin one")

        def __post_init__(self) -> None:
            """Check what single fields cannot tell."""
            super().__post_init__()
            if self.log_dir is not None and not os.fspath(self.log_dir):
                raise ConfigError("log_dir must be a directory or None, got an empty text")
            if self.overwrite and self.log_dir is None:
                raise ConfigError("overwrite=True needs a log_dir, whose run it renames")
            if self.resume and (self.log_dir is None or self.overwrite):
                raise ConfigError("resume=True needs a log_dir, whose run it continues, without overwrite=True")
            if self.checkpoint_every is not None and self.log_dir is None:
                raise ConfigError("checkpoint_every needs a log_dir, where checkpoints are kept")

    @checked_names
    def __init__(
        self, scheme: Scheme, target_steps: int, log_dir: str | os.PathLike[str] | None = None, *,
        recipe: Mapping[str, Any] | None = None, run_name: str | None = None, **options: Any,
    ) -> None:
        self.options: Learner.Options = build_options(
            type(self), {"target_steps": target_steps, "log_dir": log_dir, **options})
        if "eval_episodes" in options and "eval_every" not in options:
            raise ConfigError("eval_episodes needs eval_every: without it nothing is evaluated")
        self.scheme = check_scheme(scheme)
        self.target_steps = target_steps
        if self.options.eval_every is not None and scheme.test_envs_factory is None:
            raise ConfigError("eval_every needs a scheme with test_envs_factory, which this one lacks")
        if self.options.checkpoint_every is not None and not (scheme.settings["record"] is scheme.settings["replay"] is None):
            raise ConfigError("a run that is recorded or replayed has no checkpoints; leave checkpoint_every out")
        if run_name is not None and (log_dir is None or not run_directory.is_directory_of_runs(log_dir)):
            raise ConfigError(f"run_name={run_name!r} needs a log_dir that ends in a slash and is a directory of runs, got {log_dir!r}")
        self.log_dir: Path | None = None
        self._resumed: Mapping[str, Any] | None = None
        if log_dir is not None:
            self.log_dir = prepare_log_dir(
                log_dir, run_name=run_name, overwrite=self.options.overwrite, resume=self.options.resume)
            found = checkpoints.newest(self.log_dir / CHECKPOINTS) if self.options.resume else None
            if found is not None:
                scheme.resume(found["scheme"])
                self._resumed = found["learner"]
        self._recipe = dict(recipe or {})
        self.env_steps = 0
        """Env steps that have reached the learner (collected, neither in flight nor queued), as of the last count."""
        self.ledger: dict[str, Any] = {}
        """Where all env steps were at the last look; final after `stop()`."""
        self._started = self._stopped = self._abandoned = False
        self._started_at = self._ended_at = 0.0
        self._next_look = self._next_record = self._count_from = self._next_evaluation = self._next_checkpoint = 0.0
        self._last_checkpoint: dict[str, float] | None = None
        self._recorded_steps = 0
        self._evaluating = False
        self._last_evaluation: Evaluation | None = None
        settings = scheme.settings
        self._takes_turns = settings["col_communication"] == settings["grad_communication"] == "synchronous"
        self._passes = _passes_of(scheme)
        self._last_collected: float = float("inf")
        self._means, self._rate = Means(), RateWindow()
        self._episodes = EpisodeWindow()
        self._recorder: Recorder | None = None
        self._progress: Progress | None = None
        self._lock: Lock | None = None

    # -- training ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the scheme's workers; the first `step()` does it too.

        Raises:
            StoppedError: After `stop()`.
            StartError: Workers cannot be started.
        """
        if self._stopped:
            raise StoppedError("this learner has been stopped; make a new scheme and learner to train again")
        if self._started:
            return
        if self.log_dir is not None:
            self._lock = Lock(self.log_dir)
        if self.options.progress:
            self._progress = Progress()
            if self.log_dir is not None and self.log_dir != Path(self.options.log_dir or "").expanduser():
                self._progress.tell(f"run in {self.log_dir}", stays=True)
        self.scheme.start(self.target_steps, announce=None if self._progress is None else self._progress.tell)
        self._started = True
        resumed = self._resumed
        if self.log_dir is not None:
            write_json(self.log_dir / RUN_FILE, description(self._recipe, self.target_steps, self.scheme.seed, self.scheme.settings))
            (self.log_dir / RESULT_FILE).unlink(missing_ok=True)  # of the part before, which is over no longer
            self._recorder = Recorder(
                self.log_dir, tensorboard=self.options.tensorboard, after=None if resumed is None else resumed["env_steps"])
        self._started_at = self._ended_at = self._next_look = time.perf_counter()
        self._next_record = float(self._record_interval)
        self._next_evaluation = float(self.options.eval_every or "inf")
        self._next_checkpoint = float(self.options.checkpoint_every or "inf")
        if resumed is not None:
            self._go_on(resumed)
        self._rate.add(self._ended_at, self.env_steps)
        self._plan()

    def _go_on(self, resumed: Mapping[str, Any]) -> None:
        """Take over what this learner's part of a checkpoint says."""
        self._count()
        self._started_at -= resumed["seconds"]
        self._recorded_steps = resumed["recorded_steps"]
        self._next_record = self._recorded_steps + float(self._record_interval)
        self._next_evaluation = next_multiple(self.options.eval_every, self.env_steps)
        self._next_checkpoint = next_multiple(self.options.checkpoint_every, self.env_steps)
        self._episodes.restore(resumed["episodes"])
        self._last_checkpoint = {"env_steps": self.env_steps}
        logger.info("goes on from a checkpoint after %d env steps, %d updates", self.env_steps, self.updates)

    def _plan(self) -> None:
        """From how many env steps on something may be due after each update."""
        self._count_from = min(self._next_record, self._next_evaluation, self._next_checkpoint, self.target_steps)

    def step(self) -> dict[str, float]:
        """Make one step of the scheme: `updates_per_step` updates.

        Returns:
            The algorithm's statistics of them, by name; none if they were left out, see `Scheme.step`.

        Raises:
            StoppedError: After `stop()`.
            PyTorchRLError: What went wrong in a worker.
        """
        if not self._started or self._stopped:
            self.start()
        info = self.scheme.step()
        self._means.add(info)
        now = self._ended_at = time.perf_counter()
        # Counting what has reached the learner costs more than an update may; what was collected is never less.
        if now >= self._next_look or self.scheme.env_steps >= self._count_from:
            self._count()
            if now >= self._next_look:
                self._look(now)
            if self.env_steps >= self._next_evaluation:
                self._evaluate_beside(self.options.eval_every or 1)
            if self.env_steps >= self._next_record:
                self._record()
            if self.env_steps >= self._next_checkpoint and (not self._takes_turns or self.scheme.is_between_items):
                self.save_checkpoint()
        return info

    def done(self) -> bool:
        """Whether `target_steps` have reached the learner. Asking changes nothing.

        Where collection and learning take turns, the last rollout is also used as often as every other. A replayed run is
        done when its record is over.
        """
        if self.scheme.replay_is_over is not None:
            return bool(self.scheme.replay_is_over)
        if self.env_steps < self.target_steps:
            return False
        if not self._takes_turns or self.target_steps == 0:
            return True
        count = self.ledger
        # Passes that a skipped update made nothing of are over, too.
        passed = count["consumed"] + self._scheme_metrics().get("samples_skipped_nan", 0)
        steps = count["consumed_unique"] + count["dropped"]["nan"]
        is_used_up = count["collected"] == self.env_steps and passed >= self._passes * steps
        return is_used_up or count["collected"] > self._last_collected

    def train(self) -> dict[str, Any]:
        """Make updates until `done()`, then save the model if there is a `log_dir`.

        With `eval_every`, evaluations start at its multiples and never make training wait: one that is due while
        another runs is left out. The last one is of the final weights, once the model is saved.

        The first Ctrl-C (or SIGTERM) ends it cleanly: the model is saved, the scheme stopped, and `KeyboardInterrupt`
        (`SystemExit(143)`) raised. A second one, or one while workers start, does so at once. The signal handlers found
        are put back.

        Returns:
            The `summary()` of the run so far.

        Raises:
            StoppedError: After `stop()`.
            PyTorchRLError: What went wrong; the scheme is stopped before it is raised.
        """
        with Interrupts() as interrupts:
            try:
                self._train(interrupts)
            except BaseException:
                self._abandoned = interrupts.twice
                if self._abandoned:
                    self._close_files()
                else:
                    self._stop_after_failure()
                raise
        return self.summary()

    def _train(self, interrupts: Interrupts) -> None:
        try:
            self.start()
            interrupts.finish_starting()
            while not interrupts.received and not self.done():
                self.step()
            if not interrupts.received:
                self._keep()  # before the last evaluation: if that fails, the training is not lost
                if self.options.checkpoint_every is not None and (self._last_checkpoint or {}).get("env_steps") != self.env_steps:
                    self.save_checkpoint()
                if self.options.eval_every is not None and self.updates:
                    self._take_evaluation(self.evaluate(self.options.eval_episodes))
        except Unblocked:
            logger.debug("the update that was under way at the interruption has been left")
        except Exception as error:
            if interrupts.received is None:
                raise
            # Native code makes other exceptions of `Unblocked`, and the signal may have ended what we need.
            logger.warning("what was under way at the interruption failed: %s", error)
        interrupts.finish_waiting()
        if interrupts.received:
            if self._started:
                self._keep()
            self.stop()
            interrupts.raise_received()

    def _keep(self) -> None:
        if self.env_steps > self._recorded_steps:
            self._record()
        if self.log_dir is not None:
            self.save_model()

    def _stop_after_failure(self) -> None:
        try:
            self.stop()
        except Exception as error:  # noqa: BLE001 - the error on its way to the user matters more; this one is logged
            logger.warning("stopping after a failure failed too: %s", error)

    # -- what is known -----------------------------------------------------------------------------------------------

    @property
    def updates(self) -> int:
        """Updates applied so far."""
        return self.scheme.version

    @property
    def stopped(self) -> bool:
        """Whether `stop()` has been called."""
        return self._stopped

    @property
    def seconds(self) -> float:
        """Seconds of training up to the last update, start-up not counted."""
        return self._ended_at - self._started_at

    @property
    def return_mean(self) -> float | None:
        """Mean raw return of the last 100 training episodes; None before one has ended."""
        return self._episodes.return_mean

    @property
    def policy_return_means(self) -> dict[str, float]:
        """Of several policies, policy -> mean raw return over the last 100 training episodes that it had a part in."""
        return self._episodes.policy_return_means

    def get_metrics(self) -> dict[str, Any]:
        """Return everything measured up to now, as documented on the page about statistics.

        `algorithm` contains means of the algorithm's statistics since the last record, or those of that record if no update
        was made since. Before `start()` all numbers are zero; the call does not start the scheme.
        """
        self._take_episodes()
        scheme = self._scheme_metrics()
        lag, updates = scheme.pop("policy_lag"), scheme.pop("updates")
        self._count()
        metrics: dict[str, Any] = {
            "env_steps": self.env_steps, "updates": updates, "seconds": self.seconds,
            "env_steps_per_s": self._rate.rate, "return_mean": self.return_mean,
            "return_episodes": len(self._episodes), "length_mean": self._episodes.length_mean,
            "policy_lag": lag, "ledger": self.ledger, "algorithm": self._means.peek(), "scheme": scheme,
        }
        if self.policy_return_means:
            metrics["policies"] = {policy: {"return_mean": mean} for policy, mean in self.policy_return_means.items()}
        if self._last_evaluation is not None:
            metrics["evaluation"] = self._last_evaluation.metrics()
        if self._last_checkpoint is not None:
            metrics["checkpoint"] = dict(self._last_checkpoint)
        return metrics

    def summary(self) -> dict[str, Any]:
        """The figures of the whole run, as `pytorchrl train --json` prints them."""
        self._take_episodes()
        if not self._stopped:
            self._count()
        lag = self._scheme_metrics()["policy_lag"]
        return {
            "env_steps": self.env_steps, "seconds": self.seconds,
            "env_steps_per_s": self.env_steps / self.seconds if self.seconds > 0 else 0.0,
            "updates": self.updates, "return_mean": self.return_mean, "return_episodes": len(self._episodes),
            **({"policy_return_means": self.policy_return_means} if self.policy_return_means else {}),
            "policy_lag": {name: lag[name] for name in _LAGS},
            "ledger": self.ledger, "seed": self.scheme.seed, "scheme": self.scheme.settings,
            "log_dir": None if self.log_dir is None else str(self.log_dir),
        }

    def _scheme_metrics(self) -> dict[str, Any]:
        # Asked too early, a scheme would start.
        return dict(self.scheme.metrics()) if self._started else {"policy_lag": dict.fromkeys(_LAGS, 0), "updates": 0}

    def print_info(self) -> None:
        """Write the current metrics to standard output, one name a line."""
        sys.stdout.write(to_json(self.get_metrics(), indent=2) + "\n")

    # -- what can be done beside training ----------------------------------------------------------------------------

    def update_algorithm_parameter(self, name: str, value: float) -> None:
        """Change one of the algorithm's updatable parameters in every worker; a schedule for it ends.

        Raises:
            KeyError: The algorithm has no such parameter; the message lists those it has.
            ConfigError: The value is out of its range.
            StoppedError: After `stop()`.
        """
        self.start()
        self.scheme.update_algorithm_parameter(name, value)

    def evaluate(self, num_episodes: int = 10) -> Evaluation:
        """Play `num_episodes` whole episodes with the current policy in the test environments, and wait for them.

        Actions are deterministic, rewards raw, normalisers frozen; training episodes are not touched.

        Raises:
            ConfigError: The scheme has no `test_envs_factory`, or `num_episodes` is not a whole number from 1.
            StoppedError: After `stop()`.
        """
        if isinstance(num_episodes, bool) or not isinstance(num_episodes, int) or num_episodes < 1:
            raise ConfigError(f"num_episodes must be a whole number from 1, got {num_episodes!r}")
        self.start()
        self._look_at_evaluation(lambda: self.scheme.wait_evaluation(_EVALUATION_TIMEOUT_S))
        self.scheme.start_evaluation(num_episodes)
        evaluation = self.scheme.wait_evaluation(_EVALUATION_TIMEOUT_S)
        if evaluation is None:
            raise StoppedError("the scheme was stopped while it evaluated")
        return evaluation

    def save_model(self, name: str = MODEL_NAME) -> str:
        """Write the agent to `log_dir/name.pt`.

        Returns:
            Path of the file.

        Raises:
            ConfigError: There is no `log_dir`, or the name could lead out of it.
        """
        if self.log_dir is None:
            raise ConfigError("save_model needs a log_dir; give one to the Learner")
        if not isinstance(name, str) or not _MODEL_NAME.fullmatch(name):
            raise ConfigError(f"a model's name must match {_MODEL_NAME.pattern}, got {name!r}")
        path, temporary = self.log_dir / f"{name}.pt", self.log_dir / f".{name}.pt.{os.getpid()}"
        try:
            self.scheme.save_model(str(temporary))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return str(path)

    def save_checkpoint(self) -> None:
        """Write a checkpoint to `log_dir/checkpoints`, from which `resume=True` goes on; the two newest are kept.

        Nothing is in flight or queued then, environments begin new episodes and generators are reseeded, so that a resumed
        run equals one that goes on, see `Scheme.checkpoint`. A failure to write is logged; the next checkpoint that is due is written as usual.

        Raises:
            ConfigError: There is no `log_dir`, or the run is recorded or replayed.
            StoppedError: After `stop()`.
        """
        if self.log_dir is None:
            raise ConfigError("save_checkpoint needs a log_dir; give one to the Learner")
        if not self._started or self._stopped:
            self.start()
        start = time.perf_counter()
        state = self.scheme.checkpoint()
        self._count()
        self._take_episodes()
        self._next_checkpoint = next_multiple(self.options.checkpoint_every, self.env_steps)
        self._plan()
        own = {"env_steps": self.env_steps, "seconds": start - self._started_at, "recorded_steps": self._recorded_steps,
               "episodes": self._episodes.state()}
        try:
            size = checkpoints.write(self.log_dir / CHECKPOINTS, self.env_steps, {"scheme": state, "learner": own})
        except OSError as error:
            logger.warning("the checkpoint after %d env steps is not written: %s", self.env_steps, error)
            return
        self._last_checkpoint = {"env_steps": self.env_steps, "bytes": size, "seconds": time.perf_counter() - start}

    def stop(self) -> dict[str, Any]:
        """Stop all workers, check the ledger, close the files. Idempotent, at most ten seconds.

        Returns:
            The final ledger.

        Raises:
            LedgerError: Env steps are in no place, or in two. Everything has been stopped nevertheless.
        """
        if self._stopped:
            return self.ledger
        self._stopped = True
        try:
            self.ledger = self.scheme.stop()
            if self.log_dir is not None and self._started:
                write_json(self.log_dir / RESULT_FILE, self.summary())
            LedgerSnapshot(**self.ledger).check()
        finally:
            if self._progress is not None and self._started:
                self._progress.show(self._status(), last=True)
            self._close_files()
        return self.ledger

    def _close_files(self) -> None:
        for file in (self._recorder, self._progress, self._lock):
            if file is not None:
                file.close()

    def __enter__(self) -> Learner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.stop()
        elif not self._abandoned:
            self._stop_after_failure()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Learner cannot be pickled: it owns running workers; save_model() keeps the agent")

    # -- looking, recording ------------------------------------------------------------------------------------------

    @property
    def _record_interval(self) -> int:
        return self.options.log_every or max(1, self.target_steps // _RECORDS_PER_RUN)

    def _count(self) -> None:
        self.ledger = self.scheme.ledger()
        collected = self.ledger["collected"]
        self.env_steps = collected - self.ledger["in_flight"] - self.ledger["queued"]
        if collected >= self.target_steps:
            self._last_collected = min(self._last_collected, collected)

    def _look(self, now: float) -> None:
        """Four times a second: episodes, the end of an evaluation, progress line."""
        self._next_look = now + _LOOK_INTERVAL_S
        self._rate.add(now, self.env_steps)
        self._take_episodes()
        self._look_at_evaluation(self.scheme.poll_evaluation)
        if self._progress is not None:
            self._progress.show(self._status())

    def _evaluate_beside(self, every: int) -> None:
        """Start the evaluation that is due, unless one still runs or the target is reached: `train` makes the last."""
        self._next_evaluation = next_multiple(every, self.env_steps)
        self._plan()
        self._look_at_evaluation(self.scheme.poll_evaluation)
        if not self._evaluating and self.env_steps < self.target_steps:
            self.scheme.start_evaluation(self.options.eval_episodes)
            self._evaluating = True

    def _take_episodes(self) -> None:
        self._episodes.extend(self.scheme.episodes())

    def _look_at_evaluation(self, find: Callable[[], Evaluation | None]) -> None:
        """Take what is found of the evaluation that runs beside training. If it has failed, that is told, and training goes on."""
        evaluation = None
        try:
            evaluation = find() if self._evaluating else None
        except Exception as error:
            if isinstance(error, WorkerLostError) and self.scheme.settings["on_worker_failure"] == "raise":
                raise
            self._evaluating = False
            logger.warning("an evaluation has failed, and its result is missing: %s", error)
        if evaluation is not None:
            self._take_evaluation(evaluation)

    def _take_evaluation(self, evaluation: Evaluation) -> None:
        self._evaluating = False
        self._last_evaluation = evaluation
        self._record()

    def _record(self) -> None:
        """Write the metrics; the means start anew."""
        self._count()
        self._recorded_steps = self.env_steps
        self._next_record = self.env_steps + float(self._record_interval)
        self._plan()
        self._rate.add(time.perf_counter(), self.env_steps)
        metrics = {**self.get_metrics(), "algorithm": self._means.take()}
        if self._recorder is not None:
            self._recorder.write(metrics)

    def _status(self) -> dict[str, Any]:
        metrics = self.scheme.metrics()
        evaluation = self._last_evaluation
        return {
            "env_steps": self.env_steps, "target_steps": self.target_steps, "env_steps_per_s": self._rate.rate,
            "return_mean": self.return_mean, "lag": metrics["policy_lag"]["mean"], "workers": metrics["workers"],
            "workers_missing": metrics["workers_missing"],
            "eval_return": None if evaluation is None else evaluation.return_mean,
            "policy_returns": self.policy_return_means,
        }


def _passes_of(scheme: Scheme) -> int:
    """How often each collected step is used for certain."""
    options = scheme.algo_factory.options
    return 1 if getattr(options, "target_kl", None) is not None else getattr(options, "num_epochs", 1)
