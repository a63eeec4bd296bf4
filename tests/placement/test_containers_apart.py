"""Checks that a pod with containers on several devices is charged on each device for its containers
there.
"""

from collections.abc import Sequence

import msgspec
import pytest

from agent.gate_decision import Limits, judge
from headroom.contract.gpunode import Charge, ContainerCharge, GPUNode, GPUNodeSpec, PodUse, Source
from headroom.contract.kube import ObjectMeta
from headroom.core.cluster.adoption import AdoptingNode, adopt
from headroom.core.placement.placement_record import place
from headroom.core.placement.policy import Rules
from headroom.core.placement.request_reader import RequestReader
from tests.builders import (
    DISTRIBUTED,
    GIB,
    GPU,
    container,
    device,
    judged,
    pod,
    request,
    reservation,
    shared,
    status,
    use,
    weighed,
)

DEVICES = (shared("a"), shared("b"))
#: A container with 1 GiB and another with 3 GiB.
BOTH = pod("main=1Gi,helper=3Gi", container("main"), container("helper"), uid="both")
CHARGE = Charge(
    resource=GPU,
    count=2,
    candidates={"a": 4 * GIB, "b": 4 * GIB},
    containers=[ContainerCharge("main", 1, GIB), ContainerCharge("helper", 1, 3 * GIB)],
)
RESERVED = msgspec.structs.replace(reservation({}), charges=[CHARGE])
APART = (
    use("both", "a", container="main", replica="a::0"),
    use("both", "b", container="helper", replica="b::0"),
)


def test_the_charge_lists_containers_separately_if_there_are_several() -> None:
    node = weighed(*DEVICES, plugin=DISTRIBUTED)
    snap, verdicts = judged(BOTH, node)
    assert place(request(BOTH), snap, verdicts, 0).charges == (CHARGE,)
    adopted = adopt(BOTH, None, AdoptingNode("n", DEVICES, 0), Rules(), RequestReader())
    assert adopted.charges == [CHARGE]
    snap, verdicts = judged("4Gi", node)
    assert place(request("4Gi"), snap, verdicts, 0).charges[0].containers == []


@pytest.mark.parametrize(
    ("rows", "charged_gib"),
    [
        pytest.param(APART, [1, 3], id="on different devices"),
        pytest.param([APART[0], use("both", "a", container="helper", replica="a::1")], [4, 0]),
        pytest.param(APART[:1], [4, 4], id="one not reported yet: it can get either device"),
        pytest.param(
            [msgspec.structs.replace(each, container="") for each in APART],
            [4, 4],
            id="the report does not name containers",
        ),
    ],
)
def test_each_device_counts_its_containers(rows: Sequence[PodUse], charged_gib: list[int]) -> None:
    node = weighed(*DEVICES, plugin=DISTRIBUTED, pods=rows, reservations={"both": RESERVED})
    committed = [each.committed_bytes for each in node.devices]
    assert committed == [gib * GIB for gib in charged_gib]


def test_measured_use_above_the_containers_amount_counts() -> None:
    rows = [msgspec.structs.replace(APART[0], used_bytes=2 * GIB), APART[1]]
    node = weighed(*DEVICES, plugin=DISTRIBUTED, pods=rows, reservations={"both": RESERVED})
    assert [each.committed_bytes for each in node.devices] == [2 * GIB, 3 * GIB]


def test_the_replicas_of_an_init_container_do_not_confirm_later_containers() -> None:
    """The init container holds the maximum number of replicas of the pod, and the app containers
    get them later.
    """
    containers = [*CHARGE.containers, ContainerCharge("init", 2, GIB)]
    charge = msgspec.structs.replace(CHARGE, containers=containers)
    shown = [
        use("both", "a", container="init", replica="a::0"),
        use("both", "b", container="init", replica="b::0"),
    ]
    assert [charge.bytes_on(uuid, shown) for uuid in ("a", "b")] == [4 * GIB, 4 * GIB]
    # 2 GiB and 4 GiB, because the init container has ended, and no phase of the pod needs more.
    assert [charge.bytes_on(uuid, [*shown, *APART]) for uuid in ("a", "b")] == [2 * GIB, 4 * GIB]


def test_a_container_counts_with_all_its_replicas() -> None:
    """The report shows only one of the container's two replicas, so the other replica can be on
    either device.
    """
    containers = [ContainerCharge("main", 1, GIB), ContainerCharge("helper", 2, 3 * GIB)]
    charge = msgspec.structs.replace(CHARGE, count=3, containers=containers)
    assert [charge.bytes_on(uuid, APART) for uuid in ("a", "b")] == [4 * GIB, 4 * GIB]
    second = use("both", "a", container="helper", replica="a::1")
    assert [charge.bytes_on(uuid, [*APART, second]) for uuid in ("a", "b")] == [4 * GIB, 3 * GIB]


def test_compute_instances_that_share_memory_count_all_containers() -> None:
    parts = [
        device(uuid, kind="mig", parent="g", gpu_instance=1, resource=GPU) for uuid in ("a", "b")
    ]
    node = weighed(*parts, pods=APART, reservations={"both": RESERVED})
    assert [each.committed_bytes for each in node.devices] == [4 * GIB, 4 * GIB]


def test_the_explained_sum_counts_each_container_once() -> None:
    assert CHARGE.total_bytes == 4 * GIB
    assert msgspec.structs.replace(CHARGE, containers=[]).total_bytes == 8 * GIB


def test_the_gate_counts_the_containers_on_each_device() -> None:
    """A pod of 21 GiB and the container with 3 GiB fit on a device of 24 GiB, but 4 GiB do not."""
    other = use("gated", "b", container="main", replica="b::1")
    for rows, answer in (([*APART, other], "yes"), ([APART[0], other], "not yet")):
        sample = msgspec.structs.replace(
            status(*DEVICES, pods=rows), sources=[Source("checkpoint"), Source("proc")]
        )
        spec = GPUNodeSpec(
            initialised=True,
            reservations={"both": RESERVED, "gated": reservation({"b": 21 * GIB})},
        )
        gpunode = GPUNode(ObjectMeta(name="n"), spec=spec, status=sample)
        assert judge(gpunode, sample, "gated", Limits(0, 0)).answer == answer
