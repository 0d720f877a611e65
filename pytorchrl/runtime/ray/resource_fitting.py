"""Fit the resource requests of workers to the nodes of a cluster. This module does not import Ray.

A request is (name, number of workers, resources of one worker). A default request asks for the default resources, and
may be reduced. A node is a map from Ray's name of a resource to the amount of that resource on one machine.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from pytorchrl.errors import InsufficientResourcesError

# `room_for` plans for the loss of the largest node. It counts the CPUs or memory of this node only if their amount is
# more than `_DOMINANCE_FACTOR` times the amount of all other nodes together. The factor is above 1, because two
# machines of one type may differ in memory.
_DOMINANCE_FACTOR = 1.2
RAY_KEYS = {"num_cpus": "CPU", "num_gpus": "GPU"}
"""Maps a resource's name in requests to Ray's name in the description of a node, if the two names differ."""


def room_for(key: str, nodes: Sequence[Mapping[str, float]], spare: Mapping[str, float], num_places: int,
             per_place: float) -> float:
    """Return the largest amount of the resource `key` that each default request can get.

    There are `num_places` groups of `per_place` requests, and each group must fit on one node. `spare` contains the
    amounts that all nodes together have left for default requests.

    If there are several nodes, the largest node is not counted, so that all workers still fit if this node is lost.
    There are two exceptions:

    - A node that has clearly more than all other nodes together is counted. Otherwise, the requests would become so
      small that too many workers would start on the small nodes.
    - For GPUs, all nodes are counted. Otherwise, some workers would get no share of a GPU, and could not use one.

    A node without CPUs, such as a head node that reserves its cores for the learner, gets no workers, even if it has
    other resources.
    """
    ray_key = RAY_KEYS.get(key, key)
    total = sum(node.get(ray_key, 0.0) for node in nodes)
    left = max(0.0, spare.get(ray_key, 0.0)) / total if total else 0.0
    hosts = [node for node in nodes if node.get("CPU", 0.0) > 0] or nodes
    free = sorted(left * node.get(ray_key, 0.0) / per_place for node in hosts)
    rest = free[:-1]
    is_most = max(free, default=0.0) > _DOMINANCE_FACTOR * sum(rest)
    return largest_share(free if key == "num_gpus" or is_most else rest, num_places)


def largest_share(free: Sequence[float], count: int) -> float:
    """Return the largest amount of a resource that each of `count` workers can get; no worker spans several nodes.

    `free` contains the free amount of the resource on each node.
    """
    shares = sorted(amount / part for amount in free if amount > 0 for part in range(1, count + 1))
    first_too_large = bisect.bisect_left(
        shares, True, key=lambda share: sum(int(amount / share + 1e-9) for amount in free) < count)
    return shares[first_too_large - 1] if first_too_large else 0.0


def shrunk_to(share: Mapping[str, float], resources: Mapping[str, float]) -> dict[str, float]:
    """Return the resources of a default request, each reduced to at most its amount in `share`."""
    fitted = {}
    for key in ("num_cpus", "num_gpus", "memory"):
        asked = float(resources.get(key, 0.0))
        amount = min(asked, share[key])
        fitted[key] = amount if amount >= asked or key == "memory" else int(amount * 1000) / 1000
    fitted["memory"] = float(int(fitted["memory"] * 0.9))
    return {key: amount for key, amount in fitted.items() if amount > 0 or key == "num_cpus"}


def group_of(requests: Sequence[tuple[str, int, Mapping[str, float]]], fitted: Sequence[Mapping[str, float]],
            nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the total resources of one group, which is a gradient worker and the workers that it starts.

    The result maps Ray's name of a resource to the amount of that resource.

    Args:
        requests: The requests of all workers; the first is the request of the gradient workers.
        fitted: For each request, the resources that one worker gets.
        nodes: The nodes of the cluster. Each group must fit on one node.

    Raises:
        InsufficientResourcesError: The nodes do not have room for the groups of all gradient workers.
    """
    num_groups, bundle = requests[0][1], dict[str, float]()
    for (_, count, _), resources in zip(requests, fitted, strict=True):
        for key, amount in resources.items():
            if key != "object_store_memory" and amount:
                bundle[RAY_KEYS.get(key, key)] = bundle.get(RAY_KEYS.get(key, key), 0.0) + amount * count / num_groups
    bundle = bundle or {"CPU": 0.001}  # Ray refuses an empty bundle
    room = sum(min(int(node.get(key, 0.0) / amount + 1e-9) for key, amount in bundle.items()) for node in nodes)
    if room < num_groups:
        wanted = " and ".join(f"{count // num_groups} {name}" for name, count, _ in requests if count)
        present = "; ".join(shown({key: node.get(key, 0.0) for key in bundle}) for node in nodes)
        raise InsufficientResourcesError(
            f"placement='colocate' puts {wanted} on one node, which together request {shown(bundle)}, {num_groups} "
            f"times; the nodes have {present}, which is enough for {room}; request less, or leave placement out")
    return bundle


def shown(resources: Mapping[str, float]) -> str:
    """Return resources as text, such as `num_cpus=1, num_gpus=0.5`."""
    return ", ".join(f"{key}={amount:g}" for key, amount in resources.items())
