"""Runs the scenarios of node groups that a real Cluster Autoscaler scales, and prints a table.

    python -m benchmarks.autoscaling [--only REGEX] [--part 1/4] [--settle-s 60]

`make neighbours ARGS="-k autoscaling"` runs all of it.

It runs a real etcd, API server, kube-scheduler with an extender, and Cluster Autoscaler with its
provider kwok, whose nodes are only Node objects. Kubelets, device plugins and agents are simulated.
All plays run in one cluster, in which a label keeps their pods on their own node groups.

For each form of a scenario, the table shows nodes added / nodes that no pod uses / pods that wait
although a node of some group would take them. After ``--settle-s`` seconds without a new node or a
bound pod, the remaining pods count as waiting forever. The command fails if the best form of a
scenario with pods of one size adds a node that no pod uses, or lets a pod wait.
"""

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import yaml

from agent.kube_publisher import NotDelivered
from benchmarks.autoscaling.manifests import (
    GROUP,
    VRAM,
    configuration,
    group_name,
    play_name,
    play_of,
    pods,
    template,
)
from benchmarks.autoscaling.scenarios import (
    FORMS,
    SCENARIOS,
    Form,
    Group,
    Outcome,
    Scenario,
    failures,
    fewest_nodes,
    table,
)
from benchmarks.hotpath.machine import machine
from headroom.contract.gpunode import GPUNodeStatus
from tests.controlplane import (
    ROOT,
    ApiRefused,
    ControlPlane,
    built,
    control_plane,
    scheduler_configuration,
)
from tests.e2e.__main__ import with_bytes
from tests.e2e.cluster import PODS, RBAC, Cluster, role_binding
from tests.e2e.nodes import GIB, Nodes, Shape

AUTOSCALER = "cluster-autoscaler"
SYSTEM = "kube-system"
#: Seconds between two reads of the API server, and between two heartbeats.
LOOK_S, BEAT_S = 0.4, 20.0
PATIENCE_S = 1800.0


class PlayedNode(Nodes):
    """One node that the autoscaler added."""

    def __init__(self, plane: ControlPlane, name: str, group: Group, late_s: float) -> None:
        shape = Shape(group.gpus, group.memory_gib * GIB, group.replicas, group.resource)
        super().__init__(plane, [name], shape, seed=1)
        self.name, self.group, self.is_late = name, group, late_s > 0
        self.due_s = time.monotonic() + late_s
        self.is_reported = False

    def _status(self, name: str, now: datetime) -> GPUNodeStatus:
        status = super()._status(name, now)
        if self.group.replicas > 1:
            return status
        devices = [msgspec.structs.replace(each, sharing="none") for each in status.devices]
        return msgspec.structs.replace(status, devices=devices)


@dataclass
class Plays:
    """All plays in one cluster."""

    cluster: Cluster
    #: Play -> its scenario and form.
    forms: dict[str, tuple[Scenario, Form]]
    nodes: dict[str, PlayedNode] = field(default_factory=dict)
    bound: int = 0
    beat_s: float = 0.0

    def step(self) -> tuple[int, int]:
        """Act once as all kubelets, plugins and agents. Return the number of nodes and of bound
        pods."""
        listed = self.cluster.plane.call("GET", "/api/v1/nodes")["items"]
        for node in listed:
            if node["metadata"]["name"] not in self.nodes:
                self._join(node)
        now_s = time.monotonic()
        for played in self.nodes.values():
            if not played.is_reported and now_s >= played.due_s:
                self._report(played)
        existing = self.cluster.bound()
        on: dict[str, list[dict[str, Any]]] = {}
        for pod in existing:
            on.setdefault(pod["spec"]["nodeName"], []).append(with_bytes(pod))
        for name, there in on.items():
            with suppress(NotDelivered):
                if self.nodes[name].is_reported:
                    self.nodes[name].observe(there)
        if now_s >= self.beat_s:
            self.beat_s = now_s + BEAT_S
            for name, played in self.nodes.items():
                if played.is_reported:
                    with suppress(NotDelivered):
                        played.beat([name])
        return len(listed), len(existing)

    def _join(self, node: Mapping[str, Any]) -> None:
        """Let the node become ready. A late node has no GPUs yet."""
        name, label = node["metadata"]["name"], node["metadata"]["labels"][GROUP]
        scenario, _ = self.forms[play_of(node)]
        group = next(g for g in scenario.groups if label == group_name(play_of(node), g))
        played = PlayedNode(self.cluster.plane, name, group, scenario.late_s)
        self.nodes[name] = played
        path = f"/api/v1/nodes/{name}"
        if scenario.late_s:
            nothing = dict.fromkeys((group.resource, VRAM))
            status = {"status": {"capacity": nothing, "allocatable": nothing}}
            self.cluster.plane.call("PATCH", f"{path}/status", status)
        taints = [t for t in node["spec"].get("taints", ()) if "node.kubernetes.io" not in t["key"]]
        self.cluster.plane.call("PATCH", path, {"spec": {"taints": taints or None}})

    def _report(self, played: PlayedNode) -> None:
        if played.is_late:
            amount = {played.group.resource: str(played.group.gpus * played.group.replicas)}
            status = {"status": {"capacity": amount, "allocatable": amount}}
            path = f"/api/v1/nodes/{played.name}/status"
            self.cluster.plane.call("PATCH", path, status)
        with suppress(NotDelivered):
            played.report([played.name])
            played.is_reported = True

    def outcomes(self) -> dict[str, Outcome]:
        """Return the outcome of each play."""
        there = self.cluster.bound()
        counts: dict[str, dict[str, int]] = {play: {} for play in self.forms}
        for node in self.cluster.plane.call("GET", "/api/v1/nodes")["items"]:
            name = node["metadata"]["name"]
            counts[play_of(node)][name] = sum(p["spec"]["nodeName"] == name for p in there)
        return {
            play: Outcome(
                counts[play],
                sum(counts[play].values()),
                fewest_nodes(scenario)[0],
            )
            for play, (scenario, _) in self.forms.items()
        }


def main(
    only: Annotated[str, typer.Option(help="Only scenarios whose name matches.")] = "",
    part: Annotated[
        str, typer.Option(help="Only one of several parts of the scenarios. Example: 1/4.")
    ] = "1/1",
    settle_s: Annotated[float, typer.Option(min=1)] = 60.0,
    logs: Annotated[
        Path | None, typer.Option(help="Write the log of the autoscaler to this file.")
    ] = None,
) -> None:
    number, parts = map(int, part.split("/"))
    chosen = [each for each in SCENARIOS[number - 1 :: parts] if re.search(only, each.name)]
    typer.echo(f"{machine()}; {len(chosen)} scenarios")
    began_s = time.monotonic()
    found = play(chosen, settle_s, logs)
    for line in table(chosen, found):
        typer.echo(line)
    typer.echo(f"{time.monotonic() - began_s:.0f} s")
    if missed := failures(chosen, found):
        sys.exit("\n".join(missed))


def play(
    chosen: Sequence[Scenario], settle_s: float, logs: Path | None = None
) -> dict[tuple[str, Form], Outcome]:
    """Play all forms of the scenarios together. Return the outcomes by scenario and form."""
    built("etcd", "kube-apiserver", "kube-scheduler", AUTOSCALER)
    forms = dict(_plays(chosen))
    with control_plane() as plane:
        cluster = Cluster(plane, ())
        plays = Plays(cluster, forms)
        try:
            _start(plays)
            for name, (scenario, form) in forms.items():
                for pod in pods(name, scenario, form):
                    plane.call("POST", PODS, pod)
            _until_settled(plays, settle_s)
            outcomes = plays.outcomes()
        finally:
            if logs:
                logs.write_text(plane.log(AUTOSCALER))
            for node in plays.nodes.values():
                node.close()
            cluster.kill_all()
    return {
        (scenario.name, form): outcomes[play_name(number, form)]
        for number, scenario in enumerate(chosen, 1)
        for form in FORMS
        if play_name(number, form) in outcomes
    }


def _plays(chosen: Sequence[Scenario]) -> Iterator[tuple[str, tuple[Scenario, Form]]]:
    for number, scenario in enumerate(chosen, 1):
        for form in FORMS:
            if form == "fixed":
                if not scenario.fixes:
                    continue
                scenario = scenario.fixed()
            yield play_name(number, form), (scenario, form)


def _start(plays: Plays) -> None:
    cluster, plane = plays.cluster, plays.cluster.plane
    cluster.create()
    text = (ROOT / "deploy/components/in-tree-mirror/rbac.yaml").read_text()
    role, _ = yaml.safe_load_all(text)
    binding = role_binding(role)
    binding["subjects"][0]["name"] = "headroom-extender"
    plane.call("POST", f"{RBAC}/clusterroles", role)
    plane.call("POST", f"{RBAC}/clusterrolebindings", binding)
    url = cluster.start_extender(settings={"mirror_vram": True})
    shipped = scheduler_configuration(url, plane.kubeconfig("scheduler-of-the-tests"))
    # Only to make the benchmark faster: waiting pods are retried more often.
    cluster.start_scheduler_as("kube-scheduler", shipped | {"podMaxBackoffSeconds": 5})
    templates = [
        template(play, group, form)
        for play, (scenario, form) in plays.forms.items()
        for group in scenario.groups
    ]
    with suppress(ApiRefused):  # the API server creates it too
        plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": SYSTEM}})
    for name, data in configuration(templates):
        path = f"/api/v1/namespaces/{SYSTEM}/configmaps"
        plane.call("POST", path, {"metadata": {"name": name}, "data": data})
    kubeconfig = str(plane.kubeconfig())
    plane.spawn(
        AUTOSCALER,
        str(built(AUTOSCALER)[AUTOSCALER]),
        f"--kubeconfig={kubeconfig}",
        "--cloud-provider=kwok",
        f"--namespace={SYSTEM}",
        "--scan-interval=1s",
        "--expander=least-waste",
        "--scale-down-enabled=false",
        "--leader-elect=false",
        "--address=127.0.0.1:0",
        "--v=1",
        env={"KUBECONFIG": kubeconfig, "KWOK_PROVIDER_MODE": "local", "POD_NAMESPACE": SYSTEM},
    )


def _until_settled(plays: Plays, settle_s: float) -> None:
    began_s = changed_s = time.monotonic()
    seen = (0, 0)
    while (now_s := time.monotonic()) - changed_s < settle_s:
        if now_s - began_s > PATIENCE_S:
            sys.exit(f"not settled after {PATIENCE_S:.0f} s: {seen[0]} nodes, {seen[1]} bound pods")
        if (found := plays.step()) != seen:
            seen, changed_s = found, now_s
        time.sleep(LOOK_S)


if __name__ == "__main__":
    typer.run(main)
