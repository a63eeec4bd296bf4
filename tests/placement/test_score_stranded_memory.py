"""Tests the memory that a pod strands on a node, and which node wins."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from headroom.contract.annotations import VRAM
from headroom.contract.gpunode import Replicas
from headroom.core.placement.policy import Weights
from headroom.core.placement.score import rank
from headroom.core.placement.score_terms import newly_stranded, terms
from headroom.core.placement.snapshot import NodeTerms
from tests.builders import (
    DISTRIBUTED,
    GIB,
    GPU,
    container,
    device,
    judged,
    pod,
    request,
    reservation,
    shared,
    use,
    weighed,
)

REPLICAS = 4


def node(name: str, *sizes: tuple[int, ...], **how: Any) -> NodeTerms:
    """Return a node with 24 GiB GPUs. Each argument lists the sizes of a GPU's pods in GiB."""
    how = {"plugin": DISTRIBUTED, **how}
    devices, uses, reservations = [], [], {}
    for index, held in enumerate(sizes):
        uuid = f"{name}-{index}"
        devices.append(shared(uuid, REPLICAS - len(held), len(held), used_bytes=sum(held) * GIB))
        for number, size in enumerate(held):
            uid = f"{uuid}-{number}"
            uses.append(use(uid, uuid, size * GIB, replica=uid))
            reservations[uid] = reservation({uuid: size * GIB})
    return weighed(*devices, name=name, pods=uses, reservations=reservations, **how)


def wasted(what: str, *nodes: NodeTerms) -> list[int]:
    snap, verdicts = judged(what, *nodes)
    return newly_stranded(verdicts.asks[0], snap).tolist()


def winner(vram: str, *nodes: NodeTerms, policy: str = "pack") -> str:
    asked = request(pod(None, annotations={VRAM: vram, "headroom.gpu/policy": policy}))
    verdicts = judged(asked, *nodes)[1]
    place = rank(verdicts, Weights()).winner
    assert place is not None
    return nodes[place].name


@pytest.mark.parametrize("seed", range(60))
def test_stranded_memory_matches_the_definition(seed: int) -> None:
    lots = random.Random(seed)
    sizes = [tuple(lots.choices(range(1, 6), k=lots.randint(0, 3))) for _ in range(4)]
    asked = lots.randint(1, 8)

    def behind(held: list[tuple[int, ...]]) -> int:
        total = 0
        for level in range(REPLICAS + 1):
            loads = [sum(each) for each in held if len(each) == level]
            total += sum(max(loads) - load for load in loads)
        return total

    fewest = min(map(len, sizes))
    fullest = max((sum(held), -i) for i, held in enumerate(sizes) if len(held) == fewest)
    given = -fullest[1]
    after = [(*held, asked) if i == given else held for i, held in enumerate(sizes)]
    others = [sum(each) for i, each in enumerate(sizes) if len(each) == fewest + 1]
    lowered = max(0, sum(after[given]) - max(others, default=0))
    expected = (behind(after) - behind(sizes)) * GIB + lowered * GIB // 4
    assert wasted(f"{asked}Gi", node("n", *sizes)) == [expected]


def test_a_pod_is_placed_next_to_pods_of_its_size() -> None:
    """The empty device is the next choice on both nodes. On one node, the other pods are small."""
    small, large = node("small", (4,), (4,), ()), node("large", (16,), (16,), ())
    assert wasted("16Gi", small, large) == [(2 * 12 + 12 // 4) * GIB, 0]
    assert winner("16Gi", small, large) == "large"
    assert winner("4Gi", small, large) == "small"


def test_a_quarter_of_the_memory_by_which_a_level_becomes_fuller_counts() -> None:
    """Later pods of that level can only use the free memory of the level's fullest device."""
    first, like, smaller = node("f", (), ()), node("l", (16,), ()), node("s", (20,), ())
    assert wasted("16Gi", first, like, smaller) == [16 * GIB // 4, 0, 4 * GIB]


def test_the_fullest_candidate_decides() -> None:
    """On both nodes one candidate is empty. A pod of 4 GiB must also fit on the other candidate."""
    tight, loose = node("tight", (18,), (1,)), node("loose", (10,), (1,))
    asked = request("4Gi")
    left_bytes = terms(judged(asked, tight, loose)[1]).device_left_bytes
    assert left_bytes.tolist() == [2 * GIB, 10 * GIB]


def test_with_the_policy_spread_the_emptiest_node_wins() -> None:
    like, empty = node("like", (4,), ()), node("empty", (), ())
    assert winner("4Gi", like, empty) == "like"
    assert winner("4Gi", like, empty, policy="spread") == "empty"


def test_no_memory_is_newly_stranded_on_unshared_devices() -> None:
    assert wasted("4Gi", weighed(device("a"), device("b"))) == [0]
    snap, verdicts = judged(pod("4Gi", container(gpus=2)), node("n", (4,), ()))
    assert newly_stranded(verdicts.asks[0], snap).tolist() == [0]


STEERED = msgspec.structs.replace(DISTRIBUTED, steered=[GPU])


def test_on_steered_nodes_the_least_headroom_wins() -> None:
    """If the plugin chose, the other node would win, because all levels stay equal there."""
    tight = node("tight", (7,), (1, 1), plugin=STEERED)
    alike = node("alike", (16,), (16,), (), plugin=STEERED)
    snap, verdicts = judged(pod("16Gi"), tight, alike)
    assert newly_stranded(verdicts.asks[0], snap).tolist() == [0, 0]
    place = rank(verdicts, Weights()).winner
    assert place == 0
    by_plugin = node("tight", (7,), (1, 1)), node("alike", (16,), (16,), ())
    assert winner("16Gi", *by_plugin) == "alike"


def test_a_node_without_devices_changes_no_score() -> None:
    assert wasted("4Gi", weighed(name="none"), node("n", (1,), ())) == [0, 3 * GIB + 3 * GIB // 4]
    assert wasted("4Gi", weighed(name="none")) == [0]


def test_huge_values_do_not_overflow() -> None:
    absurd = reservation({"x-0": 1 << 62})
    one = weighed(
        *(shared(f"x-{i}", replicas=Replicas(free=3, allocated=1)) for i in range(3)),
        name="x",
        pods=[use("u", "x-0", 0)],
        reservations={"u": absurd},
        plugin=DISTRIBUTED,
    )
    with np.errstate(all="raise"):
        (found,) = wasted("4Gi", one)
    assert abs(found) < 1 << 60
