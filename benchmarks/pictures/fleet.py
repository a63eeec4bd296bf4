"""A fleet for pictures of the page: 216 GPUs, 330 pods that Headroom places, and an hour of
history.

``benchmarks.pictures.seeded`` starts the server with this history, in which one pod grows until its
GPU is full soon.
"""

import math
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from headroom.console.history.history import (
    KEPT_S,
    RESOLUTION_S,
    UNIT_BYTES,
    UNKNOWN,
    History,
    Layout,
    PodOn,
    Totals,
)
from headroom.contract.gpunode import Device, GPUNodeStatus, Plugin, PodUse, Replicas, SmActivity
from tests.serving import Server

GIB = 1 << 30
REPLICAS = 4
#: Pool -> number of nodes, GPUs per node, GiB per GPU, and model.
POOLS = {
    "h100": (12, 8, 80, "NVIDIA H100 80GB HBM3"),
    "a100": (10, 4, 40, "NVIDIA A100-PCIE-40GB"),
    "l4": (40, 2, 24, "NVIDIA L4"),
}
#: Namespace -> owner, and GiB that each of its pods requests.
TEAMS = {
    "search": (("embedder", 6), ("reranker", 10)),
    "assistant": (("llama-8b", 20), ("whisper", 5)),
    "vision": (("detector", 4), ("ocr", 7)),
    "research": (("notebook", 16), ("finetune", 36)),
}
PODS = 330
#: The pod that grows, its request, and its use an hour ago and now, in GiB.
LEAK, LEAK_REQUEST, LEAK_FROM, LEAK_TO = "tokenizer-7c9d5b-x2vqk", 6, 4.0, 12.5
SICK = "l4-0039"
#: One node. In this order, the device plugin puts the second pod on GPU 1 and the others on GPU 0.
ONE_NODE = {"gpu": (1, 2, 24, "NVIDIA L4")}
ITS_PODS = (("embedder", 4), ("llm", 16), ("reranker", 4))
#: A pod that fits on its GPU 0, but not on GPU 1, which the plugin would choose.
WAITING, WAITING_GIB = "chat", 12


Pools = Mapping[str, tuple[int, int, int, str]]


def fleet_yaml(pools: Pools = POOLS) -> str:
    lines = [
        # If there is only one node, the embedded server adds no number to the name.
        f"  - {{name: {name if nodes > 1 else f'{name}-0000'}, count: {nodes}, gpus: {gpus}, "
        f"memory: {gib}Gi, model: {model}, sharing: time-slicing, replicas: {REPLICAS}}}"
        for name, (nodes, gpus, gib, model) in pools.items()
    ]
    return "\n".join(["nodes:", *lines])


@dataclass(slots=True)
class Placed:
    """A pod on a GPU. ``level`` is the ratio of its request that it uses on average."""

    uid: str
    namespace: str
    name: str
    request_gib: float
    level: float
    #: Step of the history at which it was placed.
    since: int
    device: str = ""
    grows: bool = False

    def used_bytes(self, age: float) -> int:
        """Return its use ``age`` seconds before the history was made, or after that if negative."""
        if self.grows:
            share = 1 - age / KEPT_S
            return int((LEAK_FROM + (LEAK_TO - LEAK_FROM) * share) * GIB)
        # Use steps instead of a wave, because a use that rises for ten minutes counts as growing.
        wave = 0.05 * math.sin(age // 900 + 9 * self.level)
        return int(self.request_gib * min(1.0, self.level + wave) * GIB)


@dataclass(slots=True)
class PicturedFleet:
    """The pods of each node, and its GPUs in the order in which the device plugin uses them."""

    pools: Pools = field(default_factory=lambda: POOLS)
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    pods: dict[str, list[Placed]] = field(default_factory=dict)
    now_step: int = field(default_factory=lambda: int(time.time()) // RESOLUTION_S)

    def __post_init__(self) -> None:
        for pool, (nodes, *_) in self.pools.items():
            self.pods |= {f"{pool}-{number:04d}": [] for number in range(nodes)}

    def fill(self) -> None:
        """Choose the node and the GPU of each pod."""
        self._put("l4-0007", self._pod("search", LEAK, LEAK_REQUEST, grows=True))
        self._put("l4-0007", self._pod("search", "embedder-66d7f-b8m2n", 6))
        names = list(self.pods)
        for number in range(PODS):
            namespace = self.chance.choice(list(TEAMS))
            owner, request = self.chance.choice(TEAMS[namespace])
            suffix = "".join(self.chance.choices("bcdfghjklmnpqrstvwxz2456789", k=5))
            pod = self._pod(namespace, f"{owner}-5f6c8d-{suffix}", request, came=True)
            self.chance.shuffle(names)
            # Pack like the extender: nodes that already have pods come first.
            names.sort(key=lambda name: -len(self.pods[name]))
            for node in names if number % 3 else names[::-1]:
                if node not in ("l4-0007", SICK) and self._put(node, pod):
                    break

    def fill_one_node(self) -> None:
        """Put the pods of ``ITS_PODS`` on the node of ``ONE_NODE``."""
        (node,) = self.pods
        for name, request in ITS_PODS:
            self._put(node, self._pod("ml", name, request))

    def _pod(
        self, namespace: str, name: str, request: float, *, grows: bool = False, came: bool = False
    ) -> Placed:
        since = self.now_step - KEPT_S // RESOLUTION_S
        if came and self.chance.random() < 0.3:
            since += self.chance.randrange(KEPT_S // RESOLUTION_S - 90)
        level = self.chance.uniform(0.45, 0.97)
        return Placed(f"uid-{name}", namespace, name, request, level, since, grows=grows)

    def _put(self, node: str, pod: Placed) -> bool:
        """Put the pod on the GPU of the node with the fewest pods, if it fits there."""
        _, gpus, gib, _ = self.pools[node.rpartition("-")[0]]
        held: dict[str, list[Placed]] = {f"GPU-{node}-{index}": [] for index in range(gpus)}
        if node == "l4-0007":
            held = {f"GPU-{node}-0": []}
        for each in self.pods[node]:
            held.setdefault(each.device, []).append(each)
        device = min(held, key=lambda uuid: len(held[uuid]))
        reserved = sum(each.request_gib for each in held[device])
        if len(held[device]) >= REPLICAS or reserved + pod.request_gib > gib - 0.5:
            return False
        pod.device = device
        self.pods[node].append(pod)
        return True

    def bind(self, server: Server) -> None:
        """Let Headroom reserve the memory of all pods, and report each node after each of its pods.

        Headroom rejects pods if the plugin could choose a device on which they do not fit. These
        pods are left out.
        """
        for node, pods in self.pods.items():
            bound: list[Placed] = []
            for pod in pods:
                ask(server, pod.namespace, pod.name, f"{pod.request_gib:g}Gi", [node], 2 * KEPT_S)
                binding = {"PodName": pod.name, "PodNamespace": pod.namespace, "PodUID": pod.uid}
                if server.post("/bind", binding | {"Node": node}).json() == {"Error": ""}:
                    bound.append(pod)
                    self.report(server, {node: bound})
                else:
                    path = f"/embedded/v1/pods/{pod.namespace}/{pod.name}"
                    assert server.delete(path).status in (204, 404)
            self.report(server, {node: bound})
            self.pods[node] = bound

    @contextmanager
    def reporting(self, server: Server) -> Iterator[None]:
        """Report all nodes every few seconds."""
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(5):
                self.report(server, self.pods)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def report(self, server: Server, pods_of: Mapping[str, Sequence[Placed]]) -> None:
        body = [
            {"node": node, "status": msgspec.to_builtins(self._status(node, pods))}
            for node, pods in pods_of.items()
        ]
        reply = server.debug_post("/embedded/v1/reports", body)
        assert reply.status == 204, reply.body

    def _status(self, node: str, pods: Sequence[Placed]) -> GPUNodeStatus:
        _, gpus, gib, model = self.pools[node.rpartition("-")[0]]
        devices, uses, now = [], [], datetime.now(UTC).isoformat()
        age = self.now_step * RESOLUTION_S - time.time()
        for index in range(gpus):
            uuid = f"GPU-{node}-{index}"
            here = [pod for pod in pods if pod.device == uuid]
            uses += [
                PodUse(
                    uid=pod.uid,
                    device=uuid,
                    namespace=pod.namespace,
                    name=pod.name,
                    used_bytes=pod.used_bytes(age),
                    peak_bytes=max(pod.used_bytes(age), pod.used_bytes(KEPT_S)),
                )
                for pod in here
            ]
            sick = node == SICK and index == 1
            devices.append(
                Device(
                    uuid=uuid,
                    index=index,
                    model=model,
                    memory_bytes=gib * GIB,
                    reserved_bytes=512 << 20,
                    used_bytes=sum(pod.used_bytes(age) for pod in here),
                    unattributed_bytes=0,
                    resource="nvidia.com/gpu",
                    sharing="time-slicing",
                    replicas=Replicas(free=REPLICAS - len(here), allocated=len(here)),
                    healthy=not sick,
                    health_reason="XID 79: GPU fell off the bus" if sick else "",
                    sm_activity=SmActivity(ratio=activity(here, index, age), source="dcgm"),
                )
            )
        plugin = Plugin(allocation_policy="distributed", device_list_strategy="envvar")
        return GPUNodeStatus(observed_at=now, plugin=plugin, devices=devices, pods=uses)

    def history(self) -> History:
        """Return the last hour, with a value every minute."""
        history, allocatable = History(), 0
        first = self.now_step - KEPT_S // RESOLUTION_S
        steps = range(first, self.now_step, 6)
        sums = {step: [0, 0] for step in steps}
        for node, pods in self.pods.items():
            _, gpus, gib, _ = self.pools[node.rpartition("-")[0]]
            uuids = [f"GPU-{node}-{index}" for index in range(gpus)]
            allocatable += int(gpus * (gib - 0.5) * GIB)
            on = tuple(
                PodOn(uuids.index(p.device), p.uid, p.namespace, p.name, int(p.request_gib * GIB))
                for p in pods
            )
            for step in steps:
                age = (self.now_step - step) * RESOLUTION_S
                row: list[int] = []
                for index, uuid in enumerate(uuids):
                    here = [pod for pod in pods if pod.device == uuid and pod.since <= step]
                    uses = [pod.used_bytes(age) for pod in here]
                    requests = [int(pod.request_gib * GIB) for pod in here]
                    reserved, used = sum(map(max, requests, uses)), sum(uses)
                    sums[step][0] += reserved
                    sums[step][1] += used
                    sm = round(1000 * activity(here, index, age))
                    row += [reserved // UNIT_BYTES, used // UNIT_BYTES, sm]
                row += [
                    pod.used_bytes(age) // UNIT_BYTES if pod.since <= step else UNKNOWN
                    for pod in pods
                ]
                history.add(node, step, Layout(tuple(uuids), on), row)
        for number, (step, (reserved, used)) in enumerate(sums.items()):
            pending = max(0, round(6 - number / 6 + 2 * math.sin(number / 5)))
            left = allocatable - reserved
            history.add_totals(Totals(step, allocatable, reserved, used, 0, left, 0, pending))
        return history


def activity(pods: Sequence[Placed], index: int, age: float) -> float:
    """Return the SM activity of a GPU with these pods."""
    level = sum(0.5 * pod.level / REPLICAS for pod in pods)
    return round(min(0.98, max(0.0, level + 0.08 * math.sin(age / 250 + index))) if pods else 0, 3)


def ask(
    server: Server, namespace: str, name: str, vram: str, nodes: list[str], age_s: float = 1500
) -> None:
    """Call the extender as kube-scheduler does, for a pod of a ReplicaSet of age ``age_s``."""
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "controller": True}
    pod: dict[str, Any] = {
        "metadata": {
            **{"namespace": namespace, "name": name, "uid": f"uid-{name}"},
            "annotations": {"headroom.gpu/vram": vram},
            "creationTimestamp": datetime.fromtimestamp(time.time() - age_s, UTC).isoformat(),
            "ownerReferences": [owner | {"name": name.rpartition("-")[0], "uid": f"rs-{name}"}],
        },
        "spec": {
            "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]
        },
    }
    assert server.post("/filter", {"Pod": pod, "NodeNames": nodes}).status == 200
