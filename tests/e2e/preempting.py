"""Plays preemption scenarios on a real control plane and records the results. The simulated
kubelets take time to end pods.

A scenario defines the device of each batch pod, and the test binds the batch pods, so that each run
starts in the same state. Evicted pods keep their memory until the end of their grace period. The
agent reports the free memory shortly after the pod is deleted.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headroom.contract.annotations import MIRROR
from tests.controlplane import ApiRefused, ControlPlane
from tests.e2e.cluster import NAMESPACE, PODS, PlayedCluster, pod_manifest
from tests.e2e.nodes import GIB, RESOURCE, Shape
from tests.threads import Repeated

CLASSES = {"batch": 0, "middle": 500, "prod": 1000}
BUDGETS = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets"
HOSTNAME = "kubernetes.io/hostname"
#: Seconds from the end of a pod until a sample shows that its memory is free.
SAMPLED_S = 0.2


@dataclass(frozen=True, slots=True)
class Batch:
    """A pod that runs on device ``index`` of a node."""

    name: str
    node: str
    index: int
    gib: int
    kind: str = "batch"
    app: str = ""


@dataclass(slots=True)
class Outcome:
    #: Names of the evicted pods in the order of their eviction.
    evicted: list[str] = field(default_factory=list)
    #: The node of each bound pod. ``took_s`` has the seconds between a pod's creation and its
    #: binding.
    bound: dict[str, str] = field(default_factory=dict)
    took_s: dict[str, float] = field(default_factory=dict)
    filter_calls: int = 0
    #: Number of pods that were evicted from nodes to which no preemptor was bound.
    in_vain: int = 0

    def describe(self) -> str:
        took_s = [round(each, 1) for each in self.took_s.values()]
        return f"evicted {self.evicted}, bound after {took_s} s, {self.filter_calls} filter calls"


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    running: Sequence[Batch]
    #: Size of each newcomer. The newcomers are named new-0, new-1 and so on, and all have the same
    #: priority.
    newcomers: Sequence[int]
    nodes: Sequence[str] = ("gpu-1",)
    #: Number of newcomers that can be bound.
    placed: int = 1
    #: The acceptable sets of evicted pods.
    victims: Sequence[set[str]] = ()
    mirrored: bool = False
    #: Labels of pods that a disruption budget protects from every eviction.
    guarded: Sequence[str] = ()
    grace_s: float = 0.5
    #: Whether the tests run the scenario. Otherwise, only the benchmarks run it.
    tested: bool = True


TWO_LARGE = (Batch("a", "gpu-1", 0, 20), Batch("b", "gpu-1", 1, 20, "middle"))
FULL_OF_SMALL = tuple(Batch(f"s{i}", "gpu-1", i % 2, 1) for i in range(8))
FULL_OF_LARGE = tuple(
    Batch(f"d{d}-{i}", "gpu-1", d, 6, "middle" if d else "batch") for d in (0, 1) for i in range(4)
)
FULL_OF_MIDDLE = tuple(
    Batch(f"m{d}-{i}", "gpu-1", d, 6, "middle") for d in (0, 1) for i in range(4)
)
SCENARIOS = (
    Scenario("memory alone is short", TWO_LARGE, [20], victims=[{"a"}], tested=False),
    Scenario("the same, mirrored", TWO_LARGE, [20], victims=[{"a"}], mirrored=True),
    Scenario("replicas are short", FULL_OF_SMALL, [4], victims=[{f"s{i}"} for i in range(8)]),
    Scenario(
        "replicas and memory are short",
        FULL_OF_LARGE,
        [12],
        victims=[{f"d0-{i}", f"d0-{j}"} for i in range(4) for j in range(i)],
    ),
    Scenario(
        "enough memory, on no device, mirrored",
        (Batch("a", "gpu-1", 0, 14), Batch("b", "gpu-1", 1, 14, "middle")),
        [16],
        victims=[{"a"}],
        mirrored=True,
    ),
    Scenario(
        "better on the node that is not offered",
        [*FULL_OF_MIDDLE, Batch("x", "gpu-2", 0, 20), Batch("y", "gpu-2", 1, 20)],
        [20],
        ("gpu-1", "gpu-2"),
        victims=[{"x"}, {"y"}],
    ),
    Scenario(
        "a disruption budget guards the cheapest",
        TWO_LARGE,
        [20],
        victims=[{"b"}],
        guarded=["a"],
    ),
    Scenario(
        "they take their time to end", TWO_LARGE, [20], victims=[{"a"}], grace_s=3.0, tested=False
    ),
    Scenario(
        "two want the one place that there is",
        (Batch("a", "gpu-1", 0, 20), Batch("b", "gpu-1", 1, 20, "prod")),
        [20, 20],
        victims=[{"a"}],
        grace_s=1.0,
    ),
    Scenario(
        "two want the one place, mirrored",
        (Batch("a", "gpu-1", 0, 20), Batch("b", "gpu-1", 1, 20, "prod")),
        [20, 20],
        victims=[{"a"}],
        mirrored=True,
        grace_s=1.0,
        tested=False,
    ),
    Scenario(
        "no eviction would help",
        [
            Batch("a", "gpu-1", 0, 4),
            Batch("b", "gpu-1", 1, 20, "prod"),
            Batch("c", "gpu-1", 0, 18, "prod"),
        ],
        [20],
        placed=0,
        victims=[set()],
    ),
)


class Kubelets(Repeated):
    """Acts as the kubelets, and ends each deleted pod after ``grace_s``."""

    def __init__(self, cluster: PlayedCluster, grace_s: float, reports: bool) -> None:
        super().__init__(first_s=0.05)
        self._cluster = cluster
        self._reports = reports
        self._grace_s = grace_s
        #: The end time and the node of each terminating pod, by pod name.
        self.leaving: dict[str, tuple[float, str]] = {}
        self.bound_at_s: dict[str, float] = {}
        self._ended: set[str] = set()

    def __enter__(self) -> "Kubelets":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        assert self.failure is None, self.failure

    def step(self) -> float:
        pods = self._cluster.pods()
        now_s, ended = time.monotonic(), list[str]()
        for pod in pods:
            name, node = pod["metadata"]["name"], pod["spec"].get("nodeName", "")
            if node:
                self.bound_at_s.setdefault(name, now_s)
            if not (node and pod["metadata"].get("deletionTimestamp")) or name in self._ended:
                continue
            since_s, _ = self.leaving.setdefault(name, (now_s, node))
            if now_s >= since_s + self._grace_s:
                ended.append(name)
        for name in ended:
            self._ended.add(name)
            try:
                self._cluster.delete_pod(name)
            except ApiRefused as err:
                if ": 404 " not in str(err):
                    raise
        if ended and self._reports:
            time.sleep(SAMPLED_S)
            left = self._cluster.nodes.take_back(
                {p["metadata"]["uid"] for p in pods if p["metadata"]["name"] not in ended}
            )
            self._cluster.nodes.report(sorted(left))
        return 0.05


@contextmanager
def stage_of(
    plane: ControlPlane, settings: Mapping[str, Any], gates: Sequence[str] = ()
) -> Iterator["Stage"]:
    """Start a cluster of two nodes with two shared 24 GiB GPUs each, an extender and the newest
    kube-scheduler.
    """
    cluster = PlayedCluster(plane, 2, Shape(gpus=2, replicas=4))
    try:
        cluster.create()
        stage = Stage(cluster)
        stage.create_classes()
        url = cluster.start_extender(settings={"nomination_hold_s": 20, **settings})
        cluster.start_scheduler(url, gates=gates)
        cluster.settle()
        yield stage
    finally:
        cluster.close()


def assert_right(scenario: Scenario, outcome: Outcome) -> None:
    """Check that only the necessary pods were evicted, that every pod that can be bound was bound,
    and that kube-scheduler made no useless retries.
    """
    assert set(outcome.evicted) in scenario.victims
    assert outcome.in_vain == 0
    assert len(outcome.took_s) == scenario.placed
    # Each attempt takes one call, or two calls if kube-scheduler tries the nominated node first.
    # During a long wait, kube-scheduler retries a pod every 10 s.
    most = 15 + 2 * max(outcome.took_s.values(), default=0.0) / 10.0
    assert outcome.filter_calls < most * len(scenario.newcomers)
    assert all(took_s >= scenario.grace_s for took_s in outcome.took_s.values())


class Stage:
    """A cluster that runs scenarios one after another."""

    def __init__(self, cluster: PlayedCluster, has_extender: bool = True) -> None:
        self.cluster = cluster
        self.has_extender = has_extender

    def create_classes(self) -> None:
        for name, value in CLASSES.items():
            body = {"metadata": {"name": name}, "value": value}
            self.cluster._unless(409, "POST", "/apis/scheduling.k8s.io/v1/priorityclasses", body)

    def mirror(self, nodes: Sequence[str], mirrored: bool) -> None:
        """Publish the sum of each node's GPU memory as an extended resource, or remove the
        resource.
        """
        shape = self.cluster.nodes.shape
        amount = str(shape.gpus * shape.memory_bytes >> 20) if mirrored else None
        status = {"capacity": {MIRROR: amount}, "allocatable": {MIRROR: amount}}
        for node in nodes:
            path = f"/api/v1/nodes/{node}/status"
            self.cluster.plane.call("PATCH", path, {"status": status})

    def run_batch(self, pods: Sequence[Batch], mirrored: bool = False) -> None:
        """Bind the pods and run them on their devices, with reservations and agent reports."""
        cluster = self.cluster
        for batch in pods:
            manifest = manifest_of(batch.name, batch.gib, batch.kind, mirrored=mirrored)
            manifest["spec"]["nodeName"] = batch.node
            manifest["metadata"]["labels"] = {"app": batch.app or batch.name}
            made = cluster.plane.call("POST", PODS, manifest)
            started = {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}
            path = f"{PODS}/{batch.name}/status"
            cluster.plane.call("PATCH", path, {"status": started})
            cluster.nodes.give(made, batch.index, batch.gib * GIB)
        if not self.has_extender:
            return
        nodes = sorted({batch.node for batch in pods})
        cluster.nodes.report(nodes)
        uids = {pod["metadata"]["uid"] for pod in cluster.pods()}

        def charged() -> bool:
            there = {uid for node in nodes for uid in cluster.gpunode(node).spec.reservations}
            return uids <= there

        cluster.until(charged, "all batch pods are charged")

    def submit(
        self, name: str, gib: int, nodes: Sequence[str], kind: str = "prod", mirrored: bool = False
    ) -> None:
        manifest = manifest_of(name, gib, kind, mirrored=mirrored)
        terms = [{"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": [*nodes]}]}]
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        manifest["spec"]["affinity"] = {"nodeAffinity": required}
        self.cluster.plane.call("POST", PODS, manifest)

    def guard(self, apps: Sequence[str]) -> None:
        """Create a disruption budget that allows no disruption. Write its status too, because no
        controller runs.
        """
        for app in apps:
            selector = {"matchLabels": {"app": app}}
            body = {"metadata": {"name": app}, "spec": {"minAvailable": 1, "selector": selector}}
            self.cluster.plane.call("POST", BUDGETS, body)
            status = {"disruptionsAllowed": 0, "expectedPods": 1, "currentHealthy": 1}
            status |= {"desiredHealthy": 1, "observedGeneration": 1}
            path = f"{BUDGETS}/{app}/status"
            self.cluster.plane.call("PATCH", path, {"status": status})

    def run(self, scenario: Scenario, rest_s: float = 2.0) -> Outcome:
        """Play the scenario until the expected newcomers are bound. If other newcomers do not fit,
        observe for another ``rest_s``.
        """
        with self._submitted(scenario) as (outcome, placed):
            enough = f"{scenario.placed} newcomers are bound"
            self.cluster.until(lambda: placed() >= scenario.placed, enough)
            if scenario.placed < len(scenario.newcomers):
                time.sleep(rest_s)
        return outcome

    def run_patiently(self, scenario: Scenario, patience_s: float) -> Outcome:
        """Play the scenario for a fixed time."""
        with self._submitted(scenario) as (outcome, placed):
            deadline_s = time.monotonic() + patience_s
            while placed() < len(scenario.newcomers) and time.monotonic() < deadline_s:
                time.sleep(0.05)
        return outcome

    @contextmanager
    def _submitted(self, scenario: Scenario) -> Iterator[tuple[Outcome, Callable[[], int]]]:
        """Create the newcomers of the scenario. Yield the outcome and a function that counts the
        bound newcomers.
        """
        self.mirror(scenario.nodes, scenario.mirrored)
        self.guard(scenario.guarded)
        self.run_batch(scenario.running, scenario.mirrored)
        names = [f"new-{i}" for i in range(len(scenario.newcomers))]
        with self.played(scenario.grace_s) as outcome:
            began_s = time.monotonic()
            for name, gib in zip(names, scenario.newcomers, strict=True):
                self.submit(name, gib, scenario.nodes, mirrored=scenario.mirrored)

            def placed() -> int:
                for name in names:
                    if name not in outcome.took_s and self.cluster.node_of(name):
                        outcome.took_s[name] = time.monotonic() - began_s
                return len(outcome.took_s)

            yield outcome, placed

    def clear(self) -> None:
        """Delete all pods and reservations."""
        cluster = self.cluster
        cluster.plane.call("DELETE", BUDGETS)
        for pod in cluster.pods():
            try:
                cluster.delete_pod(pod["metadata"]["name"])
            except ApiRefused as err:
                if ": 404 " not in str(err):
                    raise
        cluster.nodes.take_back(set())
        cluster.until(lambda: not cluster.pods(), "no pod is left")
        if not self.has_extender:
            return
        cluster.nodes.report(cluster.names)

        def empty() -> bool:
            cluster.nodes.beat(cluster.names)
            return not any(cluster.gpunode(n).spec.reservations for n in cluster.names)

        cluster.until(empty, "nothing is reserved any more")

    def filter_calls(self) -> int:
        if not self.has_extender:
            return 0
        return int(self.cluster.metric('headroom_verb_duration_seconds_count{verb="filter"}'))

    @contextmanager
    def played(self, grace_s: float) -> Iterator[Outcome]:
        """Yield the outcome while kubelets end deleted pods after ``grace_s``."""
        outcome, calls = Outcome(), self.filter_calls()
        with Kubelets(self.cluster, grace_s, self.has_extender) as kubelets:
            yield outcome
        outcome.filter_calls = self.filter_calls() - calls
        outcome.evicted = list(kubelets.leaving)
        created = {p["metadata"]["name"]: p for p in self.cluster.pods()}
        for name, pod in created.items():
            if pod["spec"].get("nodeName"):
                outcome.bound[name] = pod["spec"]["nodeName"]
        nodes = {outcome.bound[name] for name in outcome.bound if name.startswith("new")}
        outcome.in_vain = sum(node not in nodes for _, node in kubelets.leaving.values())


def manifest_of(name: str, gib: int, kind: str, mirrored: bool) -> dict[str, Any]:
    manifest = pod_manifest(f"{gib}Gi")
    manifest["metadata"]["name"] = name
    spec = manifest["spec"]
    spec |= {"priorityClassName": kind, "terminationGracePeriodSeconds": 60}
    if mirrored:
        spec["containers"][0]["resources"]["limits"] |= {MIRROR: str(gib * 1024), RESOURCE: "1"}
    return manifest
