"""Tests the checks of an installation under load with invented changes."""

from collections.abc import Sequence

import pytest

from tests.follow import Object
from tests.install.load import GPUNODES, Changes
from tests.install.workloads import PODS


def pod(revision: int, node: str = "", ends: bool = False) -> Object:
    metadata = {"name": "p", "uid": "u", "resourceVersion": str(revision)}
    metadata |= {"deletionTimestamp": "now"} if ends else {}
    return {"metadata": metadata, "spec": {"nodeName": node} if node else {}}


def gpunode(revision: int, *uids: str) -> Object:
    metadata = {"name": "n", "resourceVersion": str(revision)}
    return {"metadata": metadata, "spec": {"reservations": {uid: {} for uid in uids}}}


def faults(pods: Sequence[Object], gpunodes: Sequence[Object], gap: Sequence[Object] = ()) -> int:
    changes = Changes()
    for path, seen in ((PODS, [pod(1), *pods, pod(99)]), (GPUNODES, gpunodes)):
        listen = changes.listener(path)
        listen("LISTED", seen[:1])
        for each in seen[1:]:
            listen("MODIFIED", [each])
    changes.listener(GPUNODES)("LISTED", gap)
    changes.listener(GPUNODES)("MODIFIED", [gpunode(98, "u")])
    assert changes.compared == 0
    return len(changes.faults())


BOUND = [pod(3), pod(5, "n")]


@pytest.mark.parametrize(
    ("pods", "gpunodes", "count"),
    [
        (BOUND, [gpunode(2), gpunode(4, "u")], 0),
        (
            BOUND,
            [gpunode(2), gpunode(6, "u")],
            1,
        ),  # The reservation is written only after the binding.
        (BOUND, [gpunode(2), gpunode(4, "other")], 1),
        # missing for a moment
        (BOUND, [gpunode(2), gpunode(4, "u"), gpunode(6), gpunode(7, "u")], 1),
        ([*BOUND, pod(8, "n", ends=True)], [gpunode(2), gpunode(4, "u"), gpunode(9)], 0),
        ([*BOUND, pod(8, "n", ends=True)], [gpunode(2), gpunode(4, "u"), gpunode(7)], 1),
        ([pod(3, "n")], [gpunode(4, "u")], 0),  # The pod was bound before the watches began.
    ],
)
def test_a_bound_pod_without_a_reservation_is_a_fault(
    pods: Sequence[Object], gpunodes: Sequence[Object], count: int
) -> None:
    assert faults(pods, gpunodes) == count


def test_states_missed_by_a_watch_are_not_judged() -> None:
    assert faults(BOUND, [gpunode(2)]) == 1
    assert faults(BOUND, [gpunode(2)], gap=[gpunode(6, "u")]) == 0
