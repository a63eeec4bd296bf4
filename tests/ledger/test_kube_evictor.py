"""Tests evictions and Events on a real API server, with the deployed roles."""

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from extender.event_recorder import KubeEvents
from extender.ledger.kube_store import KubernetesEvictor
from headroom.contract.kube import Pod
from headroom.core.cluster.notices import Notice, Subject, pod_notice, pod_subject
from headroom.errors import OutcomeUnknown, StoreConflict, StoreNotFound
from headroom.runtime.kube.client import KubeApi
from tests.blocking import Blocking, Loop
from tests.controlplane import ROOT, ApiRefused, ControlPlane

NAMESPACE = "hands-tests"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def api(plane: ControlPlane) -> Iterator[KubeApi]:
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    api = KubeApi(plane.configuration())
    yield api
    api.close()


@pytest.fixture
def evictor(plane: ControlPlane, api: KubeApi) -> Iterator[Blocking]:
    with Loop() as loop:
        yield Blocking(loop, KubernetesEvictor(loop.api(plane.configuration())))


def bound(
    plane: ControlPlane, name: str = "", annotations: dict[str, str] | None = None, **status: Any
) -> Pod:
    name = name or f"p{next(_numbers)}"
    containers = [{"name": "main", "image": "none"}]
    spec = {"nodeName": "n", "containers": containers, "terminationGracePeriodSeconds": 30}
    metadata = {"name": name, "labels": {"a": name[:60]}, "annotations": annotations or {}}
    made = plane.call("POST", PODS, {"metadata": metadata, "spec": spec})
    if status:
        made = plane.call("PATCH", f"{PODS}/{name}/status", {"status": status})
    return msgspec.convert(made, Pod)


def leaves(plane: ControlPlane, pod: Pod) -> bool:
    try:
        return "deletionTimestamp" in plane.call("GET", f"{PODS}/{pod.metadata.name}")["metadata"]
    except ApiRefused:
        return True


def budget(plane: ControlPlane, pod: Pod) -> None:
    """Create a PodDisruptionBudget that allows no disruption."""
    path = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets"
    name = pod.metadata.name
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"a": name[:60]}}}
    plane.call("POST", path, {"metadata": {"name": name}, "spec": spec})


def test_a_pending_pod_is_evicted_regardless_of_its_budget(
    plane: ControlPlane, evictor: Blocking
) -> None:
    pod = bound(plane)
    budget(plane, pod)
    evictor.evict(pod)
    assert leaves(plane, pod)


@pytest.mark.parametrize(
    ("most_s", "deleted_with_s", "grace_s"),
    [
        pytest.param(None, None, 30, id="as in the pod"),
        pytest.param(120, None, 30, id="shorter in the pod"),
        pytest.param(10, None, 10, id="the longest permitted one"),
        pytest.param(120, 315_360_000, 30, id="deleted by the author with ten years"),
    ],
)
def test_the_author_cannot_extend_the_grace_period(
    plane: ControlPlane,
    evictor: Blocking,
    most_s: int | None,
    deleted_with_s: int | None,
    grace_s: int,
) -> None:
    pod = bound(plane, phase="Running")
    path = f"{PODS}/{pod.metadata.name}"
    if deleted_with_s is not None:
        plane.call("DELETE", path, {"gracePeriodSeconds": deleted_with_s})
        pod = msgspec.convert(plane.call("GET", path), Pod)
    evictor.evict(pod, most_s)
    metadata = plane.call("GET", path)["metadata"]
    assert metadata["deletionGracePeriodSeconds"] == grace_s


def test_a_running_pod_is_evicted_only_if_its_budget_allows_it(
    plane: ControlPlane, evictor: Blocking
) -> None:
    ready = {"type": "Ready", "status": "True"}
    pod = bound(plane, phase="Running", conditions=[ready])
    budget(plane, pod)
    with pytest.raises(OutcomeUnknown, match="429"):
        evictor.evict(pod)
    assert not leaves(plane, pod)


def test_a_quota_prevents_authors_from_exempting_their_pods(
    plane: ControlPlane, evictor: Blocking
) -> None:
    """The docs recommend this quota for authors who have all permissions in a namespace."""
    name, hard = "no-budgets", "count/poddisruptionbudgets.policy"
    assert f"{name} -n NAMESPACE --hard={hard}=0" in (ROOT / "docs/how-to/overuse.md").read_text()
    pod = bound(plane, phase="Running", conditions=[{"type": "Ready", "status": "True"}])
    quotas = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
    plane.call("POST", quotas, {"metadata": {"name": name}, "spec": {"hard": {hard: "0"}}})
    # Write the status, because the quota controller does not run.
    status = {"status": {"hard": {hard: "0"}, "used": {hard: "0"}}}
    plane.call("PATCH", f"{quotas}/{name}/status", status)
    with pytest.raises(ApiRefused, match=f"403.*exceeded quota: {name}"):
        budget(plane, pod)
    evictor.evict(pod)
    assert leaves(plane, pod)
    plane.call("DELETE", f"{quotas}/{name}")
    budget(plane, bound(plane, phase="Running"))


def test_a_changed_pod_is_not_evicted(plane: ControlPlane, evictor: Blocking) -> None:
    pod = bound(plane)
    plane.call("PATCH", f"{PODS}/{pod.metadata.name}/status", {"status": {"message": "x"}})
    with pytest.raises(StoreConflict):
        evictor.evict(pod)
    assert not leaves(plane, pod)


def test_a_new_pod_with_the_same_name_is_not_evicted(
    plane: ControlPlane, evictor: Blocking
) -> None:
    pod = bound(plane)
    plane.call("DELETE", f"{PODS}/{pod.metadata.name}", {"gracePeriodSeconds": 0})
    with pytest.raises(StoreNotFound):
        evictor.evict(pod)
    heir = bound(plane, pod.metadata.name)
    with pytest.raises(StoreConflict):
        evictor.evict(pod)
    assert not leaves(plane, heir)


def test_an_event_is_recorded_once_in_the_namespace_of_the_pod(
    plane: ControlPlane, api: KubeApi
) -> None:
    placement = {"headroom.gpu/placement": '{"decision": "u.7"}'}
    pod = bound(plane, "p" + "x" * 252, placement)
    for _ in range(2):  # Another replica writes the same Event.
        post = KubeEvents(api, lambda: 1_795_219_200.0).post
        assert post(pod_notice(pod, "InsufficientGPUMemory", "It does not fit.", key=""))
    query = f"fieldSelector=involvedObject.uid={pod.metadata.uid}"
    (event,) = plane.call("GET", f"/api/v1/namespaces/{NAMESPACE}/events?{query}")["items"]
    assert (event["type"], event["reason"]) == ("Warning", "InsufficientGPUMemory")
    assert event["message"] == "It does not fit."
    assert event["lastTimestamp"] == "2026-11-21T00:00:00Z"
    # The Event has the ID of the decision that placed the pod.
    assert event["metadata"]["annotations"] == {"headroom.gpu/decision": "u.7"}


def test_repeated_events_are_one_event_with_the_latest_message(
    plane: ControlPlane, api: KubeApi
) -> None:
    """Two replicas write the Events, and again after the server has deleted the Event."""
    replicas = [KubeEvents(api, lambda at=at: at) for at in (1e9, 2e9)]  # type: ignore[misc]
    about = pod_subject(bound(plane))
    query = f"fieldSelector=involvedObject.uid={about.uid}"

    def tell(number: int, message: str) -> dict[str, Any]:
        notice = Notice(about, "NoGPUFits", message, "", follows=True, decision_id="u.7")
        assert replicas[number].post(notice)
        (event,) = plane.call("GET", f"/api/v1/namespaces/{NAMESPACE}/events?{query}")["items"]
        found: dict[str, Any] = event
        return found

    for number, message in ((0, "short by 2"), (1, "short by 2"), (0, "short by 1")):
        event = tell(number, message)
        assert (event["reason"], event["message"]) == ("NoGPUFits", message)
        assert event["metadata"]["annotations"] == {"headroom.gpu/decision": "u.7"}
    assert event["lastTimestamp"] == "2001-09-09T01:46:40Z"
    plane.call("DELETE", f"/api/v1/namespaces/{NAMESPACE}/events/{event['metadata']['name']}")
    assert tell(1, "short by 1")["message"] == "short by 1"


def test_kubectl_describe_node_shows_events_of_nodes(plane: ControlPlane, api: KubeApi) -> None:
    made = plane.call("POST", "/api/v1/nodes", {"metadata": {"name": "events-node"}})
    uid = made["metadata"]["uid"]
    try:
        notice = Notice(Subject("Node", "", "events-node", uid), "GPUUnhealthy", "XID 79", "a")
        assert KubeEvents(api, lambda: 1e9).post(notice)
        query = f"fieldSelector=involvedObject.uid={uid},involvedObject.kind=Node"
        (event,) = plane.call("GET", f"/api/v1/events?{query}")["items"]
        assert event["message"] == "XID 79"
    finally:
        plane.call("DELETE", "/api/v1/nodes/events-node")
