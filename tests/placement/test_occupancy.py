"""An occupancy that is reused for a later report equals the occupancy computed from that report."""

from collections.abc import Iterator, Set
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from msgspec.structs import replace

from headroom.contract.gpunode import ContainerCharge, GPUNodeStatus, Plugin, Replicas, Reservation
from headroom.core.placement.device_accounting import weigh
from headroom.core.placement.report_delta import find
from tests.builders import GIB, GPU, MIB, reservation, shared, status, use, weighed_anew
from tests.examples import examples
from tests.placement.worlds import RESOURCES, DrawnNode, amounts_bytes, worlds

UIDS = ["u0", "u1", "u2"]

#: The inputs of an occupancy.
Grounds = tuple[GPUNodeStatus, dict[str, Reservation], Set[str]]

_of_device: dict[str, st.SearchStrategy[Any]] = {
    "uuid": st.sampled_from(["D0", "D1", "D9"]),
    "kind": st.sampled_from(["gpu", "mig"]),
    "parent": st.sampled_from(["P0", "D0", None]),
    "gpu_instance": st.sampled_from([0, 1, None]),
    "numa_node": st.sampled_from([0, 1, None]),
    "resource": st.sampled_from(RESOURCES),
    "sharing": st.sampled_from(["none", "time-slicing", "mps"]),
    "replicas": st.builds(Replicas, free=st.integers(0, 4), allocated=st.integers(0, 4)),
    "healthy": st.booleans(),
    "memory_bytes": st.sampled_from([24 * GIB, 16 * GIB, -1, 0]),
    "used_bytes": amounts_bytes,
    "unattributed_bytes": st.one_of(st.none(), amounts_bytes),
    "architecture": st.sampled_from(["", "kepler"]),
}
_of_row: dict[str, st.SearchStrategy[Any]] = {
    "uid": st.sampled_from([*UIDS, "stray"]),
    "device": st.sampled_from(["D0", "D1", "gone"]),
    "replica": st.sampled_from(["", "0", "1"]),
    "container": st.sampled_from(["main", "helper"]),
    "used_bytes": st.one_of(st.none(), amounts_bytes, st.just(-GIB)),
}
_of_plugin: dict[str, st.SearchStrategy[Any]] = {
    "allocation_policy": st.sampled_from(["distributed", "packed", "unknown"]),
    "topology_manager_policy": st.sampled_from(["none", "best-effort", "unknown"]),
    "steered": st.lists(st.sampled_from(RESOURCES), max_size=1),
    "fail_requests_greater_than_one": st.sampled_from([None, True, False]),
}
_of_charge: dict[str, st.SearchStrategy[Any]] = {
    "resource": st.sampled_from(RESOURCES),
    "count": st.integers(1, 3),
    "candidates": st.dictionaries(st.sampled_from(["D0", "D1", "D2"]), amounts_bytes, max_size=2),
    "by_environment": st.booleans(),
    "choice": st.sampled_from(["", "D0", "D1"]),
    "containers": st.sampled_from(
        [[], [ContainerCharge("main", 1, GIB), ContainerCharge("helper", 1, 3 * GIB)]]
    ),
}
_leaving = st.frozensets(st.sampled_from(UIDS), max_size=2)


def _elsewhere(draw: DrawFn, reservations: dict[str, Reservation]) -> dict[str, Reservation]:
    """Return reservations in which the own variable of some pods decides the device."""
    return {
        uid: replace(
            held, charges=[replace(c, by_environment=draw(st.booleans())) for c in held.charges]
        )
        for uid, held in reservations.items()
    }


@st.composite
def grounds(draw: DrawFn, world: DrawnNode) -> Grounds:
    return world.status, _elsewhere(draw, world.reservations), draw(_leaving)


def changes(draw: DrawFn, was: Grounds) -> Iterator[tuple[str, Grounds]]:
    """Yield copies with one changed field each, and finally a copy with other measurements."""
    shown, reservations, leaving = was
    for name, values in _of_device.items():
        devices = [*shown.devices]
        if devices:
            place = draw(st.integers(0, len(devices) - 1))
            devices[place] = replace(devices[place], **{name: draw(values)})
        yield f"device.{name}", (replace(shown, devices=devices), reservations, leaving)
    for name, values in _of_row.items():
        rows = [*shown.pods]
        if rows:
            place = draw(st.integers(0, len(rows) - 1))
            rows[place] = replace(rows[place], **{name: draw(values)})
        yield f"row.{name}", (replace(shown, pods=rows), reservations, leaving)
    for name, values in _of_plugin.items():
        plugin = replace(shown.plugin, **{name: draw(values)})
        yield f"plugin.{name}", (replace(shown, plugin=plugin), reservations, leaving)
    for name, values in _of_charge.items():
        others = {
            uid: replace(held, charges=[replace(c, **{name: draw(values)}) for c in held.charges])
            for uid, held in reservations.items()
        }
        yield f"charge.{name}", (shown, others, leaving)
    # Of the same name, as the pods of a StatefulSet are.
    successors = {"u9" if uid == "u0" else uid: held for uid, held in reservations.items()}
    yield "successor", (shown, successors, leaving)
    yield "fewer", (shown, dict([*reservations.items()][1:]), leaving)
    yield "leaving", (shown, reservations, draw(_leaving))
    rows = [replace(row, used_bytes=draw(_of_row["used_bytes"])) for row in shown.pods]
    devices = [replace(device, used_bytes=draw(amounts_bytes)) for device in shown.devices]
    yield "measured", (replace(shown, pods=rows, devices=devices), reservations, leaving)


@settings(max_examples=examples(750))
@given(st.data(), worlds())
def test_a_reused_occupancy_equals_a_new_one(data: st.DataObject, world: DrawnNode) -> None:
    was = data.draw(grounds(world))
    found = find(*was, before=None)
    for what, now in changes(data.draw, was):
        if find(*now, before=found).occupancy is found.occupancy:
            shown, reservations, leaving = now
            assert weigh(found.occupancy, shown, GIB, MIB) == weighed_anew(
                shown, reservations, GIB, MIB, leaving
            ), what


def test_an_occupancy_is_reused_if_only_measurements_change() -> None:
    held = {"u1": reservation({"D0": GIB}), "u2": reservation({"D0": GIB, "D1": GIB})}
    rows = [use("u1", "D0", GIB), use("stray", "D1", GIB)]
    was = status(shared("D0"), shared("D1"), pods=rows)
    found = find(was, held, frozenset(), before=None)
    devices = [
        replace(device, used_bytes=9 * GIB, unattributed_bytes=GIB) for device in was.devices
    ]
    rows = [use("u1", "D0", 3 * GIB), use("stray", "D1", 2 * GIB)]
    later = replace(was, devices=devices, pods=rows, observed_at="2026-01-01T00:00:07Z")
    again = find(later, {**held}, frozenset(), before=found)
    assert again.occupancy is found.occupancy
    a, b = weigh(again.occupancy, later, 0, 0)
    assert (a.reservation_bytes, b.unreserved_pods_bytes, b.attributed) == (3 * GIB, 2 * GIB, True)
    assert a.activity == b.activity


#: Two pods are unconfirmed on a node of three devices, of which one is full.
ON_THEIR_WAY = {uid: reservation({"D0": GIB, "D1": GIB}) for uid in UIDS[:2]}
THREE = [shared("D0"), shared("D1", free=2, allocated=2), shared("D2", free=0, allocated=4)]
ALIGNED = Plugin(allocation_policy="distributed", topology_manager_policy="restricted")
STEERED = Plugin(allocation_policy="distributed", topology_manager_policy="none", steered=[GPU])


@pytest.mark.parametrize(
    ("plugin", "other"),
    [
        pytest.param(ALIGNED, {"numa_node": 1}, id="of which NUMA node"),
        pytest.param(STEERED, {"sharing": "none"}, id="whether shared"),
    ],
)
def test_rarely_relevant_fields_are_covered(plugin: Plugin, other: dict[str, Any]) -> None:
    was = status(*THREE, plugin=plugin)
    later = replace(was, devices=[replace(device, **other) for device in was.devices])
    if "numa_node" in other:
        later = replace(later, devices=[*later.devices[:1], *was.devices[1:]])
    found = find(was, ON_THEIR_WAY, frozenset(), before=None)
    again = find(later, ON_THEIR_WAY, frozenset(), before=found)
    assert again.occupancy is not found.occupancy
    now = weighed_anew(later, ON_THEIR_WAY)
    assert [t.first for t in now] != [t.first for t in weighed_anew(was, ON_THEIR_WAY)]
