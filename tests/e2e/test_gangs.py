"""Checks that either all or no pods of a group in kube-scheduler's Workload API are bound.

kube-scheduler calls filter for all pods of a group before it binds the first pod.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from aiohttp import web

from tests.admission.site import manifests
from tests.controlplane import SCHEDULER_NAME, ApiRefused, scheduler_configuration
from tests.e2e.cluster import NAMESPACE, PODS, PlayedCluster, pod_manifest
from tests.e2e.conftest import GROUP_API, GROUP_GATES, ONE_GPU, NewCluster
from tests.kubernetes_version import is_at_least
from tests.reverse_proxy import Proxies, Service, Wire

#: In Kubernetes 1.35, groups are parts of a Workload. kube-scheduler tries the pods of a group one
#: by one, and holds them until enough pods have a node. Newer versions try all pods of a group in
#: one cycle.
ONE_BY_ONE = not is_at_least("1.36")
GROUPS = (
    f"/apis/scheduling.k8s.io/{GROUP_API}/namespaces/{NAMESPACE}"
    f"/{'workloads' if ONE_BY_ONE else 'podgroups'}"
)
DECLINED = 'headroom_binds_total{outcome="declined"}'
PLURALS = {
    "PriorityClass": "scheduling.k8s.io/v1/priorityclasses",
    "ValidatingAdmissionPolicy": "admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": (
        "admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
    ),
}
#: Seconds between two filter calls, as on a busy machine or with many plugins. Memory that is held
#: for a single pod would be free again before kube-scheduler has chosen nodes for the whole group.
PAUSE_S = 0.08

pytestmark = pytest.mark.since("1.35")


class Calls(Service):
    """Counts kube-scheduler's calls, delays filter, and rejects some binds."""

    def __init__(self, url: str) -> None:
        super().__init__({url: Wire()})
        self.count: Counter[str] = Counter()
        #: This function is called once, before the next bind after ``after_binds`` binds.
        self.before_bind: Callable[[], None] = lambda: None
        self.after_binds = 0
        self._passed = 0
        self._bind_passes = asyncio.Lock()
        #: Pods whose bind calls the proxy rejects.
        self.rejected: set[str] = set()

    async def before(self, request: web.Request, wire: Wire) -> web.Response | None:
        verb = request.path.rpartition("/")[2]
        self.count[verb] += 1
        if verb == "filter":
            await asyncio.sleep(PAUSE_S)
        if verb == "bind":
            async with self._bind_passes:
                if self._passed >= self.after_binds:
                    await asyncio.to_thread(self.before_bind)
                    self.before_bind = lambda: None
                self._passed += 1
            if (await request.json())["PodName"] in self.rejected:
                self.count["rejected bind"] += 1
                return web.json_response({"Error": "rejected by the test"})
        return None


@contextlib.contextmanager
def scheduled(cluster: PlayedCluster, **settings: object) -> Iterator[Calls]:
    """Run Headroom with these settings, and a kube-scheduler that schedules groups."""
    with scheduled_by(cluster, SCHEDULER_NAME, cluster.start_extender(settings=settings)) as calls:
        cluster.settle()
        yield calls


@contextlib.contextmanager
def scheduled_by(cluster: PlayedCluster, name: str, url: str) -> Iterator[Calls]:
    """Run a kube-scheduler with this name that uses the extender at this address.

    By default, kube-scheduler retries a group after at most 10 s times the square root of the
    number of pods.
    """
    proxies, calls = Proxies(), Calls(url)
    try:
        proxies.serve(calls)
        kubeconfig = cluster.plane.kubeconfig("scheduler-of-the-tests")
        configuration = scheduler_configuration(calls.url, kubeconfig)
        configuration["podMaxBackoffSeconds"] = 1
        for extender in configuration["extenders"]:
            extender["httpTimeout"] = "60s"  # long enough for a bind on a busy machine
        for profile in configuration["profiles"]:
            profile["schedulerName"] = name
        cluster.start_scheduler_as(f"gangs of {name}", configuration, gates=GROUP_GATES)
        yield calls
    finally:
        proxies.stop()


def create_gang(
    cluster: PlayedCluster,
    name: str,
    sizes: Sequence[str],
    minimum: int | None = None,
    scheduler: str = SCHEDULER_NAME,
) -> None:
    """Create a group and its pods. The group needs ``minimum`` pods, by default all."""
    policy = {"gang": {"minCount": minimum or len(sizes)}}
    spec: dict[str, Any] = {"schedulingPolicy": policy}
    if ONE_BY_ONE:
        spec = {"podGroups": [{"name": "all", "policy": policy}]}
    cluster.plane.call("POST", GROUPS, {"metadata": {"name": name}, "spec": spec})
    for index, vram in enumerate(sizes):
        create_member(cluster, name, index, vram, scheduler)


def create_member(
    cluster: PlayedCluster, group: str, index: int, vram: str, scheduler: str = SCHEDULER_NAME
) -> None:
    """Create a pod of the group as a controller does."""
    manifest = pod_manifest(vram)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": group, "uid": group}
    manifest["metadata"] |= {
        "name": f"{group}-{index}",
        "ownerReferences": [owner | {"controller": True}],
    }
    manifest["spec"]["schedulerName"] = scheduler
    manifest["spec"] |= (
        {"workloadRef": {"name": group, "podGroup": "all"}}
        if ONE_BY_ONE
        else {"schedulingGroup": {"podGroupName": group}}
    )
    cluster.plane.call("POST", PODS, manifest)


def bound(cluster: PlayedCluster, name: str) -> int:
    """Return the number of bound pods in the group."""
    names = [pod["metadata"]["name"] for pod in cluster.bound()]
    return sum(each.startswith(f"{name}-") for each in names)


def test_a_group_that_fits_exactly_is_bound_in_one_cycle(new_cluster: NewCluster) -> None:
    """No two of the 12 pods get the same memory, although nothing is reserved before the last
    filter call.
    """
    cluster = new_cluster(6, ONE_GPU)
    with scheduled(cluster) as calls:
        create_gang(cluster, "exact", ["12Gi"] * 12)
        cluster.until(lambda: bound(cluster, "exact") == 12, "the group is bound")
        assert calls.count["bind"] == 12
        assert cluster.metric(DECLINED) == 0


def test_a_group_that_fits_only_in_part_holds_no_memory(new_cluster: NewCluster) -> None:
    """The group has six pods, but there is memory for only four. A single pod gets memory although
    the group waits. The group is bound when all of its pods fit.
    """
    cluster = new_cluster(3, ONE_GPU)
    with scheduled(cluster) as calls:
        cluster.create_pod("first", "24Gi")
        cluster.until(lambda: cluster.node_of("first") != "", "a node is full")
        create_gang(cluster, "half", ["12Gi"] * 6)
        attempts = 1 if ONE_BY_ONE else 2
        cluster.until(lambda: calls.count["filter"] > 5 * attempts + 1, "the group was tried")
        cluster.create_pod("single", "24Gi")
        cluster.until(lambda: cluster.node_of("single") != "", "a single pod gets the memory")
        assert calls.count["bind"] == 2
        cluster.delete_pod("first")
        cluster.nodes.observe(cluster.pods())
        if ONE_BY_ONE:  # Two of the other four pods get no node.
            cluster.until(lambda: cluster.metric(DECLINED) == 6, "each bind is declined")
        assert bound(cluster, "half") == 0
        cluster.delete_pod("single")
        cluster.nodes.observe(cluster.pods())
        cluster.until(lambda: bound(cluster, "half") == 6, "the group is bound whole")


def test_a_group_that_loses_memory_before_its_binds_is_bound_completely_later(
    new_cluster: NewCluster,
) -> None:
    """A pod that bypasses Headroom takes a GPU. No pod of the group is bound until there is memory
    for all pods.
    """
    cluster = new_cluster(3, ONE_GPU)
    node = cluster.names[0]

    def takes_memory() -> None:
        cluster.create_pod("bypass", "24Gi", nodeName=node)
        cluster.until(lambda: bool(cluster.gpunode(node).spec.reservations), "it is charged")

    with scheduled(cluster) as calls:
        calls.before_bind = takes_memory
        create_gang(cluster, "late", ["12Gi"] * 6)
        cluster.until(lambda: calls.count["filter"] > 8, "the group is tried again")
        cluster.until(lambda: cluster.metric(DECLINED) == 6, "each bind is declined")
        assert calls.count["bind"] == 6
        assert bound(cluster, "late") == 0
        cluster.delete_pod("bypass")
        cluster.nodes.observe(cluster.pods())
        cluster.until(lambda: bound(cluster, "late") == 6, "the group is bound whole")


@pytest.mark.since("1.36")
def test_a_tenants_group_cannot_use_headrooms_priority(new_cluster: NewCluster) -> None:
    """With this priority, the pods of the group could preempt the pods of other tenants."""
    cluster = new_cluster(1, ONE_GPU)
    spec = {"schedulingPolicy": {"basic": {}}, "priorityClassName": "headroom-critical"}
    body = {"metadata": {"name": "urgent"}, "spec": spec}

    def answer() -> str:
        try:
            cluster.plane.call("POST", f"{GROUPS}?dryRun=All", body)
        except ApiRefused as err:
            return str(err)
        return "created"

    with contextlib.ExitStack() as undo:
        for each in manifests("base/priorityclass.yaml"):
            path = f"/apis/{PLURALS[each['kind']]}"
            cluster.plane.call("POST", path, each)
            undo.callback(cluster.plane.call, "DELETE", f"{path}/{each['metadata']['name']}")
        rejected = "is for Headroom's own pods"
        cluster.until(lambda: rejected in answer(), "groups with the class are rejected")
