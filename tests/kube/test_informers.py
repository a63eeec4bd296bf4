"""Tests the informers with a real API server, also while it fails and restarts."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from headroom.contract.kube import Pod
from headroom.contract.watched import (
    BudgetGone,
    BudgetSeen,
    GPUNodeGone,
    GPUNodeSeen,
    HeartbeatGone,
    HeartbeatSeen,
    NamespaceSeen,
    NodeGone,
    NodeSeen,
    PodGone,
    PodSeen,
    Relisted,
    SliceGone,
    SliceSeen,
)
from headroom.core.cluster.changes import Event
from headroom.core.cluster.trackers.foreign_allocators import node_of
from headroom.runtime.kube.api_errors import ApiStatus, NoAnswer
from headroom.runtime.kube.client import KubeApi, Query, Stream
from headroom.runtime.kube.informers import KubernetesSources
from headroom.runtime.kube.reflector import Pace, Reflector
from headroom.runtime.kube.resources import watched_kinds
from tests.controlplane import STRANGER_TOKEN, ControlPlane
from tests.kube.following import Recorder
from tests.threads import begun_since
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

NAMESPACE = "source-tests"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
NODES = "/api/v1/nodes"
GPUNODES = "/apis/headroom.gpu/v1alpha1/gpunodes"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
BUDGETS = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
MERGE = "application/merge-patch+json"
PACE = Pace(page_size=2, watch_s=30, grace_s=1.0, backoff_base_s=0.05, backoff_cap_s=0.2)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def plane(plane: ControlPlane) -> ControlPlane:
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    return plane


@contextmanager
def following(
    plane: ControlPlane, pace: Pace = PACE
) -> Iterator[tuple[KubernetesSources, Recorder]]:
    """Run informers of all kinds, and wait until they are synced."""
    seen = Recorder()
    api = KubeApi(plane.configuration())
    sources = KubernetesSources(api, seen, watched_kinds(NAMESPACE), pace=pace)
    sources.start()
    try:
        seen.until(lambda _: all(health.synced for health in sources.health))
        yield sources, seen
    finally:
        sources.stop()
        api.close()


@contextmanager
def following_pods(
    api: KubeApi, pace: Pace = PACE, wait: Callable[[float], object] | None = None
) -> Iterator[tuple[Reflector, Recorder]]:
    """Run an informer of pods, and wait until it has listed once."""
    seen = Recorder()
    kind = next(kind for kind in watched_kinds(NAMESPACE) if kind.name == "pods")
    reflector = Reflector(kind, api, seen, pace=pace, wait=wait)
    thread = threading.Thread(target=reflector.run)
    thread.start()
    try:
        seen.until(lambda _: reflector.health.synced)
        yield reflector, seen
    finally:
        reflector.stop()
        thread.join(PATIENCE_S)
        api.close()
    assert not thread.is_alive()


def new_pod(plane: ControlPlane) -> str:
    name = f"p{next(_numbers)}"
    containers = [{"name": "main", "image": "none"}]
    plane.call("POST", PODS, {"metadata": {"name": name}, "spec": {"containers": containers}})
    return name


def listed(plane: ControlPlane) -> dict[str, str]:
    """Return the resourceVersion of each pod on the server, by UID."""
    items: list[dict[str, Any]] = plane.call("GET", "/api/v1/pods")["items"]
    return {each["metadata"]["uid"]: each["metadata"]["resourceVersion"] for each in items}


def known(events: list[Event]) -> dict[str, str]:
    """Return the resourceVersion of each pod after these events, by UID."""
    pods: dict[str, str] = {}
    for event in events:
        if isinstance(event, Relisted) and event.kind is Pod:
            pods = {each.metadata.uid: each.metadata.resource_version for each in event.objects}
        elif isinstance(event, PodSeen):
            pods[event.pod.metadata.uid] = event.pod.metadata.resource_version
        elif isinstance(event, PodGone):
            del pods[event.uid]
    return pods


def test_every_kind_has_events_for_create_update_and_delete(plane: ControlPlane) -> None:
    with following(plane) as (sources, seen):
        before = len(seen.events)
        plane.call("POST", NODES, {"metadata": {"name": "n"}})
        plane.call("PATCH", f"{NODES}/n", {"metadata": {"labels": {"gpu": "yes"}}}, MERGE)
        kind = {"apiVersion": "headroom.gpu/v1alpha1", "kind": "GPUNode"}
        plane.call("POST", GPUNODES, kind | {"metadata": {"name": "n"}})
        status = {"status": {"agentVersion": "1"}}
        plane.call("PATCH", f"{GPUNODES}/n/status", status, MERGE)
        plane.call("POST", LEASES, {"metadata": {"name": "n"}, "spec": {"holderIdentity": "n"}})
        name = new_pod(plane)
        target = {"apiVersion": "v1", "kind": "Node", "name": "n"}
        plane.call("POST", f"{PODS}/{name}/binding", {"metadata": {"name": name}, "target": target})
        plane.call("DELETE", f"{PODS}/{name}?gracePeriodSeconds=0")
        plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": "another"}})
        plane.call("POST", BUDGETS, {"metadata": {"name": "n"}, "spec": {"minAvailable": 1}})
        for path in (NODES, GPUNODES, LEASES, BUDGETS):
            plane.call("DELETE", f"{path}/n")
        gone = (NodeGone("n"), GPUNodeGone("n"), HeartbeatGone("n"), BudgetGone(NAMESPACE, "n"))
        events = seen.until(
            lambda events: (
                all(each in events for each in gone)
                and any(isinstance(each, PodGone) for each in events)
                and any(isinstance(each, NamespaceSeen) for each in events)
            )
        )[before:]
        assert all(health.synced for health in sources.health)
        assert [health.reconnects for health in sources.health] == [0] * 9
    labels = [each.node.metadata.labels for each in events if isinstance(each, NodeSeen)]
    assert labels == [None, {"gpu": "yes"}]
    reports = [each.gpunode.status for each in events if isinstance(each, GPUNodeSeen)]
    assert [report and report.agent_version for report in reports] == [None, "1"]
    budgets = [each.budget for each in events if isinstance(each, BudgetSeen)]
    assert {each.metadata.name for each in budgets} == {"n"}
    beats = [each for each in events if isinstance(each, HeartbeatSeen)]
    assert [each.lease.metadata.name for each in beats] == ["n"]
    nodes = [each.pod.node for each in events if isinstance(each, PodSeen)]
    assert nodes == ["", "n", "n"]  # The last event shows that the pod is being deleted.
    assert known(seen.events) == listed(plane)


@pytest.mark.since("1.34")
def test_resource_slices_have_events_for_create_and_delete(plane: ControlPlane) -> None:
    published = {
        "metadata": {"name": "n-gpu"},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": "n",
            "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0", "capacity": {"memory": {"value": "80Gi"}}}],
        },
    }
    with following(plane) as (_, seen):
        plane.call("POST", SLICES, published)
        plane.call("DELETE", f"{SLICES}/n-gpu")
        events = seen.until(lambda events: SliceGone("n-gpu") in events)
    (piece,) = (each.piece for each in events if isinstance(each, SliceSeen))
    assert node_of(piece) == "n"


def test_a_list_longer_than_a_page_is_complete(plane: ControlPlane) -> None:
    for _ in range(5):
        new_pod(plane)
    with following(plane) as (_, seen):
        assert known(seen.events) == listed(plane)


class Watched(KubeApi):
    """A client of the real API server that records the start version of each watch."""

    def __init__(self, plane: ControlPlane, connect_timeout_s: float = PATIENCE_S) -> None:
        super().__init__(plane.configuration(), connect_timeout_s=connect_timeout_s)
        self.versions: list[int] = []

    def stream(self, path: str, *, query: Query, read_timeout_s: float) -> Stream:
        self.versions.append(int(query["resourceVersion"]))
        return super().stream(path, query=query, read_timeout_s=read_timeout_s)


def test_bookmarks_advance_the_version_of_an_idle_kind(plane: ControlPlane) -> None:
    api = Watched(plane)
    with following_pods(api, Pace(watch_s=3)) as (reflector, seen):
        for value in range(5):
            patch = {"metadata": {"labels": {"value": str(value)}}}
            plane.call("PATCH", "/api/v1/namespaces/default", patch, MERGE)
        plane.call(
            "GET", "/api/v1/pods"
        )  # This call makes the API server ask etcd for its progress.
        seen.until(lambda _: api.versions[-1] >= api.versions[0] + 5)
        assert (reflector.health.reconnects, reflector.health.lists) == (0, 1)
        assert len(seen.events) == 1


def test_no_event_is_lost_if_the_server_is_killed(plane: ControlPlane) -> None:
    with following(plane) as (sources, seen):
        first, second = new_pod(plane), new_pod(plane)
        seen.until(lambda events: known(events) == listed(plane))
        plane.kill("kube-apiserver")
        seen.until(lambda _: all(health.reconnects > 1 for health in sources.health))
        assert all(health.synced for health in sources.health)
        plane.start_apiserver()
        plane.call("DELETE", f"{PODS}/{first}?gracePeriodSeconds=0")
        plane.call("PATCH", f"{PODS}/{second}", {"metadata": {"labels": {"a": "b"}}}, MERGE)
        new_pod(plane)
        wanted = listed(plane)
        seen.until(lambda events: known(events) == wanted)
        plane.call("POST", NODES, {"metadata": {"name": "after"}})
        seen.until(
            lambda events: any(
                isinstance(each, NodeSeen) and each.node.metadata.name == "after" for each in events
            )
        )


def test_a_compacted_history_causes_a_list(plane: ControlPlane) -> None:
    """The watch is delayed until its resourceVersion has expired."""
    gate = threading.Event()
    api = Watched(plane)
    first = new_pod(plane)
    with (
        capture_logs() as logs,
        following_pods(api, wait=lambda _: gate.wait(PATIENCE_S)) as (reflector, seen),
    ):
        assert known(seen.events) == listed(plane)
        plane.kill("kube-apiserver")
        seen.until(lambda _: reflector.health.reconnects == 1)
        plane.start_apiserver()
        plane.call("DELETE", f"{PODS}/{first}?gracePeriodSeconds=0")
        new_pod(plane)
        plane.kill("kube-apiserver")  # A running API server would still have the changes.
        plane.start_apiserver()
        plane.compact()
        wanted = listed(plane)
        gate.set()
        seen.until(lambda events: known(events) == wanted and reflector.health.lists == 2)
    assert "source_expired" in [entry["event"] for entry in logs]


def test_a_frozen_server_is_detected_and_reconnected(plane: ControlPlane) -> None:
    api = Watched(plane, connect_timeout_s=0.5)
    with following_pods(api, Pace(watch_s=1, grace_s=0.5, backoff_base_s=0.05)) as (
        reflector,
        seen,
    ):
        plane.pause("kube-apiserver")
        try:
            seen.until(lambda _: reflector.health.reconnects >= 1)
        finally:
            plane.resume("kube-apiserver")
        new_pod(plane)
        wanted = listed(plane)
        seen.until(lambda events: known(events) == wanted)


def test_an_informer_without_rights_is_never_synced(plane: ControlPlane) -> None:
    seen = Recorder()
    api = KubeApi(plane.configuration(STRANGER_TOKEN))
    sources = KubernetesSources(api, seen, watched_kinds(NAMESPACE), pace=PACE)
    sources.start()
    seen.until(lambda _: all(health.reconnects > 1 for health in sources.health))
    assert not any(health.synced for health in sources.health)
    sources.stop()
    api.close()
    assert seen.events == []


def test_an_informer_stops_immediately_without_leaking_threads(plane: ControlPlane) -> None:
    watching = begun_since("watch-")
    with following(plane, replace(PACE, watch_s=600)):
        assert watching() == sorted(f"watch-{kind.name}" for kind in watched_kinds(NAMESPACE))
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < PATIENCE_S  # The informer did not wait for data.
    assert watching() == []


def test_an_interrupted_stream_is_not_read_any_more(plane: ControlPlane) -> None:
    """If the stream were read over TLS, the remaining data would look like ciphertext."""
    path = "/apis/rbac.authorization.k8s.io/v1/clusterroles"  # does not fit into one read
    api = KubeApi(plane.configuration())
    stream = api.stream(path, query={"watch": "true"}, read_timeout_s=PATIENCE_S)
    try:
        assert b'"ADDED"' in stream.read()
        stream.interrupt()
        with pytest.raises(NoAnswer, match="interrupted"):
            stream.read()
    finally:
        stream.close()
        api.close()


def test_an_expired_continue_token_restarts_the_list(plane: ControlPlane) -> None:
    """Between two pages, etcd is compacted, and the API server is restarted, because it keeps its
    own snapshots.
    """

    class Compacting(KubeApi):
        answers: list[int] = []  # noqa: RUF012 -- one instance

        def call(self, *args: Any, **kwargs: Any) -> bytes:
            if "continue" in (kwargs.get("query") or {}):
                new_pod(plane)
                plane.kill("kube-apiserver")
                plane.start_apiserver()
                plane.compact()
            try:
                body = super().call(*args, **kwargs)
            except ApiStatus as err:
                self.answers.append(err.status)
                raise
            self.answers.append(200)
            return body

    for _ in range(3):
        new_pod(plane)
    api = Compacting(plane.configuration())
    listing = api.list("/api/v1/pods", lambda pod: pod, page_size=2)
    api.close()
    assert api.answers == [200, 410, 200]
    assert len(listing.items) == len(listed(plane))
