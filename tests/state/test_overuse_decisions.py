"""Tests which pods are evicted because they use more than they reserved, according to the state of
the cluster.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.contract.gpunode import ADOPTED, GPUNode, OveruseEviction, Reservation
from headroom.contract.kube import OwnerReference, Pod
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.overuse.decisions import (
    OverusingPod,
    overuse_evictions_on,
    overusing_pods,
)
from headroom.core.overuse.selection import OveruseEvictions
from headroom.core.placement.policy import Rules
from tests.builders import GIB, MIB, NOW_S, gpunode, kube_node, reservation, shared, use
from tests.builders import pod as plain_pod
from tests.recording import RecordingState

EVICT = Rules(evict_overuse=True)
WALL_S = 1_795_219_200.0  # 2026-11-21T00:00:00Z
ON_OVERUSE = "headroom.gpu/on-overuse"


def pod(
    uid: str,
    on_overuse: str | None = None,
    priority: int = 0,
    annotations: Mapping[str, str] | None = None,
    owners: Sequence[OwnerReference] | None = None,
    **of: Any,
) -> Pod:
    own = {} if on_overuse is None else {ON_OVERUSE: on_overuse}
    made = plain_pod(uid=uid, name=uid, node="n", annotations={**own, **(annotations or {})}, **of)
    return msgspec.structs.replace(
        made,
        metadata=msgspec.structs.replace(made.metadata, owner_references=owners),
        spec=msgspec.structs.replace(made.spec, priority=priority),
    )


def reserved(
    count_gib: float, *flags: str, decided: bool = False, namespace: str = "default"
) -> Reservation:
    made = reservation({"a": int(count_gib * GIB)})
    decision = OveruseEviction("a") if decided else msgspec.UNSET
    return msgspec.structs.replace(made, flags=list(flags), overuse=decision, namespace=namespace)


def rejected(count_gib: float = 8, **of: Any) -> Reservation:
    """Return the reservation of a pod whose eviction was rejected, written by a replica whose clock
    is an hour ahead.
    """
    decision = OveruseEviction("a", rejected_at="2026-11-21T01:00:00.5+00:00")
    return msgspec.structs.replace(reserved(count_gib, **of), overuse=decision)


def node_of(
    reservations: Mapping[str, Reservation],
    used_gib: Mapping[str, float | None],
    unattributed_gib: float = 0,
    **of: Any,
) -> GPUNode:
    """Return a node with one GPU of 24 GiB."""
    total = sum(used or 0 for used in used_gib.values()) + unattributed_gib
    figures = {"used_bytes": int(total * GIB), "unattributed_bytes": int(unattributed_gib * GIB)}
    return gpunode(
        shared("a", free=1, allocated=len(used_gib), **{**figures, **of}),
        reservations=reservations,
        pods=[
            use(uid, "a", None if used is None else int(used * GIB))
            for uid, used in used_gib.items()
        ],
    )


def found(
    node: GPUNode,
    *pods: Pod,
    rules: Rules = EVICT,
    after_s: float = 0,
) -> OveruseEvictions:
    state = RecordingState(rules, 90.0, WALL_S - NOW_S)
    state.apply([NodeSeen(kube_node()), *map(PodSeen, pods), GPUNodeSeen(node, NOW_S)])
    return overuse_evictions_on(state.cluster, node, NOW_S + after_s)


def leaking(used_gib: float = 14, **of: Any) -> GPUNode:
    """Return a node where pod p has reserved 8 GiB, and pod q has reserved 12 GiB and uses 2
    GiB.
    """
    return node_of({"p": reserved(8), "q": reserved(12)}, {"p": used_gib, "q": 2}, **of)


def selected(node: GPUNode, *pods: Pod, **of: Any) -> set[str]:
    return set(found(node, *(pods or (pod("p"), pod("q"))), **of).selected)


@pytest.mark.parametrize(
    ("used_gib", "evicted"),
    [
        pytest.param(8, set(), id="within its reservation"),
        pytest.param(12, set(), id="the neighbour's other 10 GiB are free"),
        pytest.param(12 + 1 / 1024, {"p"}, id="the neighbour uses its other 10 GiB"),
        pytest.param(21, {"p"}, id="much more than its reservation"),
    ],
)
def test_a_pod_is_evicted_when_its_neighbour_lacks_reserved_memory(
    used_gib: float, evicted: set[str]
) -> None:
    assert selected(leaking(used_gib)) == evicted


@pytest.mark.parametrize(
    ("used_gib", "evicted"),
    [
        pytest.param(8.5, False, id="512 MiB, about a CUDA context"),
        pytest.param(8.5 + 1 / 1024, True, id="more"),
    ],
)
def test_a_small_excess_is_tolerated(used_gib: float, evicted: bool) -> None:
    node = node_of({"p": reserved(8), "q": reserved(16)}, {"p": used_gib, "q": 2})
    result = found(node, pod("p"), pod("q"))
    assert set(result.selected) == ({"p"} if evicted else set())
    assert result.unresolved == (() if evicted else ("a",))
    (over,) = shown(node, pod("p"), pod("q")).values()
    assert over.outcome == ("next" if evicted else "none")
    if not evicted:
        assert over.message.startswith(
            "not evicted, because it uses at most 0.5 GiB more than it reserved; only"
        )


def test_free_memory_is_measured_on_the_device() -> None:
    over = found(leaking(), pod("p"), pod("q")).selected["p"]
    assert (over.device, over.reserved_bytes, over.used_bytes) == ("a", 8 * GIB, 14 * GIB)
    assert (over.free_bytes, over.needed_bytes, over.excess_bytes) == (8 * GIB, 10 * GIB, 6 * GIB)


def test_a_device_without_the_free_margin_is_under_pressure() -> None:
    full = node_of({"p": reserved(8), "q": reserved(12)}, {"p": 11.8, "q": 12})
    assert selected(full) == {"p"}  # 205 MiB of 256 MiB
    spare = node_of({"p": reserved(8), "q": reserved(12)}, {"p": 11.7, "q": 12})
    assert selected(spare) == set()  # 307 MiB
    assert selected(spare, rules=Rules(evict_overuse=True, overuse_margin_bytes=512 * MIB)) == {"p"}


@pytest.mark.parametrize(
    ("grace_s", "evicted"),
    [
        pytest.param(120, set(), id="it ends soon"),
        pytest.param(121, {"p"}, id="its author lets it run for longer"),
        pytest.param(315_360_000, {"p"}, id="its author lets it run for ten years"),
    ],
)
def test_a_pod_that_ends_too_late_is_evicted(grace_s: int, evicted: set[str]) -> None:
    deleted = pod("p")
    metadata = msgspec.structs.replace(
        deleted.metadata,
        deletion_timestamp="2036-11-21T00:00:00Z",
        deletion_grace_period_seconds=grace_s,
    )
    deleted = msgspec.structs.replace(deleted, metadata=metadata)
    assert selected(leaking(), deleted, pod("q")) == evicted


def test_unattributed_use_alone_evicts_no_pod() -> None:
    node = node_of({"p": reserved(8), "q": reserved(12)}, {"p": 8, "q": 2}, unattributed_gib=9)
    assert found(node, pod("p"), pod("q")) == OveruseEvictions({})


def test_a_pod_alone_on_its_device_is_not_evicted() -> None:
    assert selected(node_of({"p": reserved(8)}, {"p": 23.9}), pod("p")) == set()


@pytest.mark.parametrize(
    ("rules", "wish", "evicted"),
    [
        (Rules(), None, False),
        (Rules(), "evict", True),
        (Rules(), "report", False),
        (EVICT, None, True),
        (EVICT, "report", True),
        (Rules(evict_overuse=True, overuse_opt_out=True), "report", False),
        (EVICT, "never", True),
        (Rules(), "never", False),
    ],
)
def test_the_setting_and_the_annotation_decide(
    rules: Rules, wish: str | None, evicted: bool
) -> None:
    result = found(leaking(), pod("p", wish), pod("q"), rules=rules)
    assert set(result.selected) == ({"p"} if evicted else set())
    assert result.unresolved == (() if evicted else ("a",))


class TestExemptions:
    """No field that a pod's author can set exempts the pod from eviction or harms another tenant.

    Pod p of namespace attacker has reserved 1 GiB and uses 13.9 GiB. Pod q of namespace victim has
    reserved 8 GiB and uses 9 GiB. Pod r has reserved 4 GiB and uses none.
    """

    RESERVED: ClassVar = {"p": 1, "q": 8, "r": 4}
    NAMESPACES: ClassVar = {"p": "attacker", "q": "victim", "r": "victim"}

    def node(self, **of_p: Any) -> GPUNode:
        held = {
            uid: reserved(gib, namespace=self.NAMESPACES[uid]) for uid, gib in self.RESERVED.items()
        }
        changed = msgspec.structs.replace(held["p"], **of_p)
        return node_of(held | {"p": changed}, {"p": 13.9, "q": 9, "r": 0})

    @pytest.mark.parametrize(
        "attacker",
        [
            pytest.param(pod("p"), id="nothing"),
            pytest.param(pod("p", "report"), id="report, which the setting does not allow"),
            pytest.param(pod("p", "never"), id="an unreadable annotation"),
            pytest.param(pod("p", priority=1), id="a higher priority"),
            pytest.param(pod("p", priority=1_000_000_000), id="the highest priority of users"),
            pytest.param(pod("p", priority=2_000_001_000), id="a priority of the system"),
            pytest.param(
                pod("p", owners=[OwnerReference(kind="Node", name="n")]),
                id="an owner of kind Node",
            ),
            pytest.param(pod("p", annotations={"headroom.gpu/vram": "80Gi"}), id="another amount"),
        ],
    )
    def test_the_largest_offender_is_evicted_whatever_its_author_wrote(self, attacker: Pod) -> None:
        assert selected(self.node(), attacker, pod("q"), pod("r")) == {"p"}

    def test_a_pod_of_another_scheduler_is_not_exempt(self) -> None:
        assert selected(self.node(flags=[ADOPTED]), pod("p"), pod("q"), pod("r")) == {"p"}

    @pytest.mark.parametrize(
        ("attacker", "rules"),
        [
            pytest.param(pod("p"), Rules(), id="it did not opt in, q did"),
            pytest.param(
                pod("p", "report"),
                Rules(evict_overuse=True, overuse_opt_out=True),
                id="the administrator lets authors opt out",
            ),
            pytest.param(
                pod("p", annotations={"kubernetes.io/config.mirror": "x"}), EVICT, id="static pod"
            ),
        ],
    )
    def test_no_pod_of_another_namespace_is_evicted_in_place_of_an_exempt_offender(
        self, attacker: Pod, rules: Rules
    ) -> None:
        result = found(self.node(), attacker, pod("q", "evict"), pod("r"), rules=rules)
        assert (result.selected, result.unresolved) == ({}, ("a",))
        over = shown(self.node(), attacker, pod("q", "evict"), pod("r"), rules=rules)
        assert over["q"].outcome == "protected"
        assert over["q"].message.startswith(
            "not evicted, because a pod of another namespace exceeds its reservation by more but "
            "may not be evicted; only 1.1 GiB"
        )

    def test_no_pod_of_another_namespace_is_evicted_if_a_budget_protects_the_offender(self) -> None:
        budget = OveruseEviction("a", rejected_at="2026-11-21T00:00:00+00:00")
        node = self.node(overuse=budget)
        result = found(node, pod("p"), pod("q"), pod("r"), after_s=29)
        assert (result.selected, result.unresolved) == ({}, ("a",))

    def test_a_smaller_offender_of_the_same_namespace_is_evicted(self) -> None:
        held = {"p": reserved(1), "q": reserved(8), "r": reserved(4, namespace="other")}
        node = node_of(held, {"p": 13.9, "q": 9, "r": 0})
        assert selected(node, pod("p"), pod("q", "evict"), pod("r"), rules=Rules()) == {"q"}

    def test_an_unreserved_pod_claims_no_memory_that_others_reserved(self) -> None:
        """The author of p wrote 80 GiB, so p stays within its charge. q uses 0.6 GiB more than it
        reserved, and r lacks 3 GiB.
        """
        held = {
            "p": reserved(80, ADOPTED, namespace="attacker"),
            "q": reserved(8, namespace="victim"),
            "r": reserved(8, namespace="victim"),
        }
        node = node_of(held, {"p": 14, "q": 8.6, "r": 0})
        over = found(node, pod("p"), pod("q"), pod("r")).selected
        assert {uid: each.reserved_bytes for uid, each in over.items()} == {"p": 8 * GIB}

    def test_an_unreserved_pod_that_uses_no_memory_puts_no_device_under_pressure(self) -> None:
        held = {"p": reserved(80, ADOPTED, namespace="attacker"), "q": reserved(8)}
        node = node_of(held, {"p": 0, "q": 8.6})
        assert found(node, pod("p"), pod("q")) == OveruseEvictions({})


def test_unreserved_pods_share_the_memory_without_reservations() -> None:
    held = {"p": reserved(40, ADOPTED), "q": reserved(20, ADOPTED), "r": reserved(12)}
    node = node_of(held, {"p": 10, "q": 3, "r": 1})
    over = found(node, pod("p"), pod("q"), pod("r")).selected
    assert {uid: each.reserved_bytes for uid, each in over.items()} == {"p": 8 * GIB}


@pytest.mark.parametrize(
    ("pods", "reservations"),
    [
        pytest.param([pod("p")], {"p": rejected()}, id="held by a disruption budget"),
        pytest.param([], {}, id="not on this node"),
        pytest.param(
            [pod("p", annotations={"kubernetes.io/config.mirror": "x"})], {}, id="static pod"
        ),
    ],
)
def test_other_pods_are_never_evicted(
    pods: list[Pod], reservations: dict[str, Reservation]
) -> None:
    node = node_of({"p": reserved(8), "q": reserved(12), **reservations}, {"p": 14, "q": 2})
    assert selected(node, *pods, pod("q")) == set()


def test_a_pod_whose_eviction_was_rejected_is_selected_again_later_whatever_the_clocks_show() -> (
    None
):
    node = node_of({"p": rejected(), "q": reserved(12)}, {"p": 14, "q": 2})
    assert selected(node, after_s=29) == set()
    assert selected(node, after_s=31) == {"p"}


def test_the_largest_relative_excess_comes_first_and_then_the_lowest_priority() -> None:
    held = {"p": reserved(2), "q": reserved(8), "r": reserved(12)}
    node = node_of(held, {"p": 5, "q": 12, "r": 2})  # 3 of 2 GiB, and 4 of 8 GiB
    everyone = pod("p", priority=5), pod("q"), pod("r", priority=-1)
    assert selected(node, *everyone) == {"p"}
    held = {"p": reserved(4), "q": reserved(4), "r": reserved(12)}
    equal = node_of(held, {"p": 7, "q": 7, "r": 2})
    assert selected(equal, pod("p"), pod("q"), pod("r")) == {"p"}
    assert selected(equal, pod("p", priority=1), pod("q"), pod("r")) == {"q"}


def test_a_warned_pod_stays_warned_when_another_pod_exceeds_it() -> None:
    held = {"p": reserved(4, decided=True), "q": reserved(4), "r": reserved(12)}
    result = found(node_of(held, {"p": 6, "q": 9, "r": 2}), pod("p"), pod("q"), pod("r"))
    assert (set(result.selected), set(result.warned)) == ({"q"}, {"p"})
    assert set(result.decided) == {"p", "q"}


def test_an_eviction_for_one_device_spares_the_pods_of_another_device() -> None:
    both = msgspec.structs.replace(
        reservation({"a": 4 * GIB, "b": 4 * GIB}, count=2), namespace="default"
    )
    on_b = msgspec.structs.replace(reservation({"b": 4 * GIB}), namespace="default")
    node = gpunode(
        shared("a", free=1, allocated=2, used_bytes=22 * GIB),
        shared("b", free=1, allocated=2, used_bytes=23 * GIB),
        reservations={"p": both, "q": reserved(12), "r": on_b},
        pods=[
            use("p", "a", 20 * GIB),
            use("p", "b", 17 * GIB),
            use("q", "a", 2 * GIB),
            use("r", "b", 6 * GIB),
        ],
    )
    assert selected(node, pod("p"), pod("q"), pod("r")) == {"p"}


def test_memory_of_a_terminating_pod_counts_as_free() -> None:
    held = {"p": reserved(4, decided=True), "q": reserved(4), "r": reserved(12)}
    going = pod("p", deleted="2026-11-21T00:00:00Z")
    node = node_of(held, {"p": 9, "q": 5, "r": 2})
    assert selected(node, going, pod("q"), pod("r")) == set()
    assert selected(node, pod("q"), pod("r")) == set()  # The pod is gone, but the report is old.
    assert selected(node_of(held, {"p": 9, "q": 13, "r": 2}), going, pod("q"), pod("r")) == {"q"}


def test_nothing_is_decided_from_a_stale_or_missing_report() -> None:
    assert selected(leaking(), after_s=91) == set()
    assert selected(msgspec.structs.replace(leaking(), status=None)) == set()


@pytest.mark.parametrize("used_gib", [-1, 25])
def test_a_device_with_unknown_or_implausible_use_is_not_under_pressure(used_gib: int) -> None:
    assert selected(leaking(used_bytes=used_gib * GIB)) == set()


def test_no_pod_is_evicted_for_a_neighbour_with_unknown_use() -> None:
    node = node_of({"p": reserved(8), "q": reserved(12)}, {"p": 14, "q": None})
    assert selected(node) == set()


figures = st.integers(0, 20).map(lambda halves: halves / 2)


@given(st.lists(st.tuples(figures, figures, st.integers(-1, 1)), min_size=1, max_size=4))
def test_only_a_pod_above_its_reservation_on_a_device_that_lacks_memory_is_evicted(
    pods: list[tuple[float, float, int]],
) -> None:
    """Each pod has its reserved GiB, used GiB and priority."""
    if sum(used for _, used, _ in pods) > 24 or any(not reserved for reserved, _, _ in pods):
        return
    names = {f"p{i}": each for i, each in enumerate(pods)}
    node = node_of(
        {name: reserved(asked) for name, (asked, _, _) in names.items()},
        {name: used for name, (_, used, _) in names.items()},
    )
    result = selected(node, *(pod(name, priority=rank) for name, (_, _, rank) in names.items()))
    free = 24 - sum(used for _, used, _ in pods)
    claimed = sum(max(0.0, asked - used) for asked, used, _ in pods)
    over = {name for name, (asked, used, _) in names.items() if used > asked}
    lacking = free < max(0.25, claimed) and len(pods) > 1

    def relative(name: str) -> Fraction:
        asked, used, _ = names[name]
        return Fraction(used - asked - 0.5) / Fraction(asked)

    offenders = [name for name in over if relative(name) > 0]
    assert len(result) == (1 if offenders and lacking else 0)
    for name in result:
        first = min(offenders, key=lambda each: (-relative(each), names[each][2], each))
        assert name == first


def shown(
    node: GPUNode, *pods: Pod, rules: Rules = EVICT, observes: bool = False, after_s: float = 0
) -> dict[str, OverusingPod]:
    """Return the pods of the node that use more than they reserved, by name."""
    state = RecordingState(rules, 90.0, WALL_S - NOW_S)
    state.apply([NodeSeen(kube_node()), *map(PodSeen, pods), GPUNodeSeen(node, NOW_S)])
    snap = state.cluster.snapshot()
    terms = snap.nodes[snap.row_of["n"]]
    return {
        each.uid: each for each in overusing_pods(state.cluster, terms, NOW_S + after_s, observes)
    }


LACKING = "only 8.0 GiB of its GPU are free, and the other pods there need 10.0 GiB"


@pytest.mark.parametrize(
    ("held", "of_p", "rules", "outcome", "why"),
    [
        pytest.param(reserved(8), {}, EVICT, "next", "evicted next", id="not decided yet"),
        pytest.param(
            reserved(8, decided=True), {}, EVICT, "evicting", "evicted within seconds", id="decided"
        ),
        pytest.param(
            rejected(),
            {},
            EVICT,
            "rejected",
            "its eviction was rejected at 2026-11-21T01:00:00Z, for example by a "
            "PodDisruptionBudget, and is tried again after 30 s",
            id="held by a budget",
        ),
        pytest.param(
            reserved(8),
            {},
            Rules(),
            "protected",
            "not evicted, because setting on_overuse is report, and it has no annotation "
            "headroom.gpu/on-overuse: evict",
            id="only reported",
        ),
        pytest.param(
            reserved(8),
            {"on_overuse": "report"},
            Rules(evict_overuse=True, overuse_opt_out=True),
            "protected",
            "not evicted, because it has the annotation headroom.gpu/on-overuse: report",
            id="excluded",
        ),
        pytest.param(
            reserved(8),
            {"annotations": {"kubernetes.io/config.mirror": "x"}},
            EVICT,
            "protected",
            "not evicted, because it is a static pod",
            id="static",
        ),
    ],
)
def test_the_reason_why_an_overusing_pod_is_evicted_or_kept_is_shown(
    held: Reservation, of_p: dict[str, Any], rules: Rules, outcome: str, why: str
) -> None:
    node = node_of({"p": held, "q": reserved(12)}, {"p": 14, "q": 2})
    (over,) = shown(node, pod("p", **of_p), pod("q"), rules=rules).values()
    assert (over.outcome, over.message) == (outcome, f"{why}; {LACKING}")
    figures = over.reserved_bytes, over.used_bytes, over.free_bytes, over.needed_bytes
    assert figures == (8 * GIB, 14 * GIB, 8 * GIB, 10 * GIB)


def test_a_pod_is_shown_as_selected_exactly_if_it_is_selected() -> None:
    held = {"p": reserved(4), "q": reserved(4), "r": reserved(12)}
    node = node_of(held, {"p": 6, "q": 7, "r": 2})
    over = shown(node, pod("p"), pod("q"), pod("r"))
    assert {uid: each.outcome for uid, each in over.items()} == {"p": "other", "q": "next"}
    assert selected(node, pod("p"), pod("q"), pod("r")) == {"q"}
    assert over["p"].message.startswith("not evicted now, because another pod is evicted first")


def test_an_overusing_pod_that_takes_no_reserved_memory_is_shown_as_kept() -> None:
    (over,) = shown(leaking(12), pod("p"), pod("q")).values()
    assert (over.outcome, over.message) == (
        "none",
        "not evicted, because 10.0 GiB of its GPU are free, and the other pods there need 10.0 GiB",
    )
    (alone,) = shown(node_of({"p": reserved(8)}, {"p": 23.9}), pod("p")).values()
    assert (alone.outcome, alone.message) == (
        "none",
        "not evicted, because no other pod is on its GPU",
    )


def test_an_evicted_pod_is_shown_until_it_ends() -> None:
    held = {"p": reserved(8, decided=True), "q": reserved(12)}
    going = pod("p", deleted="2026-11-21T00:00:00Z")
    (over,) = shown(node_of(held, {"p": 14, "q": 2}), going, pod("q")).values()
    assert (over.outcome, over.message) == (
        "ending",
        "it was evicted for its overuse, and is terminating",
    )
    (other,) = shown(leaking(), going, pod("q")).values()
    assert (other.outcome, other.message) == ("ending", "it is being deleted")


def test_mode_observe_shows_would_be_evictions() -> None:
    (over,) = shown(leaking(), pod("p"), pod("q"), observes=True).values()
    expected = f"would be evicted if the mode were not observe; {LACKING}"
    assert (over.outcome, over.message) == ("observed", expected)
    (kept,) = shown(leaking(12), pod("p"), pod("q"), observes=True).values()
    assert kept.outcome == "none"


def test_no_overuse_is_shown_without_a_fresh_report() -> None:
    assert not shown(leaking(), pod("p"), pod("q"), after_s=91)
    assert not shown(leaking(8), pod("p"), pod("q"))
