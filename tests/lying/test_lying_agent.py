"""Checks that an agent that lies in every field does not affect what any consumer computes about
other nodes.

Node b lies, and nodes a and c are honest. Each consumer of reports must compute the same results
for a, c and their pods, whether the agent of b lies or sends no report.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from extender.reconcile.queue import orphans, unreserved_pods
from headroom.console.history.recorder import sample
from headroom.console.metrics import FleetCollector
from headroom.contract.annotations import OBSERVED_AT
from headroom.contract.errors import BadReport
from headroom.contract.gpunode import ADOPTED, STARTING, GPUNode, GPUNodeStatus, Reservation
from headroom.contract.gpunode_json import decode_gpunode
from headroom.contract.heartbeat import Confirmation, encode_confirmation
from headroom.contract.kube import Lease, ObjectMeta
from headroom.contract.watched import GPUNodeSeen, HeartbeatSeen, NodeSeen, PodSeen
from headroom.core.overuse.decisions import (
    latest_sample,
    overuse_evictions_on,
    overusing_pods,
)
from headroom.core.placement.fit import fit
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import VramRequest
from headroom.core.placement.score import rank
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.recommend.programs import Family, Program
from headroom.core.starting_alone.decisions import ended_starts
from headroom.core.whatif.node_whatif import rejection_beside
from headroom.core.whatif.pending_pods import Pending
from headroom.recorder.life_tracker import LifeTracker
from headroom.recorder.pod_facts import PodFacts
from tests.builders import (
    DISTRIBUTED,
    GATE_IMAGE,
    GIB,
    gpunode,
    kube_node,
    pod,
    reservation,
    shared,
    status,
    use,
)
from tests.console.asking import WALL_S, Asked
from tests.lying.lies import CONFIRMATIONS, lies
from tests.recording import RecordingState

HONEST = ("a", "c")
#: Time of the reports on the monotonic clock.
NOW_S = 0.0
BOUND_ON = {"bound": "a", "stray": "a", "starter": "a", "hog": "c", "neighbour": "c"}
RULES = Rules(gate_image=GATE_IMAGE, evict_overuse=True, evict_misses=True)
BEGAN = "2026-11-20T00:00:00+00:00"
WAITING = pod("6Gi", uid="waiting", name="waiting", priority=5)


@dataclass
class LiedTo:
    """The state that an extender, a console and the recorder have of three nodes."""

    asked: Asked
    reports: dict[str, GPUNodeStatus]

    @property
    def state(self) -> RecordingState:
        assert isinstance(self.asked.writer, RecordingState)
        return self.asked.writer

    @property
    def terms(self) -> list[NodeTerms]:
        snap = self.state.cluster.snapshot()
        return [snap.nodes[snap.row_of[name]] for name in HONEST]


def reserved(name: str, gpu: str, gib: int, **of: Any) -> Reservation:
    return msgspec.structs.replace(reservation({gpu: gib * GIB}, name=name), since=BEGAN, **of)


def honest_nodes() -> list[GPUNode]:
    """Return the honest nodes. Node a has a pod with a reservation, an unreserved pod, and a pod
    that starts alone. On node c, a pod uses memory that another pod has reserved.
    """

    def row(uid: str, gpu: str, gib: int, **of: Any) -> Any:
        measured = {"peak_bytes": gib * GIB, "started_at": BEGAN, **of}
        return use(uid, gpu, gib * GIB, container="main", replica=f"{gpu}::{uid}", **measured)

    a = gpunode(
        shared("GPU-a-0", free=2, allocated=2, used_bytes=9 * GIB, model="NVIDIA L4"),
        shared("GPU-a-1", free=3, allocated=1, used_bytes=3 * GIB, model="NVIDIA L4"),
        name="a",
        uid="gn-a",
        reservations={
            "bound": reserved("bound", "GPU-a-0", 8),
            "starter": reserved(
                "starter", "GPU-a-1", 4, phase=STARTING, start_timeout_s=10**6, attempt="x"
            ),
            "orphan": reserved("orphan", "GPU-a-1", 2),
        },
        pods=[row("bound", "GPU-a-0", 8), row("stray", "GPU-a-0", 1), row("starter", "GPU-a-1", 3)],
        plugin=DISTRIBUTED,
    )
    c = gpunode(
        shared(
            "GPU-c-0", free=2, allocated=2, memory_bytes=80 * GIB, used_bytes=61 * GIB, model="A100"
        ),
        name="c",
        uid="gn-c",
        reservations={
            "hog": reserved("hog", "GPU-c-0", 20, flags=[ADOPTED]),
            "neighbour": reserved("neighbour", "GPU-c-0", 40),
        },
        pods=[row("hog", "GPU-c-0", 60), row("neighbour", "GPU-c-0", 1)],
        plugin=DISTRIBUTED,
    )
    return [a, c]


def world(lie: GPUNode, lease: Lease | None = None) -> LiedTo:
    state = RecordingState(RULES, 90.0, WALL_S)
    asked = Asked(writer=state)
    alone = {"headroom.gpu/startup": "alone"}
    state.apply(
        [
            *(NodeSeen(kube_node(name)) for name in "abc"),
            *(
                PodSeen(
                    pod(
                        uid=uid,
                        name=uid,
                        node=node,
                        phase="Running",
                        annotations=alone if uid == "starter" else None,
                    )
                )
                for uid, node in BOUND_ON.items()
            ),
            PodSeen(WAITING),
            PodSeen(
                pod(uid="on-lying-node", name="own", namespace="liars", node="b", phase="Running")
            ),
        ]
    )
    nodes = [*honest_nodes(), lie]
    for each in nodes:
        state.apply([GPUNodeSeen(each, NOW_S)])
    if lease is not None:
        state.apply([HeartbeatSeen(lease, NOW_S)])
    return LiedTo(asked, {each.name: each.status for each in nodes if each.status})


SILENT = gpunode(name="b", uid="gn-b")


def decisions(of: LiedTo) -> Any:
    """Return the terms of each honest node, and the controllers' decisions about the node."""
    state = of.state
    nodes = [state.cluster.gpunode(name) for name in HONEST]
    found = [each for each in nodes if each is not None]
    return (
        of.terms,
        [each for each in state.take_outcomes() if each.node in HONEST],
        [each.pod.metadata.uid for each in unreserved_pods(state.cluster, HONEST)],
        list(orphans(state.cluster, 1e9, 60.0, HONEST)),
        [state.cluster.misplaced(each, NOW_S) for each in found],
        [latest_sample(state.cluster, each) for each in found],
        [name in state.cluster.crowded for name in HONEST],
        rejection_beside(state.cluster, state.cluster.understand(WAITING), "a", (), NOW_S),
    )


def starts(of: LiedTo) -> Any:
    node = of.state.cluster.gpunode("a")
    assert node is not None
    return ended_starts(of.state.cluster, node, WALL_S)


def evictions(of: LiedTo) -> Any:
    nodes = [of.state.cluster.gpunode(name) for name in HONEST]
    decided = [overuse_evictions_on(of.state.cluster, each, NOW_S) for each in nodes if each]
    assert decided[1].selected.keys() == {"hog"}
    return decided, [
        list(overusing_pods(of.state.cluster, each, NOW_S, False)) for each in of.terms
    ]


def scores(of: LiedTo) -> Any:
    """Return the scores of the honest nodes, with every term."""
    snap = of.state.cluster.snapshot()
    request = of.state.cluster.understand(WAITING)
    assert isinstance(request, VramRequest)
    rows = snap.rows(list(HONEST))
    verdicts = fit(request, snap, rows, NOW_S)
    ranking = rank(verdicts, RULES.weights)
    terms = {name: values.tolist() for name, values in ranking.terms.items()}
    return verdicts.codes.tolist(), ranking.scores.tolist(), ranking.winner, terms


def metrics(of: LiedTo) -> Any:
    """Return the series that have a label of an honest node or of a pod on it."""
    collector = FleetCollector(of.state.cluster, of.state.cluster.snapshot, Pending, 100, 90.0)
    labels = {*HONEST, *BOUND_ON, "GPU-a-0", "GPU-a-1", "GPU-c-0"}
    return sorted(
        (each.name, sorted(each.labels.items()), each.value)
        for family in collector.collect()
        for each in family.samples
        if not labels.isdisjoint(each.labels.values())
        and each.labels.get("node") != "b"
        and not each.name.endswith("_age_seconds")
    )


def history(of: LiedTo) -> Any:
    return [sample(each, of.reports[each.name]) for each in of.terms]


def profiles(of: LiedTo) -> Any:
    """Return the runs from which the recorder makes VRAMProfiles."""
    facts = {
        uid: PodFacts("default", uid, "", None, {"main": Program("p", Family.UNKNOWN)}, node=node)
        for uid, node in BOUND_ON.items()
    }
    tracker = LifeTracker()
    ended = tracker.follow(of.reports, facts, {}, WALL_S)
    of_b = {name: each for name, each in of.reports.items() if name not in HONEST}
    ended += tracker.follow(of_b, {}, facts, WALL_S + 60)
    assert len(ended) == len(BOUND_ON)
    return ended


PATHS = (
    "/v1/nodes",
    "/v1/nodes/a",
    "/v1/nodes/a/devices/GPU-a-0",
    "/v1/nodes/c/devices/GPU-c-0",
    "/v1/pods",
    "/v1/drift",
    "/v1/teams",
    "/v1/idle",
    "/v1/score?pod=default/waiting",
    "/v1/score?pod=default/waiting&node=a",
    "/v1/costs",
    *(f"/v1/timeline?pod=default/{name}" for name in BOUND_ON),
)
#: Fields that are not compared, because they differ between any two answers or are sums over all
#: nodes.
OF_ALL = {
    *("generated_at", "snapshot_generation", "generation", "totals", "total", "nodes_by_state"),
    *("sums", "devices_without_sm_activity", "matching", "overcommitted_bytes"),
    # The rank of a node among all nodes.
    *("rank", "difference", "winner", "winner_score_ratio", "tied", "wins"),
}


def views(of: LiedTo) -> Any:
    """Return the bodies of the debug API without node b, its pods, and sums over all nodes."""
    answers = {path: of.asked.get(path) for path in PATHS}
    assert {answer.status_code for answer in answers.values()} == {200}
    return {path: without_b(json.loads(answer.text)) for path, answer in answers.items()}


def without_b(body: Any) -> Any:
    if isinstance(body, dict):
        return {
            key: without_b(value)
            for key, value in body.items()
            if key not in OF_ALL and not is_count(key, value)
        }
    if isinstance(body, list):
        return [without_b(each) for each in body if not is_of_b(each)]
    return body


def is_count(key: str, value: Any) -> bool:
    """Return whether the field counts nodes. Some fields of nodes have the same names."""
    of_ranking = (
        key == "reasons" and isinstance(value, list) and all("nodes" in one for one in value)
    )
    return of_ranking or (key == "fits" and not isinstance(value, bool))


def is_of_b(body: Any) -> bool:
    if not isinstance(body, dict):
        return body == "b"
    is_unknown = body.get("namespace") == ""  # a pod that the API server does not have
    return is_unknown or "b" in (body.get("node"), body.get("name")) or "liars" in body.values()


CONSUMERS: dict[str, Callable[[LiedTo], Any]] = {
    "decisions": decisions,
    "starts": starts,
    "evictions": evictions,
    "scores": scores,
    "metrics": metrics,
    "history": history,
    "profiles": profiles,
}
#: Consumers that take a second each.
SLOW_CONSUMERS: dict[str, Callable[[LiedTo], Any]] = {"views": views}
#: A report that has all pods of the honest nodes on one device, which is larger than any real
#: device.
ABSURD = status(
    shared("GPU-a-0", memory_bytes=1 << 44, used_bytes=1 << 43, model="NVIDIA L4"),
    pods=[
        use(
            uid,
            "GPU-a-0",
            1 << 40,
            container="main",
            peak_bytes=1 << 44,
            started_at=BEGAN,
            settled_at=BEGAN,
            replica=f"GPU-a-0::{uid}",
        )
        for uid in BOUND_ON
    ],
    plugin=DISTRIBUTED,
)


def results(consumers: Mapping[str, Callable[[LiedTo], Any]], of: LiedTo) -> dict[str, Any]:
    return {name: consumer(of) for name, consumer in consumers.items()}


@pytest.fixture(scope="module")
def silence() -> dict[str, Any]:
    """Return the results if the agent of b sends no report."""
    return results(CONSUMERS | SLOW_CONSUMERS, world(SILENT))


def told(report: GPUNodeStatus, confirmation: Confirmation | None) -> LiedTo | None:
    """Return the state after b has sent this report, or None if the report cannot be decoded."""
    try:
        lie = decode_gpunode(msgspec.json.encode(msgspec.structs.replace(SILENT, status=report)))
    except BadReport:
        return None
    if confirmation is None:
        return world(lie)
    annotations = {OBSERVED_AT: encode_confirmation(confirmation)}
    return world(lie, Lease(metadata=ObjectMeta(name="b", annotations=annotations)))


@settings(max_examples=100)
@given(lies(), st.none() | CONFIRMATIONS)
@example(ABSURD, None)
def test_an_agent_that_lies_in_every_field_changes_nothing_about_other_nodes(
    silence: dict[str, Any], report: GPUNodeStatus, confirmation: Confirmation | None
) -> None:
    if (lied := told(report, confirmation)) is not None:
        found = results(CONSUMERS, lied)
        assert found == {name: silence[name] for name in CONSUMERS}


@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
@given(lies(), st.none() | CONFIRMATIONS)
@example(ABSURD, None)
def test_a_lying_agent_does_not_change_console_views_of_other_nodes(
    silence: dict[str, Any], report: GPUNodeStatus, confirmation: Confirmation | None
) -> None:
    if (lied := told(report, confirmation)) is not None:
        found = results(SLOW_CONSUMERS, lied)
        assert found == {name: silence[name] for name in SLOW_CONSUMERS}


def test_a_lying_agent_changes_values_of_its_own_node() -> None:
    """Otherwise, the test above would prove nothing."""
    seen = []
    for pods in ([], [use("bound", "GPU-b-0", 20 * GIB)]):
        lie = gpunode(shared("GPU-b-0"), name="b", uid="gn-b", pods=pods, plugin=DISTRIBUTED)
        snap = world(lie).state.cluster.snapshot()
        (device,) = snap.nodes[snap.row_of["b"]].devices
        seen.append(device.free_bytes)
    own = 8 * GIB
    assert seen == [24 * GIB - own, 24 * GIB - own - 20 * GIB]
