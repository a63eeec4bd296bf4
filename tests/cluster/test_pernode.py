"""What is kept of nodes: it is reckoned again where a node is another, and forgotten with it."""

from extender.cluster.pernode import PerNode
from extender.placement.snapshot import NodeTerms

A, B = NodeTerms("a", None, 1.0), NodeTerms("b", None, 2.0)


def test_it_is_reckoned_once_for_each_node_that_is_the_same() -> None:
    asked: list[NodeTerms] = []

    def reckon(node: NodeTerms) -> float:
        asked.append(node)
        return node.fresh_until_s

    kept = PerNode(reckon)
    assert [*kept.of([A, B])] == [1.0, 2.0]
    assert [*kept.of([B, A])] == [2.0, 1.0]
    assert asked == [A, B]
    later = NodeTerms("a", None, 7.0)
    assert [*kept.of([later])] == [7.0]
    assert [*kept.of([later, B])] == [7.0, 2.0]  # B had gone
    assert asked == [A, B, later, B]
