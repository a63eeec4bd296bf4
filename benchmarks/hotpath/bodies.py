"""Builds the bodies that kube-scheduler sends: small and large pods, node names or whole Nodes.

Each call lists the nodes in a different order.
"""

import itertools
import random
from typing import Any, Literal

import msgspec

from headroom.contract.annotations import VRAM

GPU = "nvidia.com/gpu"
SEED = 1
JSON = "application/json"
#: Whole nodes or their names, depending on nodeCacheCapable.
Form = Literal["names", "objects"]


def names_of(nodes: int) -> list[str]:
    return [f"gpu-a100-{i:04d}" for i in range(nodes)]


#: Numbers of pods. A pod that was bound once is not bound again.
_numbers = itertools.count(1)


class Bodies:
    """Filter calls, each for another pod and with the nodes in another order.

    ``padding_bytes`` is the amount by which a pod is larger than a small pod, because of
    annotations of tools and variables of users."""

    def __init__(
        self,
        nodes: int,
        sizes: tuple[str, ...] = ("4Gi", "10Gi", "24Gi", "40Gi", "25%"),
        padding_bytes: int = 0,
        form: Form = "names",
    ) -> None:
        self._random = random.Random(SEED)
        self._names = names_of(nodes)
        self._sizes = sizes
        self._padding_bytes = padding_bytes
        self._objects = (
            {name: msgspec.Raw(msgspec.json.encode(node_as_sent(name))) for name in self._names}
            if form == "objects"
            else None
        )

    def another(self) -> bytes:
        offered = self._random.sample(self._names, len(self._names))
        pod = pod_as_sent(f"train-{next(_numbers)}", self._random.choice(self._sizes))
        _pad(pod, self._padding_bytes)
        return self._encoded(pod, offered)

    def _encoded(self, pod: Any, names: list[str]) -> bytes:
        if self._objects is None:
            return msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": names})
        items = [self._objects[name] for name in names]
        nodes = {"metadata": {}, "items": items}
        return msgspec.json.encode({"Pod": pod, "Nodes": nodes, "NodeNames": None})

    def of_those_that_passed(self, body: bytes, answer: bytes) -> bytes:
        """Return the prioritize call that follows a filter call, or b"" if no node passed."""
        pod = msgspec.json.decode(body, type=_Sent).pod
        shown = msgspec.json.decode(answer, type=_Answered)
        if shown.node_names is not None:
            names = shown.node_names
        else:
            names = [node.metadata.name for node in shown.nodes.items] if shown.nodes else []
        return self._encoded(pod, names) if names else b""


def bind_of(body: bytes, node: str = "any") -> bytes:
    """Return the bind call that follows the other calls of a pod."""
    metadata = msgspec.json.decode(body)["Pod"]["metadata"]
    args = {"PodName": metadata["name"], "PodNamespace": metadata["namespace"]}
    return msgspec.json.encode(args | {"PodUID": metadata["uid"], "Node": node})


class _Sent(msgspec.Struct, rename="pascal"):
    pod: msgspec.Raw


class _Meta(msgspec.Struct):
    name: str


class _Named(msgspec.Struct):
    metadata: _Meta


class _Listed(msgspec.Struct):
    items: list[_Named]


class _Answered(msgspec.Struct, rename="pascal"):
    node_names: list[str] | None = None
    nodes: _Listed | None = None


def pod_as_sent(name: str, vram: str) -> dict[str, Any]:
    resources = {"cpu": "100m", "memory": "1Gi", GPU: "1"}
    managed = {
        "manager": "unknown",
        "operation": "Update",
        "apiVersion": "v1",
        "time": "2026-11-21T00:29:21Z",
        "fieldsType": "FieldsV1",
        "fieldsV1": {
            "f:metadata": {"f:annotations": {".": {}, f"f:{VRAM}": {}}},
            "f:spec": {"f:containers": {'k:{"name":"main"}': {".": {}, "f:resources": {}}}},
        },
    }
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"3b8d9ff9-{name}",
            "resourceVersion": "8760",
            "creationTimestamp": "2026-11-21T00:29:21Z",
            "labels": {"app": "train"},
            "annotations": {VRAM: vram},
            "managedFields": [managed],
        },
        "spec": {
            "containers": [
                {
                    "name": "main",
                    "image": "registry.example.com/ml/train:1",
                    "resources": {"limits": resources, "requests": resources},
                    "terminationMessagePath": "/dev/termination-log",
                    "imagePullPolicy": "IfNotPresent",
                }
            ],
            "restartPolicy": "Always",
            "schedulerName": "default-scheduler",
            "tolerations": [
                {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}
            ],
            "priority": 0,
        },
        "status": {"phase": "Pending", "qosClass": "Guaranteed"},
    }


def _pad(pod: dict[str, Any], padding_bytes: int) -> None:
    """Enlarge the pod, half by an annotation and half by variables."""
    if not padding_bytes:
        return
    key = "kubectl.kubernetes.io/last-applied-configuration"
    pod["metadata"]["annotations"][key] = "x" * (padding_bytes // 2)
    variable = {"name": "SETTING_0000", "value": "as long as such values often are, more or less"}
    size = len(msgspec.json.encode(variable)) + len(",")
    pod["spec"]["containers"][0]["env"] = [
        {**variable, "name": f"SETTING_{number:04d}"}
        for number in range(padding_bytes // 2 // size)
    ]


def node_as_sent(name: str) -> dict[str, Any]:
    """Return a node as its kubelet and GPU feature discovery keep it, about 9 kB of JSON."""
    amounts = {"cpu": "128", "memory": "1056Gi", "pods": "250", "ephemeral-storage": "1788Gi"}
    amounts |= {GPU: "64", "hugepages-1Gi": "0", "hugepages-2Mi": "0"}
    labels = {f"nvidia.com/gpu.label-{number:02d}": "a-value-as-it-has-it" for number in range(40)}
    names = [
        f"registry.example.com/machine-learning/image-{number:02d}@sha256:{number:064x}"
        for number in range(25)
    ]
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": "123456789",
            "creationTimestamp": "2026-11-21T00:29:21Z",
            "labels": {"kubernetes.io/hostname": name, **labels},
            "annotations": {"volumes.kubernetes.io/controller-managed-attach-detach": "true"},
        },
        "spec": {"podCIDR": "10.0.0.0/24", "providerID": f"cloud:///zone/{name}"},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [
                {
                    "type": kind,
                    "status": "False",
                    "lastHeartbeatTime": "2026-11-21T00:29:21Z",
                    "lastTransitionTime": "2026-11-21T00:29:21Z",
                    "reason": f"KubeletHasNo{kind}",
                    "message": f"kubelet has no {kind}",
                }
                for kind in ("MemoryPressure", "DiskPressure", "PIDPressure", "Ready")
            ],
            "addresses": [{"type": "Hostname", "address": name}],
            "nodeInfo": {
                "kubeletVersion": "v1.36.3",
                "osImage": "a Linux",
                "architecture": "amd64",
            },
            "images": [
                {"names": [each, each.split("@", maxsplit=1)[0] + ":1"], "sizeBytes": 1234567890}
                for each in names
            ],
        },
    }
