"""Tests the rejected nodes on which kube-scheduler 1.38 may search for victims."""

import json
import random
from typing import Any

import pytest
from structlog.testing import capture_logs

from headroom.contract.gpunode import Plugin
from tests.builders import DISTRIBUTED, NOW_S
from tests.examples import examples
from tests.scheduler.test_needless_evictions import PLUGINS, Full, drawn, newcomer
from tests.serving import offer, pod
from tests.state.evictions import On, full_node

ANY = "insufficient GPU memory on any device"
UNKNOWN = "node is not known to Headroom"
LAYOUT = {
    "lower": [[On("a", 20, 3)]],
    "equal": [[On("b", 20, 5)]],
    "mixed": [[On("c", 10, 5), On("d", 10, 4)]],
}
NODES = ["lower", "equal", "mixed", "gone"]


class Preempting(Full):
    """An extender with ``preempt_for_memory``."""

    def __init__(
        self,
        layout: dict[str, list[list[On]]] = LAYOUT,
        allowed: bool = True,
        plugin: Plugin = DISTRIBUTED,
    ) -> None:
        super().__init__(layout, plugin)
        self.calls = self.verbs(preempts_for_memory=allowed)

    def filtered(self, shown: dict[str, Any], nodes: list[str] = NODES) -> dict[str, Any]:
        return dict(json.loads(self.calls.filter(json.dumps(offer(shown, *nodes)).encode())))


def important(vram: str = "22Gi", nominated: str = "", **spec: Any) -> dict[str, Any]:
    shown = pod("new", vram)
    shown["spec"] |= {"priority": 5, **spec}
    if nominated:
        shown["status"] = {"phase": "Pending", "nominatedNodeName": nominated}
    return shown


def uids(answer: dict[str, Any]) -> dict[str, list[str]]:
    return {node: [each["UID"] for each in of["Pods"]] for node, of in answer.items()}


def test_only_nodes_on_which_evictions_could_help_are_candidates() -> None:
    answer = Preempting().filtered(important())
    assert answer["NodeNames"] == []
    assert answer["FailedNodes"] == {"lower": ANY, "mixed": ANY}
    assert answer["FailedAndUnresolvableNodes"] == {"equal": ANY, "gone": UNKNOWN}


@pytest.mark.parametrize(
    "shown",
    [
        important(priority=3),
        important(priority=None),
        important(preemptionPolicy="Never"),
        important("30Gi"),  # the devices have 24 GiB
        important(nominated="equal"),
    ],
    ids=["equal priority", "no priority", "preempts never", "too large", "nominated elsewhere"],
)
def test_no_node_is_a_candidate_if_evictions_cannot_help(shown: dict[str, Any]) -> None:
    answer = Preempting().filtered(shown)
    assert answer["FailedNodes"] == {}
    assert set(answer["FailedAndUnresolvableNodes"]) == set(NODES)


def test_older_versions_of_kube_scheduler_get_no_candidates() -> None:
    answer = Preempting(allowed=False).filtered(important())
    assert answer["FailedNodes"] == {}
    assert set(answer["FailedAndUnresolvableNodes"]) == set(NODES)


def test_no_node_is_a_candidate_if_another_node_passes() -> None:
    answer = Preempting(LAYOUT | {"free": [[]]}).filtered(important(), [*NODES, "free"])
    assert answer["NodeNames"] == ["free"]
    assert answer["FailedNodes"] == {}
    assert set(answer["FailedAndUnresolvableNodes"]) == set(NODES)


def test_a_nominated_pod_has_its_node_as_the_only_candidate() -> None:
    answer = Preempting().filtered(important(nominated="mixed"))
    assert answer["FailedNodes"] == {"mixed": ANY}
    assert set(answer["FailedAndUnresolvableNodes"]) == {"lower", "equal", "gone"}


def test_victims_are_added_to_candidates_that_have_none() -> None:
    world = Preempting()
    world.filtered(important())
    answer = world.preempted(important(), {"lower": [], "mixed": []})
    assert uids(answer) == {"lower": ["a"]}
    decided = world.journal.preempted_for("uid-new")
    assert decided is not None
    assert decided[1].source == "added"
    # On node mixed, evictions do not help because of the pod of equal priority.
    world = Preempting()
    assert world.preempted(important("15Gi"), {"mixed": []}) == {}


def test_no_pod_is_evicted_if_memory_became_free_after_filter() -> None:
    world = Preempting({"freed": [[On("a", 10, 3)]]})
    assert world.preempted(important("12Gi"), {"freed": []}) == {}
    # Nothing changes if kube-scheduler offers another node, on which no eviction is needed either.
    world = Preempting({"freed": [[On("a", 10, 3)]], "lower": [[On("b", 20, 3)]]})
    assert world.preempted(important("12Gi"), {"freed": [], "lower": []}) == {}


def test_a_scheduler_that_never_calls_preempt_gets_few_candidates() -> None:
    world = Preempting()
    with capture_logs() as logs:
        answers = [world.filtered(important()) for _ in range(100)]
    assert [bool(answer["FailedNodes"]) for answer in answers] == [True] * 5 + [False] * 95
    warnings = [line for line in logs if line["event"] == "preempt_for_memory_has_no_effect"]
    assert len(warnings) == 1
    assert "kube-scheduler 1.38 or newer" in warnings[0]["message"]
    # A call that contains victims can come from any version.
    world.preempted(important(), {"lower": ["a"]})
    assert world.filtered(important())["FailedNodes"] == {}
    world.now_s = NOW_S + 60.0
    answers = [world.filtered(important()) for _ in range(100)]
    assert sum(bool(answer["FailedNodes"]) for answer in answers) == 5


def test_a_scheduler_that_calls_preempt_always_gets_candidates() -> None:
    world = Preempting()
    for _ in range(20):
        assert set(world.filtered(important())["FailedNodes"]) == {"lower", "mixed"}
        # For a nominated pod, filter is called twice, but preempt is not called while its victims
        # end.
        for _ in range(20):
            assert set(world.filtered(important(nominated="lower"))["FailedNodes"]) == {"lower"}
        world.preempted(important(), {"mixed": []})


def test_a_failed_search_is_not_repeated_until_a_node_has_gained_headroom() -> None:
    world = Preempting({"n": [[On("a", 10, 3), On("b", 10, 9)]]})

    def candidates(shown: dict[str, Any]) -> list[str]:
        return list(world.filtered(shown, ["n"])["FailedNodes"])

    # Without pod a, 14 GiB are free.
    shown, equal, larger = important("15Gi"), important("15Gi"), important("16Gi")
    equal["metadata"] |= {"name": "equal", "uid": "uid-equal"}
    higher = important("15Gi", priority=6)
    assert candidates(shown) == ["n"]
    assert world.preempted(shown, {"n": []}) == {}
    assert candidates(shown) == candidates(equal) == []
    assert candidates(larger) == candidates(higher) == ["n"]
    world.now_s = NOW_S + 59.0
    assert candidates(shown) == []
    world.now_s = NOW_S + 60.0
    assert candidates(shown) == ["n"]
    assert world.preempted(shown, {"n": []}) == {}
    world.state.apply(full_node("n", [On("a", 10, 3), On("b", 8, 9)], plugin=DISTRIBUTED))
    world.now_s += 1.9
    assert candidates(shown) == []
    world.now_s += 0.1
    assert candidates(shown) == ["n"]
    assert uids(world.preempted(shown, {"n": []})) == {"n": ["a"]}
    assert candidates(shown) == ["n"]


def test_a_search_is_repeated_if_memory_was_held_during_it() -> None:
    world = Preempting({"n": [[On("a", 20, 3)]]})
    first, second = important(), important()
    second["metadata"] |= {"name": "second", "uid": "uid-second"}
    world.filtered(first, ["n"])
    assert uids(world.preempted(first, {"n": []})) == {"n": ["a"]}
    assert world.preempted(second, {"n": []}) == {}
    assert list(world.filtered(second, ["n"])["FailedNodes"]) == ["n"]


def test_every_node_on_which_an_eviction_helps_is_a_candidate() -> None:
    random_, helped, others = random.Random(11), 0, 0
    with capture_logs():
        while helped < examples(250):
            layout, plugin = drawn(random_), random_.choice(PLUGINS)
            shown = newcomer(random_.randint(8, 30), random_.randint(1, 4), mirrored=False)
            for node, devices in layout.items():
                world = Preempting({node: devices}, plugin=plugin)
                answer = world.filtered(shown, [node])
                if answer["NodeNames"]:
                    continue
                victims = world.preempted(shown, {node: []})
                helped += bool(victims)
                others += not answer["FailedNodes"]
                assert not victims or answer["FailedNodes"], (layout, plugin)
    assert others > helped / 10


def test_a_failed_search_excludes_only_the_searched_nodes() -> None:
    layout = {"n": [[On("a", 10, 3), On("b", 10, 9)]], "m": [[On("c", 20, 3)]]}
    world = Preempting(layout)
    shown, other = important("15Gi"), important("15Gi")
    other["metadata"] |= {"name": "other", "uid": "uid-other"}
    # A node selector keeps the first pod from node m.
    assert list(world.filtered(shown, ["n"])["FailedNodes"]) == ["n"]
    assert world.preempted(shown, {"n": []}) == {}
    answer = world.filtered(other, ["n", "m"])
    assert list(answer["FailedNodes"]) == ["m"]
    assert list(answer["FailedAndUnresolvableNodes"]) == ["n"]
    assert uids(world.preempted(other, {"m": []})) == {"m": ["c"]}


def test_a_failed_search_for_cpu_does_not_exclude_nodes_for_pods_that_lack_memory() -> None:
    world = Preempting({"n": [[On("a", 10, 3), On("b", 10, 9)]]})
    assert world.preempted(important("15Gi"), {"n": ["a"]}) == {}
    assert list(world.filtered(important("15Gi"), ["n"])["FailedNodes"]) == ["n"]
