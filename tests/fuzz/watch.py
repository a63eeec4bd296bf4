"""Events of the API server, under hostile objects, lines and lists, into the cluster state.

Hostile are one node, its GPUNode and Lease, and pods, slices and namespaces that name none of the
sound ones. Whatever they contain, the sound nodes stay as they were, term by term, and sound calls
are answered as before, whether the hostile node is offered beside them or not.
"""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from contract.gpunode import GPUNode
from extender.kube.api_errors import NoAnswer
from extender.kube.client import KubeApi
from extender.kube.reflector import Reflector
from extender.kube.resources import watched_kinds
from extender.state.changes import Event
from tests.builders import DISTRIBUTED, GIB, MIB, gpunode, mig, reservation, shared, use
from tests.fuzz.hostile import RAW
from tests.fuzz.watchdog import Harm, Target
from tests.fuzz.world import NODES, World, recorded, rich_pod
from tests.serving import offer
from tests.serving import pod as sent_pod
from tests.state.labels import aks, eks, gfd, gke, karpenter

BAD = "hostile"
#: A world takes so many inputs; then there is a new one, so that no input meets too many others.
_LIFE = 2000
#: Sound nodes are compared after every input; calls are made after so many.
_OFFERED_EVERY, _EVERY = 8, 100
#: A document that names one of these may change the sound part.
_SOUND = [word.encode() for word in (*NODES, "uid-", '"sits"', '"default"', '"team"')]
_CALL = json.dumps(offer(sent_pod("small", "2Gi"), *NODES[:3], BAD)).encode()


class _Scripted(KubeApi):
    """Answers one list, or one watch in pieces, and then nothing."""

    def __init__(self, answer: bytes) -> None:
        cut = Random(answer).randrange(len(answer) + 1)
        self._pieces = [answer[:cut], answer[cut:]]

    def call(self, method: str, path: str, **_: Any) -> bytes:
        return self._pieces.pop(0) + self._pieces.pop(0)

    def stream(self, path: str, **_: Any) -> Any:
        return self

    def read(self) -> bytes:
        while self._pieces:
            if piece := self._pieces.pop(0):
                return piece
        raise NoAnswer("the end")

    def close(self) -> None:
        return

    interrupt = close


class WatchTarget(Target):
    """One kind. ``listed``: whether it is delivered as a list or as a watch."""

    def __init__(self, kind: str, *, listed: bool) -> None:
        self.name = f"{'list' if listed else 'watch'}-{kind}"
        self.seeds = [_renamed(tree) for tree in OBJECTS[kind]]
        (self._kind,) = (each for each in watched_kinds("headroom-system") if each.name == kind)
        self._listed = listed
        self._renew()

    def make(self, random: Random) -> bytes:
        objects = [super(WatchTarget, self).make(random) for _ in range(random.choice((1, 1, 2)))]
        if self._listed:
            items = b",".join(objects)
            return b'{"metadata":{"resourceVersion":"7"},"items":[%b]}' % items
        kinds = (b"ADDED", b"MODIFIED", b"MODIFIED", b"DELETED", b"BOOKMARK", b"ERROR", b"X")
        lines = [
            b'{"type":"%b","object":%b}' % (random.choice(kinds), each.replace(b"\n", b" "))
            for each in objects
        ]
        between = random.choice((b"\n", b"\n", b"", b" ", b"\n \n", random.choice(RAW) + b"\n"))
        ends = b"\n", b"\n", b"\n", b"\n", b"\r\n", b"", b"\n\n\n", b"\n{", b"\x00\n"
        return between.join(lines) + random.choice(ends)

    def _renew(self) -> None:
        self.world = World()
        self._age = 0
        self._terms = self._sound_terms()

    def _sound_terms(self) -> dict[str, Any]:
        snap = self.world.cluster.snapshot()
        return {name: snap.nodes[snap.row_of[name]] for name in NODES[:4]}

    def take(self, data: bytes) -> bool:
        delivered = self._deliver(data)
        self._age += 1
        if (self._listed and delivered) or any(word in data for word in _SOUND):
            # It may have concerned the sound nodes: then only survival counts.
            self.world.call("filter", _CALL)
            self._renew()
            return delivered
        if self._sound_terms() != self._terms:
            raise Harm("a sound node is not what it was")
        if self._age % _OFFERED_EVERY == 0:
            self.offer_beside()
        if self._age % _EVERY == 0:
            self.world.unharmed()
        if self._age >= _LIFE:
            self._renew()
        return delivered

    def _deliver(self, data: bytes) -> bool:
        """Return whether anything was delivered. The reflector logs exceptions of the receiver."""
        delivered: list[Event] = []

        def deliver(events: Sequence[Event]) -> None:
            delivered.extend(events)
            self.world.deliver(events)

        reflector = Reflector(
            self._kind,
            _Scripted(data),
            deliver,
            clock=lambda: self.world.now_s,
            wait=lambda _: reflector.stop(),
        )
        if not self._listed:
            reflector._version = "1"
        reflector.run()
        return bool(delivered)

    def offer_beside(self) -> None:
        """Offer the hostile node beside the sound ones."""
        world = self.world
        world.now_s += 0.5
        passed = json.loads(world.call("filter", _CALL).body)["NodeNames"]
        if [name for name in passed if name != BAD] != NODES[:3]:
            raise Harm(f"passed {passed}")
        held = world.cluster.gpunode(BAD)
        if BAD in passed and (held is None or not _has_room(held)):
            raise Harm(f"2Gi are found to fit on {held}")
        prioritized = world.call("prioritize", _CALL)
        if prioritized.status != 200:
            raise Harm(f"prioritize: {prioritized.status}")


def _has_room(held: GPUNode) -> bool:
    """Whether some device of it has 2 GiB free, by its own figures."""
    devices = held.status.devices if held.status else []
    return any(
        device.memory_bytes - device.reserved_bytes - device.used_bytes + 64 * MIB >= 2 * GIB
        for device in devices
        if min(device.memory_bytes, device.reserved_bytes, device.used_bytes) >= 0
    )


def _renamed(tree: Any) -> Any:
    """The tree, with its object renamed to a unique name, and without names of other objects."""
    metadata = {**tree["metadata"], "name": BAD, "uid": "bad", "namespace": "bad"}
    text = json.dumps({**tree, "metadata": metadata})
    return json.loads(text.replace("gpu-a100-", "other-").replace('"default"', '"bad"'))


def hostile_gpunodes() -> list[Any]:
    devices = [
        shared("GPU-x", free=1, allocated=3, used_bytes=3 * GIB, unattributed_bytes=GIB),
        mig("MIG-x", 1, parent="GPU-x"),
        shared("GPU-y", sharing="mps"),
    ]
    nodes = [
        gpunode(
            *devices[:count],
            name=BAD,
            uid="bad",
            version="9",
            reservations={"u1": reservation({"GPU-x": 2 * GIB, "GPU-y": GIB}, choice="GPU-x")},
            pods=[use("u1", "GPU-x", GIB, replica="GPU-x::0"), use("u2", "GPU-y", None)],
            plugin=DISTRIBUTED,
        )
        for count in (1, 2, 3)
    ]
    return [_renamed(msgspec.json.decode(msgspec.json.encode(node))) for node in nodes]


def _bound_pods() -> list[Any]:
    """Return a running pod, and one with the gate's container."""
    bound = rich_pod()
    bound["spec"]["nodeName"] = BAD
    bound["status"] = {
        "phase": "Running",
        "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes"}],
        "containerStatuses": [{"name": "main", "state": {"running": {}}}],
    }
    gated = {**bound, "spec": {**bound["spec"], "initContainers": [{"name": "headroom-gate"}]}}
    return [bound, gated]


_FILTERED = recorded("filter")
_LABELS = {
    **gfd(replicas="4", sharing_strategy="time-slicing"),
    **gke(accelerator="nvidia-tesla-a100-80gb", gpu_sharing_strategy="time-sharing"),
    **gke(max_shared_clients_per_gpu="4"),
    **karpenter("8", "81920"),
    **aks("Standard_NC24ads_A100_v4"),
    **eks("p4d.24xlarge"),
}
_NOTES = {
    "headroom.gpu/reserve": "512Mi",
    "headroom.gpu/device-choice": "any",
    "hami.io/node-nvidia-register": "x",
}
#: A node with the labels of all clouds.
NODE = {
    "metadata": {"uid": "u", "resourceVersion": "3", "labels": _LABELS, "annotations": _NOTES},
    "status": {"allocatable": {"nvidia.com/gpu": "8", "cpu": "1"}},
}
_CONFIRMED = (
    '{"sampledAt":"2026-11-21T00:00:01Z","gpunode":"bad","observedAt":"2026-11-21T00:00:00+00:00",'
    '"after":"1"}'
)
#: Kind -> sound objects.
OBJECTS: dict[str, list[Any]] = {
    "gpunodes": hostile_gpunodes(),
    "nodes": [*next(body["Nodes"]["items"] for body in _FILTERED if body["Nodes"])[:2], NODE],
    "pods": [*[body["Pod"] for body in _FILTERED[:3]], sent_pod("bad", "8Gi"), *_bound_pods()],
    "leases": [
        {
            "metadata": {"annotations": {"headroom.gpu/observed-at": _CONFIRMED}},
            "spec": {"holderIdentity": "a", "renewTime": "2026-11-21T00:00:01.000000Z"},
        }
    ],
    "resourceslices": [
        {
            "metadata": {"resourceVersion": "4"},
            "spec": {
                "driver": "gpu.nvidia.com",
                "nodeName": BAD,
                "pool": {"name": BAD},
                "devices": [{"name": "gpu-0", "basic": {}}],
            },
        }
    ],
    "namespaces": [{"metadata": {"annotations": {"headroom.gpu/default-vram": "4Gi"}}}],
}
