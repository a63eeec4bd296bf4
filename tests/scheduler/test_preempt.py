"""Checks that preempt adds nodes that filter rejected, holds them for the preemptor, and records
its decisions.
"""

import json
from typing import Any

import pytest

from extender.scheduler.extender_v1 import MalformedBody
from headroom.console.views.decision_bodies import decision_view
from headroom.core.journal.decision_records import Preempted
from tests.builders import DISTRIBUTED
from tests.scheduler.test_needless_evictions import Full
from tests.serving import pod
from tests.state.evictions import On

EQUAL = "equal; another node was chosen"

EXPECTED_S = 5.0


def important(name: str, vram: str, priority: int = 5, version: str = "1") -> dict[str, Any]:
    shown = pod(name, vram, version=version)
    shown["spec"]["priority"] = priority
    return shown


def uids(answer: dict[str, Any]) -> dict[str, list[str]]:
    return {node: [pod["UID"] for pod in each["Pods"]] for node, each in answer.items()}


@pytest.fixture
def world() -> Full:
    layout = {"full": [[On("a", 20, 3)]], "small": [[On("b", 20, 0)]]}
    return Full(layout, DISTRIBUTED)


def test_a_node_rejected_in_the_same_cycle_is_added(world: Full) -> None:
    shown = important("new", "22Gi")
    assert world.fitting(shown, ["small"]) == []
    answer = world.preempted(shown, {"full": ["a"]})
    assert uids(answer) == {"small": ["b"], "full": ["a"]}
    # The node may be full by now if the rejection is old or was for another version of the pod.
    assert uids(world.preempted(important("new", "22Gi", version="2"), {"full": ["a"]})) == {
        "full": ["a"]
    }
    world.now_s += 60.0
    assert uids(world.preempted(shown, {"full": ["a"]})) == {"full": ["a"]}


def test_the_node_is_held_for_the_preemptor_after_the_answer(world: Full) -> None:
    shown = important("new", "12Gi")
    assert uids(world.preempted(shown, {"full": ["a"]})) == {"full": ["a"]}
    equal, higher = important("equal", "3Gi"), important("higher", "3Gi", 6)
    assert world.fitting(equal, ["full", "small"]) == ["small"]
    assert world.fitting(equal, ["full"]) == []
    rejected = world.journal.of_uid("uid-equal")
    assert rejected is not None
    assert not rejected.sure  # The preemptor is requeued after the hold ends.
    assert world.fitting(higher, ["full"]) == ["full"]
    assert world.fitting(shown, ["full"]) == []
    # The node is not given to another preemptor either.
    second = important("second", "20Gi")
    assert world.preempted(second, {"full": ["a"]}) == {}
    world.now_s += EXPECTED_S + 0.1
    assert world.fitting(equal, ["full"]) == ["full"]
    assert uids(world.preempted(second, {"full": ["a"]})) == {"full": ["a"]}


def test_preemptions_are_recorded_with_their_reasons(world: Full) -> None:
    shown = important("new", "22Gi")
    assert world.fitting(shown, ["small"]) == []
    world.preempted(shown, {"full": ["a"]})
    record = world.journal.records.of_id("uid-new.1")
    assert record is not None
    part = record.part(Preempted)
    assert part is not None
    assert (part.offered, part.kept, part.node, part.source) == (1, 2, "small", "added")
    assert [(loser.node, loser.lost_by) for loser in part.losers] == [
        ("full", "a victim of higher priority")
    ]
    view = decision_view(record, "replica").preempt
    assert view is not None
    assert view.lines == [
        "default/b (priority 0) leaves node small",
        "kube-scheduler proposed no victims there, because only GPU memory is short",
        "not node full, where 1 pod would leave: a victim of higher priority",
    ]
    assert world.journal.preempted_for("uid-new") == ("uid-new.1", part)
    # A decision without victims is also recorded.
    world.preempted(important("huge", "90Gi"), {"full": ["a"]})
    record = world.journal.records.of_id("uid-huge.1")
    assert record is not None
    view = decision_view(record, "replica").preempt
    assert view is not None
    assert (view.node, view.lines) == (
        None,
        ["no pod is evicted, because eviction would help on 0 of 1 node"],
    )


def test_only_one_of_several_equal_nodes_is_returned() -> None:
    world = Full({"n": [[On("a", 20, 1)]], "m": [[On("b", 20, 1)]]}, DISTRIBUTED)
    answer = world.preempted(important("new", "22Gi"), {"n": ["a"], "m": ["b"]})
    assert uids(answer) == {"m": ["b"]}
    decided = world.journal.preempted_for("uid-new")
    assert decided is not None
    assert [loser.lost_by for loser in decided[1].losers] == [EQUAL]


def test_a_pod_without_a_gpu_is_left_to_kube_scheduler(world: Full) -> None:
    shown = pod("plain", gpus=0)
    # Nodes without victims are for other extenders.
    proposal = {"full": ["x"], "none": []}
    assert uids(world.preempted(shown, proposal)) == proposal


def test_victims_are_read_in_both_forms_and_malformed_victims_are_rejected(world: Full) -> None:
    whole = {"metadata": {"name": "x", "uid": "x"}, "spec": {"priority": 1}}
    args = {
        "Pod": important("new", "4Gi"),
        "NodeNameToVictims": {"full": {"Pods": [whole], "NumPDBViolations": 7}},
    }
    answer = json.loads(world.calls.preempt(json.dumps(args).encode()))
    assert answer == {
        "NodeNameToMetaVictims": {"full": {"Pods": [{"UID": "x"}], "NumPDBViolations": 1}}
    }
    args["NodeNameToVictims"] = {"full": {"Pods": "x"}}
    with pytest.raises(MalformedBody, match="NodeNameToVictims"):
        world.calls.preempt(json.dumps(args).encode())


def test_a_bound_pod_passes_on_all_nodes_and_gets_the_proposed_victims(world: Full) -> None:
    resized = important("a", "20Gi")
    resized["metadata"]["uid"] = "a"
    resized["spec"]["nodeName"] = "full"
    assert world.fitting(resized, ["full", "gone"]) == ["full", "gone"]
    assert uids(world.preempted(resized, {"full": ["x"]})) == {"full": ["x"]}
    assert world.journal.of_uid("a") is None
