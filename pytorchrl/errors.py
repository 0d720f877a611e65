"""Every exception of the package that may reach a user.

    PyTorchRLError
    ├ ConfigError (ValueError)          bad settings, found before anything starts
    │ ├ FactoryError (TypeError)        a factory that cannot be called, or returns a wrong object
    │ ├ FactorySerializationError       a factory that cannot be sent to a worker
    │ ├ DeviceError                     a device that this machine lacks
    │ └ SpaceError                      a space that the chosen part cannot use
    ├ ArgumentError (ValueError)        an argument of a method has a wrong value
    ├ ContractError (TypeError)         a user's own class lacks a method, or a method returned a wrong value
    ├ StartError                        settings are valid, but workers could not be started
    │ ├ InsufficientResourcesError      no node has the requested resources
    │ ├ RayConnectionError              the cluster cannot be reached
    │ └ StartTimeoutError               a worker did not start in time
    ├ CallbackError                     a callback raised an error
    ├ WorkerError                       an operation of a worker failed
    │ ├ EnvError                        an environment raised an error or broke its contract
    │ ├ CollectionError                 workers sent no rollout in time
    │ ├ LearnerStarvedError (TimeoutError)  asynchronous collection sent no data to a learner in time
    │ ├ RanksDifferError                gradient workers that apply the same updates have different parameters
    │ ├ InjectedFault                   an error that the fault plan injected with `raise`
    │ ├ DeadlockError                   all workers and threads wait, in the simulated runtime
    │ └ WorkerLostError                 a worker died or does not respond
    │   ├ WorkerDiedError               the process or thread of a worker ended
    │   ├ RayDiedError                  a process of Ray itself ended
    │   ├ RankLostError                 communication among gradient workers was aborted
    │   ├ CrashLoopError                a worker was lost repeatedly
    │   └ NoWorkersLeft                 all workers of a set are lost
    ├ NonFiniteError                    NaN or infinity
    │ ├ NonFiniteDataError              in data of an environment or actor
    │ └ NonFiniteUpdateError            in a loss or gradient
    ├ CheckpointError                   a saved model, checkpoint or data set cannot be read
    ├ ExportError                       a policy cannot be exported
    ├ LedgerError                       the ledger of a scheme does not balance
    ├ ReplayError                       a replayed run differs from its record
    ├ StoppedError                      an object was used after stop() or close()
    │ └ DrainingError                   a gradient worker waits for data, but is about to be drained
    ├ CallOrderError (RuntimeError)     a method was called before another that must be called first
    ├ UnknownParameterError (KeyError)  no such parameter can change during training
    └ WeightsError                      weights do not fit the actor

Every class passes all its arguments to `super().__init__`, so that pickle can restore an instance in another process.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field


class PyTorchRLError(Exception):
    """Base of all exceptions that this package raises deliberately."""


@dataclass(frozen=True)
class Problem:
    """One setting that is wrong, or several that contradict each other."""

    text: str
    """The settings, their values, and the allowed values."""
    remedy: str = ""
    """The solution of the problem; empty if the allowed values state it."""
    options: tuple[str, ...] = ()
    """Names of the options on which the problem depends, as far as they are known."""
    error: type[ConfigError] = field(default_factory=lambda: ConfigError, compare=False)
    """Class of the error that reports the problem."""

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


class ConfigError(PyTorchRLError, ValueError):
    """A setting is wrong. The message states its name and value, the allowed values, and a remedy.

    Several problems stand on a line each; `problems` lists them.
    """

    problems: tuple[Problem, ...] = ()
    """The problems that the message reports; empty if the message is the only description."""
    contradictory: object = None
    """Options whose values are allowed, but contradict each other; None if no such object caused the error."""


class FactoryError(ConfigError, TypeError):
    """A factory is not callable, has a wrong signature, or returns an object of a wrong type."""


class FactorySerializationError(ConfigError):
    """A factory cannot be sent to another process."""


class DeviceError(ConfigError):
    """A requested device is not available to torch."""


class SpaceError(ConfigError):
    """The chosen actor, algorithm or storage cannot use an observation or action space."""


class ArgumentError(PyTorchRLError, ValueError):
    """An argument of a method has a wrong value. The message states the value and the allowed values."""


class ContractError(PyTorchRLError, TypeError):
    """A user's own algorithm, actor, storage or codec violates the contract of one of its methods.

    The message names the class, the method, the returned value and the expected value.
    """


class StartError(PyTorchRLError):
    """The settings are valid, but the workers could not be started."""


class InsufficientResourcesError(StartError):
    """No node has the requested resources."""


class RayConnectionError(StartError):
    """The Ray cluster cannot be reached, or refuses the connection."""


class StartTimeoutError(StartError):
    """A worker did not start within its deadline."""


class CallbackError(PyTorchRLError):
    """A callback raised an error, which is the cause of this error."""


class WorkerError(PyTorchRLError):
    """An operation of a worker failed."""


class EnvError(WorkerError):
    """An environment raised an exception, or returned a value that contradicts its declared spaces."""


class CollectionError(WorkerError):
    """No data arrived, because workers sent nothing within their deadline."""


class LearnerStarvedError(WorkerError, TimeoutError):
    """A learner with asynchronous collection had to wait for data for longer than `queue_timeout_s`."""


class WorkerLostError(WorkerError):
    """A worker died or does not respond."""


class WorkerDiedError(WorkerLostError):
    """The worker's process or thread ended. Runtimes report this error; users receive a plain `WorkerLostError`."""


class RayDiedError(WorkerLostError):
    """A process of Ray itself has ended, so no worker can continue or be replaced."""


class RankLostError(WorkerLostError):
    """Communication among gradient workers was aborted, because a worker was lost or left the group."""


class RanksDifferError(WorkerError):
    """Gradient workers have different parameters although they average gradients and apply the same updates."""


class CrashLoopError(WorkerLostError):
    """A worker was lost repeatedly and is not replaced again."""


class NoWorkersLeft(WorkerLostError):  # noqa: N818 - the name describes a state
    """All workers of a worker set are lost, and lost workers are not replaced."""


class InjectedFault(WorkerError):  # noqa: N818 - the user requested the fault
    """The fault plan injected this error with the action `raise`."""


class DeadlockError(WorkerError):
    """In the simulated runtime, all workers and threads wait, and no event is pending."""


class NonFiniteError(PyTorchRLError):
    """A number is NaN or infinite."""


class NonFiniteDataError(NonFiniteError):
    """An environment returned, or an actor produced, NaN or infinity."""


class NonFiniteUpdateError(NonFiniteError):
    """A loss or a gradient is NaN or infinite, and the update was not applied.

    A scheme skips such an update, and raises this error only after more than five in a row.
    """


class CheckpointError(PyTorchRLError):
    """A saved model, checkpoint or data set is missing or damaged, or belongs to another kind of agent or run."""


class ExportError(PyTorchRLError):
    """A policy cannot be exported, or the exported file would choose other actions than the agent."""


class LedgerError(PyTorchRLError):
    """The ledger does not balance: env steps were lost or counted twice."""


class ReplayError(PyTorchRLError):
    """A replayed run differs from its record, or continues beyond the end of the record."""


class StoppedError(PyTorchRLError):
    """The learner, scheme or worker has been stopped, or the environments have been closed."""


class DrainingError(StoppedError):
    """The gradient worker is about to be drained, so the learner must not wait for more data."""


class CallOrderError(PyTorchRLError, RuntimeError):
    """A method was called before another method that must be called first. The message names the other method."""


class UnknownParameterError(PyTorchRLError, KeyError):
    """An algorithm or storage has no parameter of this name that can change. The message lists those that can."""

    def __str__(self) -> str:
        return str(self.args[0])  # `KeyError` would put the message in quotation marks


class WeightsError(PyTorchRLError):
    """The names, shapes or version of weights do not match those of the actor that receives the weights."""


def install_hint(extra: str) -> str:
    """Return a command that installs the packages of an extra, for the error about a missing package.

    The command names the packages listed in the metadata of this installation. It never names this project, because a
    package index may contain another project of the same name, which pip would install instead.
    """
    try:
        listed = importlib.metadata.requires("pytorchrl") or []
    except importlib.metadata.PackageNotFoundError:  # the package is not installed; it runs from its source folder
        listed = []
    packages = [requirement.partition(";")[0].strip() for requirement in listed if f'extra == "{extra}"' in requirement]
    if not packages:
        return f"pip install -e '.[{extra}]' in the source folder"
    return "pip install " + " ".join(f"'{package}'" for package in packages)
