"""Compares admission with all possible outcomes.

A pod fits exactly if no order of admissions, no subset, no tie and no ending pod can overcommit a
device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, DrawFn

from headroom.contract.gpunode import Device, Plugin, PodUse, Replicas, Reservation
from headroom.contract.kube import Pod
from headroom.core.placement.fit import Verdicts, fit
from headroom.core.placement.placement_record import place
from headroom.core.placement.snapshot import NodeTerms, Snapshot
from headroom.core.placement.snapshot_builder import build
from tests.builders import FRESH_S, GIB, NOW_S, container, pod, request, reservation, shared, terms
from tests.examples import examples
from tests.placement import brute


@dataclass(frozen=True)
class Sitting:
    gpu: int
    size: int
    leaving: bool


@dataclass
class UnconfirmedNode:
    """A node with its pods. Sizes are in GiB, and confirmed pods have one replica each."""

    node: brute.Node
    memory: tuple[int, ...]
    sitting: tuple[Sitting, ...]
    #: The containers of each unconfirmed pod by size, with one replica each.
    waiting: list[tuple[int, ...]] = field(default_factory=list)
    reservations: dict[str, Reservation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, one in enumerate(self.sitting):
            self.reservations[f"s{number}"] = reservation({f"D{one.gpu}": one.size * GIB})

    def judged(self, asked: Pod) -> tuple[Snapshot, Verdicts]:
        weighed = terms(
            *self.devices(),
            pods=[
                PodUse(uid=f"s{number}", device=f"D{one.gpu}", replica=str(number))
                for number, one in enumerate(self.sitting)
            ],
            reservations=self.reservations,
            leaving={f"s{number}" for number, one in enumerate(self.sitting) if one.leaving},
            plugin=Plugin(
                allocation_policy=self.node.policy,  # type: ignore[arg-type]
                topology_manager_policy="restricted" if self.node.aligned else "none",
            ),
        )
        snap = build([NodeTerms("n", None, FRESH_S, weighed)])
        return snap, fit(request(asked), snap, snap.rows(["n"]), NOW_S)

    def devices(self) -> list[Device]:
        return [
            shared(
                f"D{index}",
                memory_bytes=self.memory[index] * GIB,
                numa_node=gpu.numa,
                replicas=Replicas(
                    free=gpu.total - gpu.allocated - gpu.unhealthy,
                    allocated=gpu.allocated,
                    unhealthy=gpu.unhealthy,
                ),
            )
            for index, gpu in enumerate(self.node.gpus)
        ]

    def free(self) -> int:
        free = sum(gpu.total - gpu.allocated - gpu.unhealthy for gpu in self.node.gpus)
        return free - sum(len(sizes) for sizes in self.waiting)

    def overcommits(self, newcomer: Sequence[int]) -> bool:
        """Return whether any outcome overcommits a device after the new pod is bound."""
        every = [*self.waiting, newcomer]
        return any(
            self.load(index, state, every) > self.memory[index]
            for state in brute.states(self.node, [len(sizes) for sizes in every])
            for index in range(len(self.memory))
        )

    def load(self, gpu: int, state: brute.State, every: Sequence[Sequence[int]]) -> int:
        here = [one for one in self.sitting if one.gpu == gpu]
        ending = sorted(one.size for one in here if one.leaving)
        # It is unknown which ending pods have ended. In the worst case these are the smallest.
        total = sum(one.size for one in here if not one.leaving) + sum(ending[state.gone[gpu] :])
        for sizes, places in zip(every, state.where, strict=True):
            for size, index in zip(sizes, places or (), strict=False):
                total += size * (index == gpu)
        return total

    def bind(self, uid: str, sizes: tuple[int, ...], snap: Snapshot, verdicts: Verdicts) -> None:
        charges = place(verdicts.request, snap, verdicts, 0).charges
        self.reservations[uid] = Reservation(namespace="default", name=uid, charges=list(charges))
        self.waiting.append(sizes)


def asked(sizes: Sequence[int]) -> Pod:
    text = ",".join(f"c{number}={size}Gi" for number, size in enumerate(sizes))
    return pod(text, *(container(f"c{number}") for number in range(len(sizes))))


@st.composite
def worlds(draw: DrawFn) -> UnconfirmedNode:
    gpus: list[brute.Gpu] = []
    sitting: list[Sitting] = []
    memory = tuple(draw(st.sampled_from([8, 8, 8, 12])) for _ in range(draw(st.integers(1, 3))))
    for index, most in enumerate(memory):
        total, unhealthy = draw(st.integers(1, 4)), draw(st.sampled_from([0, 0, 0, 1]))
        here: list[Sitting] = []
        for _ in range(draw(st.integers(0, total - unhealthy))):
            size = draw(st.integers(1, 4))
            if sum(one.size for one in here) + size <= most:
                here.append(Sitting(index, size, draw(st.integers(0, 4)) == 0))
        leaving = sum(one.leaving for one in here)
        numa = draw(st.integers(0, 1))
        gpus.append(brute.Gpu(total, len(here), unhealthy, leaving, numa))
        sitting += here
    policy = draw(st.sampled_from(["distributed", "distributed", "packed", "unknown"]))
    node = brute.Node(tuple(gpus), policy, aligned=draw(st.integers(0, 3)) == 0)
    return UnconfirmedNode(node, memory, tuple(sitting))


@settings(max_examples=examples(400), deadline=None)
@given(worlds(), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_a_pod_fits_exactly_if_no_outcome_overcommits(
    world: UnconfirmedNode, sizes: list[int]
) -> None:
    for number, size in enumerate(sizes):
        if not world.free():
            break
        snap, verdicts = world.judged(asked([size]))
        assert verdicts.fits[0] != world.overcommits([size])
        could = {index for index, is_one in enumerate(verdicts.asks[0].candidates[0]) if is_one}
        assert could == brute.could_get(world.node, [1] * len(world.waiting))
        if verdicts.fits[0]:
            world.bind(f"u{number}", (size,), snap, verdicts)


@settings(max_examples=examples(300), deadline=None)
@given(worlds(), st.data())
def test_no_outcome_overcommits_with_several_containers(
    world: UnconfirmedNode, data: DataObject
) -> None:
    for number in range(3):
        sizes = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=2), label="pod"))
        if world.free() < len(sizes):
            break
        snap, verdicts = world.judged(asked(sizes))
        could = {index for index, is_one in enumerate(verdicts.asks[0].candidates[0]) if is_one}
        waiting = [len(each) for each in world.waiting]
        assert could >= brute.could_get(world.node, waiting, len(sizes))
        if verdicts.fits[0]:
            assert not world.overcommits(sizes)
            world.bind(f"u{number}", sizes, snap, verdicts)
