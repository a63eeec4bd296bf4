"""Returns the objects of a large cluster: nodes, pods, reports and heartbeats."""

import base64
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import urllib3

from benchmarks.hotpath.bodies import pod_as_sent
from headroom.contract import annotations
from headroom.contract.gpunode import (
    GROUP,
    VERSION,
    Charge,
    Device,
    GPUNodeSpec,
    GPUNodeStatus,
    Plugin,
    PodUse,
    Replicas,
    Reservation,
    Source,
)
from headroom.contract.heartbeat import Confirmation, encode_confirmation
from tests.controlplane import ControlPlane
from tests.e2e.cluster import NAMESPACE
from tests.e2e.nodes import GIB, RESOURCE, SYSTEM_NAMESPACE

Object = dict[str, Any]

DEVICES, REPLICAS = 8, 4
POD_BYTES = 8 * GIB
READY_S, RESIDENT_MIB, GROWN_MIB = 15.0, 250.0, 5.0
#: etcd accepts no more operations in one transaction.
BATCH = 128


def stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


#: The time at which all objects were created and all first reports were made. Later heartbeats
#: confirm these reports, and later reports of a node change only its status.
OBSERVED_AT = stamp()


def node_name(index: int) -> str:
    return f"gke-prod-gpu-pool-6b2c1e8f-{index:04d}"


def meta(name: str, uid: str, namespace: str = "") -> Object:
    where = {"namespace": namespace} if namespace else {}
    return {"name": name, "uid": uid, "creationTimestamp": OBSERVED_AT, "generation": 1, **where}


def node(index: int) -> Object:
    amounts = {"cpu": "128", "memory": "1Ti", "pods": "250", RESOURCE: str(DEVICES * REPLICAS)}
    labels = {f"nvidia.com/gpu.label-{number}": "a value as GFD has it" for number in range(25)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {**meta(node_name(index), f"node-{index}"), "labels": labels},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "images": [
                {"names": [f"registry.example.com/ml/image-{number}:1"], "sizeBytes": 1 << 30}
                for number in range(20)
            ],
        },
    }


def pod(index: int, on: int, *, gpu: bool) -> Object:
    """Return a running pod as the API server keeps it, about 3 KiB."""
    sent = pod_as_sent(f"pod-{index}", "8Gi")
    if not gpu:
        sent["metadata"]["annotations"] = {"kubernetes.io/config.source": "api"}
        sent["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "100m"}}
    sent["metadata"] |= meta(f"pod-{index}", f"pod-uid-{index}", NAMESPACE)
    sent["spec"]["nodeName"] = node_name(on)
    sent["spec"]["containers"][0]["env"] = [
        {"name": f"SETTING_{number}", "value": "as long as such values are"} for number in range(10)
    ]
    sent["status"] = {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "startTime": stamp(),
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": stamp()}
            for kind in ("Initialized", "Ready", "ContainersReady", "PodScheduled")
        ],
        "containerStatuses": [
            {
                "name": "main",
                "ready": True,
                "restartCount": 0,
                "image": "registry.example.com/ml/train:1",
                "imageID": "registry.example.com/ml/train@sha256:" + "0" * 64,
                "containerID": "containerd://" + "0" * 64,
                "state": {"running": {"startedAt": stamp()}},
            }
        ],
    }
    return {"apiVersion": "v1", "kind": "Pod", **sent}


def gpunode(index: int, pods: Iterable[int]) -> Object:
    name = node_name(index)
    uuids = [f"GPU-{index:08x}-0000-4000-8000-{number:012x}" for number in range(DEVICES)]
    place = {number: uuids[i % DEVICES] for i, number in enumerate(pods)}
    reservations = {
        f"pod-uid-{number}": Reservation(
            namespace=NAMESPACE,
            name=f"pod-{number}",
            charges=[Charge(resource=RESOURCE, count=1, candidates={uuid: POD_BYTES})],
            attempt=f"0123456789ab-{number}",
            since=OBSERVED_AT,
        )
        for number, uuid in place.items()
    }
    uses = [
        PodUse(
            uid=f"pod-uid-{number}",
            device=uuid,
            namespace=NAMESPACE,
            name=f"pod-{number}",
            container="main",
            used_bytes=POD_BYTES,
            source="nvml",
        )
        for number, uuid in place.items()
    ]
    held = list(place.values())
    status = GPUNodeStatus(
        observed_at=OBSERVED_AT,
        devices=[
            Device(
                uuid=uuid,
                index=number,
                model="NVIDIA A100-SXM4-80GB",
                memory_bytes=80 * GIB,
                reserved_bytes=GIB // 2,
                used_bytes=held.count(uuid) * POD_BYTES,
                unattributed_bytes=0,
                sharing="time-slicing",
                resource=RESOURCE,
                replicas=Replicas(
                    free=REPLICAS - held.count(uuid), allocated=held.count(uuid), unhealthy=0
                ),
            )
            for number, uuid in enumerate(uuids)
        ],
        pods=uses,
        plugin=Plugin(allocation_policy="distributed"),
        sources=[Source(name="checkpoint"), Source(name="proc")],
    )
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "GPUNode",
        "metadata": {**meta(name, f"gpunode-{index}"), "finalizers": ["headroom.gpu/ledger"]},
        "spec": msgspec.to_builtins(GPUNodeSpec(initialised=True, reservations=reservations)),
        "status": msgspec.to_builtins(status),
    }


def lease(index: int, observed_at: str = OBSERVED_AT) -> Object:
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    vouch = Confirmation(sampled_at=now, gpunode=f"gpunode-{index}", observed_at=observed_at)
    metadata = meta(node_name(index), f"lease-{index}", SYSTEM_NAMESPACE)
    metadata["annotations"] = {annotations.OBSERVED_AT: encode_confirmation(vouch)}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {"holderIdentity": "agent", "leaseDurationSeconds": 90, "renewTime": now},
    }


def cluster_objects(nodes: int, pods: int, gpu_pods: int) -> Iterator[tuple[str, Object]]:
    """Yield the etcd key and the content of each object."""
    for index in range(nodes):
        name = node_name(index)
        yield f"minions/{name}", node(index)
        yield f"headroom.gpu/gpunodes/{name}", gpunode(index, range(index, gpu_pods, nodes))
    for index in range(pods):
        gpu = index < gpu_pods
        yield f"pods/{NAMESPACE}/pod-{index}", pod(index, index % nodes, gpu=gpu)


def heartbeats(nodes: int) -> Iterator[tuple[str, Object]]:
    for index in range(nodes):
        yield f"leases/{SYSTEM_NAMESPACE}/{node_name(index)}", lease(index)


def fill(plane: ControlPlane, objects: Iterable[tuple[str, Object]], together: int = BATCH) -> int:
    """Write objects to etcd as the API server writes them; return their size in bytes.

    ``together`` objects share a transaction, and therefore a resourceVersion.
    """
    http = urllib3.PoolManager(retries=False, timeout=60.0)
    puts: list[Object] = []
    size = 0

    def flush() -> None:
        url = f"http://127.0.0.1:{plane.etcd_port}/v3/kv/txn"
        answer = http.request("POST", url, body=msgspec.json.encode({"success": puts}))
        if answer.status != 200:
            raise RuntimeError(f"etcd: {answer.status} {answer.data.decode()}")
        puts.clear()

    for key, obj in objects:
        value = msgspec.json.encode(obj)
        size += len(value)
        encoded = {"key": f"/registry/{key}".encode(), "value": value}
        puts.append({"requestPut": {k: base64.b64encode(v).decode() for k, v in encoded.items()}})
        if len(puts) == together:
            flush()
    if puts:
        flush()
    return size
