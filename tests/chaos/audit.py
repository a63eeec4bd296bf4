"""Judges a storm by pods, GPUNodes and devices. Imports nothing of the product.

Pods and GPUNodes are passed in as the API server delivers them. At every change on a node, ``look``
gets what the device plugin allocated and what each process uses. A pod requests of a device the
amount in its annotation, or what its processes use there, whichever is more. Sums contain only pods
that Headroom bound, so pods that another client bound (outsiders) can exceed a device.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIX = "headroom.gpu/"
RESOURCE = "nvidia.com/gpu"
ENDED = ("Succeeded", "Failed")
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "M": 10**6, "G": 10**9, "": 1}

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Machine:
    """The true size of a node: device uuid -> bytes, and the replicas of each device."""

    memory_bytes: Mapping[str, int]
    replicas: int


@dataclass(frozen=True, slots=True)
class Holding:
    """One replica that the plugin allocated to a container."""

    uid: str
    container: str
    device: str


@dataclass(frozen=True, slots=True)
class Use:
    """Memory of a device that one process uses, according to the driver."""

    uid: str
    device: str
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    #: A node and a device, or a pod.
    where: str
    what: str
    #: Previous events of the node, oldest first.
    story: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n    ".join([f"{self.rule}: {self.where}: {self.what}", *self.story])


@dataclass(slots=True)
class _Pod:
    uid: str
    name: str
    node: str
    phase: str
    deleting: bool
    #: GPU container -> replicas.
    gpus: dict[str, int]
    vram: str | None
    #: Whether Headroom bound it.
    ours: bool
    gone: bool = False

    @property
    def sits(self) -> bool:
        """Whether it is bound and has not ended."""
        return bool(self.node) and not self.gone and self.phase not in ENDED

    def request_bytes(self, container: str, memory_bytes: int, replicas: int) -> int:
        """Return the request on each device of the container."""
        text = self.vram
        if text is not None and "=" in text:
            text = dict(part.split("=") for part in text.split(",")).get(container)
        if text is None:
            return memory_bytes // replicas
        if text.endswith("%"):
            return memory_bytes * int(text[:-1]) // 100
        digits = text.rstrip("KMGi")
        return int(digits) * _UNITS[text[len(digits) :]]


@dataclass
class Auditor:
    """``findings`` lists what was wrong at any moment; ``settled`` judges the final state."""

    machines: Mapping[str, Machine]
    now_s: Callable[[], float] = lambda: 0.0
    #: Counts of created, bound, outside, gone and rejected pods: a storm must not be empty.
    tally: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._pods: dict[str, _Pod] = {}
        self._sits_on: dict[str, set[str]] = {name: set() for name in self.machines}
        self._gpunodes: dict[str, Object] = {}
        self._story: dict[str, deque[str]] = {name: deque(maxlen=60) for name in self.machines}
        self._found: dict[tuple[str, str, frozenset[str]], Finding] = {}
        self._overdrawn: set[tuple[str, str]] = set()
        self._holdings: dict[str, list[Holding]] = {}
        self._uses: dict[str, list[Use]] = {}
        #: Devices that an outsider ever used.
        self._shared: set[str] = set()

    def pod(self, manifest: Object) -> None:
        seen = _pod(manifest)
        before = self._pods.get(seen.uid)
        self._pods[seen.uid] = seen
        if seen.gpus:
            self.tally["created"] += before is None
            if seen.node in self.machines and (before is None or not before.node):
                self.tally["bound" if seen.ours else "outsiders"] += 1
                by = "Headroom" if seen.ours else "another client"
                self._note(seen.node, f"{seen.name} ({seen.vram}) is bound by {by}")
        rejected = seen.phase == "Failed" and (before is None or before.phase != "Failed")
        self.tally["rejected"] += rejected
        self._sit(seen)

    def pod_gone(self, uid: str) -> None:
        if (pod := self._pods.get(uid)) is not None and not pod.gone:
            pod.gone = True
            self.tally["gone"] += 1
            self._sit(pod)
            self._note(pod.node, f"{pod.name} is gone")

    def listed(self, manifests: Iterable[Object]) -> None:
        """Process a list of all pods: a known pod that is not in it is gone."""
        there = {manifest["metadata"]["uid"]: manifest for manifest in manifests}
        for uid in self._pods.keys() - there.keys():
            self.pod_gone(uid)
        for manifest in there.values():
            self.pod(manifest)

    def gpunode(self, gpunode: Object) -> None:
        name = gpunode["metadata"]["name"]
        if name in self.machines:
            before, after = reservations(self._gpunodes.get(name, {})), reservations(gpunode)
            for uid in before.keys() ^ after.keys():
                verb = "reserves" if uid in after else "removes the reservation"
                self._note(name, f"{verb} for {(before | after)[uid].get('name')}")
            self._gpunodes[name] = gpunode

    def gpunode_gone(self, name: str) -> None:
        if self._gpunodes.pop(name, None) is not None:
            self._note(name, "its GPUNode is gone")

    def look(self, node: str, holdings: Iterable[Holding], uses: Iterable[Use]) -> None:
        """Record what the plugin allocated and what the driver counts at this moment."""
        before = set(self._holdings.get(node, ()))
        self._holdings[node], self._uses[node] = list(holdings), list(uses)
        for each in sorted(before ^ set(self._holdings[node]), key=str):
            verb = "releases" if each in before else "gets"
            self._note(node, f"{self._name(each.uid)} {verb} {each.device}")
        for device, wants in self._wants(node).items():
            ours = {uid: wanted for uid, wanted in wants.items() if self._is_ours(uid)}
            if len(ours) < len(wants):
                self._shared.add(device)
            self._check("overcommitted", f"{node} {device}", ours, self._memory(node)[device])

    def overdrawn(self, node: str, device: str) -> None:
        """Record that the driver was at some moment asked for more memory than it has."""
        self._overdrawn.add((node, device))

    @property
    def findings(self) -> list[Finding]:
        what = "more memory was allocated than the device has, by Headroom's pods alone"
        overdrawn = [
            Finding("overdrawn", f"{node} {device}", what)
            for node, device in sorted(self._overdrawn)
            if device not in self._shared
        ]
        return [*self._found.values(), *overdrawn]

    def fates(self, uid: str) -> list[str]:
        """Return what an extender may report of the pod if it cannot bind it."""
        pod = self._pods.get(uid)
        bound = [f"is bound to node {pod.node}"] if pod and pod.node else []
        if pod is None or pod.gone or pod.deleting:
            return [*bound, "does not exist", "was replaced", "is being deleted"]
        return bound

    def settled(self) -> list[Finding]:
        """Return what is still wrong when nothing changes any more."""
        return [*self._orphans(), *self._charges(), *self._waiting()]

    def _orphans(self) -> Iterator[Finding]:
        for name, gpunode in self._gpunodes.items():
            for uid, held in reservations(gpunode).items():
                pod = self._pods.get(uid)
                if pod is None or not pod.sits or pod.node != name:
                    state = "unknown" if pod is None else f"{pod.phase} on {pod.node or 'no node'}"
                    what = f"reservation for {held.get('name')} ({uid}), which is {state}"
                    yield Finding("orphan", name, what)

    def _charges(self) -> Iterator[Finding]:
        for pod in self._sitting():
            where = f"pod {pod.name} ({pod.uid})"
            nodes = [name for name, held in self._gpunodes.items() if pod.uid in reservations(held)]
            if nodes != [pod.node]:
                what = f"is on {pod.node}, charged on: {', '.join(nodes) or 'no node'}"
                yield Finding("charged", where, what)
                continue
            held = reservations(self._gpunodes[pod.node])[pod.uid]
            for device, wants in self._wants(pod.node).items():
                wanted = wants.get(pod.uid, 0)
                charged = sum(each["candidates"].get(device, 0) for each in held["charges"])
                if charged < wanted:
                    what = f"needs {wanted} bytes of {device}, charged {charged}"
                    yield Finding("charged", where, what)

    def _waiting(self) -> Iterator[Finding]:
        for pod in self._pods.values():
            if pod.gpus and not (pod.gone or pod.node or pod.deleting or pod.phase in ENDED):
                for name in self.machines:
                    if self._fits(pod, name):
                        story = (*self._story[name], f"taken: {self._wants(name)}")
                        what = f"waits with {pod.vram}, but fits on {name}"
                        yield Finding("waits", f"pod {pod.name} ({pod.uid})", what, story)
                        break

    def _fits(self, pod: _Pod, node: str) -> bool:
        """Return whether it fits on each device of the node, with all its containers."""
        memory, replicas = self._memory(node), self.machines[node].replicas
        wants, count = self._wants(node), sum(pod.gpus.values())
        given = Counter(each.device for each in self._holdings.get(node, ()))
        # kube-scheduler also counts replicas of pods that the kubelet has not admitted yet.
        counted = sum(sum(each.gpus.values()) for each in self._sitting() if each.node == node)
        return counted + count <= len(memory) * replicas and all(
            given[device] + count <= replicas
            and sum(wants.get(device, {}).values()) + self._request_on(pod, node) <= has_bytes
            for device, has_bytes in memory.items()
        )

    def _sit(self, pod: _Pod) -> None:
        """Check the sum of all requests on the pod's node, whatever device each pod gets."""
        if pod.node not in self.machines or not pod.gpus:
            return
        sitting = self._sits_on[pod.node]
        (sitting.add if pod.sits else sitting.discard)(pod.uid)
        ours = {
            uid: self._request_on(self._pods[uid], pod.node)
            for uid in sitting
            if self._is_ours(uid)
        }
        self._check("reserved twice", pod.node, ours, sum(self._memory(pod.node).values()))

    def _check(self, rule: str, where: str, wants: dict[str, int], has_bytes: int) -> None:
        if sum(wants.values()) > has_bytes:
            pods = ", ".join(f"{self._name(uid)}={wants[uid]}" for uid in sorted(wants))
            what = f"has {has_bytes} bytes, needs {sum(wants.values())}: {pods}"
            story = tuple(self._story[where.partition(" ")[0]])
            key = (rule, where, frozenset(wants))
            self._found.setdefault(key, Finding(rule, where, what, story))

    def _wants(self, node: str) -> dict[str, dict[str, int]]:
        """Return device -> pod -> bytes that it requests or uses there, whichever is more."""
        wants: dict[str, dict[str, int]] = {}
        memory, replicas = self._memory(node), self.machines[node].replicas
        for each in self._holdings.get(node, ()):
            pod, of = self._pods.get(each.uid), wants.setdefault(each.device, {})
            size = memory[each.device]
            asked = pod.request_bytes(each.container, size, replicas) if pod else 0
            of[each.uid] = of.get(each.uid, 0) + asked
        used: Counter[tuple[str, str]] = Counter()
        for use in self._uses.get(node, ()):
            used[use.device, use.uid] += use.used_bytes
        for (device, uid), used_bytes in used.items():
            of = wants.setdefault(device, {})
            of[uid] = max(of.get(uid, 0), used_bytes)
        return wants

    def _request_on(self, pod: _Pod, node: str) -> int:
        """Return the pod's request on any device of the node: all of a node have one size."""
        size, replicas = next(iter(self._memory(node).values())), self.machines[node].replicas
        return sum(pod.request_bytes(name, size, replicas) * n for name, n in pod.gpus.items())

    def _memory(self, node: str) -> Mapping[str, int]:
        return self.machines[node].memory_bytes

    def _is_ours(self, uid: str) -> bool:
        return uid in self._pods and self._pods[uid].ours

    def _sitting(self) -> list[_Pod]:
        return [self._pods[uid] for uids in self._sits_on.values() for uid in uids]

    def _name(self, uid: str) -> str:
        return self._pods[uid].name if uid in self._pods else uid

    def _note(self, node: str, what: str) -> None:
        if node in self._story:
            self._story[node].append(f"{self.now_s():8.1f} s  {what}")


def reservations(gpunode: Object) -> dict[str, Any]:
    return (gpunode.get("spec") or {}).get("reservations") or {}


def _pod(manifest: Object) -> _Pod:
    metadata, spec = manifest["metadata"], manifest["spec"]
    annotations = metadata.get("annotations") or {}
    limits = {
        each["name"]: int((each.get("resources", {}).get("limits") or {}).get(RESOURCE, 0))
        for each in spec["containers"]
    }
    return _Pod(
        uid=metadata["uid"],
        name=metadata["name"],
        node=spec.get("nodeName", ""),
        phase=manifest.get("status", {}).get("phase", ""),
        deleting="deletionTimestamp" in metadata,
        gpus={name: count for name, count in limits.items() if count},
        vram=annotations.get(f"{PREFIX}vram"),
        ours=f"{PREFIX}placement" in annotations,
    )
