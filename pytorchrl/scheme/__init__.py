"""The worker tree: collection, gradients, updates, and the scheme that arranges them."""

from pytorchrl.agent.data import Evaluation
from pytorchrl.scheme.collection.c_worker_set import CWorkerSet
from pytorchrl.scheme.gradients.g_worker_set import GWorkerSet
from pytorchrl.scheme.ledger import DropReason, LedgerSnapshot
from pytorchrl.scheme.options.base import ASYNC, CENTRAL, PARALLEL, SYNC, Communication, Execution
from pytorchrl.scheme.options.collection import AsynchronousCollection, ReplayCollection, SynchronousCollection
from pytorchrl.scheme.options.run import Processes, Ray, Simulated, Threads
from pytorchrl.scheme.options.updates import AsynchronousGradients, DecentralizedGradients, SynchronousGradients
from pytorchrl.scheme.replay.r_worker_set import RWorkerSet
from pytorchrl.scheme.scheme import Scheme
from pytorchrl.support.work import Work

__all__ = [
    "ASYNC", "CENTRAL", "PARALLEL", "SYNC", "AsynchronousCollection", "AsynchronousGradients", "CWorkerSet",
    "Communication", "DecentralizedGradients", "DropReason", "Evaluation", "Execution", "GWorkerSet",
    "LedgerSnapshot", "Processes", "RWorkerSet", "Ray", "ReplayCollection", "Scheme", "Simulated",
    "SynchronousCollection", "SynchronousGradients", "Threads"]

WORK = Work("ours")
