"""Tests steered nodes: which device is chosen, which pods must wait, and that no device is
overcommitted.

The property test runs extender, agent and kubelet against each other. Reservations are made as
``fit`` and ``place`` allow, the agent answers according to its reads, the kubelet admits in any
order, and every report is late. The test keeps its own account of all pods.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from agent.gate_decision import Limits
from agent.probes.checkpoint import Entry
from agent.steering.choice import NoRoom, choose
from agent.steering.messages import ContainerRequest
from headroom.contract.gpunode import GPUNodeSpec, Plugin, Replicas, Reservation, SmActivity
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.core.placement.explain import because, certainty, explain
from headroom.core.placement.fit import fit
from headroom.core.placement.placement_record import place
from headroom.core.placement.policy import Weights
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.placement.snapshot_builder import build
from tests.builders import (
    DISTRIBUTED,
    FRESH_S,
    GIB,
    GPU,
    NOW_S,
    container,
    judged,
    mig,
    pod,
    reason_for,
    request,
    reservation,
    shared,
    status,
    terms,
    use,
    weighed,
)
from tests.examples import examples
from tests.judge import excess

STEERED = Plugin(allocation_policy="distributed", topology_manager_policy="none", steered=[GPU])


def chosen(what: Any, *devices: Any, **how: Any) -> list[str]:
    """Return the devices that the pod could get."""
    verdicts = judged(what, weighed(*devices, plugin=STEERED, **how))[1]
    assert verdicts.fits[0]
    (node,) = explain(verdicts, Weights()).nearest
    return [each.terms.device.uuid for each in node.candidates]


def reserved(device: str, gib: int) -> Reservation:
    return reservation({device: gib * GIB}, choices=[device])


def sitting(uuid: str, gib: int) -> dict[str, Any]:
    """Return the report of one pod with this use on the device."""
    return {
        "pods": [use("s", uuid, replica=f"{uuid}::0")],
        "reservations": {"s": reserved(uuid, gib)},
    }


def test_the_fullest_or_emptiest_device_that_fits_is_chosen() -> None:
    devices = shared("A"), shared("B", free=3, allocated=1), shared("C")
    assert chosen("8Gi", *devices, **sitting("B", 10)) == ["B"]
    assert chosen("16Gi", *devices, **sitting("B", 10)) == ["A"]
    spread = pod("8Gi", annotations={"headroom.gpu/policy": "spread"})
    assert chosen(spread, *devices, **sitting("B", 10)) == ["A"]


def busy(ratio: float | None) -> SmActivity | None:
    return None if ratio is None else SmActivity(ratio, "gpm")


@pytest.mark.parametrize("policy", ["pack", "spread"])
@pytest.mark.parametrize(
    ("a", "b", "best"),
    [
        pytest.param(0.9, 0.2, "B", id="B is much less active"),
        pytest.param(0.2, 0.9, "A", id="A is much less active"),
        pytest.param(0.31, 0.3, "B", id="B is slightly less active"),
        pytest.param(0.3, None, "A", id="below half, and unknown"),
        pytest.param(0.7, None, "B", id="above half, and unknown"),
        pytest.param(None, None, "A", id="both unknown"),
    ],
)
def test_the_less_active_of_two_equally_full_devices_is_chosen(
    policy: str, a: float | None, b: float | None, best: str
) -> None:
    devices = [
        shared(uuid, free=3, allocated=1, sm_activity=busy(ratio))
        for uuid, ratio in (("A", a), ("B", b))
    ]
    pods = [use(f"s-{uuid}", uuid, replica=f"{uuid}::0") for uuid in "AB"]
    held = {f"s-{uuid}": reserved(uuid, 10) for uuid in "AB"}
    asked = pod("4Gi", annotations={"headroom.gpu/policy": policy})
    assert chosen(asked, *devices, pods=pods, reservations=held) == [best]


@pytest.mark.parametrize(
    ("policy", "gib", "best"),
    [
        # The difference between fully busy and idle SMs counts as a quarter of 24 GiB.
        pytest.param("pack", 7, "B", id="packing wins if more than a quarter would be wasted"),
        pytest.param("pack", 5, "A", id="low activity wins if less would be wasted"),
        pytest.param("spread", 5, "A", id="both prefer the same device"),
    ],
)
def test_activity_is_weighted_against_packing(policy: str, gib: int, best: str) -> None:
    idle, full = shared("A", sm_activity=busy(0)), shared("B", 3, 1, sm_activity=busy(1))
    asked = pod("4Gi", annotations={"headroom.gpu/policy": policy})
    assert chosen(asked, idle, full, **sitting("B", gib)) == [best]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"healthy": False}, id="it is unhealthy"),
        pytest.param({"free": 0, "allocated": 4}, id="it has no free replica"),
        pytest.param({"memory_bytes": 4 * GIB}, id="it has too little memory"),
    ],
)
def test_a_device_does_not_close_the_node_under_these_conditions(other: dict[str, Any]) -> None:
    assert chosen("8Gi", shared("A", **other), shared("B")) == ["B"]


def test_the_reservation_names_the_chosen_device() -> None:
    node = weighed(shared("A"), shared("B"), plugin=STEERED)
    what = request("8Gi")
    snap = build([node])
    made = place(what, snap, fit(what, snap, snap.rows(["n"]), NOW_S), 0)
    assert [(c.choices, c.candidates) for c in made.charges] == [(["A"], {"A": 8 * GIB})]
    assert made.annotations["headroom.gpu/devices.0"] == "A"
    assert certainty(node) == "steered"
    assert because(node.devices[0]).startswith("Headroom chooses")


def test_new_pods_get_the_device_of_unconfirmed_pods() -> None:
    incoming = {"q": reserved("B", 8)}
    assert chosen("8Gi", shared("A"), shared("B"), reservations=incoming) == ["B"]
    node = weighed(shared("A"), shared("B"), reservations=incoming, plugin=STEERED)
    assert reason_for("20Gi", node) is Reason.OTHERS_ARRIVING
    assert because(node.devices[0]) == ("unconfirmed pods on the node must get their device first")
    few = weighed(shared("A"), shared("B", free=1), reservations=incoming, plugin=STEERED)
    assert reason_for("8Gi", few) is Reason.OTHERS_ARRIVING


def test_the_reason_comes_from_the_candidates_if_no_device_fits() -> None:
    sick = shared("A", healthy=False)
    small = shared("B", memory_bytes=4 * GIB)
    assert reason_for("8Gi", weighed(sick, small, plugin=STEERED)) is Reason.MEMORY_ON_ANY
    assert reason_for("8Gi", weighed(sick, plugin=STEERED)) is Reason.UNHEALTHY_DEVICE
    full = shared("A", free=0, allocated=4)
    assert reason_for("8Gi", weighed(full, plugin=STEERED)) is Reason.NO_REPLICA
    one_each = shared("A", free=1), shared("B", free=1)
    pair = pod("1Gi", container("a"), container("b"))
    assert reason_for(pair, weighed(*one_each, plugin=STEERED)) is Reason.NO_REPLICA


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(
            {"reservations": {"q": reservation({"A": GIB})}}, id="one pod has no reserved device"
        ),
        pytest.param(
            {"reservations": {"q": reserved("A", 1), "r": reserved("B", 1)}},
            id="two pods have different reserved devices",
        ),
        pytest.param(
            {"reservations": {"q": reserved("A", 1)}, "plugin": DISTRIBUTED},
            id="the node is no longer steered",
        ),
    ],
)
def test_every_device_counts_while_unconfirmed_pods_could_get_any(
    how: dict[str, Any],
) -> None:
    # The plugin would not choose this device next.
    small = shared("B", free=2, allocated=2, memory_bytes=8 * GIB)
    pods = [use("s", "B", replica="B::0"), use("t", "B", replica="B::1")]
    node = weighed(shared("A"), small, pods=pods, **{"plugin": STEERED, **how})
    assert reason_for("8Gi", node) is Reason.MEMORY_ON_SOME
    assert reason_for("4Gi", node) is None


def test_no_device_is_chosen_if_the_kubelet_aligns_several_numa_nodes() -> None:
    aligned = Plugin(topology_manager_policy="single-numa-node", steered=[GPU])
    apart = shared("A", numa_node=0), shared("B", numa_node=1, memory_bytes=4 * GIB)
    assert reason_for("8Gi", weighed(*apart, plugin=aligned)) is Reason.MEMORY_ON_SOME
    together = shared("A", numa_node=0), shared("B", numa_node=0, memory_bytes=4 * GIB)
    assert reason_for("8Gi", weighed(*together, plugin=aligned)) is None


def test_the_plugin_chooses_unshared_devices() -> None:
    alone = {"sharing": "none", "replicas": Replicas(free=1)}
    node = weighed(shared("A", **alone), shared("B", memory_bytes=4 * GIB, **alone), plugin=STEERED)
    assert reason_for("8Gi", node) is Reason.MEMORY_ON_SOME


def test_shared_mig_devices_are_chosen_and_their_memory_counts_once() -> None:
    sliced = {"sharing": "time-slicing", "replicas": Replicas(free=4), "memory_bytes": 24 * GIB}
    parts = mig("A", 1, **sliced), mig("B", 1, **sliced), mig("C", 2, **sliced)
    assert len(chosen("8Gi", *parts)) == 1
    assert chosen("16Gi", *parts, **sitting("A", 10)) == ["C"]
    assert chosen("8Gi", *parts, **sitting("A", 10)) in (["A"], ["B"])


REPLICAS = 4
MEMORY_GIB = 24
#: Memory of each device: its own, or shared with another MIG device.
GPUS = {"A": "A", "B": "B"}
INSTANCES = {"A": "A+B", "B": "A+B", "C": "C"}


@dataclass
class SteeredNode:
    """A node with its actual state, and the state that each component has seen."""

    memory_of: dict[str, str]
    #: Pod and GiB of each replica in the kubelet.
    held: dict[str, tuple[str, int]] = field(default_factory=dict)
    #: Entries of the checkpoint, which drops ended pods only at the next admission.
    entries: list[Entry] = field(default_factory=list)
    reservations: dict[str, Reservation] = field(default_factory=dict)
    #: Bound pods that were neither admitted nor deleted.
    bound: dict[str, Pod] = field(default_factory=dict)
    #: The status of the GPUNode.
    told: Any = None
    rejections: int = 0

    def free(self) -> list[str]:
        every = [f"{uuid}::{n}" for uuid in self.memory_of for n in range(REPLICAS)]
        return [replica for replica in every if replica not in self.held]

    def predicted(self) -> bool:
        """Return whether an unconfirmed pod has a predicted reservation."""
        on_their_way = (self.reservations[uid] for uid in self.bound)
        return any(
            not charge.choices for reservation in on_their_way for charge in reservation.charges
        )

    def excess_gib(self) -> dict[str, int]:
        taken = ((self.memory_of[replica[0]], gib) for replica, (_, gib) in self.held.items())
        return excess(taken, dict.fromkeys(self.memory_of.values(), MEMORY_GIB))

    def report(self, steered: bool) -> None:
        taken = Counter(replica[0] for replica in self.held)
        memories = sorted(set(self.memory_of.values()))
        devices = [
            mig(
                uuid,
                memories.index(memory),
                sharing="time-slicing",
                replicas=Replicas(free=REPLICAS - taken[uuid], allocated=taken[uuid]),
                memory_bytes=MEMORY_GIB * GIB,
            )
            for uuid, memory in self.memory_of.items()
        ]
        pods = [use(uid, replica[0], replica=replica) for replica, (uid, _) in self.held.items()]
        plugin = Plugin(
            allocation_policy="distributed",
            topology_manager_policy="none",
            steered=[GPU] if steered else [],
        )
        self.told = status(*devices, pods=pods, plugin=plugin)
        there = {uid for uid, _ in self.held.values()} | self.bound.keys()
        self.reservations = {uid: p for uid, p in self.reservations.items() if uid in there}

    def bind(self, uid: str, gib: int, containers: int) -> None:
        asked = pod(f"{gib}Gi", *(container(f"c{i}") for i in range(containers)), uid=uid)
        node = NodeTerms(
            "n",
            None,
            FRESH_S,
            terms(
                *self.told.devices,
                pods=self.told.pods,
                reservations=self.reservations,
                plugin=self.told.plugin,
                leaving={u.uid for u in self.told.pods} - {h[0] for h in self.held.values()},
            ),
        )
        what, snap = request(asked), build([node])
        verdicts = fit(what, snap, snap.rows(["n"]), NOW_S)
        if verdicts.fits[0]:
            charges = list(place(what, snap, verdicts, 0).charges)
            self.reservations[uid] = Reservation("default", uid, charges)
            self.bound[uid] = asked

    def admit(self, uid: str, data: DataObject) -> None:
        asked = self.bound.pop(uid)
        gib = int((asked.annotation("headroom.gpu/vram") or "")[:-2])
        for each in asked.spec.containers or []:
            self.entries = [
                e for e in self.entries if e.pod_uid in {h[0] for h in self.held.values()}
            ]
            replica = self._answer(data)
            if replica is None:
                self.rejections += 1
                return
            self.held[replica] = (uid, gib)
            self.entries.append(Entry(uid, each.name, GPU, (replica,)))

    def _answer(self, data: DataObject) -> str | None:
        wanted = ContainerRequest(tuple(self.free()), (), 1)
        steered = GPU in self.told.plugin.steered
        spec = GPUNodeSpec(True, self.reservations)
        found = choose(wanted, GPU, spec, self.told, self.entries, Limits(0, 0), steered)
        if isinstance(found, NoRoom):
            return None
        if found.replicas:
            return found.replicas[0]
        taken = Counter(replica[0] for replica in self.held)
        fewest = min(taken[replica[0]] for replica in wanted.available)
        return data.draw(
            st.sampled_from([r for r in wanted.available if taken[r[0]] == fewest]), label="plugin"
        )


@pytest.mark.parametrize(
    "memory_of", [GPUS, INSTANCES], ids=["separate devices", "two devices share memory"]
)
@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_no_interleaving_rejects_a_reserved_pod_or_overcommits(
    memory_of: dict[str, str], data: DataObject
) -> None:
    world, number = SteeredNode(memory_of), count()
    world.report(steered=data.draw(st.booleans(), label="steered at first"))
    for step in data.draw(st.lists(st.sampled_from("bbbbaaarrd"), max_size=16), label="steps"):
        match step:
            case "b":
                gib = data.draw(st.sampled_from([2, 6, 8, 12, 16, 20]), label="GiB")
                containers = data.draw(st.sampled_from([1, 1, 1, 2]), label="containers")
                world.bind(f"u{next(number)}", gib, containers)
            case "a" if world.bound:
                which = data.draw(st.sampled_from(sorted(world.bound)), label="admitted")
                world.admit(which, data)
            case "r":
                world.report(steered=data.draw(st.booleans(), label="steered"))
            # A freed replica can change a prediction, so no replica is freed while a pod depends on
            # one.
            case "d" if world.held and not world.predicted():
                uids = sorted({uid for uid, _ in world.held.values()})
                gone = data.draw(st.sampled_from(uids), label="ended")
                world.held = {r: h for r, h in world.held.items() if h[0] != gone}
        assert world.excess_gib() == {}
    for uid in sorted(world.bound, key=lambda uid: data.draw(st.integers(), label=uid)):
        world.admit(uid, data)
        assert world.excess_gib() == {}
    assert world.rejections == 0
