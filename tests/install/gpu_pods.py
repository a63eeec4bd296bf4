"""Checks Headroom with pods on the GPU of one node, for ``make gpu-cluster``."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer

from tests.controlplane import ROOT, SCHEDULER_NAME, ControlPlane
from tests.e2e.cluster import EVENTS, GPUNODES, PODS, Cluster, scheduling_message
from tests.install.gpu_node import IMAGE, GpuNode
from tests.kubelet.node_objects import RESOURCE, is_ready
from tests.waiting import until

GIB = 1 << 30
NODE = "gpu-1"
REPLICAS = 4
#: Maximum size of a CUDA context, which the driver adds to the allocations of a process.
CONTEXT_BYTES = GIB
#: Memory of the device that may be unattributed.
STRAY_BYTES = 256 << 20
_PATIENCE_S = 90.0


@dataclass
class Checks:
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: int = 0

    def check(self, name: str, true: bool, **observed: Any) -> None:
        self.results[name] = {"ok": true, **observed}
        self.failed += not true
        figures = ", ".join(f"{key} {value}" for key, value in observed.items())
        typer.echo(f"{name:<34} {'ok' if true else 'FAILED':<7} {figures}")


class GpuCluster:
    """Checks pods on one GPU. ``driver`` are the environment variables of a simulated driver, or
    empty for the real driver.
    """

    def __init__(
        self, plane: ControlPlane, driver: Mapping[str, str], total_bytes: int, mps: bool
    ) -> None:
        self._plane, self._driver = plane, driver
        self._total_bytes, self._mps = total_bytes, mps
        self._cluster = Cluster(plane, [NODE])
        writable = [folder] if (folder := driver.get("FAKE_CUDA_FOLDER")) else []
        #: Compute the limit like NVIDIA's DaemonSet for MPS.
        self._limit_mib = total_bytes // REPLICAS >> 20
        limit_mib = self._limit_mib if mps else None
        self.node = GpuNode(plane, NODE, REPLICAS, driver, writable, limit_mib)
        self.checks = Checks()

    def run(self) -> None:
        self._cluster.create()
        self.node.start()
        allocatable = self.node.allocatable()
        self.checks.check("the plugin's replicas", allocatable == REPLICAS, allocatable=allocatable)
        self.node.start_agent()
        url = self._cluster.start_extender()
        self._cluster.start_scheduler(url)
        self._cluster.settle()
        (device,) = self._until_reported(lambda status: status["devices"][0].get("sharing"))
        self.checks.check(
            "the device in the GPUNode",
            device["memory"] == self._total_bytes
            and device["sharing"] == ("mps" if self._mps else "time-slicing")
            and device["replicas"] == {"free": REPLICAS},
            memory=device["memory"],
            sharing=device["sharing"],
            replicas=device["replicas"],
        )
        if self._mps:
            self._limit(device["uuid"])
            return
        free_gib = (self._total_bytes - device["reserved"]) // GIB
        self._place(device["uuid"], free_gib)
        self._delete_all()
        self._leak(free_gib)
        self._delete_all()
        self._start_engines(free_gib)

    def _place(self, uuid: str, free_gib: int) -> None:
        """Create three pods whose requests fit. The second pod uses more than it requests."""
        first_gib = free_gib * 2 // 5
        self._create("first", first_gib, uses_gib=first_gib - 2)
        self._create("second", 8, uses_gib=12)
        self._check_attributed({"first": first_gib - 2, "second": 12}, uuid)
        third_gib = free_gib - first_gib - 10
        self._create("third", third_gib, uses_gib=third_gib - 2)
        self._until(lambda: scheduling_message(self._cluster.pod("third")), "an answer")
        message = scheduling_message(self._cluster.pod("third"))
        self.checks.check(
            "memory beyond a request counts",
            "insufficient GPU memory" in message,
            requests_gib=[first_gib, 8, third_gib],
            free_gib=free_gib,
            message=message,
        )
        began_s = time.monotonic()
        self._plane.call("DELETE", f"{PODS}/second", {"gracePeriodSeconds": 1})
        self._until(lambda: bool(self._cluster.node_of("third")), "the third pod is bound")
        took_s = time.monotonic() - began_s
        self.checks.check(
            "a deleted pod frees its memory",
            self._cluster.node_of("third") == NODE,
            bound_after_s=round(took_s, 1),
        )
        self._check_attributed({"first": first_gib - 2, "third": third_gib - 2}, uuid)

    def _limit(self, uuid: str) -> None:
        """Create three pods that share the GPU with MPS. Two pods stay within the limit of MPS, and
        one pod requests more.
        """
        most_gib = self._limit_mib // 1024
        self._create("first", most_gib, uses_gib=most_gib - 1)
        self._create("second", 8, uses_gib=6)
        self._check_attributed({"first": most_gib - 1, "second": 6}, uuid)
        self._create("above", most_gib + 1, uses_gib=1)
        self._until(lambda: scheduling_message(self._cluster.pod("above")), "an answer")
        message = scheduling_message(self._cluster.pod("above"))
        self.checks.check(
            "a request above the limit of MPS",
            "MPS" in message,
            limit_mib=self._limit_mib,
            message=message,
        )
        self._create("greedy", 8, uses_gib=most_gib + 4)
        self._until(lambda: len(self.node.output("greedy")) == 2, "the answer of MPS")
        error = json.loads(self.node.output("greedy")[1]).get("error")
        self.checks.check(
            "an allocation above the limit of MPS", error == "CUDA_ERROR_OUT_OF_MEMORY", error=error
        )

    def _leak(self, free_gib: int) -> None:
        """Create a pod that uses memory that is reserved for another pod. The other pod does not
        use it yet.
        """
        calm_gib = free_gib * 3 // 5
        self._create("calm", calm_gib, uses_gib=4)
        self._until(lambda: self._is_ready("calm"), "the pod calm has its memory")
        leaks_gib = free_gib - calm_gib + 4
        evict = {"headroom.gpu/on-overuse": "evict"}
        self._create("leaks", 8, uses_gib=leaks_gib, **evict)
        self._until(lambda: self._is_ready("leaks"), "the pod leaks has its memory")
        began_s = time.monotonic()
        self._until(lambda: "leaks" not in self._names(), "the pod leaks is evicted")
        took_s = time.monotonic() - began_s
        events = self._plane.call("GET", EVENTS)["items"]
        notes = {each["reason"]: each.get("note") or each.get("message") for each in events}
        message = notes.get("GPUMemoryOveruseEviction", "")
        self.checks.check(
            "a pod that leaks is evicted",
            self._is_ready("calm") and f"has reserved {8.0:.1f} GiB" in message,
            calm_gib=calm_gib,
            leaks_gib=leaks_gib,
            after_s=round(took_s, 1),
            message=message,
        )

    def _start_engines(self, free_gib: int) -> None:
        """Create two pods that start alone. Each pod measures the free memory and then allocates
        its request.
        """
        gib = free_gib * 2 // 5
        fill = {"do": "fill", "bytes": (gib - 2) * GIB, "piece": GIB}
        spin = {"do": "spin", "seconds": 5, "blocks": 1}
        names = "engine-1", "engine-2"
        for name in names:
            alone = {"headroom.gpu/startup": "alone"}
            self._create_pod(name, gib, [{"do": "profile"}, fill, spin], 5, alone)
        waited: set[str] = set()

        def both_ready() -> bool:
            waited.update(scheduling_message(self._cluster.pod(name)) for name in names)
            return all(self._is_ready(name) for name in names)

        self._until(both_ready, "both engines are ready")
        free_bytes = sorted(self._profiled(name) for name in names)
        wait = "another pod that starts alone is starting"
        self.checks.check(
            "engines start one after the other",
            any(wait in message for message in waited)
            and free_bytes[1] - free_bytes[0] >= (gib - 2) * GIB,
            request_gib=gib,
            free_bytes_at_start=free_bytes,
            waited=sorted(filter(None, waited)),
        )

    def _profiled(self, name: str) -> int:
        """Return the free memory that the pod's process measured."""
        found = (json.loads(line) for line in self.node.output(name))
        return next(int(each["free"]) for each in found if "free" in each)

    def _is_ready(self, name: str) -> bool:
        return is_ready(self._cluster.pod(name))

    def _names(self) -> set[str]:
        return {each["metadata"]["name"] for each in self._cluster.pods()}

    def _delete_all(self) -> None:
        self._plane.call("DELETE", PODS)
        self._until(lambda: not self._names(), "all pods are gone")
        self._until_reported(lambda status: not status.get("pods"))

    def _create(self, name: str, gib: int, uses_gib: int, **annotations: str) -> None:
        """Create a pod that requests ``gib`` GiB. The pod is ready when its process has allocated
        ``uses_gib`` GiB.
        """
        allocate = {"do": "allocate", "bytes": uses_gib * GIB}
        self._create_pod(name, gib, [allocate], 2, annotations)

    def _create_pod(
        self,
        name: str,
        gib: int,
        commands: Sequence[Mapping[str, Any]],
        answers: int,
        annotations: Mapping[str, str],
    ) -> None:
        """Create a pod whose process executes the commands in a CUDA context. The pod is ready when
        its process has printed ``answers`` results.
        """
        lines = " ".join(shlex.quote(json.dumps(each)) for each in ({"do": "open"}, *commands))
        device = 'export CUDA_VISIBLE_DEVICES="$NVIDIA_VISIBLE_DEVICES"'
        send = f"(printf '%s\\n' {lines}; exec sleep infinity)"
        worker = f"{shlex.quote(sys.executable)} -m benchmarks.gpu.worker"
        count = f"(head -n {answers}; touch /tmp/ready; exec cat)"
        script = f"{device}; {send} | {worker} | {count}"
        environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **self._driver}
        container = {
            "name": "main",
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "command": ["sh", "-c", script],
            "env": [{"name": key, "value": value} for key, value in environment.items()],
            "resources": {"limits": {RESOURCE: "1"}},
            "readinessProbe": {
                "exec": {"command": ["test", "-e", "/tmp/ready"]},
                "periodSeconds": 1,
            },
        }
        spec = {
            "schedulerName": SCHEDULER_NAME,
            "containers": [container],
            "hostNetwork": True,
            "hostPID": bool(self._driver),
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
        }
        metadata = {
            "name": name,
            "annotations": {"headroom.gpu/vram": f"{gib}Gi", **annotations},
        }
        self._plane.call("POST", PODS, {"metadata": metadata, "spec": spec})

    def _check_attributed(self, uses_gib: Mapping[str, int], uuid: str) -> None:
        """Check that the agent attributes each pod's allocation and a CUDA context to the pod, on
        the device that the pod sees.
        """
        least = {name: gib * GIB for name, gib in uses_gib.items()}

        def attributed(status: Any) -> bool:
            used = {each["name"]: each.get("used") or 0 for each in status.get("pods", [])}
            return used.keys() == least.keys() and all(used[name] >= n for name, n in least.items())

        (device,) = self._until_reported(attributed)
        pods = self._status()["pods"]
        used = {each["name"]: each["used"] for each in pods}
        self.checks.check(
            f"memory of {' and '.join(sorted(least))}",
            all(used[name] <= n + CONTEXT_BYTES for name, n in least.items())
            and {each["device"] for each in pods} == {uuid}
            and device["unattributed"] <= STRAY_BYTES
            and device["replicas"] == {"free": REPLICAS - len(pods), "allocated": len(pods)},
            allocated=least,
            used=used,
            unattributed=device["unattributed"],
            device_used=device["used"],
        )

    def _status(self) -> Any:
        return self._plane.call("GET", f"{GPUNODES}/{NODE}").get("status") or {}

    def _until_reported(self, true: Callable[[Any], object]) -> list[Any]:
        def reported() -> object:
            status = self._status()
            return status.get("devices") and true(status)

        self._until(reported, "the report of the agent")
        devices: list[Any] = self._status()["devices"]
        return devices

    def _until(self, true: Callable[[], object], what: str) -> None:
        def is_true() -> object:
            self.node.raise_if_ended()
            self._plane.raise_if_ended()
            return true()

        until(is_true, what, _PATIENCE_S, 0.2, self.trouble)

    def trouble(self) -> str:
        pods = json.dumps([each["status"] for each in self._cluster.pods()], indent=1)
        logs = self.node.pod_logs(), self.node.logs(), self._plane.logs()
        return "\n".join((pods, json.dumps(self._status()), *logs))
