"""The state of a gradient worker in a checkpoint: `state_of` reads the state, and `restore_state` loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from pytorchrl.scheme.ledger import Ledger, LedgerSnapshot
from pytorchrl.support.untyped import StateDict

if TYPE_CHECKING:
    from pytorchrl.agent.storages.base import Storage
    from pytorchrl.scheme.collection.c_worker import CWorker
    from pytorchrl.scheme.collection.c_worker_set import CWorkerSet
    from pytorchrl.scheme.replay.shards import Shards
    from pytorchrl.scheme.transport.encoder import Encoder


class Saved(Protocol):
    """The parts of a gradient worker that a checkpoint contains; see `GWorker`."""

    ledger: Ledger
    storage: Storage
    shards: Shards | None
    encoder: Encoder
    col_workers: CWorkerSet
    local_worker: CWorker


def state_of(worker: Saved) -> StateDict:
    """Return the state of a gradient worker for a checkpoint; call `GWorker.drain` first.

    The state contains the replay data, the ledger, the incarnation of each collection worker (the number increases by 1
    when the worker is replaced), and the compression errors that the gradient codec will add to later gradients (error
    feedback). Parameters and optimizers are saved by the update worker; random generators and episodes are not saved.
    """
    # Read the shards before the ledger: if a shard is found to be lost, the ledger changes.
    shards = None if worker.shards is None else worker.shards.state()
    return {"ledger": worker.ledger.snapshot().saved(), "storage": worker.storage.state_dict(), "shards": shards,
            "remainders": {place: torch.from_numpy(array.copy()) for place, array in worker.encoder.kept.items()},
            "incarnations": worker.col_workers.incarnations, "incarnation": worker.local_worker.incarnation}


def restore_state(worker: Saved, state: StateDict) -> None:
    """Load a result of `state_of` into a gradient worker that has not collected anything.

    Checkpoints of earlier versions may lack the incarnations; the worker then keeps its own.
    """
    worker.ledger.restore(LedgerSnapshot.from_saved(**state["ledger"]))
    worker.encoder.kept = {place: array.numpy() for place, array in state["remainders"].items()}
    worker.storage.load_state_dict(state["storage"])
    if worker.shards is not None:
        worker.shards.restore(state["shards"])
    worker.col_workers.restore_incarnations(state.get("incarnations", ()))
    worker.local_worker.incarnation = state.get("incarnation", worker.local_worker.incarnation)
