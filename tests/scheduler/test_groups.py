"""Checks that a group of pods either reaches its minimum or holds no memory. The checks use only
the content of the store.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.scheduler.group_world import DEADLINE_S, Extender, Gang, GroupWorld, Shape

#: Seconds after which the holds of a rejected group have ended.
AFTER_S = 0.3
#: Seconds after which the holds of a Coscheduling group have ended, if kube-scheduler itself
#: rejected the group.
AFTER_PLUGIN_S = 5.1

NewWorld = Callable[..., GroupWorld]


@pytest.fixture
def world() -> Iterator[NewWorld]:
    worlds: list[GroupWorld] = []

    def make(shapes: Sequence[Shape], extenders: int = 1, seed: int = 0) -> GroupWorld:
        worlds.append(GroupWorld(shapes, extenders, seed))
        return worlds[-1]

    yield make
    for each in worlds:
        each.close()


def halves(nodes: int) -> list[Shape]:
    return [Shape(24, replicas=4)] * nodes


@pytest.mark.parametrize("label", [False, True], ids=["kube-scheduler", "Coscheduling"])
def test_a_group_that_fits_exactly_is_bound_even_if_its_cycle_is_long(
    world: NewWorld, label: bool
) -> None:
    here, gang = world(halves(6)), Gang("g", [12] * 12, 12, label=label)
    here.create_gang(gang)
    (only,) = here.extenders
    assert here.run(here.schedule_gang(gang, only, pause_s=1.0)) == 12
    assert only.calls["bind"] == 12
    here.check()


def test_pods_of_a_group_may_differ_in_size(world: NewWorld) -> None:
    here, gang = world(halves(3)), Gang("g", [20, 4, 16, 8, 12, 12], 6)
    here.create_gang(gang)
    assert here.run(here.schedule_gang(gang, here.extenders[0])) == 6
    here.check()


def test_a_group_of_pods_with_several_gpus_is_bound(world: NewWorld) -> None:
    here = world([Shape(80, gpus=8)] * 2)
    gang, next_gang = Gang("g", [60] * 4, 4, gpus=4), Gang("h", [60], 1, gpus=4)
    for each in (gang, next_gang):
        here.create_gang(each)
    assert here.run(here.schedule_gang(gang, here.extenders[0], pause_s=1.0)) == 4
    assert here.run(here.schedule_gang(next_gang, here.extenders[0])) == 0
    here.check()


def test_a_group_larger_than_the_cluster_takes_no_memory_from_single_pods(world: NewWorld) -> None:
    here, gang = world(halves(2)), Gang("g", [12] * 6, 6)
    here.create_gang(gang)
    for i in range(4):
        assert here.run(here.schedule_gang(gang, here.extenders[0], pause_s=0.1)) == 0
        here.run(asyncio.sleep(AFTER_S))
        here.create(f"single-{i}", 12)
        assert here.run(here.schedule(f"single-{i}", here.extenders[0]))
    assert here.extenders[0].calls["bind"] == 4
    here.check()


def test_no_pod_of_a_group_is_bound_if_one_loses_its_memory_before_its_bind(
    world: NewWorld,
) -> None:
    """Another extender has given the memory to a pod with a higher priority. The group is bound
    later.
    """
    here, gang = world(halves(3), 2), Gang("g", [12] * 6, 6)
    here.create_gang(gang)
    here.create("rival", 24)
    first, second = here.extenders
    chosen = here.run(here.cycle(gang, first))
    assert len(chosen) == 6
    here.assumed.clear()
    assert here.run(here.schedule("rival", second))
    assert here.run(here.bind_all(chosen, first)) == 0
    # The group has no reservations any more, so another pod gets the rest of the memory.
    here.run(asyncio.sleep(AFTER_S))
    here.create("single", 24)
    assert here.run(here.schedule("single", first))
    for name in ("rival", "single"):
        here.delete(name)
    assert here.run(here.schedule_gang(gang, first)) == 6
    here.check()


def test_the_coscheduling_plugin_may_let_pods_wait_longer_than_their_memory_is_held(
    world: NewWorld,
) -> None:
    """For example, the last pod may be created late. If another pod has taken the memory in the
    meantime, no pod of the group is bound.
    """
    for rival in (False, True):
        here, gang = world(halves(3)), Gang("g", [12] * 6, 6, label=True)
        here.create_gang(gang)
        (only,) = here.extenders
        chosen = {}
        for name in gang.pods:
            if name == "g-5":
                here.run(asyncio.sleep(60))
                if rival:
                    here.create("single", 12)
                    assert here.run(here.schedule("single", only))
            node = here.run(here.choose(name, only))
            assert node is not None
            chosen[name] = node
        assert here.run(here.bind_all(chosen, only)) == (0 if rival else 6)
        here.check()


def test_the_coscheduling_plugin_may_restart_a_group_with_another_pod(world: NewWorld) -> None:
    """The pod that had no node in the last attempt is tried first."""
    here, gang = world(halves(2)), Gang("g", [12] * 4, 4, label=True)
    here.create_gang(gang)
    here.create("single", 12)
    (only,) = here.extenders
    assert here.run(here.schedule("single", only))
    assert here.run(here.cycle(gang, only)) == {}
    here.delete("single")
    chosen = {}
    for name in ("g-3", "g-0", "g-1", "g-2"):
        node = here.run(here.choose(name, only))
        assert node is not None
        chosen[name] = node
    assert here.run(here.bind_all(chosen, only)) == 4
    here.check()


def test_a_pod_whose_node_another_extender_chose_does_not_split_its_group(
    world: NewWorld,
) -> None:
    """The bind of this pod is called between the binds of the other pods. Another pod of the group
    has lost its memory, so no pod is bound.
    """
    here, gang = world(halves(3), 2), Gang("g", [12] * 4, 4)
    here.create_gang(gang)
    first, second = here.extenders
    chosen = {name: here.run(here.choose(name, first)) or "" for name in gang.pods[:3]}
    here.create("rival", 24)
    assert here.run(here.bind("rival", chosen["g-2"], second))
    (chosen["g-3"],) = here.shapes.keys() - set(chosen.values())
    binds = {name: chosen[name] for name in ("g-0", "g-3", "g-1", "g-2")}
    here.run(here.bind_all(binds, first))
    assert here.bound().keys() == {"rival", "g-3"}
    here.check()


def test_a_group_is_bound_even_if_its_owner_prefers_a_node(world: NewWorld) -> None:
    """The first attempt fails, because kube-scheduler chooses the preferred node although memory is
    held on another node.
    """
    here, gang = world(halves(2)), Gang("g", [12] * 4, 4, prefers="n0")
    here.create_gang(gang)
    attempts = [here.run(here.schedule_gang(gang, here.extenders[0])) for _ in range(2)]
    assert attempts == [0, 4]
    here.check()


def test_a_missing_bind_delays_the_rest_of_its_group_by_half_of_its_time(world: NewWorld) -> None:
    """A plugin has stopped one bind, and kube-scheduler binds the rest of the group."""
    here, gang = world(halves(3)), Gang("g", [12] * 6, 5)
    here.create_gang(gang)
    chosen = here.run(here.cycle(gang, here.extenders[0]))
    here.assumed.pop("g-5")
    del chosen["g-5"]
    began_s = here.clock.now_s
    assert here.run(here.bind_all(chosen, here.extenders[0])) == 5
    assert DEADLINE_S / 2 < here.clock.now_s - began_s < DEADLINE_S / 2 + 0.5
    here.check()


def test_a_slow_api_server_does_not_keep_a_group_from_being_bound(world: NewWorld) -> None:
    """Reservations on one node take longer than kube-scheduler waits, so the pods on this node are
    bound in the next attempt.
    """
    here, gang = world(halves(6)), Gang("g", [12] * 12, 12)
    here.create_gang(gang)
    here.stalls_s = [5]
    assert here.run(here.schedule_gang(gang, here.extenders[0])) == 10
    assert here.run(here.schedule_gang(gang, here.extenders[0])) == 2
    here.check()


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("retried_by", [0, 1], ids=["the same extender", "another extender"])
def test_a_pod_is_bound_in_the_memory_that_an_unfinished_bind_has_reserved_for_it(
    world: NewWorld, nodes: int, retried_by: int
) -> None:
    """The API server was too slow for the first bind. If the pod went to another node, it would
    reserve memory twice."""
    here = world(halves(nodes), 2)
    here.create("single", 12)
    here.create("rival", 24)
    here.stalls_s = [5]
    node = here.run(here.choose("single", here.extenders[0]))
    assert node is not None
    assert not here.run(here.bind("single", node, here.extenders[0]))
    assert here.reserved() == {"single"}
    assert here.run(here.schedule("rival", here.extenders[0])) == (nodes > 1)
    assert here.run(here.schedule("single", here.extenders[retried_by]))
    assert here.bound()["single"] == node
    here.check()


@pytest.mark.parametrize("seed", range(12))
def test_an_extender_killed_while_it_binds_a_group_loses_no_memory(
    world: NewWorld, seed: int
) -> None:
    """The next extender binds the rest of the group in the memory that the group had reserved. No
    pod waits for memory that is reserved for itself.
    """
    here, gang = world(halves(6), seed=seed), Gang("g", [12] * 12, 12)
    here.create_gang(gang)
    (first,) = here.extenders
    chosen = here.run(here.cycle(gang, first))

    async def killed() -> None:
        binds = asyncio.ensure_future(here.bind_all(chosen, first))
        await asyncio.sleep(here.chance.uniform(0.005, 0.07))
        binds.cancel()
        await asyncio.wait([binds])

    here.run(killed())
    here.check()
    here.restart(first)
    here.run(here.schedule_gang(gang, here.extenders[0]))
    assert here.members(gang) == 12
    assert here.reserved() == set(gang.pods)
    here.check()


@pytest.mark.parametrize("seed", range(8))
def test_a_group_is_bound_completely_if_its_calls_go_to_two_extenders(
    world: NewWorld, seed: int
) -> None:
    """Each extender holds memory only for the pods in its own calls. Other binds are declined and
    retried.
    """
    here, gang = world(halves(6), 2, seed), Gang("g", [12] * 12, 12)
    here.create_gang(gang)

    async def attempt() -> None:
        chosen = {}
        for name in gang.pods:
            if name not in here.bound():
                by = here.chance.choice(here.extenders)
                if (node := await here.choose(name, by)) is not None:
                    here.assumed[name] = chosen[name] = node
        await asyncio.gather(
            *(
                here.bind(name, on, here.chance.choice(here.extenders))
                for name, on in chosen.items()
            )
        )
        await asyncio.sleep(1)

    for _ in range(12):
        if here.members(gang) == 12:
            break
        here.run(attempt())
    assert here.members(gang) == 12
    assert here.reserved() == set(gang.pods)
    here.check()


@pytest.mark.parametrize("seed", range(8))
def test_one_of_two_competing_groups_is_bound_completely(world: NewWorld, seed: int) -> None:
    """Two schedulers, each with its own extender, choose nodes for one group each and bind at the
    same time. They retry the groups until one group is bound.
    """
    here = world(halves(3), 2, seed)
    gangs = [Gang(name, [12] * 6, 6) for name in ("g", "h")]
    for gang in gangs:
        here.create_gang(gang)

    async def try_both() -> None:
        chosen = [
            await here.cycle(gang, by) for gang, by in zip(gangs, here.extenders, strict=True)
        ]
        here.assumed.clear()  # Each scheduler has its own cache.
        await asyncio.gather(*map(here.bind_all, chosen, here.extenders))

    async def insist(gang: Gang, by: Extender) -> None:
        while not any(map(here.members, gangs)):
            await asyncio.sleep(here.chance.uniform(1, 2))
            await here.schedule_gang(gang, by)

    async def insist_on_both() -> None:
        await asyncio.gather(*map(insist, gangs, here.extenders))

    here.run(try_both())
    assert sorted(map(here.members, gangs)) in ([0, 0], [0, 6])
    here.run(insist_on_both())
    assert sorted(map(here.members, gangs)) == [0, 6]
    here.check()


def test_fifty_concurrent_groups_are_bound_completely_or_not_at_all(world: NewWorld) -> None:
    """Each group that fits is bound completely in one attempt. The other groups hold no memory."""
    here = world(halves(40))
    gangs = [Gang(f"g{i}", [12] * 2, 2) for i in range(50)]
    for gang in gangs:
        here.create_gang(gang)

    async def all_of_them() -> None:
        # kube-scheduler chooses nodes for the next group while the binds of the last group run.
        binds = []
        for gang in gangs:
            chosen = await here.cycle(gang, here.extenders[0], pause_s=0.3)
            binds.append(asyncio.create_task(here.bind_all(chosen, here.extenders[0])))
        await asyncio.gather(*binds)

    here.run(all_of_them())
    assert sorted(map(here.members, gangs)) == [0] * 10 + [2] * 40
    assert here.extenders[0].calls["bind"] == 80
    here.check()


SHAPES = st.one_of(
    st.builds(Shape, st.sampled_from([24, 40, 80]), st.integers(2, 8)),
    st.builds(Shape, st.sampled_from([40, 80]), gpus=st.sampled_from([2, 4])),
)
GANGS = st.tuples(
    st.lists(st.sampled_from([4, 8, 12, 20, 36]), min_size=1, max_size=6),
    st.integers(1, 6),
    st.sampled_from([1, 1, 1, 2]),
    st.booleans(),
)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(SHAPES, min_size=1, max_size=5),
    st.lists(GANGS, min_size=1, max_size=4),
    st.integers(1, 2),
    st.randoms(use_true_random=False),
)
def test_random_groups_are_bound_to_their_minimum_or_not_at_all(
    shapes: list[Shape],
    drawn: list[tuple[list[int], int, int, bool]],
    extenders: int,
    chance: random.Random,
) -> None:
    """Clusters and groups are random. One or two schedulers, each with its own extender, also place
    and delete single pods in between.
    """
    here = GroupWorld(shapes, extenders, chance.randrange(1 << 30))
    gangs = [
        Gang(f"g{i}", sizes, min(minimum, len(sizes)), gpus, label=label)
        for i, (sizes, minimum, gpus, label) in enumerate(drawn)
    ]
    any_of_plugin = any(gang.label for gang in gangs)
    for gang in gangs:
        here.create_gang(gang)
    try:
        for turn in range(2 * len(gangs)):
            here.run(step(here, gangs, turn, chance))
            here.check()
            for gang in gangs:
                assert here.members(gang) == 0 or here.members(gang) >= gang.minimum
            here.run(asyncio.sleep(AFTER_PLUGIN_S if any_of_plugin else AFTER_S))
            single_pod_fits(here, f"probe-{turn}", chance)
            if chance.random() < 0.3 and (bound := here.bound()):
                here.delete(chance.choice([n for n in bound if n.startswith("s")] or [*bound]))
                gangs = [gang for gang in gangs if whole(here, gang)]
    finally:
        here.close()


async def step(here: GroupWorld, gangs: Sequence[Gang], turn: int, chance: random.Random) -> None:
    """Let all schedulers try a group or a single pod at the same time."""

    async def one(index: int) -> None:
        by = here.extenders[index]
        await asyncio.sleep(chance.uniform(0, 0.05))
        if gangs and chance.random() < 0.7:
            gang = chance.choice(gangs[index :: len(here.extenders)] or list(gangs))
            await here.schedule_gang(gang, by, chance.choice([0, 0.01, 0.5]))
        else:
            here.create(f"s{turn}-{index}", chance.choice([4, 12, 24]))
            await here.schedule(f"s{turn}-{index}", by)

    # Only one scheduler schedules a group at a time.
    if len(here.extenders) > 1 and len(gangs) < 2:
        await one(0)
    else:
        await asyncio.gather(*map(one, range(len(here.extenders))))


def single_pod_fits(here: GroupWorld, name: str, chance: random.Random) -> None:
    """Check that a pod without a group is placed if it fits, and delete the pod."""
    free = max(here.free(node) for node in here.shapes)
    if free < 1:
        return
    here.create(name, free)
    assert here.run(here.schedule(name, chance.choice(here.extenders)))
    here.check()
    here.delete(name)


def whole(here: GroupWorld, gang: Gang) -> bool:
    """Return whether no pod of the group was deleted."""
    return all(here.store.read_pod("default", name) is not None for name in gang.pods)
