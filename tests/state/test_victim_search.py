"""Tests on small clusters how victims are found for the preempt calls of kube-scheduler."""

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from headroom.contract.annotations import CORDON, DEVICE_CHOICE
from headroom.contract.gpunode import Plugin
from headroom.contract.kube import (
    Affinity,
    DisruptionBudgetSpec,
    DisruptionBudgetStatus,
    LabelSelector,
    ObjectMeta,
    Pod,
    PodDisruptionBudget,
    Present,
    ResourceRequirements,
)
from headroom.contract.watched import BudgetGone, BudgetSeen, PodSeen, Relisted
from headroom.core.cluster.changes import Event
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.preemption.report import answered
from headroom.core.preemption.victim_search import Offer, Preemption, preemption
from tests.builders import DISTRIBUTED, GPU, NOW_S, container
from tests.state.evictions import On, full_node, newcomer
from tests.state.states import state_of

MIRRORED = "kubernetes.io/config.mirror"

#: Deletion time of a terminating pod, seconds ahead on the clock of these tests.
LEAVING = "2026-11-21T00:00:20+00:00"
OVERDUE = "2026-11-20T23:58:00+00:00"
STEERED = msgspec.structs.replace(DISTRIBUTED, steered=[GPU])
PACKED = Plugin(allocation_policy="packed", topology_manager_policy="none")


def found(
    *clusters: Sequence[Event],
    of: Pod,
    offered: Mapping[str, Sequence[str]] | None = None,
    rejected: Sequence[str] = (),
    state: ClusterWriter | None = None,
    careful: bool = False,
) -> Preemption:
    state = state or state_of(*(event for events in clusters for event in events))
    offers = {node: Offer(tuple(uids)) for node, uids in (offered or {}).items()}
    return preemption(state.cluster, of, offers, rejected, NOW_S, without_violations=careful)


def shown(result: Preemption) -> dict[str, list[str]]:
    return {each.node: list(each.uids) for each in answered(result)}


ONE_DEVICE = [On("a", 6), On("b", 6), On("c", 6), On("d", 6)]


@pytest.mark.parametrize(
    ("cluster", "gib", "offered", "leave"),
    [
        pytest.param(
            [ONE_DEVICE],
            12,
            {"n": ["a"]},
            {"n": ["a", "b"]},
            id="enlarged if one pod is not enough",
        ),
        pytest.param([ONE_DEVICE], 25, {"n": ["a"]}, {}, id="dropped if no eviction helps"),
        pytest.param(
            [[On("a", 20, 5), On("b", 1, 1)], [On("c", 21, 5), On("d", 1, 1)]],
            12,
            {"n": ["b"]},
            {"n": ["a"]},
            id="replaced if the proposed pods free memory on several devices",
        ),
        pytest.param(
            # The plugin chooses the device with the fewest allocated replicas, so the new pod gets
            # the second device only if the victims make it the emptier device.
            [[On("a", 10, 50)], [On("b", 8), On("c", 8), On("d", 8)]],
            16,
            {"n": ["b"]},
            {"n": ["b", "c", "d"]},
            id="three rather than one of higher priority, as the plugin follows the replicas",
        ),
        pytest.param(
            [[On("a", 20, 200)], [On("b", 20, 0)]],
            20,
            {"n": ["a"]},
            {"n": ["b"]},
            id="no pod of higher priority",
        ),
        pytest.param(
            [[On("a", 20, 100)], [On("b", 20, 100)]],
            20,
            {"n": ["a"]},
            {},
            id="no pod of equal priority",
        ),
        pytest.param(
            [[On("a", 20, annotations={MIRRORED: "x"})]],
            20,
            {"n": ["a"]},
            {},
            id="no static pod",
        ),
        pytest.param([[On("a", 20, 2_000_000_000)]], 20, {"n": ["a"]}, {}, id="no critical pod"),
    ],
)
def test_victims_are_found_on_an_offered_node(
    cluster: list[list[On]], gib: int, offered: dict[str, list[str]], leave: dict[str, list[str]]
) -> None:
    result = found(full_node("n", *cluster), of=newcomer(gib), offered=offered)
    assert {node: set(uids) for node, uids in shown(result).items()} == {
        node: set(uids) for node, uids in leave.items()
    }


def test_no_pod_is_evicted_from_a_cordoned_device() -> None:
    def victims(*devices: Sequence[On], gib: int, cordoned: str = "") -> dict[str, list[str]]:
        cluster = full_node("n", *devices, annotations={CORDON: cordoned})
        return shown(found(cluster, of=newcomer(gib), offered={"n": ["a"]}))

    assert victims(ONE_DEVICE, gib=12) == {"n": ["a", "b"]}
    assert victims(ONE_DEVICE, gib=12, cordoned="n-0") == {}
    two = [On("a", 20)], [On("b", 20)]
    assert victims(*two, gib=20) == {"n": ["a"]}
    assert victims(*two, gib=20, cordoned="n-0") == {"n": ["b"]}


def test_the_pods_of_each_device_are_tried_on_a_node_with_many_pods() -> None:
    """Among all pods, the search would spare a, which is as important and comes first."""
    devices = [On("a", 10), *(On(uid, 2) for uid in "bcdef")], [On(uid, 3) for uid in "ghijkl"]
    node = full_node("n", *devices, replicas=8)
    assert shown(found(node, of=newcomer(12), offered={"n": ["b"]})) == {"n": ["a"]}


def test_a_critical_preemptor_does_not_evict_critical_pods() -> None:
    system = newcomer(20, priority=2_000_001_000)
    node = full_node("n", [On("a", 20, 2_000_000_000)])
    assert shown(found(node, of=system, offered={"n": ["a"]})) == {}


def test_a_pod_with_preemption_policy_never_evicts_no_pod() -> None:
    never = newcomer(20, preemption_policy="Never")
    assert shown(found(full_node("n", [On("a", 20)]), of=never, offered={"n": ["a"]})) == {}


LARGE = [On("a", 10, 1), On("b", 10, 1)], [On("c", 20, 1)]
SMALL = [On("a", 10, 1), On("b", 10, 1)], [On("c", 2, 1)]


@pytest.mark.parametrize(
    ("devices", "plugin", "annotations", "leave"),
    [
        pytest.param(LARGE, DISTRIBUTED, {}, {"c"}, id="distributed takes the emptier device"),
        pytest.param(LARGE, PACKED, {}, {"a", "b", "c"}, id="packed prefers a device in use"),
        pytest.param(SMALL, PACKED, {}, {"a", "b"}, id="packed takes the fuller device"),
        pytest.param(LARGE, Plugin(), {}, {"a", "b", "c"}, id="unknown takes any"),
        pytest.param(
            LARGE, STEERED, {DEVICE_CHOICE: "steered"}, {"c"}, id="steered takes the best device"
        ),
    ],
)
def test_every_device_that_the_pod_could_get_must_have_enough_memory(
    devices: tuple[list[On], ...], plugin: Plugin, annotations: dict[str, str], leave: set[str]
) -> None:
    node = full_node("n", *devices, plugin=plugin, annotations=annotations)
    result = found(node, of=newcomer(20), rejected=["n"])
    assert result.best is not None
    assert set(result.best.uids) == leave


SETS = msgspec.structs.replace(STEERED, steers_several=True, fail_requests_greater_than_one=False)


@pytest.mark.parametrize(
    ("devices", "gpus", "leave"),
    [
        pytest.param(
            [[On("a", 20, 1)], [On("b", 20, 9)], [On("c", 20, 2)]],
            2,
            {"a", "c"},
            id="the least important pods of two devices",
        ),
        pytest.param(
            [[On("a", 20, 1)], [On("b", 1, 1)], [On("c", 20, 9)]],
            2,
            {"a"},
            id="one device has enough memory already",
        ),
        pytest.param(
            [[On("a", 20, 1)], [On("b", 20, 200)]], 2, None, id="a more important pod on one"
        ),
        pytest.param(
            [
                [On(uid, 5, 1) for uid in "abcd"],
                [On(uid, 5, 2) for uid in "efgh"],
                [On(uid, 5, 3) for uid in "ijkl"],
            ],
            2,
            {*"abcdefgh"},
            id="many pods",
        ),
    ],
)
def test_victims_leave_several_devices_at_once(
    devices: list[list[On]], gpus: int, leave: set[str] | None
) -> None:
    """On a steered node, a container with several replicas needs as many different devices."""
    node = full_node("n", *devices, plugin=SETS, annotations={DEVICE_CHOICE: "steered"})
    of = newcomer(20)
    resources = ResourceRequirements(limits={GPU: str(gpus)})
    main = msgspec.structs.replace(container(), resources=resources)
    of = msgspec.structs.replace(of, spec=msgspec.structs.replace(of.spec, containers=[main]))
    result = found(node, of=of, rejected=["n"])
    assert (None if result.best is None else set(result.best.uids)) == leave


def test_the_best_node_and_worse_nodes_are_returned() -> None:
    clusters = [
        full_node("cheap", [On("a", 20, 1)]),
        full_node("dear", [On("b", 20, 9)]),
        full_node("same", [On("c", 20, 1)]),
        full_node("small", [On("d", 8, 1)], gib=8),
    ]
    offered = {"dear": ["b"], "cheap": ["a"], "same": ["c"], "small": ["d"]}
    result = found(*clusters, of=newcomer(20), offered=offered)
    # "same" would be equally good for kube-scheduler, so its choice would be unknown.
    assert shown(result) == {"cheap": ["a"], "dear": ["b"]}
    assert result.helpless == 1
    assert [other.node for other in result.others] == ["same", "dear"]


def test_a_node_that_was_not_offered_is_added_only_when_it_is_better() -> None:
    clusters = [full_node("offered", [On("a", 20, 5)]), full_node("rejected", [On("b", 20, 5)])]
    best = found(*clusters, of=newcomer(20), offered={"offered": ["a"]}, rejected=["rejected"])
    assert shown(best) == {"offered": ["a"]}
    clusters[1] = full_node("rejected", [On("b", 20, 4)])
    best = found(*clusters, of=newcomer(20), offered={"offered": ["a"]}, rejected=["rejected"])
    assert shown(best) == {"rejected": ["b"], "offered": ["a"]}
    assert best.best is not None
    assert not best.best.offered


def test_victims_without_a_gpu_stay_if_kube_scheduler_needs_them() -> None:
    """kube-scheduler evicts them for CPU, which Headroom does not count, and there is enough GPU
    memory."""
    node = full_node("n", [On("a", 4, 1)])
    assert shown(found(node, of=newcomer(20), offered={"n": ["stranger"]})) == {"n": ["stranger"]}
    assert shown(found(node, of=newcomer(21), offered={"n": ["stranger"]})) == {
        "n": ["a", "stranger"]
    }


def test_other_victims_free_at_least_as_much_of_each_resource() -> None:
    """kube-scheduler proposes a because of its 8 CPU. For the memory, evicting b would suffice."""
    devices = [On("a", 2, 3, cpu="8")], [On("b", 20, 3, cpu="4")]
    node = full_node("n", *devices)
    assert set(shown(found(node, of=newcomer(20), offered={"n": ["a"]}))["n"]) == {"a"}
    small = [On("a", 10, 3, cpu="8")], [On("b", 20, 1, cpu="9")]
    node = full_node("n", *small)
    assert set(shown(found(node, of=newcomer(20), offered={"n": ["a"]}))["n"]) == {"b"}


def test_victims_that_may_be_needed_for_other_reasons_are_never_replaced() -> None:
    of = newcomer(20)
    affine = Affinity(pod_anti_affinity=Present())
    of = msgspec.structs.replace(of, spec=msgspec.structs.replace(of.spec, affinity=affine))
    devices = [On("a", 20, 5)], [On("b", 20, 1)]
    node = full_node("n", *devices)
    assert shown(found(node, of=newcomer(20), offered={"n": ["a"]})) == {"n": ["b"]}
    assert shown(found(node, of=of, offered={"n": ["a"]})) == {"n": ["a"]}


def test_terminating_pods_are_preferred_as_victims() -> None:
    clusters = [
        full_node("leaving", [On("a", 20, 50, deleted=LEAVING)]),
        full_node("full", [On("b", 20, 1)]),
    ]
    result = found(*clusters, of=newcomer(20), offered={"full": ["b"]}, rejected=["leaving"])
    assert shown(result) == {"leaving": ["a"]}
    dear = full_node("full", [On("b", 20, 60)])
    result = found(
        clusters[0], dear, of=newcomer(20), offered={"full": ["b"]}, rejected=["leaving"]
    )
    assert shown(result) == {"leaving": ["a"]}
    # A terminating pod of higher priority must not be a victim, so the preemptor waits for it.
    clusters[0] = full_node("leaving", [On("a", 20, 500, deleted=LEAVING)])
    result = found(*clusters, of=newcomer(20), offered={"full": ["b"]}, rejected=["leaving"])
    assert shown(result) == {}
    assert result.soon
    # The preemptor does not wait for a pod whose deletion is overdue.
    clusters[0] = full_node("leaving", [On("a", 20, 500, deleted=OVERDUE)])
    result = found(*clusters, of=newcomer(20), offered={"full": ["b"]}, rejected=["leaving"])
    assert shown(result) == {"full": ["b"]}
    # It does not wait for an hour either, unless the pods leave because of this preemptor.
    hour = "2026-11-21T01:00:00+00:00"
    clusters[0] = full_node("leaving", [On("a", 20, 50, deleted=hour)])
    offered = {"full": ["b"], "leaving": ["a"]}
    result = found(*clusters, of=newcomer(20), offered=offered)
    assert shown(result) == {"full": ["b"], "leaving": ["a"]}
    of = newcomer(20, nominated="leaving")
    state = state_of(*clusters[0], *clusters[1], PodSeen(of))
    assert shown(found(state=state, of=of, offered={"full": ["b"]}, rejected=["leaving"])) == {
        "leaving": ["a"]
    }


def test_an_overdue_pod_is_not_evicted_again() -> None:
    node = full_node("n", [On("a", 20, 50, deleted=OVERDUE)])
    assert shown(found(node, of=newcomer(20), offered={"n": ["a"]})) == {}


def budget(allowed: int, app: str = "web", **other: object) -> PodDisruptionBudget:
    return PodDisruptionBudget(
        metadata=ObjectMeta(name="pdb", namespace="default"),
        spec=DisruptionBudgetSpec(selector=LabelSelector(match_labels={"app": app})),
        status=DisruptionBudgetStatus(disruptions_allowed=allowed),
    )


def test_a_disruption_budget_is_honoured_and_its_violations_are_counted() -> None:
    web = {"app": "web"}
    events = full_node("n", [On("a", 20, 1, labels=web)], [On("b", 20, 9)])
    state = state_of(*events)
    of, offered = newcomer(20), {"n": ["a"]}
    assert shown(found(state=state, of=of, offered=offered)) == {"n": ["a"]}
    state.apply([BudgetSeen(budget(0))])
    assert shown(found(state=state, of=of, offered=offered)) == {"n": ["b"]}
    alone = state_of(*full_node("n", [On("a", 20, 1, labels=web)]), BudgetSeen(budget(0)))
    result = found(state=alone, of=of, offered=offered)
    assert [each.pdb_violations for each in answered(result)] == [1]
    # If no violation is allowed, no pod is evicted.
    assert shown(found(state=alone, of=of, offered=offered, careful=True)) == {}
    state.apply([BudgetGone("default", "pdb")])
    assert shown(found(state=state, of=of, offered=offered)) == {"n": ["a"]}
    # Until the budgets are listed, it is unknown which pods they protect.
    state.parts.budgets.unlisted = True
    assert shown(found(state=state, of=of, offered=offered)) == {}
    state.apply([Relisted(PodDisruptionBudget, (budget(0),), NOW_S)])
    assert shown(found(state=state, of=of, offered=offered)) == {"n": ["b"]}
    state.apply([Relisted(PodDisruptionBudget, (), NOW_S)])
    assert shown(found(state=state, of=of, offered=offered)) == {"n": ["a"]}


def test_memory_held_for_a_pod_is_not_given_to_another_preemptor() -> None:
    events = full_node("n", [On("a", 10, 1), On("b", 10, 2)])
    first = newcomer(14, name="first", nominated="n", created="2026-11-21T00:30:00Z")
    second = newcomer(12, name="second")
    state = state_of(*events, PodSeen(first))
    # No eviction makes the second pod fit on the node together with the first pod.
    assert shown(found(state=state, of=second, offered={"n": ["a"]})) == {}
    assert shown(found(state=state, of=second, rejected=["n"])) == {}
    assert shown(found(state=state, of=newcomer(10, name="third"), offered={"n": ["a"]})) == {
        "n": ["b", "a"]
    }
    higher = newcomer(12, 200, name="higher")
    assert shown(found(state=state, of=higher, offered={"n": ["a"]})) == {"n": ["a"]}
