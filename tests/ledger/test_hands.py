"""Evictions and Events at a real API server, with the rights that are deployed."""

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from contract.kube import Pod
from extender.errors import OutcomeUnknown, StoreConflict, StoreNotFound
from extender.kubeapi import KubeApi
from extender.kubeevents import KubeEvents
from extender.ledger.hands import KubernetesHands
from tests.controlplane import ApiRefused, ControlPlane

NAMESPACE = "hands-tests"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
MERGE = "application/merge-patch+json"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def api(plane: ControlPlane) -> Iterator[KubeApi]:
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    api = KubeApi(plane.configuration())
    yield api
    api.close()


@pytest.fixture
def hands(api: KubeApi) -> KubernetesHands:
    return KubernetesHands(api, KubeEvents(api, lambda: 1_795_219_200.0).post)


def bound(plane: ControlPlane, name: str = "", **status: Any) -> Pod:
    name = name or f"p{next(_numbers)}"
    containers = [{"name": "main", "image": "none"}]
    spec = {"nodeName": "n", "containers": containers, "terminationGracePeriodSeconds": 30}
    made = plane.call(
        "POST", PODS, {"metadata": {"name": name, "labels": {"a": name[:60]}}, "spec": spec}
    )
    if status:
        made = plane.call("PATCH", f"{PODS}/{name}/status", {"status": status}, MERGE)
    return msgspec.convert(made, Pod)


def leaves(plane: ControlPlane, pod: Pod) -> bool:
    try:
        return "deletionTimestamp" in plane.call("GET", f"{PODS}/{pod.metadata.name}")["metadata"]
    except ApiRefused:
        return True


def budget(plane: ControlPlane, pod: Pod) -> None:
    """Nothing of it may be disrupted."""
    path = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets"
    name = pod.metadata.name
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"a": name[:60]}}}
    plane.call("POST", path, {"metadata": {"name": name}, "spec": spec})


def test_a_pod_that_is_pending_is_evicted_whatever_its_budget(
    plane: ControlPlane, hands: KubernetesHands
) -> None:
    pod = bound(plane)
    budget(plane, pod)
    hands.evict(pod)
    assert leaves(plane, pod)


def test_of_one_that_runs_the_budget_decides(plane: ControlPlane, hands: KubernetesHands) -> None:
    ready = {"type": "Ready", "status": "True"}
    pod = bound(plane, phase="Running", conditions=[ready])
    budget(plane, pod)
    with pytest.raises(OutcomeUnknown, match="429"):
        hands.evict(pod)
    assert not leaves(plane, pod)


def test_one_that_changed_since_is_not_evicted(plane: ControlPlane, hands: KubernetesHands) -> None:
    pod = bound(plane)
    plane.call("PATCH", f"{PODS}/{pod.metadata.name}/status", {"status": {"message": "x"}}, MERGE)
    with pytest.raises(StoreConflict):
        hands.evict(pod)
    assert not leaves(plane, pod)


def test_the_next_pod_of_that_name_is_not_evicted(
    plane: ControlPlane, hands: KubernetesHands
) -> None:
    pod = bound(plane)
    plane.call("DELETE", f"{PODS}/{pod.metadata.name}", {"gracePeriodSeconds": 0})
    with pytest.raises(StoreNotFound):
        hands.evict(pod)
    heir = bound(plane, pod.metadata.name)
    with pytest.raises(StoreConflict):
        hands.evict(pod)
    assert not leaves(plane, heir)


def test_what_is_told_stands_beside_the_pod_once(
    plane: ControlPlane, hands: KubernetesHands
) -> None:
    pod = bound(plane, "p" + "x" * 252)
    for _ in range(2):  # another replica tells the same
        hands.tell(pod, "NoRoomOnGPU", "There is no room.")
    query = f"fieldSelector=involvedObject.uid={pod.metadata.uid}"
    (event,) = plane.call("GET", f"/api/v1/namespaces/{NAMESPACE}/events?{query}")["items"]
    assert (event["type"], event["reason"]) == ("Warning", "NoRoomOnGPU")
    assert event["message"] == "There is no room."
    assert event["lastTimestamp"] == "2026-11-21T00:00:00Z"
