"""Checks that the amounts in the report are consistent for any sample."""

from collections import Counter
from datetime import timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

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
from headroom.contract.gpunode import GPUNodeStatus
from tests.agent.attributed import GPU, HASH, MAX_DEVICE_BYTES, MAX_PODS, MPS, NOW
from tests.examples import examples

# The strategies below draw any values of the sources.

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
        UIDS,
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
    """Draw the inputs of the attribution on a node. The pods of most processes are known."""
    found: list[Reading] = []
    pids: set[int] = set()
    for uuid in draw(st.sets(UUIDS, min_size=1)):
        listed = draw(st.dictionaries(PIDS, st.integers(0, 100) | FIGURES, max_size=4))
        pids |= listed.keys()
        free_bytes = draw(st.integers(0, 300))
        memory = draw(st.sampled_from([Memory(300, free_bytes, 0), Memory(300, 400, 0), None]))
        found.append(DeviceReading("nvml", uuid, **PLACES[uuid], memory=memory, processes=listed))
    for pid in pids:
        pod = draw(UIDS)
        command = draw(st.sampled_from(["python", "python", MPS]))
        found.append(ProcessReading("proc", pid, command, pod))
    found.append(SourceReading("proc"))
    return found + draw(st.lists(READINGS, max_size=4))


def memory_of(uuid: str) -> object:
    place = PLACES[uuid]
    return (place["parent"], place["gpu_instance"]) if "parent" in place else uuid


def adds_up(status: GPUNodeStatus, sample: list[Reading]) -> None:
    """Check the properties that every report must have."""
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
        # Attributed memory never exceeds the use of the device or the sum of its processes,
        # whichever is higher.
        most_bytes = max(sum(listed.values()), max(used, default=0))
        assert owned_bytes + unattributed_bytes <= most_bytes
        # The rows and the unattributed memory together never show less than the use.
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
def test_a_report_adds_up_for_any_sample(sequence: list[list[Reading]]) -> None:
    before: GPUNodeStatus | None = None
    for number, sample in enumerate(sequence):
        before = summarise(sample, NOW + timedelta(seconds=5 * number), before=before)
        adds_up(before, sample)
        again = summarise(sample, NOW + timedelta(seconds=5 * number), before=before)
        assert [p for p in again.pods] == [p for p in before.pods]


@given(samples(), st.randoms(use_true_random=False))
def test_the_order_of_sources_does_not_matter(sample: list[Reading], chance: Any) -> None:
    unique = list({_identity(reading): reading for reading in sample}.values())
    shuffled = list(unique)
    chance.shuffle(shuffled)
    one, other = summarise(unique, NOW), summarise(shuffled, NOW)
    assert one.pods == other.pods
    assert one.devices == other.devices


def _identity(reading: Reading) -> object:
    """Return a key that identifies the reading, because a real probe returns each device
    only once.
    """
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
