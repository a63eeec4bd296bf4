"""Checks that the generated fleet and workload have the published counts and proportions."""

from collections import Counter

import pytest
import yaml

from benchmarks.demo import fleet as fleets
from benchmarks.demo.fleet import Fleet, divide
from benchmarks.demo.workload import (
    PUBLISHED_PODS,
    published,
)


def test_the_whole_workload_has_the_published_counts() -> None:
    pods = published(PUBLISHED_PODS).pods
    assert PUBLISHED_PODS == 7064
    assert Counter((pod.vram_mib is not None, pod.devices) for pod in pods) == {
        (True, 1): 3078,
        (False, 1): 3911,
        (False, 2): 16,
        (False, 4): 15,
        (False, 8): 44,
    }
    assert len({pod.name for pod in pods}) == len({pod.uid for pod in pods}) == 7064


def test_the_fleet_has_the_published_counts() -> None:
    shapes = fleets.PUBLISHED
    assert sum(shape.nodes for shape in shapes) == 1213
    assert sum(shape.nodes * shape.gpus for shape in shapes) == 6212
    gpus: Counter[str] = Counter()
    for shape in shapes:
        gpus[shape.model] += shape.nodes * shape.gpus
    assert gpus == {
        "G2": 4392,
        "T4": 842,
        "G3": 312,
        "P100": 265,
        "V100M32": 204,
        "V100M16": 195,
        "A10": 2,
    }
    assert round(sum(shape.nodes * shape.node_mib for shape in shapes) / 1024) == 148_486


@pytest.mark.parametrize("pods", [1000, 2000, PUBLISHED_PODS])
def test_sharing_pods_request_80_to_90_percent_of_the_shared_pool(pods: int) -> None:
    workload = published(pods)
    fleet = divide(fleets.PUBLISHED, workload)
    load_percent = sum(workload.sharing_mib) * 100 // fleet.memory_mib(shared=True)
    assert 80 <= load_percent <= 90
    assert len(fleet.nodes) == len({node.name for node in fleet.nodes}) == 1213
    assert fleet.gpus == 6212


def test_the_fleet_file_has_the_same_nodes_as_the_demo() -> None:
    """The server derives these node names from the fleet file."""
    from headroom.runtime.settings.fleet_file import Fleet as ServedFleet

    fleet: Fleet = divide(fleets.PUBLISHED, published(500))
    served = ServedFleet.model_validate(yaml.safe_load(fleet.yaml()))
    assert [name for entry in served.nodes for name in entry.names()] == [
        node.name for node in fleet.nodes
    ]
