"""Computes the GPUs and the memory that namespaces hold, and how much of them is in use.

A pod holds a share of a GPU: the larger of its shares by memory and by replicas. It holds an
unshared GPU as a whole (``idle_pods.IdlePod.gpu_ratio``). If the shares of the pods on one GPU add
up to more than 1, each is divided by the sum. So the costs of a GPU never exceed its price.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from headroom.contract.gpunode import GPUNode
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.idle_pods import on_node
from headroom.core.placement.device_accounting import DeviceTerms

#: Maximum number of namespaces that are counted by name. The namespaces that hold the least are
#: summed under ``OTHERS``.
MOST_NAMESPACES = 200
OTHERS = "(others)"
#: Number of minutes for which sums are kept.
KEPT_MINUTES = 60
#: The share of a GPU is a multiple of 1/PER_GPU, which is a power of 2. Sums of such values are
#: exact, so they can be updated by differences for months without drift.
PER_GPU = 1 << 30
#: If a round comes later than this after the last one, only this many seconds are added.
MOST_GAP_S = 30.0


class Holdings(NamedTuple):
    """GPUs and bytes of GPU memory that a namespace holds, or their products with seconds."""

    #: GPUs whose pods used an SM in the last few minutes.
    active_gpus: float = 0.0
    #: GPUs whose pods used no SM for a known time.
    idle_gpus: float = 0.0
    #: GPUs whose SM activity is not measured, or whose report is stale.
    unmeasured_gpus: float = 0.0
    used_bytes: float = 0.0
    #: Memory that is reserved and not in use.
    unused_bytes: float = 0.0
    #: Memory reserved by pods whose use is not measured.
    unmeasured_bytes: float = 0.0

    @property
    def gpus(self) -> float:
        return self.active_gpus + self.idle_gpus + self.unmeasured_gpus

    @property
    def held_bytes(self) -> float:
        return self.used_bytes + self.unused_bytes + self.unmeasured_bytes

    def plus(self, other: "Holdings", times: float = 1.0) -> "Holdings":
        return Holdings(*[mine + times * its for mine, its in zip(self, other, strict=True)])


Held = Mapping[str, Holdings]


def of_node(
    cluster: Cluster,
    gpunode: GPUNode | None,
    devices: Sequence[DeviceTerms],
    fresh: bool,
    wall_s: float,
) -> Held:
    """Return the holdings of each namespace's pods on the node, from the node's last report.

    The result is empty without a GPUNode. ``fresh`` is whether the report is recent. If it is not,
    pods that still exist count as unmeasured.
    """
    if gpunode is None:
        return {}
    terms_of = {terms.device.uuid: terms.device for terms in devices}
    pods = [
        each
        for each in on_node(cluster, gpunode, devices, wall_s)
        if fresh or cluster.pod(each.uid) is not None
    ]
    shares: dict[str, float] = defaultdict(float)
    for each in pods:
        device = terms_of[each.device]
        shares[device.parent or device.uuid] += each.gpu_ratio
    found: dict[str, Holdings] = {}
    for each in pods:
        device = terms_of[each.device]
        gpus = each.gpu_ratio / max(1.0, shares[device.parent or device.uuid])
        gpus = round(gpus * PER_GPU) / PER_GPU
        used_bytes = each.used_bytes if fresh else None
        measured = fresh and device.sm_activity is not None
        held = Holdings(
            gpus if measured and not each.idle_since else 0.0,
            gpus if measured and each.idle_since else 0.0,
            0.0 if measured else gpus,
            used_bytes or 0,
            0 if used_bytes is None else each.held_bytes - used_bytes,
            each.held_bytes if used_bytes is None else 0,
        )
        others = found.get(each.namespace)
        found[each.namespace] = held if others is None else others.plus(held)
    return found


def limited(sums: Held, most: int = MOST_NAMESPACES) -> Held:
    """Return the sums of at most ``most`` namespaces, and a sum of all others under ``OTHERS``."""
    found = dict(sums)
    for namespace in sorted(found, key=lambda each: (-found[each].gpus, each))[most:]:
        found[OTHERS] = found.pop(namespace).plus(found.get(OTHERS, Holdings()))
    return found


def summed(parts: Iterable[Held], most: int = MOST_NAMESPACES) -> Held:
    """Return the sums of the parts, limited to ``most`` namespaces."""
    found: dict[str, Holdings] = {}
    for part in parts:
        for namespace, held in part.items():
            found[namespace] = found.get(namespace, Holdings()).plus(held)
    return limited(found, most)


class Minute(msgspec.Struct, array_like=True):
    """Sums over one minute of Unix time, in GPU seconds and byte seconds."""

    minute: int
    #: Number of seconds of this minute that were recorded.
    covered_s: float
    held: dict[str, Holdings]


class HeldMinutes:
    """Sums of the last hour, by minute. Call its methods only on the event loop."""

    def __init__(self) -> None:
        self._minutes: deque[Minute] = deque(maxlen=KEPT_MINUTES)
        self._last_s: float | None = None

    def add(self, held: Held, wall_s: float, now_s: float) -> None:
        """Add what was held since the last call. ``now_s`` is the monotonic time, and ``wall_s``
        the Unix time."""
        gap_s = 0.0 if self._last_s is None else min(MOST_GAP_S, max(0.0, now_s - self._last_s))
        self._last_s = now_s
        minute = int(wall_s // 60)
        if not self._minutes or self._minutes[-1].minute < minute:
            self._minutes.append(Minute(minute, 0.0, {}))
        last = self._minutes[-1]
        last.covered_s += gap_s
        last.held = dict(
            summed([last.held, {name: Holdings().plus(each, gap_s) for name, each in held.items()}])
        )

    def since(self, wall_s: float) -> list[Minute]:
        """Return the minutes, oldest first, beginning with the minute that contains this time."""
        return [each for each in self._minutes if each.minute >= int(wall_s // 60)]
