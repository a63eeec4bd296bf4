"""Tests `kubectl headroom costs`: the table, the note about missing records, and the CSV."""

from typing import Any

import pytest

from headroom.kubectl.costs import incomplete, table
from headroom.kubectl.sheet import show_csv
from headroom.kubectl.table import laid_out

HOURS: dict[str, Any] = {
    "held_gpu_hours": 1440.0,
    "used_gpu_hours": 1000.0,
    "idle_gpu_hours": 400.0,
    "unmeasured_gpu_hours": 40.0,
    "held_gib_days": 720.0,
    "unused_gib_days": 300.5,
    "unmeasured_gib_days": 0.0,
    "cost": 3600.0,
    "idle_cost": 1000.0,
}
BODY: dict[str, Any] = {
    "from_s": 0.0,
    "to_s": 720 * 3600.0,
    "covered_s": 720 * 3600.0,
    "gpu_hour_price": 2.5,
    "namespaces": [{"namespace": "ml", **HOURS}, {"namespace": "(others)", **HOURS}],
    "total": HOURS | {"held_gpu_hours": 2880.0, "cost": 7200.0, "idle_cost": 2000.0},
}


def lines(body: dict[str, Any]) -> list[str]:
    return [" ".join(line.split()) for _, line in laid_out(table(body), None)]


def test_each_namespace_and_the_total_have_a_line() -> None:
    figures = "1,440.00 1,000.00 400.00 40.00 720.00 300.50"
    assert lines(BODY) == [
        "NAMESPACE GPU HOURS USED IDLE NOT MEASURED GIB DAYS UNUSED COST IDLE COST",
        f"ml {figures} 3,600.00 1,000.00",
        f"(others) {figures} 3,600.00 1,000.00",
        "held 2,880.00 GPU hours, 400.00 idle; cost 7,200.00, of which 2,000.00 idle",
    ]


def test_without_a_price_there_are_no_costs() -> None:
    assert lines(BODY | {"gpu_hour_price": None})[1:3] == [
        "ml 1,440.00 1,000.00 400.00 40.00 720.00 300.50",
        "(others) 1,440.00 1,000.00 400.00 40.00 720.00 300.50",
    ]
    assert lines(BODY | {"gpu_hour_price": None})[-1] == "held 2,880.00 GPU hours, 400.00 idle"


def test_without_namespaces_there_is_no_total() -> None:
    assert len(lines(BODY | {"namespaces": []})) == 1


@pytest.mark.parametrize(
    ("hours", "note"),
    [
        (719.0, ""),
        (360.0, "only 360.0 of 720.0 h are recorded, and the sums cover only these hours"),
    ],
)
def test_partly_recorded_time_is_reported(hours: float, note: str) -> None:
    assert incomplete(BODY | {"covered_s": hours * 3600}) == note


def test_the_csv_has_the_fields_of_the_api(capsys: pytest.CaptureFixture[str]) -> None:
    show_csv(BODY["namespaces"], ["namespace", *BODY["total"]])
    assert capsys.readouterr().out.splitlines()[:2] == [
        "namespace,held_gpu_hours,used_gpu_hours,idle_gpu_hours,unmeasured_gpu_hours,"
        "held_gib_days,unused_gib_days,unmeasured_gib_days,cost,idle_cost",
        "ml,1440.0,1000.0,400.0,40.0,720.0,300.5,0.0,3600.0,1000.0",
    ]


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)"])
def test_no_cell_of_the_csv_is_a_formula(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = {**BODY["namespaces"][0], "namespace": f"{name}\x1b\n"}
    show_csv([row], ["namespace", *BODY["total"]])
    _, line = capsys.readouterr().out.splitlines()
    assert line.startswith(f"'{name}??,")
