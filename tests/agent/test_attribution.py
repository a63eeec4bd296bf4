"""Tests the attribution of memory to pods."""

import pytest

from agent.attribution import Attributed
from agent.probes.readings import (
    Degraded,
    DeviceReading,
    MirrorReading,
    ProcessReading,
)
from tests.agent.attributed import (
    GIB,
    HASH,
    MPS,
    TOLERANCE_BYTES,
    gpu,
    holding,
    instance,
    process,
    shown,
    uses,
)


def test_a_pod_uses_the_memory_of_its_processes_and_the_rest_is_unattributed() -> None:
    found = shown(
        gpu(processes={1: 10, 2: 20, 3: 5}),
        used={"A": 40},
        holdings=(holding("u"),),
        processes=(process(1, "u"), process(2, "u"), process(3, command="Xorg")),
    )
    assert uses(found) == [("u", "A", "A::0", 30)]
    # 5 from an unknown process, and 5 from no listed process
    assert found.unattributed == {"A": 10}
    assert [(s.pid, s.command, s.used_bytes) for s in found.outside_pods] == [(3, "Xorg", 5)]


def test_an_idle_pod_is_reported_with_a_use_of_zero() -> None:
    found = shown(gpu(processes={}), used={"A": 0}, holdings=(holding("u"),))
    assert uses(found) == [("u", "A", "A::0", 0)]
    assert found.unattributed == {"A": 0}


def test_a_pod_with_several_rows_on_a_device_reports_its_bytes_once() -> None:
    found = shown(
        gpu(processes={1: 10}),
        used={"A": 10},
        holdings=(holding("u", "A::1"), holding("u", "A::0"), holding("u", "A::2", "other")),
        processes=(process(1, "u"),),
    )
    assert [p.used_bytes for p in found.pods] == [10, 0, 0]
    assert [p.replica for p in found.pods] == ["A::0", "A::1", "A::2"]


def test_a_process_of_compute_instances_with_shared_memory_is_reported_once() -> None:
    listed = {1: 10, 2: 7}
    found = shown(
        instance("M1", listed, 3),
        instance("M2", listed, 3),
        instance("M3", {}, 4),
        used={"M1": 20, "M2": 20, "M3": 0},
        holdings=(holding("u", "M2"),),
        processes=(process(1, "u"), process(2)),
    )
    assert uses(found) == [("u", "M2", "M2", 10)]
    assert found.unattributed == {"M1": 10, "M2": 0, "M3": 0}


def test_a_pod_on_a_device_without_a_replica_for_it_is_reported_there() -> None:
    found = shown(
        gpu("A", {}),
        gpu("B", {1: 9}),
        used={"A": 0, "B": 9},
        holdings=(holding("u", "A::0"),),
        processes=(process(1, "u"),),
    )
    assert uses(found) == [("u", "A", "A::0", 0), ("u", "B", "", 9)]
    assert {p.name for p in found.pods} == {"name of u"}
    assert found.unattributed["B"] == 0


def test_the_use_of_a_pod_that_requested_no_device_is_attributed() -> None:
    found = shown(gpu(processes={1: 9}), used={"A": 9}, processes=(process(1, "v"),))
    assert uses(found) == [("v", "A", "", 9)]
    assert (found.unattributed, found.outside_pods) == ({"A": 0}, [])


@pytest.mark.parametrize(
    ("device", "processes"),
    [
        pytest.param(gpu(processes={1: 9}), None, id="unreadable processes"),
        pytest.param(gpu(processes=None), (), id="no process list"),
        pytest.param(gpu(processes={1: 9}), (process(1, known=False),), id="one process is hidden"),
        pytest.param(gpu(processes={1: 9}), (), id="one process was not read"),
    ],
)
def test_nothing_is_attributed_if_processes_are_unknown(
    device: DeviceReading, processes: tuple[ProcessReading, ...] | None
) -> None:
    found = shown(device, used={"A": 9}, holdings=(holding("u"),), processes=processes)
    assert uses(found) == [("u", "A", "A::0", None)]
    assert (found.unattributed, found.outside_pods) == ({"A": None}, [])


def test_a_value_that_the_driver_does_not_report_makes_unattributed_use_unknown() -> None:
    both = (process(1, "u"), process(2, "u"), process(3))
    pods = shown(
        gpu(processes={1: 9, 2: None, 3: 1}),
        used={"A": 12},
        holdings=(holding("u"),),
        processes=both,
    )
    assert (uses(pods)[0][3], pods.unattributed) == (None, {"A": None})
    outside_pods = shown(
        gpu(processes={1: 9, 2: 1, 3: None}),
        used={"A": 12},
        holdings=(holding("u"),),
        processes=both,
    )
    assert (uses(outside_pods)[0][3], outside_pods.unattributed) == (10, {"A": 2})


def test_a_static_pod_is_reported_by_the_uid_of_its_mirror_pod() -> None:
    found = shown(
        gpu(processes={1: 9}),
        used={"A": 9},
        holdings=(holding(HASH),),
        processes=(process(1, HASH),),
        mirrors=(MirrorReading("mirrors", HASH, "mirror", "ns", "p-node"),),
    )
    assert uses(found) == [("mirror", "A", "A::0", 9)]


def test_the_use_of_an_unknown_static_pod_is_unattributed_with_its_name() -> None:
    found = shown(gpu(processes={1: 9}), used={"A": 9}, processes=(process(1, HASH),))
    assert [s.command for s in found.outside_pods] == ["python (static pod)"]
    assert found.unattributed == {"A": 9}


@pytest.mark.parametrize(
    ("server", "used", "pods", "unattributed"),
    [
        pytest.param(30, 130, {"u": 60, "v": 40, "mps": 30}, 0, id="only its own context"),
        pytest.param(100, 100, {"u": 60, "v": 40, "mps": 0}, 0, id="all memory"),
        pytest.param(
            130, 130, {"u": 60, "v": 40, "mps": 30}, 0, id="all memory and its own context"
        ),
        pytest.param(
            200, 130, {"u": 60, "v": 40, "mps": 100}, 0, id="at most the memory of its clients"
        ),
        pytest.param(30, 500, {"u": 60, "v": 40, "mps": 30}, 370, id="with much unattributed use"),
    ],
)
def test_memory_also_listed_for_the_mps_server_is_counted_once(
    server: int, used: int, pods: dict[str, int], unattributed: int
) -> None:
    found = shown(
        gpu(processes={1: 60, 2: 40, 3: server}),
        used={"A": used},
        holdings=(holding("u"), holding("v", "A::1")),
        processes=(process(1, "u"), process(2, "v"), process(3, "mps", command=MPS)),
    )
    assert {p.uid: p.used_bytes for p in found.pods} == pods
    assert found.unattributed == {"A": unattributed}
    assert found.complaints == []


@pytest.mark.parametrize(
    ("by_mps", "pods", "unattributed"),
    [
        pytest.param(("A",), {"u": None, "mps": None}, None, id="with sharing by MPS"),
        pytest.param((), {"u": 0, "mps": 100}, 0, id="without sharing by MPS"),
    ],
)
def test_an_mps_server_whose_clients_list_no_memory_hides_use_only_with_sharing_by_mps(
    by_mps: tuple[str, ...], pods: dict[str, int | None], unattributed: int | None
) -> None:
    found = shown(
        gpu(processes={1: 0, 2: 0, 3: 100}),
        used={"A": 100},
        holdings=(holding("u"),),
        processes=(process(1, "u"), process(2, "u"), process(3, "mps", command=MPS)),
        by_mps=by_mps,
    )
    assert {p.uid: p.used_bytes for p in found.pods} == pods
    assert found.unattributed == {"A": unattributed}


def test_process_lists_far_above_the_use_are_accepted_and_reported() -> None:
    def claims(more: int) -> Attributed:
        return shown(
            gpu(processes={1: GIB, 2: more}),
            used={"A": GIB},
            holdings=(holding("u"),),
            processes=(process(1, "u"), process(2)),
        )

    assert claims(TOLERANCE_BYTES).complaints == []
    found = claims(TOLERANCE_BYTES + 1)
    assert found.unattributed == {"A": TOLERANCE_BYTES + 1}
    assert found.complaints == [
        Degraded("nvml", "processes use more memory than the driver reports as used")
    ]


def test_holdings_of_other_plugins_and_of_missing_devices_have_no_rows() -> None:
    found = shown(gpu(processes={}), holdings=(holding("u", "mlx5_0"), holding("u", "B::0")))
    assert found.pods == []
