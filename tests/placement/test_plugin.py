"""Compares the possible choices of the plugin with an enumeration of all choices."""

from itertools import combinations_with_replacement, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from headroom.core.placement.device_plugin_model import Choice, Policy, Stock, choice
from tests.examples import QUICK, examples
from tests.placement import brute
from tests.placement.brute import Gpu, Node

POLICIES: tuple[Policy, ...] = ("distributed", "packed", "unknown")


def stocks(node: Node) -> list[Stock]:
    return [
        Stock(
            free=gpu.total - gpu.allocated - gpu.unhealthy,
            taken=gpu.allocated + gpu.unhealthy,
            leaving=gpu.leaving,
        )
        for gpu in node.gpus
    ]


def check(node: Node, waiting: int, newcomer: int = 1) -> None:
    asked = choice(node.policy, stocks(node))  # type: ignore[arg-type]
    assert could_get(asked, node, waiting, newcomer) == brute.could_get(
        node, [1] * waiting, newcomer
    ), (node, waiting, newcomer)
    most = [asked.most(i, waiting, gpu.leaving) for i, gpu in enumerate(node.gpus)]
    assert most == brute.most_on(node, [1] * waiting), (node, waiting)


def could_get(asked: Choice, node: Node, waiting: int, newcomer: int) -> set[int]:
    before = {i: asked.first(i) for i in range(len(node.gpus))}
    return {i for i, first in before.items() if first is not None and first < waiting + newcomer}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_bounds_match_the_enumeration_on_every_small_node(policy: Policy) -> None:
    """Covers up to three GPUs with up to three replicas and three unconfirmed pods, in every state.

    The quick run has up to two GPUs.
    """
    tried = 0
    for replicas, gpus in product((1, 2, 3), (1, 2) if QUICK else (1, 2, 3)):
        states = [
            Gpu(replicas, allocated=taken, leaving=leaving)
            for taken in range(replicas + 1)
            for leaving in range(min(taken, 1) + 1)
        ]
        for some in combinations_with_replacement(states, gpus):
            node = Node(some, policy)
            free = sum(gpu.total - gpu.allocated for gpu in some)
            for waiting in range(min(3, free) + 1):
                check(node, waiting)
                tried += 1
    assert tried > (100 if QUICK else 500)


@st.composite
def nodes(draw: DrawFn, most_leaving: int = 2) -> Node:
    gpus = []
    for _ in range(draw(st.integers(1, 4))):
        total = draw(st.integers(1, 4))
        unhealthy = draw(st.sampled_from([0, 0, 0, 1]))
        allocated = draw(st.integers(0, total - unhealthy))
        leaving = draw(st.integers(0, min(most_leaving, allocated)))
        gpus.append(Gpu(total, allocated, unhealthy, leaving))
    return Node(tuple(gpus), draw(st.sampled_from(POLICIES)))


@settings(max_examples=examples(300), deadline=None)
@given(nodes(most_leaving=1), st.integers(0, 4), st.integers(1, 3))
def test_the_bounds_match_the_enumeration_on_random_nodes(
    node: Node, waiting: int, newcomer: int
) -> None:
    assume(sum(stock.free for stock in stocks(node)) >= waiting + newcomer)
    check(node, waiting, newcomer)


def test_packed_returns_to_a_full_device_after_one_of_its_pods_ends() -> None:
    """After the pod has ended, the device has one allocated replica less. The plugin chooses it
    after the device that other pods fill in the meantime.
    """
    for waiting in range(4):
        check(Node((Gpu(1, allocated=1, leaving=1), Gpu(4, allocated=1)), "packed"), waiting)
