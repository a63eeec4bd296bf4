"""A node with a container whose peaks are measured, and the peaks in a row of a report."""

from typing import Any

import pytest

from headroom.contract.gpunode import PodUse
from tests.agent.lives import Node

A = "GPU-a", "c1"


@pytest.fixture
def node() -> Node:
    """Return a node that the agent has sampled before pod u starts on it with container c1."""
    node = Node()
    node.hold("u")
    node.sample()
    node.run("c1", "u")
    return node


def peaks(row: PodUse) -> dict[str, Any]:
    """Return the peak fields that are set in the row."""
    names = [
        "peak_bytes",
        "startup_peak_bytes",
        "peak_source",
        "peak_partial",
        "started_at",
        "settled_at",
    ]
    return {name: found for name in names if (found := getattr(row, name))}
