"""Provides valid objects from which hostile inputs are made: recorded objects, and fields that the
recorded objects lack.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec

from headroom.contract.annotations import OBSERVED_AT
from headroom.contract.gate import gate_container
from headroom.contract.heartbeat import Confirmation, encode_confirmation
from tests.builders import GATE_IMAGE, GIB, STAMP
from tests.fuzz.world import sound_nodes
from tests.serving import pod as sent_pod
from tests.state.labels import aks, eks, gfd, gke, karpenter

RECORDED = Path(__file__).parents[1] / "recorded/kube-scheduler"
#: Name of the hostile node.
BAD = "hostile"
#: Maps strings that name valid objects of the world to their replacements in hostile objects.
_RENAMED = {
    "gpu-a100-": "other-",
    '"default"': '"bad"',
    '"uid-sits"': '"bad"',
    '"sits"': f'"{BAD}"',
}
#: Annotations that other GPU allocators write.
_FOREIGN = "hami.io/vgpu-node", "runai-gpu", "ALIYUN_COM_GPU_MEM_IDX"


def recorded(verb: str) -> list[Any]:
    """Return the bodies of recorded calls, which have five nodes each."""
    return [
        json.loads(gzip.decompress(path.read_bytes()))["body"]
        for path in sorted(RECORDED.glob(f"{verb}-5nodes-*.json.gz"))
    ]


def rich_pod() -> dict[str, Any]:
    """Return a pod with fields that the recorded pods lack."""
    gpu = {"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": 1}}
    sidecar = {"name": "first", "restartPolicy": "Always", "resources": gpu}
    rich = sent_pod("rich", "main=8Gi,side=1Gi")
    rich["metadata"]["annotations"] |= {
        "headroom.gpu/policy": "spread",
        "headroom.gpu/max-sm": "70%",
        "headroom.gpu/processes": "2",
        "headroom.gpu/retry": "x",
        "headroom.gpu/placement": '{"node": "n", "asked": "8Gi"}',
        **dict.fromkeys(_FOREIGN, "0"),
    }
    rich["spec"] |= {
        "containers": [
            {"name": "main", "resources": gpu},
            {"name": "side", "resources": gpu, "envFrom": [{"prefix": "A_"}]},
            {"name": "plain", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]},
        ],
        "initContainers": [gate_container(GATE_IMAGE), sidecar],
        "priority": 7,
        "nodeSelector": {"a": "b"},
    }
    rich["status"] |= {
        "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes"}],
        "containerStatuses": [{"name": "main", "state": {"running": {}}}],
    }
    return rich


def _pods() -> list[Any]:
    waiting = [body["Pod"] for body in recorded("filter")[:3]]
    rich, bound = rich_pod(), rich_pod()
    bound["spec"]["nodeName"], bound["status"]["phase"] = BAD, "Running"
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "a-5d4f", "controller": True}
    labels = {"app": "a", "pod-template-hash": "5d4f"}
    bound["metadata"] |= {"labels": labels, "ownerReferences": [owner]}
    for key in _FOREIGN:  # A node with pods of other allocators is rejected.
        del bound["metadata"]["annotations"][key]
    return [bound, *waiting, sent_pod("bad", "8Gi"), rich]


def _nodes() -> list[Any]:
    """Return recorded nodes and a node with the labels of all cloud providers."""
    whole = next(body["Nodes"]["items"] for body in recorded("filter") if body["Nodes"])
    labels = {
        **gfd(replicas="4", sharing_strategy="time-slicing"),
        **gke(accelerator="nvidia-tesla-a100-80gb", gpu_sharing_strategy="time-sharing"),
        **gke(max_shared_clients_per_gpu="4"),
        **karpenter("8", "81920"),
        **aks("Standard_NC24ads_A100_v4"),
        **eks("p4d.24xlarge"),
    }
    notes = {"headroom.gpu/reserve": "512Mi", "headroom.gpu/device-choice": "gated"}
    metadata = {
        "resourceVersion": "3",
        "labels": labels,
        "annotations": {**notes, "hami.io/node-nvidia-register": "x"},
    }
    allocatable = {"nvidia.com/gpu": "8", "cpu": "1"}
    return [*whole[:2], {"metadata": metadata, "status": {"allocatable": allocatable}}]


def _renamed(tree: Any) -> Any:
    """Rename the object and replace the names of valid objects in it."""
    metadata = {**tree["metadata"], "name": BAD, "uid": "bad", "namespace": "bad"}
    text = json.dumps({**tree, "metadata": metadata})
    for sound, other in _RENAMED.items():
        text = text.replace(sound, other)
    return json.loads(text)


_CONFIRMED = encode_confirmation(Confirmation("2026-11-21T00:00:01Z", "bad", STAMP, after="1"))
_SLICE = {
    "driver": "gpu.nvidia.com",
    "nodeName": BAD,
    "pool": {"name": BAD},
    "devices": [
        {"name": "gpu-0", "attributes": {"uuid": {"string": "GPU-a"}}},
        {"name": "gpu-1", "basic": {"attributes": {"uuid": {"string": "GPU-b"}}}},
    ],
}
_BUDGET = {
    "selector": {
        "matchLabels": {"app": "a"},
        "matchExpressions": [{"key": "app", "operator": "In", "values": ["a", "b"]}],
    }
}
_DISRUPTIONS = {"disruptionsAllowed": 1, "disruptedPods": {"other": STAMP}}
_HELD = {
    "driver": "gpu.nvidia.com",
    "pool": BAD,
    "device": "gpu-0",
    "consumedCapacity": {"memory": "8Gi"},
}
_CLAIM = {
    "allocation": {"devices": {"results": [_HELD]}},
    "reservedFor": [{"resource": "pods", "name": BAD, "uid": "bad"}],
}
_TRACK = {
    "program": "p",
    "asOf": STAMP,
    **{lives: {"41": 3000, "42": 1000} for lives in ("complete", "censored", "running")},
    **{"ended": 4, "flat": 2, "first": STAMP, "last": STAMP, "tested": 3},
    **{"missed": 1, "missedFitting": 1},
    "unsettled": 1,
    "runningUnsettled": 1,
    "outgrown": 1,
    "runningOutgrown": 1,
}
_PROFILE = {
    "observedAt": STAMP,
    "owner": {"kind": "Deployment", "name": "a", "apiVersion": "apps/v1"},
    "controllers": [{"kind": "ReplicaSet", "name": "a"}],
    "containers": [
        {"container": "main", "model": "A", "memory": 80 * GIB, "tracks": [_TRACK, _TRACK]}
    ],
    "lives": 8,
}
_SOUND: dict[str, list[Any]] = {
    "gpunodes": [msgspec.to_builtins(node) for node in sound_nodes()],
    "nodes": _nodes(),
    "pods": _pods(),
    "leases": [{"metadata": {"annotations": {OBSERVED_AT: _CONFIRMED}}}],
    "resourceslices": [{"metadata": {"resourceVersion": "4"}, "spec": _SLICE}],
    "namespaces": [{"metadata": {"annotations": {"headroom.gpu/default-vram": "4Gi"}}}],
    "poddisruptionbudgets": [{"metadata": {}, "spec": _BUDGET, "status": _DISRUPTIONS}],
    "deviceclasses": [{"metadata": {}, "spec": {"extendedResourceName": "nvidia.com/gpu"}}],
    "resourceclaims": [{"metadata": {}, "status": _CLAIM}],
    "vramprofiles": [{"metadata": {}, "status": _PROFILE}],
}
#: Valid objects of the hostile node and of other hostile objects, by kind.
OBJECTS = {kind: [_renamed(tree) for tree in trees] for kind, trees in _SOUND.items()}
