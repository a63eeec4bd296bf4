"""What is said to help, helps; and what keeps the pod out is named."""

import re
from datetime import datetime, timedelta

import pytest

from contract.decision import decision_id
from contract.gpunode import Reservation
from contract.kube import Pod
from contract.reasons import Reason
from extender.cluster.events import Event, GPUNodeSeen, NodeSeen, PodGone, PodSeen
from extender.journal import Decision
from tests.builders import DISTRIBUTED, GIB, gpunode, kube_node, pod, promise, shared, use
from tests.web.asking import Asked
from tests.web.test_devices import SINCE, since

WAITS = pod("16Gi", uid="uw", name="waits")


def node(name: str, free: int = 2, **sizes: int) -> list[Event]:
    """One GPU of 24 GiB with pods of these sizes on it."""
    uuid = f"GPU-{name}"
    promises: dict[str, Reservation] = {
        f"u-{who}": since(promise({uuid: gib * GIB}, name=who)) for who, gib in sizes.items()
    }
    rows = [use(f"u-{who}", uuid, replica=f"{uuid}::{n}") for n, who in enumerate(sizes)]
    held = gpunode(
        shared(uuid, free=free, allocated=len(sizes)),
        name=name,
        promises=promises,
        pods=rows,
        plugin=DISTRIBUTED,
    )
    pods = [
        PodSeen(pod(f"{gib}Gi", uid=f"u-{who}", name=who, node=name, phase="Running", priority=5))
        for who, gib in sizes.items()
    ]
    return [NodeSeen(kube_node(name)), *pods, GPUNodeSeen(held, 0.0)]


def asked(*events: Event, waits: Pod = WAITS) -> Asked:
    found = Asked()
    found.cluster.apply([*events, PodSeen(waits)])
    return found


def explained(fleet: Asked) -> dict[str, object]:
    answer = fleet.get("/v1/explain/pods/default/waits")
    assert answer.status_code == 200, answer.text
    body: dict[str, object] = answer.json()
    return body


def kinds(body: dict[str, object]) -> list[str]:
    given = body["advice"]
    assert isinstance(given, list)
    assert body["suggestions"] == [one["sentence"] for one in given]
    return [one["kind"] for one in given]


def test_the_smallest_pod_whose_end_makes_room_is_waited_for() -> None:
    fleet = asked(*node("a", tiny=2, large=13), *node("b", whole=20))
    body = explained(fleet)
    assert kinds(body) == ["lower", "wait"]
    lower, wait = body["advice"]  # type: ignore[misc]
    # Not tiny, after which there are 11 GiB; nor whole, which is larger.
    assert (wait["node"], wait["wait_for"]["name"]) == ("a", "large")
    assert wait["wait_for"]["priority"] == 5
    assert wait["sentence"] == (
        "wait for pod default/large, which holds 13.0 GiB on node a since "
        f"{SINCE[:19]}Z: when it ends there is room"
    )
    assert lower["lower_to_bytes"] == 9 * GIB


def test_after_what_was_advised_the_pod_fits() -> None:
    events = (*node("a", small=7, other=9), *node("b", whole=20))
    body = explained(asked(*events))
    (wait,) = (one for one in body["advice"] if one["kind"] == "wait")  # type: ignore[attr-defined]
    name = wait["wait_for"]["name"]
    left = {"small": 7, "other": 9}
    del left[name]
    gone = asked(*node("a", free=3, **left), *node("b", whole=20), PodGone(f"u-{name}"))
    assert explained(gone)["verdict"] == "fits"
    (lower,) = (one for one in body["advice"] if one["kind"] == "lower")  # type: ignore[attr-defined]
    text = re.search(r"to (\w+) or less", lower["sentence"])
    assert text is not None
    lowered = pod(text.group(1), uid="uw", name="waits")
    assert explained(asked(*events, waits=lowered))["verdict"] == "fits"


def test_who_holds_the_nearest_nodes_is_named_those_with_most_first() -> None:
    body = explained(asked(*node("a", tiny=2, small=9)))
    (nearest,) = body["nearest"]  # type: ignore[misc]
    assert [(held["name"], held["phase"]) for held in nearest["blockers"]] == [
        ("small", "running"),
        ("tiny", "running"),
    ]
    assert f"  pod default/small holds 9.0 GiB since {SINCE[:19]}Z, running" in nearest["told"]


def test_a_node_that_one_thing_alone_keeps_out_is_to_be_mended() -> None:
    now = {"plugin": DISTRIBUTED, "observed_at": "2026-11-21T00:01:40+00:00"}
    sick = gpunode(shared("S", healthy=False, health_reason="XID 79"), name="sick", **now)
    late = gpunode(shared("L"), name="late", plugin=DISTRIBUTED)
    full = gpunode(
        shared("F", healthy=False, used_bytes=20 * GIB, unowned_bytes=20 * GIB), name="full", **now
    )
    fleet = asked(
        *(NodeSeen(kube_node(each)) for each in ("sick", "late", "full")),
        GPUNodeSeen(late, 0.0),
    )
    fleet.now_s = 100.0
    fleet.cluster.apply([GPUNodeSeen(each, 100.0) for each in (sick, full)])
    body = explained(fleet)
    mends = {one["node"]: one["sentence"] for one in body["advice"] if one["kind"] == "mend"}  # type: ignore[attr-defined]
    assert mends == {
        "late": "node late might take it, but: GPU report of the node is stale",
        "sick": "node sick might take it, but: a GPU that the pod could get is unhealthy "
        "(S: XID 79)",
    }


def test_memory_without_replicas_wants_more_replicas() -> None:
    body = explained(asked(*node("a", free=0, one=1), *node("b", free=0, two=1)))
    assert kinds(body)[-1] == "replicas"
    assert body["advice"][-1] == {  # type: ignore[index]
        "kind": "replicas",
        "sentence": "2 nodes, as a, have the memory and no free replica: raise the replicas that "
        "the device plugin advertises there",
        "node": None,
        "nodes": 2,
        "lower_to_bytes": None,
        "wait_for": None,
    }


def test_a_pod_that_fits_needs_no_advice() -> None:
    body = explained(asked(*node("a")))
    assert (body["verdict"], kinds(body)) == ("fits", [])


def test_what_kube_scheduler_did_is_told() -> None:
    fleet = asked(*node("a", whole=20), *node("b", full=20), *node("c", more=20))
    never = explained(fleet)["attempts"]
    assert isinstance(never, dict)
    assert (never["times"], never["offered_nodes"], never["again_by"]) == (0, None, None)
    assert never["message"].startswith("kube-scheduler has not asked Headroom about this pod")
    which = decision_id(WAITS.metadata.uid, WAITS.metadata.resource_version)
    refused = {Reason.MEMORY_ON_ANY: 2}
    at_s = datetime.fromisoformat(SINCE).timestamp()
    fleet.journal.record(Decision(WAITS, which, at_s, 7, offered=2, fits=0, refused=refused))
    tried = explained(fleet)["attempts"]
    assert isinstance(tried, dict)
    assert (tried["times"], tried["offered_nodes"], tried["not_offered_nodes"]) == (1, 2, 1)
    again = datetime.fromisoformat(tried["again_by"])
    assert again - datetime.fromisoformat(SINCE) == timedelta(minutes=5)
    assert "nodes never offered: 1, which" in tried["message"]


@pytest.mark.parametrize("path", ["/v1/score?pod=default/waits&node=a"])
def test_a_score_names_them_too(path: str) -> None:
    body = asked(*node("a", tiny=2, small=9)).get(path).json()
    assert [held["name"] for held in body["live"]["node"]["blockers"]] == ["small", "tiny"]
