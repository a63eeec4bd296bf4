"""Checks that the reduced pod has exactly the fields that decisions depend on."""

from typing import Any

import msgspec
import pytest

from extender.requeue.hints import rejected_by_us
from headroom.contract.gate import GATE, gate_container, is_gated, waits
from headroom.contract.kube import Pod
from headroom.contract.pod_limits import annotation_bytes, exceeded, has_room_for
from headroom.core.cluster.trackers.foreign_allocators import of_pod
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import understand
from headroom.runtime.kube.resources import watched_kinds

MAX_ANNOTATION_BYTES = 256 << 10
MAX_OWN_ANNOTATION_BYTES = 32 << 10
RESERVED_ANNOTATION_BYTES = 8 << 10

DECODE = next(kind for kind in watched_kinds("any") if kind.name == "pods").decode
ALL = msgspec.json.Decoder(Pod).decode
VISIBLE = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-1"}
OTHER = {"name": "MODEL", "value": "/models/large"}
FOLLOWS = {
    "name": "NVIDIA_VISIBLE_DEVICES",
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['headroom.gpu/devices.0']"}},
}
RUNNING = {"name": "main", "state": {"running": {}}}
OVER = {"name": "main", "state": {"terminated": {"exitCode": 0}}}
WAITING = {"name": "main", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
COLLECTED = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "DeletionByPodGC",
    "message": "PodGC: node no longer exists",
}
REJECTED = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes are available: 1 insufficient GPU memory on any device.",
}


def raw(env: Any = (), node: str = "", phase: str = "Pending", **status: Any) -> msgspec.Raw:
    gpu = {"limits": {"nvidia.com/gpu": "1"}}
    containers = [{"name": "main", "env": [*env], "resources": gpu}, {"name": "beside"}]
    metadata = {"name": "p", "uid": "u", "annotations": {"headroom.gpu/vram": "8Gi"}}
    spec = {"containers": containers, "initContainers": containers, "nodeName": node}
    pod = {"metadata": metadata, "spec": spec, "status": {"phase": phase, **status}}
    return msgspec.Raw(msgspec.json.encode(pod))


@pytest.mark.parametrize("env", [[OTHER], [OTHER, VISIBLE, OTHER], [FOLLOWS, OTHER], []])
def test_the_reduced_pod_has_the_same_request(env: list[Any]) -> None:
    kept, whole = DECODE(raw(env)), ALL(raw(env))
    assert isinstance(kept, Pod)
    assert understand(kept, None, Rules()) == understand(whole, None, Rules())
    of_main = (kept.spec.containers or [])[0].env or []
    assert {variable.name for variable in of_main} <= {"NVIDIA_VISIBLE_DEVICES"}
    assert len(of_main) == len([each for each in env if each != OTHER])
    assert (kept.spec.init_containers or [])[0].env == of_main


@pytest.mark.parametrize("node", ["", "n"])
def test_the_pending_condition_is_kept_until_the_pod_is_bound(node: str) -> None:
    kept = DECODE(raw(node=node, conditions=[REJECTED]))
    assert isinstance(kept, Pod)
    assert rejected_by_us(kept) == (not node)


@pytest.mark.parametrize("node", ["", "n"])
@pytest.mark.parametrize("phase", ["Pending", "Running", "Succeeded", "Failed"])
@pytest.mark.parametrize("which", ["containerStatuses", "initContainerStatuses"])
@pytest.mark.parametrize("container", [RUNNING, OVER], ids=["running", "ended"])
def test_the_reduced_pod_has_ended_if_the_pod_has_ended(
    node: str, phase: str, which: str, container: Any
) -> None:
    sent = raw(node=node, phase=phase, **{which: [container]})
    kept = DECODE(sent)
    assert isinstance(kept, Pod)
    assert kept.ended == ALL(sent).ended
    assert kept.node == node


@pytest.mark.parametrize(
    ("conditions", "containers", "ended"),
    [
        pytest.param([], [OVER], True, id="the kubelet saw it end"),
        pytest.param([], [], True, id="the kubelet rejected it"),
        pytest.param([], [WAITING], True, id="the kubelet evicted it before it started"),
        pytest.param([COLLECTED], [OVER], True, id="it had ended before its node was lost"),
        pytest.param([COLLECTED], [OVER, WAITING], False, id="it may have started again"),
        pytest.param([COLLECTED], [RUNNING], False, id="it may still run"),
        pytest.param([COLLECTED], [], False, id="it may have started unseen"),
    ],
)
def test_a_pod_of_a_lost_node_has_ended_only_if_all_containers_have(
    conditions: list[Any], containers: list[Any], ended: bool
) -> None:
    sent = raw(node="n", phase="Failed", containerStatuses=containers, conditions=conditions)
    kept = DECODE(sent)
    assert isinstance(kept, Pod)
    assert kept.ended == ALL(sent).ended == ended


@pytest.mark.parametrize("state", [{}, {"terminated": {"exitCode": 0}}], ids=["waiting", "ended"])
def test_the_reduced_pod_has_the_same_gate_state(state: dict[str, Any]) -> None:
    status = {"phase": "Pending", "initContainerStatuses": [{"name": GATE, "state": state}]}
    spec = {"nodeName": "n", "initContainers": [{"name": GATE}]}
    kept = DECODE(
        msgspec.Raw(msgspec.json.encode({"metadata": {}, "spec": spec, "status": status}))
    )
    assert isinstance(kept, Pod)
    assert waits(kept) == (not state)


@pytest.mark.parametrize("node", ["", "n"], ids=["waiting", "bound"])
@pytest.mark.parametrize("command", [["python", "-I", "-m", "agent.gate_client"], ["true"]])
def test_the_reduced_pod_has_the_same_valid_gate(node: str, command: list[str]) -> None:
    """Only the environment variables of the gate container are kept."""
    gate = {**gate_container("agent:1"), "command": command}
    spec = {"nodeName": node, "initContainers": [gate]}
    kept = DECODE(msgspec.Raw(msgspec.json.encode({"metadata": {}, "spec": spec})))
    assert isinstance(kept, Pod)
    assert is_gated(kept, "agent:2") == (command != ["true"])


def test_at_most_half_of_a_running_pod_is_kept() -> None:
    beside = {"conditions": [REJECTED] * 4, "containerStatuses": [RUNNING]}
    sent = raw([OTHER] * 10, node="n", phase="Running", **beside)
    assert len(msgspec.json.encode(DECODE(sent))) < len(msgspec.json.encode(ALL(sent))) / 2


def manifest(annotations: dict[str, str], **metadata: Any) -> msgspec.Raw:
    metadata = {"name": "p", "uid": "u", "annotations": annotations, **metadata}
    return msgspec.Raw(msgspec.json.encode({"metadata": metadata}))


def decoded(kind: str, raw: msgspec.Raw) -> Any:
    return next(each for each in watched_kinds("any") if each.name == kind).decode(raw)


NOISE = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 100_000, "a": "ö" * 1000}


def test_only_the_size_of_unused_annotations_is_kept() -> None:
    own = {"headroom.gpu/vram": "8Gi", "headroom.gpu/retry": "1"}
    sent = manifest({**NOISE, **own})
    kept = decoded("pods", sent)
    assert kept.metadata.annotations == own
    assert kept.metadata.foreign_annotation_bytes == annotation_bytes(NOISE)
    assert kept.metadata.foreign_annotations == len(NOISE)
    assert len(msgspec.json.encode(kept)) < 500


@pytest.mark.parametrize("free_bytes", [1, 0])
def test_dropped_annotations_count_towards_the_limits(free_bytes: int) -> None:
    most = MAX_ANNOTATION_BYTES - RESERVED_ANNOTATION_BYTES - len("a")
    sent = manifest({"a": "x" * (most + 1 - free_bytes)})
    kept, whole = decoded("pods", sent), ALL(sent)
    assert exceeded(kept) == exceeded(whole)
    assert bool(exceeded(kept)) == (not free_bytes)
    for written_bytes in (7000, 8000):
        written = {"headroom.gpu/placement": "x" * written_bytes}
        assert has_room_for(kept, written) == has_room_for(whole, written)


@pytest.mark.parametrize(
    "own",
    [
        {f"headroom.gpu/devices.{n}": "" for n in range(20_000)},
        {"headroom.gpu/vram": "8Gi", "headroom.gpu/note": "x" * 200_000},
    ],
    ids=["many", "long"],
)
def test_our_annotations_are_kept_up_to_the_limit(own: dict[str, str]) -> None:
    kept = decoded("pods", manifest(own))
    assert "at most" in exceeded(kept)
    assert kept.metadata.annotations.get("headroom.gpu/vram") == own.get("headroom.gpu/vram")
    assert annotation_bytes(kept.metadata.annotations) < 2 * MAX_OWN_ANNOTATION_BYTES
    after = annotation_bytes(kept.metadata.annotations) + kept.metadata.foreign_annotation_bytes
    assert after == annotation_bytes(own)


@pytest.mark.parametrize(
    "mark",
    [
        {"run.ai/reserve_for_gpu_index": "0"},
        {"hami.io/vgpu-devices-allocated": "x" * 100_000},
        {"hami.io/vgpu-devices-allocated": "x", "hami.io/vgpu-node": "elsewhere"},
        {"nvidia.com/container.main.gpus.devices": "GPU-1"},
        {"ALIYUN_COM_GPU_MEM_IDX": "0"},
    ],
)
def test_marks_of_other_allocators_are_kept(mark: dict[str, str]) -> None:
    bound = {"metadata": {"name": "p", "annotations": {**NOISE, **mark}}, "spec": {"nodeName": "n"}}
    sent = msgspec.Raw(msgspec.json.encode(bound))
    kept = decoded("pods", sent)
    assert of_pod(kept) == of_pod(ALL(sent))
    assert set(kept.metadata.annotations) == set(mark)
    assert len(msgspec.json.encode(kept)) < 1000


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        ("nodes", {"headroom.gpu/reserve": "1Gi", "hami.io/node-handshake": "Requesting"}),
        ("namespaces", {"headroom.gpu/default-vram": "4Gi"}),
        ("gpunodes", {}),
        ("resourceslices", {}),
        ("deviceclasses", {}),
        ("resourceclaims", {}),
        ("poddisruptionbudgets", {}),
    ],
)
def test_no_kind_keeps_unused_annotations(kind: str, read: dict[str, str]) -> None:
    kept = decoded(kind, manifest({**NOISE, **read}))
    assert (kept.metadata.annotations or {}) == read


def test_a_namespace_keeps_only_our_labels() -> None:
    kept = decoded("namespaces", manifest({}, labels={"headroom.gpu/scheduler": "s", "a": "b"}))
    assert kept.metadata.labels == {"headroom.gpu/scheduler": "s"}
