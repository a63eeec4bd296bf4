"""Checks that the caches of the verbs do not change responses."""

import json
from datetime import datetime
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from headroom.contract.watched import GPUNodeGone, GPUNodeSeen, NodeGone, NodeSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.journal.journal import Decision, Journal
from headroom.core.placement.policy import Rules
from tests.builders import GIB, NOW_S, STAMP, gpunode, kube_node, reservation, shared
from tests.examples import examples
from tests.scheduler.verbs_on import verbs_on
from tests.serving import pod

#: Time on the wall clock when the monotonic clock was 0. It makes the reports of the builders
#: current.
EPOCH_S = datetime.fromisoformat(STAMP).timestamp() - NOW_S
NAMES = ["a", "b", "c", "d", "gpu-a100-0001"]
names = st.sampled_from(NAMES)


class Calls(RuleBasedStateMachine):
    """Changes nodes between calls of filter and prioritize. The order is random."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ClusterWriter(Rules(), 1e9, EPOCH_S)
        self.verbs = verbs_on(self.state, lambda: NOW_S)
        self.version = self.serial = 0
        self.last = list(NAMES)

    @rule(name=names, reserved=st.integers(0, 24))
    def report(self, name: str, reserved: int) -> None:
        self.version += 1
        report = gpunode(
            shared(name), name=name, version=str(self.version),
            reservations={"u": reservation({name: reserved * GIB})},
        )  # fmt: skip
        self.state.apply([NodeSeen(kube_node(name)), GPUNodeSeen(report, NOW_S)])

    @rule(name=names)
    def lose(self, name: str) -> None:
        self.state.apply([NodeGone(name), GPUNodeGone(name)])

    @rule(vram=st.sampled_from(["1Gi", "12Gi", "25%"]), offered=st.permutations([*NAMES, "gone"]))
    def filter(self, vram: str, offered: list[str]) -> None:
        answer = self.both("filter", vram, offered)
        self.last = answer["NodeNames"]

    @rule(vram=st.sampled_from(["1Gi", "12Gi", "25%"]))
    def prioritize_what_passed(self, vram: str) -> None:
        self.both("prioritize", vram, self.last)

    @rule(vram=st.sampled_from(["1Gi", "12Gi", "25%"]), offered=st.permutations(NAMES))
    def prioritize_others(self, vram: str, offered: list[str]) -> None:
        self.both("prioritize", vram, offered)

    @rule(vram=st.sampled_from(["1Gi", "12Gi", "25%"]), data=st.data())
    def filter_for_the_best(self, vram: str, data: st.DataObject) -> None:
        """Offer all nodes, or names with the same number of bytes. Filter does not decode a body
        without spaces whose names have this length.
        """
        offered = data.draw(st.permutations(list(self.state.cluster.snapshot().names)))
        has_new = bool(offered) and data.draw(st.booleans())
        if has_new:
            offered[0] = "?" * len(offered[0])  # offered instead of another node
        self.serial += 1
        asked = pod(f"p{self.serial}", vram)
        args = {"Pod": asked, "Nodes": None, "NodeNames": offered}
        journals, answers = [Journal(), Journal()], []
        for journal, separators in zip(journals, [(",", ":"), (", ", ": ")], strict=True):
            verbs = verbs_on(self.state, lambda: NOW_S, journal=journal, best_only=True)
            answers.append(
                json.loads(verbs.filter(json.dumps(args, separators=separators).encode()))
            )
        assert answers[0]["NodeNames"] == answers[1]["NodeNames"]
        if not has_new:
            assert answers[0] == answers[1]
            one, other = (journal.of_uid(asked["metadata"]["uid"]) for journal in journals)
            assert recorded(one) == recorded(other)

    def both(self, verb: str, vram: str, offered: list[str]) -> Any:
        """Return the response of a verb. Check that a verb with empty caches returns the same
        response.
        """
        args = {"Pod": pod("p", vram), "Nodes": None, "NodeNames": offered}
        body = json.dumps(args, separators=(",", ":")).encode()
        remembered = getattr(self.verbs, verb)(body)
        assert remembered == getattr(verbs_on(self.state, lambda: NOW_S), verb)(body)
        return json.loads(remembered)


def recorded(decision: Decision | None) -> tuple[object, ...]:
    assert decision is not None
    assert decision.offered_nodes is not None
    names = decision.offered_nodes.names()
    return names, decision.offered, decision.fits, decision.rejected, decision.node


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=examples(150), stateful_step_count=20, deadline=None)


def test_rows_that_moved_since_filter_are_found_again() -> None:
    calls = Calls()
    for name in ("a", "b", "c"):
        calls.report(name, 0)
    calls.filter("1Gi", ["a", "b", "c"])
    assert calls.last == ["a", "b", "c"]
    calls.lose("a")  # The last node gets the row of a.
    calls.report("c", 20)
    calls.prioritize_what_passed("1Gi")


def test_demand_counts_only_the_classes_of_nodes_that_were_offered() -> None:
    """Filter first guesses that all nodes are offered, because the offered names have the length of
    all names.
    """
    state = ClusterWriter(Rules(), 1e9, EPOCH_S)
    for name, gib in (("aa", 24), ("bb", 80), ("cc", 80)):
        report = gpunode(shared(name, memory_bytes=gib * GIB), name=name)
        state.apply([NodeSeen(kube_node(name)), GPUNodeSeen(report, NOW_S)])
    verbs = verbs_on(state, lambda: NOW_S, best_only=True)

    def passed(name: str, *nodes: str) -> list[str]:
        args = {"Pod": pod(name, "4Gi"), "Nodes": None, "NodeNames": list(nodes)}
        body = json.dumps(args, separators=(",", ":")).encode()
        found: list[str] = json.loads(verbs.filter(body))["NodeNames"]
        return found

    assert passed("wrong-guess", "??", "bb", "cc")[0] in ("bb", "cc")
    (classes,) = state.parts.calls.demand.mix.demand
    assert [round(size / GIB) for size in classes] == [80]
    assert passed("right-guess", "aa", "bb", "cc") == ["aa"]
    assert sorted(map(len, state.parts.calls.demand.mix.demand)) == [1, 2]
