"""Tests the tables of `kubectl headroom idle`, and the command with a debug API."""

from typing import Any

import pytest

from headroom.kubectl.idle import By, table
from headroom.kubectl.sheet import show_csv
from headroom.kubectl.table import laid_out

GIB = 1 << 30
POD: dict[str, Any] = {
    "namespace": "ml",
    "name": "notebook",
    "uid": "u",
    "node": "gpu-a",
    "device": "GPU-1",
    "owner_kind": "StatefulSet",
    "owner_name": "notebook",
    "used_bytes": 4 * GIB,
    "reserved_bytes": 12 * GIB,
    "held_bytes": 12 * GIB,
    "gpu_ratio": 0.5,
    "idle_since": "2026-11-19T00:00:00Z",
    "idle_s": 172_800.0,
    "gpu_days": 1.0,
    "cost": 60.0,
}
SUMS: dict[str, Any] = {
    "namespace": "ml",
    "pods": 1,
    "held_bytes": 12 * GIB,
    "gpus_ratio": 0.5,
    "gpu_days": 1.0,
    "cost": 60.0,
}
OTHER = SUMS | {"namespace": "web", "pods": 2, "gpus_ratio": 1.25, "gpu_days": 0.5, "cost": 1500.5}
BODY: dict[str, Any] = {
    "gpu_hour_price": 2.5,
    "devices_without_sm_activity": 0,
    "teams": [SUMS, OTHER],
    "owners": [SUMS | {"kind": "StatefulSet", "name": "notebook"}],
    "pods": [POD, POD | {"owner_kind": None, "owner_name": None, "used_bytes": None}],
}
FREE: dict[str, Any] = BODY | {"gpu_hour_price": None}


def lines(body: dict[str, Any], by: By, wide: bool = False) -> list[str]:
    return [" ".join(line.split()) for _, line in laid_out(table(body, by, wide), None)]


def test_each_pod_and_the_total_have_a_line() -> None:
    assert lines(BODY, By.POD) == [
        "NAMESPACE POD NODE IDLE HELD GPUS GPU DAYS COST",
        "ml notebook gpu-a 2d 12.0 GiB 0.50 1.00 60.00",
        "ml notebook gpu-a 2d 12.0 GiB 0.50 1.00 60.00",
        "3 pods: 1.75 GPUs, idle for 1.50 GPU days, which cost 1,560.50",
    ]


def test_without_a_price_there_are_no_costs() -> None:
    assert lines(FREE, By.NAMESPACE) == [
        "NAMESPACE PODS HELD GPUS GPU DAYS",
        "ml 1 12.0 GiB 0.50 1.00",
        "web 2 12.0 GiB 1.25 0.50",
        "3 pods: 1.75 GPUs, idle for 1.50 GPU days",
    ]


def test_each_owner_has_a_line() -> None:
    assert lines(BODY, By.OWNER)[:2] == [
        "NAMESPACE OWNER PODS HELD GPUS GPU DAYS COST",
        "ml StatefulSet/notebook 1 12.0 GiB 0.50 1.00 60.00",
    ]


def test_wide_output_adds_use_owner_time_and_device() -> None:
    assert lines(FREE, By.POD, wide=True)[1:3] == [
        "ml notebook gpu-a 2d 12.0 GiB 0.50 1.00 4.0 GiB StatefulSet/notebook"
        " 2026-11-19T00:00:00Z GPU-1",
        "ml notebook gpu-a 2d 12.0 GiB 0.50 1.00 - - 2026-11-19T00:00:00Z GPU-1",
    ]


@pytest.mark.parametrize("by", By)
def test_without_pods_there_is_no_total(by: By) -> None:
    empty = BODY | {"teams": [], "owners": [], "pods": []}
    assert len(lines(empty, by)) == 1


def test_rows_are_printed_as_csv_with_the_fields_of_the_api(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_csv([SUMS | {"owners": [1]}, OTHER | {"owners": []}])
    assert capsys.readouterr().out.splitlines() == [
        "namespace,pods,held_bytes,gpus_ratio,gpu_days,cost",
        "ml,1,12884901888,0.5,1.0,60.0",
        "web,2,12884901888,1.25,0.5,1500.5",
    ]
    show_csv(BODY["pods"][1:])
    (_, line) = capsys.readouterr().out.splitlines()
    assert line.startswith("ml,notebook,u,gpu-a,GPU-1,,,,12884901888,")  # null is an empty cell
