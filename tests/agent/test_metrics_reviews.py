"""Checks with a real API server which clients may read the metrics of an agent. The agent has the
permissions of its role.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import ApiClient

from agent.http_connection import Answer
from agent.http_endpoints import MetricsPort, Server
from agent.kube_client import of_client
from agent.metrics_access import KubeReview, MetricsAccess
from agent.serving_tls import ServingTls
from headroom.contract.gpunode import GPUNodeStatus
from tests.agent.installed_agent import AT_ONCE, installed, token, unless
from tests.agent.served import ServedSample, world
from tests.agent.test_metrics_access import asked, connection
from tests.builders import shared
from tests.certificates import Authority
from tests.controlplane import ROOT, ControlPlane

__all__ = ["installed", "world"]

MONITORING, PROMETHEUS, TENANT = "monitoring", "prometheus-k8s", "tenant"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
ACCOUNTS = f"/api/v1/namespaces/{MONITORING}/serviceaccounts"


@pytest.fixture
def accounts(installed: ControlPlane) -> Iterator[dict[str, str]]:
    """The tokens of Prometheus and of another account. The component ``monitors`` allows Prometheus
    to read metrics.
    """
    with contextlib.ExitStack() as undo:

        def create(path: str, body: dict[str, Any]) -> None:
            unless(409, installed, "POST", path, body)
            name = body["metadata"]["name"]
            undo.callback(unless, 404, installed, "DELETE", f"{path}/{name}", AT_ONCE)

        unless(409, installed, "POST", "/api/v1/namespaces", {"metadata": {"name": MONITORING}})
        for manifest in yaml.safe_load_all(
            (ROOT / "deploy/components/monitors/rbac.yaml").read_text()
        ):
            create(f"{RBAC}/{manifest['kind'].lower()}s", manifest)
        found = {}
        for name in (PROMETHEUS, TENANT):
            create(ACCOUNTS, {"metadata": {"name": name}})
            request = {"spec": {"expirationSeconds": 3600}}
            answer = installed.call("POST", f"{ACCOUNTS}/{name}/token", request)
            found[name] = answer["status"]["token"]
        yield found


@pytest.fixture
def review(installed: ControlPlane) -> Iterator[KubeReview]:
    """Return a client that requests reviews as the agent does, with the token that the kubelet
    mounts into its pod.
    """
    configuration = installed.configuration(token(installed, "agent-a"))
    configuration.no_proxy = "*"
    with ApiClient(configuration) as kube:
        yield KubeReview(of_client(kube))
        kube.rest_client.pool_manager.clear()


def status_of(answer: Answer | None) -> int:
    return 200 if answer is None else answer.status


def test_the_api_server_decides_which_client_reads_metrics(
    review: KubeReview, accounts: dict[str, str]
) -> None:
    assert review(accounts[PROMETHEUS]) is None
    rejected = review(accounts[TENANT])
    assert status_of(rejected) == 403
    assert rejected is not None
    user = f"system:serviceaccount:{MONITORING}:{TENANT}"
    assert rejected.body.decode() == (
        f"{user} may not get path /metrics; bind ClusterRole headroom-metrics "
        "(deploy/components/monitors) to it\n"
    )
    for unknown in ("guessed", accounts[PROMETHEUS][:-3] + "xyz", "a\u00e9\n"):
        assert status_of(review(unknown)) == 401


def test_an_agent_serves_metrics_only_to_prometheus(
    review: KubeReview, accounts: dict[str, str], world: ServedSample, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "headroom-ca")
    signed = authority.sign("agent")
    world.board.set(GPUNodeStatus(devices=[shared("GPU-1")]))
    tls = ServingTls(signed.cert, signed.key)
    access = MetricsAccess(review, time.monotonic)
    server = Server(
        world.board,
        *("127.0.0.1", 0, 0, None, {}),
        metrics_port=MetricsPort("127.0.0.1", 0, tls, access),
    )
    server.start()
    try:
        for shown, expected in ((accounts[PROMETHEUS], 200), (accounts[TENANT], 403), ("x", 401)):
            with contextlib.closing(connection(server, authority)) as scraper:
                status, body = asked(scraper, shown)
            assert (status, "GPU-1" in body) == (expected, expected == 200)
        with contextlib.closing(connection(server, authority)) as scraper:
            assert asked(scraper, None)[0] == 401
    finally:
        server.stop()
