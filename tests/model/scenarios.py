"""Defines the scenarios of the explorer, with few actors, chosen so that every pair of rules
interacts.

Every pod requests 6 of the 10 bytes of the only device, so that two pods never fit together, or 2
bytes if its user changes or recreates it.
"""

from collections.abc import Callable, Mapping
from types import ModuleType

from tests.model.cluster import (
    binds,
    bypasses_us,
    charges,
    creates_the_gpunode,
    deletes,
    deletes_the_gpunode,
    edits,
    ends,
    ends_start,
    initialises,
    loses_the_gpunode,
    pod,
    recreates,
    removes,
    settles,
    world,
)
from tests.model.explorer import Scenario

P, Q, HEIR = pod("p", 6), pod("q", 6), pod("p", 2, uid="p-heir")
HELD = world(P, Q)
FIRST, SECOND, BESIDE = pod("p", 2, alone=True), pod("q", 2, alone=True), pod("r", 2)
STARTERS = world(FIRST, SECOND, BESIDE)
SMALL = world(pod("p", 2), Q)

Play = Callable[[ModuleType, int], Scenario]


def two_pods_for_one_device(code: ModuleType, losses: int) -> Scenario:
    actors = {
        "A binds p": binds("A", P, "n1", HELD, code),
        "B binds q": binds("B", Q, "n1", HELD, code),
        "R": removes("R", "n1", "p", code),
    }
    return Scenario(HELD, actors, {"p ends": ends("p")}, losses)


def one_pod_on_two_nodes(code: ModuleType, losses: int) -> Scenario:
    actors = {
        "A binds p to n1": binds("A", P, "n1", HELD, code),
        "B binds p to n2": binds("B", P, "n2", HELD, code),
        "R": removes("R", "n1", "p", code),
    }
    return Scenario(HELD, actors, {}, losses)


def one_pod_bound_twice_to_a_node(code: ModuleType, losses: int) -> Scenario:
    """kube-scheduler times out on one replica, and calls another."""
    actors = {
        "A binds p": binds("A", P, "n1", HELD, code),
        "B binds p": binds("B", P, "n1", HELD, code),
        "R": removes("R", "n1", "p", code),
    }
    return Scenario(HELD, actors, {}, losses)


def two_removals_during_a_bind(code: ModuleType, losses: int) -> Scenario:
    actors = {
        "A binds p": binds("A", P, "n1", HELD, code),
        "R": removes("R", "n1", "p", code),
        "S": removes("S", "n1", "p", code),
    }
    return Scenario(HELD, actors, {}, losses)


def a_request_that_grows(code: ModuleType, losses: int) -> Scenario:
    """A has seen the pod before its user changed it, and B after."""
    actors = {
        "A binds p": binds("A", P, "n1", SMALL, code),
        "B binds p": binds("B", P, "n1", None, code),
    }
    return Scenario(SMALL, actors, {"p grows": edits("p", 6)}, losses)


def a_pod_recreated_under_its_name(code: ModuleType, losses: int) -> Scenario:
    actors = {
        "A binds p": binds("A", P, "n1", HELD, code),
        "B binds the new p": binds("B", HEIR, "n1", None, code),
        "R": removes("R", "n1", "p", code),
    }
    return Scenario(HELD, actors, {"p is replaced": recreates("p", 2)}, losses)


def a_pod_deleted_during_its_bind(code: ModuleType, losses: int) -> Scenario:
    actors = {
        "A binds p": binds("A", P, "n1", HELD, code),
        "B binds q": binds("B", Q, "n1", HELD, code),
        "R": removes("R", "n1", "p", code),
    }
    return Scenario(HELD, actors, {"p is deleted": deletes("p")}, losses)


def the_gpunode_is_lost(code: ModuleType, losses: int) -> Scenario:
    actors = {
        "A binds p": binds("A", P, "n1", HELD, code),
        "B binds q": binds("B", Q, "n1", HELD, code),
        "I": initialises("I", "n1", code),
    }
    return Scenario(HELD, actors, {"the GPUNode is lost": loses_the_gpunode("n1")}, losses)


def two_replicas_initialise_the_lost_gpunode(code: ModuleType, losses: int) -> Scenario:
    actors = {
        "A binds p": binds("A", P, "n1", HELD, code),
        "I": initialises("I", "n1", code),
        "J": initialises("J", "n1", code),
    }
    return Scenario(HELD, actors, {"the GPUNode is lost": loses_the_gpunode("n1")}, losses)


def the_gpunode_is_missing_for_a_while(code: ModuleType, losses: int) -> Scenario:
    """A has cached the deleted GPUNode, and R removes a reservation from it."""
    actors = {
        "A binds p": binds("A", P, "n1", HELD, code),
        "I": initialises("I", "n1", code),
        "R": removes("R", "n1", "p", code),
    }
    deeds = {
        "the GPUNode is deleted": deletes_the_gpunode("n1"),
        "the GPUNode is created": creates_the_gpunode("n1"),
    }
    return Scenario(HELD, actors, deeds, losses)


def a_pod_bypasses_us(code: ModuleType, losses: int) -> Scenario:
    """Both replicas see the pod and charge it, while one of them binds another pod."""
    actors = {
        "A binds p": binds("A", P, "n1", HELD, code),
        "C": charges("C", "n1", Q, code),
        "D": charges("D", "n1", Q, code),
    }
    deeds = {"q bypasses us": bypasses_us("q", "n1"), "q ends": ends("q")}
    return Scenario(HELD, actors, deeds, losses)


def a_pod_is_bound_by_two_schedulers(code: ModuleType, losses: int) -> Scenario:
    actors = {
        "A binds p to n2": binds("A", P, "n2", HELD, code),
        "C": charges("C", "n1", P, code),
        "R": removes("R", "n2", "p", code),
    }
    deeds = {"p bypasses us": bypasses_us("p", "n1"), "p is deleted": deletes("p")}
    return Scenario(HELD, actors, deeds, losses)


def a_pod_bypasses_us_while_the_gpunode_is_lost(code: ModuleType, losses: int) -> Scenario:
    actors = {
        "C": charges("C", "n1", Q, code),
        "I": initialises("I", "n1", code),
        "R": removes("R", "n1", "q", code),
    }
    deeds = {
        "q bypasses us": bypasses_us("q", "n1"),
        "the GPUNode is lost": loses_the_gpunode("n1"),
    }
    return Scenario(HELD, actors, deeds, losses)


def three_extenders(code: ModuleType, losses: int) -> Scenario:
    actors = {
        "A binds p to n1": binds("A", P, "n1", HELD, code),
        "B binds q to n1": binds("B", Q, "n1", HELD, code),
        "C binds p to n2": binds("C", P, "n2", HELD, code),
        "R": removes("R", "n1", "p", code),
    }
    return Scenario(HELD, actors, {}, losses)


def pods_that_start_alone(code: ModuleType, losses: int) -> Scenario:
    """p, q and r fit on the device at the same time, but only one of p and q may start there."""
    actors = {
        "A binds p": binds("A", FIRST, "n1", STARTERS, code),
        "B binds q": binds("B", SECOND, "n1", STARTERS, code),
        "C binds r": binds("C", BESIDE, "n1", STARTERS, code),
        "E": ends_start("E", "n1", FIRST, code),
    }
    return Scenario(STARTERS, actors, {"p settles": settles("p")}, losses)


def a_starting_pod_is_deleted(code: ModuleType, losses: int) -> Scenario:
    """Its containers may continue to run."""
    actors = {
        "A binds p": binds("A", FIRST, "n1", STARTERS, code),
        "B binds q": binds("B", SECOND, "n1", None, code),
        "R": removes("R", "n1", "p", code),
    }
    return Scenario(STARTERS, actors, {"p is deleted": deletes("p")}, losses)


PLAYS: Mapping[str, Play] = {
    play.__name__.replace("_", " "): play
    for play in (
        two_pods_for_one_device,
        one_pod_on_two_nodes,
        one_pod_bound_twice_to_a_node,
        two_removals_during_a_bind,
        a_request_that_grows,
        a_pod_recreated_under_its_name,
        a_pod_deleted_during_its_bind,
        the_gpunode_is_lost,
        two_replicas_initialise_the_lost_gpunode,
        the_gpunode_is_missing_for_a_while,
        a_pod_bypasses_us,
        a_pod_is_bound_by_two_schedulers,
        a_pod_bypasses_us_while_the_gpunode_is_lost,
        three_extenders,
        pods_that_start_alone,
        a_starting_pod_is_deleted,
    )
}
