"""Everything that a storm affects: control plane, schedulers, Headroom, proxies, nodes and clients.

Nodes have one shared GPU, or two on which a pod must fit on either (``any``). So no device is
predicted, and every rule of the auditor is exact.
"""

import json
import os
import random
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

import urllib3
import yaml

from tests.admission.site import ADMISSION, webhooks
from tests.chaos.agents import Agents
from tests.chaos.audit import Auditor, Finding, Holding, Machine, Use
from tests.chaos.calls import Call, noticed
from tests.chaos.clock import Clock
from tests.chaos.kubelets import AWAY, Kubelets
from tests.chaos.load import NAMESPACE, Client
from tests.controlplane import ROOT, ControlPlane, scheduler_configuration
from tests.driver import GIB, Driver, Gpu
from tests.e2e.cluster import GPUNODES, Cluster
from tests.e2e.nodes import SYSTEM_NAMESPACE
from tests.follow import Follower
from tests.processes import free_ports
from tests.standin.node import StandIn
from tests.standin.plugin import Settings, device_of
from tests.waiting import until

GPU_BYTES = 24 * GIB
SCHEDULERS = ("kube-scheduler", "kube-scheduler-1.35")
EXTENDERS = ("extender-a", "extender-b", "extender-c")
CONSOLES = ("console-a", "console-b")
WEBHOOKS = ("webhook-a", "webhook-b")
#: Processes with a wire of their own.
WIRED = (*EXTENDERS, *CONSOLES, *WEBHOOKS)
#: kube-scheduler's limit for a call. Also of prioritize, which has 0.5 s as shipped: too little for
#: a busy machine.
TIMEOUT_S = 5.0
MERGE = "application/merge-patch+json"


@dataclass(frozen=True, slots=True)
class Scale:
    nodes: int = 20
    clients: int = 3
    #: Pods created per second by all clients, and how many each keeps at most.
    rate: float = 4.0
    most_pods: int = 60
    admission_s: float = 1.5
    agent_interval_s: float = 2.0
    heartbeat_s: float = 30.0
    settings: Mapping[str, Any] | None = None


class Site:
    def __init__(self, plane: ControlPlane, scale: Scale, seed: int, code: Path = ROOT) -> None:
        """``code``: the folder that the extenders import their packages from."""
        self.plane, self.scale, self._seed, self._code = plane, scale, seed, code
        self.folder = plane.folder / "chaos"
        self.folder.mkdir()
        names = [f"gpu-{i + 1:02}" for i in range(scale.nodes)]
        self.cluster = Cluster(plane, names)
        #: Nodes with two GPUs.
        self._double = names[2::3]
        self.nodes = {name: self._stand_in(name) for name in names}
        began_s = time.monotonic()
        #: Held during all calls of the auditor. A node's lock is taken before it.
        self.books = threading.RLock()
        machines = {
            name: Machine({gpu.uuid: GPU_BYTES for gpu in node.gpus}, 16 // len(node.gpus))
            for name, node in self.nodes.items()
        }
        self.auditor = Auditor(machines, now_s=lambda: time.monotonic() - began_s)
        self.kubelets = Kubelets(plane, self.nodes, self.look, seed, scale.admission_s)
        pace_s = scale.agent_interval_s, scale.heartbeat_s
        self.agents = Agents(plane, self.nodes, SYSTEM_NAMESPACE, *pace_s, seed)
        self.clients = [
            Client(
                *(plane, names, f"c{i}", scale.rate / scale.clients, scale.most_pods),
                random.Random(f"{seed} client {i}"),
            )
            for i in range(scale.clients)
        ]
        self._followers = [
            Follower(plane, "/api/v1/pods", self._pods_changed, self.kubelets.pods_changed),
            Follower(plane, GPUNODES, self._gpunodes_changed),
        ]
        #: Ports of each process: its own, and of the service in front of the API server.
        self._ports = dict(zip(WIRED, free_ports(len(WIRED)), strict=True))
        self._api_ports = dict(zip(WIRED, free_ports(len(WIRED)), strict=True))
        self._verbs_ports = dict(zip(EXTENDERS, free_ports(len(EXTENDERS)), strict=True))
        #: Console -> ports of the services in front of the journals of all extenders.
        self._journal_ports = {name: free_ports(len(EXTENDERS)) for name in CONSOLES}
        self._port, self._webhooks_port, self._control_port = free_ports(3)
        self.clocks = {name: Clock(self.folder / f"{name}.clock") for name in EXTENDERS}
        self._http = urllib3.PoolManager(retries=False, timeout=10.0)

    def _stand_in(self, name: str) -> StandIn:
        count = 2 if name in self._double else 1
        gpus = [Gpu(f"GPU-{name}-{i}", GPU_BYTES, reserved_bytes=0) for i in range(count)]
        seed = random.Random(f"{self._seed} {name}").getrandbits(32)
        driver = Driver(self.folder / f"{name}.table", gpus)
        return StandIn(gpus, Settings(16 // count), seed=seed, driver=driver)

    def start(self) -> None:
        """Return when every node takes pods."""
        self.cluster.create()
        self.plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        for follower in self._followers:
            follower.start()
        self.kubelets.start()
        for name in self._double:
            body = {"metadata": {"annotations": {"headroom.gpu/device-choice": "any"}}}
            self.plane.call("PATCH", f"/api/v1/nodes/{name}", body, MERGE)
        self.agents.start()
        self._start_proxies()
        for name in (*WIRED, *SCHEDULERS):
            self.start_process(name)
        for each in webhooks(f"https://127.0.0.1:{self._webhooks_port}", self.plane.certificate):
            self.plane.call("POST", f"{ADMISSION}/{each['kind'].lower()}s", each)
        self.until(self.cluster.initialised, "all GPUNodes are initialised", 120.0)

    def stop(self) -> None:
        for each in (*self.clients, self.agents, *self._followers, self.kubelets):
            each.stop()

    def _start_proxies(self) -> None:
        def service(port: int, *backends: tuple[str, str], **options: bool) -> dict[str, Any]:
            usual = {"tls": False, "meddles": False, "records": False}
            return {"port": port, "backends": backends, **usual, **options}

        def at(port: int, scheme: str = "http") -> str:
            return f"{scheme}://127.0.0.1:{port}"

        verbs = [(at(port), name) for name, port in self._verbs_ports.items()]
        reviews = [(at(self._ports[name], "https"), name) for name in WEBHOOKS]
        services = [
            service(self._port, *verbs, records=True),
            service(self._webhooks_port, *reviews, tls=True),
            *(
                service(port, (self.plane.url, name), tls=True, meddles=True)
                for name, port in self._api_ports.items()
            ),
            *(
                service(port, (at(self._ports[extender]), console))
                for console, ports in self._journal_ports.items()
                for port, extender in zip(ports, EXTENDERS, strict=True)
            ),
        ]
        config = {
            "seed": self._seed,
            "cert": str(self.plane.certificate.cert),
            "key": str(self.plane.certificate.key),
            "services": services,
            "control_port": self._control_port,
        }
        path = self.folder / "proxy.json"
        path.write_text(json.dumps(config))
        command = (sys.executable, "-m", "tests.chaos.proxy", str(path))
        self.plane.spawn("proxies", *command, env={"PYTHONPATH": str(ROOT)})
        self.until(self._proxies_listen, "the proxies listen", 30.0)

    def _proxies_listen(self) -> bool:
        socket.create_connection(("127.0.0.1", self._control_port), 1.0).close()
        return True

    def start_process(self, name: str) -> None:
        """Start it as deployed, except for its way to the API server and an extender's clock."""
        part, _, target = name.partition("-of-")
        match part.partition("-")[0]:
            case "kube" if name == "kube-apiserver":
                self.plane.spawn_apiserver()
            case "etcd":
                self.plane.spawn_etcd()
            case "kube":
                self._start_scheduler(name)
            case "flood":
                scheme = "https" if target in WEBHOOKS else "http"
                url = f"{scheme}://127.0.0.1:{self._ports[target]}"
                self.plane.fork(name, "tests.flood", url, env={})
            case "extender":
                self._start_extender(name)
            case "console":
                places = [f"127.0.0.1:{port}" for port in self._journal_ports[name]]
                port = {"debug_port": self._ports[name]}
                self._fork(name, "console", extenders=places, debug_open=True, **port)
            case "webhook":
                cert, key = self.plane.certificate.cert, self.plane.certificate.key
                files = {"webhook_tls_cert": str(cert), "webhook_tls_key": str(key)}
                self._fork(name, "webhook", webhook_port=self._ports[name], **files)
        if part.startswith(("flood", "console", "webhook")):
            # They run on other machines: here they get the CPU that the extenders leave.
            os.setpriority(os.PRIO_PROCESS, self.plane.pid(name), 19)

    def _config(self, name: str, **settings: Any) -> tuple[str, str]:
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**(self.scale.settings or {}), **settings}))
        return "--config", str(file)

    def _fork(self, name: str, part: str, **settings: Any) -> None:
        env = {"KUBECONFIG": self._kubeconfig(name, part)}
        self.plane.fork(name, "extender", part, *self._config(name, **settings), env=env)

    def _start_extender(self, name: str) -> None:
        self.plane.spawn(
            name,
            *(sys.executable, "-m", "extender", "extender", *self._config("extender")),
            *("--verbs-port", str(self._verbs_ports[name])),
            *("--debug-port", str(self._ports[name])),
            env={
                "KUBECONFIG": self._kubeconfig(name, "extender"),
                "PYTHONPATH": str(self._code),
                # For the mutants that wait for them.
                "CHAOS_CONSOLE": str(self._ports[CONSOLES[0]]),
                "CHAOS_WEBHOOK": str(self._ports[WEBHOOKS[0]]),
                **self.clocks[name].environment,
            },
        )

    def _start_scheduler(self, name: str) -> None:
        """Start one of several that schedule the same pods: there is no leader election."""
        kubeconfig = self.plane.kubeconfig("scheduler-of-the-tests")
        content = scheduler_configuration(f"http://127.0.0.1:{self._port}", kubeconfig)
        for each in content["extenders"]:
            each["httpTimeout"] = f"{TIMEOUT_S}s"
        self.plane.spawn_scheduler(name, content, name)

    def _kubeconfig(self, name: str, part: str) -> str:
        return str(self.plane.kubeconfig(f"{part}-of-the-tests", port=self._api_ports[name]))

    def control(self, shown: Mapping[str, Any]) -> dict[str, Any]:
        """Set faults of wires (see ``proxy``). Return the counts of all requests, and calls."""
        url = f"http://127.0.0.1:{self._control_port}/"
        answered: dict[str, Any] = self._http.request("POST", url, json=shown).json()
        return answered

    def calls(self) -> list[Call]:
        """Return kube-scheduler's calls since the previous time."""
        return [Call(**each) for each in self.control({"calls": True})["calls"]]

    def look(self, node: str) -> None:
        """Pass the state of the node to the auditor. The caller holds the node's lock."""
        stand_in = self.nodes[node]
        holdings = [
            Holding(pod.uid, container, device_of(replica.id))
            for pod, given in stand_in.pod_resources()
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

    def _pods_changed(self, what: str, pods: Sequence[Any]) -> None:
        with self.books:
            if what == "LISTED":
                self.auditor.listed(pods)
            elif what == "DELETED":
                self.auditor.pod_gone(pods[0]["metadata"]["uid"])
            else:
                self.auditor.pod(pods[0])

    def _gpunodes_changed(self, what: str, gpunodes: Sequence[Any]) -> None:
        with self.books:
            for gpunode in gpunodes:
                if what == "DELETED":
                    self.auditor.gpunode_gone(gpunode["metadata"]["name"])
                else:
                    self.auditor.gpunode(gpunode)

    def wrong(self, in_the_end: bool = False) -> list[Finding]:
        """Return what was wrong at any moment, and ``in_the_end`` also what is wrong now."""
        with self.books:
            return [*self.auditor.findings, *(self.auditor.settled() if in_the_end else ())]

    def affected(self, before: Sequence[Call], during: Sequence[Call]) -> list[Finding]:
        with self.books:
            return [*noticed(before, during, TIMEOUT_S, self.auditor.fates)]

    def keep_up(self) -> None:
        """Restart what ended because of another fault: an API server without etcd, for example.

        Raises ``AssertionError`` if a process of Headroom ended by itself, and what failed in a
        thread of the test.
        """
        for name in ("etcd", "kube-apiserver", *SCHEDULERS):
            if self.plane.ended(name):
                self.plane.kill(name)
                self.start_process(name)
        for name in (*WIRED, "proxies"):
            assert not self.plane.ended(name), f"{name} ended by itself:\n{self.plane.log(name)}"
        for each in (*self._followers, self.kubelets):
            if each.failure is not None:
                raise each.failure

    def until(self, true: Callable[[], object], what: str, patience_s: float) -> None:
        def is_true() -> object:
            self.keep_up()
            try:
                return true()
            except AWAY:
                return False

        until(is_true, what, patience_s, 0.2, self.plane.logs)

    def keep_logs(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for log in self.plane.folder.glob("*.log"):
            shutil.copy(log, folder)

    def counts(self) -> dict[str, dict[str, int]]:
        did: Counter[str] = sum((each.did for each in self.clients), Counter())
        return {"requests": self.control({})["done"], "actions": dict(did)}
