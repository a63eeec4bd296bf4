"""Serves an API server and a debug API in this process. A test sets their responses."""

import json
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.answering import Answer, Request, answering

CORDON = "headroom.gpu/cordon"
Reply = tuple[int, dict[str, Any]]


def status(code: int, message: str, **details: Any) -> Reply:
    """Return an error response in the format of the API server."""
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message}
    return code, body | {"code": code, "details": details}


@dataclass
class FakeCluster:
    """A cluster with nodes and pods by name. A patch of a node is accepted only for the current
    version.
    """

    annotations: dict[str, dict[str, str]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    #: Whether each node is cordoned (``spec.unschedulable``).
    cordons: dict[str, bool] = field(default_factory=dict)
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: The body of each node in the debug API. ``mig_parents`` maps each MIG device to its physical
    #: GPU.
    debug: dict[str, Any] = field(default_factory=dict)
    mig_parents: dict[str, str] = field(default_factory=dict)
    steering_obstacle: str | None = None
    #: Responses to the next evictions of each pod. Later evictions succeed and end the pod.
    evictions: dict[str, deque[Reply]] = field(default_factory=dict)
    #: Responses that override the default. A key is a method and a part of the path.
    answers: dict[tuple[str, str], Reply] = field(default_factory=dict)
    #: Annotation values that another client writes immediately before each of the next patches.
    others: deque[str] = field(default_factory=deque)
    requests: list[str] = field(default_factory=list)
    evicted: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def add(self, node: Any, annotations: dict[str, str] | None = None) -> None:
        """Add a node to both APIs."""
        self.debug[node["name"]] = node
        self.annotations[node["name"]] = annotations or {}
        self.versions[node["name"]] = 7

    def add_pod(self, name: str, owner: str = "ReplicaSet", **metadata: Any) -> None:
        """Add pod team-a/NAME with UID uid-NAME. If ``owner`` is empty, the pod has no
        controller.
        """
        owners = [{"apiVersion": "v1", "kind": owner, "name": "o", "uid": "o", "controller": True}]
        self.pods[name] = {
            "kind": "Pod",
            "apiVersion": "v1",
            "metadata": {
                "namespace": "team-a",
                "name": name,
                "uid": f"uid-{name}",
                "ownerReferences": owners if owner else [],
                **metadata,
            },
            "spec": {"nodeName": "gpu-a", "containers": [{"name": "main"}]},
            "status": {"phase": "Running"},
        }

    def answer(self, method: str, path: str, body: Any) -> Reply:
        self.requests.append(f"{method} {path}")
        for (of_method, part), answer in self.answers.items():
            if method == of_method and part in path:
                return answer
        if path.startswith("/v1/"):
            return self._debug(path.split("/")[2:])
        if path == "/api/v1/nodes":
            return 200, {"items": [self._node(name) for name in self.annotations]}
        if match := re.fullmatch(r"/api/v1/nodes/([^/]+)", path):
            return self._write(match[1], body) if method == "PATCH" else self._read(match[1])
        if path == "/api/v1/namespaces/team-a/pods":
            return 200, {"items": [*self.pods.values()]}
        match = re.fullmatch(r"/api/v1/namespaces/team-a/pods/([^/]+)(/eviction)?", path)
        assert match, path
        if match[1] not in self.pods:
            return status(404, f'pods "{match[1]}" not found')
        return self._evict(match[1], body) if match[2] else (200, self.pods[match[1]])

    def _debug(self, path: list[str]) -> Reply:
        if len(path) == 1:
            return 200, {"nodes": [*self.debug.values()], "continue": None}
        if len(path) == 4:
            return 200, {"mig_parent": self.mig_parents.get(path[3])}
        if path[1] not in self.debug:
            return 404, {"detail": f"node {path[1]} is not known"}
        return 200, {"node": self.debug[path[1]], "steering_obstacle": self.steering_obstacle}

    def _node(self, name: str) -> dict[str, Any]:
        metadata = {"name": name, "resourceVersion": str(self.versions[name])}
        spec = {"unschedulable": self.cordons.get(name)}
        return {
            "metadata": metadata | {"annotations": self.annotations[name] or None},
            "spec": spec,
        }

    def _read(self, name: str) -> Reply:
        if name not in self.annotations:
            return status(404, f'nodes "{name}" not found')
        return 200, self._node(name)

    def _write(self, name: str, patch: Any) -> Reply:
        if self.others:
            self.annotations[name] = {CORDON: self.others.popleft()}
            self.versions[name] += 1
        if isinstance(patch, dict):  # a merge patch
            self.cordons[name] = bool(patch["spec"]["unschedulable"])
            return self._read(name)
        first, *operations = patch
        version = self.versions[name]
        assert first["path"] == "/metadata/resourceVersion"
        if first != {"op": "replace", "path": "/metadata/resourceVersion", "value": str(version)}:
            return status(409, "the object has been modified")
        given = {**self.annotations[name]} or None
        for each in operations:
            key = each["path"].removeprefix("/metadata/annotations").removeprefix("/")
            key = key.replace("~1", "/").replace("~0", "~")
            if not key:
                given = each["value"]
            elif given is None:
                return status(422, "the path of the operation does not exist")
            elif each["op"] == "remove":
                del given[key]
            else:
                given[key] = each["value"]
        self.annotations[name], self.versions[name] = given or {}, version + 1
        return self._read(name)

    def _evict(self, name: str, body: dict[str, Any]) -> Reply:
        self.evicted.append(body)
        uid = body["deleteOptions"]["preconditions"]["uid"]
        if uid != self.pods[name]["metadata"]["uid"]:
            return status(409, "the UID in the precondition does not match")
        if waiting := self.evictions.get(name):
            return waiting.popleft()
        self.end(name)
        return 201, {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def end(self, name: str) -> None:
        """End a pod and remove it from the reports."""
        del self.pods[name]
        for node in self.debug.values():
            for device in node["devices"]:
                device["holders"] = [pod for pod in device["holders"] if pod["name"] != name]

    def cordoned(self, node: str) -> str | None:
        return self.annotations[node].get(CORDON)


@contextmanager
def serving_fake(folder: Path) -> Iterator[tuple[FakeCluster, str]]:
    """Serve a fake cluster on loopback. Yield the cluster and the path of its kubeconfig."""
    cluster = FakeCluster()

    def answer(request: Request) -> Answer:
        body = json.loads(request.body) if request.body else None
        return cluster.answer(request.method, request.path.partition("?")[0], body)

    with answering(answer) as cluster.url:
        kubeconfig = folder / "kubeconfig"
        content = {
            "kind": "Config",
            "apiVersion": "v1",
            "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "c",
        }
        kubeconfig.write_text(yaml.safe_dump(content))
        yield cluster, str(kubeconfig)
