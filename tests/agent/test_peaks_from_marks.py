"""Tests peaks that come from the driver's high-water marks."""

import pytest

from tests.agent.lives import GIB, MIB, A, Node, node

__all__ = ["node"]


def test_a_high_water_mark_includes_use_between_samples(node: Node) -> None:
    node.used[A] = GIB
    node.marks[A] = 30 * GIB
    row = node.one()
    assert (row.used_bytes, row.peak_bytes, row.peak_source) == (GIB, 30 * GIB, "driver")
    del node.marks[A]  # The mark is read only every 15 s.
    assert node.one().peak_bytes == 30 * GIB


def test_a_high_water_mark_covers_the_whole_run(node: Node) -> None:
    node = Node()
    node.hold("u")
    node.run("c1", "u", age_s=300.0)
    node.used[A], node.marks[A] = GIB, 30 * GIB
    row = node.one()
    assert (row.peak_bytes, row.peak_partial, row.startup_peak_bytes) == (30 * GIB, False, None)


@pytest.mark.parametrize(
    ("mark", "source", "peak"),
    [
        pytest.param(2 * GIB - 64 * MIB, "driver", 2 * GIB, id="read a moment apart"),
        pytest.param(2 * GIB - 65 * MIB, "nvml", 2 * GIB, id="the mark omits some use"),
        pytest.param(0, "nvml", 2 * GIB, id="the mark is 0"),
    ],
)
def test_a_mark_below_a_sample_is_not_used(node: Node, mark: int, source: str, peak: int) -> None:
    node.used[A], node.marks[A] = 2 * GIB, mark
    row = node.one()
    assert (row.peak_source, row.peak_bytes) == (source, peak)


def test_the_mark_of_another_run_does_not_count(node: Node) -> None:
    node.used[A], node.marks[A] = GIB, 30 * GIB
    node.sample()
    node.end("c1")
    node.run("c2", "u")
    node.used["GPU-a", "c2"] = GIB
    row = node.one()
    assert (row.peak_bytes, row.peak_source) == (GIB, "nvml")
