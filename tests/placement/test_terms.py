"""Tests the value of each score term, and that it decides if all other terms are equal."""

from math import inf
from typing import Any

import msgspec
import pytest

from headroom.contract.annotations import POLICY
from headroom.contract.gpunode import Device, SmActivity
from headroom.contract.kube import Pod
from headroom.core.placement.fit import fit
from headroom.core.placement.policy import Weights
from headroom.core.placement.score import rank
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.placement.snapshot_builder import build
from tests.builders import (
    DISTRIBUTED,
    FRESH_S,
    GIB,
    GPU,
    NOW_S,
    device,
    pod,
    request,
    reservation,
    shared,
    use,
    weighed,
)


def message(term: str, asked: Pod, *nodes: NodeTerms, now_s: float = NOW_S) -> list[float]:
    """Return the value of the term for each node."""
    snap = build(nodes)
    rows = snap.rows([node.name for node in nodes])
    ranking = rank(fit(request(asked), snap, rows, now_s), Weights())
    return [round(float(value), 6) for value in ranking.terms[term]]


def winner(asked: Pod, *nodes: NodeTerms, now_s: float = NOW_S) -> str:
    snap = build(nodes)
    rows = snap.rows([node.name for node in nodes])
    place = rank(fit(request(asked), snap, rows, now_s), Weights()).winner
    assert place is not None
    return nodes[place].name


def busy(uuid: str, ratio: float | None, **how: Any) -> Device:
    activity = None if ratio is None else SmActivity(ratio, "dcgm")
    return shared(uuid, sm_activity=activity, **how)


def always_wins(name: str, vram: str, *nodes: NodeTerms, now_s: float = NOW_S) -> bool:
    """Return whether the node wins for several pods and in both orders."""
    return all(
        winner(pod(vram, uid=str(uid)), *order, now_s=now_s) == name
        for uid in range(8)
        for order in (nodes, nodes[::-1])
    )


class TestPacking:
    def holding(self, name: str, gib: int) -> NodeTerms:
        return weighed(shared(name), name=name, reservations={"u": reservation({name: gib * GIB})})

    def test_packing_is_the_fill_of_the_device_plus_a_small_part_for_the_node(self) -> None:
        pair = weighed(shared("x"), shared("y"), name="pair")
        one = self.holding("one", 4)
        # The devices have 16 and 12 of 24 GiB free, and the nodes 40 of 48 and 12 of 24 GiB.
        assert message("packing", pod("8Gi"), pair, one) == pytest.approx(
            [1 - (4 * 16 / 24 + 40 / 48) / 5, 1 - (4 * 12 / 24 + 12 / 24) / 5], abs=1e-6
        )

    def test_spreading_is_the_opposite_of_packing(self) -> None:
        asked = pod("8Gi", annotations={POLICY: "spread"})
        empty, full = self.holding("empty", 0), self.holding("full", 12)
        assert message("packing", asked, empty, full) == pytest.approx([2 / 3, 1 / 6], abs=1e-6)


class TestActivity:
    def test_activity_is_the_idle_share_of_the_busiest_candidate(self) -> None:
        full_up = busy("g", 1.0, free=0, allocated=4)
        nodes = (
            weighed(busy("a", 0.25), busy("b", 0.75), name="both"),
            weighed(busy("c", 0.25), busy("d", None), name="half-known"),
            weighed(busy("e", None), name="unknown"),
            weighed(busy("f", 0.0), full_up, name="full-up", plugin=DISTRIBUTED),
        )
        assert message("sm_activity", pod("1Gi"), *nodes) == [0.25, 0.75, 0.5, 1.0]

    def test_the_idler_node_wins(self) -> None:
        quiet, loud = (
            weighed(busy(f"{name}-0", ratio), name=name)
            for name, ratio in (("quiet", 0.2), ("loud", 0.9))
        )
        assert always_wins("quiet", "4Gi", quiet, loud)


class TestSlack:
    def node(self, name: str, asked_gib: int, used_gib: int) -> NodeTerms:
        return weighed(
            shared(name, 3, 1, used_bytes=used_gib * GIB),
            name=name,
            pods=[use("u", name, used_gib * GIB, replica="r")],
            reservations={"u": reservation({name: asked_gib * GIB})},
        )

    def test_slack_is_the_overuse_of_the_other_pods_on_the_device(self) -> None:
        nodes = self.node("honest", 12, 12), self.node("frugal", 12, 1), self.node("greedy", 6, 12)
        assert message("slack", pod("1Gi"), *nodes) == [1, 1, 0.75]

    def test_neighbours_without_overuse_are_preferred(self) -> None:
        """The charges on both nodes are equal."""
        honest, greedy = self.node("honest", 12, 12), self.node("greedy", 6, 12)
        assert always_wins("honest", "4Gi", honest, greedy)


class TestPrediction:
    def node(self, name: str, *held_gib: int, **how: Any) -> NodeTerms:
        """Return a node whose devices have a pod of this many GiB and three free replicas each."""
        how = {"plugin": DISTRIBUTED, **how}
        uuids = [f"{name}-{i}" for i in range(len(held_gib))]
        return weighed(
            *(
                shared(uuid, 3, 1, used_bytes=gib * GIB)
                for uuid, gib in zip(uuids, held_gib, strict=True)
            ),
            name=name,
            pods=[
                use(uuid, uuid, gib * GIB, replica=uuid)
                for uuid, gib in zip(uuids, held_gib, strict=True)
            ],
            reservations={
                uuid: reservation({uuid: gib * GIB})
                for uuid, gib in zip(uuids, held_gib, strict=True)
            },
            **how,
        )

    def test_one_device_is_more_predictable_than_two(self) -> None:
        """The pod is also the first of its level. It leaves 16 of 24 GiB free, and a quarter of 8
        GiB counts.
        """
        alone, two = self.node("alone", 4), self.node("two", 4, 4)
        assert message("prediction", pod("4Gi"), alone, two) == pytest.approx(
            [(8 * 0.5 + 1 + 1) / 10, (8 * (0.5 - 2 / 48) + 0.5 + 1) / 10], abs=1e-6
        )

    def test_a_full_device_that_could_become_the_next_choice_lowers_the_term(self) -> None:
        """The full device becomes the plugin's next choice when one of its replicas is released."""
        safe = weighed(shared("a", 4, 0), shared("b", 3, 1), name="safe", plugin=DISTRIBUTED)
        risky = weighed(
            shared("c", 4, 0),
            shared("d", 3, 1, used_bytes=20 * GIB),
            name="risky",
            plugin=DISTRIBUTED,
            pods=[use("u", "d", 20 * GIB, replica="r")],
            reservations={"u": reservation({"d": 20 * GIB})},
        )
        found = message("prediction", pod("8Gi"), safe, risky)
        assert found[0] > found[1]

    def test_on_steered_nodes_the_prediction_is_certain(self) -> None:
        steered = weighed(
            shared("a", 3, 1),
            shared("b", 3, 1),
            name="steered",
            plugin=msgspec.structs.replace(DISTRIBUTED, steered=[GPU]),
        )
        assert message("prediction", pod("8Gi"), steered) == [0.6]


class TestSmallestDevice:
    def test_the_smallest_device_that_fits_is_preferred(self) -> None:
        large, small = (
            weighed(device(name, memory_bytes=gib * GIB), name=name)
            for name, gib in (("large", 80), ("small", 40))
        )
        assert message("smallest_device", pod("8Gi"), large, small) == pytest.approx(
            [24 / 104, 24 / 64], abs=1e-6
        )
        assert always_wins("small", "8Gi", large, small)
        assert winner(pod("60Gi"), large, small) == "large"


class TestReport:
    def node(self, name: str, **how: Any) -> NodeTerms:
        return msgspec.structs.replace(weighed(shared(name), name=name), **how)

    def test_the_term_decreases_with_the_age_of_the_report(self) -> None:
        ageing = self.node("ageing", ageing_from_s=FRESH_S - 40)
        young, labels = self.node("young", ageing_from_s=FRESH_S), self.node("labels")
        labels = msgspec.structs.replace(labels, fresh_until_s=inf, ageing_from_s=inf)
        nodes = ageing, young, labels
        assert message("report", pod("1Gi"), *nodes, now_s=FRESH_S - 50) == [1, 1, 1]
        assert message("report", pod("1Gi"), *nodes, now_s=FRESH_S - 30) == [0.75, 1, 1]
        assert message("report", pod("1Gi"), *nodes, now_s=FRESH_S) == [0, 1, 1]

    def test_a_degraded_report_counts_half(self) -> None:
        whole, degraded = self.node("whole"), self.node("degraded", degraded=True)
        labels = self.node("labels", unmeasured="read from labels")
        assert message("report", pod("1Gi"), whole, degraded, labels) == [1, 0.5, 0.5]
        assert always_wins("whole", "4Gi", whole, degraded)

    def test_the_newer_report_wins(self) -> None:
        ageing = self.node("ageing", ageing_from_s=FRESH_S - 40)
        assert always_wins("young", "4Gi", ageing, self.node("young"), now_s=FRESH_S - 10)
