"""Tests reports and heartbeats to the API server, one call at a time."""

import msgspec
import pytest
from kubernetes import client
from kubernetes.config import ConfigException

from agent.kube_client import of_client
from agent.kube_publisher import KubernetesPublisher, NotDelivered, NotThereYet, status_patch
from headroom.contract.gpunode import GPUNodeStatus, PodUse
from tests.agent.scripted import GPUNODE, LEASES, ApiServer, merged
from tests.agent.test_node_probe import NO_ANSWER
from tests.agent.writing import NOW, VOUCH, status, used, vouched


@pytest.mark.parametrize("body", NO_ANSWER)
def test_an_invalid_response_is_an_error(
    api: ApiServer, publisher: KubernetesPublisher, body: bytes
) -> None:
    api.objects[f"{GPUNODE}?resourceVersion=0"] = body
    with pytest.raises(NotDelivered, match="cannot be read"):
        publisher.held()


def test_a_report_is_a_merge_patch_of_the_status_only(
    api: ApiServer, publisher: KubernetesPublisher
) -> None:
    api.create("uid-1")
    assert publisher.report(status(5)).uid == "uid-1"
    ((method, path, headers, body),) = api.requests
    assert (method, path) == ("PATCH", f"{GPUNODE}/status")
    assert headers["Content-Type"] == "application/merge-patch+json"
    assert headers["authorization"] == "Bearer secret"
    assert set(body) == {"status"}
    assert api.gpunode is not None
    assert api.gpunode["spec"] == {"initialised": True}
    assert used(api) == 5


def test_fields_removed_from_the_status_are_removed_from_the_object() -> None:
    full = status(pods=[PodUse(uid="u", device="GPU-a")], driver_version="580")
    stored = merged({}, status_patch(full))
    assert stored["pods"]
    stored = merged(stored, status_patch(GPUNodeStatus(observed_at="later")))
    assert stored == {
        "observedAt": "later",
        "devices": [],
        "pods": [],
        "limits": [],
        "unattributedProcesses": [],
        "sources": [],
        "conditions": [],
        "plugin": {},
        "summary": {},
    }


def test_a_missing_gpunode_is_waited_for_and_never_created(
    api: ApiServer, publisher: KubernetesPublisher
) -> None:
    with pytest.raises(NotThereYet, match="n1 does not exist yet"):
        publisher.report(status())
    assert {method for method, _ in api.sent()} == {"PATCH"}


def test_a_lease_is_created_once_and_then_renewed(
    api: ApiServer, publisher: KubernetesPublisher
) -> None:
    later = msgspec.structs.replace(VOUCH, after="101")
    assert publisher.heartbeat(NOW, VOUCH) == "101"
    assert vouched(api) == VOUCH
    assert publisher.heartbeat(NOW.replace(minute=59), later) == "102"
    assert vouched(api) == later
    assert api.sent() == [
        ("PATCH", f"{LEASES}/n1"),
        ("POST", LEASES),
        ("PATCH", f"{LEASES}/n1"),
    ]
    assert api.lease is not None
    assert api.lease["metadata"].items() >= {"name": "n1", "namespace": "headroom-system"}.items()
    assert api.lease["spec"] == {
        "holderIdentity": "n1",
        "leaseDurationSeconds": 90,
        "renewTime": "2026-11-21T01:59:03.000000Z",
    }


def test_the_current_gpunode_owns_the_lease(api: ApiServer, publisher: KubernetesPublisher) -> None:
    for uid in ("uid-1", "uid-2"):  # The GPUNode is deleted and created again.
        publisher.heartbeat(NOW, msgspec.structs.replace(VOUCH, gpunode=uid))
        assert api.lease is not None
        assert api.lease["metadata"]["ownerReferences"] == [
            {"apiVersion": "headroom.gpu/v1alpha1", "kind": "GPUNode", "name": "n1", "uid": uid}
        ]


def test_a_rejection_reports_the_object_and_the_reason(
    api: ApiServer, publisher: KubernetesPublisher
) -> None:
    api.reject["PATCH", f"{GPUNODE}/status"] = (403, {})
    with pytest.raises(NotDelivered, match=r"status of GPUNode n1 was rejected with 403.*the test"):
        publisher.report(status())


def test_a_report_to_a_server_that_does_not_listen_is_not_delivered() -> None:
    configuration = client.Configuration(host="http://127.0.0.1:9")
    configuration.no_proxy = "*"
    with client.ApiClient(configuration) as kube:
        publisher = KubernetesPublisher(of_client(kube), "n1", "headroom-system", 30)
        with pytest.raises(NotDelivered, match="API server not reached"):
            publisher.report(status())


def test_a_report_is_not_delivered_if_the_token_is_unreadable() -> None:
    configuration = client.Configuration(host="http://127.0.0.1:9")
    configuration.api_key = {"authorization": "Bearer old"}

    def unreadable(_: client.Configuration) -> None:
        raise ConfigException("Token file exists but empty.")

    configuration.refresh_api_key_hook = unreadable
    with client.ApiClient(configuration) as kube:
        publisher = KubernetesPublisher(of_client(kube), "n1", "headroom-system", 30)
        with pytest.raises(NotDelivered, match="exists but empty"):
            publisher.heartbeat(NOW, VOUCH)
