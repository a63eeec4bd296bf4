"""Follows reservations until a report shows their pods, with late, old, lost and repeated
reports.
"""

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from structlog.testing import capture_logs

from extender.extender import Extender
from headroom.contract.gpunode import GPUNode, Plugin, Reservation
from headroom.contract.kube import Node, Pod
from headroom.contract.watched import GPUNodeGone, GPUNodeSeen, NodeSeen, PodSeen, Relisted
from headroom.core.cluster.changes import Event
from headroom.core.placement.policy import Rules
from headroom.core.placement.prediction_outcome import Result, Surprise
from headroom.runtime.settings.settings import Settings
from tests.builders import (
    DISTRIBUTED,
    GIB,
    gpunode,
    kube_node,
    pod,
    reservation,
    shared,
    use,
)
from tests.recording import RecordingState
from tests.truth.world import NEVER_STALE_S

#: D0 has more free memory.
IDLE = (shared("D0", free=4), shared("D1", free=3, allocated=1))
THERE = (shared("D0", free=3, allocated=1), shared("D1", free=3, allocated=1))
ASTRAY = (shared("D0", free=4), shared("D1", free=2, allocated=2))
SITTING = use("old", "D1", replica="D1::0")


def reserved(attempt: str = "me-1", **candidates: int) -> dict[str, Reservation]:
    own = reservation(candidates or {"D0": 8 * GIB}, name="p")
    own = msgspec.structs.replace(own, attempt=attempt)
    return {"p": own, "old": reservation({"D1": GIB}, name="old")}


def node(version: int, *devices: object, shown: str | None = None, **other: object) -> GPUNode:
    """Return this version of the GPUNode. ``shown`` is the device on which its report shows the
    pod.
    """
    rows = [SITTING, *([use("p", shown, replica=f"{shown}::3")] if shown else [])]
    given = {"reservations": reserved(), "plugin": DISTRIBUTED, **other}
    return gpunode(*devices, version=str(version), pods=rows, **given)  # type: ignore[arg-type]


def seen(gpunode: GPUNode, at_s: float = 0.0) -> Event:
    return GPUNodeSeen(gpunode, at_s)


def started(*more: Event) -> RecordingState:
    state = RecordingState(Rules(), NEVER_STALE_S, epoch_s=0.0)
    bound = [PodSeen(pod(uid=uid, name=uid, node="n")) for uid in ("p", "old")]
    state.apply([NodeSeen(kube_node()), *bound, *more])
    return state


def results(state: RecordingState) -> list[tuple[str, Result]]:
    return [(outcome.uid, outcome.result) for outcome in state.take_outcomes()]


BOUND, HIT = node(1, *IDLE), node(2, *THERE, shown="D0")


def test_a_prediction_is_compared_when_a_report_shows_the_pod() -> None:
    state = started(seen(BOUND, 10.0))
    assert results(state) == []
    assert state.cluster.observations.is_pending("n", "p")
    state.apply([seen(HIT, 12.5)])
    (outcome,) = state.take_outcomes()
    assert (outcome.result, outcome.window_s) == (Result.HIT, 2.5)
    assert state.cluster.observations.of_pod("n", "p") == outcome


def test_a_prediction_is_compared_once_despite_repeated_reports() -> None:
    state = started(seen(BOUND), seen(HIT))
    assert results(state) == [("p", Result.HIT)]
    older = node(3, *IDLE)  # A restarted agent may write an earlier sample.
    elsewhere = node(5, *ASTRAY, shown="D1")
    for event in (
        seen(HIT),
        Relisted(GPUNode, (HIT,), 0.0),
        seen(older),
        seen(node(4, *THERE, shown="D0")),
        Relisted(Pod, (pod(uid="p", name="p", node="n"),), 0.0),
        seen(elsewhere),
    ):
        state.apply([event])
        assert results(state) == []
    assert state.cluster.observations.totals == {Result.HIT: 1}


def test_a_stale_version_of_the_gpunode_is_ignored() -> None:
    state = started(seen(BOUND), seen(node(5, *IDLE)))
    state.apply([seen(HIT)])  # version 2
    assert results(state) == []
    state.apply([seen(node(6, *THERE, shown="D0"))])
    assert results(state) == [("p", Result.HIT)]


def test_a_pod_already_shown_in_the_first_list_is_not_compared() -> None:
    """After a restart, the extender does not have the state at the time of the binding."""
    state = started(Relisted(GPUNode, (node(7, *ASTRAY, shown="D1"),), 0.0))
    state.apply([seen(node(8, *ASTRAY, shown="D1"))])
    assert results(state) == []
    assert not state.cluster.observations.is_pending("n", "p")


def test_a_pod_unconfirmed_at_a_restart_is_compared_with_the_state_at_the_restart() -> None:
    state = started(Relisted(GPUNode, (BOUND,), 0.0))
    state.apply([seen(node(2, *ASTRAY, shown="D1"))])
    (outcome,) = state.take_outcomes()
    assert (outcome.result, outcome.surprise) == (Result.MISS, Surprise.UNKNOWN)


def test_the_last_attempt_of_a_bind_is_compared() -> None:
    again = node(2, *IDLE, reservations=reserved("me-2", D0=8 * GIB, D1=8 * GIB))
    state = started(seen(BOUND), seen(again))
    state.apply([seen(node(3, *THERE, shown="D0", reservations=again.spec.reservations))])
    (outcome,) = state.take_outcomes()
    assert (outcome.reservation.attempt, outcome.predicted) == ("me-2", ("D0", "D1"))


def test_a_prediction_includes_the_effects_of_pods_bound_later() -> None:
    """Pod q was bound while D1 was so full that p could not get it. Then two pods on D1 ended."""
    guests = {uid: reservation({"D0": GIB, "D1": GIB}, name=uid) for uid in ("c1", "c2")}
    there = [use(uid, "D1", replica=f"D1::{n}") for n, uid in enumerate(guests, start=1)]
    full = [shared("D0", free=4), shared("D1", free=1, allocated=3)]
    late = reserved() | guests
    with_q = late | {"q": reservation({"D0": GIB}, name="q")}
    for relied, expected in (
        (late, (Result.SHIFTED, None)),
        (with_q, (Result.MISS, Surprise.RELEASED)),
    ):
        sitting = [PodSeen(pod(uid=uid, name=uid, node="n")) for uid in guests]
        state = started(*sitting, seen(BOUND), seen(node(2, *IDLE, reservations=late)))
        crowded = node(3, *full, reservations=relied)
        rows = [*(crowded.status.pods if crowded.status else ()), *there]
        crowded = gpunode(*full, version="3", reservations=relied, plugin=DISTRIBUTED, pods=rows)
        state.apply([seen(crowded), seen(node(4, *ASTRAY, shown="D1", reservations=relied))])
        outcome = {each.uid: each for each in state.take_outcomes()}["p"]
        assert (outcome.result, outcome.surprise) == expected


def test_a_pod_that_ended_before_the_admission_is_ignored_for_the_next_prediction() -> None:
    """With g unconfirmed, two pods could get D0, but g had ended when q was admitted."""
    idle = [shared("D0", free=4), shared("D1", free=4)]
    own = {uid: reservation({"D0": GIB, "D1": GIB}, name=uid) for uid in ("p", "g", "q")}
    first = gpunode(
        *idle, version="1", reservations={u: own[u] for u in ("p", "g")}, plugin=DISTRIBUTED
    )
    then = gpunode(version="2", reservations={u: own[u] for u in ("p", "q")})
    then = msgspec.structs.replace(then, status=first.status)
    rows = [use(uid, "D0", replica=f"D0::{n}") for n, uid in enumerate(("p", "q"))]
    there = [shared("D0", free=2, allocated=2), shared("D1", free=4)]
    state = started(seen(first), seen(then))
    reported = gpunode(
        *there, version="3", pods=rows, reservations=then.spec.reservations, plugin=DISTRIBUTED
    )
    state.apply([seen(reported)])
    outcomes = {each.uid: each for each in state.take_outcomes()}
    assert (outcomes["p"].result, outcomes["q"].result) == (Result.HIT, Result.MISS)


def test_a_pod_that_ends_before_a_report_shows_it_is_counted_as_ended() -> None:
    state = started(seen(BOUND))
    rest = {"old": reserved()["old"]}
    state.apply([seen(node(2, *IDLE, reservations=rest))])
    assert results(state) == [("p", Result.UNSEEN)]


def test_a_reservation_without_a_binding_is_not_compared() -> None:
    state = started(PodSeen(pod(uid="p", name="p")), seen(BOUND))
    state.apply([seen(node(2, *IDLE, reservations={"old": reserved()["old"]}))])
    assert results(state) == []
    assert not state.cluster.observations.is_pending("n", "p")


def deleted_before_recreation() -> list[Event]:
    return [GPUNodeGone("n")]


def recreated_at_once() -> list[Event]:
    return []


@pytest.mark.parametrize("reported", [deleted_before_recreation, recreated_at_once])
def test_a_recreated_gpunode_has_no_predictions(
    reported: Callable[[], list[Event]],
) -> None:
    state = started(seen(BOUND))
    adopted = {
        uid: msgspec.structs.replace(each, flags=["adopted"], attempt="anew")
        for uid, each in reserved().items()
    }
    state.apply(reported())
    state.apply([seen(node(1, *IDLE, uid="another", reservations=adopted))])
    assert results(state) == [("p", Result.UNSEEN)]
    state.apply([seen(node(2, *ASTRAY, shown="D1", uid="another", reservations=adopted))])
    assert results(state) == []  # The new object had no prediction.


def test_without_reports_the_pod_stays_unconfirmed() -> None:
    state = started(seen(BOUND, 0.0))
    state.apply([NodeSeen(kube_node())])
    for version in range(2, 5):
        state.apply([seen(node(version, *IDLE), 1000.0 * version)])
    assert results(state) == []
    assert state.cluster.observations.is_pending("n", "p")


def test_a_device_with_another_resource_name_counts_as_reconfigured() -> None:
    other = [shared(f"E{n}", free=4 - n, allocated=n) for n in (1, 0)]
    state = started(seen(BOUND))
    state.apply([seen(node(2, *other, shown="E0"))])
    (outcome,) = state.take_outcomes()
    assert (outcome.result, outcome.surprise) == (Result.MISS, Surprise.CONFIGURATION)


def test_the_end_of_steering_counts_as_reconfiguration() -> None:
    """The agent that steered the plugin to the chosen device stopped, and the plugin chose another
    device.
    """
    steered = Plugin(topology_manager_policy="none", steered=["nvidia.com/gpu"])
    chosen = reserved()
    (charge,) = chosen["p"].charges
    charge = msgspec.structs.replace(charge, choices=["D0"])
    chosen["p"] = msgspec.structs.replace(chosen["p"], charges=[charge])
    state = started(seen(node(1, *IDLE, reservations=chosen, plugin=steered)))
    left = Plugin(topology_manager_policy="none")
    state.apply([seen(node(2, *ASTRAY, shown="D1", reservations=chosen, plugin=left))])
    (outcome,) = state.take_outcomes()
    assert (outcome.result, outcome.surprise) == (Result.MISS, Surprise.CONFIGURATION)


def test_a_hit_on_a_renamed_resource_is_a_hit() -> None:
    renamed = [
        msgspec.structs.replace(device, resource="nvidia.com/gpu.shared") for device in THERE
    ]
    state = started(seen(BOUND))
    state.apply([seen(node(2, *renamed, shown="D0"))])
    assert results(state) == [("p", Result.HIT)]


def test_a_pod_is_compared_only_when_all_its_devices_are_reported() -> None:
    two = {"p": reservation({"D0": GIB, "D1": GIB}, count=2, name="p")}
    devices = [shared("D0", free=4), shared("D1", free=4)]
    state = started(seen(gpunode(*devices, version="1", reservations=two, plugin=DISTRIBUTED)))
    rows = [use("p", "D0", replica="D0::0"), use("p", "D1", replica="D1::1")]
    for number in (1, 2):
        reported = gpunode(
            *devices,
            version=str(1 + number),
            reservations=two,
            pods=rows[:number],
            plugin=DISTRIBUTED,
        )
        state.apply([seen(reported)])
    (outcome,) = state.take_outcomes()
    assert (outcome.result, outcome.observed) == (Result.HIT, ("D0", "D1"))


def test_a_failure_that_recovered_between_two_reports_is_remembered() -> None:
    sick = [shared("D0", free=4), shared("D1", free=3, allocated=1)]
    sick[0] = msgspec.structs.replace(
        sick[0], replicas=msgspec.structs.replace(sick[0].replicas, free=2, unhealthy=2)
    )
    state = started(seen(BOUND), seen(node(2, *sick)), seen(node(3, *IDLE)))
    state.apply([seen(node(4, *ASTRAY, shown="D1"))])
    (outcome,) = state.take_outcomes()
    assert (outcome.result, outcome.surprise) == (Result.MISS, Surprise.HEALTH)


def test_only_the_replica_that_bound_the_pod_counts_the_outcome() -> None:
    async def play() -> tuple[list[float | None], list[dict[str, object]]]:
        replicas = [Extender(Settings(), unready=lambda: "") for _ in range(2)]
        own = reserved(f"{replicas[0].name}-1")
        reported: list[Event] = [
            NodeSeen(kube_node()),
            *(PodSeen(pod(uid=uid, name=uid, node="n")) for uid in ("p", "old")),
            seen(node(1, *IDLE, reservations=own)),
        ]
        with capture_logs() as logs:
            for replica in replicas:
                replica.deliver(reported)
                replica.deliver([seen(node(2, *ASTRAY, shown="D1", reservations=own))])
        counted = [
            replica.telemetry.registry.get_sample_value(
                "headroom_predictions_total", {"result": "miss"}
            )
            for replica in replicas
        ]
        assert [replica.cluster.observations.totals[Result.MISS] for replica in replicas] == [1, 1]
        return counted, [line for line in logs if line["event"] == "prediction_missed"]

    counted, logs = asyncio.run(play())
    assert counted == [1, 0]
    (line,) = logs
    assert (line["surprise"], line["node"], line["devices"]) == ("unknown", "n", ("D1",))


def test_a_report_of_another_node_does_not_confirm_a_pod() -> None:
    state = started(seen(BOUND))
    other = GPUNode(
        metadata=msgspec.structs.replace(HIT.metadata, name="m", uid="gm"),
        spec=HIT.spec,
        status=HIT.status,
    )
    state.apply([Relisted(Node, (kube_node("n"), kube_node("m")), 0.0), seen(other)])
    assert results(state) == []
