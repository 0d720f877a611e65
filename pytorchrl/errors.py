"""Every exception of the package.

    PyTorchRLError
    ├ ConfigError (ValueError)          bad settings, found before anything starts
    │ ├ FactoryError (TypeError)        a factory that cannot be called, or returns a wrong object
    │ ├ FactorySerializationError       a factory that cannot be sent to a worker
    │ ├ DeviceError                     a device that this machine lacks
    │ └ SpaceError                      a space that the chosen part cannot use
    ├ ContractError (TypeError)         a part of the user's own that lacks a method, or whose method returned a wrong value
    ├ StartError                        settings were fine, starting was not possible
    │ ├ InsufficientResourcesError      no node has what was asked for
    │ ├ RayConnectionError              the cluster cannot be reached
    │ └ StartTimeoutError               a worker did not come up in time
    ├ WorkerError                       something failed in a worker
    │ ├ EnvError                        an environment raised or broke its contract
    │ ├ CollectionError                 workers gave no rollout in time
    │ ├ LearnerStarvedError (TimeoutError)  asynchronous collection gave a learner nothing in time
    │ ├ RanksDifferError                gradient workers that apply the same updates have other parameters
    │ ├ InjectedFault                   what a fault plan's `raise` raises
    │ ├ DeadlockError                   everybody waits, in the simulated runtime
    │ └ WorkerLostError                 a worker died or does not answer
    │   ├ WorkerDiedError               its process or thread is gone
    │   ├ RankLostError                 gradient workers that average among themselves broke off
    │   ├ CrashLoopError                it was lost again and again
    │   └ NoWorkersLeft                 it was the last one
    ├ NonFiniteError                    NaN or infinity
    │ ├ NonFiniteDataError              in what an environment returned
    │ └ NonFiniteUpdateError            in a loss or gradient
    ├ CheckpointError                   a saved model or checkpoint that cannot be read
    ├ ReplayError                       a run that does not follow its record
    ├ StoppedError                      use after stop()
    ├ CallOrderError (RuntimeError)     a method was called before another that must be called first
    └ WeightsError                      weights that do not fit the actor

Every class passes all its arguments to `super().__init__`, so that it survives the way between processes.
"""

from __future__ import annotations

import importlib.metadata


class PyTorchRLError(Exception):
    """Base of everything that this package raises on purpose."""


class ConfigError(PyTorchRLError, ValueError):
    """A setting is wrong. The message says what, got, allowed, and what to do."""


class FactoryError(ConfigError, TypeError):
    """A factory is not callable, has another signature, or returns another type."""


class FactorySerializationError(ConfigError):
    """A factory cannot be sent to another process."""


class DeviceError(ConfigError):
    """A device was asked for that torch does not see."""


class SpaceError(ConfigError):
    """A space that the chosen actor, algorithm or storage cannot use."""


class ContractError(PyTorchRLError, TypeError):
    """A part of the user's own (algorithm, actor or storage) breaks the contract of one of its methods.

    The message names the class, the method, the returned value and the expected one.
    """


class StartError(PyTorchRLError):
    """The settings are fine but the workers could not be started."""


class InsufficientResourcesError(StartError):
    """No node can give the resources asked for."""


class RayConnectionError(StartError):
    """The Ray cluster cannot be reached or refuses us."""


class StartTimeoutError(StartError):
    """A worker did not come up within its deadline."""


class WorkerError(PyTorchRLError):
    """Something failed in a worker."""


class EnvError(WorkerError):
    """An environment raised, or returned something against its own declaration."""


class CollectionError(WorkerError):
    """No data arrives any more: workers gave nothing within their deadline."""


class LearnerStarvedError(WorkerError, TimeoutError):
    """A learner with asynchronous collection had to wait for data longer than `queue_timeout_s`."""


class WorkerLostError(WorkerError):
    """A worker died or does not answer."""


class WorkerDiedError(WorkerLostError):
    """Its process or thread is gone. Only runtimes say so; whoever passes it on says `WorkerLostError`."""


class RankLostError(WorkerLostError):
    """An exchange among gradient workers broke off: one of them is gone, or they were told to leave. The others say so."""


class RanksDifferError(WorkerError):
    """Gradient workers that average among themselves, and apply the same updates, do not have the same parameters."""


class CrashLoopError(WorkerLostError):
    """A worker was lost again and again; replacing it once more would not help."""


class NoWorkersLeft(WorkerLostError):  # noqa: N818 - a state rather than a mistake
    """Every worker of a set is lost, and lost ones are not replaced."""


class InjectedFault(WorkerError):  # noqa: N818 - it is a fault, asked for
    """What a fault plan's `raise` raises."""


class DeadlockError(WorkerError):
    """In the simulated runtime: every worker and thread waits, and nothing is to come."""


class NonFiniteError(PyTorchRLError):
    """NaN or infinity where a finite number is needed."""


class NonFiniteDataError(NonFiniteError):
    """An environment returned, or an actor produced, NaN or infinity."""


class NonFiniteUpdateError(NonFiniteError):
    """A loss or a gradient is NaN or infinity; the update was not made.

    A scheme leaves such an update out, and raises this only when more than five in a row are.
    """


class CheckpointError(PyTorchRLError):
    """A saved model or checkpoint is missing, damaged, of another kind or of another run."""


class ReplayError(PyTorchRLError):
    """A replayed run differs from its record, or is to go on beyond its end."""


class StoppedError(PyTorchRLError):
    """The learner, scheme or worker has been stopped."""


class CallOrderError(PyTorchRLError, RuntimeError):
    """A method was called before another method that must be called first. The message names the other method."""


class WeightsError(PyTorchRLError):
    """Weights whose names, shapes or version do not fit their receiver."""


def install_hint(extra: str) -> str:
    """Return a command that installs the packages of an extra, for the error about a missing package.

    The command names the packages listed in the metadata of this installation. It never names this project, because a package
    index may have another project of the same name, which pip would install instead.
    """
    try:
        listed = importlib.metadata.requires("pytorchrl") or []
    except importlib.metadata.PackageNotFoundError:  # the source folder is on the path, but the package is not installed
        listed = []
    packages = [requirement.partition(";")[0].strip() for requirement in listed if f'extra == "{extra}"' in requirement]
    if not packages:
        return f"pip install -e '.[{extra}]' in the source folder"
    return "pip install " + " ".join(f"'{package}'" for package in packages)
