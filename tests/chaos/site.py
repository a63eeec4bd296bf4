"""Everything that a storm affects: control plane, schedulers, Headroom, proxies, nodes and clients.

Nodes have one shared GPU, or two on which a pod must fit on either (``any``). So no device is
predicted, and every rule of the auditor is exact.
"""

import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from kubernetes.client import ApiClient

from agent.api_server import of_client
from agent.kube_publisher import KubernetesPublisher
from tests.admission.site import ADMISSION, webhooks
from tests.chaos.agents import Agent
from tests.chaos.audit import Auditor, Finding, Machine
from tests.chaos.load import AWAY, NAMESPACE, Client
from tests.chaos.proxy import Proxies, Service, Wire
from tests.controlplane import ROOT, ControlPlane, scheduler_configuration
from tests.driver import GIB, Driver, Gpu
from tests.e2e.cluster import GPUNODES, Cluster
from tests.e2e.nodes import SYSTEM_NAMESPACE
from tests.follow import Follower, Listen
from tests.processes import free_ports
from tests.standin.fleet import MERGE, NODES, Fleet
from tests.standin.node import StandIn
from tests.standin.plugin import Settings
from tests.waiting import until

GPU_BYTES = 24 * GIB
SCHEDULERS = ("kube-scheduler", "kube-scheduler-1.35")
EXTENDERS = ("extender-a", "extender-b", "extender-c")
CONSOLES = ("console-a", "console-b")
WEBHOOKS = ("webhook-a", "webhook-b")
#: The ports of kube-scheduler's calls.
VERBS = tuple(f"{name} verbs" for name in EXTENDERS)
#: Processes with a wire of their own.
WIRED = (*EXTENDERS, *CONSOLES, *WEBHOOKS)
#: kube-scheduler's limit for a call. Also of prioritize, which has 0.5 s as shipped: too little for
#: a busy machine.
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    lasts_s: float
    #: At first only consoles and webhooks have faults.
    alone_s: float = 0.0
    #: Mean time between faults, and the longest duration of one.
    every_s: float = 4.0
    longest_s: float = 150.0
    #: How long nothing needs to improve after the storm, with default settings: a silent node is
    #: stale after 90 s, an orphan is checked after 60 s, a pod requeued without effect waits for
    #: 10 s, and so does kube-scheduler's back-off.
    settle_s: float = 240.0
    quiet_s: float = 5.0
    nodes: int = 20
    clients: int = 3
    #: Pods created per second by all clients, and how many each keeps at most.
    rate: float = 4.0
    most_pods: int = 60
    #: Pods that are bound before the first fault.
    warm_pods: int = 20
    admission_s: float = 1.5
    agent_interval_s: float = 2.0
    heartbeat_s: float = 30.0
    settings: Mapping[str, Any] = field(default_factory=dict)


class Site:
    def __init__(self, plane: ControlPlane, plan: Plan, code: Path = ROOT) -> None:
        """``code``: the folder that the extenders import their packages from."""
        self.plane, self._plan, self._code = plane, plan, code
        self._folder = plane.folder / "chaos"
        self._folder.mkdir()
        names = [f"gpu-{i + 1:02}" for i in range(plan.nodes)]
        self._cluster = Cluster(plane, names)
        #: Nodes with two GPUs.
        self._double = names[2::3]
        lots = random.Random(plan.seed)
        self.nodes = {name: self._stand_in(name, lots.getrandbits(32)) for name in names}
        #: Held during all calls of the auditor. A node's lock is taken before it.
        self._books = threading.RLock()
        machines = {
            name: Machine([gpu.uuid for gpu in node.gpus], GPU_BYTES, 16 // len(node.gpus))
            for name, node in self.nodes.items()
        }
        self.auditor = Auditor(machines)
        self._events = (plane.folder / "events.log").open("w")
        pods = Follower(plane, "/api/v1/pods", self._audited(self.auditor.pods_changed))
        gpunodes = Follower(plane, GPUNODES, self._audited(self.auditor.gpunodes_changed))
        self._followers = pods, gpunodes
        self._fleet = Fleet(
            plane,
            self.nodes,
            admission_s=plan.admission_s,
            seed=plan.seed,
            follower=pods,
            tolerated=AWAY,
            changed=self._look,
        )
        self._api = ApiClient(plane.configuration("agent-of-the-tests"))
        self.agents = {name: self._agent(name, random.Random(lots.random())) for name in names}
        rate, most = plan.rate / plan.clients, plan.most_pods
        self.clients = [
            Client(plane, names, f"c{i}", rate, most, random.Random(lots.random()))
            for i in range(plan.clients)
        ]
        names = (*WIRED, *VERBS)
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.proxies = Proxies(plane.certificate)
        self.wires = wires = {name: Wire() for name in WIRED}
        verbs = {
            self._url(verbs): wires[name] for verbs, name in zip(VERBS, EXTENDERS, strict=True)
        }
        self._to_verbs = Service(verbs, records=True)
        self._to_webhooks = Service({self._url(name): wires[name] for name in WEBHOOKS}, tls=True)
        self._to_api = {
            name: Service({plane.url: wire}, tls=True, meddles=True) for name, wire in wires.items()
        }
        #: Console -> services in front of the journals of all extenders.
        self._to_journals = {
            console: [Service({self._url(each): wires[console]}) for each in EXTENDERS]
            for console in CONSOLES
        }

    def _stand_in(self, name: str, seed: int) -> StandIn:
        count = 2 if name in self._double else 1
        gpus = [Gpu(f"GPU-{name}-{i}", GPU_BYTES, reserved_bytes=0) for i in range(count)]
        driver = Driver(self._folder / f"{name}.table", gpus)
        return StandIn(gpus, Settings(16 // count), seed=seed, driver=driver)

    def _agent(self, name: str, lots: random.Random) -> Agent:
        pace_s = self._plan.agent_interval_s, self._plan.heartbeat_s
        api = of_client(self._api)
        publisher = KubernetesPublisher(api, name, SYSTEM_NAMESPACE, self._plan.heartbeat_s)
        return Agent(publisher, self.nodes[name], *pace_s, lots)

    def _url(self, name: str) -> str:
        scheme = "https" if name in WEBHOOKS else "http"
        return f"{scheme}://127.0.0.1:{self._ports[name]}"

    def start(self) -> None:
        """Return when the first pods are bound."""
        self._cluster.create()
        self.plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        for follower in self._followers:
            follower.start()
        self._fleet.start()
        for name in self._double:
            body = {"metadata": {"annotations": {"headroom.gpu/device-choice": "any"}}}
            self.plane.call("PATCH", f"{NODES}/{name}", body, MERGE)
        for agent in self.agents.values():
            agent.start()
        journals = [each for services in self._to_journals.values() for each in services]
        self.proxies.start([self._to_verbs, self._to_webhooks, *self._to_api.values(), *journals])
        for name in (*WIRED, *SCHEDULERS):
            self.start_process(name)
        url = f"https://127.0.0.1:{self._to_webhooks.port}"
        for each in webhooks(url, self.plane.certificate):
            self.plane.call("POST", f"{ADMISSION}/{each['kind'].lower()}s", each)
        self._until(self._cluster.initialised, "all GPUNodes are initialised")
        for client in self.clients:
            client.start()
        enough = self._plan.warm_pods
        self._until(lambda: self.auditor.tally["bound"] >= enough, f"{enough} pods are bound")

    def stop(self) -> None:
        for each in (*self.clients, *self.agents.values(), *self._followers, self._fleet):
            each.stop()
        self.proxies.stop()
        self._api.close()
        self._events.close()

    def start_process(self, name: str) -> None:
        """Start it as deployed, except for its way to the API server and an extender's clock."""
        plane, (part, _, rest) = self.plane, name.partition("-")
        port = self._ports.get(name)
        match part:
            case "etcd":
                plane.spawn_etcd()
            case "kube" if rest == "apiserver":
                plane.spawn_apiserver()
            case "kube":
                # Several schedule the same pods: there is no leader election.
                kubeconfig = plane.kubeconfig("scheduler-of-the-tests")
                url = f"http://127.0.0.1:{self._to_verbs.port}"
                content = scheduler_configuration(url, kubeconfig)
                for each in content["extenders"]:
                    each["httpTimeout"] = f"{TIMEOUT_S}s"
                plane.spawn_scheduler(name, content, name)
            case "flood":
                plane.fork(name, "tests.flood", self._url(rest.removeprefix("of-")), env={})
            case "extender":
                verbs_port = self._ports[f"{name} verbs"]
                self._start(name, part, verbs_port=verbs_port, debug_port=port)
            case "console":
                places = [f"127.0.0.1:{each.port}" for each in self._to_journals[name]]
                self._start(name, part, extenders=places, debug_port=port, debug_open=True)
            case "webhook":
                cert, key = str(plane.certificate.cert), str(plane.certificate.key)
                files = {"webhook_tls_cert": cert, "webhook_tls_key": key}
                self._start(name, part, webhook_port=port, **files)
        if part in ("flood", "console", "webhook"):
            # They run on other machines: here they get the CPU that the extenders leave.
            os.setpriority(os.PRIO_PROCESS, plane.pid(name), 19)

    def _start(self, name: str, part: str, **settings: Any) -> None:
        file = self._folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**self._plan.settings, **settings}))
        command = ("extender", part, "--config", str(file))
        token = f"{part}-of-the-tests"
        env = {"KUBECONFIG": str(self.plane.kubeconfig(token, port=self._to_api[name].port))}
        if part != "extender":
            self.plane.fork(name, *command, env=env)
            return
        clock = self.clock(name)
        clock.touch()
        env["PYTHONPATH"] = f"{self._code}{os.pathsep}{ROOT}"
        # For the mutants that wait for them.
        env["CHAOS_CONSOLE"] = str(self._ports[CONSOLES[0]])
        env["CHAOS_WEBHOOK"] = str(self._ports[WEBHOOKS[0]])
        python = (sys.executable, "-m", "tests.chaos.clock", str(clock))
        self.plane.spawn(name, *python, *command, env=env)

    def clock(self, extender: str) -> Path:
        """Return the file of its clock (see ``clock``)."""
        return self._folder / f"{extender}.clock"

    def _audited(self, listen: Listen) -> Listen:
        """Record all events, and pass them to the auditor, one at a time."""

        def audited(what: str, objects: Sequence[Any]) -> None:
            with self._books:
                self._events.write(f"{time.time():.3f} {what} {json.dumps(objects)}\n")
                listen(what, objects)

        return audited

    def _look(self, node: str) -> None:
        """Pass the state of the node to the auditor. The caller holds the node's lock."""
        stand_in = self.nodes[node]
        given = {
            (pod.uid, container): [each.device for each in replicas]
            for pod, listed in stand_in.pod_resources()
            for container, replicas in listed.items()
        }
        used: Counter[tuple[str, str]] = Counter()
        for process in stand_in.processes.values():
            used.update({(process.uid, each): n for each, n in process.used_bytes.items()})
        assert stand_in.driver is not None
        overdrawn = [gpu for gpu, least in stand_in.driver.least_free_bytes.items() if least < 0]
        with self._books:
            self._events.write(f"{time.time():.3f} {node} {given} {used}\n")
            self.auditor.look(node, given, used, overdrawn)

    def wrong(self, in_the_end: bool = False) -> list[Finding]:
        """Return what was wrong at any moment, and ``in_the_end`` also what is wrong now."""
        for name, node in self.nodes.items() if in_the_end else ():
            with node.lock:
                self._look(name)
        with self._books:
            return [*self.auditor.findings, *(self.auditor.settled() if in_the_end else ())]

    def keep_up(self) -> None:
        """Restart what ended because of another fault: an API server without etcd, for example.

        Raises ``AssertionError`` if a process of Headroom ended by itself, and what failed in a
        thread of the test.
        """
        for name in ("etcd", "kube-apiserver", *SCHEDULERS):
            if self.plane.ended(name):
                self.plane.kill(name)
                self.start_process(name)
        for name in WIRED:
            assert not self.plane.ended(name), f"{name} ended by itself:\n{self.plane.log(name)}"
        for each in (*self._followers, self._fleet):
            if each.failure is not None:
                raise each.failure

    def _until(self, true: Callable[[], object], what: str) -> None:
        def is_true() -> object:
            self.keep_up()
            try:
                return true()
            except AWAY:
                return False

        until(is_true, what, 120.0, 0.2, self.plane.logs)
