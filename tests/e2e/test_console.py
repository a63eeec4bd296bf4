"""Runs an extender and a console as separate processes, each with the permissions of its own
account.
"""

import json
import os
from typing import Any

import httpx

from tests import forks
from tests.controlplane import ADMIN_TOKEN, ControlPlane
from tests.e2e.cluster import PODS, Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.nodes import GIB, Shape
from tests.loopback import LOOPBACK
from tests.processes import free_ports


class Apart:
    """The extender and the console of a cluster. Readers of both processes need a token."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.plane = cluster, cluster.plane
        self.verbs, self.journal, self.debug = free_ports(3)

    def start_extender(self, **settings: Any) -> None:
        config = self.plane.folder / "extender.yaml"
        config.write_text(json.dumps(settings))
        ports = ("--verbs-port", str(self.verbs), "--debug-port", str(self.journal))
        ports += ("--insecure-verbs",)
        self._fork("extender", "--config", str(config), *ports)

    def start_console(self, follows: int | None = None) -> None:
        """Start a console. It follows the journal at port ``follows``, by default the extender's
        journal.
        """
        config = self.plane.folder / "console.yaml"
        config.write_text(f"extenders: [127.0.0.1:{follows or self.journal}]\n")
        self._fork("console", "--config", str(config), "--debug-port", str(self.debug))

    def _fork(self, part: str, *arguments: str) -> None:
        kubeconfig = self.plane.kubeconfig(f"{part}-of-the-tests")
        self.plane.fork(part, "headroom", part, *arguments, env={"KUBECONFIG": str(kubeconfig)})
        self.cluster._started.append(part)

    def get(self, path: str) -> Any:
        """Return the console's response, or None if its status is not 200."""
        url = f"http://127.0.0.1:{self.debug}{path}"
        shown = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        try:
            answer = LOOPBACK.get(url, headers=shown)
        except httpx.TransportError:
            return None
        return answer.json() if answer.status_code == 200 else None

    def decisions(self) -> dict[str, str]:
        """Return the node in the last decision for each pod."""
        found = (self.get("/v1/decisions") or {}).get("decisions", [])
        return {each["name"]: each["node"] for each in reversed(found)}


def test_the_console_shows_the_extenders_decisions_and_each_runs_without_the_other(
    new_cluster: NewCluster, plane: ControlPlane
) -> None:
    cluster = new_cluster(2)
    apart = Apart(cluster)
    apart.start_extender()
    apart.start_console()
    cluster.start_scheduler(f"http://127.0.0.1:{apart.verbs}")
    cluster.settle()
    cluster.create_pod("first", "20Gi")
    cluster.until(lambda: bool(cluster.node_of("first")), "the first pod is bound")
    cluster.until(lambda: apart.decisions().get("first") == cluster.node_of("first"), "it is shown")
    cluster.create_pod("large", "30Gi")
    cluster.until(lambda: bool(cluster.rejection("large")), "the large one waits")
    cluster.until(lambda: "large" in apart.decisions(), "its decision is known")
    explained = apart.get("/v1/explain?pod=e2e/large")
    assert explained["verdict"] == "rejected"
    assert explained["last_decision"]["filter"]["offered"] == 2
    assert explained["unanswered"] == []
    (extender,) = apart.get("/v1/status")["peers"]
    assert extender["replica"] == explained["last_decision"]["filter"]["replica"]

    cluster.kill("console")
    cluster.create_pod("second", "20Gi")
    cluster.until(lambda: bool(cluster.node_of("second")), "pods are bound without a console")
    apart.start_console()
    cluster.until(
        lambda: (
            apart.decisions().get("second") == cluster.node_of("second")
            and {"first", "large"} <= apart.decisions().keys()
        ),
        "a new console receives what was decided meanwhile and before",
    )

    cluster.kill("extender")
    cluster.until(
        lambda: bool((apart.get("/v1/decisions") or {}).get("unanswered")), "it is named as gone"
    )
    assert {"first", "second", "large"} <= apart.decisions().keys()
    assert apart.get("/v1/capacity?vram=1Gi")["snapshot_generation"] > 0


def test_a_reader_without_permission_gets_the_same_response_from_console_and_extender(
    new_cluster: NewCluster,
) -> None:
    apart = Apart(new_cluster(1))
    apart.start_extender()
    apart.start_console()
    cluster = apart.cluster
    for port, path in ((apart.journal, "/v1/journal"), (apart.debug, "/v1/nodes")):
        url = f"http://127.0.0.1:{port}"

        def answers(url: str = url) -> bool:
            try:
                return LOOPBACK.get(f"{url}/healthz").status_code == 200
            except httpx.TransportError:
                return False

        cluster.until(answers, f"{url} answers")
        assert LOOPBACK.get(url + path).status_code == 401
        outsider = {"Authorization": "Bearer stranger-of-the-tests"}
        assert LOOPBACK.get(url + path, headers=outsider).status_code == 403
    # Only the console and Prometheus may read from the extender's journal port.
    url = f"http://127.0.0.1:{apart.journal}/v1/nodes"
    admin = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    assert LOOPBACK.get(url, headers=admin).status_code == 404


def test_a_pod_that_uses_a_gpu_without_a_request_is_reported(new_cluster: NewCluster) -> None:
    """The console finds the pod on its node, and `headroom doctor` also reports the pod."""
    cluster = new_cluster(1, Shape(gpus=1))
    apart = Apart(cluster)
    apart.start_extender()
    apart.start_console()
    cluster.settle()
    (node,) = cluster.names
    container = {"name": "main", "image": "nvidia/cuda"}
    pod = {"metadata": {"name": "ray-head"}, "spec": {"nodeName": node, "containers": [container]}}
    cluster.nodes.use_unasked(cluster.plane.call("POST", PODS, pod), 0, 9 * GIB)
    cluster.nodes.report(cluster.names)

    def named() -> list[tuple[str, str, int]]:
        rows = (apart.get("/v1/pods") or {}).get("pods", [])
        return [(each["namespace"], each["name"], each["used_bytes"]) for each in rows]

    cluster.until(lambda: named() == [("e2e", "ray-head", 9 * GIB)], "the pod is named")
    kubeconfig = cluster.plane.kubeconfig("extender-of-the-tests")
    done = forks.run("headroom", "doctor", "--kubeconfig", str(kubeconfig), env=dict(os.environ))
    assert "warning: e2e/ray-head: these pods use GPUs but request none" in done.stdout
