"""Checks which of kube-scheduler's own preferences the extender's score outweighs.

    python -m benchmarks.weights [--scheduler kube-scheduler-1.34]

It runs two nodes and a real kube-scheduler. Like Headroom, the extender gives the winner a score of
10, and the other node less. Each row gives kube-scheduler one reason, as strong as possible, to
prefer the other node. The columns differ in the extender's weight, the other node's score, and the
weights of kube-scheduler's plugins, which come from deploy/base/kube-scheduler.yaml or are the
defaults.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import typer
import urllib3

from benchmarks.real.start import start_nothing, start_scheduler
from tests.controlplane import SCHEDULER_NAME, ControlPlane, control_plane
from tests.e2e.cluster import PODS, REPLICA_SETS, Cluster
from tests.e2e.nodes import RESOURCE
from tests.processes import free_ports

Object = dict[str, Any]

OURS, OTHER = "ours", "other"
NODES = "/api/v1/nodes"
MERGE = "application/merge-patch+json"
HOST = "kubernetes.io/hostname"
IMAGE = "registry.example.com/ml/train:1"
ALIKE = {"matchLabels": {"app": "train"}}
AMOUNTS = {"cpu": "64", "memory": "64Gi", "pods": "110", RESOURCE: "8"}
#: The extender's weight, the score of the other node, and whether plugins have the shipped weights.
COLUMNS = {
    "2, 0, shipped": (2, 0, True),
    "2, 0": (2, 0, False),
    "2, 2": (2, 2, False),
    "1, 0": (1, 0, False),
    "21, 0": (21, 0, False),
    "21, 9": (21, 9, False),
}


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why kube-scheduler prefers the other node."""

    #: Content that is merged into the pod, and into each of the nodes.
    pod: Object = field(default_factory=dict)
    ours: Object = field(default_factory=dict)
    other: Object = field(default_factory=dict)
    #: CPUs and GiB that running pods take on each node, and what the new pod requests.
    on_ours: tuple[int, int] = (0, 0)
    on_other: tuple[int, int] = (0, 0)
    asks: tuple[int, int] = (1, 1)
    #: Number of running pods on each node that are like the new one.
    alike: tuple[int, int] = (0, 0)
    #: Whether they are replicas of one ReplicaSet.
    replicas: bool = False


def affinity(**kinds: Any) -> Object:
    return {"affinity": kinds}


def preferred(term: str, weight: int, content: Any) -> Object:
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": weight, term: content}]}


IN_OTHER = {"matchExpressions": [{"key": HOST, "operator": "In", "values": [OTHER]}]}
NEAR = {"labelSelector": ALIKE, "topologyKey": HOST}
SPREAD = {
    "maxSkew": 1,
    "topologyKey": HOST,
    "whenUnsatisfiable": "ScheduleAnyway",
    "labelSelector": ALIKE,
}
REASONS = {
    "emptier: NodeResourcesFit": Reason(on_ours=(62, 62)),
    "better balanced: BalancedAllocation": Reason(on_ours=(40, 0), on_other=(0, 40), asks=(20, 1)),
    "emptier and better balanced": Reason(on_ours=(43, 0), on_other=(0, 0), asks=(20, 1)),
    "has the image: ImageLocality": Reason(
        other={"status": {"images": [{"names": [IMAGE], "sizeBytes": 20 << 30}]}}
    ),
    "emptier, and has the image": Reason(
        on_ours=(62, 62),
        other={"status": {"images": [{"names": [IMAGE], "sizeBytes": 20 << 30}]}},
    ),
    "spreading of a ReplicaSet by default": Reason(alike=(6, 0), replicas=True),
    "preferred node affinity, weight 100": Reason(
        pod=affinity(nodeAffinity=preferred("preference", 100, IN_OTHER))
    ),
    "preferred node affinity, weight 1": Reason(
        pod=affinity(nodeAffinity=preferred("preference", 1, IN_OTHER))
    ),
    "preferred pod affinity": Reason(
        alike=(0, 1), pod=affinity(podAffinity=preferred("podAffinityTerm", 100, NEAR))
    ),
    "preferred pod anti-affinity": Reason(
        alike=(1, 0), pod=affinity(podAntiAffinity=preferred("podAffinityTerm", 100, NEAR))
    ),
    "topology spread, ScheduleAnyway": Reason(
        alike=(3, 0), pod={"topologySpreadConstraints": [SPREAD]}
    ),
    "taint PreferNoSchedule": Reason(
        ours={"spec": {"taints": [{"key": "old", "effect": "PreferNoSchedule"}]}}
    ),
    "preferred node affinity, but fuller": Reason(
        on_other=(62, 62), pod=affinity(nodeAffinity=preferred("preference", 100, IN_OTHER))
    ),
    "the same, and ours has the image": Reason(
        on_other=(62, 62),
        ours={"status": {"images": [{"names": [IMAGE], "sizeBytes": 20 << 30}]}},
        pod=affinity(nodeAffinity=preferred("preference", 100, IN_OTHER)),
    ),
}


def pod(name: str, asks: tuple[int, int], **spec: Any) -> Object:
    amounts = {"cpu": str(asks[0]), "memory": f"{asks[1]}Gi", RESOURCE: "1"}
    container = {"name": "main", "image": IMAGE, "resources": {"limits": amounts}}
    return {"metadata": {"name": name}, "spec": {"containers": [container], **spec}}


class Case:
    """Plays one reason, on nodes of its own."""

    def __init__(self, plane: ControlPlane, reason: Reason) -> None:
        self._plane, self._reason = plane, reason
        self._owner: list[Object] = []

    @contextlib.contextmanager
    def set_up(self) -> Iterator[None]:
        reason, call = self._reason, self._plane.call
        try:
            for name, patch in ((OURS, reason.ours), (OTHER, reason.other)):
                call("POST", NODES, {"metadata": {"name": name, "labels": {HOST: name}}})
                taints = {"spec": {"taints": None} | patch.get("spec", {})}
                call("PATCH", f"{NODES}/{name}", taints, MERGE)
                amounts = {"capacity": AMOUNTS, "allocatable": AMOUNTS}
                status = {"status": amounts | patch.get("status", {})}
                call("PATCH", f"{NODES}/{name}/status", status, MERGE)
            if reason.replicas:
                spec = {"selector": ALIKE, "replicas": 9}
                template = pod("unused", (1, 1))
                template["metadata"] = {"labels": ALIKE["matchLabels"]}
                body = {"metadata": {"name": "train"}, "spec": {**spec, "template": template}}
                uid = call("POST", REPLICA_SETS, body)["metadata"]["uid"]
                names = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "train"}
                self._owner = [{**names, "uid": uid, "controller": True}]
            for name, taken, alike in (
                (OURS, reason.on_ours, reason.alike[0]),
                (OTHER, reason.on_other, reason.alike[1]),
            ):
                call("POST", PODS, pod(f"on-{name}", taken, nodeName=name))
                for number in range(alike):
                    self._create(pod(f"alike-{name}-{number}", (0, 0), nodeName=name))
            self._wait_for_caches()
            yield
        finally:
            at_once = {"gracePeriodSeconds": 0}
            for path in (PODS, REPLICA_SETS, NODES):
                call("DELETE", path, at_once)

    def _create(self, manifest: Object) -> None:
        manifest["metadata"] |= {"labels": ALIKE["matchLabels"], "ownerReferences": self._owner}
        self._plane.call("POST", PODS, manifest)

    def _wait_for_caches(self) -> None:
        """Wait until kube-scheduler's caches have both nodes and all pods on them.

        kube-scheduler can bind a pod to a node only when it has the node's last change, and its
        watch delivers pods in the order of their creation. Otherwise it might know only one node.
        """
        for name in (OURS, OTHER):
            selects = {"nodeSelector": {HOST: name}, "tolerations": [{"operator": "Exists"}]}
            self._plane.call(
                "POST", PODS, pod(f"first-{name}", (0, 0), schedulerName=SCHEDULER_NAME, **selects)
            )
            self._node_of(f"first-{name}")
            self._plane.call("DELETE", f"{PODS}/first-{name}", {"gracePeriodSeconds": 0})

    def chosen(self) -> str:
        """Return the node that kube-scheduler binds the pod to."""
        self._create(
            pod("asked", self._reason.asks, schedulerName=SCHEDULER_NAME, **self._reason.pod)
        )
        return self._node_of("asked")

    def _node_of(self, name: str) -> str:
        """Wait until the pod is bound; return its node. Raises ``TimeoutError`` after 60 s."""
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            bound = self._plane.call("GET", f"{PODS}/{name}")
            if node := bound["spec"].get("nodeName"):
                return str(node)
            time.sleep(0.02)
        raise TimeoutError(bound)


def main(
    scheduler: Annotated[
        str, typer.Option(help="Name of one of the built kube-schedulers.")
    ] = "kube-scheduler",
) -> None:
    """Print the chosen node for each reason and each weight."""
    won: dict[tuple[str, str], bool] = {}
    with control_plane() as plane:
        Cluster(plane, ()).create()
        (port,) = free_ports(1)
        url = start_nothing(plane, port)
        for column, (weight, score, shipped) in COLUMNS.items():
            scores = msgspec.json.encode({"scores": {OURS: 10, OTHER: score}})
            urllib3.request("POST", f"{url}/script", body=scores)
            config = {} if shipped else {"profiles": [{"schedulerName": SCHEDULER_NAME}]}
            start_scheduler(plane, url, config, binary=scheduler, extender={"weight": weight})
            for name, reason in REASONS.items():
                case = Case(plane, reason)
                with case.set_up():
                    won[name, column] = case.chosen() == OURS
            plane.kill(scheduler)
    typer.echo(f"{'the other node is or has':<38}" + "  ".join(f"{c:>13}" for c in COLUMNS))
    for name in REASONS:
        wins = ("extender" if won[name, column] else "-" for column in COLUMNS)
        typer.echo(f"{name:<38}" + "  ".join(f"{win:>13}" for win in wins))


if __name__ == "__main__":
    typer.run(main)
