"""Checks that ``explain`` and ``pending`` agree on whether steering would place a pod."""

from itertools import product

import pytest

from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.journal.journal import Decision
from headroom.core.placement.request import VramRequest
from tests.builders import GIB, kube_node
from tests.console.asking import Asked
from tests.console.test_held_memory import waiting
from tests.state.test_steering_whatif import uneven


def one_node() -> Asked:
    """Return a cluster whose node has two 24 GiB GPUs. 16 GiB fit on one GPU, but not on the
    plugin's next choice.
    """
    fleet = Asked()
    fleet.writer.apply([NodeSeen(kube_node("a")), GPUNodeSeen(uneven("a"), 0.0)])
    return fleet


def hold(fleet: Asked, kind: str, gib: int, priority: int) -> None:
    """Hold memory of the node for another pod, with a nomination or an assumed bind."""
    held = waiting("held", gib, priority, nominated_node_name="a" if kind == "nominated" else None)
    fleet.writer.apply([PodSeen(held)])
    if kind != "nominated":
        request = fleet.cluster.understand(held)
        assert isinstance(request, VramRequest)
        fleet.writer.parts.calls.assumed.assume(held, request, "a", fleet.now_s)


def suggests_steering(fleet: Asked) -> bool:
    advice = fleet.get("/v1/explain?pod=default/asked").json()["advice"]
    return "steer" in [each["kind"] for each in advice]


def would_be_placed(fleet: Asked) -> bool:
    """Return whether the simulation of all pending pods places the pod."""
    gain = fleet.get("/v1/pending?steering=true").json()["steering"]
    return gain is not None and gain["placed_bytes"] == 16 * GIB


@pytest.mark.parametrize(("kind", "priorities"), [("nominated", {-1}), ("assumed", set())])
def test_only_memory_that_is_held_for_a_pod_with_precedence_counts(
    kind: str, priorities: set[int]
) -> None:
    """``priorities`` are the priorities of pods that have no precedence over the pod with priority
    0.
    """
    for priority, gib in product((-1, 0, 5), (9, 16)):
        fleet = one_node()
        hold(fleet, kind, gib, priority)
        fleet.writer.apply([PodSeen(waiting("asked", 16))])
        assert suggests_steering(fleet) == (priority in priorities), (priority, gib)
        assert would_be_placed(fleet) == (priority in priorities), (priority, gib)


def test_a_pod_for_which_memory_is_held_waits_for_it() -> None:
    fleet = one_node()
    fleet.writer.apply([PodSeen(waiting("asked", 16, nominated_node_name="a"))])
    assert not suggests_steering(fleet)
    assert not would_be_placed(fleet)


def test_a_filter_call_may_show_a_pod_to_explain_before_its_watch_shows_it_to_pending() -> None:
    fleet, asked = one_node(), waiting("asked", 16)
    fleet.journal.record(Decision(asked, "d", 0.0, 1, 1, 0, {Reason.MEMORY_ON_SOME: 1}))
    assert suggests_steering(fleet)
    assert not would_be_placed(fleet)
    fleet.writer.apply([PodSeen(asked)])
    assert suggests_steering(fleet)
    assert would_be_placed(fleet)
