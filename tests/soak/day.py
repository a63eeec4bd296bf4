"""Generates the inputs of a simulated day. In each hour, all objects are created and deleted once,
with new names.

* Autoscaling: nodes join and leave. After each change, filter is called for a new pod.
* Churn: pods of new owners run in a new namespace, end, and are deleted with their owners. Another
  scheduler binds some of them. Other pods run on the node of each real agent.
* Reconnects: all watches and connections are cut.
* Requests: clients send requests with new tokens, names, users, pods and paths to every port.

At the end of an hour, all objects of the hour are deleted.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import urllib3

from tests.admission.reviews import manifest, review
from tests.controlplane import ApiRefused
from tests.driver import GIB
from tests.e2e.cluster import GPUNODES, pod_manifest
from tests.e2e.nodes import SYSTEM_NAMESPACE, Nodes, Shape
from tests.soak.site import ALTERED, PATIENCE_S, PROFILES, Site
from tests.standin.fleet import NODES
from tests.waiting import until

LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM_NAMESPACE}/leases"
NAMESPACES = "/api/v1/namespaces"
VIEWER = {"Authorization": "Bearer viewer-of-the-tests"}
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Amounts:
    """The number of objects and requests in an hour."""

    nodes: int
    owners: int
    pods: int
    #: Number of pods that end together on the node of each real agent, and number of times that
    #: they end in an hour. The agent takes a sample each time.
    agent_pods: int
    agent_steps: int
    #: Number of requests that unauthorized clients send to each port, and number of filter calls.
    requests: int
    #: Size in bytes of each text that users choose freely in a pod of a filter call or a review.
    text_bytes: int


class Hour:
    def __init__(self, site: Site, number: int, amounts: Amounts) -> None:
        self._site, self._plane, self._amounts = site, site.plane, amounts
        self._name = f"hour-{number}-{uuid4().hex[:6]}"
        authority = str(site.plane.ca_file)
        self._http = urllib3.PoolManager(ca_certs=authority, retries=False, timeout=PATIENCE_S)
        names = [f"{self._name}-node-{index}" for index in range(amounts.nodes)]
        self._nodes = Nodes(self._plane, names, Shape(gpus=2, memory_bytes=80 * GIB), number)
        self._nodes.peak_of = lambda _: GIB // 2
        self._pods = f"{NAMESPACES}/{self._name}/pods"
        self._sets = f"/apis/apps/v1/namespaces/{self._name}/replicasets"
        self._serial = 0

    def run(self) -> None:
        try:
            self._join()
            self._place()
            self._request()
            self._site.cut()
            self._end()
            self._leave()
        finally:
            self._nodes.close()
            self._http.clear()

    def _join(self) -> None:
        """Add the nodes one by one, with a filter call after each node."""
        for name in self._nodes.names:
            node = {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}}
            self._plane.call("POST", NODES, node)
            amounts = {"cpu": "128", "memory": "1Ti", "pods": "250", "nvidia.com/gpu": "16"}
            status = {"capacity": amounts, "allocatable": amounts}
            self._plane.call("PATCH", f"{NODES}/{name}/status", {"status": status})
            self._until(lambda name=name: self._reported(name), f"{name} is initialised")
            self._filter()

    def _reported(self, name: str) -> bool:
        found = self._gpunode(name)
        if found and "status" not in found:
            self._nodes.report([name])
        return bool(found.get("spec", {}).get("initialised"))

    def _leave(self) -> None:
        for name in self._nodes.names:
            self._plane.call("DELETE", f"{NODES}/{name}")
            self._until(lambda name=name: not self._gpunode(name), f"GPUNode {name} is deleted")
            self._filter()

    def _gpunode(self, name: str) -> dict[str, Any]:
        """Return the GPUNode of a node, or an empty object if it does not exist."""
        try:
            return self._plane.call("GET", f"{GPUNODES}/{name}")
        except ApiRefused as err:
            if ": 404 " not in str(err):
                raise
            return {}

    def _place(self) -> None:
        self._plane.call("POST", NAMESPACES, {"metadata": {"name": self._name}})
        owners = [self._owner(index) for index in range(self._amounts.owners)]
        for index in range(self._amounts.pods):
            node = self._nodes.names[index % len(self._nodes.names)]
            owner = owners[index % len(owners)]
            self._create(f"pod-{index}", owner, nodeSelector={"kubernetes.io/hostname": node})
            self._create(f"bypass-{index}", owner, nodeName=node)
        count = 2 * self._amounts.pods
        self._until(lambda: len(self._bound()) == count, f"{count} pods are bound")
        self._nodes.observe(self._bound())
        agents = self._site.agents.values()
        for index in range(self._amounts.agent_steps):
            for each in agents:
                each.replace_pods(self._amounts.agent_pods, f"{self._name}-{index}")
            self._until(lambda: all(each.measured() for each in agents), "agents measure pods")
        self._set_phase("Running", {"running": {"startedAt": "2026-11-29T00:00:00Z"}})

    def _owner(self, index: int) -> dict[str, Any]:
        labels = {"app": f"app-{index}"}
        template = {**pod_manifest("1Gi"), "metadata": {"labels": labels}}
        spec = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
        name = f"app-{index}-{self._name}"
        made = self._plane.call("POST", self._sets, {"metadata": {"name": name}, "spec": spec})
        owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "controller": True}
        return {**owner, "name": name, "uid": made["metadata"]["uid"]}

    def _create(self, name: str, owner: Mapping[str, Any], **spec: Any) -> dict[str, Any]:
        made = self._pod(name, **spec)
        made["metadata"]["ownerReferences"] = [owner]
        return self._plane.call("POST", self._pods, made)

    def _pod(self, name: str, **spec: Any) -> dict[str, Any]:
        made = pod_manifest("1Gi")
        made["metadata"] |= {"name": name, "namespace": self._name}
        made["metadata"]["annotations"] |= {"example.com/note": self._text(2_000)}
        made["spec"]["containers"][0]["env"] = [{"name": "TEXT", "value": self._text(2_000)}]
        made["spec"] |= spec
        return made

    def _all(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self._plane.call("GET", self._pods)["items"]
        return listed

    def _bound(self) -> list[dict[str, Any]]:
        return [pod for pod in self._all() if pod["spec"].get("nodeName")]

    def _set_phase(self, phase: str, state: Mapping[str, Any]) -> None:
        container = {"name": "main", "image": "none", "imageID": "none", "restartCount": 0}
        statuses = [{**container, "ready": phase == "Running", "state": state}]
        status = {"status": {"phase": phase, "containerStatuses": statuses}}
        for pod in self._all():
            path = f"{self._pods}/{pod['metadata']['name']}/status"
            self._plane.call("PATCH", path, status)

    def _end(self) -> None:
        """End all pods, and delete their owners and the namespace with all of its objects."""
        times = {"startedAt": "2026-11-29T00:00:00Z", "finishedAt": "2026-11-29T01:00:00Z"}
        self._set_phase("Succeeded", {"terminated": {"exitCode": 0, **times}})
        self._nodes.observe([])
        namespace = f"{NAMESPACES}/{self._name}"
        for path in (self._sets, self._pods, namespace):
            self._plane.call("DELETE", path, {"gracePeriodSeconds": 0})
        # Complete the deletion of the namespace, because no namespace controller runs.
        empty = {"metadata": {"name": self._name}, "spec": {"finalizers": []}}
        self._plane.call("PUT", f"{namespace}/finalize", empty)
        self._until(lambda: not any(map(self._holds, self._nodes.names)), "no reservation is left")

    def _holds(self, name: str) -> bool:
        return bool(self._gpunode(name).get("spec", {}).get("reservations"))

    def _request(self) -> None:
        site = self._site
        for _ in range(self._amounts.requests):
            self._filter()
            new = self._new()
            for name in site.names:
                url, part = site.url(name), name.removesuffix(ALTERED)
                token = {"Authorization": f"Bearer {self._text(4_000)}"}
                metrics = url
                if part == "agent":
                    metrics = site.url(f"{name} metrics")
                    self._ask("GET", f"{url}/v1/gate?pod_uid={new}")
                if part == "webhook":
                    self._review(url, new)
                if part == "console":
                    self._query(url, new)
                self._ask("GET", f"{metrics}/metrics", token)
                self._ask("GET", f"{url}/{new}", token)

    def _query(self, url: str, new: str) -> None:
        """Send queries to the console that no viewer has sent before."""
        for path in (
            f"nodes?search={new}&limit=5",
            f"explain?pod={new}/{new}",
            f"decisions?pod={self._name}/{new}",
            f"decisions/{new}.1",
            f"history?pod={new}/{new}",
            f"timeline?pod={self._name}/{new}",
            f"nodes/{new}/devices/{new}",
        ):
            self._ask("GET", f"{url}/v1/{path}", VIEWER)
        body = {"pods": [{"vram": f"{20_000 + self._serial}Mi", "count": 3}]}
        self._ask("POST", f"{url}/v1/whatif", VIEWER | JSON, body)

    def _review(self, url: str, new: str) -> None:
        """Send the webhook a review of a pod from a new user in a new namespace."""
        user = {"username": f"{new}-{self._text()}", "groups": [new, "system:authenticated"]}
        made = manifest(annotations={"example.com/note": self._text()})
        made["spec"]["containers"][0]["env"] = [{"name": "TEXT", "value": self._text()}]
        made["metadata"]["labels"] = self._labels()
        body = review(made, namespace=new, user=user)
        for path in ("mutate", "validate"):
            self._ask("POST", f"{url}/{path}", JSON, body)

    def _filter(self) -> None:
        """Call filter on each extender with a new pod, as kube-scheduler does."""
        made = self._pod(self._new())
        made["metadata"] |= {"uid": str(uuid4()), "resourceVersion": "1", "labels": self._labels()}
        names = [f"node-of-{agent}" for agent in self._site.agents] + [*self._nodes.names]
        body = {"Pod": made, "Nodes": None, "NodeNames": names}
        for name in self._site.names:
            if name.startswith("extender"):
                self._ask("POST", f"{self._site.url(f'{name} verbs')}/filter", JSON, body)

    def _ask(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, body: Any = None
    ) -> None:
        """Send a request. Ignore errors, because ports close the connections of clients that send
        too many requests.
        """
        content = None if body is None else json.dumps(body)
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            answer = self._http.request(method, url, body=content, headers=headers)
            self._site.answers[urlsplit(url).port, answer.status] += 1

    def _new(self) -> str:
        self._serial += 1
        return f"new-{self._serial}-{self._name}"

    def _labels(self) -> dict[str, str]:
        text = self._text()
        return {f"label-{at}": text[at : at + 60] for at in range(0, len(text), 60)}

    def _text(self, most: int = 1 << 20) -> str:
        """Return a new text of at most ``most`` characters."""
        size = min(most, self._amounts.text_bytes)
        return (uuid4().hex * (size // 32 + 1))[:size]

    def _until(self, true: Any, what: str) -> None:
        until(true, what, PATIENCE_S, 0.05, self._plane.logs)


def settled(site: Site) -> None:
    """Wait until no object of the simulated day is left in the cluster."""

    def left(path: str) -> list[str]:
        listed = [each["metadata"] for each in site.plane.call("GET", path)["items"]]
        # Check the namespace of VRAMProfiles, because it is their owner's, and the name of Leases,
        # because all agents' Leases are in one namespace.
        names = [f"{each.get('namespace')} {each['name']}" for each in listed]
        return [name for name in names if "hour-" in name]

    for path in (PROFILES, LEASES, GPUNODES, NAMESPACES):
        what = f"nothing of the day is left at {path}"
        until(
            lambda path=path: not left(path),
            what,
            PATIENCE_S,
            logs=lambda path=path: str(left(path)),
        )
