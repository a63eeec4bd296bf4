"""Tests tables of bodies that an embedded fleet cannot produce: missed predictions, overuse and
what-ifs.
"""

from typing import Any

from headroom.kubectl import tables
from headroom.kubectl.table import Table

GIB = 1 << 30
ON_A = {"uuid": "GPU-a", "reserved_bytes": 8 * GIB, "measured_bytes": 10 * GIB}
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


def column(table: Table, name: str) -> list[str]:
    at = table.columns.index(name)
    return [row[at] for row in table.rows]


def test_drift_highlights_overuse_and_missed_predictions() -> None:
    only_over = RIGHT | {"overuse_bytes": GIB}
    table = tables.drift({"pods": [MISSED, RIGHT, only_over]}, None)
    assert column(table, "STATE") == [
        "predicted GPU-b +1, got GPU-a: a replica was released in between; "
        "uses 2.0 GiB more than reserved",
        "ok",
        "uses 1.0 GiB more than reserved",
    ]
    assert column(table, "RESERVED") == ["8.0 GiB"] * 3
    assert column(table, "USED") == ["10.0 GiB"] * 3
    assert table.bad == {0, 2}
    assert {len(row) for row in table.rows} == {len(table.columns)}


CLAIMED: dict[str, Any] = {
    "node": "n",
    "uuid": "GPU-a",
    "pool": "n",
    "device": "gpu-0",
    "namespace": "team-a",
    "name": "p",
    "uid": "uid-p",
    "claims": ["p-gpu-x"],
    "claimed_bytes": 8 * GIB,
    "measured_bytes": 10 * GIB,
    "excess_bytes": 2 * GIB,
}
NO_POD = {"namespace": "", "name": "", "uid": "", "claims": [], "claimed_bytes": 0}


def test_drift_shows_claims_of_dra_next_to_measured_use() -> None:
    within = CLAIMED | {"measured_bytes": None, "excess_bytes": 0}
    body = {"pods": [], "claims": [CLAIMED, within, CLAIMED | NO_POD]}
    table = tables.drift(body, None)
    assert column(table, "STATE") == [
        "uses 2.0 GiB more than its claims",
        "ok",
        "processes of no known pod use 2.0 GiB of GPU-a",
    ]
    assert column(table, "RESERVED") == ["8.0 GiB", "8.0 GiB", "0.0 GiB"]
    assert column(table, "USED") == ["10.0 GiB", "-", "10.0 GiB"]
    assert column(table, "POD") == ["p", "p", "-"]
    assert table.bad == {0, 2}
    wide = tables.drift(body, "team-a", wide=True)
    assert column(wide, "PREDICTED") == ["p-gpu-x", "p-gpu-x"]
    assert column(wide, "ACTUAL") == ["GPU-a", "GPU-a"]


def test_wide_drift_shows_every_device() -> None:
    chosen = RIGHT | {"choice": ["GPU-a"]}
    table = tables.drift({"pods": [MISSED, chosen]}, None, wide=True)
    assert column(table, "PREDICTED") == ["GPU-b, GPU-c", "GPU-a"]
    assert column(table, "ACTUAL") == ["GPU-a", "GPU-a"]
    assert column(table, "POD UID") == ["uid-p", "uid-p"]
    assert {len(row) for row in table.rows} == {len(table.columns)}


ASK = {"amount": "20Gi", "count": 1, "resource": "nvidia.com/gpu"}
WAITS: dict[str, Any] = {
    "namespace": "team-a",
    "name": "p",
    "since": "2026-11-22T03:00:00Z",
    "request": [ASK, ASK | {"count": 2, "amount": "25%"}],
    "fits": 0,
    "nearest": "n",
    "short_bytes": 3 * GIB,
    "message": "no node can take the pod",
}


def test_pending_shows_the_age_like_kubectl() -> None:
    unknown = {"since": None, "request": [], "nearest": None, "short_bytes": None}
    body = {"generated_at": "2026-11-22T05:30:00.5+00:00", "pods": [WAITS, WAITS | unknown]}
    assert tables.pending(body).rows == [
        ("team-a", "p", "2h", "20Gi, 2 x 25%", "3.0 GiB", "n", "no node can take the pod"),
        ("team-a", "p", "-", "-", "-", "-", "no node can take the pod"),
    ]
    wide = tables.pending(body, wide=True)
    assert column(wide, "RESOURCE") == ["nvidia.com/gpu", "-"]
    assert column(wide, "SINCE") == ["2026-11-22T03:00:00Z", "-"]


def test_pending_shows_a_group_in_one_row() -> None:
    group = {"name": "train", "waiting": 5, "requests": "5 x 12Gi", "message": "3 of 8 are bound"}
    pods = [WAITS, *(WAITS | {"name": f"train-{i}", "group": group} for i in range(3, 8))]
    others = [WAITS | {"namespace": "team-b", "group": group | {"waiting": 1}}]
    body = {"generated_at": "2026-11-22T05:30:00.5+00:00", "pods": pods + others}
    assert tables.pending(body).rows[1:] == [
        ("team-a", "train (5 pods)", "2h", "5 x 12Gi", "-", "-", "3 of 8 are bound"),
        ("team-b", "train (1 pod)", "2h", "5 x 12Gi", "-", "-", "3 of 8 are bound"),
    ]
    wide = tables.pending(body, wide=True)
    assert column(wide, "FITS") == ["0", "-", "-"]
    assert column(wide, "RESOURCE") == ["nvidia.com/gpu"] * 3


PLACED = {
    **{"pod": "default/asked-0-0", "leaves": None, "node": "n", "score_ratio": 0.5},
    **{"devices": ["GPU-a"], "most_bytes": GIB},
}
REASON = {"message": "insufficient GPU memory on any device", "nodes": 1}
REJECTED = {
    **{"pods": ["default/asked-0-1"], "leaves": None, "not_tried": None},
    **{"reasons": [REASON], "ineligible": []},
}


def test_totals_of_a_whatif_are_rows_with_differences() -> None:
    before = {"pods": 1200, "reserved_bytes": 27 * GIB, "headroom_bytes": 65 * GIB}
    after = {"pods": 1198, "reserved_bytes": 35 * GIB, "headroom_bytes": 49 * GIB}
    table = tables.before_and_after(
        {
            "rejected": 3,
            "before": before | {"devices": 4, "devices_in_use": 2, "devices_empty": 2},
            "after": after | {"devices": 4, "devices_in_use": 3, "devices_empty": 1},
        }
    )
    assert table.rows == [
        ("Pods placed", "1,200", "1,198", "-2"),
        ("Pods that would not fit", "0", "3", "+3"),
        ("GPU memory reserved", "27.0 GiB", "35.0 GiB", "+8.0 GiB"),
        ("GPU memory free", "65.0 GiB", "49.0 GiB", "-16.0 GiB"),
        ("GPUs", "4", "4", "0"),
        ("GPUs in use", "2", "3", "+1"),
        ("GPUs empty", "2", "1", "-1"),
    ]
    assert table.bad == {1}


def test_equal_unplaced_pods_of_a_whatif_share_a_row() -> None:
    three = REJECTED | {"pods": [f"default/asked-0-{number}" for number in (1, 2, 3)]}
    body = {
        "placements": [PLACED, PLACED | {"devices": ["GPU-a", "GPU-b"]}],
        "rejections": [REJECTED, three],
    }
    table = tables.moves(body)
    assert table.columns == ("POD", "TO", "SCORE", "STATE")
    assert column(table, "STATE") == [
        "on GPU-a",
        "one of 2 GPUs",
        "1 node: insufficient GPU memory on any device",
        "and 2 more pods: 1 node: insufficient GPU memory on any device",
    ]
    assert table.bad == {2, 3}
    moved = tables.moves({"placements": [PLACED | {"leaves": "m"}], "rejections": [REJECTED]})
    assert column(moved, "FROM") == ["m", "-"]


def test_an_event_shows_its_cause_before_its_message() -> None:
    event = {
        **{"at": "2026-11-22T03:11:03.512+00:00", "kind": "decision", "cause": "bound"},
        **{"namespace": "default", "name": "p", "node": "n", "message": None, "device": None},
    }
    assert tables.feed_event(event) == (
        "2026-11-22T03:11:03Z",
        "decision",
        "default/p",
        "n",
        "bound",
    )
    appeared = event | {"kind": "pod_observed", "cause": None, "device": "GPU-a"}
    assert tables.feed_event(appeared)[-1] == "GPU-a"
