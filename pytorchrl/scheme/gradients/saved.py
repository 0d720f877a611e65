"""What of a gradient worker is saved at a checkpoint, once it is drained: data in replay, its account, its codec's remainders.

Parameters and optimisers are the update worker's to save. Draws and episodes begin anew after a checkpoint.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from pytorchrl.errors import WorkerLostError
from pytorchrl.runtime import Handle, Runtime
from pytorchrl.scheme.collection.c_worker import CWorker
from pytorchrl.scheme.ledger import LedgerSnapshot

if TYPE_CHECKING:
    from pytorchrl.scheme.gradients.g_worker import GWorker

_TIMEOUT_S = 60.0


def state_of(worker: GWorker) -> dict[str, Any]:
    """Plain values and tensors, from which a worker that was just built can go on."""
    shards = None if worker.shards is None else worker.shards.state()  # the ledger then knows of those that give no answer
    return {
        "ledger": asdict(worker.ledger.snapshot()), "storage": worker.storage.state_dict(), "shards": shards,
        "remainders": {place: torch.from_numpy(array.copy()) for place, array in worker.encoder.kept.items()}}


def restore(worker: GWorker, state: dict[str, Any]) -> None:
    """Go on from what another worker has saved; nothing has been collected yet."""
    worker.ledger.restore(LedgerSnapshot(**state["ledger"]))
    worker.encoder.kept = {place: array.numpy() for place, array in state["remainders"].items()}
    worker.storage.load_state_dict(state["storage"])
    if worker.shards is not None:
        worker.shards.restore(state["shards"])


def let_begin_anew(workers: list[Handle[CWorker]], runtime: Runtime, seed: int) -> None:
    """Have all collection workers begin anew; one that is lost is replaced later on, by a new one anyway."""
    calls = [handle.submit(CWorker.begin_anew, seed) for handle in workers]
    for outcome in runtime.get_all(calls, _TIMEOUT_S):
        if not isinstance(outcome.error, WorkerLostError):
            outcome.unwrap()
