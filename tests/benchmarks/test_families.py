"""Families of workloads and clusters: they are the same each time, possible, and apart."""

import ast
from pathlib import Path

import pytest

from benchmarks.plan import families as clusters
from benchmarks.plan import family_weeks
from benchmarks.recommend import families as workloads
from tests.controlplane import ROOT


@pytest.mark.parametrize("name", workloads.TUNED | workloads.JUDGED)
def test_lives_are_the_same_each_time_and_possible(name: str) -> None:
    for index in range(4):
        drawn = workloads.workload(name, "test", index, 30, 2.0)
        assert drawn == workloads.workload(name, "test", index, 30, 2.0)
        assert drawn.lives
        assert list(drawn.lives) == sorted(drawn.lives, key=lambda each: each.start_s)
        for each in drawn.lives:
            assert each.start_s < each.end_s
            assert each.start_s <= each.use[0][0] <= each.use[-1][0] <= each.end_s + 1e-6
            assert 0 < each.peak_bytes <= drawn.device_bytes
        assert all(0 < amount <= drawn.device_bytes for _, amount in drawn.requests)


@pytest.mark.parametrize("name", clusters.TUNED | clusters.JUDGED)
def test_clusters_are_the_same_each_time_and_possible(name: str) -> None:
    drawn = clusters.rows(name, 1, 14, 20)
    assert drawn == clusters.rows(name, 1, 14, 20) != clusters.rows(name, 2, 14, 20)
    assert drawn
    for row in drawn:
        assert 0 <= row.created_s < row.ended_s
        assert 1 <= row.gpus <= clusters.GPUS_OF_NODE
        assert 0 < row.peak_mib <= clusters.GPU_MIB


def test_tuned_and_judged_families_are_apart_and_share_no_code_with_the_product() -> None:
    for module in (workloads, clusters):
        assert not module.TUNED.keys() & module.JUDGED.keys()
        assert len(module.TUNED | module.JUDGED) >= 7
    for file in ("benchmarks/recommend/families.py", "benchmarks/plan/families.py"):
        tree = ast.parse(Path(ROOT, file).read_text())
        imports = [each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)]
        assert not [each.module for each in imports if (each.module or "").startswith("extender")]


def test_families_of_campaigns_and_deadlines_are_recognised_and_traffic_has_ranges() -> None:
    campaigns, late, traffic = (
        list(family_weeks.weeks(name, 3, 40)) for name in ("campaigns", "deadlines", "traffic")
    )
    assert (len(campaigns), len(late), len(traffic)) == (3, 3, 3)
    for some in (campaigns, late):
        assert all(each.ranges is None and each.why_none for each in some)
        assert any("days differ too much" in each.why_none for each in some)
    assert all(each.ranges is not None for each in traffic)
    assert family_weeks.row("traffic", traffic, (0.2, 0.2)).count("|") == 14
