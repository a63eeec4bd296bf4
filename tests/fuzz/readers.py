"""Fuzzes the readers of the agent and the gate, which read data from the kubelet, the plugin, the
API server and pods.

A reader may reject an input only with the exceptions that it declares. The CRD must accept the
report about a hostile kubelet.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import msgspec

from agent import gate_client
from agent.gate_decision import Limits, judge
from agent.http_endpoints import LatestSample, Server
from agent.kube_client import ApiServer
from agent.kube_publisher import KubernetesPublisher, NotDelivered
from agent.probes import readings
from agent.probes.checkpoint import BadCheckpoint, parse_checkpoint
from agent.probes.kubelet import join
from agent.probes.node_probe import NodeApi
from agent.probes.nvml import Memory
from agent.probes.podresources import PodResources, Unanswered
from agent.probes.protobuf import BadMessage, field
from agent.status_builder import summarise
from agent.steering import messages
from agent.steering.choice import choose
from headroom.contract.errors import BadReport
from headroom.contract.gpunode_json import decode_gpunode
from headroom.contract.heartbeat import Confirmation
from tests.builders import GIB, STAMP
from tests.controlplane import crd_manifest
from tests.fuzz.samples import OBJECTS
from tests.fuzz.watchdog import Harm, Target
from tests.fuzz.world import sound_nodes
from tests.standin.allocations import Checkpoint, Entry
from tests.standin.checkpoint import render

NOW = datetime(2026, 11, 21, tzinfo=UTC)
_SCHEMA = crd_manifest()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
_STATUS = jsonschema_rs.Draft7Validator(_SCHEMA["properties"]["status"])
_GPUNODE = sound_nodes()[0]
assert _GPUNODE.status is not None
_SAMPLE = _GPUNODE.status


@dataclass(frozen=True)
class Reader(Target):
    """A target whose ``read`` rejects an input by raising an exception in ``rejects`` or by
    returning False.
    """

    name: str
    seeds: Sequence[Any]
    read: Callable[[bytes], object]
    rejects: tuple[type[Exception], ...] = ()

    def take(self, data: bytes) -> bool:
        try:
            return self.read(data) is not False
        except self.rejects:
            return False


def _entry(uid: str, *replicas: str) -> Entry:
    return Entry(uid, "main", ((0, frozenset(replicas)),), (("NVIDIA_VISIBLE_DEVICES", "GPU-a"),))


_ENTRIES = _entry("u1", "GPU-a::0"), _entry("u2", "GPU-a::1", "GPU-b"), _entry("u3")
_REPLICAS = frozenset({"GPU-a::0", "GPU-a::1", "GPU-b"})
_CHECKPOINT = json.loads(render(Checkpoint(_ENTRIES, _REPLICAS)))
# Use the format of kubelets before Kubernetes 1.20.
_CHECKPOINT["Data"]["PodDeviceEntries"][2]["DeviceIDs"] = ["GPU-a"]
_RECORD = msgspec.json.encode(_CHECKPOINT)
_DEVICES = field(1, "nvidia.com/gpu") + field(2, "GPU-a::0") + field(2, "GPU-b")
_CONTAINER = field(1, "main") + field(2, _DEVICES) + field(9, b"x") + field(4, 7)
_LISTED = field(1, field(1, "p") + field(2, "default") + field(3, _CONTAINER)) * 2
_ALLOCATABLE = field(1, field(1, "nvidia.com/gpu") + field(2, "GPU-a::0") + field(4, b"\x08\x01"))


def _report(*read: readings.Reading) -> None:
    """Build a report and check that the CRD accepts it."""
    memory = Memory(24 * GIB, 20 * GIB, 0)
    devices = [
        readings.DeviceReading("nvml", uuid, index, memory=memory, processes={7: GIB})
        for index, uuid in enumerate(("GPU-a", "GPU-b"))
    ]
    status = summarise([readings.DriverReading("nvml", "570.1"), *read, *devices], NOW, "1")
    body = msgspec.json.encode(status)
    decode_gpunode(b'{"metadata":{},"status":%b}' % body)
    _STATUS.validate(msgspec.json.decode(body))


def _kubelet(checkpoint: bytes = _RECORD, listed: bytes = _LISTED) -> None:
    """Read the checkpoint and the PodResources service of a kubelet. The service returns ``listed``
    for every call.
    """
    service = PodResources("/nowhere")
    service._channel = SimpleNamespace(unary_unary=lambda path: lambda *_, **__: listed)
    joined = join(parse_checkpoint(checkpoint).entries, service.containers(), {})
    service.healthy()
    sharing = readings.SharingReading("stated", "nvidia.com/gpu", 4, "time-slicing")
    ids = frozenset({"GPU-a::0"})
    healthy = readings.RegisteredReading("podresources", "nvidia.com/gpu", ids)
    _report(sharing, healthy, *joined.holdings)


_WISH = field(1, "GPU-a::0") + field(1, "GPU-a::1") + field(2, "GPU-a::0") + field(3, 1)


def _plugin(data: bytes) -> None:
    too_many = messages.ContainerRequest(("GPU-a", "GPU-b"), (), 1 << 62)
    for wanted in [*messages.container_requests(data), too_many]:
        choose(wanted, "nvidia.com/gpu", _GPUNODE.spec, _SAMPLE, (), Limits(0, 0))
    messages.allocated(data)
    messages.asks_for_preference(data)


def _apiserver(data: bytes) -> bool:
    """Run a client against an API server that answers every request with ``data``. The status
    depends on the length of ``data``.
    """
    status = {0: 403, 1: 404, 2: 500}.get(len(data) % 7, 200)
    answer = SimpleNamespace(status=status, data=data, headers={"Retry-After": str(len(data))})
    pool: Any = SimpleNamespace(request=lambda *args, **how: answer)
    server = ApiServer("https://h", pool, dict)
    publisher = KubernetesPublisher(server, "n", "ns", 30.0)
    confirmation = Confirmation(sampled_at=STAMP, gpunode="g", observed_at=STAMP)
    taken = False
    for action in (
        publisher.held,
        publisher.reported,
        publisher.gpunode,
        lambda: publisher.report(_SAMPLE),
        lambda: publisher.heartbeat(NOW, confirmation),
    ):
        with contextlib.suppress(NotDelivered, BadReport):
            action()
            taken = True
    _report(*NodeApi(server, "n").read())
    return taken


_CONFIGURED = {**OBJECTS["nodes"][-1], "kubeletconfig": {"topologyManagerPolicy": "restricted"}}
_ERROR = {"kind": "Status", "message": "rejected", "reason": "Forbidden", "code": 403}


def _gate(data: bytes) -> None:
    node = decode_gpunode(data)
    for uid in ("bad", "u2", "u3"):
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
        port._socket.close()  # The port is called without a network.
    return ports


def _gate_service(data: bytes) -> bool:
    responses = [port.respond(data) for port in _ports()]
    answers = [each.result() if isinstance(each, Future) else each for each in responses]
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
    answer.text.encode()  # The gate prints the text.
    if answer.yes and b'"yes"' not in data:
        raise Harm(f"took {data!r} for a yes")
    return answer.yes


#: Maps the name of each target to its share of the inputs, valid inputs, reader, and the exceptions
#: that reject an input.
READERS: dict[str, tuple[Any, ...]] = {
    "checkpoint": (120, [_CHECKPOINT], _kubelet, (BadCheckpoint,)),
    "podresources": (
        60,
        [_LISTED, _ALLOCATABLE],
        lambda data: _kubelet(listed=data),
        (Unanswered,),
    ),
    "plugin": (80, [field(1, _WISH), _WISH], _plugin, (BadMessage,)),
    "apiserver": (40, [_CONFIGURED, _ERROR, *OBJECTS["gpunodes"]], _apiserver),
    "gate": (160, OBJECTS["gpunodes"], _gate, (BadReport,)),
    "gate-call": (20, _CALLS, _gate_service),
    "gate-answer": (120, _ANSWERS, _gate_answer),
}
