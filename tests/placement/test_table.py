"""Tests columns and snapshots, which never change after publication."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.contract.gpunode import Replicas, SmActivity
from headroom.contract.reasons import Reason
from headroom.core.placement.demand_pricing import market
from headroom.core.placement.snapshot import CODE_OF, Snapshot
from headroom.core.placement.snapshot_builder import _COLUMNS, Table, build
from tests.builders import GIB, device, mig, reservation, shared, weighed

MOST_BYTES = 1 << 61


def copied(snap: Snapshot) -> dict[str, object]:
    return {
        "names": [node.name for node in snap.nodes],
        "row_of": dict(snap.row_of),
        "resources": dict(snap.resources),
        "rank": snap.name_rank.tolist(),
        "reasons": snap.node_reason.tolist(),
        "fresh": snap.fresh_until_s.tolist(),
        "spare": snap.spare_bytes.tolist(),
        **{name: getattr(snap.columns, name).tolist() for name, _ in _COLUMNS},
    }


changes = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "drop", "look"]), st.integers(0, 5), st.integers(0, 3)
    ),
    max_size=30,
)


@settings(deadline=None)
@given(changes)
def test_snapshots_are_immutable_and_equal_newly_built_ones(
    steps: list[tuple[str, int, int]],
) -> None:
    table = Table()
    held: list[tuple[Snapshot, dict[str, object]]] = []
    nodes = {}
    for verb, number, devices in steps:
        name = f"n{number}"
        if verb == "put":
            of = [shared(f"{name}-{i}", free=i, resource=f"r{i}") for i in range(devices)]
            nodes[name] = weighed(*of, name=name, fresh_until_s=float(devices))
            table.put(nodes[name])
        elif verb == "drop":
            table.drop(name)
            nodes.pop(name, None)
        else:
            snap = table.snapshot()
            assert table.snapshot() is snap
            held.append((snap, copied(snap)))
    for snap, before in held:
        assert copied(snap) == before
    snap = table.snapshot()
    assert {node.name: node for node in snap.nodes} == nodes
    names = sorted(nodes)
    assert [snap.nodes[row].name for row in snap.rows(names)] == names
    assert snap.name_rank[snap.rows(names)].tolist() == list(range(len(names)))
    afresh = build(nodes[name] for name in names)
    for name in names:
        row, again = snap.row_of[name], afresh.row_of[name]
        assert snap.fresh_until_s[row] == afresh.fresh_until_s[again]
        for column, _ in _COLUMNS:
            if column != "resource":
                slots = len(nodes[name].devices)
                now, then = getattr(snap.columns, column), getattr(afresh.columns, column)
                assert (now[row, :slots] == then[again, :slots]).all()
                assert (now[row, slots:] == -1).all()


def test_every_array_is_read_only() -> None:
    snap = build([weighed(device())])
    arrays = [getattr(snap.columns, name) for name, _ in _COLUMNS]
    for array in [*arrays, snap.node_reason, snap.fresh_until_s, snap.name_rank]:
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_generations_grow_only_with_changes() -> None:
    table = Table()
    first = table.snapshot()
    table.put(weighed(device()))
    second = table.snapshot()
    table.drop("nobody")
    assert table.snapshot() is second
    assert second.generation == first.generation + 1


def test_devices_removed_from_a_node_are_deleted() -> None:
    table = Table()
    table.put(weighed(device("a"), device("b")))
    table.put(weighed(device("a")))
    assert (table.snapshot().columns.memory_bytes == [[24 * GIB, -1]]).all()


def test_unknown_names_have_no_row() -> None:
    snap = build([weighed(device(), name="a")])
    assert snap.rows(["b", "a", "b"]).tolist() == [-1, 0, -1]


@pytest.mark.parametrize(
    "names", [[], ["a"], ["c", "a", "b"], ["a", "b", "x"], ["a", "b", "b"], ["b", "c", "a", "x"]]
)
def test_node_names_map_to_their_rows_in_any_order(names: list[str]) -> None:
    table = Table()
    for name in ("x", "a", "b", "c"):
        table.put(weighed(shared(), name=name))
    table.drop("x")  # The last node gets its row.
    snap = table.snapshot()
    expected = sorted((name, {"c": 0, "a": 1, "b": 2}.get(name, -1)) for name in names)
    found, rows = snap.sorted_by_row(names)
    assert sorted(zip(found, rows.tolist(), strict=True)) == expected


def test_contradictory_values_do_not_reach_the_columns() -> None:
    snap = build([weighed(device(memory_bytes=1 << 90, replicas=Replicas(free=1 << 70)))])
    assert snap.columns.health_issue[0, 0] == CODE_OF[Reason.CONTRADICTORY_REPORT]
    assert snap.columns.memory_bytes[0, 0] == snap.columns.allocatable_bytes[0, 0] == 0
    assert snap.columns.replicas_free[0, 0] == 1 << 20


@pytest.mark.parametrize(
    "replicas",
    [
        pytest.param(Replicas(free=-1), id="negative free count"),
        pytest.param(Replicas(allocated=-1), id="negative allocated count"),
    ],
)
def test_an_impossible_count_does_not_prove_that_no_replica_is_free(
    replicas: Replicas,
) -> None:
    snap = build([weighed(device(replicas=replicas))])
    assert snap.columns.replicas_free[0, 0] == 1


def test_huge_reservations_stay_large() -> None:
    held = {"u": reservation({"D": 1 << 100}, count=1 << 40)}
    snap = build([weighed(shared("D"), reservations=held)])
    assert snap.columns.free_bytes[0, 0] == snap.columns.headroom_bytes[0, 0] == -MOST_BYTES
    assert snap.columns.replicas_unconfirmed[0, 0] == 1 << 20


@pytest.mark.parametrize(
    ("activity", "ppm"),
    [
        pytest.param(None, -1, id="absent"),
        pytest.param(SmActivity(0.25, "gpm"), 250_000, id="measured"),
        pytest.param(SmActivity(0.0, "gpm"), 0, id="idle"),
        pytest.param(SmActivity(1.5, "gpm"), -1, id="impossible"),
        pytest.param(SmActivity(-0.1, "gpm"), -1, id="negative"),
        pytest.param(SmActivity(math.nan, "gpm"), -1, id="not a number"),
        pytest.param(SmActivity(0.25, "nvml"), -1, id="device utilisation"),
        pytest.param(SmActivity(0.25), -1, id="the source is missing"),
    ],
)
def test_sm_activity_is_a_value_or_absent(activity: SmActivity | None, ppm: int) -> None:
    snap = build([weighed(device(sm_activity=activity))])
    assert snap.columns.sm_ppm[0, 0] == ppm


def test_an_empty_table_works() -> None:
    snap = build([])
    assert snap.columns.memory_bytes.shape == (0, 0)
    assert snap.rows(["a"]).tolist() == [-1]
    assert snap.name_rank.dtype == np.int32


def test_memory_that_compute_instances_share_counts_once_in_sums() -> None:
    """Otherwise a node with many instances would look emptier than it is."""
    instances = [mig(f"MIG-{number}", 1) for number in range(3)]
    snap = build([weighed(*instances, mig("MIG-other", 2), name="n")])
    assert snap.node_headroom_bytes.tolist() == [20 * GIB - 1]  # Thirds are rounded down.
    assert snap.node_memory_bytes.tolist() == [20 * GIB - 1]
    assert Table.after(snap).snapshot().node_memory_bytes.tolist() == [20 * GIB - 1]
    found = market(snap, {}, 0)
    assert found is not None
    assert found.mean_bytes == pytest.approx(10 * GIB)
