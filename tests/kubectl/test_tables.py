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


def test_the_state_of_a_gpu_is_why_its_node_takes_no_pods() -> None:
    amounts = (
        "allocatable",
        "reservation",
        "unconfirmed",
        "unreserved_pods",
        "unattributed",
        "used",
        "headroom",
    )
    device = {
        **{f"{name}_bytes": GIB for name in amounts},
        **{"index": 0, "model": "L4", "sharing": "none", "holders": []},
        **{"replicas_free": 1, "replicas_allocated": 0, "replicas_unhealthy": 0},
        **{"sm_activity_ratio": None, "unhealthy": None, "unhealthy_detail": None},
    }
    node = {"name": "n", "message": "no report", "detail": "for 90 s", "devices": [device]}
    table = tables.devices({"nodes": [node]})
    assert column(table, "STATE") == ["no report (for 90 s)"]
    assert table.bad == {0}
