"""Checks the pods, GPUNodes and devices during a storm. Imports nothing from the product, so that
both cannot share a bug.

The auditor reads pods and GPUNodes from the API server. At every change on a node, ``look`` gets
the allocations of the device plugin and the memory use of each process. A pod's request on a device
is the amount in its annotation, or the use of its processes if it is higher. Sums contain only pods
that Headroom bound, so pods that another client bound (outsiders) can exceed a device.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kubernetes.utils.quantity import parse_quantity

PREFIX = "headroom.gpu/"
RESOURCE = "nvidia.com/gpu"
ENDED = ("Succeeded", "Failed")

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Machine:
    """A node whose devices all have the same size and number of replicas."""

    devices: Sequence[str]
    size_bytes: int
    replicas: int


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    #: The node and the device, or the pod, of the finding.
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}: {self.what}"


class _Pod:
    def __init__(self, manifest: Object) -> None:
        metadata, spec = manifest["metadata"], manifest["spec"]
        annotations = metadata.get("annotations") or {}
        self.uid, self.name = metadata["uid"], metadata["name"]
        self.node = spec.get("nodeName", "")
        self.phase = manifest.get("status", {}).get("phase", "")
        self.deleting, self.gone = "deletionTimestamp" in metadata, False
        self.vram = annotations.get(f"{PREFIX}vram")
        #: Whether Headroom bound the pod.
        self.ours = f"{PREFIX}placement" in annotations
        limits = {
            each["name"]: each.get("resources", {}).get("limits") or {}
            for each in spec["containers"]
        }
        #: Number of replicas that each GPU container requests.
        self.gpus = {name: int(of[RESOURCE]) for name, of in limits.items() if RESOURCE in of}
        self.replicas = sum(self.gpus.values())

    @property
    def is_active(self) -> bool:
        """Return whether the pod is bound and has not ended."""
        return bool(self.node) and not self.gone and self.phase not in ENDED

    @property
    def waits(self) -> bool:
        return not (self.node or self.gone or self.deleting or self.phase in ENDED)

    def request_bytes(self, container: str, machine: Machine) -> int:
        """Return the bytes that the container requests on each of its devices."""
        text = self.vram
        if text is not None and "=" in text:
            text = dict(part.split("=") for part in text.split(",")).get(container)
        if text is None:
            return machine.size_bytes // machine.replicas
        if text.endswith("%"):
            return machine.size_bytes * int(text[:-1]) // 100
        return int(parse_quantity(text))

    def total_bytes(self, machine: Machine) -> int:
        """Return the bytes that all containers of the pod request, summed over devices."""
        return sum(self.request_bytes(name, machine) * n for name, n in self.gpus.items())


class Auditor:
    """Collects ``findings`` during a storm. ``settled`` checks the final state."""

    def __init__(self, machines: Mapping[str, Machine]) -> None:
        self.machines = machines
        #: Number of pods that Headroom and other clients bound. Tests check that a storm is not
        #: empty.
        self.tally: Counter[str] = Counter()
        #: All pods by UID, including deleted pods.
        self._pods: dict[str, _Pod] = {}
        #: The reservations of each GPUNode, by pod UID.
        self._reserved: dict[str, Mapping[str, Any]] = {}
        self._found: dict[tuple[str, str, frozenset[str]], Finding] = {}
        #: The devices that the plugin allocated on each node, by pod and container.
        self._given: dict[str, Mapping[tuple[str, str], Sequence[str]]] = {}
        #: The used bytes on each node, by pod and device.
        self._used: dict[str, Mapping[tuple[str, str], int]] = {}
        #: Devices that an outsider has ever used. The sums on these devices are not checked.
        self._shared: set[str] = set()

    def pods_changed(self, what: str, manifests: Sequence[Object]) -> None:
        """Process a watch event or a list of all pods. A known pod that the list lacks is gone."""
        seen = {pod.uid: pod for pod in map(_Pod, manifests)}
        if what in ("DELETED", "LISTED"):
            gone = seen.keys() if what == "DELETED" else self._pods.keys() - seen.keys()
            for uid in gone & self._pods.keys():
                self._pods[uid].gone = True
        if what != "DELETED":
            for pod in seen.values():
                self._pod_changed(pod, self._pods.get(pod.uid))

    def _pod_changed(self, pod: _Pod, before: _Pod | None) -> None:
        self._pods[pod.uid] = pod
        if pod.gpus and (machine := self.machines.get(pod.node)):
            if before is None or not before.node:
                self.tally["bound" if pod.ours else "outsiders"] += 1
            # Compare the sum of all requests on the node, because this sum does not depend on which
            # device each pod gets.
            ours = {each.uid: each.total_bytes(machine) for each in self._on(pod.node) if each.ours}
            has_bytes = machine.size_bytes * len(machine.devices)
            self._check("reserved twice", pod.node, ours, has_bytes)

    def gpunodes_changed(self, what: str, gpunodes: Sequence[Object]) -> None:
        if what == "LISTED":
            self._reserved.clear()
        for gpunode in gpunodes:
            name, spec = gpunode["metadata"]["name"], gpunode.get("spec") or {}
            self._reserved[name] = spec.get("reservations") or {}
            if what == "DELETED":
                del self._reserved[name]

    def look(
        self,
        node: str,
        given: Mapping[tuple[str, str], Sequence[str]],
        used: Mapping[tuple[str, str], int],
        overdrawn: Iterable[str] = (),
    ) -> None:
        """Record the device plugin's current allocations and the driver's current memory use.

        ``given`` maps each pod and container to the device of each replica. ``used`` maps each pod
        and device to the used bytes. ``overdrawn`` are devices whose use has ever exceeded their
        memory.
        """
        self._given[node], self._used[node] = given, used
        for device, wants in self._wants(node).items():
            known = {uid: self._pods[uid] for uid in wants if uid in self._pods}
            ours = {uid: wants[uid] for uid, pod in known.items() if pod.ours}
            if len(ours) < len(wants):
                self._shared.add(device)
            self._check("overcommitted", f"{node} {device}", ours, self.machines[node].size_bytes)
        for device in overdrawn:
            if device not in self._shared:
                what = "more memory was allocated than the device has, by Headroom's pods alone"
                self._add("overdrawn", f"{node} {device}", what)

    @property
    def findings(self) -> list[Finding]:
        return [*self._found.values()]

    def states(self, uid: str) -> list[str]:
        """Return the messages with which an extender may reject a bind because of the pod's
        state.
        """
        pod = self._pods.get(uid)
        bound = [f"is bound to node {pod.node}"] if pod and pod.node else []
        if pod is None or pod.gone or pod.deleting:
            return [*bound, "does not exist", "was replaced", "is being deleted"]
        return bound

    def settled(self) -> list[Finding]:
        """Return the findings in the final state. Call this after all changes have ended."""
        return [*self._orphans(), *self._charges(), *self._waiting()]

    def _orphans(self) -> Iterator[Finding]:
        for name, reserved in self._reserved.items():
            for uid, held in reserved.items():
                pod = self._pods.get(uid)
                if pod is None or not pod.is_active or pod.node != name:
                    state = "unknown" if pod is None else f"{pod.phase} on {pod.node or 'no node'}"
                    what = f"reservation for {held.get('name')} ({uid}), which is {state}"
                    yield Finding("orphan", name, what)

    def _charges(self) -> Iterator[Finding]:
        for pod in (pod for node in self.machines for pod in self._on(node)):
            where = f"pod {pod.name} ({pod.uid})"
            nodes = [name for name, reserved in self._reserved.items() if pod.uid in reserved]
            if nodes != [pod.node]:
                what = f"is on {pod.node}, charged on: {', '.join(nodes) or 'no node'}"
                yield Finding("charged", where, what)
                continue
            held = self._reserved[pod.node][pod.uid]
            for device, wants in self._wants(pod.node).items():
                charged = sum(each["candidates"].get(device, 0) for each in held["charges"])
                if charged < wants[pod.uid]:
                    what = f"needs {wants[pod.uid]} bytes of {device}, charged {charged}"
                    yield Finding("charged", where, what)

    def _waiting(self) -> Iterator[Finding]:
        """Yield a finding for each pending pod that fits on a node. To be certain, each device of
        the node must have enough memory for all containers of the pod.
        """
        waiting = [pod for pod in self._pods.values() if pod.gpus and pod.waits]
        for name, machine in self.machines.items():
            wants = self._wants(name)
            most_bytes = max(sum(wants[device].values()) for device in machine.devices)
            given = Counter(each for held in self._given.get(name, {}).values() for each in held)
            most_given = max(given[device] for device in machine.devices)
            # Like kube-scheduler, count replicas of pods that the kubelet has not admitted yet.
            counted = sum(pod.replicas for pod in self._on(name))
            for pod in [*waiting]:
                if (
                    counted + pod.replicas <= len(machine.devices) * machine.replicas
                    and most_given + pod.replicas <= machine.replicas
                    and most_bytes + pod.total_bytes(machine) <= machine.size_bytes
                ):
                    waiting.remove(pod)
                    what = f"waits with {pod.vram}, but fits on {name}; taken: {dict(wants)}"
                    yield Finding("waits", f"pod {pod.name} ({pod.uid})", what)

    def _check(self, rule: str, where: str, wants: Mapping[str, int], has_bytes: int) -> None:
        if sum(wants.values()) > has_bytes:
            pods = ", ".join(f"{self._pods[uid].name}={wants[uid]}" for uid in sorted(wants))
            what = f"has {has_bytes} bytes, needs {sum(wants.values())}: {pods}"
            self._add(rule, where, what, *wants)

    def _add(self, rule: str, where: str, what: str, *uids: str) -> None:
        """Add a finding, but only once for each rule, place and set of pods."""
        self._found.setdefault((rule, where, frozenset(uids)), Finding(rule, where, what))

    def _wants(self, node: str) -> Mapping[str, Counter[str]]:
        """Return the bytes that each pod requests or uses on each device, whichever is higher."""
        wants: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for (uid, container), devices in self._given.get(node, {}).items():
            pod = self._pods.get(uid)
            for device in devices:
                asked = pod.request_bytes(container, self.machines[node]) if pod else 0
                wants[device][uid] += asked
        for (uid, device), used_bytes in self._used.get(node, {}).items():
            wants[device][uid] = max(wants[device][uid], used_bytes)
        return wants

    def _on(self, node: str) -> list[_Pod]:
        """Return the GPU pods that are bound to the node and have not ended."""
        return [
            pod for pod in self._pods.values() if pod.node == node and pod.is_active and pod.gpus
        ]
