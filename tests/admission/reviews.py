"""Builds reviews as an API server sends them, and applies the patches of the webhook's
responses.
"""

import base64
import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headroom.contract.annotations import DEVICE_CHOICE
from headroom.contract.gpunode import Device, GPUNodeStatus, Plugin, Source
from headroom.contract.kube import Node, NodeStatus, ObjectMeta, Pod
from headroom.runtime.settings.webhook import WebhookSettings
from headroom.webhook.context import AdmissionContext, GpuNode, NamespaceMetadata
from headroom.webhook.mutation import Mutated, mutate
from tests.builders import GPU, shared

GATE_IMAGE = "registry.example/headroom-agent:1"


def manifest(
    vram: str | None = "8Gi",
    *containers: Mapping[str, Any],
    annotations: Mapping[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """Return a pod with the API server's default values. By default, it has one GPU container."""
    written = {**({} if vram is None else {"headroom.gpu/vram": vram}), **(annotations or {})}
    metadata: dict[str, Any] = {"name": "p", "labels": {"app": "p"}}
    if written:
        metadata["annotations"] = written
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            "schedulerName": "default-scheduler",
            "containers": [*map(dict, containers)] or [container()],
            **spec,
        },
    }


def container(
    name: str = "main", gpus: int = 1, resource: str = GPU, **other: Any
) -> dict[str, Any]:
    amounts = {resource: str(gpus)} if gpus else {}
    resources = {"limits": dict(amounts), "requests": dict(amounts)}
    return {"name": name, "image": "none", "resources": resources, **other}


def all_containers(obj: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*(obj["spec"].get("initContainers") or ()), *obj["spec"]["containers"]]


ADMIN = {"username": "admin", "groups": ["system:authenticated"]}
KUBELET = {"username": "system:node:n", "groups": ["system:nodes", "system:authenticated"]}
STATIC = {"kubernetes.io/config.mirror": "x"}


def review(
    obj: Mapping[str, Any] | None,
    *,
    kind: str = "Pod",
    operation: str = "CREATE",
    old: Mapping[str, Any] | None = None,
    namespace: str = "team-a",
    user: Mapping[str, Any] = ADMIN,
) -> dict[str, Any]:
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": {"group": "", "version": "v1", "kind": kind},
            "resource": {"group": "", "version": "v1", "resource": kind.lower() + "s"},
            "name": "p",
            "namespace": namespace,
            "operation": operation,
            "userInfo": user,
            "object": obj,
            "oldObject": old,
            "dryRun": False,
        },
    }


def node(
    name: str = "n",
    choice: str | None = None,
    devices: Sequence[Device] | None = (shared(),),
    labels: Mapping[str, str] | None = None,
    driver: str = "",
    strategy: str = "envvar",
    limits: str = "absent",
) -> GpuNode:
    """Return a node whose agent reports one shared GPU by default. If ``devices`` is None, there is
    no report.
    """
    metadata = ObjectMeta(
        name=name,
        labels=labels,
        annotations={} if choice is None else {DEVICE_CHOICE: choice},
    )
    status = None
    if devices is not None:
        status = GPUNodeStatus(
            devices=list(devices),
            plugin=Plugin(device_list_strategy=strategy),
            sources=[msgspec.convert({"name": "limits", "state": limits}, Source)],
            driver_version=driver,
        )
    return GpuNode(Node(metadata=metadata, status=NodeStatus(allocatable={GPU: "4"})), status)


def around(
    *nodes: GpuNode,
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    **settings: Any,
) -> AdmissionContext:
    return AdmissionContext(
        settings=WebhookSettings(**settings),
        namespace=NamespaceMetadata("team-a", annotations or {}, labels or {}),
        nodes=nodes,
    )


def pod(obj: Mapping[str, Any]) -> Pod:
    decoded = msgspec.json.decode(json.dumps(obj), type=Pod)
    metadata = msgspec.structs.replace(decoded.metadata, namespace="team-a")
    return msgspec.structs.replace(decoded, metadata=metadata)


def mutated(obj: Mapping[str, Any], where: AdmissionContext) -> tuple[dict[str, Any], Mutated]:
    """Return the pod after the webhook's patch, as the API server stores it, and the webhook's
    result.
    """
    answer = mutate(pod(obj), where)
    return applied(obj, [operation.wire for operation in answer.operations]), answer


def patch_of(response: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "patch" not in response:
        return []
    decoded: list[dict[str, Any]] = json.loads(base64.b64decode(response["patch"]))
    return decoded


def applied(obj: Mapping[str, Any], operations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Apply JSON Patch operations (RFC 6902). Supports only the operations that the webhook uses.
    Raises ``KeyError`` if a path is missing.
    """
    tree: Any = copy.deepcopy(dict(obj))
    for operation in operations:
        match operation["op"]:
            case "add":
                _add(tree, operation["path"], copy.deepcopy(operation["value"]))
            case "remove":
                _take(tree, operation["path"])
            case "move":
                _add(tree, operation["path"], _take(tree, operation["from"]))
            case other:
                raise KeyError(other)
    result: dict[str, Any] = tree
    return result


def _add(tree: Any, path: str, value: Any) -> None:
    parent, key = _parent(tree, path)
    if isinstance(parent, list):
        parent.insert(len(parent) if key == "-" else int(key), value)
    else:
        parent[key] = value


def _take(tree: Any, path: str) -> Any:
    parent, key = _parent(tree, path)
    return parent.pop(int(key)) if isinstance(parent, list) else parent.pop(key)


def _parent(tree: Any, path: str) -> tuple[Any, str]:
    keys = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]
    for key in keys[:-1]:
        tree = tree[int(key)] if isinstance(tree, list) else tree[key]
    return tree, keys[-1]
