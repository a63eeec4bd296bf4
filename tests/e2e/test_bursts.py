"""Checks two extenders behind one address, and an extender that has lost its connections.

No agent reports, so that only the reservations prevent overcommitment. test_real_nodes.py has
bursts on real nodes and a killed extender.
"""

from typing import Any

import urllib3

from tests.e2e.cluster import NAMESPACE, PODS, PlayedCluster
from tests.e2e.conftest import ONE_GPU, NewCluster
from tests.e2e.nodes import GIB, Shape
from tests.processes import free_ports
from tests.reverse_proxy import proxy_to, round_robin
from tests.waiting import PATIENCE_S

http = urllib3.PoolManager(retries=False, timeout=PATIENCE_S).request

#: A device has enough replicas for more pods of 3 GiB than fit, so counting only replicas would
#: overcommit it.
MANY_REPLICAS = Shape(replicas=16)
#: Eight requests of 3 GiB fill a device completely.
PODS_THAT_FIT = 36


def test_two_replicas_behind_one_address_reserve_no_memory_twice(new_cluster: NewCluster) -> None:
    cluster = new_cluster(5, MANY_REPLICAS)
    ports = cluster.start_replicas("extender-a", "extender-b")
    with round_robin(ports) as url:
        cluster.start_scheduler(url)
        cluster.settle()
        for i in range(PODS_THAT_FIT):
            cluster.create_pod(f"p{i}", "3Gi")
        cluster.until(lambda: len(cluster.bound()) == PODS_THAT_FIT, "every pod is bound")
    bound = 'headroom_binds_total{outcome="bound"}'
    assert all(cluster.metric(bound, name) > 0 for name in ("extender-a", "extender-b"))
    assert_no_memory_is_reserved_twice(cluster)


def test_two_replicas_reserve_and_report_an_unreserved_pod_once(
    new_cluster: NewCluster,
) -> None:
    """Both replicas receive the pod and act. They also report an edit of a bound pod only once."""
    cluster = new_cluster(1, ONE_GPU)
    ports = cluster.start_replicas("extender-a", "extender-b")
    (node,) = cluster.names
    over = f'headroom_overcommitted_bytes{{device="GPU-{node}-0",node="{node}"}}'

    def shown(reason: str) -> list[str]:
        listed = cluster.plane.call("GET", f"/api/v1/namespaces/{NAMESPACE}/events")["items"]
        found = [event for event in listed if event["source"].get("component") == "headroom"]
        return [event["involvedObject"]["name"] for event in found if event["reason"] == reason]

    with round_robin(ports) as url:
        cluster.start_scheduler(url)
        cluster.settle()
        cluster.create_pod("ours", "16Gi")
        cluster.until(lambda: bool(cluster.node_of("ours")), "our pod is bound")
        cluster.create_pod("theirs", "12Gi", nodeName=node)
        uid = cluster.pod("theirs")["metadata"]["uid"]
        cluster.until(lambda: uid in cluster.gpunode(node).spec.reservations, "it is in the ledger")
        cluster.until(lambda: bool(shown("Overcommitted")), "its author gets an Event")
        for replica in ("extender-a", "extender-b"):
            cluster.until(lambda r=replica: cluster.metric(over, r) == 4 * GIB, "both show it")  # type: ignore[misc]

        # A later request of a bound pod has no effect except an Event for its author.
        before = cluster.gpunode(node).spec.reservations
        edited = {"metadata": {"annotations": {"headroom.gpu/vram": "1Gi"}}}
        cluster.plane.call("PATCH", f"{PODS}/ours", edited, "application/merge-patch+json")
        cluster.until(lambda: bool(shown("RequestChangeIgnored")), "the edit is reported")
        assert cluster.gpunode(node).spec.reservations == before
        assert before[uid].flags == ["adopted"]

        cluster.delete_pod("theirs")
        for replica in ("extender-a", "extender-b"):
            cluster.until(lambda r=replica: not cluster.metric(over, r), "the alarm ends")  # type: ignore[misc]
    assert shown("Overcommitted") == ["theirs"]
    uid = cluster.plane.call("GET", f"/api/v1/nodes/{node}")["metadata"]["uid"]
    query = f"fieldSelector=involvedObject.uid={uid},reason=GPUOvercommitted"

    def of_the_node() -> list[dict[str, Any]]:
        path = f"/api/v1/namespaces/default/events?{query}"
        listed: list[dict[str, Any]] = cluster.plane.call("GET", path)["items"]
        return listed

    # The Event of the node may be written later than the Events of the pods.
    cluster.until(of_the_node, "the node has an Event")
    events = of_the_node()
    assert len(events) == 1
    assert "1 pod without a reservation" in events[0]["message"]
    assert "theirs" not in events[0]["message"]
    assert shown("RequestChangeIgnored") == ["ours"]


def test_a_replica_without_connection_decides_nothing_until_it_is_reconnected(
    new_cluster: NewCluster,
) -> None:
    """First, no data arrives, and then every connection breaks. The other replica continues to
    work.
    """
    blind = "Headroom has had no contact with the API server for too long to decide"
    cluster = new_cluster(1, ONE_GPU)
    (node,) = cluster.names
    port, other_port = free_ports(2)
    plane = cluster.plane
    with proxy_to(plane.url, certificate=plane.certificate) as (proxy, wire):
        cut_off = cluster.start_extender(
            "extender-a", port, module="tests.hasty", api_port=proxy.port
        )
        cluster.start_scheduler(cluster.start_extender("extender-b", other_port))
        cluster.settle()
        for name in ("first", "second"):
            cluster.create_pod(name, "2Gi", schedulerName="nobody")

        def ready() -> tuple[int, str]:
            answer = http("GET", f"{cluster.debug_url('extender-a')}/readyz")
            return answer.status, answer.data.decode().strip()

        def filtered(name: str) -> dict[str, Any]:
            shown = {"Pod": cluster.pod(name), "NodeNames": [node]}
            found: dict[str, Any] = http("POST", f"{cut_off}/filter", json=shown).json()
            return found

        def bind_error(name: str) -> str:
            metadata = cluster.pod(name)["metadata"]
            which = {"PodName": name, "PodNamespace": NAMESPACE, "PodUID": metadata["uid"]}
            error: str = http("POST", f"{cut_off}/bind", json={**which, "Node": node}).json()[
                "Error"
            ]
            return error

        def works() -> bool:
            try:
                return ready()[0] == 200 and filtered("first").get("NodeNames") == [node]
            except urllib3.exceptions.NewConnectionError:
                return False  # not started yet

        cluster.until(works, "it lets the node pass")
        assert bind_error("first") == ""
        wire.faults = {"stalled": 1.0}
        cluster.until(lambda: ready() == (503, blind), "it reports that it is blind")

        def break_off() -> None:
            wire.faults = {"cut off": 1.0}
            wire.cut()

        for cut in (lambda: None, break_off):
            cut()
            assert ready() == (503, blind)
            assert (filtered("second")["Error"], bind_error("second")) == (blind, blind)
            assert not filtered("second").get("NodeNames")
        assert not cluster.node_of("second")
        cluster.create_pod("meanwhile", "2Gi")
        cluster.until(lambda: cluster.node_of("meanwhile") == node, "the other replica binds")
        assert ready() == (503, blind)
        wire.faults = {}
        cluster.until(works, "it lets the node pass again")
        assert bind_error("second") == ""
        assert cluster.node_of("second") == node
    reserved = cluster.gpunode(node).spec.reservations.values()
    assert {reservation.name for reservation in reserved} == {"first", "second", "meanwhile"}


def assert_no_memory_is_reserved_twice(cluster: PlayedCluster) -> None:
    cluster.kill_all()  # No pod is bound after this.
    cluster.nodes.observe(cluster.pods())
    verdict = cluster.nodes.referee.verdict(useful_bytes=GIB)
    assert verdict.bound == len(cluster.bound())
    assert verdict.devices_overcommitted == 0
    assert not verdict.turned_away
    # Every bound pod has exactly one reservation, on its node.
    reserved = {
        (uid, name) for name in cluster.names for uid in cluster.gpunode(name).spec.reservations
    }
    bound = {(pod["metadata"]["uid"], pod["spec"]["nodeName"]) for pod in cluster.bound()}
    assert bound <= reserved
