"""Judges what happened on each device. Its only input is which pod was where, and when.

The judge is independent of everything that places pods: it keeps its own accounts and imports no
code of Headroom. A pod that is admitted to a device with too little free memory is an *overcommit*.
It keeps its replica until it ends but uses no memory, like a container that cannot allocate and is
restarted on the same device.
"""

from dataclasses import dataclass, field


@dataclass
class _Device:
    living: dict[str, int] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)

    @property
    def used_bytes(self) -> int:
        return sum(self.living.values())


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for the measured part of the time."""

    offered: int
    rejected: int
    #: Number of pods that were rejected although some device had enough memory and a free replica.
    falsely: int
    #: Number of pods on a device without enough memory for them.
    overcommits: int
    #: Number of devices without enough memory for their pods.
    devices_overcommitted: int
    #: Ratio of all memory that running pods use, mean over time.
    used_ratio: float


class Judge:
    """Counts from ``since_s`` on. Before that time, the devices fill up."""

    def __init__(
        self, nodes: int, devices: int, memory_bytes: int, replicas: int, since_s: float
    ) -> None:
        self._devices = {(n, d): _Device() for n in range(nodes) for d in range(devices)}
        self._memory_bytes, self._replicas = memory_bytes, replicas
        self._since_s = self._now_s = since_s
        self._sits: dict[str, tuple[int, int]] = {}
        self._used_bytes = 0
        self._used_byte_s = 0.0
        self._offered = self._rejected = self._falsely = self._overcommits = 0
        self._hurt: set[tuple[int, int]] = set()

    def offered(self, now_s: float) -> None:
        self._offered += now_s >= self._since_s

    def came(self, pod: str, node: int, device: int, request_bytes: int, now_s: float) -> None:
        """Record that a pod starts on a device."""
        self._pass(now_s)
        self._sits[pod] = node, device
        held = self._devices[node, device]
        if held.used_bytes + request_bytes <= self._memory_bytes:
            held.living[pod] = request_bytes
            self._used_bytes += request_bytes
            return
        held.dead.add(pod)
        if now_s >= self._since_s:
            self._overcommits += 1
            self._hurt.add((node, device))

    def went(self, pod: str, now_s: float) -> None:
        self._pass(now_s)
        held = self._devices[self._sits.pop(pod)]
        held.dead.discard(pod)
        self._used_bytes -= held.living.pop(pod, 0)

    def rejected(self, request_bytes: int, now_s: float) -> None:
        if now_s < self._since_s:
            return
        self._rejected += 1
        self._falsely += any(
            len(held.living) + len(held.dead) < self._replicas
            and held.used_bytes + request_bytes <= self._memory_bytes
            for held in self._devices.values()
        )

    def verdict(self, now_s: float) -> Verdict:
        self._pass(now_s)
        whole = self._memory_bytes * len(self._devices) * (now_s - self._since_s)
        return Verdict(
            self._offered,
            self._rejected,
            self._falsely,
            self._overcommits,
            len(self._hurt),
            self._used_byte_s / whole,
        )

    def _pass(self, now_s: float) -> None:
        if now_s > self._now_s:
            self._used_byte_s += self._used_bytes * (now_s - self._now_s)
            self._now_s = now_s
