"""Two ways to place the pods of a replay: with Headroom's own code, and by counting replicas.

``ByHeadroom`` calls ``core.whatif.simulation``, which fits, ranks and reserves with the code of
filter, prioritize and bind. ``ByCounting`` is the baseline without Headroom. In both, a device
plugin that chooses the device takes a device with the fewest replicas in use (policy
*distributed*), at random among equals."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from headroom.contract.annotations import MAX_SM, VRAM, ScoringPolicy
from headroom.contract.kube import Container, ObjectMeta, Pod, PodSpec, ResourceRequirements
from headroom.core.placement.demand_pricing import DemandTracker
from headroom.core.placement.request import VramRequest
from headroom.core.placement.snapshot import Rows
from headroom.core.rules.eligible_nodes import Eligible
from headroom.core.whatif.simulation import Placed
from headroom.planner.simulated_fleet import GPU, Sharing, device_uuid, simulation_of
from headroom.planner.workload import Machine

#: Maximum number of kinds of requests whose fit is cached. Needs are multiples of 256 MiB, so this
#: is enough for GPUs of up to 128 GiB. A kind takes about 100 bytes for each node.
_KINDS = 512


@dataclass(frozen=True, slots=True)
class Request:
    """The properties of a pod that decide where it is placed."""

    gpus: int
    #: GPU memory on one device, or None for the whole device.
    need_bytes: int | None
    models: frozenset[str]
    cpu_milli: int
    host_bytes: int
    #: Minimum memory of a GPU on which the pod can run, as if it selected such nodes.
    least_bytes: int = 0
    #: Maximum SM activity of the GPU before the pod is placed, in percent, or None without a limit.
    max_sm: int | None = None


@dataclass(frozen=True, slots=True)
class Spot:
    """The place of a pod: the index of its machine, and the indices of its devices there."""

    machine: int
    devices: tuple[int, ...]


class Placer(Protocol):
    def place(
        self, uid: str, request: Request, rows: Rows, sm_ratio: float = 0.0, used_bytes: int = 0
    ) -> Spot | None:
        """Place a pod on one of these machines (indices). Return None if it fits on none of them.

        ``sm_ratio`` and ``used_bytes`` are the SM activity and the memory that the pod then uses on
        each of its devices.
        """

    def end(self, uid: str, spot: Spot) -> None:
        """Free everything that a placed pod holds."""


class _Plugins:
    """The device plugin of each machine, with policy *distributed*."""

    def __init__(self, machines: Sequence[Machine], replicas: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._replicas = replicas
        self._taken = [[0] * machine.devices for machine in machines]

    def choose(self, machine: int, count: int) -> tuple[int, ...]:
        """Return the devices of ``count`` replicas, chosen one after another."""
        taken, chosen = list(self._taken[machine]), []
        for _ in range(count):
            fewest = min(taken)
            best = [device for device, number in enumerate(taken) if number == fewest]
            chosen.append(self._random.choice(best))
            taken[chosen[-1]] += 1
        return tuple(chosen)

    def take(self, spot: Spot, sign: int = 1) -> None:
        for device in spot.devices:
            self._taken[spot.machine][device] += sign


class ByHeadroom:
    """Places pods as Headroom does: memory is reserved before a pod is bound."""

    def __init__(self, machines: Sequence[Machine], sharing: Sharing, seed: int) -> None:
        self._machines = machines
        self._row_of = {machine.name: row for row, machine in enumerate(machines)}
        self._cluster, self._simulation = simulation_of(machines, sharing, _KINDS)
        self._demand = DemandTracker(self._cluster.rules.policy is ScoringPolicy.FRAGMENTATION)
        self._plugins = _Plugins(machines, sharing.replicas, seed)
        #: The reported SM activity of each (machine, device). Devices without activity are missing.
        self._activity: dict[tuple[int, int], float] = {}
        self._sm_ratio: dict[str, float] = {}
        self._kinds: dict[tuple[int, int | None, int | None], tuple[VramRequest, Pod]] = {}

    def place(
        self, uid: str, request: Request, rows: Rows, sm_ratio: float = 0.0, used_bytes: int = 0
    ) -> Spot | None:
        kind, pod = self._kind(request.gpus, request.need_bytes, request.max_sm)
        asked = replace(kind, uid=uid, name=uid)
        demand = self._demand
        demand.prepare(asked, self._simulation.snapshot())
        self._simulation.market = demand.market
        demand.see(asked, pod, self._simulation.snapshot(), rows)
        at = self._simulation.place(asked, Eligible(rows, {}))
        if not isinstance(at, Placed):
            return None
        machine = self._row_of[at.node]
        (charge,) = at.placement.charges
        if charge.choices:
            devices = tuple(int(uuid.rpartition("/")[2]) for uuid in charge.choices)
        else:
            devices = self._plugins.choose(machine, charge.count)
        spot = Spot(machine, devices)
        self._plugins.take(spot)
        held = Counter(device_uuid(self._machines[machine], device) for device in devices)
        # Use within the request changes nothing, and use cannot exceed a request for a whole GPU.
        beyond = request.need_bytes is not None and used_bytes > request.need_bytes
        self._simulation.observe(uid, at.node, held, used_bytes if beyond else 0)
        if sm_ratio:
            self._sm_ratio[uid] = sm_ratio
            self._measure(spot, sm_ratio)
        return spot

    def end(self, uid: str, spot: Spot) -> None:
        self._plugins.take(spot, -1)
        self._simulation.end(uid, self._machines[spot.machine].name)
        if sm_ratio := self._sm_ratio.pop(uid, 0.0):
            self._measure(spot, -sm_ratio)

    def _measure(self, spot: Spot, more: float) -> None:
        machine, reported = self._machines[spot.machine], dict[str, float]()
        for device in set(spot.devices):
            place = spot.machine, device
            # Round the sum, so that it becomes 0 again when the last pod ends.
            found = round(self._activity.get(place, 0.0) + more, 9)
            self._activity[place] = reported[device_uuid(machine, device)] = found
        self._simulation.measure(machine.name, reported)

    def _kind(
        self, gpus: int, need_bytes: int | None, max_sm: int | None
    ) -> tuple[VramRequest, Pod]:
        key = gpus, need_bytes, max_sm
        if key not in self._kinds:
            annotations = {VRAM: "100%" if need_bytes is None else str(need_bytes)}
            if max_sm is not None:
                annotations[MAX_SM] = f"{max_sm}%"
            resources = ResourceRequirements(limits={GPU: str(gpus)})
            pod = Pod(
                metadata=ObjectMeta(
                    name="plan", namespace="plan", uid="plan", annotations=annotations
                ),
                spec=PodSpec(containers=[Container(name="main", resources=resources)]),
            )
            request = self._cluster.understand(pod)
            assert isinstance(request, VramRequest), request
            self._kinds[key] = request, pod
        return self._kinds[key]


class ByCounting:
    """Places pods as kube-scheduler does without Headroom, by counting replicas instead of memory.

    A pod goes to the machine with the most free replicas, at random among equals.
    """

    def __init__(self, machines: Sequence[Machine], sharing: Sharing, seed: int) -> None:
        self._random = random.Random(seed)
        self._plugins = _Plugins(machines, sharing.replicas, seed)
        self._free = np.array([each.devices * sharing.replicas for each in machines], np.int64)

    def place(
        self, uid: str, request: Request, rows: Rows, sm_ratio: float = 0.0, used_bytes: int = 0
    ) -> Spot | None:
        free = self._free[rows]
        most = int(free.max(initial=0))
        if most < request.gpus:
            return None
        machine = int(self._random.choice(rows[free == most].tolist()))
        spot = Spot(machine, self._plugins.choose(machine, request.gpus))
        self._plugins.take(spot)
        self._free[machine] -= request.gpus
        return spot

    def end(self, uid: str, spot: Spot) -> None:
        self._plugins.take(spot, -1)
        self._free[spot.machine] += len(spot.devices)
