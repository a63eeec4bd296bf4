"""Reports that change no charge reuse the terms of the node; all others compute them.

Reused terms must equal computed ones.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from msgspec.structs import replace

from headroom.contract.gpunode import GPUNodeStatus, Plugin, PodUse, Reservation, SmActivity
from headroom.core.placement.device_accounting import DeviceTerms, weigh
from headroom.core.placement.report_delta import Found, find, with_new_measurements
from tests.builders import GIB, MIB, mig, reservation, shared, status, use
from tests.drawn import one
from tests.examples import examples
from tests.placement.test_occupancy import changes, grounds
from tests.placement.worlds import DrawnNode, amounts_bytes, worlds

NOBODY: frozenset[str] = frozenset()
_activities = st.sampled_from([None, SmActivity(0.25, "gpm")])


def found_of(shown: GPUNodeStatus, reservations: dict[str, Reservation]) -> Found:
    return find(shown, reservations, NOBODY, before=None)


def measured_otherwise(draw: DrawFn, was: GPUNodeStatus) -> GPUNodeStatus:
    """Return the report with some measurements changed."""

    def bytes_of(had: int | None, most: int) -> Any:
        return draw(one(had, had, 0, MIB, most // 2, most, None)) or had

    devices = [
        replace(
            device,
            used_bytes=bytes_of(device.used_bytes, device.memory_bytes) or 0,
            unattributed_bytes=draw(one(device.unattributed_bytes, 0, MIB, 2 * MIB, None)),
            utilization_ratio=draw(one(None, 0.5)),
            sm_activity=draw(_activities),
        )
        for device in was.devices
    ]
    rows = [
        replace(row, used_bytes=draw(st.one_of(st.just(row.used_bytes), amounts_bytes)))
        for row in was.pods
    ]
    return replace(was, devices=devices, pods=rows, observed_at="2026-01-01T00:00:07Z")


@settings(max_examples=examples(750))
@given(st.data(), worlds())
def test_reused_terms_equal_computed_terms(data: st.DataObject, world: DrawnNode) -> None:
    was = data.draw(grounds(world))
    found = find(*was, before=None)
    terms = weigh(found.occupancy, was[0], GIB, MIB)
    shown = [(what, now) for what, now in changes(data.draw, was) if now[1:] == was[1:]]
    shown += [("measured", (measured_otherwise(data.draw, was[0]), *was[1:])) for _ in range(5)]
    for what, now in shown:
        quick = with_new_measurements(terms, found.occupancy, was[0], now[0], MIB)
        if quick is not None:
            assert quick == weigh(find(*now, before=None).occupancy, now[0], GIB, MIB), what


PROMISES = {"a": reservation({"D0": 8 * GIB}), "b": reservation({"D0": 4 * GIB, "D1": 4 * GIB})}


def shown(
    a_bytes: int | None = 2 * GIB, unattributed_bytes: int | None = 0, **of_device: Any
) -> GPUNodeStatus:
    used_bytes = (a_bytes or 2 * GIB) + (unattributed_bytes or 0)
    first = shared("D0", used_bytes=used_bytes, unattributed_bytes=unattributed_bytes)
    pods = [use("a", "D0", a_bytes)]
    return status(replace(first, **of_device), shared("D1", unattributed_bytes=0), pods=pods)


def _with_rows(was: GPUNodeStatus, *rows: PodUse) -> GPUNodeStatus:
    return replace(was, pods=[*was.pods, *rows])


STRAY = use("stray", "D0", GIB)
TWICE = use("a", "D0", GIB, replica="1")


def after(was: GPUNodeStatus, now: GPUNodeStatus) -> tuple[DeviceTerms, ...] | None:
    found = found_of(was, PROMISES)
    terms = weigh(found.occupancy, was, GIB, 64 * MIB)
    quick = with_new_measurements(terms, found.occupancy, was, now, 64 * MIB)
    if quick is not None:
        assert quick == weigh(found_of(now, PROMISES).occupancy, now, GIB, 64 * MIB)
    return quick


@pytest.mark.parametrize(
    ("was", "now"),
    [
        pytest.param(shown(), shown(8 * GIB), id="as much as was asked for"),
        pytest.param(shown(7 * GIB), shown(GIB), id="memory is freed"),
        pytest.param(shown(9 * GIB), shown(9 * GIB, utilization_ratio=1.0), id="no memory"),
        pytest.param(
            shown(), shown(unattributed_bytes=64 * MIB), id="unattributed use within the tolerance"
        ),
        pytest.param(shown(9 * GIB, GIB), shown(9 * GIB, GIB), id="nothing at all"),
        pytest.param(
            shown(unattributed_bytes=None), shown(8 * GIB, None), id="use is not attributed"
        ),
        pytest.param(
            _with_rows(shown(unattributed_bytes=None, used_bytes=3 * GIB), STRAY),
            _with_rows(shown(unattributed_bytes=None, used_bytes=9 * GIB), STRAY),
            id="use is not attributed, beside an unreserved pod",
        ),
        pytest.param(shown(), shown(sm_activity=SmActivity(0.5, "gpm")), id="SM activity"),
    ],
)
def test_terms_are_reused_if_no_charge_changes(was: GPUNodeStatus, now: GPUNodeStatus) -> None:
    quick = after(was, now)
    assert quick is not None
    measured_bytes = now.pods[0].used_bytes
    assert [h.measured_bytes for h in quick[0].holders if h.uid == "a"] == [measured_bytes]
    assert quick[0].device is now.devices[0]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        pytest.param(shown(), shown(8 * GIB + 1), id="more than was asked for"),
        pytest.param(shown(9 * GIB), shown(8 * GIB), id="no longer more than that"),
        pytest.param(shown(), shown(None), id="the driver does not report it any more"),
        pytest.param(shown(), shown(0), id="it frees all memory"),
        pytest.param(shown(0), shown(GIB), id="it takes its first memory"),
        pytest.param(shown(None), shown(GIB), id="the driver reports it again"),
        pytest.param(shown(), shown(unattributed_bytes=64 * MIB + 1), id="strangers"),
        pytest.param(shown(unattributed_bytes=GIB), shown(), id="strangers go"),
        pytest.param(shown(), shown(unattributed_bytes=None), id="use is not attributed any more"),
        pytest.param(
            shown(unattributed_bytes=None),
            shown(8 * GIB + 65 * MIB, None),
            id="a process uses more",
        ),
        pytest.param(shown(), shown(healthy=False), id="the device breaks"),
        pytest.param(shown(healthy=False), shown(8 * GIB, healthy=False), id="it is broken"),
        pytest.param(shown(), shown(used_bytes=25 * GIB), id="more than there is"),
        pytest.param(
            shown(), shown(unattributed_bytes=3 * GIB, used_bytes=GIB), id="more than is used"
        ),
        pytest.param(shown(), shown(reserved_bytes=GIB), id="the driver keeps more"),
        pytest.param(shown(), shown(memory_bytes=23 * GIB), id="there is less of it"),
        pytest.param(shown(), _with_rows(shown(), STRAY), id="a pod is seen"),
        pytest.param(_with_rows(shown(), STRAY), shown(), id="a pod is not seen any more"),
        pytest.param(
            _with_rows(shown(), STRAY),
            _with_rows(shown(), replace(STRAY, used_bytes=2 * GIB)),
            id="an unreserved pod uses more",
        ),
        pytest.param(
            _with_rows(shown(), TWICE),
            _with_rows(shown(), replace(TWICE, used_bytes=7 * GIB)),
            id="one of two rows of a pod grows",
        ),
        pytest.param(shown(), replace(shown(), plugin=Plugin(steered=["x"])), id="the plugin"),
        pytest.param(shown(), replace(shown(), devices=shown().devices[:1]), id="fewer devices"),
        pytest.param(
            shown(), replace(shown(), pods=[use("other", "D0", 2 * GIB)]), id="another pod"
        ),
        pytest.param(
            shown(), replace(shown(), pods=[use("a", "D1", 2 * GIB)]), id="another device"
        ),
        pytest.param(
            shown(), replace(shown(), pods=[use("a", "D0", 2 * GIB, replica="7")]), id="replica"
        ),
    ],
)
def test_terms_are_computed_if_any_charge_changes(was: GPUNodeStatus, now: GPUNodeStatus) -> None:
    assert after(was, now) is None


def test_unattributed_use_of_one_memory_is_added_up() -> None:
    was = status(*(mig(f"M{i}", gpu_instance=1, unattributed_bytes=0) for i in (0, 1)))
    found = found_of(was, {})
    terms = weigh(found.occupancy, was, 0, 64 * MIB)
    devices = [replace(d, unattributed_bytes=40 * MIB, used_bytes=80 * MIB) for d in was.devices]
    now = replace(was, devices=devices)
    assert [t.unattributed_bytes for t in weigh(found.occupancy, now, 0, 64 * MIB)] == [
        16 * MIB
    ] * 2
    assert with_new_measurements(terms, found.occupancy, was, now, 64 * MIB) is None
