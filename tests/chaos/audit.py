"""Judges a run by independent data: pods and GPUNodes, the plugin's answers, the driver.

It keeps its own books and imports nothing of ours, not even how an annotation is read. All of it is
pure: it gets pods and GPUNodes in the order of the API server, and for each node, after every
change on it, the kubelet's allocations and the memory of each process.

A device is *overcommitted by us* if the pods that we bound need more of it than it has. A pod needs
what it requested, or what its processes use there, whichever is more. Pods that depend on the
device for other reasons than our decision are left out of the sums, and counted:

* an *outsider*: bound by another scheduler, without a placement of ours;
* a *misled* one: its reservation was written with a report that showed more memory than the driver
  has, so that the pod seemed to fit. The same for the process of a deleted pod, if its node's agent
  has lied since;
* a *missed* one: the kubelet gave it a device that its placement does not name;
* a *surprised* one, only if the device is predicted: on its node, after its Binding or less than
  ``HINDSIGHT_S`` before it, a replica was released, a bound pod was deleted before it was admitted,
  an outsider was admitted, the agent lied, or the GPUNode was lost.

``docs/device-truth.md`` lists the misses and surprises that only the kubelet could exclude. A
finding is printed with the events before it.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIX = "headroom.gpu/"
RESOURCE = "nvidia.com/gpu"
ENDED = ("Succeeded", "Failed")
#: Maximum age of an extender's view of a node when it binds: agents sample every few seconds.
HINDSIGHT_S = 30.0
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "M": 10**6, "G": 10**9, "": 1}

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Machine:
    """The true state of a node."""

    #: Device uuid -> bytes that may be given out.
    memory_bytes: Mapping[str, int]
    #: Memory of each device.
    replicas: int
    #: Whether the ledger counts on what kubelet and plugin will choose.
    predicted: bool = False


@dataclass(frozen=True, slots=True)
class Holding:
    """The plugin's answer for one container: a device, once for each of its replicas there."""

    uid: str
    container: str
    device: str


@dataclass(frozen=True, slots=True)
class Use:
    """The driver's figure for one process on a device."""

    uid: str
    device: str
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    #: Subject: a node and a device, or a pod.
    where: str
    what: str
    #: Earlier events on that node, the oldest first.
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
    placement: Object | None
    gone: bool = False
    bound_at_s: float = 0.0

    @property
    def sits(self) -> bool:
        """Whether it is there, bound, and has not ended."""
        return bool(self.node) and not self.gone and self.phase not in ENDED

    def asked_bytes(self, container: str, memory_bytes: int, replicas: int) -> int:
        """The request on each device that the container gets."""
        text = self.vram
        if text is not None and "=" in text:
            text = dict(part.split("=") for part in text.split(",")).get(container)
        if text is None:
            return memory_bytes // replicas
        if text.endswith("%"):
            return memory_bytes * int(text[:-1]) // 100
        digits = text.rstrip("KMGi")
        return int(digits) * _UNITS[text[len(digits) :]]

    def named(self, container: str) -> set[str]:
        """The devices that its placement names for the container."""
        told = (self.placement or {}).get("containers", {}).get(container, {})
        return {*told.get("devices", ()), *told.get("candidates", ())}


@dataclass
class Tally:
    """Counts of what was seen, so that a run without events cannot pass as a good one."""

    created: int = 0
    bound: int = 0
    outsiders: int = 0
    gone: int = 0
    rejected: int = 0
    looks: int = 0
    #: Left out of the sums, and why.
    missed: int = 0
    misled: int = 0
    surprised: int = 0


@dataclass
class Auditor:
    """Receives all events. ``findings``: errors at any moment; ``settled`` judges the end.

    Pods and GPUNodes come by two watches, of which either may be behind the other. So what looks
    wrong is kept as it looked, and who is left out of the sums is decided when it is asked for.
    """

    machines: Mapping[str, Machine]
    now_s: Callable[[], float] = lambda: 0.0
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self._pods: dict[str, _Pod] = {}
        self._sits_on: dict[str, set[str]] = {name: set() for name in self.machines}
        self._gpunodes: dict[str, Object] = {}
        #: uid -> attempt of its last known reservation.
        self._attempt: dict[str, str] = {}
        #: Pods with a reservation that was written beside a lie.
        self._misled: set[str] = set()
        self._lying: set[str] = set()
        #: Gone pods on nodes whose agents have lied since they were gone.
        self._hidden: set[str] = set()
        #: uids that were seen on a device that their placement does not name.
        self._missed: set[str] = set()
        self._surprised: set[str] = set()
        #: Node -> when something last went on there that a prediction cannot know of.
        self._unforeseen_s: dict[str, float] = {}
        self._story: dict[str, deque[str]] = {name: deque(maxlen=60) for name in self.machines}
        #: (rule, where, pods) -> what there is, what each of the pods wants of it, and how it came.
        self._suspicions: dict[
            tuple[str, str, frozenset[str]], tuple[int, dict[str, int], tuple[str, ...]]
        ] = {}
        #: (node, device) -> the driver was asked for more than there was.
        self._overdrawn: set[tuple[str, str]] = set()
        self._holdings: dict[str, list[Holding]] = {}
        self._uses: dict[str, list[Use]] = {}
        #: Devices with a pod that is left out of the sums.
        self._excused: set[str] = set()

    # Received from the API server.

    def pod(self, manifest: Object) -> None:
        """The pod is now as given."""
        seen = _pod(manifest)
        before = self._pods.get(seen.uid)
        seen.bound_at_s = before.bound_at_s if before and before.node else self.now_s()
        self._pods[seen.uid] = seen
        if before is None and seen.gpus:
            self.tally.created += 1
        if seen.node in self.machines and (before is None or not before.node) and seen.gpus:
            self._bound(seen)
        if seen.phase == "Failed" and (before is None or before.phase != "Failed"):
            self.tally.rejected += 1
        self._sit(seen)

    def pod_gone(self, uid: str) -> None:
        if (pod := self._pods.get(uid)) is not None and not pod.gone:
            pod.gone = True
            self.tally.gone += 1
            self._sit(pod)
            if pod.node in self.machines:
                self._note(pod.node, f"{pod.name} is gone")
                if all(each.uid != uid for each in self._holdings.get(pod.node, ())):
                    self._unforeseen(pod.node)

    def listed(self, manifests: Iterable[Object]) -> None:
        """All pods that there are: what is not among them is gone."""
        there = {manifest["metadata"]["uid"]: manifest for manifest in manifests}
        for uid in self._pods.keys() - there.keys():
            self.pod_gone(uid)
        for manifest in there.values():
            self.pod(manifest)

    def gpunode(self, gpunode: Object) -> None:
        name = gpunode["metadata"]["name"]
        if name not in self.machines:
            return
        before = reservations(self._gpunodes.get(name, {}))
        for uid in before.keys() - reservations(gpunode).keys():
            self._note(name, f"promises {before[uid].get('name')} nothing any more")
        self._gpunodes[name] = gpunode
        overstates = self._overstates(name, gpunode)
        for uid, promise in reservations(gpunode).items():
            attempt = promise.get("attempt", "")
            if self._attempt.get(uid) != attempt:
                self._attempt[uid] = attempt
                self._note(name, f"promises {promise.get('name')} ({attempt})")
                if overstates:
                    self._misled.add(uid)

    def gpunode_gone(self, name: str) -> None:
        if self._gpunodes.pop(name, None) is not None:
            self._note(name, "its GPUNode is gone")
            self._unforeseen(name)

    # What goes on on the nodes.

    def lying(self, node: str, lies: bool) -> None:
        """Its agent lies from now on, or no longer. Lies may be believed until a true report has
        arrived, which ``gpunode`` receives."""
        if lies != (node in self._lying):
            self._note(node, "its agent lies" if lies else "its agent lies no longer")
        self._unforeseen(node)
        (self._lying.add if lies else self._lying.discard)(node)

    def look(self, node: str, holdings: Iterable[Holding], uses: Iterable[Use]) -> None:
        """The plugin's allocations and the driver's figures, at this moment."""
        self.tally.looks += 1
        before = set(self._holdings.get(node, ()))
        self._holdings[node], self._uses[node] = list(holdings), list(uses)
        self._changed(node, before, set(self._holdings[node]))
        if node in self._lying:
            gone = {use.uid for use in self._uses[node] if not self._is_there(use.uid)}
            self._hidden |= gone
        for device, wants in self._wants(node).items():
            if not all(map(self._counts, wants)):
                self._excused.add(device)
            ours = {uid: wanted for uid, wanted in wants.items() if self._is_ours(uid)}
            has_bytes = self.machines[node].memory_bytes[device]
            if sum(ours.values()) > has_bytes:
                self._suspect("overcommitted", f"{node} {device}", ours, has_bytes)

    def overdrawn(self, node: str, device: str) -> None:
        """The driver was asked for more than there was: at some moment, by some process."""
        self._overdrawn.add((node, device))

    @property
    def findings(self) -> list[Finding]:
        """Findings at any moment."""
        found = [
            finding
            for finding, has_bytes, wants in self._suspected()
            if sum(wanted for uid, wanted in wants.items() if self._counts(uid)) > has_bytes
        ]
        for node, device in sorted(self._overdrawn):
            if device not in self._excused:
                what = "more memory was taken than there is, by pods of ours alone"
                found.append(Finding("overdrawn", f"{node} {device}", what))
        return found

    @property
    def excused(self) -> list[Finding]:
        """Overcommitment by Headroom's own pods that misses, surprises and lies explain."""
        findings = self.findings
        return [finding for finding, _, _ in self._suspected() if finding not in findings]

    def _suspected(self) -> Iterator[tuple[Finding, int, dict[str, int]]]:
        for (rule, where, _), (has_bytes, wants, story) in list(self._suspicions.items()):
            pods = ", ".join(f"{self._pods[uid].name}={wants[uid]}" for uid in sorted(wants))
            what = f"has {has_bytes} bytes, {sum(wants.values())} are wanted: {pods}"
            yield Finding(rule, where, what, story), has_bytes, wants

    def fates(self, uid: str) -> list[str]:
        """The messages that an extender may give if it cannot bind the pod."""
        pod = self._pods.get(uid)
        bound = [f"is bound to node {pod.node}"] if pod and pod.node else []
        if pod is None or pod.gone or pod.deleting:
            return [*bound, "does not exist", "was replaced", "is being deleted"]
        return bound

    # What must hold in the end.

    def settled(self) -> list[Finding]:
        """All findings that remain once no client acts any more."""
        return [*self._orphans(), *self._charges(), *self._waiting()]

    def _orphans(self) -> Iterable[Finding]:
        for name, gpunode in self._gpunodes.items():
            for uid, promise in reservations(gpunode).items():
                pod = self._pods.get(uid)
                if pod is None or not pod.sits or pod.node != name:
                    what = f"promise to {promise.get('name')} ({uid}), which {_whereabouts(pod)}"
                    yield Finding("orphan", name, what)

    def _charges(self) -> Iterable[Finding]:
        for pod in self._sitting():
            charged = [
                name for name, gpunode in self._gpunodes.items() if pod.uid in reservations(gpunode)
            ]
            if charged != [pod.node]:
                what = f"sits on {pod.node} and is charged on: {', '.join(charged) or 'no node'}"
                yield Finding("charged", f"pod {pod.name} ({pod.uid})", what)
                continue
            promise = reservations(self._gpunodes[pod.node])[pod.uid]
            for device, wanted_bytes in self._wanted_by(pod).items():
                most_bytes = _charged_bytes(promise, device)
                if most_bytes < wanted_bytes and pod.uid not in self._missed:
                    what = f"wants {wanted_bytes} of {device} and is charged {most_bytes} there"
                    yield Finding("charged", f"pod {pod.name} ({pod.uid})", what)

    def _waiting(self) -> Iterable[Finding]:
        for pod in self._pods.values():
            if pod.gone or pod.node or pod.deleting or pod.phase in ENDED or not pod.gpus:
                continue
            for name in self.machines:
                if self._fits(pod, name):
                    what = f"waits with {pod.vram}, but would fit on {name}"
                    story = (*self._story[name], f"taken: {self._wants(name)}")
                    yield Finding("waits", f"pod {pod.name} ({pod.uid})", what, story)
                    break

    def _fits(self, pod: _Pod, node: str) -> bool:
        """Whether it fits on every device of the node, all containers on one device."""
        machine, taken = self.machines[node], self._wants(node)
        given = Counter(each.device for each in self._holdings.get(node, ()))
        # Replicas that kube-scheduler counts, of pods that the kubelet has yet to see as well.
        counted = sum(sum(each.gpus.values()) for each in self._sitting() if each.node == node)
        if counted + sum(pod.gpus.values()) > len(machine.memory_bytes) * machine.replicas:
            return False
        return all(
            given[device] + sum(pod.gpus.values()) <= machine.replicas
            and sum(self._whole(uid, node, device, n) for uid, n in taken.get(device, {}).items())
            + self._promised_beyond(node, device, taken.get(device, {}))
            + self._ask_on(pod, node, device)
            <= has_bytes
            for device, has_bytes in machine.memory_bytes.items()
        )

    def _whole(self, uid: str, node: str, device: str, wanted_bytes: int) -> int:
        """Return what the ledger charges a pod for on one of its devices.

        A pod with several GPU containers is charged for all of them on each device
        (``docs/device-truth.md``).
        """
        pod = self._pods.get(uid)
        if pod is None or not pod.sits or len(pod.gpus) < 2:
            return wanted_bytes
        return max(wanted_bytes, self._ask_on(pod, node, device))

    def _promised_beyond(self, node: str, device: str, taken: Mapping[str, int]) -> int:
        """The bytes reserved for misled pods beyond their requests: with more memory in the report,
        a share was larger, and a reservation stays as it is."""
        promises = reservations(self._gpunodes.get(node, {}))
        return sum(
            max(0, _charged_bytes(promises[uid], device) - wanted)
            for uid, wanted in taken.items()
            if uid in self._misled and uid in promises
        )

    # Its books.

    def _changed(self, node: str, before: set[Holding], after: set[Holding]) -> None:
        """Admissions, releases, and surprises that were unpredictable for each pod."""
        for each in sorted(before - after, key=str):
            self._note(node, f"{self._name(each.uid)} releases {each.device}")
            self._unforeseen(node)
        for each in sorted(after - before, key=str):
            self._note(node, f"{self._name(each.uid)} is given {each.device}")
            pod = self._pods.get(each.uid)
            if pod is None or pod.placement is None:
                self._unforeseen(node)
            elif each.device not in pod.named(each.container):
                if each.uid not in self._missed:
                    self._missed.add(each.uid)
                    self.tally.missed += 1
            elif self.machines[node].predicted and each.uid not in self._surprised:
                last_s = self._unforeseen_s.get(node, float("-inf"))
                if node in self._lying or last_s > pod.bound_at_s - HINDSIGHT_S:
                    self._surprised.add(each.uid)
                    self.tally.surprised += 1

    def _unforeseen(self, node: str) -> None:
        self._unforeseen_s[node] = self.now_s()

    def _note(self, node: str, what: str) -> None:
        self._story[node].append(f"{self.now_s():8.1f} s  {what}")

    def _name(self, uid: str) -> str:
        return self._pods[uid].name if uid in self._pods else uid

    def _bound(self, pod: _Pod) -> None:
        self.tally.bound += 1
        by = "us" if pod.placement else "somebody else"
        self._note(pod.node, f"{pod.name} ({pod.vram}) is bound by {by}")
        if pod.placement is None:
            self.tally.outsiders += 1
        elif pod.uid in self._misled:
            self.tally.misled += 1

    def _sit(self, pod: _Pod) -> None:
        """On its node, all that sits there must fit: whatever device each is given in the end."""
        if pod.node not in self.machines or not pod.gpus:
            return
        sitting = self._sits_on[pod.node]
        if not pod.sits:
            sitting.discard(pod.uid)
            return
        sitting.add(pod.uid)
        machine = self.machines[pod.node]
        ours = {
            uid: self._ask_on(self._pods[uid], pod.node, next(iter(machine.memory_bytes)))
            for uid in sitting
            if self._is_ours(uid)
        }
        has_bytes = sum(machine.memory_bytes.values())
        if sum(ours.values()) > has_bytes:
            self._suspect("reserved twice", pod.node, ours, has_bytes)

    def _is_ours(self, uid: str) -> bool:
        """Whether it is there because of us."""
        pod = self._pods.get(uid)
        return pod is not None and pod.placement is not None

    def _counts(self, uid: str) -> bool:
        """The same, and of what we could know."""
        left_out = self._misled, self._missed, self._surprised, self._hidden
        return self._is_ours(uid) and not any(uid in each for each in left_out)

    def _wants(self, node: str) -> dict[str, dict[str, int]]:
        """Device -> pod -> what it asked for there or holds there, whichever is more."""
        wants: dict[str, dict[str, int]] = {}
        for each in self._holdings.get(node, ()):
            pod, of = self._pods.get(each.uid), wants.setdefault(each.device, {})
            machine = self.machines[node]
            asked_bytes = (
                pod.asked_bytes(each.container, machine.memory_bytes[each.device], machine.replicas)
                if pod is not None
                else 0
            )
            of[each.uid] = of.get(each.uid, 0) + asked_bytes
        used: Counter[tuple[str, str]] = Counter()
        for use in self._uses.get(node, ()):
            used[use.device, use.uid] += use.used_bytes
        for (device, uid), used_bytes in used.items():
            of = wants.setdefault(device, {})
            of[uid] = max(of.get(uid, 0), used_bytes)
        return wants

    def _wanted_by(self, pod: _Pod) -> dict[str, int]:
        wants = self._wants(pod.node)
        return {device: of[pod.uid] for device, of in wants.items() if pod.uid in of}

    def _ask_on(self, pod: _Pod, node: str, device: str) -> int:
        machine = self.machines[node]
        has_bytes, replicas = machine.memory_bytes[device], machine.replicas
        return sum(pod.asked_bytes(c, has_bytes, replicas) * n for c, n in pod.gpus.items())

    def _sitting(self) -> list[_Pod]:
        return [self._pods[uid] for uids in self._sits_on.values() for uid in uids]

    def _is_there(self, uid: str) -> bool:
        pod = self._pods.get(uid)
        return pod is not None and not pod.gone

    def _overstates(self, name: str, gpunode: Object) -> bool:
        has = self.machines[name].memory_bytes
        devices = (gpunode.get("status") or {}).get("devices") or ()
        return any(each.get("memory", 0) > has.get(each["uuid"], 0) for each in devices)

    def _suspect(self, rule: str, where: str, wants: dict[str, int], has_bytes: int) -> None:
        story = tuple(self._story[where.partition(" ")[0]])
        self._suspicions.setdefault((rule, where, frozenset(wants)), (has_bytes, wants, story))


def reservations(gpunode: Object) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (gpunode.get("spec") or {}).get("reservations") or {}
    return found


def _pod(manifest: Object) -> _Pod:
    metadata, spec = manifest["metadata"], manifest["spec"]
    annotations = metadata.get("annotations") or {}
    placement = annotations.get(f"{PREFIX}placement")
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
        placement=None if placement is None else json.loads(placement),
    )


def _charged_bytes(promise: Object, device: str) -> int:
    return sum(charge.get("candidates", {}).get(device, 0) for charge in promise["charges"])


def _whereabouts(pod: _Pod | None) -> str:
    if pod is None:
        return "was never seen"
    if pod.gone:
        return f"is gone (was on {pod.node or 'no node'})"
    if pod.phase in ENDED:
        return f"has ended: {pod.phase}"
    return f"is on {pod.node or 'no node'}"
