"""Tests that the agent reads the device choice and the reservations from the watch of its
GPUNode.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client
from structlog.testing import capture_logs

from agent.kube_client import of_client
from agent.probes.gpunode_watch import GPUNodeWatch
from agent.probes.readings import ObstacleReading
from tests.agent.scripted import ApiServer
from tests.waiting import until

PATH = (
    "/apis/headroom.gpu/v1alpha1/gpunodes?watch=true&fieldSelector=metadata.name%3Dn1"
    "&resourceVersion=0&allowWatchBookmarks=true&timeoutSeconds=300"
)
OBSTACLE = (
    "this agent does not support device choice 'spread' of its GPUNode, and follows its own"
    " --device-choice instead: update the agent, or correct the Node's annotation"
    " headroom.gpu/device-choice"
)


def lines(*choices: str) -> bytes:
    changes: list[Any] = [
        {"type": "MODIFIED", "object": {"kind": "GPUNode", "spec": {"deviceChoice": choice}}}
        for choice in choices
    ]
    return "".join(f"{json.dumps(each)}\n" for each in changes).encode()


class Watched:
    """A watch of an API server that sends these lines once."""

    def __init__(self, server: ApiServer, kube: client.ApiClient) -> None:
        self.seen: list[tuple[str | None, list[str]]] = []
        self.watch = GPUNodeWatch(of_client(kube), "n1", self.record)
        self.server = server

    def record(self) -> None:
        self.seen.append((self.watch.device_choice, self.obstacles()))

    def obstacles(self) -> list[str]:
        return [r.reason for r in self.watch.follow([]) if isinstance(r, ObstacleReading)]


@pytest.fixture
def watched() -> Iterator[Watched]:
    with ApiServer.serving() as server:
        configuration = client.Configuration(host=server.url)
        configuration.no_proxy = "*"
        with client.ApiClient(configuration) as kube:
            made = Watched(server, kube)
            yield made
            made.watch.stop()
            kube.rest_client.pool_manager.clear()


def test_an_unknown_device_choice_is_reported_and_the_agents_own_is_used(watched: Watched) -> None:
    watched.server.objects[PATH] = lines("steered", "spread", "spread", "gated")
    with capture_logs() as logs:
        watched.watch.start()
        until(lambda: len(watched.seen) == 3, "the last change")
    assert watched.seen == [("steered", []), ("", [OBSTACLE]), ("gated", [])]
    assert [each["reason"] for each in logs if each["event"] == "device_choice_unknown"] == [
        OBSTACLE
    ]
