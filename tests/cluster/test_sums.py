"""Sums over the fleet: after every change they are what is found by summing all anew."""

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.cluster.sums import RunningSums
from extender.placement.snapshot import NodeTerms

Added = Mapping[str, tuple[int, ...]]
_numbers = st.tuples(st.integers(-3, 1 << 70), st.integers(-2, 2))
_added = st.dictionaries(st.sampled_from(("A100", "H100", "L4")), _numbers, max_size=2)
_fleets = st.lists(
    st.lists(st.sampled_from([NodeTerms(f"n{i}", None, 1.0) for i in range(6)]), max_size=5),
    max_size=6,
)


def anew(nodes: list[NodeTerms], of: Mapping[str, Added]) -> Added:
    found = {
        key: tuple(
            map(sum, zip(*(of[n.name][key] for n in nodes if key in of[n.name]), strict=True))
        )
        for key in {key for n in nodes for key in of[n.name]}
    }
    return {key: sums for key, sums in found.items() if any(sums)}


@given(looks=_fleets, data=st.data())
def test_they_are_those_of_all_nodes_summed_anew(
    looks: list[list[NodeTerms]], data: st.DataObject
) -> None:
    of = {f"n{i}": data.draw(_added) for i in range(6)}
    running = RunningSums(lambda node: of[node.name])
    for nodes in looks:
        assert running.of(tuple(nodes)) == anew(nodes, of)
        parts = running.parts(range(len(nodes)))
        assert [*parts] == [of[node.name] for node in nodes]


def test_only_nodes_that_changed_are_looked_into_and_others_have_a_turn_before_each() -> None:
    happened: list[str] = []

    def part(node: NodeTerms) -> Added:
        happened.append(node.name)
        return {"": (1,)}

    a, b, c = (NodeTerms(name, None, 1.0) for name in "abc")
    running = RunningSums(part, lambda: happened.append("turn"))
    running.of((a, b))
    assert happened == ["turn", "a", "turn", "b"]
    running.of((a, b))
    running.of((a, c))
    assert happened[4:] == ["turn", "c"]
    assert running.of((a,)) == {"": (1,)}
    assert len(happened) == 6  # nothing is asked of a node that is gone


def test_a_node_that_cannot_be_summed_spoils_no_later_look() -> None:
    a, b, c, bad = (NodeTerms(name, None, 1.0) for name in ("a", "b", "c", "bad"))
    broken = Counter[str]()

    def part(node: NodeTerms) -> Added:
        if node is bad and not broken[node.name]:
            broken[node.name] += 1
            raise ValueError("cannot be summed")
        return {node.name: (1,)}

    running = RunningSums(part)
    running.of((a, b, c))
    with pytest.raises(ValueError, match="cannot be summed"):
        running.of((b, bad, c, a))
    assert running.of((a, bad)) == {"a": (1,), "bad": (1,)}
