"""Tests the capacity of a fleet, which shows whether it is full or fragmented, and where its
headroom is.
"""

import pytest

from headroom.contract.gpunode import Replicas
from headroom.contract.reasons import Reason
from headroom.core.placement.capacity import capacity_summary, device_classes, space
from headroom.core.placement.snapshot import NodeTerms
from tests.builders import DISTRIBUTED, GIB, judged, mig, reservation, shared, use, weighed


def taken(uuid: str, gib: int, free: int = 3) -> NodeTerms:
    """Return a node with one 24 GiB device, on which one pod uses this many GiB."""
    return weighed(
        shared(uuid, free=free, allocated=4 - free, used_bytes=gib * GIB),
        name=uuid,
        reservations={"u": reservation({uuid: gib * GIB})},
        pods=[use("u", uuid, gib * GIB, replica="r")],
        plugin=DISTRIBUTED,
    )


def test_headroom_includes_stranded_memory() -> None:
    found = space(judged("8Gi", taken("a", 4), taken("b", 20), taken("c", 10, free=0))[1])
    assert (found.open_nodes, found.closed_nodes, found.fitting_nodes) == (3, 0, 1)
    assert found.headroom_bytes == (20 + 4 + 14) * GIB
    assert found.stranded_bytes == 14 * GIB  # c has no replica.
    # Pods of this size do not fit on b.
    assert (found.replicas_free, found.replicas_stranded) == (6, 3)
    assert (found.need_bytes, found.largest_fitting_bytes) == (8 * GIB, 20 * GIB)
    assert capacity_summary(found, 2, at_least=False) == (
        "2 such pods fit now, on 1 of 3 nodes; 38.0 GiB are free in total; 14.0 GiB are on devices "
        "without a free replica"
    )
    assert capacity_summary(found, 2, at_least=True).startswith("at least 2 such pods fit now")


@pytest.mark.parametrize(
    ("fleet", "fullness", "sentence"),
    [
        pytest.param(
            [taken("a", 18), taken("b", 20)],
            "fragmented",
            "fragmented: 10.0 GiB are free in total, and the largest request that fits is 6.0 GiB",
            id="enough in total, but not on one device",
        ),
        pytest.param(
            [taken("a", 20)],
            "full",
            "full: 4.0 GiB are free in total, which is less than one such pod needs",
            id="less in total than one pod needs",
        ),
        pytest.param(
            [taken("a", 4, free=0)],
            "fragmented",
            "fragmented: 20.0 GiB are free in total, and every node also rejects the pod for "
            "reasons other than memory; 20.0 GiB are on devices without a free replica",
            id="memory without replicas",
        ),
        pytest.param(
            [weighed(shared(), reason=Reason.NOT_INITIALISED)],
            "closed",
            "no node with a device of this resource accepts pods at the moment",
            id="no node takes pods",
        ),
        pytest.param(
            [weighed(shared(resource="nvidia.com/other"))],
            "closed",
            "no node with a device of this resource accepts pods at the moment",
            id="no node has the resource",
        ),
    ],
)
def test_the_reason_why_no_pod_of_a_size_fits_is_reported(
    fleet: list[NodeTerms], fullness: str, sentence: str
) -> None:
    found = space(judged("8Gi", *fleet)[1])
    assert (found.fullness, capacity_summary(found, 0, at_least=False)) == (fullness, sentence)


def test_memory_of_ineligible_nodes_is_counted_separately() -> None:
    found = space(judged("8Gi", taken("a", 4), weighed(shared(), fresh_until_s=0.0))[1])
    assert (found.open_nodes, found.closed_nodes, found.closed_bytes) == (1, 1, 24 * GIB)
    assert found.headroom_bytes == 20 * GIB


def test_replicas_for_unconfirmed_pods_are_not_free() -> None:
    waiting = {f"u{n}": reservation({"a": GIB}) for n in range(2)}
    node = weighed(shared("a", free=2, allocated=2), reservations=waiting, plugin=DISTRIBUTED)
    found = space(judged("8Gi", node)[1])
    assert found.stranded_bytes == found.headroom_bytes == 22 * GIB


def test_memory_that_instances_share_is_counted_once() -> None:
    instances = [mig(f"MIG-{n}", 0, resource="nvidia.com/gpu") for n in range(2)]
    assert space(judged("1Gi", weighed(*instances))[1]).headroom_bytes == 10 * GIB


def test_the_largest_request_is_computed_per_device_model() -> None:
    big = weighed(
        shared("A", model="A100", memory_bytes=80 * GIB, replicas=Replicas(free=4)), name="big"
    )
    found = device_classes(judged("1Gi", taken("t", 4), big, taken("s", 10))[1])
    assert [(each.model, each.memory_bytes // GIB, each.nodes) for each in found] == [
        ("A100", 80, 1),
        ("", 24, 2),
    ]
    assert [each.largest_fitting_bytes for each in found] == [80 * GIB, 20 * GIB]
