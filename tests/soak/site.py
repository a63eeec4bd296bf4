"""Runs a control plane and all processes of Headroom, with connections that can be cut.

The processes start as in their images, because forks of the test process would share memory with
it. Settings are as deployed, except for addresses and certificates.
"""

import contextlib
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

import urllib3
import yaml

from benchmarks.scale_objects import cluster_objects, fill
from tests.admission.site import ADMISSION, webhooks
from tests.agent.whole import Whole
from tests.controlplane import ROOT, ControlPlane
from tests.driver import AGENT_PATH, GIB, Gpu
from tests.e2e.cluster import SHIPPED, Cluster
from tests.e2e.conftest import SparingPlane
from tests.loopback import LOOPBACK
from tests.processes import free_ports
from tests.reverse_proxy import Proxies, Service, Wire
from tests.soak.judge import Memory, limits
from tests.standin.fleet import NODES, node_status
from tests.waiting import until

PARTS = ("extender", "console", "webhook", "recorder", "agent")
ALTERED = "-altered"
#: Number of replicas of each GPU on an agent's node.
REPLICAS = 8
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
PROFILES = "/apis/headroom.gpu/v1alpha1/vramprofiles"
#: This timeout is long, because the machine may run other tests at the same time.
PATIENCE_S = 300.0


class SoakPlane(SparingPlane):
    """A control plane whose only controller is the garbage collector."""

    controllers = ("garbage-collector-controller",)


class AgentNode:
    """A node with a real agent that reads one folder. The pods of this node do not exist in the API
    server.
    """

    def __init__(self, plane: ControlPlane, agent: str) -> None:
        self.name = f"node-of-{agent}"
        gpus = [Gpu(f"GPU-{agent}-{index}", 80 * GIB, 0) for index in range(8)]
        folder = plane.folder / self.name
        folder.mkdir()
        self.whole = Whole(folder, gpus, REPLICAS)
        (self.local_port,) = free_ports(1)
        self._plane = plane

    def create(self) -> None:
        self._plane.call("POST", NODES, {"metadata": {"name": self.name}})
        count = len(self.whole.node.gpus) * REPLICAS
        status = node_status(count, count)
        self._plane.call("PATCH", f"{NODES}/{self.name}/status", status)

    def replace_pods(self, count: int, prefix: str) -> None:
        """End the ``count`` oldest pods, and start new pods until the node is full."""
        node = self.whole.node
        full = len(node.gpus) * REPLICAS
        for uid in [*node.pods][:count]:
            pid = node.processes[uid, "main"].pid
            shutil.rmtree(self.whole.cgroup(uid).parent)
            node.delete(uid)
            self.whole.end_process(pid)
        for index in range(full - len(node.pods)):
            self.whole.run(str(uuid4()), f"{prefix}-{index}", GIB // 2)

    def measured(self) -> bool:
        """Return whether the agent's newest sample shows all running pods."""
        answer = LOOPBACK.get(f"http://127.0.0.1:{self.local_port}/v1/report")
        return self.whole.node.pods.keys() <= {
            each["uid"] for each in answer.json().get("pods", ())
        }


class Site:
    """All processes. For each component in ``altered``, a second process with a mutant runs."""

    def __init__(
        self,
        plane: ControlPlane,
        altered: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.plane, self._settings = plane, settings or {}
        self.cluster = Cluster(plane, ())
        self.names = [*PARTS, *(f"{part}{ALTERED}" for part in altered)]
        ports = [*self.names, *(f"{each} verbs" for each in self.names if "extender" in each)]
        ports += [f"{each} metrics" for each in self.names if "agent" in each]
        self._ports = dict(zip(ports, free_ports(len(ports)), strict=True))
        self.agents = {
            each: AgentNode(plane, each) for each in self.names if each.startswith("agent")
        }
        self.wires = {name: Wire() for name in self.names}
        self.proxies = Proxies(plane.certificate)
        self._api_ports = {
            name: self.proxies.serve(Service({plane.url: wire}), tls=True)
            for name, wire in self.wires.items()
        }
        #: The connections of consoles to the extender's journal.
        self.journals = Wire()
        self._journal_port = self.proxies.serve(Service({self.url("extender"): self.journals}))
        self.memory = {name: Memory() for name in self.names}
        #: Number of responses in an hour by port and status.
        self.answers = Counter[tuple[int | None, int]]()
        allowed = limits()
        self.limits = {name: allowed[name.removesuffix(ALTERED)] for name in self.names}

    def url(self, name: str) -> str:
        """Return the URL of a process. ``name`` may also name another port, such as ``NAME
        metrics``.
        """
        tls = name.startswith("webhook") or name.endswith(" metrics")
        return f"{'https' if tls else 'http'}://127.0.0.1:{self._ports[name]}"

    def answered(self, name: str, status: int) -> int:
        """Return the number of responses with this status. An extender also has the name ``NAME
        verbs``, and an agent ``NAME metrics``.
        """
        return self.answers[self._ports[name], status]

    def start(self, nodes: int) -> None:
        """Start all processes in a cluster that will have ``nodes`` nodes, and wait until they are
        ready.
        """
        plane = self.plane
        profiles = yaml.safe_load((ROOT / "deploy/base/crd-vramprofile.yaml").read_text())
        plane.call("POST", CRDS, profiles)
        until(lambda: self._served(PROFILES), "VRAMProfiles are served", PATIENCE_S)
        self.cluster.create()
        plane.kill("kube-apiserver")
        fill(plane, with_long_names(cluster_objects(nodes, 0, 0)))
        plane.start_apiserver(PATIENCE_S)
        for agent in self.agents.values():
            agent.create()
        for name in self.names:
            self._start(name, name.removesuffix(ALTERED))
        for each in webhooks(self.url("webhook"), plane.certificate):
            plane.call("POST", f"{ADMISSION}/{each['kind'].lower()}s", each)
        plane.start_controller_manager()
        plane.start_scheduler(self.url("extender verbs"))
        until(self._ready, "all processes are ready", PATIENCE_S, logs=plane.logs)

    def _start(self, name: str, part: str) -> None:
        port, plane = self._ports[name], self.plane
        cert, key = str(plane.certificate.cert), str(plane.certificate.key)
        token = f"{part}-of-the-tests"
        env = {
            "KUBECONFIG": str(plane.kubeconfig(token, port=self._api_ports[name])),
            "PYTHONPATH": str(ROOT),
        }
        settings: dict[str, Any] = {**SHIPPED, **self._settings, "debug_port": port}
        match part:
            case "agent":
                node = self.agents[name]
                flags = [f"--node={node.name}", "--interval=1", "--heartbeat=10"]
                flags += [f"--listen=127.0.0.1:{port}", *node.whole.flags]
                flags += [f"--local-port={node.local_port}"]
                flags += [f"--metrics-listen=127.0.0.1:{self._ports[f'{name} metrics']}"]
                flags += [f"--tls-cert={cert}", f"--tls-key={key}"]
                env |= {**node.whole.environment, "PYTHONPATH": AGENT_PATH}
                self._spawn(name, part, "agent", *flags, env=env)
                return
            case "extender":
                verbs = self._ports[f"{name} verbs"]
                settings |= {"insecure_verbs": True, "verbs_port": verbs}
            case "console":
                settings |= {"extenders": [f"127.0.0.1:{self._journal_port}"]}
            case "webhook":
                settings |= {"webhook_tls_cert": cert, "webhook_tls_key": key}
                settings |= {"webhook_port": port, "debug_port": 0}
        file = plane.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(settings))
        self._spawn(name, part, "headroom", part, "--config", str(file), env=env)

    def _spawn(self, name: str, part: str, *command: str, env: Mapping[str, str]) -> None:
        mutant = part if name.endswith(ALTERED) else "none"
        # Start the agent directly, because its image does not contain the extender.
        started = () if name == "agent" else ("tests.soak.started", mutant)
        self.plane.spawn(name, sys.executable, "-m", *started, *command, env=env)

    def _served(self, path: str) -> bool:
        with contextlib.suppress(Exception):
            self.plane.call("GET", path)
            return True
        return False

    def _ready(self) -> bool:
        self.plane.raise_if_ended()
        authority = str(self.plane.ca_file)
        with urllib3.PoolManager(ca_certs=authority, retries=False, timeout=5.0) as http:
            try:
                answers = [http.request("GET", f"{self.url(each)}/readyz") for each in self.names]
            except urllib3.exceptions.HTTPError:
                return False
        return all(each.status == 200 for each in answers)

    def cut(self) -> None:
        """Cut all watches and all other open connections."""
        for wire in (*self.wires.values(), self.journals):
            wire.cut()

    def sample(self) -> None:
        """Sample the memory of all processes. Call this while the processes are idle."""
        for name, memory in self.memory.items():
            memory.sample(self.plane.pid(name))

    def stop(self) -> None:
        self.proxies.stop()
        for agent in self.agents.values():
            agent.whole.stop()


def with_long_names(objects: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Give nodes very long names, so that a process that keeps names grows visibly."""
    for key, found in objects:
        name = found["metadata"]["name"] = f"{found['metadata']['name']}-{'x' * 200}"
        yield f"{key.rpartition('/')[0]}/{name}", found


@contextlib.contextmanager
def running(
    nodes: int, altered: Sequence[str] = (), settings: Mapping[str, Any] | None = None
) -> Iterator[Site]:
    plane = SoakPlane()
    try:
        plane.start()
        plane.install_crd()
        site = Site(plane, altered, settings)
        try:
            site.start(nodes)
            yield site
        finally:
            site.stop()
    finally:
        plane.stop()
