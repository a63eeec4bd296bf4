"""All that a storm befalls: API server, schedulers, extenders, nodes, clients, and their wires.

Nodes are of three sorts, so that most of what is promised can be judged exactly: one shared GPU
(there is no device to choose), two where a pod must fit on either (``any``), two where the choice
is predicted.
"""

import json
import shutil
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.certificates import Authority
from tests.chaos.agents import Agents, Mood
from tests.chaos.audit import Auditor, Finding, Holding, Machine, Use
from tests.chaos.clock import Clock, moved
from tests.chaos.follow import Follower
from tests.chaos.kubelets import AWAY, Kubelets
from tests.chaos.load import NAMESPACE, Clients
from tests.chaos.storm import Targets
from tests.controlplane import ROOT, ControlPlane, free_ports
from tests.driver import GIB, Driver, Gpu
from tests.e2e.cluster import GPUNODES, Cluster
from tests.e2e.nodes import SYSTEM_NAMESPACE
from tests.standin.node import StandIn
from tests.standin.plugin import Settings, device_of

GPU_BYTES = 24 * GIB
SCHEDULERS = ("kube-scheduler", "kube-scheduler-1.35")
EXTENDERS = ("extender-a", "extender-b", "extender-c")
MERGE = "application/merge-patch+json"


@dataclass(frozen=True, slots=True)
class Scale:
    """How large all is, and how fast; seconds as in the settings of extender and agent."""

    nodes: int = 20
    clients: int = 3
    #: Pods created each second, by all clients, and how many each keeps at most.
    rate: float = 4.0
    most_pods: int = 60
    admission_s: float = 1.5
    agent_interval_s: float = 2.0
    heartbeat_s: float = 30.0
    settings: Mapping[str, Any] | None = None


def shape(index: int) -> tuple[int, int, str]:
    """GPUs of a node, replicas of each, and who chooses the device."""
    return ((1, 16, ""), (1, 16, ""), (2, 8, "any"), (2, 8, ""))[index % 4]


class Site:
    """``code`` is where the extenders' packages are imported from."""

    def __init__(self, plane: ControlPlane, scale: Scale, seed: int, code: Path = ROOT) -> None:
        self.plane, self.scale, self.seed = plane, scale, seed
        self._code = code
        names = [f"gpu-{i + 1:02}" for i in range(scale.nodes)]
        self._shapes = dict(zip(names, map(shape, range(scale.nodes)), strict=True))
        self.cluster = Cluster(plane, names)
        self.folder = plane.folder / "chaos"
        self.folder.mkdir()
        self.nodes = {name: self._stand_in(name) for name in names}
        began_s = time.monotonic()
        #: Held by whoever speaks with the auditor; where a node is held as well, that comes first.
        self.books = threading.RLock()
        self.auditor = Auditor(
            {
                name: Machine(
                    {gpu.uuid: gpu.memory_bytes for gpu in self.nodes[name].gpus},
                    replicas,
                    predicted=gpus > 1 and not choice,
                )
                for name, (gpus, replicas, choice) in self._shapes.items()
            },
            now_s=lambda: time.monotonic() - began_s,
        )
        self.kubelets = Kubelets(plane, self.nodes, self.look, seed, scale.admission_s)
        self.agents = Agents(
            plane,
            self.nodes,
            SYSTEM_NAMESPACE,
            scale.agent_interval_s,
            scale.heartbeat_s,
            seed,
        )
        self.clients = Clients(plane, names, scale.clients, scale.rate, scale.most_pods, seed)
        self._followers = [
            Follower(plane, "/api/v1/pods", self._pods_told, self.kubelets.told),
            Follower(plane, GPUNODES, self._gpunodes_told),
        ]
        count = len(EXTENDERS)
        self._verbs_ports, self._debug_ports = free_ports(2 * count)[::2], free_ports(count)
        self._wire_ports = free_ports(count)
        self.port, self._control_port = free_ports(2)
        self.clocks = {name: Clock(self.folder / f"{name}.clock") for name in EXTENDERS}
        self._done: Counter[str] = Counter()

    @property
    def targets(self) -> Targets:
        return Targets(EXTENDERS, SCHEDULERS, tuple(self.nodes))

    @property
    def moods(self) -> Mapping[str, Mood]:
        return self.agents.moods

    def _stand_in(self, name: str) -> StandIn:
        gpus, replicas, _ = self._shapes[name]
        devices = [Gpu(f"GPU-{name}-{i}", GPU_BYTES, reserved_bytes=0) for i in range(gpus)]
        driver = Driver(self.folder / f"{name}.table", devices)
        return StandIn(
            devices, Settings(replicas), seed=hash_of(f"{self.seed} {name}"), driver=driver
        )

    # Up and down.

    def start(self) -> None:
        """Returns when every node takes pods."""
        self.cluster.create()
        self.plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        for follower in self._followers:
            follower.start()
        self.kubelets.start()
        for name, (_, _, choice) in self._shapes.items():
            if choice:
                annotations = {"headroom.gpu/device-choice": choice}
                body = {"metadata": {"annotations": annotations}}
                self.plane.call("PATCH", f"/api/v1/nodes/{name}", body, MERGE)
        self.agents.start()
        self._start_wires()
        for name in EXTENDERS:
            self.start_extender(name)
        for name in SCHEDULERS:
            self.start_scheduler(name)
        self.until(self.cluster.initialised, "all GPUNodes are initialised", 120.0)

    def stop(self) -> None:
        self.clients.stop()
        self.agents.stop()
        for follower in self._followers:
            follower.stop()
        self.kubelets.stop()

    def _start_wires(self) -> None:
        # Certificates as they are in clusters: older than any clock is wrong.
        yesterday = Clock(self.folder / "yesterday.clock")
        yesterday.move(-86_400.0)
        with moved(yesterday):
            authority = Authority(self.folder, "authority")
            signed = authority.sign("wires")
        self._ca = authority.cert
        config = {
            "seed": self.seed,
            "cert": str(signed.cert),
            "key": str(signed.key),
            "ca": str(self.plane.ca_file),
            "upstream_port": self.plane.port,
            "wires": [
                {"name": name, "port": port}
                for name, port in zip(EXTENDERS, self._wire_ports, strict=True)
            ],
            "backends": self._verbs_ports,
            "port": self.port,
            "control_port": self._control_port,
        }
        path = self.folder / "wires.json"
        path.write_text(json.dumps(config))
        command = (sys.executable, "-m", "tests.chaos.proxy", str(path))
        self.plane.spawn("wires", *command, env={"PYTHONPATH": str(ROOT)})
        self.until(lambda: self._answers(self._control_port), "the wires are up", 30.0)

    def start_extender(self, name: str) -> None:
        """As it is deployed, but for its way to the API server and for its clock."""
        index = EXTENDERS.index(name)
        config = self.folder / "extender.yaml"
        config.write_text(yaml.safe_dump(dict(self.scale.settings or {})))
        self.plane.spawn(
            name,
            *(sys.executable, "-m", "extender", "serve", "--debug-open", "--config", str(config)),
            *("--verbs-port", str(self._verbs_ports[index])),
            *("--debug-port", str(self._debug_ports[index])),
            env={
                "KUBECONFIG": str(self._kubeconfig(name)),
                "PYTHONPATH": str(self._code),
                **self.clocks[name].environment,
            },
        )

    def start_scheduler(self, name: str) -> None:
        """Several of them want the same pods, as those do that do not know who leads."""
        self.plane.start_scheduler(f"http://127.0.0.1:{self.port}", name)

    def _kubeconfig(self, name: str) -> Path:
        """Through its own wire."""
        content = json.loads(self.plane.kubeconfig("extender-of-the-tests").read_text())
        cluster = content["clusters"][0]["cluster"]
        cluster["server"] = f"https://127.0.0.1:{self._wire_ports[EXTENDERS.index(name)]}"
        cluster["certificate-authority"] = str(self._ca)
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(content))
        return path

    # Wires.

    def wire(self, told: dict[str, Any]) -> Counter[str]:
        """Tell the wires how to be; how often what has happened there so far."""
        with socket.create_connection(("127.0.0.1", self._control_port), 10.0) as control:
            control.sendall(json.dumps(told).encode() + b"\n")
            with control.makefile("rb") as answer:
                counts = json.loads(answer.readline())
        return sum((Counter(each) for each in counts.values()), Counter())

    def _answers(self, port: int) -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            return False
        return True

    # What the auditor is told.

    def look(self, node: str) -> None:
        """The node as it is now; its lock is held, or nobody else is there."""
        stand_in = self.nodes[node]
        listed = stand_in.pod_resources()
        holdings = [
            Holding(pod.uid, container, device_of(replica.id))
            for pod, given in listed
            for container, replicas in given.items()
            for replica in replicas
        ]
        uses = [
            Use(process.uid, device, used_bytes)
            for process in list(stand_in.processes.values())
            for device, used_bytes in process.used_bytes.items()
        ]
        with self.books:
            self.auditor.look(node, holdings, uses)

    def look_everywhere(self) -> None:
        for name, node in self.nodes.items():
            with node.lock:
                self.look(name)
            assert node.driver is not None
            for device, least_bytes in node.driver.least_free_bytes.items():
                if least_bytes < 0:
                    with self.books:
                        self.auditor.overdrawn(name, device)

    def _pods_told(self, what: str, pods: Any) -> None:
        with self.books:
            if what == "LISTED":
                self.auditor.listed(pods)
            elif what == "DELETED":
                self.auditor.pod_gone(pods[0]["metadata"]["uid"])
            else:
                self.auditor.pod(pods[0])

    def _gpunodes_told(self, what: str, gpunodes: Any) -> None:
        with self.books:
            for gpunode in gpunodes:
                if what == "DELETED":
                    self.auditor.gpunode_gone(gpunode["metadata"]["name"])
                else:
                    self.auditor.gpunode(gpunode)

    def wrong(self, in_the_end: bool = False) -> list[Finding]:
        """What was at any moment; in the end, what still is as well."""
        with self.books:
            return [*self.auditor.findings, *(self.auditor.settled() if in_the_end else ())]

    def keep_up(self) -> None:
        """Start again what a machine would: an API server, say, that has waited for etcd for too
        long. Raises ``AssertionError`` of an extender, which has no reason to end by itself."""
        again: dict[str, Callable[[], None]] = {
            "etcd": self.plane.spawn_etcd,
            "kube-apiserver": self.plane.spawn_apiserver,
            **{name: partial(self.start_scheduler, name) for name in SCHEDULERS},
        }
        for name, start in again.items():
            if self.plane.ended(name):
                self.plane.kill(name)
                start()
        for name in (*EXTENDERS, "wires"):
            assert not self.plane.ended(name), f"{name} ended by itself:\n{self.plane.log(name)}"

    def healthy(self) -> None:
        """Raises what went wrong in the test's own threads."""
        for each in (*self._followers, self.kubelets):
            if each.failure is not None:
                raise each.failure

    def until(self, true: Callable[[], object], what: str, patience_s: float) -> None:
        deadline_s = time.monotonic() + patience_s
        while True:
            self.healthy()
            try:
                if true():
                    return
            except AWAY:
                pass
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not within {patience_s:.0f} s: {what}\n{self.plane.logs()}")
            time.sleep(0.2)

    def keep_logs(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for log in self.plane.folder.glob("*.log"):
            shutil.copy(log, folder)


def hash_of(text: str) -> int:
    """The same in every process, other than ``hash``."""
    return sum(ord(char) * 31**place for place, char in enumerate(text)) % (1 << 32)
