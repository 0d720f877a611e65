"""The worker tree: collection, gradients, updates, and the scheme that arranges them."""

from pytorchrl.scheme.base.worker import ASYNC, CENTRAL, PARALLEL, SYNC, Communication, Execution
from pytorchrl.scheme.ledger import DropReason, LedgerError, LedgerSnapshot
from pytorchrl.scheme.scheme import Scheme
from pytorchrl.scheme.supervision.evaluation import Evaluation

__all__ = ["ASYNC", "CENTRAL", "PARALLEL", "SYNC", "Communication", "DropReason", "Evaluation", "Execution",
           "LedgerError", "LedgerSnapshot", "Scheme"]
