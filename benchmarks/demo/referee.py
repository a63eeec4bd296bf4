"""Finds overcommitted devices. Its only inputs are the fleet and the node of each bound pod.

The referee is independent of the schedulers that it judges: it imports no code of Headroom and
keeps its own accounts. It also chooses the device on the node, which no scheduler decides, by two
facts of the stock stack. First, kubelets admit bound pods in any order. Second, the NVIDIA plugin's
``distributed`` policy picks the device with the fewest allocated replicas among devices with a free
replica, ignores memory, and breaks ties at random. An unshared device has one replica. Both
schedulers are judged by this class with the same seed."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Gpu:
    memory_bytes: int
    #: Number of pods that the plugin admits; 1 if the device is not shared.
    replicas: int


@dataclass(frozen=True, slots=True)
class Landed:
    """An admitted pod and the devices that it got."""

    pod: str
    node: str
    #: Indices of devices on the node.
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    #: Number of bound pods, including pods that the kubelet rejected.
    bound: int
    devices_overcommitted: int
    #: The highest ratio of requested memory to a device's memory (1 is exactly full), and the bytes
    #: that pods request beyond the memory of that device.
    worst_ratio: Fraction
    worst_excess_bytes: int
    #: Pods that failed with out-of-memory, because running pods admitted before left too little.
    died: frozenset[str]
    #: Pods in ``died`` that request more memory than their device has.
    too_large: frozenset[str]
    #: Pods that the kubelet rejected because no replica was free.
    turned_away: frozenset[str]
    #: Memory of all shared devices.
    shared_bytes: int
    #: Memory of shared devices that running pods use.
    working_bytes: int
    #: Free memory of shared devices that no other pod can use. See ``Referee.verdict``.
    stranded_bytes: int


@dataclass(slots=True)
class _Device:
    gpu: Gpu
    #: (pod, bytes) in the order of admission.
    held: list[tuple[str, int]] = field(default_factory=list)

    @property
    def requested_bytes(self) -> int:
        return sum(size_bytes for _, size_bytes in self.held)

    @property
    def ratio(self) -> Fraction:
        return Fraction(self.requested_bytes, self.gpu.memory_bytes)

    @property
    def excess_bytes(self) -> int:
        return self.requested_bytes - self.gpu.memory_bytes

    def used_bytes(self, dead: set[str]) -> int:
        """Return the bytes of the pods that are not in ``dead``."""
        return sum(size_bytes for pod, size_bytes in self.held if pod not in dead)


@dataclass(frozen=True, slots=True)
class _Bound:
    pod: str
    node: str
    devices: int
    request_bytes: int | None


class Referee:
    """Simulates kubelets and device plugins for pods that are bound, and judges the outcome."""

    def __init__(self, nodes: Mapping[str, Sequence[Gpu]], seed: int) -> None:
        self._nodes = {name: [_Device(gpu) for gpu in gpus] for name, gpus in nodes.items()}
        self._random = random.Random(seed)
        self._not_admitted: list[_Bound] = []
        self._bound = 0
        self._rejected: set[str] = set()

    def bound(self, pod: str, node: str, devices: int, request_bytes: int | None) -> None:
        """Record a bind. ``request_bytes`` is per device; None means the whole device."""
        self._not_admitted.append(_Bound(pod, node, devices, request_bytes))
        self._bound += 1

    def admit(self) -> list[Landed]:
        """Admit all pods that were bound since the last call, in random order.

        Return the admitted pods with their devices. Rejected pods are not returned.
        """
        self._random.shuffle(self._not_admitted)
        landed = [self._admit(bound) for bound in self._not_admitted]
        self._not_admitted.clear()
        return [place for place in landed if place is not None]

    def ended(self, pod: str) -> None:
        """Release the replicas and the memory of an admitted pod that ended."""
        for devices in self._nodes.values():
            for device in devices:
                device.held = [each for each in device.held if each[0] != pod]

    def _admit(self, bound: _Bound) -> Landed | None:
        devices = self._nodes[bound.node]
        if sum(device.gpu.replicas - len(device.held) for device in devices) < bound.devices:
            self._rejected.add(bound.pod)
            return None
        chosen = []
        for _ in range(bound.devices):
            index = self._distributed(devices)
            size_bytes = bound.request_bytes
            if size_bytes is None:
                size_bytes = devices[index].gpu.memory_bytes
            devices[index].held.append((bound.pod, size_bytes))
            chosen.append(index)
        return Landed(bound.pod, bound.node, tuple(chosen))

    def _distributed(self, devices: Sequence[_Device]) -> int:
        """Return the index of the device that the plugin picks. At least one has a free replica."""
        free = [i for i, device in enumerate(devices) if len(device.held) < device.gpu.replicas]
        fewest = min(len(devices[i].held) for i in free)
        return self._random.choice([i for i in free if len(devices[i].held) == fewest])

    def verdict(self, useful_bytes: int) -> Verdict:
        """Judge all pods admitted so far.

        A pod dies if its memory does not fit beside the running pods that were admitted before it.
        It keeps its replica, because Kubernetes restarts it on the same device. The free memory of
        a shared device with pods is stranded if the device has no free replica, or less than
        ``useful_bytes`` of free memory.
        """
        devices = [device for node in self._nodes.values() for device in node]
        over = [device for device in devices if device.excess_bytes > 0]
        dead, too_large = _deaths(over)
        shared = [device for device in devices if device.gpu.replicas > 1]
        worst_ratio, worst_excess_bytes = max(
            ((device.ratio, device.excess_bytes) for device in devices), default=(Fraction(0), 0)
        )
        return Verdict(
            bound=self._bound,
            devices_overcommitted=len(over),
            worst_ratio=worst_ratio,
            worst_excess_bytes=max(0, worst_excess_bytes),
            died=frozenset(dead),
            too_large=frozenset(too_large),
            turned_away=frozenset(self._rejected),
            shared_bytes=sum(device.gpu.memory_bytes for device in shared),
            working_bytes=sum(device.used_bytes(dead) for device in shared),
            stranded_bytes=sum(_stranded_bytes(d, dead, useful_bytes) for d in shared),
        )


def _deaths(devices: Sequence[_Device]) -> tuple[set[str], set[str]]:
    """Return the pods that die on these devices, and which of them exceed the device alone."""
    dead: set[str] = set()
    too_large: set[str] = set()
    for device in devices:
        used_bytes = 0
        for pod, size_bytes in device.held:
            if used_bytes + size_bytes > device.gpu.memory_bytes:
                dead.add(pod)
                if size_bytes > device.gpu.memory_bytes:
                    too_large.add(pod)
            else:
                used_bytes += size_bytes
    return dead, too_large


def _stranded_bytes(device: _Device, dead: set[str], useful_bytes: int) -> int:
    if not device.held:
        return 0
    free_bytes = device.gpu.memory_bytes - device.used_bytes(dead)
    no_replica_free = len(device.held) >= device.gpu.replicas
    return free_bytes if no_replica_free or free_bytes < useful_bytes else 0
