"""Runs everything that a storm affects: the control plane, schedulers, Headroom, proxies, nodes and
clients.

A node has one shared GPU, or two GPUs and a device plugin with an unknown policy. On such a node a
pod must fit on both GPUs, so Headroom never predicts a device, and the auditor's rules are exact.
"""

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from kubernetes.client import ApiClient

from tests.admission.site import ADMISSION, webhooks
from tests.chaos.agents import Agent
from tests.chaos.altered import alter
from tests.chaos.audit import Auditor, Finding, Machine
from tests.chaos.load import AWAY, CLIENTS, NAMESPACE, Client
from tests.chaos.proxy import Recorded, ToApiServer
from tests.controlplane import ControlPlane, scheduler_configuration
from tests.driver import GIB, Driver, Gpu
from tests.e2e.cluster import GPUNODES, Cluster
from tests.follow import Follower, Listen
from tests.processes import free_ports
from tests.reverse_proxy import Proxies, Service, Wire
from tests.standin.fleet import Fleet
from tests.standin.node import StandIn
from tests.standin.plugin import Settings
from tests.waiting import until

GPU_BYTES = 24 * GIB
#: Replicas of each GPU, by the number of GPUs of the node. Two GPUs must run out of memory before
#: they run out of replicas, because a pod that ends would otherwise add a device that the plugin
#: could choose.
REPLICAS = {1: 16, 2: 32}
SCHEDULERS = ("kube-scheduler", "kube-scheduler-1.36")
EXTENDERS = ("extender-a", "extender-b", "extender-c")
CONSOLES = ("console-a", "console-b")
WEBHOOKS = ("webhook-a", "webhook-b")
#: Processes whose connections have their own faults.
WIRED = (*EXTENDERS, *CONSOLES, *WEBHOOKS)
#: This timeout is long, because there are many more processes than cores, which delays the first
#: pods.
PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    lasts_s: float
    #: Time at the beginning of the storm in which only consoles and webhooks have faults.
    alone_s: float = 0.0
    #: ``every_s`` is the mean time between faults, and ``longest_s`` the maximum duration of a
    #: fault.
    every_s: float = 4.0
    longest_s: float = 150.0
    #: Maximum time after the storm without any improvement. With default settings, a node without
    #: reports becomes stale after 90 s, an orphan is checked after 60 s, and a requeued pod and
    #: kube-scheduler's back-off wait 10 s.
    settle_s: float = 240.0
    quiet_s: float = 5.0
    nodes: int = 20
    #: Maximum number of pods that a client keeps.
    most_pods: int = 60
    #: Number of pods that are bound before the first fault.
    warm_pods: int = 20
    #: kube-scheduler's timeout for a call, as shipped. In a storm it also applies to prioritize,
    #: for which the shipped timeout is 0.5 s.
    timeout_s: float = 5.0
    admission_s: float = 1.5
    agent_interval_s: float = 2.0
    heartbeat_s: float = 30.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: The mutant that the extenders run: a key of ``MUTANTS``.
    mutant: str | None = None


class Site:
    def __init__(self, plane: ControlPlane, plan: Plan) -> None:
        self.plane, self._plan = plane, plan
        self._folder = plane.folder / "chaos"
        self._folder.mkdir()
        names = [f"gpu-{i + 1:02}" for i in range(plan.nodes)]
        self._cluster = Cluster(plane, names)
        #: Names of the nodes with two GPUs.
        self._double = names[2::3]
        rng = random.Random(plan.seed)
        self.nodes = {name: self._stand_in(name, rng.getrandbits(32)) for name in names}
        #: Held during all calls of the auditor. To avoid a deadlock, take the lock of a node first.
        self._auditing = threading.RLock()
        machines = {
            name: Machine([gpu.uuid for gpu in node.gpus], GPU_BYTES, REPLICAS[len(node.gpus)])
            for name, node in self.nodes.items()
        }
        self.auditor = Auditor(machines)
        self._events = (plane.folder / "events.log").open("w")
        pods = Follower(plane, "/api/v1/pods", self._audited(self.auditor.pods_changed))
        gpunodes = Follower(plane, GPUNODES, self._audited(self.auditor.gpunodes_changed))
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
        pace_s = plan.agent_interval_s, plan.heartbeat_s
        self.agents = {
            name: Agent(self._api, name, node, *pace_s, random.Random(rng.random()))
            for name, node in self.nodes.items()
        }
        self.clients = [
            Client(plane, names, f"c{i}", plan.most_pods, random.Random(rng.random()))
            for i in range(CLIENTS)
        ]
        self._cluster_threads = pods, gpunodes, self._fleet
        self._threads = *self.clients, *self.agents.values(), *self._cluster_threads
        self.wires = {name: Wire() for name in WIRED}
        names = [*WIRED, *(f"{name} verbs" for name in EXTENDERS)]
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        #: The proxy in front of all extenders' ports for kube-scheduler.
        self.verbs = Recorded({self._url(f"{name} verbs"): self.wires[name] for name in EXTENDERS})
        self.proxies = Proxies(plane.certificate)
        self.proxies.serve(self.verbs)
        self._webhooks = Service({self._url(name): self.wires[name] for name in WEBHOOKS})
        self.proxies.serve(self._webhooks, tls=True)
        self._api_ports = {
            name: self.proxies.serve(ToApiServer({plane.url: wire}), tls=True)
            for name, wire in self.wires.items()
        }
        #: For each console, the ports of its proxies in front of the extenders' journals.
        self._journal_ports = {
            name: [
                self.proxies.serve(Service({self._url(each): self.wires[name]}))
                for each in EXTENDERS
            ]
            for name in CONSOLES
        }

    def _stand_in(self, name: str, seed: int) -> StandIn:
        count = 2 if name in self._double else 1
        gpus = [Gpu(f"GPU-{name}-{i}", GPU_BYTES, reserved_bytes=0) for i in range(count)]
        driver = Driver(self._folder / f"{name}.table", gpus)
        return StandIn(gpus, Settings(REPLICAS[count]), seed=seed, driver=driver)

    def _url(self, name: str) -> str:
        scheme = "https" if name in WEBHOOKS else "http"
        return f"{scheme}://127.0.0.1:{self._ports[name]}"

    def start(self) -> None:
        """Start everything and wait until the first pods are bound."""
        self._cluster.create()
        self.plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        for each in self._cluster_threads:
            each.start()
        for agent in self.agents.values():
            agent.start()
        for name in (*WIRED, *SCHEDULERS):
            self.start_process(name)
        for each in webhooks(self._webhooks.url, self.plane.certificate, timeout_s=None):
            self.plane.call("POST", f"{ADMISSION}/{each['kind'].lower()}s", each)
        self.until(self._cluster.initialised, "all GPUNodes are initialised")
        for client in self.clients:
            client.start()
        enough = self._plan.warm_pods
        self.until(lambda: self.auditor.tally["bound"] >= enough, f"{enough} pods are bound")

    def stop(self) -> None:
        for each in self._threads:
            each.stop()
        self.proxies.stop()
        self._api.close()
        self._events.close()

    def start_process(self, name: str) -> None:
        """Start a process as it is deployed, but with proxies for its connections. Extenders run
        with ``alter``.
        """
        plane, (part, _, rest) = self.plane, name.partition("-")
        port = self._ports.get(name)
        match part:
            case "etcd":
                plane.spawn_etcd()
            case "kube" if rest == "apiserver":
                plane.spawn_apiserver()
            case "kube":
                # All schedulers schedule the same pods at the same time, because leader election is
                # off.
                kubeconfig = plane.kubeconfig("scheduler-of-the-tests")
                content = scheduler_configuration(self.verbs.url, kubeconfig)
                for each in content["extenders"]:
                    each["httpTimeout"] = f"{self._plan.timeout_s}s"
                plane.spawn_scheduler(name, content, name)
            case "flood":
                plane.fork(name, "tests.flood", self._url(rest.removeprefix("of-")), env={})
            case "extender":
                verbs_port = self._ports[f"{name} verbs"]
                ports = {"verbs_port": verbs_port, "debug_port": port}
                self._start(name, part, insecure_verbs=True, **ports)
            case "console":
                places = [f"127.0.0.1:{each}" for each in self._journal_ports[name]]
                self._start(name, part, extenders=places, debug_port=port, debug_open=True)
            case "webhook":
                cert, key = str(plane.certificate.cert), str(plane.certificate.key)
                files = {"webhook_tls_cert": cert, "webhook_tls_key": key}
                self._start(name, part, webhook_port=port, debug_port=0, **files)
        if part in ("flood", "console", "webhook"):
            # In a cluster, these processes run on other machines. Here they get only the CPU time
            # that the extenders do not use.
            os.setpriority(os.PRIO_PROCESS, plane.pid(name), 19)

    def _start(self, name: str, part: str, **settings: Any) -> None:
        file = self._folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**self._plan.settings, **settings}))
        token = f"{part}-of-the-tests"
        env = {
            "KUBECONFIG": str(self.plane.kubeconfig(token, port=self._api_ports[name])),
            # Mutants wait for these ports.
            "CHAOS_CONSOLE": str(self._ports[CONSOLES[0]]),
            "CHAOS_WEBHOOK": str(self._ports[WEBHOOKS[0]]),
        }
        inside = None
        if part == "extender":
            self.clock(name).touch()
            inside = partial(alter, self.clock(name), self._plan.mutant)
        self.plane.fork(name, "headroom", part, "--config", str(file), env=env, inside=inside)

    def clock(self, extender: str) -> Path:
        """Return the file that sets the clock of the extender (see ``alter``)."""
        return self._folder / f"{extender}.clock"

    def _audited(self, listen: Listen) -> Listen:
        """Return a listener that records all events and passes them to the auditor one at a
        time.
        """

        def audited(what: str, objects: Sequence[Any]) -> None:
            with self._auditing:
                self._events.write(f"{time.time():.3f} {what} {json.dumps(objects)}\n")
                listen(what, objects)

        return audited

    def _look(self, node: str) -> None:
        """Pass the state of the node to the auditor. The caller must hold the node's lock."""
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
        with self._auditing:
            self._events.write(f"{time.time():.3f} {node} {given} {used}\n")
            self.auditor.look(node, given, used, overdrawn)

    def wrong(self, in_the_end: bool = False) -> list[Finding]:
        """Return the findings so far. With ``in_the_end``, also return the findings in the current
        state.
        """
        for name, node in self.nodes.items() if in_the_end else ():
            with node.lock:
                self._look(name)
        with self._auditing:
            return [*self.auditor.findings, *(self.auditor.settled() if in_the_end else ())]

    def supervise(self) -> None:
        """Restart processes that ended because of a fault elsewhere, such as an API server that
        lost etcd.

        Raise ``AssertionError`` if a process of Headroom ended by itself. Raise the exception of a
        test thread.
        """
        for name in ("etcd", "kube-apiserver", *SCHEDULERS):
            if self.plane.ended(name):
                self.plane.kill(name)
                self.start_process(name)
        for name in WIRED:
            assert not self.plane.ended(name), f"{name} ended by itself:\n{self.plane.log(name)}"
        for each in self._threads:
            if each.failure is not None:
                raise each.failure

    def until(self, true: Callable[[], object], what: str) -> None:
        """Wait for a condition like ``tests.waiting.until``, and call ``supervise`` meanwhile.

        The condition may raise the exceptions in ``AWAY``.
        """

        def is_true() -> object:
            self.supervise()
            try:
                return true()
            except AWAY:
                return False

        until(is_true, what, PATIENCE_S, 0.2, self.plane.logs)
