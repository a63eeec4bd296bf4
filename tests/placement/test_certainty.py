"""Compares the certainty of a node with all possible choices of the plugin."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from headroom.contract.gpunode import Plugin, Replicas
from headroom.core.placement.explain import certainty
from tests.builders import GIB, mig, reservation, shared, use, weighed
from tests.examples import examples
from tests.placement import brute


@dataclass(frozen=True)
class UnconfirmedNode:
    """A node with unconfirmed pods. Sizes are in GiB, and each pod has one replica."""

    node: brute.Node
    memory: int
    unattributed: tuple[int, ...]
    #: The sizes of the pods on each GPU.
    sitting: tuple[tuple[int, ...], ...]
    waiting: tuple[int, ...]

    def certainty(self) -> str:
        devices = [
            shared(
                f"D{index}",
                memory_bytes=self.memory * GIB,
                used_bytes=self.unattributed[index] * GIB,
                unattributed_bytes=self.unattributed[index] * GIB,
                replicas=Replicas(
                    gpu.total - gpu.allocated - gpu.unhealthy, gpu.allocated, gpu.unhealthy
                ),
            )
            for index, gpu in enumerate(self.node.gpus)
        ]
        here = [
            (f"s{index}-{number}", f"D{index}", size)
            for index, sizes in enumerate(self.sitting)
            for number, size in enumerate(sizes)
        ]
        every = {uid: reservation({device: size * GIB}) for uid, device, size in here}
        anywhere = [device.uuid for device in devices]
        for number, size in enumerate(self.waiting):
            every[f"w{number}"] = reservation(dict.fromkeys(anywhere, size * GIB))
        plugin = Plugin(
            allocation_policy=self.node.policy,  # type: ignore[arg-type]
            topology_manager_policy="none",
        )
        rows = [use(uid, device, replica=uid) for uid, device, _ in here]
        return certainty(
            weighed(*devices, pods=rows, reservations=every, plugin=plugin, tolerance_bytes=0)
        )

    def loads(self, waiting: Sequence[int]) -> Iterator[list[int]]:
        """Yield the load of each GPU, for all ways to give each pod a free replica or none."""
        nowhere = len(self.node.gpus)
        for places in product(range(nowhere + 1), repeat=len(waiting)):
            loads = [
                sum(sizes) + more
                for sizes, more in zip(self.sitting, self.unattributed, strict=True)
            ]
            free = [gpu.total - gpu.allocated - gpu.unhealthy for gpu in self.node.gpus]
            for place, size in zip(places, waiting, strict=True):
                if place < nowhere:
                    free[place] -= 1
                    loads[place] += size
            if min(free) >= 0:
                yield loads

    def everything_is_safe(self) -> bool:
        return all(max(loads) <= self.memory for loads in self.loads(self.waiting))


@st.composite
def worlds(draw: DrawFn) -> UnconfirmedNode:
    memory = draw(st.sampled_from([8, 12]))
    count = draw(st.integers(1, 3))
    most = draw(st.integers(1, 5))
    sizes = st.integers(1, most)
    gpus: list[brute.Gpu] = []
    sitting: list[tuple[int, ...]] = []
    for _ in range(count):
        total, unhealthy = draw(st.integers(2, 4)), draw(st.sampled_from([0, 0, 0, 1]))
        sitting.append(tuple(draw(st.lists(sizes, max_size=total - unhealthy))))
        gpus.append(brute.Gpu(total, len(sitting[-1]), unhealthy))
    policy = draw(st.sampled_from(["distributed", "packed", "unknown"]))
    return UnconfirmedNode(
        brute.Node(tuple(gpus), policy),
        memory,
        tuple(draw(st.sampled_from([0, 0, 0, 2])) for _ in range(count)),
        tuple(sitting),
        tuple(draw(st.lists(sizes, max_size=3))),
    )


@settings(max_examples=examples(500), deadline=None)
@given(worlds())
def test_a_node_is_exact_only_if_the_next_pod_has_one_candidate(world: UnconfirmedNode) -> None:
    could = brute.could_get(world.node, [1] * len(world.waiting))
    assert (world.certainty() == "exact") == (len(could) <= 1)


@settings(max_examples=examples(1000), deadline=None)
@given(worlds(), st.integers(0, 3))
def test_a_slot_safe_node_cannot_be_overcommitted_by_the_plugin(
    world: UnconfirmedNode, more: int
) -> None:
    left = [world.memory - taken for taken in world.unattributed]
    pairs = list(zip(world.node.gpus, left, strict=True))
    fits = all(
        max((*world.waiting, *sizes), default=0) * gpu.total <= of_it
        for (gpu, of_it), sizes in zip(pairs, world.sitting, strict=True)
    )
    message = world.certainty()
    if message != "exact":
        assert (message == "slot-safe") == fits
    if message == "slot-safe":
        # The node stays safe with further pods that request one replica's share.
        worth = min(of_it // gpu.total for gpu, of_it in pairs)
        crowd = [*world.waiting, *([worth] * more)]
        assert all(max(loads) <= world.memory for loads in world.loads(crowd))


def test_a_node_that_is_not_slot_safe_can_be_overcommitted() -> None:
    """The rule would be useless if other nodes were never overcommitted."""
    node = brute.Node((brute.Gpu(2), brute.Gpu(2)))
    assert UnconfirmedNode(node, 8, (0, 0), ((), ()), (4, 4)).certainty() == "slot-safe"
    unsafe = UnconfirmedNode(node, 8, (0, 0), ((), ()), (5, 4))
    assert unsafe.certainty() == "predicted"
    assert not unsafe.everything_is_safe()
    by_strangers = UnconfirmedNode(node, 8, (1, 0), ((), ()), (4, 4))
    assert by_strangers.certainty() == "predicted"
    assert not by_strangers.everything_is_safe()


def test_instances_that_share_memory_are_judged_together() -> None:
    """Each of the two pods fits on the compute instances alone, but the two do not fit together."""
    instances = [mig("a", 1, memory_bytes=20 * GIB), mig("b", 1, memory_bytes=20 * GIB)]
    for gib, expected in ((10, "slot-safe"), (15, "predicted")):
        on_its_way = {"p": reservation({"a": gib * GIB, "b": gib * GIB})}
        assert certainty(weighed(*instances, reservations=on_its_way)) == expected


def test_measured_use_counts_like_a_request() -> None:
    held = {"p": reservation({"D0": GIB})}
    devices = [shared(f"D{n}", free=3 + n, allocated=1 - n) for n in range(2)]
    for used_gib, expected in ((6, "slot-safe"), (7, "predicted")):
        rows = [use("p", "D0", used_gib * GIB, replica="D0::0")]
        assert certainty(weighed(*devices, pods=rows, reservations=held)) == expected
