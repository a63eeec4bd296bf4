"""Runs stand-in nodes in a real cluster. They follow the API server's pods as kubelets do.

After a random delay, a stand-in node admits a bound pod or rejects it with the kubelet's message.
The delays can change the order of admissions. A pod runs until its command ends or until it is
deleted. Commands have the same meaning as in the fake runtime of the kubelet tests: ``exit`` ends
immediately with a code, and ``stubborn`` uses its whole grace period to stop. A job (``run 12``)
ends after this number of seconds.
"""

import contextlib
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.controlplane import ApiRefused, ControlPlane
from tests.follow import Follower
from tests.standin.allocations import RESOURCE, Pod
from tests.standin.node import Held, StandIn, pod_of
from tests.threads import Repeated

NODES = "/api/v1/nodes"
EVERY_S = 0.1


@dataclass
class _Followed:
    node: str
    manifest: Mapping[str, Any]
    #: Time on the monotonic clock at which the node admits the pod.
    admit_at_s: float
    #: Time at which the processes of the deleted pod end, or None if the pod is not deleted.
    ends_at_s: float | None = None
    #: Time at which the pod's job ends by itself. None before admission or if the pod is not a job.
    job_ends_at_s: float | None = None

    @property
    def grace_s(self) -> float:
        """Return the seconds that the pod's containers need to stop."""
        spec = self.manifest["spec"]
        stubborn = any(each.get("command") == ["stubborn"] for each in spec["containers"])
        return float(spec.get("terminationGracePeriodSeconds", 30)) if stubborn else 0.0


class Fleet(Repeated):
    """A fleet of stand-in nodes by name. ``start`` creates their Node objects, and ``stop`` deletes
    them.

    ``follower`` provides all pods. Without a follower, each step lists the pods. ``tolerated`` are
    exceptions that a temporarily unavailable API server causes. The next step retries after such an
    exception. ``changed`` is called with the node's name after a change of its pods or processes,
    while the node's lock is held.
    """

    def __init__(
        self,
        plane: ControlPlane,
        nodes: Mapping[str, StandIn],
        *,
        admission_s: float = 0.0,
        seed: int = 0,
        follower: Follower | None = None,
        tolerated: tuple[type[Exception], ...] = (),
        changed: Callable[[str], None] = lambda name: None,
    ) -> None:
        super().__init__(first_s=EVERY_S)
        self.plane = plane
        self.nodes = nodes
        self.admission_s = admission_s
        self._follower, self._tolerated, self._changed = follower, tolerated, changed
        self._random = random.Random(seed)
        self._pods: dict[str, _Followed] = {}
        self._told: dict[str, str] = {}
        self._capacity: dict[str, tuple[int, int]] = {}

    def start(self) -> None:
        for name in self.nodes:
            self.plane.call("POST", NODES, {"metadata": {"name": name}})
            # Remove the taint that admission adds to every new node, because the controller that
            # usually removes it does not run.
            self.plane.call("PATCH", f"{NODES}/{name}", {"spec": {"taints": None}})
            self._tell_capacity(name)
        super().start()

    def stop(self) -> None:
        """Stop the fleet, even if ``start`` failed. Re-raise an exception that a step raised."""
        super().stop()
        with contextlib.suppress(*self._tolerated):
            for name in self.nodes:
                with contextlib.suppress(ApiRefused):
                    self.plane.call("DELETE", f"{NODES}/{name}")
        if self.failure is not None:
            raise self.failure

    def step(self) -> float:
        with contextlib.suppress(*self._tolerated):
            self._step(time.monotonic())
        return EVERY_S

    def _step(self, now_s: float) -> None:
        here = {
            pod["metadata"]["uid"]: pod
            for pod in self._listed()
            if pod["spec"]["nodeName"] in self.nodes
        }
        for uid, manifest in here.items():
            if uid not in self._pods and manifest["status"]["phase"] not in ("Succeeded", "Failed"):
                admit_at_s = now_s + self._random.uniform(0.0, self.admission_s)
                self._pods[uid] = _Followed(manifest["spec"]["nodeName"], manifest, admit_at_s)
        for uid, pod in sorted(self._pods.items(), key=lambda item: item[1].admit_at_s):
            node = self.nodes[pod.node]
            with node.lock:
                before = uid in node.pods, len(node.processes)
                try:
                    self._follow(node, uid, pod, here.get(uid), now_s)
                finally:
                    if before != (uid in node.pods, len(node.processes)):
                        self._changed(pod.node)
        for uid, pod in list(self._pods.items()):
            held = self.nodes[pod.node].pods.get(uid)
            if uid in here and held is not None:
                self._tell(pod, held)
        for name in self.nodes:
            self._tell_capacity(name)

    def _listed(self) -> list[dict[str, Any]]:
        """Return the bound pods."""
        if self._follower is not None:
            return [pod for pod in self._follower.objects() if pod["spec"].get("nodeName")]
        query = "fieldSelector=spec.nodeName!="
        listed: list[dict[str, Any]] = self.plane.call("GET", f"/api/v1/pods?{query}")["items"]
        return listed

    def _follow(
        self, node: StandIn, uid: str, pod: _Followed, seen: Mapping[str, Any] | None, now_s: float
    ) -> None:
        """Do the kubelet's next step for one pod. ``seen`` is the pod object, or None if the pod is
        deleted.
        """
        if seen is None:
            if uid in node.pods:
                node.force(uid)
            if pod.ends_at_s is None:
                pod.ends_at_s = now_s + pod.grace_s
            if pod.ends_at_s <= now_s:
                node.vacate(uid)
                del self._pods[uid]
                self._told.pop(uid, None)
        elif "deletionTimestamp" in seen["metadata"]:
            if pod.ends_at_s is None:
                pod.ends_at_s = now_s + pod.grace_s
            if pod.ends_at_s <= now_s:
                if uid in node.pods:
                    node.delete(uid)
                body = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
                with contextlib.suppress(ApiRefused):  # Another client changed the pod first.
                    self.plane.call("DELETE", path_of(pod_of(pod.manifest)), body)
        elif uid not in node.pods:
            if pod.admit_at_s <= now_s:
                self._admit(node, uid, pod, now_s)
        elif pod.job_ends_at_s is not None and pod.job_ends_at_s <= now_s:
            pod.job_ends_at_s = None
            node.end(uid)

    def _admit(self, node: StandIn, uid: str, pod: _Followed, now_s: float) -> None:
        if not node.admit(pod_of(pod.manifest)).admitted:
            return
        commands = [each.get("command") or [""] for each in pod.manifest["spec"]["containers"]]
        codes = [each[1] for each in commands if each[0] == "exit"]
        if len(codes) == len(commands):
            node.end(uid, succeeded=set(codes) == {"0"})
        elif commands[0][0] == "run":
            pod.job_ends_at_s = now_s + float(commands[0][1])

    def _tell(self, pod: _Followed, held: Held) -> None:
        if self._told.get(held.pod.uid) == held.phase:
            return
        path = path_of(held.pod)
        status = pod_status(self.nodes[pod.node], held)
        with contextlib.suppress(
            ApiRefused
        ):  # The pod is gone. The next step handles its deletion.
            self.plane.call("PATCH", f"{path}/status", {"status": status})
            self._told[held.pod.uid] = held.phase
            if held.verdict is not None and not held.verdict.admitted:
                self.plane.call("POST", event_path(held.pod), rejection(pod.node, held))

    def _tell_capacity(self, name: str) -> None:
        capacity, allocatable = self.nodes[name].devices.capacity or (0, 0)
        if self._capacity.get(name) != (capacity, allocatable):
            self.plane.call("PATCH", f"{NODES}/{name}/status", node_status(capacity, allocatable))
            self._capacity[name] = capacity, allocatable


def path_of(pod: Pod) -> str:
    return f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"


def event_path(pod: Pod) -> str:
    return f"/api/v1/namespaces/{pod.namespace}/events"


def node_status(capacity: int, allocatable: int) -> dict[str, Any]:
    other = {"cpu": "128", "memory": "1Ti", "pods": "250"}
    return {
        "status": {
            "capacity": other | {RESOURCE: str(capacity)},
            "allocatable": other | {RESOURCE: str(allocatable)},
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        }
    }


def pod_status(node: StandIn, held: Held) -> dict[str, Any]:
    """Return the pod status that the kubelet writes, with only the fields that other components
    read.
    """
    verdict = held.verdict
    if verdict is not None and not verdict.admitted:
        message = f"Pod was rejected: {verdict.message}"
        return {"phase": held.phase, "reason": verdict.reason, "message": message}
    running = held.phase == "Running"
    code = 0 if held.phase == "Succeeded" else 1
    return {
        "phase": held.phase,
        "conditions": [{"type": "Ready", "status": str(running)}],
        "containerStatuses": [
            {
                "name": each.name,
                "image": "any",
                "imageID": "any",
                "ready": running,
                "restartCount": 0,
                "state": {"running": {}} if running else {"terminated": {"exitCode": code}},
                "allocatedResourcesStatus": resources(node, held.pod, each.name),
            }
            for each in held.pod.containers
            if not each.init
        ],
    }


def resources(node: StandIn, pod: Pod, container: str) -> list[dict[str, Any]]:
    """Return the container's replicas with their health."""
    entry = node.devices.given(pod.uid, container)
    if entry is None:
        return []
    healthy = node.devices.is_healthy
    return [
        {
            "name": RESOURCE,
            "resources": [
                {"resourceID": each, "health": "Healthy" if healthy(each) else "Unhealthy"}
                for each in sorted(entry.replicas)
            ],
        }
    ]


def rejection(node: str, held: Held) -> dict[str, Any]:
    """Return the Event that the kubelet writes for a rejected pod."""
    assert held.verdict is not None
    pod = held.pod
    about = {"kind": "Pod", "name": pod.name, "namespace": pod.namespace, "uid": pod.uid}
    return {
        "metadata": {"generateName": f"{pod.name}."},
        "involvedObject": about | {"apiVersion": "v1"},
        "type": "Warning",
        "reason": held.verdict.reason,
        "message": held.verdict.message,
        "source": {"component": "kubelet", "host": node},
    }
