"""Options of a learner."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from pytorchrl.agent.options import Options, option
from pytorchrl.callbacks.base import Callback
from pytorchrl.errors import Problem


@dataclass(frozen=True, kw_only=True)
class LearnerOptions(Options):
    """Options of a learner."""

    target_steps: int = option(help="env steps of the whole experiment; 0 only checks and starts everything", low=0)
    log_dir: str | os.PathLike[str] | None = option(
        None, help="directory of this run; if it ends in a slash, such as runs/, a directory of runs, in which "
        "this run gets a new numbered directory; without log_dir, no files are written")
    eval_every: int | None = option(
        None, help="env steps between evaluations; the last evaluation follows training; none: never", low=1)
    eval_episodes: int = option(10, help="episodes per evaluation", low=1)
    eval_timeout_s: float | None = option(
        None, help="longest time of one evaluation, in seconds; a longer one ends with a warning that shows where it "
        "hangs; none: ten minutes for the last evaluation, no limit for others", low=0.0, exclusive=True)
    log_every: int | None = option(
        None, help="env steps between two records of metrics.jsonl; none: 200 records per run", low=1)
    log_every_s: float | None = option(
        None, help="longest time between two records, in seconds; none: no limit", low=0.0, exclusive=True)
    tensorboard: bool = option(True, help="also write TensorBoard files, if TensorBoard is installed")
    overwrite: bool = option(False, help="rename a run that log_dir already contains, instead of failing")
    progress: bool = option(True, help="show a progress line on stderr")
    checkpoint_every: int | None = option(
        None, help="env steps between checkpoints, from which resume continues; none: never", low=1)
    checkpoint_on_exit: bool | None = option(
        None, help="write a checkpoint before a signal (Ctrl-C, SIGTERM) ends training; none: if checkpoint_every is "
        "given")
    grace_s: float = option(
        20.0, help="longest time from a signal until the checkpoint is written, in seconds; the process ends at most "
        "ten seconds later", low=0.0, exclusive=True)
    keep_checkpoints: int = option(2, help="number of newest checkpoints to keep", low=1)
    keep_best_checkpoint: bool = option(
        False, help="also keep the checkpoint that follows the evaluation with the highest mean return")
    keep_checkpoint_every: int | None = option(
        None, help="also keep the first checkpoint at or after each multiple of this number of env steps; none: keep "
        "none of these checkpoints", low=1)
    resume: bool = option(
        False, help="continue the run in log_dir from its newest checkpoint; start a run if there is none")
    callbacks: tuple[Callback, ...] = option((), help="objects whose methods are called at fixed points of the run")
    on_callback_error: str = option(
        "raise", choices=("raise", "warn"), help="response to an error in a callback: raise ends the run")
    callback_timeout_s: float | None = option(
        None, help="longest time of one call of a callback, in seconds; a longer call is an error that names the code "
        "that hangs; none: no limit", low=0.0, exclusive=True)

    @property
    def checkpoints_on_exit(self) -> bool:
        """Whether a checkpoint is written before a signal ends training."""
        return self.checkpoint_every is not None if self.checkpoint_on_exit is None else self.checkpoint_on_exit

    def contradictions(self) -> Iterator[Problem]:
        """Refuse options that have no effect without another option."""
        yield from super().contradictions()
        yield from self._problems_of_log_dir()
        if self.keep_best_checkpoint and self.eval_every is None:
            yield Problem("keep_best_checkpoint needs eval_every: without evaluations, no checkpoint is the best",
                          "give eval_every, or leave keep_best_checkpoint out", ("keep_best_checkpoint", "eval_every"))
        if not self.checkpoints_on_exit:
            yield from self._without_effect(("grace_s",), "checkpoint_on_exit or checkpoint_every",
                                            "checkpoint_on_exit", "checkpoint_every")
        if self.eval_every is None:
            for name in ("eval_episodes", "eval_timeout_s"):
                yield from self._without_effect(
                    (name,), "eval_every: without it nothing is evaluated", "eval_every")
        if not self.callbacks:
            yield from self._without_effect(
                ("on_callback_error", "callback_timeout_s"), "callbacks, of which there are none", "callbacks")

    def _problems_of_log_dir(self) -> Iterator[Problem]:
        """Refuse options that need a `log_dir` if there is none."""
        if self.log_dir is not None and not os.fspath(self.log_dir):
            yield Problem("log_dir must be a directory or None, got an empty string", options=("log_dir",))
        if self.overwrite and self.log_dir is None:
            yield Problem("overwrite=True renames the run in log_dir, so it needs a log_dir",
                          "give log_dir, or leave overwrite out", ("overwrite", "log_dir"))
        if self.resume and (self.log_dir is None or self.overwrite):
            yield Problem("resume=True needs a log_dir, whose run it continues, without overwrite=True",
                          "change that, or leave resume out", ("resume", "log_dir", "overwrite"))
        if self.log_dir is None:
            names = [name for name in ("checkpoint_every", "checkpoint_on_exit", "keep_checkpoints",
                                       "keep_best_checkpoint", "keep_checkpoint_every")
                     if name != "checkpoint_on_exit" or self.checkpoint_on_exit]
            for name in names:
                yield from self._without_effect(
                    (name,), "a log_dir, in which checkpoints are stored", "log_dir")

    def problems_with(self, *, has_tests: bool, is_recorded: bool) -> Iterator[Problem]:
        """Yield the problems of options that do not fit a scheme.

        Args:
            has_tests: Whether the scheme has test environments.
            is_recorded: Whether the run is recorded or replayed.
        """
        if self.eval_every is not None and not has_tests:
            yield Problem("eval_every needs a scheme with test_envs_factory, which this one lacks",
                          "give it to the scheme, or leave eval_every out", ("eval_every",))
        if self.checkpoints_on_exit and is_recorded:
            name = "checkpoint_on_exit" if self.checkpoint_every is None else "checkpoint_every"
            yield Problem("a run that is recorded or replayed has no checkpoints", f"leave {name} out",
                          (name, "record", "replay"))
