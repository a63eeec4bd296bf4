"""Tables of bodies that no embedded fleet has: missed predictions, overuse, many devices."""

from typing import Any

from headroom.kubectl import tables

GIB = 1 << 30
ON_A = {"uuid": "GPU-a", "reservation_bytes": 8 * GIB, "measured_bytes": 10 * GIB}
MISSED: dict[str, Any] = {
    "namespace": "team-a",
    "name": "p",
    "uid": "uid-p",
    "node": "n",
    "result": "miss",
    "predicted": ["GPU-b", "GPU-c"],
    "choice": [],
    "observed": [ON_A],
    "surprise": "released",
    "message": "a replica was released in between",
    "since": "2026-11-22T03:00:00Z",
    "window_s": 1.5,
    "overuse_bytes": 2 * GIB,
}
RIGHT = MISSED | {"name": "q", "result": "hit", "overuse_bytes": 0, "message": None}


def column(table: tables.Table, name: str) -> list[str]:
    at = table.columns.index(name)
    return [row[at] for row in table.rows]


def test_drift_highlights_overuse() -> None:
    only_over = RIGHT | {"overuse_bytes": GIB}
    table = tables.drift({"pods": [MISSED, RIGHT, only_over]}, None)
    assert column(table, "OVERUSE") == ["2.0 GiB", "-", "1.0 GiB"]
    assert column(table, "PREDICTED")[0] == "GPU-b +1"
    assert table.bad == {0, 2}
    assert {len(row) for row in table.rows} == {len(table.columns)}


def test_wide_drift_shows_every_device_and_why_the_prediction_was_missed() -> None:
    chosen = RIGHT | {"choice": ["GPU-a"]}
    table = tables.drift({"pods": [MISSED, chosen]}, None, wide=True)
    assert column(table, "PREDICTED") == ["GPU-b, GPU-c", "GPU-a"]
    assert column(table, "MISSED BECAUSE") == ["a replica was released in between", "-"]
    assert column(table, "POD UID") == ["uid-p", "uid-p"]
    assert {len(row) for row in table.rows} == {len(table.columns)}


AMOUNTS = (
    "allocatable",
    "reservation",
    "unconfirmed",
    "unreserved_pods",
    "unattributed",
    "used",
    "headroom",
)


def device(index: int, memory_id: str, **other: Any) -> dict[str, Any]:
    """Return a device of which each amount is 1 GiB."""
    return {
        **{f"{name}_bytes": GIB for name in AMOUNTS},
        **{"index": index, "model": "L4", "sharing": "none", "holders": []},
        **{"uuid": f"GPU-{index}", "memory_id": memory_id},
        **{"replicas_free": 1, "replicas_allocated": 0, "replicas_unhealthy": 0},
        **{"sm_activity_ratio": None, "unhealthy": None, "unhealthy_detail": None},
        **other,
    }


def node(*devices: dict[str, Any], **other: Any) -> dict[str, Any]:
    given = {"name": "n", "message": None, "detail": None, "cordoned": False}
    return {**given, "report_age_s": 1.0, "devices": list(devices), **other}


def test_memory_that_gpus_share_counts_once() -> None:
    holder = {"namespace": "a", "name": "p", "uid": "uid-p", "observed": True}
    holder |= {"requested_bytes": GIB, "measured_bytes": GIB}
    shared = {"holders": [holder]}
    body = {"nodes": [node(device(0, "G/1", **shared), device(1, "G/1", **shared), device(2, "x"))]}
    (row,) = tables.nodes(body).rows
    assert row[:7] == ("n", "3", "2.0 GiB", "6.0 GiB", "2.0 GiB", "2.0 GiB", "2.0 GiB")
    assert row[7] == "3"  # each device has its own replicas
    table = tables.pods(body, None, wide=True)
    assert [column(table, name) for name in ("POD", "GPU", "GPU UUID")] == [
        ["p"],
        ["0, 1"],
        ["GPU-0, GPU-1"],
    ]


def test_the_state_of_a_gpu_is_why_its_node_takes_no_pods() -> None:
    node = {
        **{"name": "n", "message": "no report", "detail": "for 90 s"},
        "devices": [device(0, "GPU-0")],
    }
    table = tables.devices({"nodes": [node]})
    assert column(table, "STATE") == ["no report (for 90 s)"]
    assert table.bad == {0}
