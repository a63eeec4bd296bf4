"""Places the same pods with each device choice and a real kube-scheduler, and shows why some wait.

    python -m benchmarks.device_choices [--choice predicted] [--nodes 40] [--pods 300] [--seed 1]

It runs a real etcd, API server and kube-scheduler, and the extender as shipped. 40 Node objects
have four time-sliced GPUs of 24 GiB with four replicas each. All pods are created together and none
of them ends. The seed decides their sizes and all random choices. On each node, kubelet and device
plugin are the models of ``tests/standin``, which other tests compare with the real ones. The
agent's own code decides which device a steered container gets, and whether a gate opens. The delays
of a real node, such as the delay of a steered admission, are left out.

A run ends when every pod is bound or rejected, and no pod was bound for ``QUIET_S``. The judge then
adds up the requests on each device. A pod whose device does not have enough free memory is out of
memory: it counts as an overcommit and uses nothing. For the waiting pods, the explanations that
``kubectl headroom why`` prints are grouped and counted.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import httpx
import msgspec
import typer

from benchmarks.device_truth.agents import Agent
from benchmarks.device_truth.world import Shape as WorldShape
from benchmarks.hotpath.machine import machine
from headroom.contract.annotations import DEVICE_CHOICE
from headroom.contract.gate import GATE, gate_container
from headroom.contract.gpunode import GPUNodeStatus, Plugin, PodUse
from headroom.contract.quantity import gib, parse_bytes
from headroom.kubectl.tables import reason_lines
from headroom.kubectl.why import why
from tests.controlplane import built, control_plane
from tests.driver import GIB, Gpu
from tests.e2e.cluster import PODS, PlayedCluster, pod_manifest
from tests.e2e.nodes import RESOURCE, Nodes, Shape
from tests.judge import excess
from tests.standin.allocations import Ids
from tests.standin.lots import Drawn
from tests.standin.node import StandIn, pod_of
from tests.standin.plugin import Settings

CHOICES = ("observe", "predicted", "gated", "steered")
SHAPE = Shape(gpus=4, memory_bytes=24 * GIB, replicas=4)
SIZES_GIB = (4, 6, 8, 10, 12, 16, 20)
#: Seconds without a bind. kube-scheduler retries a rejected pod after at most 10 s.
QUIET_S = 20.0
PATIENCE_S = 300.0
BEAT_EVERY_S = 20.0
POLL_S = 0.3


@dataclass(frozen=True, slots=True)
class Started:
    """A pod that the kubelet admitted."""

    node: str
    device: str
    request_bytes: int


class ChoiceNodes(Nodes):
    """Nodes whose pods get devices as in ``choice``."""

    def __init__(self, cluster: PlayedCluster, choice: str, seed: int) -> None:
        super().__init__(cluster.plane, cluster.names, SHAPE, seed)
        self._mode = choice
        self._chance = random.Random(seed)
        self._plugin = Plugin(
            allocation_policy="distributed",
            device_list_strategy="envvar",
            topology_manager_policy="none",
            steered=[RESOURCE] if choice == "steered" else [],
            steering_permitted=True,
        )
        world = WorldShape(1, SHAPE.gpus, SHAPE.memory_bytes, SHAPE.replicas, "distributed")
        self._stand_ins: dict[str, StandIn] = {}
        self._agents: dict[str, Agent] = {}
        for number, name in enumerate(cluster.names):
            gpus = [Gpu(f"GPU-{name}-{index}") for index in range(SHAPE.gpus)]
            self._stand_ins[name] = StandIn(gpus, Settings(SHAPE.replicas), seed=seed + number)
            self._agents[name] = Agent(world, self._plugin, partial(cluster.gpunode, name))
        #: Uid -> pod that the kubelet admitted, in the order of their start.
        self.started: dict[str, Started] = {}
        #: Uid -> gated pod that has not started.
        self._at_gate: dict[str, tuple[Mapping[str, Any], Started]] = {}
        #: Names of the pods that started on a device with too little free memory, and of the pods
        #: that the kubelet rejected.
        self.out_of_memory: list[str] = []
        self.turned_away: list[str] = []

    def observe(self, pods: Sequence[Mapping[str, Any]]) -> None:
        """Admit the pods that were bound since the last call, in random order. Then report."""
        new = [
            pod
            for pod in pods
            if pod["spec"].get("nodeName") and pod["metadata"]["uid"] not in self._known
        ]
        self._chance.shuffle(new)
        changed = {pod["spec"]["nodeName"] for pod in new}
        for pod in new:
            self._known.add(pod["metadata"]["uid"])
            self._admit(pod)
        self.report(sorted(changed))
        for uid, (pod, started) in list(self._at_gate.items()):
            agent = self._agents[started.node]
            agent.newest = self.status(started.node)
            if agent.lets(uid):
                del self._at_gate[uid]
                self._start(pod, started)

    @property
    def settled(self) -> bool:
        """Return whether each admitted pod has started."""
        return not self._at_gate

    def _admit(self, pod: Mapping[str, Any]) -> None:
        node, metadata = pod["spec"]["nodeName"], pod["metadata"]
        stand_in, agent = self._stand_ins[node], self._agents[node]
        lots = None
        if self._mode == "steered":
            agent.newest = self.status(node)
            lots = agent.steers(Drawn(self._chance), partial(_checkpoint, stand_in))
        if not stand_in.admit(pod_of(pod), lots).admitted:
            self.turned_away.append(metadata["name"])
            self._patch(pod, {"phase": "Failed", "reason": "UnexpectedAdmissionError"})
            return
        (replica,) = stand_in.listed(stand_in.pods[metadata["uid"]].pod)["main"]
        request_bytes = parse_bytes(metadata["annotations"]["headroom.gpu/vram"])
        self._uses[node].append(
            PodUse(
                uid=metadata["uid"],
                device=replica.device,
                namespace=metadata["namespace"],
                name=metadata["name"],
                container="main",
                replica=replica.id,
                used_bytes=0,
                source="test",
            )
        )
        started = Started(node, replica.device, request_bytes)
        if self._mode == "gated":
            self._at_gate[metadata["uid"]] = pod, started
        else:
            self._start(pod, started)

    def _start(self, pod: Mapping[str, Any], started: Started) -> None:
        """Let the pod allocate its request, or nothing if its device has too little memory."""
        uid = pod["metadata"]["uid"]
        fits = started.request_bytes <= self.shape.memory_bytes - self.used_bytes(started.device)
        self.started[uid] = started
        if not fits:
            self.out_of_memory.append(pod["metadata"]["name"])
        used_bytes = started.request_bytes if fits else 0
        rows = self._uses[started.node]
        for i, row in enumerate(rows):
            if row.uid == uid:
                rows[i] = msgspec.structs.replace(row, used_bytes=used_bytes)
        passed = {"name": GATE, "state": {"terminated": {"exitCode": 0}}}
        gate = {"image": "", "imageID": "", "ready": True, "restartCount": 0}
        inits = {"initContainerStatuses": [passed | gate]} if self._mode == "gated" else {}
        self._patch(pod, {"phase": "Running", **inits})

    def used_bytes(self, device: str) -> int:
        """Return the memory that pods use on the device."""
        rows = (row for uses in self._uses.values() for row in uses)
        return sum(row.used_bytes or 0 for row in rows if row.device == device)

    def _patch(self, pod: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        path = f"{PODS}/{pod['metadata']['name']}/status"
        self._plane.call("PATCH", path, {"status": status})

    def _status(self, name: str, now: Any) -> GPUNodeStatus:
        return msgspec.structs.replace(super()._status(name, now), plugin=self._plugin)


def _checkpoint(stand_in: StandIn) -> list[tuple[str, Ids]]:
    written = stand_in.devices.written
    return [(entry.uid, entry.replicas) for entry in written.entries] if written else []


def sized(choice: str, name: str, size_gib: int) -> dict[str, Any]:
    """Return a pod for nodes of this choice."""
    pod = pod_manifest(f"{size_gib}Gi")
    pod["metadata"]["name"] = name
    if choice == "gated":
        pod["spec"]["initContainers"] = [gate_container("headroom-agent")]
    return pod


@dataclass(frozen=True, slots=True)
class Outcome:
    bound: int
    #: Requested sizes of the pods that wait, in bytes.
    waiting: Sequence[int]
    #: Ratio of all memory that pods use.
    used_ratio: float
    free_bytes: int
    #: Number of devices whose pods request more than their memory, and of pods without enough
    #: memory.
    overcommitted: int
    without_memory: int
    turned_away: int
    #: Texts of ``why`` -> number of pods.
    reasons: Counter[str]
    suggestions: Counter[str]
    steering: str
    #: The whole text of ``why`` for the smallest waiting pod.
    example: Sequence[str]


def run(choice: str, nodes: int, sizes_gib: Sequence[int], seed: int) -> Outcome:
    """Place the pods on nodes of this choice."""
    with control_plane() as plane:
        cluster = PlayedCluster(plane, nodes, SHAPE)
        cluster.nodes.close()
        cluster.nodes = there = ChoiceNodes(cluster, choice, seed)
        try:
            cluster.create()
            if choice != "observe":
                chosen = {"metadata": {"annotations": {DEVICE_CHOICE: choice}}}
                for name in cluster.names:
                    plane.call("PATCH", f"/api/v1/nodes/{name}", chosen)
            observes = {"mode": "observe"} if choice == "observe" else {}
            cluster.start_scheduler(cluster.start_extender(settings=observes))
            cluster.settle()
            for number, size_gib in enumerate(sizes_gib):
                plane.call("POST", PODS, sized(choice, f"pod-{number:03}", size_gib))
            _play(cluster, there)
            return _outcome(cluster, there, nodes)
        finally:
            cluster.close()


def _play(cluster: PlayedCluster, there: ChoiceNodes) -> None:
    """Act as kubelets and agents until nothing changes any more."""
    began_s = beat_s = quiet_since_s = time.monotonic()
    bound: set[str] = set()
    while (now_s := time.monotonic()) < quiet_since_s + QUIET_S:
        if now_s > began_s + PATIENCE_S:
            raise TimeoutError(f"pods are still bound after {PATIENCE_S:g} s")
        pods = cluster.pods()
        there.observe(pods)
        if now_s > beat_s + BEAT_EVERY_S:
            beat_s = now_s
            there.report(cluster.names)
        now_bound = {p["metadata"]["name"] for p in pods if p["spec"].get("nodeName")}
        decided = all(p["spec"].get("nodeName") or p["status"].get("conditions") for p in pods)
        if now_bound != bound or not decided or not there.settled:
            bound, quiet_since_s = now_bound, now_s
        time.sleep(POLL_S)


def _outcome(cluster: PlayedCluster, there: ChoiceNodes, nodes: int) -> Outcome:
    pods = cluster.pods()
    pending = [pod for pod in pods if not pod["spec"].get("nodeName")]
    whole_bytes = nodes * SHAPE.gpus * SHAPE.memory_bytes
    sizes = {f"GPU-{n}-{i}": SHAPE.memory_bytes for n in cluster.names for i in range(SHAPE.gpus)}
    on = [(each.device, each.request_bytes) for each in there.started.values()]
    reasons, suggestions = Counter[str](), Counter[str]()
    example: list[str] = []

    def size_of(pod: Mapping[str, Any]) -> int:
        return parse_bytes(pod["metadata"]["annotations"]["headroom.gpu/vram"])

    with httpx.Client(base_url=cluster.debug_url(), timeout=60.0) as console:
        for pod in sorted(pending, key=size_of):
            answer = console.get(f"/v1/explain?pod=e2e/{pod['metadata']['name']}")
            body = answer.raise_for_status().json()
            example = example or why(body)
            reasons[", ".join(reason_lines(body["reasons"]))] += 1
            suggestions.update({each["kind"] for each in body["advice"]} or {"none"})
        steering = console.get("/v1/pending?steering=true").raise_for_status().json()["steering"]
    used_bytes = sum(there.used_bytes(device) for device in sizes)
    return Outcome(
        bound=len(pods) - len(pending),
        waiting=[size_of(pod) for pod in pending],
        used_ratio=used_bytes / whole_bytes,
        free_bytes=whole_bytes - used_bytes,
        overcommitted=len(excess(on, sizes)),
        without_memory=len(there.out_of_memory),
        turned_away=len(there.turned_away),
        reasons=reasons,
        suggestions=suggestions,
        steering=steering["sentence"] if steering else "",
        example=example,
    )


def row(choice: str, outcome: Outcome) -> str:
    cells = [
        choice,
        f"{outcome.bound}",
        f"{len(outcome.waiting)} ({gib(sum(outcome.waiting))})" if outcome.waiting else "0",
        f"{outcome.used_ratio:.1%}",
        gib(outcome.free_bytes),
        f"{outcome.overcommitted}",
        f"{outcome.without_memory}",
        f"{outcome.turned_away}",
    ]
    return f"| {' | '.join(cells)} |"


def explained(outcome: Outcome) -> Iterator[str]:
    """Yield the grouped explanations of the pods that wait."""
    for text, pods in outcome.reasons.most_common():
        yield f"  {pods} pods: {text}"
    kinds = ", ".join(f"{kind} {pods}" for kind, pods in outcome.suggestions.most_common())
    if kinds:
        yield f"  suggestions (pods): {kinds}"
    if outcome.steering:
        yield f"  {outcome.steering}"
    yield from (f"    | {line}" for line in outcome.example)


def main(
    choice: Annotated[list[str] | None, typer.Option(help=f"One of: {', '.join(CHOICES)}.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of 4 GPUs of 24 GiB.")] = 40,
    pods: Annotated[int, typer.Option(min=1)] = 300,
    seed: int = 1,
) -> None:
    """Print one row for each choice, and then why the other pods wait."""
    for each in choice or ():
        if each not in CHOICES:
            raise typer.BadParameter(f"mode {each!r} is not one of: {', '.join(CHOICES)}")
    built("etcd", "kube-apiserver", "kube-scheduler")
    chance = random.Random(seed)
    sizes_gib = [chance.choice(SIZES_GIB) for _ in range(pods)]
    typer.echo(
        f"{machine()}; {pods} pods that request {sum(sizes_gib)} GiB, {nodes} nodes with "
        f"{nodes * SHAPE.gpus} GPUs and {gib(nodes * SHAPE.gpus * SHAPE.memory_bytes)}, seed {seed}"
    )
    found = {}
    for each in choice or CHOICES:
        found[each] = run(each, nodes, sizes_gib, seed)
        typer.echo(row(each, found[each]), err=True)
    typer.echo(
        "| choice | bound | wait | memory used | free | devices overcommitted "
        "| pods without memory | rejected by the kubelet |"
    )
    typer.echo("|---" * 8 + "|")
    for each, outcome in found.items():
        typer.echo(row(each, outcome))
    for each, outcome in found.items():
        if outcome.waiting:
            typer.echo(f"\n{each}, {len(outcome.waiting)} pods wait:")
            typer.echo("\n".join(explained(outcome)))


if __name__ == "__main__":
    typer.run(main)
