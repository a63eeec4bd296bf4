"""Draws reports in which an agent lies in any field, including fields that are added in the
future.
"""

from typing import Any

from hypothesis import strategies as st
from msgspec import inspect as mi

from headroom.contract.gpunode import Device, GPUNodeStatus, PodUse, Replicas
from headroom.contract.heartbeat import Confirmation
from tests.builders import DISTRIBUTED, GIB, STAMP, shared, status, use

#: Names with a meaning: devices and pods of the honest nodes and of the lying node.
GPUS = ("GPU-a-0", "GPU-a-1", "GPU-c-0", "GPU-b-0")
UIDS = ("bound", "stray", "starter", "hog", "neighbour", "waiting", "on-lying-node", "unknown")
TEXTS = st.sampled_from(
    [
        *GPUS,
        *UIDS,
        *("", "a", "b", "c", "default", "main", "nvidia.com/gpu", "NVIDIA L4", "ok"),
        *("checkpoint", "proc", "GPU-a-0::0", "GPU-c-0::1"),
        *(STAMP, "2026-11-20T00:00:00+00:00", "2036-11-21T00:00:00+00:00", "0001-01-01T00:00:00Z"),
    ]
)
SOURCES = status(shared()).sources
NUMBERS = st.sampled_from([-1, 0, 1, 4, GIB, 8 * GIB, 23 * GIB, 80 * GIB, 1 << 44, (1 << 63) - 1])


def of_type(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Return a strategy that draws any value of the type."""
    match kind:
        case mi.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{each.name: of_type(each.type) for each in fields})
        case mi.ListType(item_type=item):
            return st.lists(of_type(item), max_size=3)
        case mi.DictType(value_type=value):
            return st.dictionaries(TEXTS, of_type(value), max_size=3)
        case mi.UnionType(types=types):
            return st.one_of(*map(of_type, types))
        case mi.LiteralType(values=values):
            return st.sampled_from(list(values))
        case mi.StrType():
            return TEXTS
        case mi.IntType():
            return NUMBERS
        case mi.FloatType():
            return st.sampled_from([0.0, 0.5, 1.0, -1.0, 1e300])
        case mi.BoolType():
            return st.booleans()
        case mi.NoneType():
            return st.none()
    raise AssertionError(f"no lies of type {kind}")


#: Plausible devices, because implausible devices would be ignored early.
PLAUSIBLE: st.SearchStrategy[Device] = st.builds(
    lambda uuid, memory, used, free, healthy: shared(
        uuid,
        memory_bytes=memory,
        used_bytes=used * memory // 4,
        replicas=Replicas(free=free, allocated=4 - free),
        healthy=healthy,
        model="NVIDIA L4",
    ),
    st.sampled_from(GPUS),
    st.sampled_from([1, GIB, 23 * GIB, 24 * GIB, 80 * GIB, 1 << 44]),
    st.integers(0, 4),
    st.integers(0, 4),
    st.booleans(),
)
ROWS: st.SearchStrategy[PodUse] = st.builds(
    lambda uid, gpu, used, peak: use(
        uid,
        gpu,
        used,
        container="main",
        peak_bytes=peak,
        started_at="2026-11-20T00:00:00+00:00",
        settled_at=STAMP,
        replica=f"{gpu}::0",
        name=uid,
        namespace="default",
    ),
    st.sampled_from(UIDS),
    st.sampled_from(GPUS),
    st.none() | NUMBERS,
    NUMBERS,
)


ANY_DEVICES = st.lists(st.one_of(PLAUSIBLE, of_type(mi.type_info(Device))), max_size=2)
ANY_ROWS = st.lists(st.one_of(ROWS, of_type(mi.type_info(PodUse))), max_size=4)
_OTHERS = {
    each.name: of_type(each.type)
    for each in mi.type_info(GPUNodeStatus).fields  # type: ignore[attr-defined]
    if each.name not in ("devices", "pods")
}


@st.composite
def lies(draw: st.DrawFn) -> GPUNodeStatus:
    """Draw a report. Most devices and rows are plausible, so that they have effects."""
    plausible = st.lists(PLAUSIBLE, min_size=1, max_size=3, unique_by=lambda each: each.uuid)
    told = {"observed_at": STAMP, "plugin": DISTRIBUTED, "sources": SOURCES}
    if draw(st.booleans()):
        told = draw(st.fixed_dictionaries(_OTHERS))
    devices = draw(st.one_of(plausible, plausible, ANY_DEVICES))
    return GPUNodeStatus(devices=devices, pods=draw(st.one_of(st.lists(ROWS), ANY_ROWS)), **told)


CONFIRMATIONS: st.SearchStrategy[Confirmation] = of_type(mi.type_info(Confirmation))
