"""The scenarios for the autoscaler, without one: the nodes that they need, and the table."""

from collections import Counter

import pytest

from benchmarks.autoscaling.manifests import pods, template
from benchmarks.autoscaling.scenarios import (
    FORMS,
    SCENARIOS,
    Group,
    Outcome,
    Pods,
    Scenario,
    failures,
    fewest_nodes,
    table,
)

FOUR_L4 = Group("l4x4", 24, gpus=4)
#: Pods that fit if nodes are added, and on how few nodes.
NEEDED = {
    "12 x 16 GiB, four L4 a node": (12, 3),
    "12 x 13 GiB, eight L4 a node": (12, 2),
    "5 x 20 and 10 x 4 GiB, one L4": (15, 6),
    "3 x 30 GiB, four L4: too large": (0, 0),
    "6 x 20, 3 x 44, 2 x 70 GiB, one L4, L40S or H100": (11, 11),
    "8 x 25 %, one L4 a node": (8, 2),
    "16 without an annotation, one L4 a node": (16, 2),
    "10 x 8 GiB, seven MIG 1g.10gb a node": (10, 2),
    "4 x 40 GiB, one L4, or H100 with a taint: too large": (0, 0),
}


def test_the_fewest_nodes_of_scenarios() -> None:
    found = {each.name: fewest_nodes(each) for each in SCENARIOS}
    assert found.items() >= NEEDED.items()
    assert len(found) == len(SCENARIOS) >= 30
    two_replicas = Group("g", 24, replicas=2)
    assert fewest_nodes(Scenario("s", (two_replicas,), (Pods(3, 1),))) == (3, 2)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: str(each.name))
def test_what_fits_on_a_gpu_fits_by_the_counts_of_the_fixed_form(scenario: Scenario) -> None:
    """With replicas for their size, the autoscaler counts pods of one size as the GPU does."""
    fixed = scenario.fixed()
    assert fewest_nodes(fixed)[0] == fewest_nodes(scenario)[0]
    if "memory" in scenario.fixes or len(scenario.groups) > 1:
        return
    for each in fixed.pods if scenario.fixes else ():
        (group,) = (g for g in fixed.groups if each.may_use(g))
        assert each.gib_on(group) * group.replicas <= group.memory_gib
        assert each.gib_on(group) * (group.replicas + 1) > group.memory_gib


def test_pods_and_templates_have_the_mirror_in_all_forms_but_plain() -> None:
    scenario = Scenario("s", (FOUR_L4,), (Pods(2, 16), Pods(1, "25%")), ("memory",))
    for form in FORMS:
        resources = template("p", FOUR_L4, form)["status"]["allocatable"]
        assert resources["nvidia.com/gpu"] == "32"
        assert resources.get("headroom.gpu/vram") == (None if form == "plain" else "98304")
        found = list(pods("p", scenario, form))
        amounts = Counter(
            each["spec"]["containers"][0]["resources"]["limits"].get("headroom.gpu/vram")
            for each in found
        )
        assert amounts == ({None: 3} if form == "plain" else {"16384": 2, None: 1})
        required = [each["spec"].get("affinity") for each in found]
        assert (required[0] is not None, required[2]) == (form == "fixed", None)
        owners = {each["metadata"]["ownerReferences"][0]["uid"] for each in found}
        assert len(owners) == 2


def test_the_table_shows_unused_nodes_and_pods_that_wait() -> None:
    scenario = Scenario("s", (FOUR_L4,), (Pods(12, 16),), ("replicas",), one_size=True)
    outcomes = {
        ("s", "plain"): Outcome({"a": 4, "b": 0}, 4, 12),
        ("s", "fixed"): Outcome({"a": 4, "b": 4, "c": 3}, 11, 12),
    }
    assert list(table([scenario], outcomes))[2:] == [
        "| s | 12 | 12 | 3 | 2 / 1 / 8 | - | 3 / 0 / 1 | replicas |"
    ]
    assert failures([scenario], outcomes) == ["s, fixed: 0 unused nodes, 1 pods wait"]
    outcomes["s", "fixed"] = Outcome({"a": 12}, 12, 12)
    assert failures([scenario], outcomes) == []
