"""Tests on small clusters which pods should move for a pending pod, or to free a node."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from headroom.console.facts.defrag import Advice, Effort, for_node, for_pod
from headroom.console.facts.movable_pods import Movers, Stays, charged_bytes
from headroom.contract.annotations import CORDON, ON_OVERUSE
from headroom.contract.gpunode import Charge, ContainerCharge
from headroom.contract.kept_fields import kept_pod
from headroom.contract.kube import (
    DisruptionBudgetSpec,
    DisruptionBudgetStatus,
    LabelSelector,
    NodeSpec,
    ObjectMeta,
    OwnerReference,
    Pod,
    PodDisruptionBudget,
    Present,
    ResourceRequirements,
    Taint,
    Volume,
)
from headroom.contract.watched import BudgetSeen, NodeSeen, PodSeen
from headroom.core.cluster.changes import Event
from headroom.core.cluster.cluster_writer import ClusterWriter
from tests.builders import DISTRIBUTED, GIB, GPU, NOW_S
from tests.state.digest import digest
from tests.state.evictions import On, full_node, newcomer
from tests.state.states import state_of

STEERED = msgspec.structs.replace(DISTRIBUTED, steered=[GPU])
SETS = msgspec.structs.replace(STEERED, steers_several=True, fail_requests_greater_than_one=False)
#: Deletion time of a terminating pod, seconds ahead on the clock of these tests.
LEAVING = "2026-11-21T00:00:20+00:00"


def owned(events: Sequence[Event], kind: str = "ReplicaSet", **spec: Any) -> list[Event]:
    """Give the pods a controller of this kind, or none if it is empty. ``spec`` replaces fields."""
    owners = [OwnerReference(kind=kind, name="set", uid="set", controller=True)] if kind else None
    found: list[Event] = []
    for event in events:
        if isinstance(event, PodSeen):
            of = event.pod
            metadata = msgspec.structs.replace(of.metadata, owner_references=owners)
            of = msgspec.structs.replace(
                of, metadata=metadata, spec=msgspec.structs.replace(of.spec, **spec)
            )
            event = PodSeen(of)
        found.append(event)
    return found


def world(*nodes: Sequence[Event]) -> ClusterWriter:
    return state_of(*(event for node in nodes for event in node))


def node(name: str, *devices: Sequence[On], **how: Any) -> list[Event]:
    return owned(full_node(name, *devices, **how))


def movers(state: ClusterWriter) -> Movers:
    return Movers(state.cluster, state.cluster.snapshot(), NOW_S, ["default-scheduler"])


def advised(state: ClusterWriter, of: Pod, name: str = "", effort: Effort | None = None) -> Advice:
    state.apply([PodSeen(of)])
    state.cluster.snapshot()
    before = digest(state)
    advice = for_pod(movers(state), of, effort or Effort(), name)
    assert digest(state) == before
    return advice


def moved(advice: Advice) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(each.pod.metadata.name, advice.node, each.places) for each in advice.moves]


#: 8 GiB are free on n, 18 on b, and 16 on c. A pod of 20 GiB fits nowhere.
FRAGMENTED = (
    node("n", [On("n-10", 10), On("n-6", 6)]),
    node("b", [On("b-6", 6)]),
    node("c", [On("c-8", 8)]),
)


def test_one_pod_is_moved_if_two_other_nodes_could_take_it() -> None:
    advice = advised(world(*FRAGMENTED), newcomer(20))
    assert advice.outcome == "move"
    # Moving the only pod of b or c frees 24 GiB there. Moving one pod of n frees at most 18 GiB.
    assert moved(advice) == [("b-6", "b", ("n", "c"))]
    assert (advice.devices, advice.gain_bytes) == (("b-0",), 20 * GIB)
    assert advice.moves[0].reserved_bytes == 6 * GIB


def test_containers_on_one_device_are_counted_once() -> None:
    both = [ContainerCharge("a", 1, 4 * GIB), ContainerCharge("b", 1, 6 * GIB)]
    assert (
        charged_bytes(Charge(GPU, 2, {"G": 10 * GIB}, choices=["G"], containers=both)) == 10 * GIB
    )
    pair = Charge(GPU, 2, dict.fromkeys("GH", 8 * GIB), choices=["G", "H"])
    assert charged_bytes(pair) == 16 * GIB


def test_the_search_can_be_limited_to_a_node() -> None:
    both = advised(world(*FRAGMENTED), newcomer(20), "n")
    assert {(name, at) for name, at, _ in moved(both)} == {("n-10", "n"), ("n-6", "n")}
    # The largest pod is moved first. The next pod is placed with that memory in use.
    assert [each.pod.metadata.name for each in both.moves] == ["n-10", "n-6"]
    assert [set(each.places) for each in both.moves] == [{"b", "c"}, {"b", "c"}]


def test_a_named_node_may_be_cordoned_but_not_tainted() -> None:
    """A client can cordon the node while its pods move."""
    for spec, outcome in (
        (NodeSpec(unschedulable=True), "move"),
        (NodeSpec(taints=[Taint(key="team", effect="NoSchedule")]), "none"),
    ):
        state = world(*FRAGMENTED)
        (of_b,) = (each for each in state.cluster.nodes() if each.metadata.name == "b")
        state.apply([NodeSeen(msgspec.structs.replace(of_b, spec=spec))])
        assert advised(state, newcomer(20), "b").outcome == outcome


def test_a_pod_that_fits_on_only_one_other_node_is_not_moved() -> None:
    advice = advised(world(*FRAGMENTED[:2]), newcomer(20))
    assert (advice.outcome, advice.moves) == ("none", ())
    assert advice.stay == {Stays.PLACES: 3}


def test_memory_used_by_an_earlier_move_no_longer_counts() -> None:
    """Two pods of 10 GiB must leave n. Each pod fits on b and on c, but neither node has space for
    both pods.
    """
    full = node("n", [On("n-1", 10), On("n-2", 10)])
    small = [node(name, [On(f"{name}-13", 13)]) for name in ("b", "c")]
    pair = advised(world(full, *small), newcomer(24))
    assert pair.outcome == "none"
    more = advised(world(full, *small, node("d", [On("d-13", 13)])), newcomer(24))
    assert [len(each.places) for each in more.moves] == [3, 2]


def test_no_pod_is_moved_if_the_pending_pod_fits_or_another_pod_is_ending() -> None:
    fits = advised(world(*FRAGMENTED), newcomer(16))
    assert (fits.outcome, fits.moves) == ("fits", ())
    ending = node("n", [On("n-10", 10, deleted=LEAVING), On("n-2", 2)])
    soon = advised(world(ending, *FRAGMENTED[1:]), newcomer(20))
    assert (soon.outcome, soon.node, soon.moves) == ("soon", "n", ())


STAYING = [
    pytest.param({"kind": ""}, {}, Stays.CONTROLLER, id="a bare pod"),
    pytest.param({"kind": "DaemonSet"}, {}, Stays.CONTROLLER, id="a pod of a DaemonSet"),
    pytest.param({}, {"priority": 101}, Stays.PRIORITY, id="a pod of higher priority"),
    pytest.param(
        {}, {"annotations": {ON_OVERUSE: "report"}}, Stays.ANNOTATION, id="a pod that opted out"
    ),
    pytest.param({"scheduler_name": "other"}, {}, Stays.SCHEDULER, id="a pod of another scheduler"),
    pytest.param(
        {"topology_spread_constraints": [Present()]},
        {},
        Stays.UNMODELED,
        id="a pod with a topology spread",
    ),
]


@pytest.mark.parametrize(("how", "on", "reason"), STAYING)
def test_pods_that_must_stay_are_counted_by_reason(
    how: dict[str, Any], on: dict[str, Any], reason: Stays
) -> None:
    stays = owned(full_node("b", [On("b-6", 6, **on)]), **how)
    state = world(*FRAGMENTED[::2], stays)
    advice = advised(state, newcomer(20))
    assert "b-6" not in {name for name, _, _ in moved(advice)}
    assert advice.stay[reason] == 1


def test_a_pod_of_equal_priority_moves() -> None:
    of_b = node("b", [On("b-6", 6, priority=100)])
    advice = advised(world(of_b, *FRAGMENTED[::2]), newcomer(20, priority=100))
    assert moved(advice) == [("b-6", "b", ("n", "c"))]


@pytest.mark.parametrize("kind", ["StatefulSet", "Job", "ReplicationController"])
def test_pods_move_if_their_controller_creates_them_elsewhere(kind: str) -> None:
    state = world(owned(full_node("b", [On("b-6", 6)]), kind), *FRAGMENTED[::2])
    assert moved(advised(state, newcomer(20))) == [("b-6", "b", ("n", "c"))]


def test_the_state_records_that_a_bound_pod_has_a_claim() -> None:
    (event,) = [each for each in FRAGMENTED[1] if isinstance(each, PodSeen)]
    volumes = [Volume(), Volume(persistent_volume_claim=Present())]
    spec = msgspec.structs.replace(event.pod.spec, volumes=volumes)
    kept = kept_pod(msgspec.structs.replace(event.pod, spec=spec))
    assert kept.spec.volumes == volumes[1:]
    state = world(*FRAGMENTED)
    state.apply([PodSeen(kept)])
    assert movers(state).why_stays(kept) is Stays.UNMODELED


@pytest.mark.parametrize(("allowed", "first"), [(0, "c-8"), (1, "b-6")])
def test_a_disruption_budget_protects_its_pods(allowed: int, first: str) -> None:
    state = world(
        node("b", [On("b-6", 6, labels={"app": "x"})]), node("c", [On("c-8", 8)]), FRAGMENTED[0]
    )
    budget = PodDisruptionBudget(
        metadata=ObjectMeta(name="x", namespace="default"),
        spec=DisruptionBudgetSpec(selector=LabelSelector(match_labels={"app": "x"})),
        status=DisruptionBudgetStatus(disruptions_allowed=allowed),
    )
    state.apply([BudgetSeen(budget)])
    advice = advised(state, newcomer(20))
    # Moving c-8 frees c: it fits on b and on n.
    assert [name for name, _, _ in moved(advice)] == [first]
    assert advice.stay.get(Stays.BUDGET, 0) == 1 - allowed


def test_pods_are_not_moved_to_cordoned_devices_or_nodes() -> None:
    cordoned = node("c", [On("c-8", 8)], annotations={CORDON: "c-0"})
    assert advised(world(*FRAGMENTED[:2], cordoned), newcomer(20)).outcome == "none"
    state = world(*FRAGMENTED)
    (of_c,) = (each for each in state.cluster.nodes() if each.metadata.name == "c")
    spec = NodeSpec(unschedulable=True)
    state.apply([NodeSeen(msgspec.structs.replace(of_c, spec=spec))])
    assert advised(state, newcomer(20)).outcome == "none"


def test_without_steering_the_pod_must_fit_whichever_device_the_plugin_chooses() -> None:
    """Moving small-1 makes GPU 0 the plugin's choice, which then has 22 GiB free. Moving small-2
    makes the plugin choose GPU 1, where only 6 GiB are free.
    """
    devices = [On("keep", 2), On("small-1", 4)], [On("big", 14), On("small-2", 4)]
    places = node("b", [On("b-18", 18)]), node("c", [On("c-18", 18)])
    predicted = advised(world(node("n", *devices), *places), newcomer(22))
    assert [(n, at) for n, at, _ in moved(predicted)] == [("small-1", "n")]
    assert predicted.devices == ("n-0",)


def several(of: Pod, gpus: int) -> Pod:
    """Return the pod with a request for this number of GPUs."""
    (main,) = of.spec.containers
    limits = {**(main.resources.limits or {}), GPU: str(gpus)}
    main = msgspec.structs.replace(main, resources=ResourceRequirements(limits=limits))
    return msgspec.structs.replace(of, spec=msgspec.structs.replace(of.spec, containers=[main]))


def halves(name: str, gib: int) -> list[Event]:
    """Return a steered node with two GPUs, each with a pod of this size."""
    return node(name, [On(f"{name}-0", gib)], [On(f"{name}-1", gib)], plugin=SETS)


def test_a_pod_with_two_gpus_gets_a_set_of_different_gpus() -> None:
    """GPU 2 of n lacks memory, so moving one pod helps if the set is GPUs 0 and 1."""
    of_n = node("n", [On("n-10", 10)], [On("n-6", 6)], [On("n-20", 20)], plugin=SETS)
    advice = advised(world(of_n, halves("b", 12), halves("c", 12)), several(newcomer(16), 2))
    assert moved(advice) == [("n-10", "n", ("b", "c"))]
    assert (advice.devices, advice.gain_bytes) == (("n-0", "n-1"), 32 * GIB)


def test_successors_on_steered_nodes_get_different_gpus_one_after_the_other() -> None:
    """Both successors fit on b and on c. A node reserves another GPU only after the first successor
    got its GPU.
    """
    nodes = halves("n", 11), halves("b", 13), halves("c", 13)
    advice = advised(world(*nodes), several(newcomer(20), 2), "n")
    assert [(name, set(places)) for name, _, places in moved(advice)] == [
        ("n-0", {"b", "c"}),
        ("n-1", {"b", "c"}),
    ]
    assert advice.devices == ("n-0", "n-1")
    assert for_node(movers(world(*nodes)), Effort(), "n").outcome == "move"


def test_a_node_is_freed_by_the_fewest_moves() -> None:
    state = world(*FRAGMENTED)
    advice = for_node(movers(state), Effort())
    assert moved(advice) == [("b-6", "b", ("n", "c"))]
    assert (advice.devices, advice.gain_bytes) == (("b-0",), 24 * GIB)
    named = for_node(movers(state), Effort(), "n")
    assert {name for name, _, _ in moved(named)} == {"n-10", "n-6"}
    assert named.gain_bytes == 24 * GIB


def test_a_node_with_a_pod_that_must_stay_is_not_freed() -> None:
    bare = owned(full_node("b", [On("b-6", 6)]), "")
    state = world(FRAGMENTED[0], bare, node("c"))
    named = for_node(movers(state), Effort(), "b")
    assert (named.outcome, named.stay) == ("none", {Stays.CONTROLLER: 1})
    assert for_node(movers(state), Effort(), "c").outcome == "free"
    gone = owned(full_node("b", [On("b-6", 6, deleted=LEAVING)]))
    assert for_node(movers(world(gone, *FRAGMENTED[::2])), Effort(), "b").outcome == "soon"


def test_the_search_is_limited_and_reports_that() -> None:
    late = Effort(is_over=lambda: True)
    assert advised(world(*FRAGMENTED), newcomer(20), effort=late).outcome == "none"
    assert (late.cut_short, late.nodes) == (True, 0)
    tried = Effort(tries_left=1)
    full = [node(f"n{i}", [On(f"a{i}", 11), On(f"b{i}", 11)]) for i in range(4)]
    assert advised(world(*full), newcomer(20), effort=tried).outcome == "none"
    assert tried.nodes == 4
    enough = Effort()
    assert advised(world(*FRAGMENTED), newcomer(20), effort=enough).outcome == "move"
    assert (enough.cut_short, enough.nodes) == (False, 3)
