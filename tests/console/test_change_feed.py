"""Checks that the change feed reports each change once, with its cause."""

from typing import Any

import msgspec
import pytest

from headroom.console.feed.feed import ChangeFeed, Feed
from headroom.console.feed.journals import Journals
from headroom.contract.annotations import CORDON
from headroom.contract.gpunode import ADOPTED, EVICTED, OveruseEviction, Reservation
from headroom.contract.kube import Pod
from headroom.contract.watched import GPUNodeGone, GPUNodeSeen, NodeGone, NodeSeen, PodGone, PodSeen
from headroom.core.cluster.changes import HoldsSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.holds import HeldFor, Why
from headroom.core.journal.decision_records import BindTried, Bounds, Filtered, Ranked
from headroom.core.journal.journal import Journal
from headroom.core.placement.policy import Rules
from tests.builders import DISTRIBUTED, GIB, gpunode, kube_node, pod, reservation, shared, use

EPOCH_S = 1_795_219_200.0


class Looking:
    def __init__(self) -> None:
        self.state = ClusterWriter(Rules(), 90.0, EPOCH_S)
        journal = Journal(Bounds())
        self.records = journal.records
        self.feed = Feed(lambda: EPOCH_S, lambda: 1)
        self.watching = ChangeFeed(self.state.cluster, Journals("ours", journal), self.feed, "ours")
        self.version = 0
        self.state.apply([NodeSeen(kube_node("n"))])

    def report(self, healthy: bool = True, **reservations: Reservation) -> None:
        self.version += 1
        report = gpunode(
            shared("GPU-0", healthy=healthy),
            shared("GPU-1"),
            name="n",
            version=str(self.version),
            reservations={f"uid-{name}": each for name, each in reservations.items()},
            plugin=DISTRIBUTED,
        )
        self.state.apply([GPUNodeSeen(report, 0.0)])

    def told(self, now_s: float = 1.0) -> list[tuple[str, str, str]]:
        before = max((each.number for each in self.feed.past()), default=0)
        for _ in self.watching.check(now_s):
            pass
        return [(each.kind, each.uid, each.cause) for each in self.feed.past(before)]


@pytest.fixture
def looking() -> Looking:
    looking = Looking()
    looking.report()
    assert looking.told() == []  # The first snapshot reports no changes.
    return looking


def made(attempt: str = "ours-1", **other: Any) -> Reservation:
    held = reservation({"GPU-0": GIB, "GPU-1": 2 * GIB}, name="p")
    return msgspec.structs.replace(held, attempt=attempt, **other)


def test_without_a_change_there_is_no_event(looking: Looking) -> None:
    looking.report()
    assert looking.told() == []


@pytest.mark.parametrize(
    ("held", "cause"),
    [
        pytest.param(made(), "bind", id="bound by Headroom"),
        pytest.param(made("another-1"), "bind_on_another_replica", id="bound by another replica"),
        pytest.param(made(flags=[ADOPTED]), "bound_without_us", id="unreserved"),
    ],
)
def test_a_new_reservation_has_its_cause(looking: Looking, held: Reservation, cause: str) -> None:
    looking.report(p=held)
    assert looking.told() == [("reservation_made", "uid-p", cause)]
    latest = looking.feed.past()[-1]
    assert (latest.namespace, latest.name, latest.node) == ("default", "p", "n")
    assert latest.message == "2.0 GiB on each of 2 GPUs that the pod could get"


def test_a_reservation_names_the_gpus_that_headroom_chose(looking: Looking) -> None:
    held = reservation(dict.fromkeys(("A", "B"), GIB), 2, choices=["A", "B"], name="p")
    looking.report(p=msgspec.structs.replace(held, attempt="another-1"))
    assert looking.told() == [("reservation_made", "uid-p", "bind_on_another_replica")]
    assert looking.feed.past()[-1].message == "1.0 GiB on each of 2 GPUs: A, B"


def test_an_assumed_reservation_is_reported_when_it_is_written(looking: Looking) -> None:
    held = looking.state.cluster.gpunode("n")
    assert held is not None
    looking.state.apply([HoldsSeen([HeldFor("uid-p", "n", Why.BINDING, made())])])
    assert looking.told() == []
    before = looking.state.cluster.snapshot()
    replace = msgspec.structs.replace
    written = replace(
        held,
        metadata=replace(held.metadata, resource_version="2"),
        spec=replace(held.spec, reservations={"uid-p": made()}),
    )
    looking.state.apply([GPUNodeSeen(written, 0.0)])
    assert looking.state.cluster.settled().nodes is before.nodes, "the node was not weighed again"
    assert looking.told() == [("reservation_made", "uid-p", "bind")]


@pytest.mark.parametrize(
    ("now", "cause"),
    [
        pytest.param(made("ours-2"), "bound_again", id="another attempt"),
        pytest.param(made(flags=[EVICTED]), "is_to_leave", id="evicted"),
        pytest.param(made(overuse=OveruseEviction("GPU-0")), "is_to_leave", id="overuse"),
        pytest.param(made(charges=[]), "corrected", id="corrected"),
    ],
)
def test_a_changed_reservation_has_its_cause(
    looking: Looking, now: Reservation, cause: str
) -> None:
    looking.report(p=made())
    looking.told()
    looking.report(p=now)
    assert looking.told() == [("reservation_changed", "uid-p", cause)]


def test_a_withdrawn_eviction_is_no_correction(looking: Looking) -> None:
    looking.report(p=made(overuse=OveruseEviction("GPU-0")))
    looking.told()
    looking.report(p=made())
    assert looking.told() == [("reservation_changed", "uid-p", "may_stay")]


@pytest.mark.parametrize(
    ("pod", "cause"),
    [
        pytest.param(None, "pod_gone", id="gone"),
        pytest.param(pod(node="n", phase="Succeeded"), "pod_ended", id="ended"),
        pytest.param(pod(node="other"), "bound_elsewhere", id="elsewhere"),
        pytest.param(pod(), "taken_back", id="still unbound"),
    ],
)
def test_a_removed_reservation_has_its_cause(looking: Looking, pod: Pod | None, cause: str) -> None:
    looking.report(p=made())
    looking.told()
    looking.state.apply([PodGone("uid-p")] if pod is None else [PodSeen(pod)])
    looking.report()
    assert looking.told() == [("reservation_removed", "uid-p", cause)]


def test_reports_are_lost_and_return(looking: Looking) -> None:
    assert looking.told(100.0) == [("report_lost", "", "")]
    assert looking.told(101.0) == []
    assert looking.told(1.0) == [("report_returned", "", "")]


def test_devices_become_unhealthy_and_recover(looking: Looking) -> None:
    looking.report(healthy=False)
    assert looking.told() == [("device_unhealthy", "", "")]
    latest = looking.feed.past()[-1]
    assert latest.device == "GPU-0"
    assert latest.message
    looking.report()
    assert looking.told() == [("device_healthy", "", "")]


def test_an_observed_pod_is_reported_with_its_device(looking: Looking) -> None:
    looking.report(p=made())
    looking.told()
    looking.version += 1
    shows = gpunode(
        shared("GPU-0", free=3, allocated=1),
        shared("GPU-1"),
        name="n",
        version=str(looking.version),
        reservations={"uid-p": made()},
        pods=[use("uid-p", "GPU-0", GIB, replica="GPU-0::0", name="p")],
        plugin=DISTRIBUTED,
    )
    looking.state.apply([GPUNodeSeen(shows, 0.0)])
    assert looking.told() == [("pod_observed", "uid-p", "")]
    assert looking.feed.past()[-1].device == "GPU-0"


def test_nodes_come_and_go(looking: Looking) -> None:
    looking.state.apply([NodeSeen(kube_node("m"))])
    assert looking.told() == [("node_appeared", "", "")]
    looking.state.apply([NodeGone("n"), GPUNodeGone("n")])
    assert looking.told() == [("node_gone", "", "")]


def test_each_result_of_a_decision_is_reported_once(looking: Looking) -> None:
    def note(part: Filtered | Ranked | BindTried) -> None:
        looking.records.note("u.1", "default", "p", part, 1.0)

    rejected = Filtered(1.0, 400, 7, 5, 0, {1: 5}, ())
    for _ in range(3):
        note(rejected)
    assert looking.told() == [("decision", "u", "rejected")]
    note(rejected)
    assert looking.told() == []
    note(Filtered(1.0, 400, 7, 5, 1, {1: 4}, ()))
    assert looking.told() == []
    note(Ranked(1.0, 200, 7, 1, "n"))
    assert looking.told() == [("decision", "u", "chosen")]
    note(BindTried(1.0, 9000, "n", "declined", 1, ""))
    assert looking.told() == [("decision", "u", "declined")]
    assert looking.feed.past()[-1].message


def test_devices_are_cordoned_and_uncordoned(looking: Looking) -> None:
    looking.state.apply([NodeSeen(kube_node("n", {CORDON: "GPU-1"}))])
    assert looking.told() == [("device_cordoned", "", "")]
    assert looking.feed.past()[-1].device == "GPU-1"
    assert looking.told() == []
    looking.state.apply([NodeSeen(kube_node("n"))])
    assert looking.told() == [("device_uncordoned", "", "")]
