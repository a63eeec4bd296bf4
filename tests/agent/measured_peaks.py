"""The peaks in a row of a report."""

from typing import Any

from contract.gpunode import PodUse

A = "GPU-a", "c1"


def peaks(row: PodUse) -> dict[str, Any]:
    """The fields of a row that this is about, without those that are absent."""
    names = [
        "peak_bytes",
        "startup_peak_bytes",
        "peak_source",
        "peak_partial",
        "started_at",
        "settled_at",
    ]
    return {name: found for name in names if (found := getattr(row, name))}
