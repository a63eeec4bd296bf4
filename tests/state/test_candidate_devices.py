"""Tests candidate devices, which depend on the plugin's next choice and on the node's device
choice.
"""

from typing import ClassVar

import pytest

from headroom.contract.annotations import DEVICE_CHOICE
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Container, Pod
from headroom.contract.reasons import Reason
from headroom.core.placement.fit import fit
from headroom.core.placement.request import VramRequest
from tests.builders import (
    DISTRIBUTED,
    GIB,
    NOW_S,
    container,
    gate,
    gpunode,
    kube_node,
    pod,
    reservation,
    shared,
    use,
)
from tests.state.states import reason, seen, state_of


class TestPossibleDevices:
    """Two replicas of D0 and three of D1 are allocated. Only the memory of D1 is full."""

    devices = (shared("D0", free=2, allocated=2), shared("D1", free=1, allocated=3))
    reservations: ClassVar = {
        "uid-ends": reservation({"D1": 20 * GIB}),
        **{f"u{n}": reservation({"D1": 2 * GIB}) for n in range(2)},
        **{f"v{n}": reservation({"D0": GIB}) for n in range(2)},
    }
    rows: ClassVar = [
        use(uid, next(iter(p.charges[0].candidates))) for uid, p in reservations.items()
    ]

    def sitting(self, deleted: str | None = None) -> list[Pod]:
        stay = [uid for uid in self.reservations if uid != "uid-ends"]
        rows = [pod("2Gi", uid=uid, name=uid, node="n", phase="Running") for uid in stay]
        return [*rows, pod("20Gi", uid="uid-ends", name="ends", node="n", deleted=deleted)]

    def reported(self, **how: object) -> GPUNode:
        given = {"reservations": self.reservations, "pods": self.rows, "plugin": DISTRIBUTED, **how}
        return gpunode(*self.devices, **given)  # type: ignore[arg-type]

    @pytest.mark.parametrize("how", ["stays", "is being deleted", "is gone", "has ended"])
    def test_the_plugin_can_choose_the_device_of_an_ending_pod(self, how: str) -> None:
        """Without the pod that ends, D1 has two allocated replicas, as D0 has, and enough memory.

        The number of replicas of a pod on D0 does not change the result.
        """
        pods = self.sitting("2026-11-21T00:00:00Z" if how == "is being deleted" else None)
        if how == "is gone":
            pods.pop()
        if how == "has ended":
            pods[-1] = pod("20Gi", uid="uid-ends", name="ends", node="n", phase="Succeeded")
        state = state_of(*seen(kube_node(), self.reported(), *pods))
        snap = state.cluster.snapshot()
        assert (snap.columns.reach[0] == 1).tolist() == [True, how != "stays"]
        room = snap.columns.free_bytes[0].tolist()
        assert room == [22 * GIB, 20 * GIB if how != "stays" else 0]

    def test_a_gated_node_takes_only_gated_pods(self) -> None:
        node = kube_node(annotations={DEVICE_CHOICE: "gated"})
        state = state_of(*seen(node, self.reported(), *self.sitting()))
        plain = pod("8Gi", container())
        for made, expected in (
            (plain, Reason.NO_GATE),
            (pod("8Gi", init=[gate()]), None),
            (pod("23Gi", init=[gate()]), Reason.MEMORY_ON_ANY),
            # A gate that is not the first container blocks no start.
            (pod("8Gi", init=[Container(name="first"), gate()]), Reason.NO_GATE),
        ):
            asked = state.cluster.understand(made)
            assert isinstance(asked, VramRequest)
            snap = state.cluster.snapshot()
            assert fit(asked, snap, snap.rows(["n"]), NOW_S).reason(0) is expected
            judged = state.cluster.judge(made, self.reported(), NOW_S)
            assert (judged if isinstance(judged, Reason) else None) is expected
        # A pod that requests no GPU does not matter here.
        other = state.cluster.understand(pod(None, Container(name="main")))
        assert isinstance(other, VramRequest)
        assert fit(other, snap, snap.rows(["n"]), NOW_S).reason(0) is None

    @pytest.mark.parametrize(
        ("choice", "why"),
        [
            ("best", "is not one of predicted, gated, steered"),
            ("any", "was removed: use predicted or steered"),
            (" pinned ", "was removed: use predicted or steered"),
        ],
    )
    def test_an_invalid_node_annotation_closes_the_node(self, choice: str, why: str) -> None:
        node = kube_node(annotations={DEVICE_CHOICE: choice})
        state = state_of(*seen(node, self.reported(), *self.sitting()))
        assert reason(state) is Reason.BAD_NODE_ANNOTATION
        (terms,) = state.cluster.snapshot().nodes
        assert terms.detail == (
            f"annotation {DEVICE_CHOICE}: {choice!r} {why}. Example: {DEVICE_CHOICE}: predicted"
        )

    def test_a_device_that_is_no_longer_a_candidate_frees_memory(self) -> None:
        """D1 is full. If one more replica of D1 is in use, the plugin chooses D1 only after D0."""
        even = [shared("D0", free=2, allocated=2), shared("D1", free=2, allocated=2)]
        one_more = [even[0], shared("D1", free=1, allocated=3)]
        full = {"u": reservation({"D1": 24 * GIB})}
        rows = [
            use("u", "D1"),
            use("s", "D1", 0),
            use("t", "D0", 0),
            use("t", "D0", 0, replica="1"),
        ]
        state = state_of(
            *seen(kube_node(), *(pod("1M", uid=uid, name=uid, node="n") for uid in "ust")),
            *seen(gpunode(*even, reservations=full, pods=rows, plugin=DISTRIBUTED)),
        )
        assert reason(state) is Reason.MEMORY_ON_SOME
        before_it = state.cluster.snapshot().generation
        rows.append(use("s", "D1", 0, replica="1"))
        after = gpunode(*one_more, version="2", reservations=full, pods=rows, plugin=DISTRIBUTED)
        state.apply(seen(after))
        assert state.cluster.headroom_gains.of("n") > before_it
