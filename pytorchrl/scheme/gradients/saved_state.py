"""The state of a gradient worker in a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from pytorchrl.agent.storages.base import Storage
    from pytorchrl.scheme.collection.c_worker_set import CWorkerSet
    from pytorchrl.scheme.ledger import Ledger
    from pytorchrl.scheme.replay.shards import Shards
    from pytorchrl.scheme.transport.encoder import Encoder


class Saved(Protocol):
    """The parts of a gradient worker that a checkpoint contains; see `GWorker`."""

    ledger: Ledger
    storage: Storage
    shards: Shards | None
    encoder: Encoder
    col_workers: CWorkerSet


def state_of(worker: Saved) -> dict[str, object]:
    """Return the state of a gradient worker for a checkpoint; call `GWorker.drain` first.

    The state contains the replay data, the ledger, the incarnation of each collection worker (the number increases by 1
    when the worker is replaced), and the compression errors that the gradient codec will add to later gradients (error
    feedback). Parameters and optimizers are saved by the update worker; random generators and
    episodes are not saved.
    """
    # Read the shards before the ledger: if a shard is found to be lost, the ledger changes.
    shards = None if worker.shards is None else worker.shards.state()
    return {"ledger": worker.ledger.snapshot().saved(), "storage": worker.storage.state_dict(), "shards": shards,
            "remainders": {place: torch.from_numpy(array.copy()) for place, array in worker.encoder.kept.items()},
            "incarnations": worker.col_workers.incarnations}
