"""Tests the explanations of contradictory values of a device."""

from typing import Any

import pytest

from headroom.contract.gpunode import Device
from headroom.contract.reasons import Reason
from headroom.core.placement.device_reading import health_issues

GIB = 1 << 30
FINE = {"memory_bytes": 40 * GIB, "reserved_bytes": GIB, "used_bytes": 8 * GIB}


def issue(**given: Any) -> tuple[Reason | None, str]:
    (found,) = health_issues([Device("GPU-a", **FINE | given)], [()], {})
    return found


@pytest.mark.parametrize(
    ("given", "detail"),
    [
        pytest.param({"memory_bytes": 0}, "memory is zero", id="no memory"),
        pytest.param({"memory_bytes": -1}, "memory is missing or negative", id="memory missing"),
        pytest.param(
            {"memory_bytes": 32768 * GIB},
            "memory is 32,768.0 GiB, and at most 16,384.0 GiB is possible",
            id="too much memory",
        ),
        pytest.param({"reserved_bytes": -1}, "reserved is missing or negative", id="no reserve"),
        pytest.param(
            {"used_bytes": 40 * GIB + 1},
            "used is 40.1 GiB, and at most 40.0 GiB is possible",
            id="one byte more used than its memory",
        ),
        pytest.param(
            {"unattributed_bytes": 9 * GIB},
            "unattributed is 9.0 GiB, and at most 8.0 GiB is possible",
            id="more unattributed than used",
        ),
    ],
)
def test_a_contradiction_is_explained_in_gib(given: dict[str, Any], detail: str) -> None:
    assert issue(**given) == (Reason.CONTRADICTORY_REPORT, detail)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"used_bytes": 40 * GIB}, id="all memory used"),
        pytest.param({"unattributed_bytes": None}, id="unknown unattributed use"),
        pytest.param({"unattributed_bytes": 8 * GIB}, id="all use unattributed"),
        pytest.param({"memory_bytes": 16384 * GIB}, id="the largest device"),
    ],
)
def test_values_at_their_limits_are_plausible(given: dict[str, Any]) -> None:
    assert issue(**given) == (None, "")
