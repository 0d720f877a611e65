"""Drive one scheme until a number of env steps is reached; report, record, evaluate and checkpoint the run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar, NoReturn, TypeAlias

from pytorchrl.agent.algorithms.precision import is_compiled
from pytorchrl.agent.data import Evaluation
from pytorchrl.agent.names import checked_names
from pytorchrl.agent.options import build_options
from pytorchrl.callbacks.base import Callbacks
from pytorchrl.errors import ConfigError, StoppedError
from pytorchrl.files.run_directory import MODEL_NAME, is_directory_of_runs, prepare_log_dir
from pytorchrl.learner.checkpoints import RunState
from pytorchrl.learner.files import RunFiles, described_run
from pytorchrl.learner.measurements import Due, EvaluationTimer, Measurements, Target
from pytorchrl.learner.options import LearnerOptions
from pytorchrl.learner.reporting import Progress, plain, start_progress, to_json
from pytorchrl.scheme.ledger import LedgerSnapshot
from pytorchrl.scheme.scheme import Scheme, check_scheme
from pytorchrl.support.numbers import check_whole
from pytorchrl.support.problems import raise_all
from pytorchrl.support.signals import GRACE_S, Interrupts, Unblocked
from pytorchrl.support.terminal import get_logger
from pytorchrl.support.threads import State, in_turn
from pytorchrl.support.tracebacks import brief_errors_of
from pytorchrl.support.untyped import MetricsDict, OptionValue

logger = get_logger(__name__)

# Seconds between redraws of the progress line, short enough to look smooth. A redraw takes up to 5 ms.
_LOOK_INTERVAL_S = 0.25
_ENDED = {State.STOPPED: "been stopped", State.FAILED: "been abandoned after a second signal"}


@brief_errors_of("__init__", "start", "step", "train", "update_algorithm_parameter", "evaluate", "save_model",
                 "save_checkpoint", "stop")
class Learner:
    """Driver that runs a scheme until `target_steps` env steps have reached the learner.

    Nothing starts before the first `step()` or `train()`. A `with` block stops the scheme when the block ends:

        with Learner(scheme, target_steps=100_000, log_dir="runs/a") as learner:
            learner.train()

    Args:
        scheme: The scheme to drive. The learner takes ownership of it and stops it at the end.
        target_steps: Env steps of the whole experiment; 0 is a dry run that checks and starts everything.
        log_dir: Directory of this run (created if missing) for metrics and models; None: no files. A path that
            ends in a slash, such as "runs/", is a directory of runs: the run's `log_dir` is a numbered directory in it.
        recipe: The arguments of `train`, as JSON, for `run.json`; None if the agent was composed in Python.
        run_name: Name of the run in a directory of runs, such as "dqn" in "runs/dqn-1". None: "run".
        title: A line that is shown before training; None: no line.
        state: The `last_state()` of another learner, whose run continues; None: a new run, or see `resume`.
        **options: Fields of `Options`, such as `eval_every`, `log_every`, `checkpoint_every` and `resume`.

    Raises:
        ConfigError: An option is wrong, or `log_dir` is a file, cannot be written, or contains a run already.
        CheckpointError: The run is to be resumed, but its checkpoints belong to another run or cannot be read.
    """

    home: ClassVar[str] = "learner"
    Options: TypeAlias = LearnerOptions

    @checked_names
    def __init__(
        self, scheme: Scheme, target_steps: int, log_dir: str | os.PathLike[str] | None = None, *,
        recipe: Mapping[str, object] | None = None, run_name: str | None = None, title: str | None = None,
        state: RunState | None = None, **options: OptionValue,
    ) -> None:
        self.options: Learner.Options = build_options(
            type(self), {"target_steps": target_steps, "log_dir": log_dir, **options})
        self.scheme, self.target_steps = check_scheme(scheme), self.options.target_steps
        raise_all(self.options.problems_with(
            has_tests=scheme.agent.test_envs_factory is not None,
            is_recorded=not (scheme.settings["record"] is scheme.settings["replay"] is None)))
        if run_name is not None and (log_dir is None or not is_directory_of_runs(log_dir)):
            raise ConfigError(f"run_name={run_name!r} needs log_dir to be a directory of runs, got {log_dir!r}")
        self.log_dir: Path | None = None
        if log_dir is not None:
            self.log_dir = prepare_log_dir(log_dir, run_name=run_name, overwrite=self.options.overwrite,
                                           resume=self.options.resume)
        self._files, self._evaluations = RunFiles(self.log_dir), EvaluationTimer(scheme, self.options.eval_timeout_s)
        self._resumed = (self._files.resume(scheme, is_wanted=self.options.resume) if state is None else
                         self._files.resume_from(scheme, state))
        self._recipe, self._title, self._next_look = dict(recipe or {}), title, 0.0
        self._state = State.NEW
        self.checkpoints: list[tuple[int, int]] = []  # updates at the start and end of each checkpoint
        self._target = Target(scheme, self.target_steps)
        self._due = Due(self.target_steps, self.options.log_every, self.options.eval_every,
                        self.options.checkpoint_every, self.options.log_every_s)
        self._measured = Measurements(scheme, self._target)
        self._callbacks = Callbacks(self.options.callbacks, self.options.on_callback_error == "raise", self,
                                    self.options.callback_timeout_s)
        if self.options.eval_every is None and (waiting := self._callbacks.waiting_for_evaluations):
            raise ConfigError(f"{' and '.join(waiting)} would have no effect, because there are no evaluations during "
                              "training; give eval_every, or leave the callback out")
        self._progress: Progress | None = None

    @in_turn("_turn")
    def start(self) -> None:
        """Start the scheme's workers, as the first `step()` does.

        Raises:
            StoppedError: `stop()` has been called.
            StartError: Workers cannot be started.
        """
        if self._state is State.RUNNING:
            return
        if self._state is not State.NEW:
            raise StoppedError(f"this learner has {_ENDED[self._state]}; make a new scheme and learner to train again")
        if self._files.lock():
            self._resumed = self._files.resume(self.scheme, is_wanted=self.options.resume, is_changed=True)
        if self.options.progress:
            self._progress = start_progress(self._title, self.log_dir)
        with self._files.resuming():
            self.scheme.start(self.target_steps, announce=None if self._progress is None else self._progress.announce)
        self._state = State.RUNNING
        if self._progress is not None:
            self._progress.announce(head_line(self.scheme), keep=True)
        if self._progress is not None and is_compiled(self.scheme.agent.algo_factory):
            self._progress.announce("the first updates compile the losses, which takes up to a minute", keep=True)
        self._files.begin(self.scheme, self._recipe, self.options, resumed=self._resumed)
        self._next_look = time.perf_counter()
        self._measured.start(self._next_look, self._resumed)
        if (resumed := self._resumed) is not None:
            self._due.resume(self.env_steps, resumed["recorded_steps"])
            self._files.last_checkpoint = {"env_steps": self.env_steps}
            self.checkpoints = list(resumed["checkpoints"])
            logger.info("resumed from the checkpoint at %d env steps and %d updates", self.env_steps, self.updates)
            self._callbacks.load_state(resumed["callbacks"])
        self._callbacks.call("on_start")

    @in_turn("_turn")
    def step(self) -> dict[str, float]:
        """Call the scheme's `step` once, which makes `updates_per_step` updates. Calls from several threads take turns.

        Returns:
            The algorithm's statistics of these updates, by name; empty if all updates were skipped (see `Scheme.step`).

        Raises:
            StoppedError: `stop()` has been called.
            PyTorchRLError: A worker failed.
        """
        if self._state is not State.RUNNING:
            self.start()
        info = self.scheme.step()
        now = time.perf_counter()
        self._measured.add(info, now)
        if self._callbacks:
            self._callbacks.call("on_step", info)
        # Counting steps in the ledger is slow, so it is done only four times per second, and when a record, an
        # evaluation or a checkpoint may be due. `scheme.env_steps` is an upper bound of the count, and cheap to read.
        if now >= self._next_look or self.scheme.env_steps >= self._due.first:
            self._measured.count()
            if now >= self._next_look:
                self._look(now)
            if self.env_steps >= self._due.evaluation:
                self._start_evaluation()
            if self._due.is_record(self.env_steps):
                self._record()
            if self.env_steps >= self._due.checkpoint and (
                    not self._target.takes_turns or self.scheme.is_between_train_batches):
                self.save_checkpoint(wait=self._callbacks.respond_to("on_checkpoint"))
        return info

    def done(self) -> bool:
        """Return whether the run has reached `target_steps`, without changing anything.

        If collection and learning take turns, the learner must also have finished its passes over the last rollout. A
        replayed run is done at the end of its record. After `request_stop`, every run is done.
        """
        if self._callbacks.stop_reason is not None:
            return True
        if self.scheme.replay_is_over is not None:
            return bool(self.scheme.replay_is_over)
        return self.env_steps >= self.target_steps and self._target.is_reached(
            self.env_steps, self.ledger, self._measured.of_scheme().get("samples_skipped_nan", 0))

    def train(self) -> MetricsDict:
        """Make updates until `done()`, then save the model if there is a `log_dir`.

        With `eval_every`, an evaluation is due every `eval_every` env steps. It runs while training continues, and is
        skipped if another evaluation is still running. The last evaluation runs after the final model is saved.

        The first Ctrl-C or SIGTERM ends training cleanly. The model is saved. If `checkpoint_on_exit` is true (by
        default, if `checkpoint_every` is given), a checkpoint is written. The scheme is stopped. Then
        `KeyboardInterrupt` (after SIGTERM, `SystemExit(143)`) is raised. A second signal, or a signal while workers
        start, ends training immediately. The previous signal handlers are restored.

        Returns:
            The `summary()` of the run so far.

        Raises:
            StoppedError: `stop()` has been called.
            PyTorchRLError: Training failed; the model is saved and the scheme is stopped before the error is raised.
        """
        with Interrupts(self.options.grace_s if self.options.checkpoints_on_exit else GRACE_S) as interrupts:
            try:
                self._train(interrupts)
            except BaseException as error:
                if interrupts.twice:
                    self._state = State.FAILED
                    self._close_files()
                else:
                    self._end_after_failure(error)
                raise
        return self.summary()

    def request_stop(self, reason: str) -> None:
        """End training after the current step, as if `target_steps` had been reached; the reason is logged."""
        if self._callbacks.stop_reason is None:
            logger.info("training stops after %d env steps: %s", self.env_steps, reason)
            self._callbacks.stop_reason = reason

    def _train(self, interrupts: Interrupts) -> None:
        is_whole = False  # whether training ended between two updates
        try:
            self.start()
            interrupts.finish_starting()
            self._look(time.perf_counter())  # show the progress line before the first update
            while not interrupts.received and not self.done():
                self.step()
            is_whole = True
            if not interrupts.received:
                self._files.wait()  # `last_checkpoint` changes when the file is written
                last_steps = (self._files.last_checkpoint or {}).get("env_steps")
                if self.options.checkpoint_every is not None and last_steps != self.env_steps:
                    self.save_checkpoint()
                self._save()  # after the checkpoint, for which updates are made; before an evaluation, which could fail
                if self.options.eval_every is not None and self.updates:
                    self._evaluations.keep(self.evaluate(self.options.eval_episodes))
                    self._record()
                self._end_progress()  # before the caller prints results
        except Unblocked:
            logger.debug("the update in progress at the interruption was abandoned")
        except Exception as error:
            if interrupts.received is None:
                raise
            # The signal may have caused `error`: workers died, or native code raised `error` in place of `Unblocked`.
            logger.warning("the operation in progress at the interruption failed: %s", error)
        interrupts.finish_waiting()
        if interrupts.received:
            raise self._leave(interrupts, is_whole=is_whole)

    def _leave(self, interrupts: Interrupts, *, is_whole: bool) -> BaseException:
        """Save the model after a signal, write a checkpoint if the options ask for it, and stop the scheme.

        Returns:
            The exception for the signal, which has been reported to the callbacks.
        """
        if self._state is State.RUNNING:
            self._save()
            if self.options.checkpoints_on_exit:
                checkpoint_within(interrupts.time_left_s if is_whole else 0.0,
                                  partial(self.save_checkpoint, uses_queued=False))
        stopped = interrupts.exception(self.env_steps, self.log_dir)
        self._callbacks.report(stopped)
        self.stop()
        return stopped

    def _save(self) -> None:
        """Wait until the last checkpoint is written; then write the last record and the model."""
        self._files.wait()
        self._measured.count()
        if self.env_steps > self._due.recorded_steps:
            self._record()
        self._files.save_last_model(self.scheme)

    def _end_after_failure(self, failure: BaseException) -> None:
        self._callbacks.report(failure)
        if self._state is State.RUNNING and self.updates:
            call_after_failure("saving the model", lambda: self._files.save_last_model(self.scheme))
        call_after_failure("stopping", self.stop)

    @property
    def env_steps(self) -> int:
        """The number of env steps that have reached the learner (neither in flight nor queued), as last counted."""
        return self._measured.env_steps

    @property
    def ledger(self) -> MetricsDict:
        """The scheme's ledger, as of the last count of the env steps; after `stop()`, the final ledger."""
        return self._measured.ledger

    @property
    def updates(self) -> int:
        """The number of updates applied so far."""
        return self.scheme.version

    @property
    def stopped(self) -> bool:
        """Whether `stop()` has been called."""
        return self._state is State.STOPPED

    @property
    def seconds(self) -> float:
        """The seconds of training up to the last update, excluding start-up."""
        return self._measured.seconds

    @property
    def return_mean(self) -> float | None:
        """The mean raw return of the last 100 training episodes; None before an episode has ended."""
        return self._measured.return_mean

    @property
    def policy_return_means(self) -> dict[str, float]:
        """The mean raw return of each policy over its last 100 training episodes; empty if there is only one policy."""
        return self._measured.policy_return_means

    @property
    def description(self) -> dict[str, object]:
        """All settings of the run, as `run.json` contains them; available after the start, also without `log_dir`."""
        return dict(plain(described_run(self.scheme, self._recipe, self.options)))

    def get_metrics(self) -> MetricsDict:
        """Return all measurements up to now; the page about statistics describes them.

        `algorithm` contains the means of the algorithm's statistics over the updates since the last record. If there
        are no such updates, `algorithm` contains the means in that record. Before `start()`, all numbers are zero.
        """
        return self._measured.metrics(self._evaluations.last, self._files.last_checkpoint)

    def summary(self) -> MetricsDict:
        """Return the figures of the whole run, as `pytorchrl train --json` prints them."""
        if not self.stopped:
            self._measured.count()
        return self._measured.summary(self.log_dir)

    def print_info(self) -> None:
        """Write the current metrics to standard output, one name per line."""
        sys.stdout.write(to_json(self.get_metrics(), indent=2) + "\n")

    def update_algorithm_parameter(self, name: str, value: float) -> None:
        """Change one of the algorithm's updatable parameters in every worker; this ends a schedule of the parameter.

        Raises:
            KeyError: The algorithm has no such parameter; the message lists its parameters.
            ConfigError: The value is out of its range.
            StoppedError: `stop()` has been called.
        """
        self.start()
        self.scheme.update_algorithm_parameter(name, value)

    def evaluate(self, num_episodes: int = 10) -> Evaluation:
        """Play `num_episodes` whole episodes with the current policy in the test environments and wait for the result.

        Actions are deterministic, rewards are raw, and normalizers are frozen; training is not affected.

        Raises:
            ConfigError: The scheme has no `test_envs_factory`, or `num_episodes` is not a whole number >= 1.
            StoppedError: `stop()` has been called.
        """
        num_episodes = check_whole("num_episodes", num_episodes)
        self.start()
        if self._evaluations.wait():
            self._record()
        return self._evaluations.play(num_episodes)

    def save_model(self, name: str = MODEL_NAME, *, evaluated: bool = False) -> str:
        """Write the agent to `log_dir/name.pt`.

        Args:
            name: Name of the file, without its suffix.
            evaluated: Whether to write the weights of the last evaluation instead of the current ones.

        Returns:
            Path of the file.

        Raises:
            ConfigError: There is no `log_dir`, the name could lead out of it, or there was no evaluation.
        """
        return self._files.save_model(self.scheme, name, evaluated=evaluated)

    @in_turn("_turn")
    def save_checkpoint(self, timeout_s: float = 60.0, *, wait: bool = True, uses_queued: bool = True) -> None:
        """Write a checkpoint to `log_dir/checkpoints`, from which `resume=True` continues.

        The scheme is drained, environments start new episodes, and random generators are reseeded, so that this run and
        a resumed run continue in the same way; see `Scheme.checkpoint`. A failure to write is only logged.

        Args:
            timeout_s: Seconds after which workers that have not answered are considered lost.
            wait: Whether to wait until the file is written; otherwise, a background thread writes it.
            uses_queued: Whether updates are made from train batches that wait; see `Scheme.checkpoint`.

        Raises:
            ConfigError: There is no `log_dir`, or the run is recorded or replayed.
            StoppedError: `stop()` has been called.
        """
        if self.log_dir is None:
            raise ConfigError("save_checkpoint needs a log_dir; pass one to the Learner")
        self.start()
        self._files.wait()  # the previous checkpoint must be written first, so that only one is in memory
        start, updates = time.perf_counter(), self.updates
        state = self.scheme.checkpoint(timeout_s, uses_queued=uses_queued)
        own = self._own_state(start, updates)
        self._due.after_checkpoint(self.env_steps)
        self._files.checkpoint(self.env_steps, state, own, start, self.updates)
        if wait:
            self._files.wait()
            self._callbacks.call("on_checkpoint")

    @in_turn("_turn")
    def last_state(self) -> RunState:
        """Return the state of the run, from which another learner can continue it; this learner must then be stopped.

        The state has the contents of a checkpoint.
        """
        self.start()
        updates = self.updates
        scheme = self.scheme.checkpoint(is_last=True, uses_queued=False)
        return self._files.state(scheme, self._own_state(time.perf_counter(), updates))

    def _own_state(self, now: float, updates: int) -> dict[str, object]:
        """Return the learner's part of a checkpoint that was begun after so many updates."""
        self._measured.count()
        self._measured.take_episodes()
        self.checkpoints.append((updates, self.updates))
        return {**self._measured.state(now), "recorded_steps": self._due.recorded_steps,
                "checkpoints": list(self.checkpoints),
                "callbacks": self._callbacks.state()}

    @in_turn("_end")
    def stop(self) -> MetricsDict:
        """Stop all workers, check the ledger, wait for the last checkpoint, and close the files.

        Returns:
            The final ledger. Every further call, from any thread, only returns this ledger again.

        Raises:
            LedgerError: The ledger does not balance. All workers have been stopped nevertheless.
        """
        if self.stopped:
            return self.ledger
        has_started, self._state = self._state is State.RUNNING, State.STOPPED
        try:
            self._measured.ledger = self.scheme.stop()
            if has_started:
                self._files.end(self.summary())
            LedgerSnapshot(**self.ledger).check()
            if has_started:
                self._callbacks.call("on_end", self.summary())
        finally:
            if has_started:
                self._end_progress()
            self._close_files()
        return self.ledger

    def _end_progress(self) -> None:
        """Show the last figures, and end the progress line; further calls have no effect."""
        if self._progress is not None:
            self._progress.show(self._measured.status(self._evaluations.last, has_ended=True), last=True)
            self._progress.close()

    def _close_files(self) -> None:
        if self._progress is not None:
            self._progress.close()
        self._files.close()

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.stop()
        elif self._state is not State.FAILED:
            self._end_after_failure(error)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Learner cannot be pickled: it owns running workers; save_model() saves the agent")

    def _look(self, now: float) -> None:
        """Collect finished episodes and evaluations, and redraw the progress line; called four times per second."""
        self._next_look = now + _LOOK_INTERVAL_S
        self._measured.add_rate(now)
        self._measured.take_episodes()
        if self._evaluations.poll():
            self._record()
        if self._callbacks:
            self._callbacks.count_lost(self._measured.of_scheme().get("workers_restarted", 0))
        if self._progress is not None:
            self._progress.show(self._measured.status(self._evaluations.last))

    def _start_evaluation(self) -> None:
        """Start the due evaluation unless another evaluation is running. `train` itself runs the last evaluation."""
        self._due.after_evaluation(self.env_steps)
        if self._evaluations.poll():
            self._record()
        if not self._evaluations.is_running and self.env_steps < self.target_steps:
            self._evaluations.start(self.options.eval_episodes)

    def _record(self) -> None:
        """Write a record of the metrics, and reset the means of the algorithm's statistics."""
        self._measured.count()
        self._due.after_record(self.env_steps)
        self._files.rate(self._evaluations.last)
        self._callbacks.evaluated(self._evaluations.last)
        record = self._measured.record(self._evaluations.last, self._files.last_checkpoint)
        self._files.record(self._callbacks.recorded(record))


def head_line(scheme: Scheme) -> str:
    """Return a line that says what a started scheme trains with: seed, device, workers, environments, parameters."""
    settings, number = scheme.settings, scheme.agent.train_envs_factory.num_envs
    workers = [f"{scheme.settings[name]} {what}" for name, what in (
        ("num_col_workers", "collection"), ("num_grad_workers", "gradient")) if settings[name] != 1]
    kind = f"{', '.join(workers)} workers ({settings['runtime']})" if workers else "1 worker"
    return (f"seed {scheme.seed}, {settings['device']}, {kind} with {number} "
            f"{'environment' if number == 1 else 'environments'}{' each' * bool(workers)}, "
            f"{scheme.num_parameters:,} parameters")


def checkpoint_within(time_left_s: float, save: Callable[[float], None]) -> None:
    """Write the checkpoint after a signal. A failure is logged and not raised, because the process must end.

    Args:
        time_left_s: Time limit in seconds. If it is 0, because the grace period has passed or the update has failed,
            no checkpoint is written.
        save: Function that writes a checkpoint; its argument is the time limit in seconds.
    """
    try:
        if not time_left_s:
            raise TimeoutError("the last update did not end within grace_s")
        save(time_left_s)
    except Exception as error:  # noqa: BLE001 - a worker may fail in any way
        logger.warning("no checkpoint was written after the signal: %s", error)


def call_after_failure(name: str, action: Callable[[], object]) -> None:
    """Call a function after a run has failed. If the function fails, too, log its error instead of raising it.

    Args:
        name: Subject of the log message, such as "saving the model".
        action: The function.
    """
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the first error is raised; this one is logged
        logger.warning("%s after a failure also failed: %s", name, error)
