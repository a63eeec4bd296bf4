"""Serves a small fleet for tests of commands, with a running pod and a pod that is too large."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.processes import starts_processes
from tests.serving import Server, serving

FLEET = """\
nodes:
  - {name: shared, count: 2, gpus: 2, memory: 24Gi, model: L4, sharing: time-slicing, replicas: 4}
  - {name: whole, gpus: 1, memory: 80Gi, model: H100}
"""
NODES = ["shared-0000", "shared-0001", "whole"]


@pytest.fixture(scope="module")
@starts_processes
def server() -> Iterator[Server]:
    """A server of a fleet in which one pod runs on shared-0000 and another pod is too large for
    every node.
    """
    with serving(FLEET) as started:
        for name, vram in (("fits", "7Gi"), ("large", "90Gi")):
            asked = started.post("/filter", {"Pod": pod(name, vram), "NodeNames": NODES})
            assert asked.status == 200
        binding = {"PodName": "fits", "PodNamespace": "team-a", "PodUID": "uid-fits"}
        bound = started.post("/bind", binding | {"Node": NODES[0]})
        assert bound.json() == {"Error": ""}
        yield started


def pod(name: str, vram: str) -> dict[str, Any]:
    container = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    metadata = {"namespace": "team-a", "name": name, "uid": f"uid-{name}"}
    annotations = {"headroom.gpu/vram": vram}
    return {
        "metadata": metadata | {"annotations": annotations},
        "spec": {"containers": [container]},
    }


def rows(shown: str) -> list[list[str]]:
    """Return the cells of each row of a table, in which at least two spaces separate columns."""
    return [[cell for cell in line.split("  ") if cell.strip()] for line in shown.splitlines()]
