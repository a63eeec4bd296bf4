"""Readers of the agent and the gate, for input of the kubelet, the plugin, the API server and pods.

Each reader rejects an input only by the exceptions that it declares. What a hostile kubelet makes
of a report is a report that the CRD accepts.
"""

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from types import SimpleNamespace
from typing import Any

import jsonschema
import msgspec

from agent import gate_client
from agent.api_server import of_client
from agent.gate_decision import Limits, judge
from agent.http_endpoints import LatestSample, Server
from agent.kube_publisher import KubernetesPublisher, NotDelivered
from agent.probes.checkpoint import BadCheckpoint, parse_checkpoint
from agent.probes.kubelet import join
from agent.probes.node_probe import NodeApi
from agent.probes.nvml import Memory
from agent.probes.podresources import PodResources, Unanswered
from agent.probes.protobuf import BadMessage, field
from agent.probes.readings import (
    DeviceReading,
    DriverReading,
    Reading,
    RegisteredReading,
    SharingReading,
)
from agent.status_builder import summarise
from agent.steering.choice import choose
from agent.steering.messages import (
    ContainerRequest,
    allocated,
    asks_for_preference,
    container_requests,
)
from contract.errors import BadReport
from contract.gpunode_json import decode_gpunode
from contract.heartbeat import Confirmation
from tests.builders import GIB, STAMP
from tests.controlplane import crd_manifest
from tests.fuzz.hostile import Seed, attack, encode, garbled
from tests.fuzz.watch import hostile_gpunodes
from tests.fuzz.watchdog import Harm, Target

NOW = datetime(2026, 11, 21, tzinfo=UTC)
_UUIDS = ["GPU-x", "GPU-y"]
_SCHEMA = crd_manifest()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
_VALID = jsonschema.Draft7Validator(_SCHEMA["properties"]["status"])
_CHECKED_EVERY = 20
_GPUNODE = decode_gpunode(encode(hostile_gpunodes()[0]))
assert _GPUNODE.status is not None
_SAMPLE, _SPEC = _GPUNODE.status, _GPUNODE.spec

Make = Callable[[Random], bytes]


@dataclass(frozen=True)
class Reader:
    """``read`` raises one of ``rejects``, or returns False, if it rejects an input."""

    name: str
    make: Make
    read: Callable[[bytes], object]
    rejects: tuple[type[Exception], ...] = ()

    def take(self, data: bytes) -> bool:
        try:
            return self.read(data) is not False
        except self.rejects:
            return False


def of_trees(*trees: Any) -> Make:
    return functools.partial(attack, [Seed.of(tree) for tree in trees])


def of_bytes(*sound: bytes) -> Make:
    def make(random: Random) -> bytes:
        if random.random() < 0.03:
            return random.randbytes(random.randrange(200))
        times = random.choice((2, 10, 1000)) if random.random() < 0.1 else 1
        return garbled(random.choice(sound) * times, random)

    return make


def _entry(uid: str, replicas: Any) -> dict[str, Any]:
    answer = "CioKFk5WSURJQV9WSVNJQkxFX0RFVklDRVMSEEdQVS0wMDAwMDAwMDAwMDA="
    return {
        "PodUID": uid, "ContainerName": "main", "ResourceName": "nvidia.com/gpu",
        "DeviceIDs": replicas, "AllocResp": answer,
    }  # fmt: skip


_ENTRIES = [_entry("u1", {"0": ["GPU-x::0"]}), _entry("u2", {"0": ["GPU-x::1", "GPU-y"]})]
_REGISTERED = {"nvidia.com/gpu": ["GPU-x::0", "GPU-x::1", "GPU-y"]}
_CHECKPOINTS = [
    {"Data": {"PodDeviceEntries": _ENTRIES, "RegisteredDevices": _REGISTERED}, "Checksum": 1234567},
    {
        "Data": {"PodDeviceEntries": [_entry("u1", ["GPU-x"])], "RegisteredDevices": None},
        "Checksum": 0,
    },
]
_DEVICES = field(1, "nvidia.com/gpu") + field(2, "GPU-x::0") + field(2, "GPU-y")
_CONTAINER = field(1, "main") + field(2, _DEVICES) + field(9, b"x") + field(4, 7)
_LISTED = field(1, field(1, "p") + field(2, "default") + field(3, _CONTAINER)) * 2
_ALLOCATABLE = field(1, field(1, "nvidia.com/gpu") + field(2, "GPU-x::0") + field(4, b"\x08\x01"))


class _Service(PodResources):
    def __init__(self, answer: bytes) -> None:
        super().__init__("/nowhere")
        self._answer = answer

    def _call(self, method: str) -> bytes:
        return self._answer


class _Kubelet:
    """Makes reports from what the kubelet lists; the CRD checks one of twenty."""

    def __init__(self) -> None:
        self._made = 0

    def report(self, *told: Reading) -> None:
        memory = Memory(24 * GIB, 20 * GIB, 0)
        devices = [
            DeviceReading("nvml", uuid, index, memory=memory, processes={7: GIB})
            for index, uuid in enumerate(_UUIDS)
        ]
        body = encode(summarise([DriverReading("nvml", "570.1"), *told, *devices], NOW, "1"))
        self._made += 1
        if self._made % _CHECKED_EVERY == 0:
            decode_gpunode(b'{"metadata":{},"status":%b}' % body)
            for wrong in _VALID.iter_errors(msgspec.json.decode(body)):
                raise Harm(f"a report that the CRD rejects: {wrong.message:.300}")

    def told(self, checkpoint: bytes, listed: bytes) -> None:
        service = _Service(listed)
        joined = join(parse_checkpoint(checkpoint).entries, service.containers(), {})
        sharing = SharingReading("stated", "nvidia.com/gpu", 4, "time-slicing")
        healthy = RegisteredReading("podresources", "nvidia.com/gpu", frozenset({"GPU-x::0"}))
        self.report(sharing, healthy, *joined.holdings)

    def checkpoint(self, data: bytes) -> None:
        self.told(data, _LISTED)

    def podresources(self, data: bytes) -> None:
        self.told(encode(_CHECKPOINTS[0]), data)
        _Service(data).healthy()


_KUBELET = _Kubelet()
_WISH = field(1, "GPU-x::0") + field(1, "GPU-x::1") + field(2, "GPU-x::0") + field(3, 1)


def _plugin(data: bytes) -> None:
    for wanted in [*container_requests(data), ContainerRequest(tuple(_UUIDS), (), 1 << 62)]:
        choose(wanted, "nvidia.com/gpu", _SPEC, _SAMPLE, (), Limits(0, 0))
    allocated(data)
    asks_for_preference(data)


def _client(data: bytes) -> Any:
    """Return a client that gets this answer to every request, with a status from its length."""
    status = {0: 403, 1: 404, 2: 500}.get(len(data) % 7, 200)
    answer = SimpleNamespace(status=status, data=data, headers={"Retry-After": str(len(data))})
    pool = SimpleNamespace(request=lambda *args, **how: answer)
    configuration = SimpleNamespace(host="https://h", auth_settings=dict)
    rest = SimpleNamespace(pool_manager=pool)
    return SimpleNamespace(configuration=configuration, rest_client=rest)


def _apiserver(data: bytes) -> bool:
    client = of_client(_client(data))
    publisher = KubernetesPublisher(client, "n", "ns", 30.0)
    confirmation = Confirmation(sampled_at=STAMP, gpunode="g", observed_at=STAMP)
    taken = False
    for action in (
        publisher.held,
        publisher.reported,
        publisher.gpunode,
        lambda: publisher.report(_SAMPLE),
        lambda: publisher.heartbeat(NOW, confirmation),
    ):
        try:
            action()
            taken = True
        except (NotDelivered, BadReport):
            pass
    _KUBELET.report(*NodeApi(client, "n").read())
    return taken


_LABELS = {
    "metadata": {
        "uid": "u",
        "labels": {
            "nvidia.com/gpu.sharing-strategy": "time-slicing",
            "nvidia.com/gpu.replicas": "4",
            "nvidia.com/gpu.product": "A-SHARED",
            "cloud.google.com/gke-gpu-sharing-strategy": "mps",
            "cloud.google.com/gke-max-shared-clients-per-gpu": "4",
        },
        "annotations": {"headroom.gpu/reserve": "512Mi"},
    },
    "kubeletconfig": {"topologyManagerPolicy": "restricted"},
}
_STATUS = {"kind": "Status", "message": "rejected", "reason": "Forbidden", "code": 403}


def _gate(data: bytes) -> None:
    node = decode_gpunode(data)
    for uid in ("u1", "u2", "u3"):
        judge(node, node.status or _SAMPLE, uid, Limits(0, 64 << 20))
        answer = judge(node, _SAMPLE, uid, Limits(0, 64 << 20)).answer
        if answer == "yes" and not node.spec.initialised:
            raise Harm("let through without a ledger")


@functools.cache
def _ports() -> tuple[Any, ...]:
    board = LatestSample("n", lambda: 0.0, 60.0)
    board.set(_SAMPLE)
    server = Server(board, "127.0.0.1", 0, 0, None, {})
    ports = server._public, server._local
    for port in ports:
        port._socket.close()  # it is called without a network
    return ports


def _gate_service(data: bytes) -> bool:
    answers = [asyncio.run(port.respond(data)) for port in _ports()]
    if any(answer.status == 500 for answer in answers):
        raise Harm(f"could not answer {data!r}")
    return any(answer.status == 200 for answer in answers)


_CALLS = (
    b"GET /v1/gate?pod_uid=0f3a1b2c-8d4e-4f5a-9b6c-7d8e9f0a1b2c HTTP/1.1\r\nHost: n\r\n\r\n",
    b"GET /v1/gate?pod_uid=a&pod_uid=b HTTP/1.0\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: n\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n",
    b"GET /v1/report HTTP/1.1\r\n" + b"X: y\r\n" * 90 + b"\r\n",
)


_ANSWERS = {"answer": "yes", "reason": "r"}, {"error": "e"}


def _gate_answer(data: bytes) -> bool:
    question = gate_client.Question("u1", "127.0.0.1", 9410)
    answer = gate_client._read(200 if len(data) % 3 else 503, data[: 1 << 16], question)
    answer.text.encode()  # it is printed
    if answer.yes and b'"yes"' not in data:
        raise Harm(f"took {data!r} for a yes")
    return answer.yes


_READERS: tuple[tuple[int, Reader], ...] = (
    (120, Reader("checkpoint", of_trees(*_CHECKPOINTS), _KUBELET.checkpoint, (BadCheckpoint,))),
    (
        60,
        Reader(
            "podresources", of_bytes(_LISTED, _ALLOCATABLE), _KUBELET.podresources, (Unanswered,)
        ),
    ),
    (80, Reader("plugin", of_bytes(field(1, _WISH), _WISH), _plugin, (BadMessage,))),
    (40, Reader("apiserver", of_trees(_LABELS, _STATUS, *hostile_gpunodes()), _apiserver)),
    (160, Reader("gate", of_trees(*hostile_gpunodes()), _gate, (BadReport,))),
    (20, Reader("gate-call", of_bytes(*_CALLS), _gate_service)),
    (120, Reader("gate-answer", of_trees(*_ANSWERS), _gate_answer)),
)


def _same(reader: Reader) -> Target:
    return reader


#: Name -> share of the inputs, and the reader.
TARGETS: dict[str, tuple[int, Callable[[], Target]]] = {
    reader.name: (share, functools.partial(_same, reader)) for share, reader in _READERS
}
