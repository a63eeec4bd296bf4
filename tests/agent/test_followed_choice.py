"""Checks that the agent follows the device choice and the reservations of its own GPUNode in a real
API server.
"""

from collections.abc import Iterator

import pytest
from kubernetes.client import ApiClient
from structlog.testing import capture_logs

from agent.kube_client import of_client
from agent.probes.gpunode_watch import GPUNodeWatch
from tests.agent.installed_agent import (
    GPUNODES,
    publishing,
    status,
    token,
)
from tests.controlplane import ControlPlane
from tests.waiting import until


class TestDeviceChoice:
    """Tests that the agent follows ``spec.deviceChoice`` of its own GPUNode with its own token."""

    def choose(self, plane: ControlPlane, node: str, choice: str | None) -> None:
        path, patch = f"{GPUNODES}/{node}", {"spec": {"deviceChoice": choice}}
        plane.call("PATCH", path, patch)

    @pytest.fixture
    def followed(self, installed: ControlPlane) -> Iterator[tuple[GPUNodeWatch, list[str | None]]]:
        self.choose(installed, "agent-a", None)
        seen: list[str | None] = []
        configuration = installed.configuration(token(installed, "agent-a"))
        configuration.no_proxy = "*"
        with ApiClient(configuration) as kube:
            watch = GPUNodeWatch(
                of_client(kube), "agent-a", lambda: seen.append(watch.device_choice)
            )
            assert watch.device_choice is None
            watch.start()
            until(lambda: seen == [""], "the choice at the start")
            yield watch, seen
            watch.stop()
            kube.rest_client.pool_manager.clear()
        self.choose(installed, "agent-a", None)

    def test_only_changes_of_the_own_node_are_seen(
        self, installed: ControlPlane, followed: tuple[GPUNodeWatch, list[str | None]]
    ) -> None:
        _, seen = followed
        self.choose(installed, "agent-b", "gated")
        with publishing(installed, "agent-a", "agent-a") as publisher:
            # The GPUNode of the other node changes, but the choice does not.
            publisher.report(status(used_bytes=11))
        self.choose(installed, "agent-a", "steered")
        until(lambda: seen[-1] == "steered", "the change")
        assert seen == ["", "steered"]

    def test_the_ledger_of_the_own_gpunode_is_followed(
        self, installed: ControlPlane, followed: tuple[GPUNodeWatch, list[str | None]]
    ) -> None:
        watch, seen = followed
        path, uid = f"{GPUNODES}/agent-a", "of-the-ledger"
        reservation = {"namespace": "ml", "name": "p", "charges": []}
        for held in (reservation, None):
            patch = {"spec": {"reservations": {uid: held}}}
            installed.call("PATCH", path, patch, "application/merge-patch+json")
            until(lambda held=held: (uid in watch.ledger.reservations) is bool(held), "the change")
        assert seen == [""]

    def test_a_change_is_seen_after_an_outage_of_the_api_server(
        self, installed: ControlPlane, followed: tuple[GPUNodeWatch, list[str | None]]
    ) -> None:
        watch, seen = followed
        with capture_logs() as logs:
            installed.kill("kube-apiserver")
            until(lambda: logs, "that it is logged")
            assert watch.device_choice == ""  # The last known choice stays.
            installed.start_apiserver()
        assert {each["event"] for each in logs} == {"gpunode_not_watched"}
        self.choose(installed, "agent-a", "steered")
        until(lambda: seen[-1] == "steered", "the change")
