"""All that a storm befalls: API server, schedulers, extenders, consoles, webhooks, nodes, clients,
and their wires.

There are three kinds of nodes, so that most reservations can be judged exactly: one shared GPU
(there is no device to choose), two where a pod must fit on either (``any``), two where the choice
is predicted.
"""

import json
import os
import shutil
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.admission.site import ADMISSION, webhooks
from tests.certificates import Authority
from tests.chaos.agents import Agents, Mood
from tests.chaos.audit import Auditor, Finding, Holding, Machine, Use
from tests.chaos.calls import Call, noticed
from tests.chaos.clock import Clock, moved
from tests.chaos.follow import Follower
from tests.chaos.kubelets import AWAY, Kubelets
from tests.chaos.load import NAMESPACE, Clients
from tests.chaos.storm import Targets
from tests.controlplane import ROOT, ControlPlane, scheduler_configuration
from tests.driver import GIB, Driver, Gpu
from tests.e2e.cluster import GPUNODES, Cluster
from tests.e2e.nodes import SYSTEM_NAMESPACE
from tests.processes import free_ports
from tests.standin.node import StandIn
from tests.standin.plugin import Settings, device_of

GPU_BYTES = 24 * GIB
SCHEDULERS = ("kube-scheduler", "kube-scheduler-1.35")
EXTENDERS = ("extender-a", "extender-b", "extender-c")
CONSOLES = ("console-a", "console-b")
WEBHOOKS = ("webhook-a", "webhook-b")
#: Each with a wire of its own.
WIRED = (*EXTENDERS, *CONSOLES, *WEBHOOKS)
#: kube-scheduler's limit for a call. Of prioritize as well: 0.5 s, as shipped, can pass on a busy
#: machine whatever an extender does.
TIMEOUT_S = 5.0
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
        #: Held while a thread uses the auditor; taken before a node's lock.
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
        #: Port of each process for its readers: journal, debug API or reviews.
        self._ports = dict(zip(WIRED, free_ports(len(WIRED)), strict=True))
        self._wire_ports = dict(zip(WIRED, free_ports(len(WIRED)), strict=True))
        self._verbs_ports = dict(zip(EXTENDERS, free_ports(len(EXTENDERS)), strict=True))
        #: Console -> address of the journals.
        self._journal_ports = {name: free_ports(len(EXTENDERS)) for name in CONSOLES}
        self.port, self._webhooks_port, self._control_port = free_ports(3)
        self.clocks = {name: Clock(self.folder / f"{name}.clock") for name in EXTENDERS}
        self._done: Counter[str] = Counter()

    @property
    def targets(self) -> Targets:
        return Targets(EXTENDERS, SCHEDULERS, tuple(self.nodes), CONSOLES, WEBHOOKS)

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
        for name in (*WIRED, *SCHEDULERS):
            self.start_process(name)
        for each in webhooks(f"https://127.0.0.1:{self._webhooks_port}", self._authority):
            self.plane.call("POST", f"{ADMISSION}/{each['kind'].lower()}s", each)
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
            self._authority = Authority(self.folder, "authority")
            self._signed = self._authority.sign("wires")
        services = {
            self.port: [(port, name) for name, port in self._verbs_ports.items()],
            self._webhooks_port: [(self._ports[name], name) for name in WEBHOOKS],
        }
        for console, ports in self._journal_ports.items():
            for port, name in zip(ports, EXTENDERS, strict=True):
                services[port] = [(self._ports[name], console)]
        config = {
            "seed": self.seed,
            "cert": str(self._signed.cert),
            "key": str(self._signed.key),
            "ca": str(self.plane.ca_file),
            "upstream_port": self.plane.port,
            "wires": [{"name": name, "port": port} for name, port in self._wire_ports.items()],
            "services": [{"port": port, "backends": each} for port, each in services.items()],
            "port": self.port,
            "control_port": self._control_port,
        }
        path = self.folder / "wires.json"
        path.write_text(json.dumps(config))
        command = (sys.executable, "-m", "tests.chaos.proxy", str(path))
        self.plane.spawn("wires", *command, env={"PYTHONPATH": str(ROOT)})
        self.until(lambda: self._answers(self._control_port), "the wires are up", 30.0)

    def start_process(self, name: str) -> None:
        """As it is deployed, but for its way to the API server, and for an extender's clock."""
        part, _, target = name.partition("-of-")
        match part.partition("-")[0]:
            case "kube" if name == "kube-apiserver":
                self.plane.spawn_apiserver()
            case "etcd":
                self.plane.spawn_etcd()
            case "kube":
                self._start_scheduler(name)
            case "flood":
                url = (
                    f"{'https' if target in WEBHOOKS else 'http'}://127.0.0.1:{self._ports[target]}"
                )
                self.plane.fork(name, "tests.chaos.flood", url, env={})
            case "extender":
                self._start_extender(name)
            case "console":
                places = [f"127.0.0.1:{port}" for port in self._journal_ports[name]]
                self._fork(name, "console", extenders=places, debug_open=True)
            case "webhook":
                tls = {"webhook_tls_cert": self._signed.cert, "webhook_tls_key": self._signed.key}
                self._fork(name, "webhook", **{key: str(file) for key, file in tls.items()})
        if part.startswith(("flood", "console", "webhook")):
            # They have machines of their own: here they get what the others leave.
            os.setpriority(os.PRIO_PROCESS, self.plane.pid(name), 19)

    def _config(self, name: str, **settings: Any) -> tuple[str, str]:
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**(self.scale.settings or {}), **settings}))
        return "--config", str(file)

    def _fork(self, name: str, part: str, **settings: Any) -> None:
        port = {"console": "debug_port", "webhook": "webhook_port"}[part]
        config = self._config(name, **settings, **{port: self._ports[name]})
        env = {"KUBECONFIG": str(self._kubeconfig(name, part))}
        self.plane.fork(name, "extender", part, *config, env=env)

    def _start_extender(self, name: str) -> None:
        self.plane.spawn(
            name,
            *(sys.executable, "-m", "extender", "extender", *self._config("extender")),
            *("--verbs-port", str(self._verbs_ports[name])),
            *("--debug-port", str(self._ports[name])),
            env={
                "KUBECONFIG": str(self._kubeconfig(name, "extender")),
                "PYTHONPATH": str(self._code),
                # For mutants that ask them.
                "CHAOS_CONSOLE": str(self._ports[CONSOLES[0]]),
                "CHAOS_WEBHOOK": str(self._ports[WEBHOOKS[0]]),
                **self.clocks[name].environment,
            },
        )

    def _start_scheduler(self, name: str) -> None:
        """Several of them want the same pods, as those do that do not know who leads."""
        kubeconfig = self.plane.kubeconfig("scheduler-of-the-tests")
        content = scheduler_configuration(f"http://127.0.0.1:{self.port}", kubeconfig)
        for each in content["extenders"]:
            each["httpTimeout"] = f"{TIMEOUT_S}s"
        self.plane.spawn_scheduler(name, content, name)

    def _kubeconfig(self, name: str, part: str) -> Path:
        """Through its own wire."""
        content = json.loads(self.plane.kubeconfig(f"{part}-of-the-tests").read_text())
        cluster = content["clusters"][0]["cluster"]
        cluster["server"] = f"https://127.0.0.1:{self._wire_ports[name]}"
        cluster["certificate-authority"] = str(self._authority.cert)
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(content))
        return path

    # Wires.

    def wire(self, told: dict[str, Any]) -> Counter[str]:
        """Set the behaviour of the proxies; return how often each fault has happened so far."""
        counts = self._control(told)["done"].values()
        return sum((Counter(each) for each in counts), Counter())

    def calls(self) -> list[Call]:
        """kube-scheduler's, since this was asked last."""
        return [Call(**each) for each in self._control({"calls": True})["calls"]]

    def _control(self, told: dict[str, Any]) -> dict[str, Any]:
        with socket.create_connection(("127.0.0.1", self._control_port), 10.0) as control:
            control.sendall(json.dumps(told).encode() + b"\n")
            with control.makefile("rb") as answer:
                answered: dict[str, Any] = json.loads(answer.readline())
        return answered

    def _answers(self, port: int) -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            return False
        return True

    # Sent to the auditor.

    def look(self, node: str) -> None:
        """The node as it is now; the caller holds its lock, or is the only thread."""
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
        """Findings at any moment; at the end, also those that remain."""
        with self.books:
            return [*self.auditor.findings, *(self.auditor.settled() if in_the_end else ())]

    def unlike(self, before: Sequence[Call], during: Sequence[Call]) -> list[Finding]:
        """The effects on kube-scheduler."""
        with self.books:
            return [*noticed(before, during, TIMEOUT_S, self.auditor.fates)]

    def keep_up(self) -> None:
        """Restart what a machine would, for example an API server that waited too long for etcd.

        Raises ``AssertionError`` for our processes, which have no reason to end by themselves.
        """
        for name in ("etcd", "kube-apiserver", *SCHEDULERS):
            if self.plane.ended(name):
                self.plane.kill(name)
                self.start_process(name)
        for name in (*WIRED, "wires"):
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
