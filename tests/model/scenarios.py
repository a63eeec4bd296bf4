"""Defines the scenarios of the explorer. Each has few actors, but every pair of rules interacts in
a scenario.

Every pod requests 6 of the 10 bytes of the only device, so that two pods do not fit together. A pod
that its user changes or recreates requests 2 bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

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
from tests.model.explorer import Deed, Scenario
from tests.model.world import World

P, Q, HEIR = pod("p", 6), pod("q", 6), pod("p", 2, uid="p-heir")
HELD = world(P, Q)
FIRST, SECOND, BESIDE = pod("p", 2, alone=True), pod("q", 2, alone=True), pod("r", 2)
STARTERS = world(FIRST, SECOND, BESIDE)
SMALL = world(pod("p", 2), Q)


@dataclass(frozen=True)
class Play:
    #: Maps the name of each actor to the function that creates it and the function's arguments,
    #: without ``code``.
    actors: Mapping[str, tuple[Any, ...]]
    deeds: Mapping[str, Deed] = field(default_factory=dict)
    world: World = HELD

    def __call__(self, code: ModuleType, losses: int) -> Scenario:
        actors = {name: make(*given, code) for name, (make, *given) in self.actors.items()}
        return Scenario(self.world, actors, self.deeds, losses)


A_BINDS_P = {"A binds p": (binds, "A", P, "n1", HELD)}
B_BINDS_Q = {"B binds q": (binds, "B", Q, "n1", HELD)}
R = {"R": (removes, "R", "n1", "p")}
I = {"I": (initialises, "I", "n1")}  # noqa: E741
C = {"C": (charges, "C", "n1", Q)}
A_BINDS_FIRST = {"A binds p": (binds, "A", FIRST, "n1", STARTERS)}
P_IS_DELETED = {"p is deleted": deletes("p")}
IS_LOST = {"the GPUNode is lost": loses_the_gpunode("n1")}
P_BYPASSES_US, Q_BYPASSES_US = (
    {f"{name} bypasses us": bypasses_us(name, "n1")} for name in ("p", "q")
)

PLAYS: Mapping[str, Play] = {
    "two pods for one device": Play(A_BINDS_P | B_BINDS_Q | R, {"p ends": ends("p")}),
    "one pod on two nodes": Play(
        {
            "A binds p to n1": (binds, "A", P, "n1", HELD),
            "B binds p to n2": (binds, "B", P, "n2", HELD),
        }
        | R
    ),
    # kube-scheduler times out on one replica and calls another replica.
    "one pod bound twice to a node": Play(
        A_BINDS_P | {"B binds p": (binds, "B", P, "n1", HELD)} | R
    ),
    "two removals during a bind": Play(A_BINDS_P | R | {"S": (removes, "S", "n1", "p")}),
    # A has the pod before its user's change, and B has the changed pod.
    "a request that grows": Play(
        {"A binds p": (binds, "A", P, "n1", SMALL), "B binds p": (binds, "B", P, "n1", None)},
        {"p grows": edits("p", 6)},
        SMALL,
    ),
    "a pod recreated under its name": Play(
        A_BINDS_P | {"B binds the new p": (binds, "B", HEIR, "n1", None)} | R,
        {"p is replaced": recreates("p", 2)},
    ),
    "a pod deleted during its bind": Play(A_BINDS_P | B_BINDS_Q | R, P_IS_DELETED),
    "the gpunode is lost": Play(A_BINDS_P | B_BINDS_Q | I, IS_LOST),
    "two replicas initialise the lost gpunode": Play(
        A_BINDS_P | I | {"J": (initialises, "J", "n1")}, IS_LOST
    ),
    # A has cached the deleted GPUNode, and R removes a reservation from the new GPUNode.
    "the gpunode is missing for a while": Play(
        A_BINDS_P | I | R,
        {
            "the GPUNode is deleted": deletes_the_gpunode("n1"),
            "the GPUNode is created": creates_the_gpunode("n1"),
        },
    ),
    # Both replicas adopt the unreserved pod, while one replica binds another pod.
    "a pod bypasses us": Play(
        A_BINDS_P | C | {"D": (charges, "D", "n1", Q)}, Q_BYPASSES_US | {"q ends": ends("q")}
    ),
    "a pod is bound by two schedulers": Play(
        {
            "A binds p to n2": (binds, "A", P, "n2", HELD),
            "C": (charges, "C", "n1", P),
            "R": (removes, "R", "n2", "p"),
        },
        P_BYPASSES_US | P_IS_DELETED,
    ),
    "a pod bypasses us while the gpunode is lost": Play(
        C | I | {"R": (removes, "R", "n1", "q")}, Q_BYPASSES_US | IS_LOST
    ),
    "three extenders": Play(
        {
            "A binds p to n1": (binds, "A", P, "n1", HELD),
            "B binds q to n1": (binds, "B", Q, "n1", HELD),
            "C binds p to n2": (binds, "C", P, "n2", HELD),
        }
        | R
    ),
    # p, q and r fit on the device together, but p and q must not start at the same time.
    "pods that start alone": Play(
        A_BINDS_FIRST
        | {
            "B binds q": (binds, "B", SECOND, "n1", STARTERS),
            "C binds r": (binds, "C", BESIDE, "n1", STARTERS),
            "E": (ends_start, "E", "n1", FIRST),
        },
        {"p settles": settles("p")},
        STARTERS,
    ),
    # The containers of the deleted pod may still run.
    "a starting pod is deleted": Play(
        A_BINDS_FIRST | {"B binds q": (binds, "B", SECOND, "n1", None)} | R,
        P_IS_DELETED,
        STARTERS,
    ),
}
