"""Says which devices were overcommitted, from nothing but which pods were bound where.

The referee is a stranger to what it judges: it imports nothing of ours, keeps its own books, and
draws by itself what neither scheduler decides, the device inside the node. It knows two facts of
the stock stack: kubelets admit the pods bound to them in any order, and the NVIDIA plugin's
``distributed`` policy gives each the device with the fewest allocated replicas among those that
have a free one, ties at random, memory unseen. An unshared device is one with a single replica.
Both sides of a comparison are judged by this class with the same seed.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Gpu:
    memory_bytes: int
    #: How many pods the plugin lets in; 1 where the device is not shared.
    replicas: int


@dataclass(frozen=True, slots=True)
class Landed:
    """Where a pod's containers really sit: indices of devices of its node."""

    pod: str
    node: str
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    bound: int
    devices_overcommitted: int
    #: The most that was asked of a device, in relation to its memory; 1 is exactly full.
    worst_ratio: Fraction
    #: The most bytes that a device was asked for beyond its memory.
    worst_excess_bytes: int
    #: Pods whose memory no longer fitted when they came, in no particular order.
    died: frozenset[str]
    #: Those of them that are larger than the whole device that they got.
    too_large: frozenset[str]
    #: Pods that the kubelet turned away because no replica was left.
    turned_away: frozenset[str]
    #: Memory of the shared devices; what living pods use of it; what nobody can use.
    shared_bytes: int
    working_bytes: int
    stranded_bytes: int


@dataclass(slots=True)
class _Device:
    gpu: Gpu
    #: (pod, bytes) in the order of admission.
    held: list[tuple[str, int]] = field(default_factory=list)

    @property
    def asked_bytes(self) -> int:
        return sum(size for _, size in self.held)

    def living_bytes(self, dead: set[str]) -> int:
        return sum(size for pod, size in self.held if pod not in dead)


@dataclass(frozen=True, slots=True)
class _Bound:
    pod: str
    node: str
    devices: int
    request_bytes: int | None


class Referee:
    """Plays kubelet and plugin for the pods it is told of, and judges where they ended."""

    def __init__(self, nodes: Mapping[str, Sequence[Gpu]], seed: int) -> None:
        self._nodes = {name: [_Device(gpu) for gpu in gpus] for name, gpus in nodes.items()}
        self._random = random.Random(seed)
        self._waiting: list[_Bound] = []
        self._bound = 0
        self._turned_away: set[str] = set()

    def bound(self, pod: str, node: str, devices: int, request_bytes: int | None) -> None:
        """A pod was bound; ``request_bytes`` on each device, None for all that the device has."""
        self._waiting.append(_Bound(pod, node, devices, request_bytes))
        self._bound += 1

    def admit(self) -> list[Landed]:
        """Let the kubelets admit all pods bound since the last time, in random order."""
        self._random.shuffle(self._waiting)
        landed = [self._admit(bound) for bound in self._waiting]
        self._waiting.clear()
        return [place for place in landed if place is not None]

    def ended(self, pod: str) -> None:
        """An admitted pod has ended: its replica and its memory are free again."""
        for devices in self._nodes.values():
            for device in devices:
                device.held = [(name, size) for name, size in device.held if name != pod]

    def _admit(self, bound: _Bound) -> Landed | None:
        devices = self._nodes[bound.node]
        if sum(device.gpu.replicas - len(device.held) for device in devices) < bound.devices:
            self._turned_away.add(bound.pod)
            return None
        chosen = []
        for _ in range(bound.devices):
            index = self._distributed(devices)
            size = bound.request_bytes
            if size is None:
                size = devices[index].gpu.memory_bytes
            devices[index].held.append((bound.pod, size))
            chosen.append(index)
        return Landed(bound.pod, bound.node, tuple(chosen))

    def _distributed(self, devices: Sequence[_Device]) -> int:
        """The device that the plugin picks; at least one has a free replica."""
        free = [i for i, device in enumerate(devices) if len(device.held) < device.gpu.replicas]
        fewest = min(len(devices[i].held) for i in free)
        return self._random.choice([i for i in free if len(devices[i].held) == fewest])

    def verdict(self, useful_bytes: int) -> Verdict:
        """Judge what has been admitted; less than ``useful_bytes`` left on a device helps nobody.

        A pod dies when its memory does not fit beside the living pods admitted before it, and
        keeps its replica: Kubernetes restarts it in place. Stranded is the memory that no living
        pod uses, on shared devices that hold a pod, where either no replica is free or less than
        ``useful_bytes`` is left.
        """
        devices = [device for node in self._nodes.values() for device in node]
        over = [device for device in devices if device.asked_bytes > device.gpu.memory_bytes]
        dead, too_large = _deaths(over)
        shared = [device for device in devices if device.gpu.replicas > 1]
        ratios = (Fraction(d.asked_bytes, d.gpu.memory_bytes) for d in devices)
        excesses = (device.asked_bytes - device.gpu.memory_bytes for device in over)
        return Verdict(
            bound=self._bound,
            devices_overcommitted=len(over),
            worst_ratio=max(ratios, default=Fraction(0)),
            worst_excess_bytes=max(excesses, default=0),
            died=frozenset(dead),
            too_large=frozenset(too_large),
            turned_away=frozenset(self._turned_away),
            shared_bytes=sum(device.gpu.memory_bytes for device in shared),
            working_bytes=sum(device.living_bytes(dead) for device in shared),
            stranded_bytes=sum(_stranded_bytes(d, dead, useful_bytes) for d in shared),
        )


def _deaths(devices: Sequence[_Device]) -> tuple[set[str], set[str]]:
    """Pods that die on these devices, and those of them that could not live there alone."""
    dead: set[str] = set()
    too_large: set[str] = set()
    for device in devices:
        used = 0
        for pod, size in device.held:
            if used + size > device.gpu.memory_bytes:
                dead.add(pod)
                if size > device.gpu.memory_bytes:
                    too_large.add(pod)
            else:
                used += size
    return dead, too_large


def _stranded_bytes(device: _Device, dead: set[str], useful_bytes: int) -> int:
    if not device.held:
        return 0
    left = device.gpu.memory_bytes - device.living_bytes(dead)
    full = len(device.held) >= device.gpu.replicas
    return left if full or left < useful_bytes else 0
