"""Tests the main guarantee that no device is ever overcommitted, for any choice of the plugin.

Pods are bound one after the other as the code allows. A plugin that ignores memory gives each pod
devices with a free replica, at any time and in any order. Reports are late and incomplete. After
every step, the actual use is added up by device memory.
"""

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from headroom.contract.annotations import VRAM, Bytes, Share, parse_vram
from headroom.contract.gpunode import Device, PodUse, Replicas, Reservation
from headroom.contract.kube import Container, Pod
from headroom.core.placement.fit import fit
from headroom.core.placement.placement_record import place
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.placement.snapshot_builder import build
from tests.builders import FRESH_S, GIB, GPU, NOW_S, container, device, mig, pod, request, shared
from tests.builders import terms as terms_of
from tests.examples import examples
from tests.judge import excess

MIG = "nvidia.com/mig-1c.3g.20gb"
OTHER_MIG = "nvidia.com/mig-2c.3g.20gb"

NODES = {
    "unshared GPUs": [device(f"D{i}") for i in range(3)],
    "time-sliced GPUs": [shared(f"D{i}", free=3) for i in range(3)],
    "time-sliced GPUs of two sizes": [
        shared("D0", free=3, memory_bytes=16 * GIB),
        shared("D1", free=2),
        shared("D2", free=4, memory_bytes=40 * GIB),
    ],
    "compute instances that share memory, and others": [
        mig("D0", 1, memory_bytes=20 * GIB, resource=MIG),
        mig("D1", 1, memory_bytes=20 * GIB, resource=MIG),
        mig("D2", 1, memory_bytes=20 * GIB, resource=OTHER_MIG),
        mig("D3", 2, memory_bytes=20 * GIB, resource=MIG),
        mig("D4", 2, memory_bytes=20 * GIB, resource=OTHER_MIG),
    ],
    "compute instances that are time-sliced": [
        mig("D0", 1, resource=MIG, sharing="time-slicing", replicas=Replicas(free=2)),
        mig("D1", 1, resource=MIG, sharing="time-slicing", replicas=Replicas(free=2)),
        mig("D2", 2, resource=MIG, sharing="time-slicing", replicas=Replicas(free=2)),
    ],
}


@dataclass
class Truth:
    """The actual state of the node, and the reported part."""

    devices: list[Device]
    #: Pod uid of each (device, replica).
    held: dict[tuple[str, int], str] = field(default_factory=dict)
    #: Device -> phase -> (uid, bytes), because init containers end before app containers start.
    loads: dict[str, dict[str, list[tuple[str, int]]]] = field(default_factory=dict)
    #: Rows of a past report, and the devices that it shows.
    rows: list[PodUse] = field(default_factory=list)
    reported: list[Device] = field(default_factory=list)

    def free(self, resource: str) -> list[tuple[str, int]]:
        return [
            (d.uuid, replica)
            for d in self.devices
            if d.resource == resource
            for replica in range(d.replicas.total)
            if (d.uuid, replica) not in self.held
        ]

    def admit(self, asked: Pod, data: DataObject, greedy: bool) -> list[PodUse]:
        """Allocate devices to every container, like the kubelet's device manager."""
        uid = asked.metadata.uid
        rows: list[PodUse] = []
        reusable: list[tuple[str, int]] = []
        sidecars = [c for c in asked.spec.init_containers or [] if c.restart_policy == "Always"]
        loads: dict[str, list[tuple[str, int]]] = {}
        every = [*(asked.spec.init_containers or []), *(asked.spec.containers or [])]
        for c in every:
            assert c.resources is not None
            for resource, number in (c.resources.limits or {}).items():
                mine = [r for r in reusable if self.resource(r) == resource][: int(number)]
                while len(mine) < int(number):
                    free = [replica for replica in self.free(resource) if replica not in mine]
                    assert free, "a pod was bound for which the plugin has no replica"
                    if greedy:
                        free.sort(key=lambda replica: -self.load(replica[0]))
                        mine.append(free[0])
                    else:
                        mine.append(data.draw(st.sampled_from(free), label=f"{uid} {c.name}"))
                    self.held[mine[-1]] = uid
                is_init = c in (asked.spec.init_containers or [])
                if is_init and c not in sidecars:
                    reusable += [replica for replica in mine if replica not in reusable]
                else:
                    reusable = [replica for replica in reusable if replica not in mine]
                kind = "init" if is_init and c not in sidecars else "main"
                for uuid in sorted({uuid for uuid, _ in mine}):
                    replicas = [n for u, n in mine if u == uuid]
                    loads.setdefault(uuid, []).append(
                        (f"{kind} {c.name}", self.amount(asked, c, uuid, len(replicas)))
                    )
                    rows += [
                        PodUse(uid=uid, device=uuid, container=c.name, replica=f"{uuid}::{n}")
                        for n in replicas
                    ]
        for uuid, own in loads.items():
            self.loads.setdefault(uuid, {})[uid] = own
        return rows

    def resource(self, replica: tuple[str, int]) -> str:
        return next(d.resource for d in self.devices if d.uuid == replica[0])

    def amount(self, asked: Pod, c: Container, uuid: str, replicas: int) -> int:
        d = next(d for d in self.devices if d.uuid == uuid)
        text = asked.annotation(VRAM)
        message = None if text is None else parse_vram(text).of(c.name)
        if isinstance(message, Bytes):
            return message.count_bytes
        if isinstance(message, Share):
            return d.memory_bytes * message.ppm // 1_000_000
        return d.memory_bytes // d.replicas.total * replicas

    def memory(self, uuid: str) -> set[str]:
        d = next(d for d in self.devices if d.uuid == uuid)
        if d.gpu_instance is None:
            return {uuid}
        return {o.uuid for o in self.devices if o.gpu_instance == d.gpu_instance}

    def load(self, uuid: str) -> int:
        """Return the maximum use of the memory: for each pod its init containers or its other
        containers.
        """
        total = 0
        mates = self.memory(uuid)
        for uid in {uid for mate in mates for uid in self.loads.get(mate, {})}:
            own = [load for mate in mates for load in self.loads.get(mate, {}).get(uid, [])]
            main = sum(size for name, size in own if name.startswith("main"))
            inits = {name for name, _ in own if name.startswith("init")}
            each = [sum(size for name, size in own if name == init) for init in inits]
            total += max([main, *each])
        return total

    def check(self) -> None:
        loads = ((d.uuid, self.load(d.uuid)) for d in self.devices)
        assert excess(loads, {d.uuid: d.memory_bytes for d in self.devices}) == {}

    def report(self, rows: list[PodUse]) -> None:
        """Report exactly what is allocated now."""
        self.rows = list(rows)
        self.reported = []
        for d in self.devices:
            taken = sum(1 for uuid, _ in self.held if uuid == d.uuid)
            total = d.replicas.total
            self.reported.append(
                Device(
                    **{
                        **{name: getattr(d, name) for name in d.__struct_fields__},
                        "replicas": Replicas(free=total - taken, allocated=taken),
                    }
                )
            )


sizes = st.sampled_from(["6Gi", "8Gi", "12Gi", "16Gi", "20Gi", "50%", "a=7Gi,b=3Gi", None])


def asked_by(data: DataObject, devices: list[Device], uid: str) -> Pod:
    resources = sorted({d.resource for d in devices})
    vram = data.draw(sizes, label=f"{uid} vram")
    shape = data.draw(st.sampled_from(["one", "one", "one", "two", "pair", "init"]), label=uid)
    resource, other = (data.draw(st.sampled_from(resources)) for _ in range(2))
    a, b = container("a", resource=resource), container("b", resource=other)
    if vram == "a=7Gi,b=3Gi" or shape == "two":
        return pod(vram, a, b, uid=uid, name=uid)
    if shape == "pair":
        return pod(vram, container("a", gpus=2, resource=resource), uid=uid, name=uid)
    if shape == "init":
        kind = data.draw(st.sampled_from([None, "Always"]))
        init = [container("b", resource=resource, restart_policy=kind)]
        return pod(vram, a, init=init, uid=uid, name=uid)
    return pod(vram, a, uid=uid, name=uid)


@pytest.mark.parametrize("kind", NODES)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_no_memory_is_ever_overcommitted(kind: str, data: DataObject) -> None:
    truth = Truth(NODES[kind], reported=list(NODES[kind]))
    reservations: dict[str, Reservation] = {}
    waiting: list[Pod] = []
    rows: list[PodUse] = []
    greedy = data.draw(st.booleans(), label="plugin prefers the fullest")
    number = count()
    for step in data.draw(st.lists(st.sampled_from("bbbar"), max_size=14), label="steps"):
        if step == "b":
            asked = asked_by(data, truth.devices, f"u{next(number)}")
            node = NodeTerms(
                "n",
                None,
                FRESH_S,
                terms_of(*truth.reported, pods=truth.rows, reservations=reservations),
            )
            snap = build([node])
            what = request(asked)
            verdicts = fit(what, snap, snap.rows(["n"]), NOW_S)
            if verdicts.fits[0]:
                charges = place(what, snap, verdicts, 0).charges
                reservations[asked.metadata.uid] = Reservation(
                    namespace="default", name=asked.metadata.name, charges=list(charges)
                )
                waiting.append(asked)
        elif step == "a" and waiting:
            which = data.draw(st.integers(0, len(waiting) - 1), label="admitted")
            rows += truth.admit(waiting.pop(which), data, greedy)
            truth.check()
        elif step == "r":
            truth.report(rows)
    while waiting:  # Any bound pod may finally be admitted, in any order.
        which = data.draw(st.integers(0, len(waiting) - 1), label="admitted last")
        truth.admit(waiting.pop(which), data, greedy)
        truth.check()


def test_some_pods_fit() -> None:
    """Without this, the property would also hold if no pod ever fitted."""
    for kind, devices in NODES.items():
        snap = build([NodeTerms("n", None, FRESH_S, terms_of(*devices))])
        asked = request(pod("6Gi", container(resource=devices[0].resource)))
        assert fit(asked, snap, snap.rows(["n"]), NOW_S).fits[0], kind
    assert GPU in {d.resource for devices in NODES.values() for d in devices}
