"""Checks that a simulation changes nothing, and that its result equals what really happens."""

import asyncio
import contextlib
import json
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from headroom.contract.annotations import DEVICE_CHOICE, POLICY, VRAM
from headroom.contract.gpunode import Plugin
from headroom.contract.kube import NodeSpec, OwnerReference, Pod
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.fit import fit
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import VramRequest
from headroom.core.rules.eligible_nodes import Eligible, Obstacle
from headroom.core.whatif.node_whatif import count_pods, pod_counts
from headroom.core.whatif.simulation import NotPlaced, Placed, Simulation
from tests.builders import (
    DISTRIBUTED,
    GATE_IMAGE,
    GIB,
    GPU,
    NOW_S,
    container,
    device,
    gpunode,
    kube_node,
    pod,
    reservation,
    shared,
    use,
)
from tests.examples import examples
from tests.placement.worlds import RESOURCES, DrawnNode, pods, worlds
from tests.serving import binding, offer
from tests.state.digest import digest
from tests.state.states import seen, state_of
from tests.world import World

PLUGINS = (
    None,
    DISTRIBUTED,
    Plugin(allocation_policy="packed", topology_manager_policy="none"),
    Plugin(allocation_policy="distributed", topology_manager_policy="none", steered=[*RESOURCES]),
    Plugin(
        allocation_policy="distributed",
        topology_manager_policy="none",
        steered=[*RESOURCES],
        steers_several=True,
        fail_requests_greater_than_one=False,
    ),
)
STEPS = ("place", "release", "drain", "add", "replicas", "steer", "count")
CHOICES = ("predicted", "predicted", "steered")


def cluster_of(
    fleet: Sequence[DrawnNode],
    plugins: Sequence[Plugin | None] = (),
    choices: Sequence[str] = (),
) -> ClusterWriter:
    """Return a state with a node for each world. Pods with reservations on a node are known and
    bound."""
    state = state_of()
    for index, world in enumerate(fleet):
        name = f"n{index}"
        plugin = plugins[index] if index < len(plugins) else None
        choice = choices[index] if index < len(choices) else "predicted"
        state.apply(
            [
                NodeSeen(kube_node(name, {DEVICE_CHOICE: choice})),
                GPUNodeSeen(
                    gpunode(
                        *world.status.devices,
                        name=name,
                        uid=f"gn-{name}",
                        reservations={f"{u}-{name}": p for u, p in world.reservations.items()},
                        pods=[
                            use(
                                f"{row.uid}-{name}",
                                row.device,
                                row.used_bytes,
                                container=row.container,
                                replica=row.replica,
                            )
                            for row in world.status.pods
                        ],
                        plugin=plugin,
                    ),
                    NOW_S,
                ),
                *(
                    PodSeen(pod("4Gi", uid=f"{u}-{name}", name=f"{u}-{name}", node=name))
                    for u in world.reservations
                ),
            ]
        )
    return state


fleets = st.lists(worlds(), min_size=1, max_size=4)
plugins_of = st.lists(st.sampled_from(PLUGINS), min_size=4, max_size=4)
choices_of = st.lists(st.sampled_from(CHOICES), min_size=4, max_size=4)
sizes = st.sampled_from(["1Gi", "3Gi", "4Gi", "6Gi", "25%"])


def asking(vram: str, uid: str, resource: str = GPU, policy: str = "pack", gpus: int = 1) -> Pod:
    main = container(resource=resource, gpus=gpus)
    return pod(None, main, uid=uid, name=uid, annotations={VRAM: vram, POLICY: policy})


def understood(state: ClusterWriter, of: Pod) -> VramRequest:
    request = state.cluster.understand(of)
    assert isinstance(request, VramRequest)
    return request


def place_in(simulation: Simulation, state: ClusterWriter, of: Pod) -> Placed | NotPlaced:
    return simulation.place(understood(state, of), simulation.eligible(of))


@settings(max_examples=examples(75), deadline=None)
@given(fleets, plugins_of, choices_of, st.data())
def test_a_simulation_leaves_the_state_unchanged(
    fleet: list[World], plugins: list[Plugin], choices: list[str], data: DataObject
) -> None:
    state = cluster_of(fleet, plugins, choices)
    snap = state.cluster.snapshot()
    before = digest(state)
    simulation = Simulation(state.cluster, snap, NOW_S)
    names = st.sampled_from([node.name for node in snap.nodes])
    for step in range(data.draw(st.integers(1, 6))):
        match data.draw(st.sampled_from(STEPS)):
            case "place":
                some = st.one_of(pods(st.just("4Gi")), st.just(asking("1M", f"new-{step}")))
                place_in(simulation, state, data.draw(some))
            case "release":
                simulation.release(f"u{data.draw(st.integers(0, 2))}-{data.draw(names)}")
            case "drain":
                simulation.drain(data.draw(names))
            case "add":
                with contextlib.suppress(KeyError):
                    simulation.add(data.draw(names), step + 1)
            case "replicas":
                with contextlib.suppress(KeyError, ValueError):
                    simulation.set_replicas(data.draw(names), data.draw(st.integers(1, 9)))
            case "steer":
                with contextlib.suppress(KeyError, ValueError):
                    simulation.steer(data.draw(names))
                placed = place_in(simulation, state, asking("1M", f"steered-{step}"))
                if isinstance(placed, Placed):
                    simulation.confirm(f"steered-{step}", placed)
            case "count":
                request = understood(state, asking("4Gi", "c"))
                rows = np.arange(len(snap.nodes))
                verdicts = fit(request, snap, rows, NOW_S)
                list(pod_counts(state.cluster, verdicts, np.flatnonzero(verdicts.fits).tolist()))
    simulation.snapshot()
    assert digest(state) == before
    assert state.cluster.snapshot() is snap


class Real(World):
    """Places pods by kube-scheduler's calls."""

    def __init__(self, like: ClusterWriter) -> None:
        super().__init__(Rules(gate_image=GATE_IMAGE))
        self._verbs, store = self.verbs(), self.store
        self.state.apply(NodeSeen(node) for node in like.cluster.nodes())
        for each in like.cluster.gpunodes():
            made = store.create_gpunode(each)
            store.write_spec(made, each.spec)
            if each.status is not None:
                store.report([(each.name, each.status)])
        for known in like.cluster.pods():
            store.admit(known)

    def place(self, of: Pod) -> str | None:
        """Call filter, prioritize and bind. Return the node, or None if no node takes the pod."""
        self.store.admit(of)
        sent = msgspec.to_builtins(of)
        names = sorted(node.metadata.name for node in self.state.cluster.nodes())
        body = json.dumps(offer(sent, *names)).encode()
        passed = json.loads(self._verbs.filter(body))["NodeNames"]
        if not passed:
            return None
        ranked = json.loads(self._verbs.prioritize(json.dumps(offer(sent, *passed)).encode()))
        best = str(max(ranked, key=lambda each: each["Score"])["Host"])
        answer = asyncio.run(self._verbs.bind(json.dumps(binding(sent, best)).encode()))
        assert json.loads(answer)["Error"] == ""
        return best


asks = st.tuples(sizes, st.sampled_from([GPU, *RESOURCES[:2]]), st.sampled_from(["pack", "spread"]))


@settings(max_examples=examples(75), deadline=None)
@given(fleets, plugins_of, choices_of, st.lists(asks, min_size=1, max_size=8))
def test_real_placements_match_the_simulation(
    fleet: list[World],
    plugins: list[Plugin],
    choices: list[str],
    burst: list[tuple[str, str, str]],
) -> None:
    real = Real(cluster_of(fleet, plugins, choices))
    simulation = Simulation(real.state.cluster, real.state.cluster.snapshot(), NOW_S)
    incoming = [asking(vram, f"new-{i}", *how) for i, (vram, *how) in enumerate(burst)]
    shown = [place_in(simulation, real.state, each) for each in incoming]
    assert [each.node if isinstance(each, Placed) else None for each in shown] == [
        real.place(each) for each in incoming
    ]


@settings(max_examples=examples(75), deadline=None)
@given(fleets, plugins_of, choices_of, sizes, st.sampled_from(RESOURCES), st.integers(1, 2))
def test_counting_pods_equals_placing_them_one_by_one(
    fleet: list[World],
    plugins: list[Plugin],
    choices: list[str],
    vram: str,
    resource: str,
    gpus: int,
) -> None:
    state = cluster_of(fleet, plugins, choices)
    snap = state.cluster.snapshot()
    rows = np.arange(len(snap.nodes))
    verdicts = fit(understood(state, asking(vram, "c", resource, gpus=gpus)), snap, rows, NOW_S)
    found = dict(pod_counts(state.cluster, verdicts, np.flatnonzero(verdicts.fits).tolist()))
    for row in rows.tolist():
        simulation, placed = Simulation(state.cluster, snap, NOW_S), 0
        while True:
            one = understood(state, asking(vram, f"c{placed}", resource, gpus=gpus))
            at = simulation.place(one, Eligible(rows[[row]], {}))
            if isinstance(at, NotPlaced):
                break
            simulation.confirm(one.uid, at)
            placed += 1
        assert found.get(row, 0) == placed


def two_nodes() -> ClusterWriter:
    """Return two nodes with two devices of 24 GiB and four replicas each. Pod a has reserved 20 GiB
    of one device, and pod b is unreserved."""
    sits = [use("ua", "A0", 10 * GIB, replica="A0::0")]
    owners = [OwnerReference(kind="DaemonSet", name="d", controller=True)]
    daemon = pod("1Gi", uid="ud", name="d", node="a")
    metadata = msgspec.structs.replace(daemon.metadata, owner_references=owners)
    return state_of(
        *seen(
            kube_node("a"),
            kube_node("b"),
            pod("20Gi", uid="ua", name="a", node="a", phase="Running"),
            pod("6Gi", uid="ub", name="b", node="a", phase="Running", priority=7),
            msgspec.structs.replace(daemon, metadata=metadata),
            gpunode(
                shared("A0", free=3, allocated=1, used_bytes=10 * GIB),
                shared("A1"),
                name="a",
                reservations={"ua": reservation({"A0": 20 * GIB}, name="a")},
                pods=sits,
                plugin=DISTRIBUTED,
            ),
            gpunode(shared("B0"), shared("B1"), name="b", plugin=DISTRIBUTED),
        )
    )


def place_all(
    simulation: Simulation, state: ClusterWriter, vram: str, count: int
) -> list[str | None]:
    shown = [place_in(simulation, state, asking(vram, f"new-{n}")) for n in range(count)]
    return [each.node if isinstance(each, Placed) else None for each in shown]


def test_releasing_a_pod_frees_its_memory_and_its_replica() -> None:
    state = two_nodes()
    simulation = Simulation(state.cluster, state.cluster.snapshot(), NOW_S)
    assert place_all(simulation, state, "16Gi", 4) == ["b", "b", None, None]
    simulation = Simulation(state.cluster, state.cluster.snapshot(), NOW_S)
    assert simulation.release("ua") == ["a"]
    terms = next(node for node in simulation.snapshot().nodes if node.name == "a")
    assert (terms.devices[0].reservation_bytes, terms.devices[0].device.replicas.free) == (0, 4)
    assert simulation.release("nobody") == []


def test_a_drained_node_takes_no_pods_and_its_pods_are_placed_elsewhere() -> None:
    state = two_nodes()
    simulation = Simulation(state.cluster, state.cluster.snapshot(), NOW_S)
    moving = simulation.drain("a")
    assert [each.metadata.name for each in moving] == ["b", "a"]  # The pod of a DaemonSet stays.
    placed = [place_in(simulation, state, each) for each in moving]
    assert [each.node for each in placed if isinstance(each, Placed)] == ["b", "b"]
    assert set(simulation.snapshot().row_of) == {"b"}
    assert simulation.release("ua") == []  # The pod is already released.


def test_added_nodes_are_idle_copies_of_the_given_node() -> None:
    state = two_nodes()
    simulation = Simulation(state.cluster, state.cluster.snapshot(), NOW_S)
    assert simulation.add("a", 2) == ["a+1", "a+2"]
    assert simulation.add("a", 1) == ["a+3"]
    assert place_all(simulation, state, "24Gi", 9).count(None) == 1
    with pytest.raises(KeyError):
        simulation.add("nowhere", 1)


def test_additional_replicas_take_more_pods_and_keep_allocated_replicas() -> None:
    state = two_nodes()
    simulation = Simulation(state.cluster, state.cluster.snapshot(), NOW_S)
    assert place_all(simulation, state, "1Gi", 20).count(None) == 12
    simulation = Simulation(state.cluster, state.cluster.snapshot(), NOW_S)
    simulation.set_replicas("b", 8)
    assert place_all(simulation, state, "1Gi", 20).count(None) == 4
    half = gpunode(shared("A0", free=2, allocated=2), name="c")
    crowded = state_of(*seen(kube_node("c"), half))
    simulation = Simulation(crowded.cluster, crowded.cluster.snapshot(), NOW_S)
    with pytest.raises(ValueError, match="A0 has 2 replicas in use or unhealthy"):
        simulation.set_replicas("c", 1)


def test_rejections_count_the_nodes_of_each_reason_and_ineligible_nodes() -> None:
    state = two_nodes()
    (cordoned,) = (node for node in state.cluster.nodes() if node.metadata.name == "b")
    closed = msgspec.structs.replace(cordoned, spec=NodeSpec(unschedulable=True))
    state.apply([NodeSeen(closed)])
    simulation = Simulation(state.cluster, state.cluster.snapshot(), NOW_S)
    shown = place_in(simulation, state, asking("16Gi", "new"))
    assert shown == NotPlaced({Reason.MEMORY_ON_SOME: 1}, [(Obstacle("cordoned"), 1)])
    assert simulation.eligible(asking("1Gi", "new")).rows.tolist() == [
        state.cluster.snapshot().row_of["a"]
    ]


def test_the_number_of_pods_is_limited_by_replicas_and_by_memory() -> None:
    state = two_nodes()
    b = state.cluster.gpunode("b")
    assert b is not None
    for vram, count in (("1Gi", 8), ("8Gi", 6), ("13Gi", 2), ("25Gi", 0)):
        assert count_pods(state.cluster, b, understood(state, asking(vram, "c")), 8, NOW_S) == count


@pytest.mark.parametrize(
    ("gpus", "vram", "count"),
    [
        pytest.param(1, "8Gi", 24, id="one GPU"),
        pytest.param(2, "8Gi", 12, id="two GPUs"),
        pytest.param(2, "100%", 4, id="two whole GPUs"),
        pytest.param(3, "8Gi", 6, id="three GPUs, and two GPUs remain empty"),
        pytest.param(8, "5Gi", 4, id="eight GPUs"),
        pytest.param(9, "1Gi", 0, id="more than the node has"),
    ],
)
def test_a_steered_node_fills_all_its_gpus_with_sets(gpus: int, vram: str, count: int) -> None:
    """The node has eight GPUs of 24 GiB and four replicas each."""
    steered = PLUGINS[-1]
    assert steered is not None
    plugin = msgspec.structs.replace(steered, steered=[GPU])
    node = gpunode(*(shared(f"G{n}") for n in range(8)), name="b", plugin=plugin)
    state = state_of(*seen(kube_node("b"), node))
    request = understood(state, asking(vram, "c", gpus=gpus))
    assert count_pods(state.cluster, node, request, 32 // gpus, NOW_S) == count


def test_a_steered_node_takes_the_next_pod_when_the_last_one_is_confirmed() -> None:
    outsider = {"used_bytes": 10 * GIB, "unattributed_bytes": 10 * GIB}
    devices = shared("A"), shared("B", free=3, allocated=1, **outsider)
    state = state_of(*seen(kube_node("n"), gpunode(*devices, plugin=DISTRIBUTED)))
    simulation = Simulation(state.cluster, state.cluster.snapshot(), NOW_S)
    simulation.steer("n")
    small, large = asking("8Gi", "small"), asking("20Gi", "large")
    placed = place_in(simulation, state, small)
    assert isinstance(placed, Placed)
    assert [charge.choices for charge in placed.placement.charges] == [["B"]]
    # The kubelet does not name the pod of its call, so other devices wait.
    assert place_in(simulation, state, large) == NotPlaced({Reason.OTHERS_ARRIVING: 1}, [])
    simulation.confirm("small", placed)
    largest = place_in(simulation, state, large)
    assert isinstance(largest, Placed)
    assert [charge.choices for charge in largest.placement.charges] == [["A"]]
    # 24 - 10 - 8 GiB remain free on B.
    assert not simulation.fits(understood(state, asking("7Gi", "next")), "n")
    simulation.confirm("large", largest)
    assert simulation.fits(understood(state, asking("6Gi", "next")), "n")
    assert not simulation.fits(understood(state, asking("7Gi", "next")), "n")


def test_a_node_without_shared_devices_cannot_be_steered() -> None:
    state = state_of(*seen(kube_node("n"), gpunode(device("A"))))
    simulation = Simulation(state.cluster, state.cluster.snapshot(), NOW_S)
    with pytest.raises(ValueError, match="no device of n is shared"):
        simulation.steer("n")
    with pytest.raises(KeyError):
        simulation.steer("other")


def test_pods_that_start_alone_are_placed_as_if_each_had_started() -> None:
    """A start ends by itself, so a what-if only considers memory."""
    state = state_of(NodeSeen(kube_node("n")), GPUNodeSeen(gpunode(shared("a")), NOW_S))
    simulation = Simulation(state.cluster, state.cluster.snapshot(), NOW_S)
    alone = {VRAM: "8Gi", "headroom.gpu/startup": "alone"}
    engines = [pod(uid=f"u{i}", name=f"p{i}", annotations=alone) for i in range(4)]
    placed = [place_in(simulation, state, engine) for engine in engines]
    assert [type(each) for each in placed] == [Placed, Placed, Placed, NotPlaced]
    assert isinstance(placed[3], NotPlaced)
    assert placed[3].reasons == {Reason.MEMORY_ON_ANY: 1}
