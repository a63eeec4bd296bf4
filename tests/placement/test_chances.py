"""Tests which devices the plugin can choose next, according to the node's report."""

import pytest

from headroom.contract.gpunode import Plugin, Replicas
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.explain import because, certainty
from headroom.core.placement.placement_record import place
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.placement.snapshot_builder import reach
from tests.builders import (
    DISTRIBUTED,
    FRESH_S,
    GIB,
    container,
    device,
    judged,
    pod,
    request,
    reservation,
    shared,
    terms,
    use,
    weighed,
)

PACKED = Plugin(allocation_policy="packed", topology_manager_policy="none")


def held(uuid: str, count: int, **other: object) -> object:
    """Return a device with four replicas, of which ``allocated`` are in use."""
    return shared(uuid, free=4 - count, allocated=count, **other)


def rows(**counts: int) -> list[object]:
    return [
        use(f"s-{uuid}-{n}", uuid, 0, replica=str(n))
        for uuid, count in counts.items()
        for n in range(count)
    ]


def weigh(*devices: object, **how: object) -> tuple[DeviceTerms, ...]:
    return terms(*devices, **{"plugin": DISTRIBUTED, **how})  # type: ignore[arg-type]


def next_ones(weighed: tuple[DeviceTerms, ...], count: int = 1) -> list[str]:
    return [term.device.uuid for term in weighed if reach(term) <= count]


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        pytest.param(DISTRIBUTED, ["b"], id="distributed: the fewest pods"),
        pytest.param(PACKED, ["a"], id="packed: the most pods and a free replica"),
        pytest.param(Plugin(), ["a", "b"], id="unknown: any with a free replica"),
    ],
)
def test_candidates_follow_the_plugin_policy(plugin: Plugin, expected: list[str]) -> None:
    devices = held("a", 2), held("b", 1), held("c", 4)
    found = weigh(*devices, pods=rows(a=2, b=1, c=4), plugin=plugin)
    assert next_ones(found) == expected


def test_an_unhealthy_replica_counts_as_allocated() -> None:
    sick = shared("b", replicas=Replicas(free=3, unhealthy=1), healthy=False)
    assert next_ones(weigh(shared("a"), sick)) == ["a"]


def test_unconfirmed_pods_shift_the_next_choice() -> None:
    devices = held("a", 0), held("b", 1), held("c", 3)
    for on_their_way, expected in (
        (0, ["a"]),
        (1, ["a", "b"]),
        (4, ["a", "b"]),
        (5, ["a", "b", "c"]),
    ):
        reservations = {f"u{n}": reservation({"a": GIB}) for n in range(on_their_way)}
        found = weigh(*devices, pods=rows(b=1, c=3), reservations=reservations)
        assert next_ones(found) == expected, on_their_way


def test_the_second_container_can_get_other_devices_than_the_first() -> None:
    found = weigh(held("a", 0), held("b", 1), held("c", 3), pods=rows(b=1, c=3))
    assert [next_ones(found, count) for count in (1, 2, 6)] == [["a"], ["a", "b"], ["a", "b", "c"]]


def test_an_ending_pod_may_or_may_not_hold_its_replica() -> None:
    devices, pods = (held("a", 1), held("b", 1), held("c", 4)), rows(a=1, b=1, c=4)
    assert next_ones(weigh(*devices, pods=pods)) == ["a", "b"]
    assert next_ones(weigh(*devices, pods=pods, leaving={"s-c-0"})) == ["a", "b"]
    ending = {"s-c-0", "s-c-1", "s-c-2"}
    assert next_ones(weigh(*devices, pods=pods, leaving=ending)) == ["a", "b", "c"]


def test_the_memory_of_an_ending_pod_is_released_with_its_replica() -> None:
    """The kubelet allocates a whole device again only after its pod has ended."""
    taken = device("a", replicas=Replicas(allocated=1))
    how = {"pods": [use("u", "a")], "reservations": {"u": reservation({"a": 24 * GIB})}}
    (ends, _) = weigh(taken, device("b"), leaving={"u"}, **how)
    assert (ends.first, ends.free_bytes, ends.headroom_bytes) == (0, 24 * GIB, 0)
    (stays, _) = weigh(taken, device("b"), **how)
    assert stays.first is None


def test_the_smallest_ending_pod_is_assumed_to_end_first() -> None:
    full = shared("a", free=0, allocated=2)
    sizes = {"small": 2, "large": 20}
    (found,) = weigh(
        full,
        pods=[use(uid, "a") for uid in sizes],
        reservations={uid: reservation({"a": size * GIB}) for uid, size in sizes.items()},
        leaving=set(sizes),
    )
    assert (found.first, found.free_bytes) == (0, 4 * GIB)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        pytest.param("none", ["a"], id="all are offered together"),
        pytest.param("restricted", ["a", "c"], id="devices of either NUMA node"),
        pytest.param("", ["a", "c"], id="unknown, so devices of either"),
    ],
)
def test_each_numa_node_has_a_next_choice_if_the_kubelet_aligns(
    policy: str, expected: list[str]
) -> None:
    devices = held("a", 0, numa_node=0), held("b", 1, numa_node=0), held("c", 2, numa_node=1)
    plugin = Plugin(allocation_policy="distributed", topology_manager_policy=policy)
    assert next_ones(weigh(*devices, pods=rows(b=1, c=2), plugin=plugin)) == expected


def test_with_an_unknown_policy_each_device_may_get_one_unconfirmed_pod_per_replica() -> None:
    """In addition to the new pod, two of the three replicas of b are free for the other pods."""
    reservations = {f"u{n}": reservation({"a": 2 * GIB}) for n in range(3)}
    devices = held("a", 0), held("b", 1), held("c", 1, resource="other")
    found = weigh(*devices, pods=rows(b=1, c=1), reservations=reservations, plugin=Plugin())
    assert next_ones(found) == ["a", "b", "c"]
    assert [term.free_bytes for term in found] == [18 * GIB, 20 * GIB, 24 * GIB]


def test_a_pod_that_could_hold_an_unexplained_replica_is_charged_there() -> None:
    """The report counts a replica of c as allocated, without its pod."""
    reservations = {"u": reservation({"a": 2 * GIB}), "v": reservation({"a": 3 * GIB})}
    devices = held("a", 0), held("b", 0), held("c", 4)
    found = weigh(*devices, pods=rows(c=4), reservations=reservations)
    assert [term.unconfirmed_bytes for term in found] == [3 * GIB, 3 * GIB, 0]
    found = weigh(*devices, pods=rows(c=3), reservations=reservations)
    assert [term.unconfirmed_bytes for term in found] == [3 * GIB, 3 * GIB, 3 * GIB]


def test_impossible_counts_do_not_determine_the_order() -> None:
    wrong = shared("c", replicas=Replicas(free=1, allocated=-1))
    assert next_ones(weigh(held("a", 0), held("b", 3), wrong, pods=rows(b=3))) == ["a", "b", "c"]
    twice = held("a", 0), held("b", 3), held("b", 3)
    assert next_ones(weigh(*twice, pods=rows(b=3))) == ["a", "b", "b"]


def test_a_renamed_device_stays_a_candidate_of_its_reservations() -> None:
    reservations = {"u": reservation({"a": 5 * GIB}, resource="before")}
    (found,) = weigh(held("a", 0), reservations=reservations)
    assert found.unconfirmed_bytes == 5 * GIB
    assert found.free_bytes == 19 * GIB


def test_a_pod_displaced_by_a_later_pod_needs_its_recorded_bytes_there() -> None:
    """Device a is the next choice, and the larger device b is the choice after it."""
    small, large = held("a", 0), held("b", 1, memory_bytes=48 * GIB)
    how = {"pods": rows(b=1), "plugin": DISTRIBUTED}
    snap, verdicts = judged("50%", weighed(small, large, **how))  # type: ignore[arg-type]
    assert verdicts.asks[0].candidates.tolist() == [[True, False]]
    placement = place(request("50%"), snap, verdicts, 0)
    assert placement.charges[0].candidates == {"a": 12 * GIB, "b": 24 * GIB}
    assert '"candidates":["a"]' in placement.annotations["headroom.gpu/placement"] or (
        '"devices":["a"]' in placement.annotations["headroom.gpu/placement"]
    )


def test_a_small_pod_is_rejected_if_it_could_displace_a_large_pod_to_a_full_device() -> None:
    """Alone, the large pod gets the empty D0. After another pod, it can get D1."""
    uses = [use("s", "D1", replica="0")]
    large = {"s": reservation({"D1": 20 * GIB}), "u": reservation({"D0": 8 * GIB})}
    devices = held("D0", 0), held("D1", 1)
    node = weighed(*devices, pods=uses, reservations=large, plugin=DISTRIBUTED)  # type: ignore[arg-type]
    assert node.devices[1].unconfirmed_bytes == 0
    assert not judged("1Gi", node)[1].fits[0]
    large["u"] = reservation({"D0": 4 * GIB})
    node = weighed(*devices, pods=uses, reservations=large, plugin=DISTRIBUTED)  # type: ignore[arg-type]
    assert judged("1Gi", node)[1].fits[0]


def test_a_pod_with_two_containers_advances_the_choice_by_two() -> None:
    """D0 is the first choice, then D1 or D0. If one container is on D1, the other container can be
    the third on D0.
    """
    devices = held("D0", 0), held("D1", 1)
    both = {f"u{n}": reservation({"D0": 12 * GIB, "D1": 12 * GIB}) for n in range(2)}
    node = weighed(
        *devices,  # type: ignore[arg-type]
        pods=[use("s", "D1", 0, replica="0")],  # type: ignore[arg-type]
        reservations=both,
        plugin=DISTRIBUTED,
    )
    assert node.devices[0].unconfirmed_bytes == 24 * GIB
    two = pod("1Gi", container("a"), container("b"))
    assert not judged(two, node)[1].fits[0]


class TestSeveralReplicasForOneContainer:
    two = pod("1Gi", container(gpus=2))

    @pytest.mark.parametrize(
        ("sharing", "rejects", "fits"),
        [
            pytest.param("time-slicing", None, True, id="time-slicing accepts it"),
            pytest.param("time-slicing", True, False, id="by default"),
            pytest.param("mps", None, False, id="MPS rejects it"),
            pytest.param("mps", False, True, id="by default, with MPS"),
        ],
    )
    def test_a_pod_with_several_replicas_is_rejected_if_the_plugin_rejects_it(
        self, sharing: str, rejects: bool | None, fits: bool
    ) -> None:
        plugin = Plugin(fail_requests_greater_than_one=rejects)
        node = weighed(shared("a", sharing=sharing), plugin=plugin)
        assert bool(judged(self.two, node)[1].fits[0]) is fits

    def test_whole_devices_do_not_count_as_replicas(self) -> None:
        plugin = Plugin(fail_requests_greater_than_one=True)
        assert judged(self.two, weighed(device("a"), device("b"), plugin=plugin))[1].fits[0]


class TestWords:
    @pytest.mark.parametrize(
        ("found", "words"),
        [
            pytest.param(weigh(held("a", 0))[0], "(fewest replicas in use)", id="next"),
            pytest.param(weigh(held("a", 0), plugin=PACKED)[0], "(most replicas", id="packed"),
            pytest.param(weigh(held("a", 4))[0], "it has no free replica", id="full"),
            pytest.param(weigh(held("a", 0), plugin=Plugin())[0], "unknown", id="unknown"),
            pytest.param(
                weigh(held("a", 1), held("b", 0), reservations={"u": reservation({})})[0],
                "next choice after 1 replica for unconfirmed pods",
                id="displaced",
            ),
            pytest.param(
                weigh(held("a", 2), held("b", 0))[0], "2 replicas of other devices", id="later"
            ),
            pytest.param(
                weigh(held("a", 4), pods=rows(a=4), leaving={"s-a-0"})[0],
                "if terminating pods have released theirs",
                id="ending",
            ),
        ],
    )
    def test_the_explanation_shows_why_a_device_is_a_candidate(
        self, found: DeviceTerms, words: str
    ) -> None:
        assert words in because(found)

    @pytest.mark.parametrize(
        ("weighed_devices", "expected"),
        [
            pytest.param(weigh(held("a", 0), held("b", 1)), "exact", id="one next choice"),
            pytest.param(weigh(device("a"), device("b")), "slot-safe", id="whole devices"),
            pytest.param(weigh(held("a", 0), held("b", 0)), "slot-safe", id="no pod"),
            pytest.param(
                weigh(held("a", 0), held("b", 0), reservations={"u": reservation({"a": 6 * GIB})}),
                "slot-safe",
                id="the share of a replica",
            ),
            pytest.param(
                weigh(
                    held("a", 0), held("b", 0), reservations={"u": reservation({"a": 6 * GIB + 1})}
                ),
                "predicted",
                id="one byte more than the share",
            ),
        ],
    )
    def test_the_explanation_shows_the_certainty_of_a_node(
        self, weighed_devices: tuple[DeviceTerms, ...], expected: str
    ) -> None:
        assert certainty(NodeTerms("n", None, FRESH_S, weighed_devices)) == expected
