"""The agent's inputs from its node and its cluster: kubelet, plugin, exporter, labels, the gate.

Each reader rejects input by the one exception that it declares. Every report made from hostile
input of a kubelet and an exporter is valid by the CRD.
"""

import asyncio
import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
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
from agent.probes import dcgm_exposition
from agent.probes.cgroup import owner
from agent.probes.checkpoint import BadCheckpoint, parse_checkpoint
from agent.probes.device_probe import StateFile
from agent.probes.host_processes import parse_flags
from agent.probes.kubelet import join
from agent.probes.node_probe import NodeApi
from agent.probes.nvml import Memory
from agent.probes.plugin_config import ConfigurationProbe
from agent.probes.podresources import ListedContainer, PodResources, Unanswered
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
from contract.gpunode import decode_gpunode
from contract.heartbeat import Confirmation
from tests.builders import GIB, STAMP
from tests.controlplane import crd_manifest
from tests.fuzz.hostile import TEXTS, Seed, attack, encode, garbled
from tests.fuzz.watch import hostile_gpunodes
from tests.fuzz.watchdog import Harm

NOW = datetime(2026, 11, 21, tzinfo=UTC)
_UUIDS = ["GPU-x", "GPU-y"]
_SCHEMA = crd_manifest()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
_VALID = jsonschema.Draft7Validator(_SCHEMA["properties"]["status"])
_CHECKED_EVERY = 20


class NodeTarget:
    """Inputs made by ``make`` go to ``take``, which returns whether they were taken."""

    def __init__(
        self, name: str, make: Callable[[Random], bytes], take: Callable[[bytes], bool]
    ) -> None:
        self.name = name
        self.make = make
        self.take = take


def of_trees(*trees: Any) -> Callable[[Random], bytes]:
    seeds = [Seed.of(tree) for tree in trees]
    return lambda random: attack(seeds, random)


def of_bytes(*sound: bytes) -> Callable[[Random], bytes]:
    def make(random: Random) -> bytes:
        if random.random() < 0.03:
            return random.randbytes(random.randrange(200))
        data = random.choice(sound)
        if random.random() < 0.1:
            data = data * random.choice((2, 10, 1000))
        return garbled(data, random)

    return make


def rejected(
    *declared: type[Exception],
) -> Callable[[Callable[[bytes], object]], Callable[[bytes], bool]]:
    def wrap(take: Callable[[bytes], object]) -> Callable[[bytes], bool]:
        def guarded(data: bytes) -> bool:
            try:
                take(data)
            except declared:
                return False
            return True

        return guarded

    return wrap


# The kubelet.


def _entry(uid: str, replicas: list[str]) -> dict[str, Any]:
    answer = "CioKFk5WSURJQV9WSVNJQkxFX0RFVklDRVMSEEdQVS0wMDAwMDAwMDAwMDA="
    return {
        "PodUID": uid, "ContainerName": "main", "ResourceName": "nvidia.com/gpu",
        "DeviceIDs": {"0": replicas}, "AllocResp": answer,
    }  # fmt: skip


_CHECKPOINTS = [
    {
        "Data": {
            "PodDeviceEntries": [_entry("u1", ["GPU-x::0"]), _entry("u2", ["GPU-x::1", "GPU-y"])],
            "RegisteredDevices": {"nvidia.com/gpu": ["GPU-x::0", "GPU-x::1", "GPU-y"]},
        },
        "Checksum": 1234567,
    },
    {
        "Data": {
            "PodDeviceEntries": [{**_entry("u1", []), "DeviceIDs": ["GPU-x"]}],
            "RegisteredDevices": None,
        },
        "Checksum": 0,
    },
]


def _listed(pods: int = 2) -> bytes:
    devices = field(1, "nvidia.com/gpu") + field(2, "GPU-x::0") + field(2, "GPU-y")
    container = field(1, "main") + field(2, devices) + field(9, b"x") + field(4, 7)
    pod = field(1, "p") + field(2, "default") + field(3, container)
    return field(1, pod) * pods


_ALLOCATABLE = field(1, field(1, "nvidia.com/gpu") + field(2, "GPU-x::0") + field(4, b"\x08\x01"))


class _Service(PodResources):
    def __init__(self, answer: bytes) -> None:
        super().__init__("/nowhere")
        self._answer = answer

    def _call(self, method: str) -> bytes:
        return self._answer


class _Reports:
    """Builds a report from the kubelet's data, and validates it with the CRD."""

    def __init__(self) -> None:
        self._made = 0

    def make(self, *shown: Reading) -> None:
        readings: list[Reading] = [DriverReading("nvml", "570.1"), *shown]
        memory = Memory(24 * GIB, 20 * GIB, 0)
        readings += [
            DeviceReading("nvml", uuid, index, memory=memory, processes={7: GIB})
            for index, uuid in enumerate(_UUIDS)
        ]
        status = summarise(readings, NOW, "1")
        body = encode(status)
        self._made += 1
        if self._made % _CHECKED_EVERY == 0:
            decode_gpunode(b'{"metadata":{},"status":%b}' % body)
            for wrong in _VALID.iter_errors(msgspec.json.decode(body)):
                raise Harm(f"no report that the CRD takes: {wrong.message:.300}")


_reports = _Reports()


def _join(entries: tuple[Any, ...], listed: list[ListedContainer]) -> None:
    joined = join(entries, listed, {})
    sharing = SharingReading("stated", "nvidia.com/gpu", 4, "time-slicing")
    healthy = RegisteredReading("podresources", "nvidia.com/gpu", frozenset({"GPU-x::0"}))
    _reports.make(sharing, healthy, *joined.holdings)


@rejected(BadCheckpoint)
def _checkpoint(data: bytes) -> None:
    _join(parse_checkpoint(data).entries, _Service(_listed()).containers())


@rejected(Unanswered)
def _podresources(data: bytes) -> None:
    service = _Service(data)
    _join(parse_checkpoint(encode(_CHECKPOINTS[0])).entries, service.containers())
    service.healthy()


# The device plugin and who asks it.

_SAMPLE = decode_gpunode(encode(hostile_gpunodes()[0])).status
_SPEC = decode_gpunode(encode(hostile_gpunodes()[0])).spec
_WISH = field(1, "GPU-x::0") + field(1, "GPU-x::1") + field(2, "GPU-x::0") + field(3, 1)


@rejected(BadMessage)
def _plugin(data: bytes) -> None:
    assert _SAMPLE is not None
    for wanted in [*container_requests(data), ContainerRequest(tuple(_UUIDS), (), 1 << 62)]:
        choose(wanted, "nvidia.com/gpu", _SPEC, _SAMPLE, (), Limits(0, 0))
    allocated(data)
    asks_for_preference(data)


class Files:
    """A folder in memory with what the probes read."""

    def __init__(self) -> None:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self.root = Path(tempfile.mkdtemp(prefix="headroom-fuzz-", dir=memory))
        atexit.register(shutil.rmtree, self.root)

    def put(self, path: str, data: bytes) -> Path:
        there = self.root / path
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(data)
        return there


_PLUGIN_YAML = b"""version: v1
flags: {plugin: {deviceListStrategy: [envvar, cdi-cri], passDeviceSpecs: true}}
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources: [{name: nvidia.com/gpu, replicas: 4}, {name: mig-1g.10gb, replicas: 2}]
  mps: &a {resources: [{name: gpu, replicas: 2}], x: [*a]}
"""
_TOOLKIT_TOML = b"""accept-nvidia-visible-devices-envvar-when-unprivileged = false
[nvidia-container-runtime]
mode = "cdi"
modes.cdi.default-kind = "nvidia.com/gpu"
[[x]]
y = [1, 2.5, 1979-05-27T07:32:00Z, {a = "b"}]
"""


def _put_processes(files: Files) -> None:
    stat = b"7 (x) S " + b" ".join(b"%d" % number for number in range(30))
    for pid, socket in ((7, "nvidia-gpu.sock"), (8, "kubelet.sock")):
        files.put(f"{pid}/stat", stat)
        files.put(socket, b"")
    files.put("7/environ", b"CONFIG_FILE=/config.yaml\0A=b\0")
    files.put("7/cmdline", b"nvidia-device-plugin\0--pass-device-specs\0")
    files.put("8/cmdline", b"kubelet\0--config=/config.yaml\0")
    files.put("8/environ", b"")


def _put_configuration(files: Files, data: bytes) -> None:
    """TOML begins with a zero byte here."""
    if data.startswith(b"\x00"):
        path = "1/root/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml"
        files.put(path, data[1:])
    else:
        files.put("7/root/config.yaml", data)
        files.put("8/root/config.yaml", data)


def _probe(root: Path) -> ConfigurationProbe:
    return ConfigurationProbe(root, root, lambda path: 8 if path.name == "kubelet.sock" else 7)


@contextmanager
def configured(data: bytes) -> Iterator[ConfigurationProbe]:
    """The probe of a node on which plugin and kubelet are configured so."""
    files = Files()
    _put_processes(files)
    _put_configuration(files, data)
    yield _probe(files.root)


def _configuration() -> Callable[[bytes], bool]:
    files = Files()
    _put_processes(files)

    def take(data: bytes) -> bool:
        _put_configuration(files, data)
        readings = list(_probe(files.root).read())
        _reports.make(*readings)
        parse_flags(data.decode("utf-8", "replace").split("\0"))
        owner(data.decode("utf-8", "replace"))
        return all(getattr(each, "state", "ok") == "ok" for each in readings)

    return take


_BOMB = b"a: &a [x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c]\n" % (n, n, *([n - 1] * 8)) for n in range(98, 107)
)
CONFIGURATION_BOMBS = (
    _BOMB + b"flags: {plugin: {deviceListStrategy: *j, passDeviceSpecs: *j}}\n",
    b"flags: " + b"[" * 3000,
    b"flags: " + b"[" * 200_000,
)
_CONFIGURATIONS = (
    _PLUGIN_YAML,
    b"kind: KubeletConfiguration\ntopologyManagerPolicy: best-effort\n",
    b"\x00" + _TOOLKIT_TOML,
    *CONFIGURATION_BOMBS[:2],
    b"\x00x = " + b"[" * 3000,
    b"\x00" + b"a." * 3000 + b"b = 1\n",
)

# The exporter.

_DCGM = b"""# HELP DCGM_FI_PROF_SM_ACTIVE x
# TYPE DCGM_FI_PROF_SM_ACTIVE gauge
DCGM_FI_PROF_SM_ACTIVE{gpu="0",UUID="GPU-x",device="nvidia0",modelName="A",Hostname="h"} 0.5
DCGM_FI_PROF_SM_ACTIVE{gpu="0",UUID="GPU-x",GPU_I_ID="3",GPU_I_PROFILE="1g.10gb",pod="p"} 0.25
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-x"} 1024
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-x"} 140737488355328
DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-x"} 79 1700000000
"""
_NUMBERS = [b"NaN", b"+Inf", b"-Inf", b"1e999", b"-1", b"1_0", b"0x1p3", b"9" * 400, b"", b"1 2 3"]


def _exposition(random: Random) -> bytes:
    data = random.choice(_NUMBERS).join(_DCGM.rsplit(random.choice((b"0.5", b"1024", b"79")), 1))
    if random.random() < 0.3:
        text = random.choice(TEXTS).encode("utf-8", "replace").replace(b"\n", b"")
        data = data.replace(random.choice((b"GPU-x", b"3", b"UUID", b"nvidia0")), text)
    return garbled(data, random) if random.random() < 0.5 else data


def _dcgm(data: bytes) -> bool:
    readings, bad = dcgm_exposition.parse(data.decode("utf-8", "replace"))
    for each in readings:
        figures = (each.used_bytes, each.free_bytes, each.reserved_bytes, each.total_bytes)
        if any(figure is not None and not 0 <= figure < 1 << 63 for figure in figures):
            raise Harm(f"figures of {each}")
        if each.sm_ratio is not None and not 0 <= each.sm_ratio <= 1:
            raise Harm(f"ratio of {each}")
    return not bad


# The API server, to an agent.


def _client(data: bytes) -> Any:
    """Answers everything with this: two digits of a status, then the body."""
    status = {0: 403, 1: 404, 2: 500}.get(len(data) % 7, 200)
    headers = {"Retry-After": str(len(data))}
    answer = SimpleNamespace(status=status, data=data, headers=headers)
    pool = SimpleNamespace(request=lambda *args, **how: answer)
    configuration = SimpleNamespace(host="https://h", auth_settings=dict)
    rest = SimpleNamespace(pool_manager=pool)
    return SimpleNamespace(configuration=configuration, rest_client=rest)


def _cluster(data: bytes) -> bool:
    client = _client(data)
    publisher = KubernetesPublisher(of_client(client), "n", "ns", 30.0)
    assert _SAMPLE is not None
    vouch = Confirmation(sampled_at=STAMP, gpunode="g", observed_at=STAMP)
    taken = False
    for action in (
        publisher.held,
        publisher.reported,
        lambda: publisher.report(_SAMPLE),
        lambda: publisher.heartbeat(NOW, vouch),
        publisher.gpunode,
    ):
        try:
            action()
            taken = True
        except (NotDelivered, BadReport):
            pass
    api = NodeApi(of_client(client), "n")
    _reports.make(*api.read())
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


# The gate: the ledger, the sample, the question and the answer.


@rejected(BadReport)
def _gate(data: bytes) -> None:
    node = decode_gpunode(data)
    sample = node.status or _SAMPLE
    assert sample is not None
    assert _SAMPLE is not None
    for uid in ("u1", "u2", "u3"):
        judge(node, sample, uid, Limits(0, 64 << 20))
        if (
            judge(node, _SAMPLE, uid, Limits(0, 64 << 20)).answer == "yes"
            and not node.spec.initialised
        ):
            raise Harm("let through without a ledger")


def _requests() -> Callable[[bytes], bool]:
    board = LatestSample("n", lambda: 0.0, 60.0)
    assert _SAMPLE is not None
    board.set(_SAMPLE)
    server = Server(board, "127.0.0.1", 0, 0, None, {})
    ports = server._public, server._local
    for port in ports:
        port._socket.close()  # it is asked without a network

    def take(data: bytes) -> bool:
        answers = [asyncio.run(port.respond(data)) for port in ports]
        if any(answer.status == 500 for answer in answers):
            raise Harm(f"could not answer {data!r}")
        return any(answer.status == 200 for answer in answers)

    return take


_CALLS = (
    b"GET /v1/gate?pod_uid=0f3a1b2c-8d4e-4f5a-9b6c-7d8e9f0a1b2c HTTP/1.1\r\nHost: n\r\n\r\n",
    b"GET /v1/gate?pod_uid=a&pod_uid=b HTTP/1.0\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: n\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n",
    b"GET /v1/report HTTP/1.1\r\n" + b"X: y\r\n" * 90 + b"\r\n",
)
_QUESTION = gate_client.Question("u1", "127.0.0.1", 9410)


def _knock(data: bytes) -> bool:
    answer = gate_client._read(200 if len(data) % 3 else 503, data[: 1 << 16], _QUESTION)
    answer.text.encode()  # it is printed
    if answer.yes and b'"yes"' not in data:
        raise Harm(f"took {data!r} for a yes")
    return answer.yes


def _state() -> Callable[[bytes], bool]:
    files = Files()

    def take(data: bytes) -> bool:
        state = StateFile(files.put("state", data))
        memory = state.read()
        state.write(memory)
        return not state.trouble

    return take


_STATE = {
    "health_issues": {"GPU-x": [{"reason": "XID 79", "since": STAMP, "xid": 79}]},
    "boot": "b",
    "x": 1,
}  # fmt: skip


def targets() -> dict[str, tuple[int, Callable[[], NodeTarget]]]:
    """Name -> share of the inputs, and how it is made."""

    def target(
        name: str, make: Callable[[Random], bytes], take: Callable[[], Callable[[bytes], bool]]
    ) -> Callable[[], NodeTarget]:
        return lambda: NodeTarget(name, make, take())

    gates = of_trees(*hostile_gpunodes())
    return {
        "checkpoint": (120, target("checkpoint", of_trees(*_CHECKPOINTS), lambda: _checkpoint)),
        "podresources": (
            60,
            target("podresources", of_bytes(_listed(), _ALLOCATABLE), lambda: _podresources),
        ),
        "plugin": (80, target("plugin", of_bytes(field(1, _WISH), _WISH), lambda: _plugin)),
        "dcgm": (40, target("dcgm", _exposition, lambda: _dcgm)),
        "configuration": (
            3,
            target("configuration", of_bytes(*_CONFIGURATIONS), _configuration),
        ),
        "apiserver": (
            40,
            target("apiserver", of_trees(_LABELS, _STATUS, *hostile_gpunodes()), lambda: _cluster),
        ),
        "gate": (160, target("gate", gates, lambda: _gate)),
        "gate-call": (20, target("gate-call", of_bytes(*_CALLS), _requests)),
        "knock": (
            120,
            target(
                "knock", of_trees({"answer": "yes", "reason": "r"}, {"error": "e"}), lambda: _knock
            ),
        ),
        "state": (10, target("state", of_trees(_STATE), _state)),
    }
