"""Attribution of memory: cases, and properties for any answers of drivers, kubelets and /proc."""

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.attribution import Attributed, attribute
from agent.probes.nvml import Memory
from agent.probes.readings import (
    AnswerReading,
    Degraded,
    DeviceReading,
    DriverReading,
    HoldingReading,
    MirrorReading,
    PluginReading,
    ProcessReading,
    Reading,
    RegisteredReading,
    SourceReading,
)
from agent.status_builder import summarise
from contract.gpunode import GPUNodeStatus
from tests.examples import examples

TOLERANCE_BYTES = 64 << 20
MAX_PODS = 4096
MAX_DEVICE_BYTES = 1 << 44

GIB = 1 << 30
NOW = datetime(2026, 11, 20, 20, tzinfo=UTC)
GPU = "nvidia.com/gpu"
HASH = "0123456789abcdef0123456789abcdef"
MPS = "nvidia-cuda-mps"


def gpu(uuid: str = "A", processes: Mapping[int, int | None] | None = None) -> DeviceReading:
    return DeviceReading("nvml", uuid, 0, processes=processes)


def instance(uuid: str, processes: Mapping[int, int | None] | None, place: int) -> DeviceReading:
    return DeviceReading(
        "nvml", uuid, 0, kind="mig", parent="P", gpu_instance=place, processes=processes
    )


def holding(uid: str, replica: str = "A::0", container: str = "main") -> HoldingReading:
    return HoldingReading("checkpoint", uid, container, GPU, replica, "ns", f"name of {uid}")


def process(pid: int, *pods: str, command: str = "python", known: bool = True) -> ProcessReading:
    return ProcessReading("proc", pid, command, pods, known=known)


def shown(
    *devices: DeviceReading,
    used: Mapping[str, int] | None = None,
    holdings: tuple[HoldingReading, ...] = (),
    processes: tuple[ProcessReading, ...] | None = (),
    mirrors: tuple[MirrorReading, ...] = (),
) -> Attributed:
    checked = None if processes is None else {each.pid: each for each in processes}
    return attribute(devices, used or {}, holdings, checked, mirrors)


def uses(found: Attributed) -> list[tuple[str, str, str, int | None]]:
    return [(p.uid, p.device, p.replica, p.used_bytes) for p in found.pods]


def test_a_pod_uses_what_its_processes_use_and_the_rest_is_unattributed() -> None:
    found = shown(
        gpu(processes={1: 10, 2: 20, 3: 5}),
        used={"A": 40},
        holdings=(holding("u"),),
        processes=(process(1, "u"), process(2, "u"), process(3, command="Xorg")),
    )
    assert uses(found) == [("u", "A", "A::0", 30)]
    assert found.unattributed == {"A": 10}  # 5 of an unknown process, 5 of no listed process
    assert [(s.pid, s.command, s.used_bytes) for s in found.outside_pods] == [(3, "Xorg", 5)]


def test_an_idle_pod_uses_nothing_and_that_is_known() -> None:
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


def test_compute_instances_of_one_memory_report_a_process_once() -> None:
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


def test_a_pod_on_a_device_that_it_was_not_given_is_reported_without_a_replica() -> None:
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
        pytest.param(gpu(processes={1: 9}), None, id="processes cannot be looked at"),
        pytest.param(gpu(processes=None), (), id="the driver lists none"),
        pytest.param(gpu(processes={1: 9}), (process(1, known=False),), id="one may not be seen"),
        pytest.param(gpu(processes={1: 9}), (), id="one was not looked at"),
    ],
)
def test_nothing_is_attributed_if_processes_are_unknown(
    device: DeviceReading, processes: tuple[ProcessReading, ...] | None
) -> None:
    found = shown(device, used={"A": 9}, holdings=(holding("u"),), processes=processes)
    assert uses(found) == [("u", "A", "A::0", None)]
    assert (found.unattributed, found.outside_pods) == ({"A": None}, [])


def test_a_figure_that_the_driver_does_not_report_makes_the_rest_unknown() -> None:
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


def test_a_static_pod_is_reported_by_the_uid_of_its_mirror() -> None:
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


def test_for_nested_pods_the_one_that_the_kubelet_lists_counts_else_the_outer() -> None:
    nested = process(1, "outer", "inner")
    inner = shown(gpu(processes={1: 9}), holdings=(holding("inner"),), processes=(nested,))
    assert uses(inner) == [("inner", "A", "A::0", 9)]
    outer = shown(gpu(processes={1: 9}), processes=(nested,))
    assert uses(outer) == [("outer", "A", "", 9)]


@pytest.mark.parametrize(
    ("server", "used", "pods", "unattributed"),
    [
        pytest.param(30, 130, {"u": 60, "v": 40, "mps": 30}, 0, id="its own context only"),
        pytest.param(100, 100, {"u": 60, "v": 40, "mps": 0}, 0, id="all of it a second time"),
        pytest.param(130, 130, {"u": 60, "v": 40, "mps": 30}, 0, id="and its own context"),
        pytest.param(
            200, 130, {"u": 60, "v": 40, "mps": 100}, 0, id="no more is taken than clients list"
        ),
        pytest.param(30, 500, {"u": 60, "v": 40, "mps": 30}, 370, id="with much unattributed use"),
    ],
)
def test_memory_that_is_counted_to_the_mps_server_too_is_counted_once(
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


def test_if_all_memory_is_counted_to_the_mps_server_no_use_is_attributed() -> None:
    found = shown(
        gpu(processes={1: 0, 2: 0, 3: 100}),
        used={"A": 100},
        holdings=(holding("u"),),
        processes=(process(1, "u"), process(2, "u"), process(3, "mps", command=MPS)),
    )
    assert {p.uid: p.used_bytes for p in found.pods} == {"u": None, "mps": None}
    assert found.unattributed == {"A": None}


def test_process_lists_far_above_the_use_are_taken_and_reported() -> None:
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
    assert found.complaints == [Degraded("nvml", "processes list more memory than is used")]


def test_holdings_of_other_plugins_and_of_devices_that_are_gone_are_no_rows() -> None:
    found = shown(gpu(processes={}), holdings=(holding("u", "mlx5_0"), holding("u", "B::0")))
    assert found.pods == []


# Whatever the sources report.

UUIDS = st.sampled_from(["A", "B", "M1", "M2", "M3"])
UIDS = st.sampled_from(["", "u", "v", "w", HASH])
PIDS = st.integers(0, 6)
BYTES = st.integers(0, 100) | st.sampled_from([-5, 1 << 63, (1 << 64) - 1, MAX_DEVICE_BYTES])
FIGURES = st.none() | BYTES
IDS = st.builds("{}{}".format, UUIDS, st.sampled_from(["", "::0", "::1", "::2", "::x"]))
RESOURCES = st.sampled_from([GPU, f"{GPU}.shared", "nvidia.com/mig-1g.10gb", "other/nic"])
PLACES: dict[str, dict[str, Any]] = {
    "A": {"index": 0},
    "B": {"index": 1},
    "M1": {"index": 2, "kind": "mig", "parent": "P", "gpu_instance": 1},
    "M2": {"index": 2, "kind": "mig", "parent": "P", "gpu_instance": 1},
    "M3": {"index": 2, "kind": "mig", "parent": "P", "gpu_instance": 2},
}


@st.composite
def devices(draw: st.DrawFn) -> DeviceReading:
    uuid = draw(UUIDS)
    memory = st.none() | st.builds(Memory, BYTES, BYTES, FIGURES)
    return DeviceReading(
        "nvml",
        uuid,
        **PLACES[uuid],
        memory=draw(memory),
        processes=draw(st.none() | st.dictionaries(PIDS, FIGURES)),
        fault=draw(st.sampled_from(["", "GPU is lost"])),
    )


READINGS: st.SearchStrategy[Reading] = st.one_of(
    devices(),
    st.builds(DriverReading, st.just("nvml"), st.just("580")),
    st.builds(HoldingReading, st.just("checkpoint"), UIDS, st.sampled_from("ab"), RESOURCES, IDS),
    st.builds(RegisteredReading, st.just("podresources"), RESOURCES, st.frozensets(IDS)),
    st.builds(
        ProcessReading,
        st.just("proc"),
        PIDS,
        st.sampled_from(["", "python", MPS]),
        st.lists(UIDS.filter(bool), max_size=2).map(tuple),
        known=st.booleans(),
    ),
    st.builds(
        MirrorReading,
        st.just("mirrors"),
        st.just(HASH),
        st.just("mirror"),
        st.just("ns"),
        st.just("p"),
    ),
    st.builds(
        PluginReading,
        st.sampled_from(["plugin", "labels"]),
        st.sampled_from([None, "none", "time-slicing", "mps"]),
        st.dictionaries(RESOURCES, st.integers(2, 5)),
    ),
    st.builds(
        AnswerReading,
        st.just("checkpoint"),
        RESOURCES,
        st.frozensets(st.just("envvar")),
        st.booleans(),
    ),
    st.builds(Degraded, st.sampled_from(["nvml", "dcgm"]), st.sampled_from(["x", "y"])),
    st.builds(SourceReading, st.sampled_from(["proc", "dcgm"]), st.sampled_from(["ok", "absent"])),
)


@st.composite
def samples(draw: st.DrawFn) -> list[Reading]:
    """A node on which processes are usually known, and other inputs of the attribution."""
    found: list[Reading] = []
    pids: set[int] = set()
    for uuid in draw(st.sets(UUIDS, min_size=1)):
        listed = draw(st.dictionaries(PIDS, st.integers(0, 100) | FIGURES, max_size=4))
        pids |= listed.keys()
        free_bytes = draw(st.integers(0, 300))
        memory = draw(st.sampled_from([Memory(300, free_bytes, 0), Memory(300, 400, 0), None]))
        found.append(DeviceReading("nvml", uuid, **PLACES[uuid], memory=memory, processes=listed))
    for pid in pids:
        pods = draw(st.lists(UIDS.filter(bool), max_size=2).map(tuple))
        command = draw(st.sampled_from(["python", "python", MPS]))
        found.append(ProcessReading("proc", pid, command, pods))
    found.append(SourceReading("proc"))
    return found + draw(st.lists(READINGS, max_size=4))


def memory_of(uuid: str) -> object:
    place = PLACES[uuid]
    return (place["parent"], place["gpu_instance"]) if "parent" in place else uuid


def adds_up(status: GPUNodeStatus, sample: list[Reading]) -> None:
    """Properties of every report, from any sample."""
    uuids = [device.uuid for device in status.devices]
    assert len(set(uuids)) == len(uuids)
    assert {row.device for row in status.pods} <= set(uuids)
    assert len(status.pods) <= MAX_PODS
    rows = Counter((p.uid, p.device, p.container, p.replica) for p in status.pods if p.uid)
    repeated = Counter(
        (r.uid, r.container, r.replica) for r in sample if isinstance(r, HoldingReading)
    )
    if max(repeated.values(), default=1) == 1:
        assert max(rows.values(), default=1) == 1
    for memory in {memory_of(uuid) for uuid in uuids}:
        there = [device for device in status.devices if memory_of(device.uuid) == memory]
        mine = [p for p in status.pods if memory_of(p.device) == memory]
        unattributed = [device.unattributed_bytes for device in there]
        figures = [p.used_bytes for p in mine if p.uid]
        assert all(
            each is None or 0 <= each <= MAX_DEVICE_BYTES for each in [*unattributed, *figures]
        )
        if None in unattributed:
            assert set(unattributed) == {None}
            continue
        assert None not in figures
        owned_bytes = sum(each or 0 for each in figures)
        unattributed_bytes = sum(each or 0 for each in unattributed)
        listed: dict[int, int] = {}
        for reading in {r.uuid: r for r in sample if isinstance(r, DeviceReading)}.values():
            if memory_of(reading.uuid) == memory:
                for pid, figure in (reading.processes or {}).items():
                    listed[pid] = max(listed.get(pid, 0), figure or 0)
        used = [device.used_bytes for device in there if device.used_bytes >= 0]
        # Never more than is used, or than processes list where they list more.
        most_bytes = max(sum(listed.values()), max(used, default=0))
        assert owned_bytes + unattributed_bytes <= most_bytes
        # Never less than is used: use of no pod is unattributed.
        assert owned_bytes + unattributed_bytes >= max(used, default=0)
    for device in status.devices:
        replicas = device.replicas
        assert min(replicas.free, replicas.allocated, replicas.unhealthy) >= 0
        held = {p.replica for p in status.pods if p.device == device.uuid}
        assert replicas.allocated <= len(held)
    for row in status.sources:
        assert (row.state == "ok") <= (row.message == "")


@settings(max_examples=examples(375))
@given(st.lists(samples() | st.lists(READINGS, max_size=12), min_size=1, max_size=3))
def test_whatever_is_sampled_the_report_adds_up(sequence: list[list[Reading]]) -> None:
    before: GPUNodeStatus | None = None
    for number, sample in enumerate(sequence):
        before = summarise(sample, NOW + timedelta(seconds=5 * number), before=before)
        adds_up(before, sample)
        again = summarise(sample, NOW + timedelta(seconds=5 * number), before=before)
        assert [p for p in again.pods] == [p for p in before.pods]


@given(samples(), st.randoms(use_true_random=False))
def test_the_order_of_sources_changes_nothing(sample: list[Reading], chance: Any) -> None:
    unique = list({_identity(reading): reading for reading in sample}.values())
    shuffled = list(unique)
    chance.shuffle(shuffled)
    one, other = summarise(unique, NOW), summarise(shuffled, NOW)
    assert one.pods == other.pods
    assert one.devices == other.devices


def _identity(reading: Reading) -> object:
    """A report as a real probe gives it once."""
    match reading:
        case DeviceReading():
            return (DeviceReading, reading.uuid)
        case ProcessReading():
            return (ProcessReading, reading.pid)
        case RegisteredReading():
            return (RegisteredReading, reading.resource)
        case HoldingReading():
            return (HoldingReading, reading.uid, reading.container, reading.replica)
        case PluginReading() | SourceReading():
            return (type(reading), reading.source)
        case AnswerReading():
            return (AnswerReading, reading.resource)
    return str(reading)
