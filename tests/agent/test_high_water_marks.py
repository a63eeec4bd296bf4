"""Tests peaks from the high-water marks of cgroups, which some kernels provide."""

from collections.abc import Callable
from pathlib import Path

import pytest

from agent.probes.driver_limits_probe import LimitsProbe
from agent.probes.readings import (
    FactsReading,
    HighWaterReading,
    Reading,
    SourceReading,
)
from tests.agent.limited import SAMPLE, UIDS, granting, reported
from tests.agent.whole import Whole
from tests.driver import GIB

#: The file with the high-water marks. Its region names come from NVIDIA's documentation of dmem.
PEAKS = """\
nvidia/0000:17:00.0/vidmem {bytes}
nvidia/0000:65:00.0/vidmem 7
drm/0000:03:00.0/vram0 9
"""
FACTS: list[Reading] = [
    FactsReading("nvml", "A", pci_bus_id="00000000:17:00.0"),
    FactsReading("nvml", "B", pci_bus_id="00000000:65:00.0"),
]


def marked(folder: Path, text: str, uid: str = UIDS[1]) -> None:
    """Write the file with the high-water marks of the pod's only container."""
    container = folder / f"kubepods/pod{uid}" / f"{1:064x}"
    container.mkdir(parents=True)
    (container / "dmem.peak").write_text(text)


def marks(readings: list[Reading]) -> list[tuple[str, str, str, int]]:
    return [
        (r.device, r.uid, r.container_id, r.peak_bytes)
        for r in readings
        if isinstance(r, HighWaterReading)
    ]


def test_a_container_has_the_high_water_mark_of_the_device_that_it_holds(
    probe: Callable[..., LimitsProbe], tmp_path: Path
) -> None:
    marked(tmp_path, PEAKS.format(bytes=12 * GIB))
    found = probe(granting(0)).follow([*SAMPLE, *FACTS])
    assert marks(found) == [("A", UIDS[1], f"{1:064x}", 12 * GIB)]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param(PEAKS.format(bytes="max"), id="not a number"),
        pytest.param(PEAKS.format(bytes=0), id="nothing used"),
        pytest.param(PEAKS.format(bytes=1 << 45), id="more memory than any device"),
        pytest.param("nvidia/0000:17:00.0/vidmem", id="no value"),
        pytest.param("nvidia/0000:18:00.0/vidmem 5\n", id="unknown device"),
    ],
)
def test_other_high_water_marks_are_ignored(
    probe: Callable[..., LimitsProbe], tmp_path: Path, text: str
) -> None:
    marked(tmp_path, text)
    found = probe(granting(0)).follow([*SAMPLE, *FACTS])
    assert marks(found) == []
    assert SourceReading("limits") in found


def test_a_kernel_without_high_water_marks_is_not_a_fault(
    probe: Callable[..., LimitsProbe], tmp_path: Path
) -> None:
    (tmp_path / f"kubepods/pod{UIDS[1]}" / f"{1:064x}").mkdir(parents=True)
    found = probe(granting(0)).follow([*SAMPLE, *FACTS])
    assert (marks(found), SourceReading("limits") in found) == ([], True)


@pytest.mark.slow  # starts an agent
def test_high_water_marks_are_in_the_report(whole: Whole) -> None:
    limited = whole.cgroup(UIDS[0])
    address = "0000:01:00.0"  # This is the bus address of the fake library's first device.
    (limited / "dmem.peak").write_text(f"nvidia/{address}/vidmem {9 * GIB}\n")
    pods = {pod["name"]: pod for pod in reported(whole)["pods"]}
    assert (pods["limited"]["peak"], pods["limited"]["peakSource"]) == (9 * GIB, "driver")
    assert "peakPartial" not in pods["limited"]
    assert (pods["counted"]["peak"], pods["counted"]["peakSource"]) == (GIB, "nvml")
    # The peak is partial, because a single sample does not know earlier use.
    assert pods["counted"]["peakPartial"] is True
    assert "startupPeak" not in pods["counted"]
