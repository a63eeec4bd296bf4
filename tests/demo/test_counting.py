"""The baseline scheduler counts free replicas and ignores memory."""

from benchmarks.demo.counting import CountingScheduler
from benchmarks.demo.fleet import Fleet, Group, Shape
from benchmarks.demo.workload import DemoPod

GPU = Shape("A10", 1, 24576, 2)


def sharing(name: str, vram_mib: int = 1024) -> DemoPod:
    return DemoPod(name, 1, vram_mib)


def test_memory_is_ignored() -> None:
    fleet = Fleet((Group(GPU, 1, 4),))
    outcomes = list(
        CountingScheduler(fleet.nodes, 1).schedule(sharing(f"p{i}", 20480) for i in range(5))
    )
    assert [outcome.node is not None for outcome in outcomes] == [True, True, True, True, False]


def test_picks_the_node_with_the_largest_share_of_free_replicas() -> None:
    fleet = Fleet((Group(GPU, 2, 4),))
    nodes = [o.node for o in CountingScheduler(fleet.nodes, 1).schedule(map(sharing, "abcdefgh"))]
    assert all(nodes[i] != nodes[i + 1] for i in (0, 2, 4, 6))


def test_whole_gpu_pods_use_only_whole_gpu_nodes() -> None:
    fleet = Fleet((Group(GPU, 1, 4), Group(GPU, 1, 1)))
    scheduler = CountingScheduler(fleet.nodes, 1)
    (first,) = scheduler.schedule([DemoPod("train", 1, None)])
    (second,) = scheduler.schedule([DemoPod("train-2", 1, None)])
    assert first.node == "a10-1x"
    assert second.node is None
