"""Checks with a real API server that the agent's token can only write the objects of its own
node.
"""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
import urllib3

from agent.kube_publisher import NotDelivered
from headroom.contract.heartbeat import Confirmation, confirmation_of
from tests.agent.installed_agent import (
    AT_ONCE,
    GPUNODES,
    LEASES,
    NODES,
    SYSTEM,
    lease,
    publishing,
    reported,
    status,
    token,
    unless,
)
from tests.controlplane import ROOT, ApiRefused, ControlPlane
from tests.waiting import PATIENCE_S


def vouch(observed_at: str = "then") -> Confirmation:
    return Confirmation(sampled_at="now", gpunode="uid", observed_at=observed_at)


NOW = datetime(2026, 11, 21, tzinfo=UTC)


class TestOwnNodeOnly:
    def test_an_agent_writes_the_objects_of_its_node(self, installed: ControlPlane) -> None:
        for node in NODES:
            with publishing(installed, node, node) as publisher:
                publisher.report(status(used_bytes=7))
                first = publisher.heartbeat(NOW, vouch())  # created
                second = publisher.heartbeat(NOW, vouch("later"))  # renewed
            assert reported(installed, node).devices[0].used_bytes == 7
            assert first != second == lease(installed, node).metadata.resource_version
            assert confirmation_of(lease(installed, node)) == vouch("later")

    @pytest.mark.parametrize(
        ("sits_on", "message"),
        [
            pytest.param(
                "agent-b",
                "an agent on node agent-b may write only what is named agent-b, not agent-a",
                id="of another node",
            ),
            pytest.param(None, "the agent's token names no node", id="without a node"),
        ],
    )
    def test_no_other_token_can_write_these_objects(
        self, installed: ControlPlane, sits_on: str | None, message: str
    ) -> None:
        unless(404, installed, "DELETE", f"{LEASES}/agent-a", AT_ONCE)
        before = installed.call("GET", f"{GPUNODES}/agent-a")
        with publishing(installed, sits_on, "agent-a") as publisher:
            rejected = "status of GPUNode agent-a was rejected with 403: .*" + message
            with pytest.raises(NotDelivered, match=f"{rejected}.*spec.nodeName of its pod"):
                publisher.report(status(used_bytes=9))
            rejected = f"Lease {SYSTEM}/agent-a was rejected with 403: .*{message}"
            with pytest.raises(NotDelivered, match=rejected):
                publisher.heartbeat(NOW, vouch())  # This call would create the Lease.
            with publishing(installed, "agent-a", "agent-a") as owner:
                version = owner.heartbeat(NOW, vouch())
            with pytest.raises(NotDelivered, match=rejected):
                publisher.heartbeat(NOW, vouch("forged"))
        assert installed.call("GET", f"{GPUNODES}/agent-a") == before
        assert lease(installed, "agent-a").metadata.resource_version == version

    def test_an_agent_cannot_write_leases_of_other_components(
        self, installed: ControlPlane
    ) -> None:
        """Headroom's kube-scheduler uses a Lease in the same namespace for leader election."""
        with (
            publishing(installed, "agent-a", "leader-of-the-schedulers") as publisher,
            pytest.raises(NotDelivered, match="not leader-of-the-schedulers"),
        ):
            publisher.heartbeat(NOW, vouch())

    def test_the_agents_role_has_only_the_required_permissions(
        self, installed: ControlPlane
    ) -> None:
        """Compare the permissions that the API server lists. Ignore the permissions of every
        authenticated user.
        """
        body = {"spec": {"namespace": SYSTEM}}
        path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
        answer = request(installed, token(installed, "agent-a"), "POST", path, body)
        rules = {
            (group, resource, verb)
            for rule in answer["status"]["resourceRules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
            if group not in ("authorization.k8s.io", "authentication.k8s.io", "certificates.k8s.io")
        }
        assert rules == {
            ("", "nodes", "get"),
            ("headroom.gpu", "gpunodes", "get"),
            ("headroom.gpu", "gpunodes", "watch"),
            ("headroom.gpu", "gpunodes/status", "patch"),
            ("coordination.k8s.io", "leases", "create"),
            ("coordination.k8s.io", "leases", "patch"),
        }

    def test_an_agent_can_read_gpunodes_of_other_nodes_as_documented(
        self, installed: ControlPlane
    ) -> None:
        """All agents share a service account, so its role must permit ``get`` for the GPUNodes of
        all nodes. Admission policies do not apply to reads. An agent cannot list GPUNodes.
        """
        own = token(installed, "agent-a")
        other = request(installed, own, "GET", f"{GPUNODES}/agent-b", None)
        assert other["metadata"]["name"] == "agent-b"
        with pytest.raises(ApiRefused, match="403 "):
            request(installed, own, "GET", GPUNODES, None)
        for page in ("design", "operate"):
            (row,) = [
                line
                for line in (ROOT / f"docs/{page}/security.md").read_text().splitlines()
                if line.startswith(("| an agent, or an attacker", "| agent |"))
            ]
            assert "of all nodes" in row

    def test_agents_cannot_write_reservations(self, installed: ControlPlane) -> None:
        before = installed.call("GET", f"{GPUNODES}/agent-a")["spec"]
        forged = {"status": msgspec.to_builtins(status()), "spec": {"initialised": True}}
        own = token(installed, "agent-a")
        request(installed, own, "PATCH", f"{GPUNODES}/agent-a/status", forged)
        assert installed.call("GET", f"{GPUNODES}/agent-a")["spec"] == before
        with pytest.raises(ApiRefused, match="403"):
            request(installed, own, "PATCH", f"{GPUNODES}/agent-a", forged)


def request(plane: ControlPlane, token: str, method: str, path: str, body: Any) -> dict[str, Any]:
    with urllib3.PoolManager(ca_certs=str(plane.ca_file), retries=False) as http:
        content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {token}", "Content-Type": content_type}
        answer = http.request(
            method, plane.url + path, json=body, headers=headers, timeout=PATIENCE_S
        )
    if answer.status >= 300:
        raise ApiRefused(f"{answer.status} {answer.data.decode()}")
    decoded: dict[str, Any] = answer.json()
    return decoded
