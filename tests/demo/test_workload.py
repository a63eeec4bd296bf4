"""The generated fleet and workload have the published counts and proportions."""

from collections import Counter

import msgspec
import pytest
import yaml

from benchmarks.demo import fleet as fleets
from benchmarks.demo.fleet import Fleet, Shape, divide
from benchmarks.demo.workload import (
    PUBLISHED_PODS,
    SHARED,
    WHOLE,
    Workload,
    apportion,
    published,
    quantile_mib,
)
from headroom.contract.kube import Pod


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


def test_a_smaller_workload_keeps_the_proportions_within_one_pod() -> None:
    workload = published(2000)
    assert len(workload.pods) == 2000
    assert abs(len(workload.sharing_mib) - 2000 * 3078 / 7064) < 1


def test_requests_follow_the_published_quantiles() -> None:
    sizes = sorted(published(PUBLISHED_PODS).sharing_mib)
    assert sizes[0] >= 755
    assert sizes[-1] <= 65813
    for percent, mib in ((5, 4834), (25, 7595), (50, 10683), (75, 18412), (95, 26333)):
        assert abs(sizes[len(sizes) * percent // 100] - mib) < mib // 50


def test_quantiles_are_monotonic() -> None:
    sizes = [quantile_mib(i, 999) for i in range(999)]
    assert sizes == sorted(sizes)


def test_the_workload_is_deterministic() -> None:
    assert published(300) == published(300)


@pytest.mark.parametrize(
    ("total", "weights", "parts"),
    [
        pytest.param(10, [1, 1], [5, 5], id="even"),
        pytest.param(1, [1, 2], [0, 1], id="the largest remainder"),
        pytest.param(3, [1, 1, 1, 1], [1, 1, 1, 0], id="equal remainders, the first"),
        pytest.param(0, [3, 4], [0, 0], id="nothing"),
    ],
)
def test_apportion(total: int, weights: list[int], parts: list[int]) -> None:
    assert apportion(total, weights) == parts


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


def test_the_pools_have_different_resource_names() -> None:
    fleet = divide(fleets.PUBLISHED, published(2000))
    assert {(g.shared, g.resource) for g in fleet.groups} == {(True, SHARED), (False, WHOLE)}


def test_other_shapes_are_shared_only_after_all_preferred_ones() -> None:
    small, wide = Shape("A", 1, 1000, 2), Shape("B", 8, 500, 10)
    one_pod = Workload(published(3).pods)
    fleet = divide([small, wide], one_pod)
    shared = {g.shape.model: g.count for g in fleet.groups if g.shared}
    assert shared["A"] == 2
    assert shared["B"] > 0


def test_the_fleet_file_names_the_same_nodes_as_the_demo() -> None:
    """The server derives the same node names from the fleet file."""
    from headroom.runtime.settings.fleet_file import Fleet as ServedFleet

    fleet: Fleet = divide(fleets.PUBLISHED, published(500))
    served = ServedFleet.model_validate(yaml.safe_load(fleet.yaml()))
    assert [name for entry in served.nodes for name in entry.names()] == [
        node.name for node in fleet.nodes
    ]


def test_the_extender_can_decode_the_pods() -> None:
    for demo_pod in published(50).pods:
        pod = msgspec.json.decode(demo_pod.body, type=Pod)
        assert (pod.metadata.name, pod.metadata.uid) == (demo_pod.name, demo_pod.uid)
        assert (pod.annotation("headroom.gpu/vram") is None) == (demo_pod.vram_mib is None)
