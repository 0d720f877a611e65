"""The state of a gradient worker in a checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from pytorchrl.scheme.ledger import LedgerSnapshot

if TYPE_CHECKING:
    from pytorchrl.scheme.gradients.g_worker import GWorker
    from pytorchrl.untyped import StateDict


def state_of(worker: GWorker) -> StateDict:
    """Return a drained worker's state: replay data, ledger, remainders of the gradient codec, and incarnations.

    Parameters and optimizers are saved by the update worker; random generators and episodes are not saved.
    """
    # Read the shards before the ledger, because the loss of a shard changes the ledger.
    shards = None if worker.shards is None else worker.shards.state()
    return {"ledger": asdict(worker.ledger.snapshot()), "storage": worker.storage.state_dict(), "shards": shards,
            "remainders": {place: torch.from_numpy(array.copy()) for place, array in worker.encoder.kept.items()},
            "incarnations": worker.col_workers.incarnations}


def load_state(worker: GWorker, state: StateDict) -> None:
    """Load a result of `state_of`, before anything is collected. The number of collection workers may differ."""
    worker.ledger.restore(LedgerSnapshot(**state["ledger"]))
    worker.encoder.kept = {place: array.numpy() for place, array in state["remainders"].items()}
    worker.storage.load_state_dict(state["storage"])
    if worker.shards is not None:
        worker.shards.restore(state["shards"])
    worker.batch_source.restored()
    worker.col_workers.restore_incarnations(state.get("incarnations", ()))
