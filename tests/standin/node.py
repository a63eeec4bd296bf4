"""A simulated GPU node. The kubelet and the plugin are models, and the memory is a table.

Every call is one event, and nothing happens between calls, so that a caller can delay and reorder
the kubelet's actions. ``admit`` admits pods in any order, containers end when the caller ends them,
and the memory of a deleted pod can stay in use until ``vacate``.
"""

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.driver import Driver, Gpu
from tests.standin.allocations import RESOURCE, Checkpoint, Container, Lots, Pod, Verdict
from tests.standin.devices import DeviceManager
from tests.standin.lots import Drawn
from tests.standin.plugin import Plugin, Replica, Settings, device_of
from tests.standin.topology import TopologyPolicy

Phase = Literal["Pending", "Running", "Succeeded", "Failed"]
FIRST_PID = 100_000
UNSHARED = Settings()


@dataclass
class Held:
    """A pod that the kubelet has received."""

    pod: Pod
    phase: Phase = "Pending"
    verdict: Verdict | None = None
    #: Whether the API server has received the pod's phase. A rejection may arrive ten seconds late.
    told: bool = True
    #: Names of the containers that have a running process.
    running: set[str] = field(default_factory=set)

    @property
    def counts(self) -> bool:
        """Return whether the kubelet counts the pod as active, so that the pod keeps its
        replicas.
        """
        return self.phase in ("Pending", "Running")


@dataclass(frozen=True, slots=True)
class Process:
    uid: str
    container: str
    pid: int
    used_bytes: Mapping[str, int]


class StandIn:
    """A node with a registered plugin. ``seed`` is the seed of all random choices.

    The memory of each process is written to ``driver``. Without a driver, the node only counts the
    memory.
    """

    def __init__(
        self,
        gpus: Sequence[Gpu],
        settings: Settings = UNSHARED,
        *,
        topology: TopologyPolicy = "none",
        seed: int = 0,
        driver: Driver | None = None,
        save: Callable[[Checkpoint], None] = lambda checkpoint: None,
    ) -> None:
        self.gpus = tuple(gpus)
        self.driver = driver
        self.devices = DeviceManager(topology, range(1 + max(g.numa or 0 for g in gpus)), save)
        self.pods: dict[str, Held] = {}
        self.processes: dict[tuple[str, str], Process] = {}
        #: Threads hold this lock while they read or change the node.
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self._pids = itertools.count(FIRST_PID)
        self.plugin: Plugin | None = None
        self.start_plugin(settings)

    @property
    def active(self) -> list[str]:
        """Return the UIDs of the active pods."""
        return [uid for uid, held in self.pods.items() if held.counts]

    def used_bytes(self) -> Counter[str]:
        """Return the bytes that all processes use on each device, including processes of deleted
        pods.
        """
        used: Counter[str] = Counter()
        for process in self.processes.values():
            used.update(process.used_bytes)
        return used

    def pod_resources(self) -> list[tuple[Pod, dict[str, list[Replica]]]]:
        """Return the response of PodResources by pod and container. It does not show ended pods."""
        self.devices.collect(self.active)
        return [(held.pod, self.listed(held.pod)) for held in self.pods.values() if held.counts]

    def listed(self, pod: Pod) -> dict[str, list[Replica]]:
        return {
            each.name: [
                Replica(replica, device_of(replica), None if numa < 0 else numa)
                for numa, replicas in (entry.by_numa if entry else ())
                for replica in sorted(replicas)
            ]
            for each in pod.containers
            if each.sidecar or not each.init
            for entry in [self.devices.given(pod.uid, each.name)]
        }

    # The methods below are actions of the kubelet.

    def admit(self, pod: Pod, lots: Lots | None = None) -> Verdict:
        """Deliver a bound pod to the kubelet, which admits or rejects the pod and starts its
        containers.
        """
        self.pods[pod.uid] = held = Held(pod)
        self._decide(held, lots)
        if held.phase == "Running" and not pod.gated:
            self.let_through(pod.uid)
        assert held.verdict is not None
        return held.verdict

    def let_through(self, uid: str) -> None:
        """Let the pod pass its gate."""
        pod = self.pods[uid].pod
        for container in pod.containers:
            self._start(pod, container)

    def end(self, uid: str, *, succeeded: bool = True, frees: bool = True) -> None:
        """End the pod's containers without a deletion. If ``frees`` is false, their memory stays in
        use.
        """
        self.pods[uid].phase = "Succeeded" if succeeded else "Failed"
        self._stop(uid, frees)

    def delete(self, uid: str, *, frees: bool = True) -> None:
        """Delete a pod whose grace period is over and whose containers have ended."""
        self._stop(uid, frees)
        del self.pods[uid]

    def force(self, uid: str) -> None:
        """Delete a pod by force. The kubelet forgets the pod, but its processes still run."""
        del self.pods[uid]

    def vacate(self, uid: str) -> None:
        """End the processes of a deleted pod."""
        self._stop(uid, frees=True)

    def restart_kubelet(self, *, plugin_first: bool, lots: Lots | None = None) -> None:
        """Restart the kubelet, which reads its checkpoint and admits its pods again. If the API
        server has not received a rejection, the kubelet decides about the rejected pod again.

        In a cluster, the registration of the plugin races with the delivery of the pods. If
        ``plugin_first`` is false, the plugin registers only when the caller calls
        ``register_plugin``.
        """
        self.devices.restarted()
        if plugin_first:
            self.register_plugin()
        for held in self.pods.values():
            if held.counts or not held.told:
                self._decide(held, lots)
                if held.phase == "Failed":
                    self._stop(held.pod.uid, frees=True)
        self.devices.sources_ready = True

    # The methods below are actions of the plugin.

    def stop_plugin(self) -> None:
        self.plugin = None
        self.devices.disconnected()

    def start_plugin(self, settings: Settings) -> None:
        """Start the plugin. A restarted plugin has lost the failures of the earlier process."""
        self.plugin = Plugin(self.gpus, settings)
        self.devices.listed(self.plugin)

    def register_plugin(self) -> None:
        """Register the plugin with a restarted kubelet. The plugin restarts too, which makes
        unhealthy replicas healthy again.
        """
        assert self.plugin is not None
        self.plugin = Plugin(self.gpus, self.plugin.settings)
        self.devices.listed(self.plugin)

    def fail(self, replica: str) -> None:
        """Send an XID to the plugin, which marks this replica as unhealthy."""
        assert self.plugin is not None
        self.plugin.fail(replica)
        self.devices.listed(self.plugin)

    def _decide(self, held: Held, lots: Lots | None) -> None:
        lots = lots or Drawn(self._random)
        held.verdict = self.devices.admit(held.pod, self.active, lots, held.running)
        held.phase = "Running" if held.verdict.admitted else "Failed"

    def _start(self, pod: Pod, container: Container) -> None:
        if container.init and not container.sidecar:
            return  # The process has already ended.
        self.pods[pod.uid].running.add(container.name)
        entry = self.devices.given(pod.uid, container.name)
        replicas = entry.replicas if entry else ()
        used = dict.fromkeys({device_of(each) for each in replicas}, container.takes_bytes)
        process = Process(pod.uid, container.name, next(self._pids), used)
        self.processes[pod.uid, container.name] = process
        self._tell(process, used)

    def _stop(self, uid: str, frees: bool) -> None:
        if uid in self.pods:
            self.pods[uid].running.clear()
        if frees:
            for key in [key for key in self.processes if key[0] == uid]:
                self._tell(self.processes.pop(key), {})

    def _tell(self, process: Process, used: Mapping[str, int]) -> None:
        if self.driver is not None:
            self.driver.use(process.pid, used)


def pod_of(manifest: Mapping[str, Any]) -> Pod:
    """Return the fields of a pod that a node reads. ``TAKES_VRAM`` has the same meaning as in the
    fake runtime.
    """
    spec, metadata = manifest["spec"], manifest["metadata"]
    return Pod(
        uid=metadata.get("uid", metadata["name"]),
        name=metadata["name"],
        namespace=metadata.get("namespace", "default"),
        containers=tuple(
            _container(each, init)
            for init, key in ((True, "initContainers"), (False, "containers"))
            for each in spec.get(key, ())
        ),
    )


def _container(manifest: Mapping[str, Any], init: bool) -> Container:
    limits = manifest.get("resources", {}).get("limits", {})
    environment = {each["name"]: each.get("value", "") for each in manifest.get("env", ())}
    return Container(
        manifest["name"],
        replicas=int(limits.get(RESOURCE, 0)),
        init=init,
        sidecar=init and manifest.get("restartPolicy") == "Always",
        takes_bytes=int(environment.get("TAKES_VRAM", "0")),
    )
