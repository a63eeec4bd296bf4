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
from extender.kube.resources import Kind, watched_kinds
from extender.state.changes import Event
from tests.builders import DISTRIBUTED, GIB, MIB, gpunode, mig, reservation, shared, use
from tests.fuzz.hostile import RAW, Seed, attack, encode
from tests.fuzz.watchdog import Harm
from tests.fuzz.world import NODES, World, WorldTarget, recorded
from tests.serving import offer
from tests.serving import pod as sent_pod

BAD = "hostile"
#: A world takes so many inputs; then there is a new one, so that no input meets too many others.
_LIFE = 2000
#: Sound nodes are compared after every input; calls are made after so many.
_OFFERED_EVERY, _EVERY = 8, 100
#: A document that names one of these may change the sound part.
_SOUND = [word.encode() for word in (*NODES, "uid-", '"sits"', '"default"', '"team"')]


class _Told(KubeApi):
    """Answers one list or one watch, and then nothing."""

    def __init__(self, answer: bytes, random: Random) -> None:
        self._answer = answer
        self._random = random

    def call(self, method: str, path: str, **_: Any) -> bytes:
        answer, self._answer = self._answer, b""
        return answer

    def stream(self, path: str, **_: Any) -> Any:
        return self

    def read(self) -> bytes:
        """The rest of it, or some of it."""
        if not self._answer:
            raise NoAnswer("the end")
        size = len(self._answer)
        cut = size if self._random.random() < 0.7 else self._random.randrange(1, size + 1)
        piece, self._answer = self._answer[:cut], self._answer[cut:]
        return piece

    def interrupt(self) -> None:
        return

    def close(self) -> None:
        return


class WatchTarget(WorldTarget):
    """One kind. ``listed``: whether it is delivered as a list or as a watch."""

    def __init__(self, kind: str, *, listed: bool) -> None:
        super().__init__()
        self.name = f"{'list' if listed else 'watch'}-{kind}"
        (self._kind,) = (each for each in watched_kinds("headroom-system") if each.name == kind)
        self._listed = listed
        self._seeds = [Seed.of(tree) for tree in _OBJECTS[kind]()]
        self._call = json.dumps(offer(sent_pod("small", "2Gi"), *NODES[:3], BAD)).encode()
        self._passed = NODES[:3]

    def make(self, random: Random) -> bytes:
        objects = [attack(self._seeds, random) for _ in range(random.choice((1, 1, 2)))]
        if self._listed:
            items = b",".join(objects)
            return b'{"metadata":{"resourceVersion":"7"},"items":[%b]}' % items
        kinds = (b"ADDED", b"MODIFIED", b"MODIFIED", b"DELETED", b"BOOKMARK", b"ERROR", b"X")
        lines = [
            b'{"type":"%b","object":%b}' % (random.choice(kinds), each.replace(b"\n", b" "))
            for each in objects
        ]
        end = random.choice(
            (b"\n", b"\n", b"\n", b"\n", b"\r\n", b"", b"\n\n\n", b"\n{", b"\x00\n")
        )
        between = random.choice((b"\n", b"\n", b"", b" ", b"\n \n", random.choice(RAW) + b"\n"))
        return between.join(lines) + end

    def _renew(self) -> None:
        super()._renew()
        self._age = 0
        self._terms = self._sound_terms()

    def _sound_terms(self) -> dict[str, Any]:
        snap = self._world.cluster.snapshot()
        return {name: snap.nodes[snap.row_of[name]] for name in NODES[:4]}

    def _taken(self, data: bytes) -> bool:
        world = self._world
        delivered, crash = _told(self._kind, data, world, listed=self._listed)
        if crash is not None:
            raise crash
        self._age += 1
        if (self._listed and delivered) or any(word in data for word in _SOUND):
            # It may have concerned the sound nodes: then only survival counts.
            world.call("filter", self._call)
            self._renew()
            return delivered
        if self._sound_terms() != self._terms:
            raise Harm("a sound node is not what it was")
        if self._age % _OFFERED_EVERY == 0:
            self._offer_beside(world)
        if self._age % _EVERY == 0:
            world.unharmed()
        if self._age >= _LIFE:
            self._renew()
        return delivered

    def _offer_beside(self, world: World) -> None:
        """The hostile node, beside the sound ones."""
        world.now_s += 0.5
        reply = world.call("filter", self._call)
        passed = json.loads(reply.body)["NodeNames"]
        if [name for name in passed if name != BAD] != self._passed:
            raise Harm(f"passed {passed}")
        held = world.cluster.gpunode(BAD)
        if BAD in passed and (held is None or not _has_room(held)):
            raise Harm(f"2Gi are found to fit on {held}")
        prioritized = world.call("prioritize", self._call)
        if prioritized.status != 200:
            raise Harm(f"prioritize: {prioritized.status}")


def _told(
    kind: Kind, data: bytes, world: World, *, listed: bool
) -> tuple[bool, BaseException | None]:
    """Whether anything was delivered, and the exceptions of its receivers."""
    delivered: list[Event] = []
    crash: list[BaseException] = []

    def deliver(events: Sequence[Event]) -> None:
        delivered.extend(events)
        try:
            world.deliver(events)
        except Exception as err:  # noqa: BLE001 - the reflector would go on, and hide it
            crash.append(err)

    def wait(_: float) -> None:
        reflector.stop()

    reflector = Reflector(
        kind, _Told(data, Random(len(data))), deliver, clock=lambda: world.now_s, wait=wait
    )
    if not listed:
        reflector._version = "1"
    reflector.run()
    return bool(delivered), crash[0] if crash else None


def _has_room(held: GPUNode) -> bool:
    """Whether some device of it has 2 GiB free, by its own figures."""
    devices = held.status.devices if held.status else []
    return any(
        device.memory_bytes - device.reserved_bytes - device.used_bytes + 64 * MIB >= 2 * GIB
        for device in devices
        if min(device.memory_bytes, device.reserved_bytes, device.used_bytes) >= 0
    )


def _named(tree: Any) -> Any:
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
    return [_named(msgspec.json.decode(encode(node))) for node in nodes]


def _nodes() -> list[Any]:
    bodies = [body for body in recorded("filter") if body["Nodes"]]
    real = [node for body in bodies for node in body["Nodes"]["items"]]
    labels = {
        "nvidia.com/gpu.count": "8", "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.memory": "81920",
        "nvidia.com/gpu.product": "NVIDIA-H100", "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/mig.strategy": "mixed", "nvidia.com/mig.config.state": "success",
        "cloud.google.com/gke-accelerator": "nvidia-tesla-a100-80gb", "gpu": "on",
        "cloud.google.com/gke-max-shared-clients-per-gpu": "4",
        "cloud.google.com/gke-gpu-sharing-strategy": "time-sharing",
        "karpenter.k8s.aws/instance-gpu-count": "8",
        "karpenter.k8s.aws/instance-gpu-memory": "81920",
    }  # fmt: skip
    notes = {
        "headroom.gpu/reserve": "512Mi", "headroom.gpu/device-choice": "any",
        "hami.io/node-nvidia-register": "x",
    }  # fmt: skip
    metadata = {"labels": labels, "annotations": notes, "resourceVersion": "3"}
    status = {"allocatable": {"nvidia.com/gpu": "8", "cpu": "1"}}
    return [_named(each) for each in (*real[:2], {"metadata": metadata, "status": status})]


def _pods() -> list[Any]:
    real = [body["Pod"] for body in recorded("filter")[:3]]
    bound = sent_pod("bad", "2Gi")
    bound["spec"]["nodeName"] = BAD
    bound["status"] |= {
        "phase": "Running",
        "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes"}],
        "containerStatuses": [{"name": "main", "state": {"running": {}}}],
    }
    bound["metadata"]["annotations"] |= {
        "headroom.gpu/placement": '{"node":"hostile","asked":"8Gi"}', "headroom.gpu/max-sm": "70%",
        "hami.io/vgpu-node": BAD, "runai-gpu": "0", "ALIYUN_COM_GPU_MEM_IDX": "0",
    }  # fmt: skip
    gated = json.loads(json.dumps(bound))
    gated["spec"]["initContainers"] = [{"name": "headroom-gate"}]
    return [_named(each) for each in (*real, sent_pod("bad", "8Gi"), bound, gated)]


def _leases() -> list[Any]:
    vouch = '{"sampledAt":"2026-11-21T00:00:01Z","gpunode":"bad","observedAt":"%s","after":"1"}'
    notes = {"headroom.gpu/observed-at": vouch % "2026-11-21T00:00:00+00:00"}
    spec = {"holderIdentity": "a", "renewTime": "2026-11-21T00:00:01.000000Z"}
    return [_named({"metadata": {"annotations": notes, "resourceVersion": "4"}, "spec": spec})]


def _slices() -> list[Any]:
    spec = {
        "driver": "gpu.nvidia.com", "nodeName": BAD, "pool": {"name": BAD},
        "devices": [{"name": "gpu-0", "basic": {}}],
    }  # fmt: skip
    return [_named({"metadata": {"resourceVersion": "4"}, "spec": spec})]


def _namespaces() -> list[Any]:
    return [_named({"metadata": {"annotations": {"headroom.gpu/default-vram": "4Gi"}}})]


_OBJECTS = {
    "gpunodes": hostile_gpunodes,
    "nodes": _nodes,
    "pods": _pods,
    "leases": _leases,
    "resourceslices": _slices,
    "namespaces": _namespaces,
}
KINDS = tuple(_OBJECTS)
