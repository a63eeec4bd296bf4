"""Builds pods, reports and runs for the tests of the recorder."""

import json
from typing import Any

from headroom.contract.gpunode import Device, GPUNodeStatus, PodUse
from headroom.contract.kube import OwnerReference
from headroom.contract.vramprofile import ProfileController, stamp
from headroom.core.placement.policy import Rules
from headroom.core.recommend.programs import Family, Program
from headroom.recorder.pod_facts import End, PodFacts, read_pod

GIB = 1 << 30
HOUR_S = 3600.0
#: Name of the node that pods and reports have.
NODE = "n1"
#: Current time of these tests, in seconds since 1970.
NOW_S = 1_800_000_000.0
REPLICA_SET = OwnerReference(
    api_version="apps/v1", kind="ReplicaSet", name="llm-5d4f", uid="rs-1", controller=True
)


def facts(**changes: Any) -> PodFacts:
    """Return the facts of a running pod with one container, main."""
    given: dict[str, Any] = {
        "namespace": "team",
        "name": "llm-5d4f-abcde",
        "generate_name": "llm-5d4f-",
        "controller": REPLICA_SET,
        "found_by": ProfileController(kind="ReplicaSet", name="llm"),
        "programs": {"main": Program("p1", Family.UNKNOWN)},
        "node": NODE,
        **changes,
    }
    return PodFacts(**given)


def ended(exit_code: int = 0, reason: str = "", finished_s: float = NOW_S) -> dict[str, End]:
    return {"main": End(exit_code, reason, finished_s)}


def report(*uses: PodUse) -> GPUNodeStatus:
    devices = [
        Device(uuid=uuid, model="L4", memory_bytes=24 * GIB, reserved_bytes=GIB)
        for uuid in ("GPU-0", "GPU-1")
    ]
    return GPUNodeStatus(devices=devices, pods=list(uses))


def use(
    peak_gib: float,
    started_s: float = NOW_S - HOUR_S,
    uid: str = "u1",
    device: str = "GPU-0",
    **more: Any,
) -> PodUse:
    return PodUse(
        uid=uid,
        device=device,
        container="main",
        peak_bytes=int(peak_gib * GIB),
        started_at=stamp(started_s),
        **more,
    )


def pod_json(**changes: Any) -> dict[str, Any]:
    """Return a pod as JSON from the API server."""
    pod: dict[str, Any] = {
        "metadata": {
            "name": "llm-5d4f-abcde",
            "generateName": "llm-5d4f-",
            "namespace": "team",
            "uid": "u1",
            "labels": {"pod-template-hash": "5d4f"},
            "resourceVersion": "7",
            "ownerReferences": [
                {
                    "apiVersion": "apps/v1",
                    "kind": "ReplicaSet",
                    "name": "llm-5d4f",
                    "uid": "rs-1",
                    "controller": True,
                }
            ],
        },
        "spec": {
            "nodeName": NODE,
            "containers": [
                {
                    "name": "main",
                    "image": "vllm/vllm-openai:v0.32.0",
                    "args": ["--model", "m"],
                    "env": [
                        {"name": "A", "value": "1"},
                        {"name": "HEADROOM_VRAM_BYTES", "value": "5"},
                        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s"}}},
                    ],
                    "resources": {"limits": {"nvidia.com/gpu": "1"}},
                }
            ],
        },
        "status": {"phase": "Running"},
    }
    return pod | changes


def read(pod: dict[str, Any]) -> Any:
    return read_pod(json.dumps(pod).encode(), Rules())
