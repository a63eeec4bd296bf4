"""Queries one real Prometheus that has two clusters, two replicas, and three ways to combine
labels.

Cluster ``eu`` is ours. Cluster ``us`` is larger and has nodes and pods with the same names. Scrape
configurations honor labels, rename labels, or copy renamed labels back as Headroom's PodMonitor
does. Exporters send impossible values and repeat a shared GPU for each pod. Nodes offer renamed
resources and MIG.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headroom.console.history.ranges import PrometheusRanges, Range
from headroom.console.views import costs
from headroom.planner.prometheus_source import read_prometheus
from headroom.recorder.past_lives import PastLives
from headroom.recorder.prometheus_history import HistoryReader, Source
from headroom.runtime.follow.sm_history import history
from headroom.runtime.follow.sm_queries import query
from headroom.runtime.follow.sm_source import QuerySource, Span
from headroom.runtime.promql import Queries, own_label
from tests.history.server import Prometheus, prometheus
from tests.monitoring.test_real_prometheus import chosen
from tests.monitoring.test_rules import alerts
from tests.processes import starts_processes
from tests.recorder.test_past_lives import running

HOUR_S, EVERY_S, MIB, GIB = 3600, 30, 1 << 20, 1 << 30
DASHBOARD = Path(__file__).parents[2] / "deploy/components/dashboard/headroom.json"
OURS = Queries('cluster="eu"')
Labels = Mapping[str, str]
#: Returns the value of a series a number of seconds ago, or None if there is no sample.
Values = Callable[[float], float | None]


@dataclass(frozen=True)
class Setup:
    """How Prometheus combines the labels of a metric with the labels of its target."""

    target: Labels
    honors: bool = False
    #: Whether renamed labels are copied back, as the PodMonitor's metricRelabelings do.
    copies: bool = False
    #: Time range of the scrapes with this setup, in seconds before now.
    until_s: float = -HOUR_S
    since_s: float = 3 * HOUR_S

    def labels(self, own: Labels) -> dict[str, str]:
        if self.honors:
            return {**self.target, **own}
        renamed = {f"exported_{k}" if k in self.target else k: v for k, v in own.items()}
        back = {k: own[k] for k in ("namespace", "pod", "container") if k in own and self.copies}
        return {**self.target, **renamed, **back}


@dataclass
class Series:
    """Collects samples from three hours ago to one hour in the future, because readers query them
    while the test runs.
    """

    now_s: float
    metrics: dict[str, list[str]] = field(default_factory=dict)

    def add(self, setups: list[Setup], name: str, own: Labels, values: float | Values) -> None:
        for setup in setups:
            labels = setup.labels(own)
            text = ",".join(f'{key}="{each}"' for key, each in sorted(labels.items()) if each)
            for number in range(-3 * HOUR_S // EVERY_S, HOUR_S // EVERY_S):
                at_s = number * EVERY_S
                value = values(-at_s) if callable(values) else values
                if value is not None and setup.until_s <= -at_s <= setup.since_s:
                    line = f"{name}{{{text}}} {value} {self.now_s + at_s:.3f}"
                    self.metrics.setdefault(name, []).append(line)

    def lines(self) -> list[str]:
        return [line for lines in self.metrics.values() for line in lines]


def before(ago_s: float, values: float | Values) -> Values:
    """Return the values of a series that ended this many seconds ago."""
    return lambda s: (values(s) if callable(values) else values) if s > ago_s else None


def odd(value: float, *impossible: float) -> Values:
    """Return the values of a series that has a constant value, and impossible samples in the third
    hour.
    """
    at = {2 * HOUR_S + (i + 1) * 20 * EVERY_S: each for i, each in enumerate(impossible)}
    return lambda s: at.get(round(s), value)


def target(cluster: str, pod: str, node: str = "m", **more: str) -> dict[str, str]:
    found = {"cluster": cluster, "namespace": "monitoring", "pod": pod, "container": "c"}
    return {**found, "node": node, "instance": f"{pod}:80", "job": pod, **more}


def fill(series: Series, cluster: str, times: float) -> None:
    """Add the metrics of a cluster. ``times`` multiplies its values."""
    of_console = target(cluster, "console")
    console = [
        Setup(of_console, honors=True, since_s=HOUR_S),
        Setup({**of_console, "prometheus_replica": "1"}, honors=True, since_s=HOUR_S),
        Setup({**of_console, "job": "plain"}, until_s=HOUR_S),
    ]
    for namespace, state, value in (("ml", "active", 2), ("web", "idle", 1)):
        own = {"namespace": namespace, "state": state}
        series.add(console, "headroom_held_gpus", own, value * times)
        memory = {**own, "state": "used" if state == "active" else "unused"}
        series.add(console, "headroom_held_bytes", memory, value * times * GIB)
    for name in ("allocatable", "reserved", "unconfirmed", "used", "unattributed", "headroom"):
        series.add(console, f"headroom_fleet_{name}_bytes", {}, 10 * times * GIB)
    series.add(console, "headroom_fleet_devices", {}, 4 * times)
    series.add(console, "headroom_pending_pods", {"reason": "memory"}, 3 * times)
    overuse = {"namespace": "ml", "pod": "w0", "node": "n2", "device": "GPU-2"}
    series.add(console, "headroom_pod_overuse_bytes", overuse, times * GIB)
    series.add(console, "headroom_overcommitted_bytes", {"node": "n2", "device": "GPU-2"}, GIB)
    extender = [Setup(target(cluster, "extender")), Setup(target(cluster, "extender", rep="1"))]
    series.add(extender, "headroom_ready", {}, 0 if cluster == "eu" else 1)
    kubernetes(series, cluster)
    exporters(series, cluster, times)
    agents(series, cluster, times)


#: The node and the resource of each pod, and whether the pod ended an hour ago.
PODS = {
    "train-0": ("n1", "nvidia_com_gpu", True),
    "llm-5d4f-a": ("n2", "nvidia_com_gpu_shared", True),
    "w0": ("n2", "nvidia_com_gpu_shared", False),
    "w1": ("n2", "nvidia_com_gpu_shared", False),
    "mig-0": ("n3", "nvidia_com_mig_1g_10gb", False),
}


def kubernetes(series: Series, cluster: str) -> None:
    """Add the series of kube-state-metrics, which our cluster scrapes without honoring labels."""
    of = target(cluster, "ksm", uid="ksm")
    setups = [Setup(of, honors=cluster == "us"), Setup({**of, "prometheus_replica": "1"})]
    for pod, (node, resource, ended) in PODS.items():
        own = {"namespace": "ml", "pod": pod, "uid": f"u-{pod}"}
        until = partial(before, HOUR_S if ended else -HOUR_S)
        main = {**own, "container": "main", "node": node, "resource": resource}
        series.add(setups, "kube_pod_container_resource_requests", main, until(1))
        series.add(setups, "kube_pod_created", own, until(series.now_s - 3 * HOUR_S))
        kind, name = ("ReplicaSet", "llm-5d4f") if pod.startswith("llm") else ("Job", pod)
        owner = {**own, "owner_kind": kind, "owner_name": name}
        series.add(setups, "kube_pod_owner", owner, until(1))
    other = {"namespace": "ml", "pod": "web-0", "uid": "u-web", "owner_kind": "Job"}
    series.add(setups, "kube_pod_owner", other, 1)
    allocatable = {
        "n1": {"nvidia_com_gpu": 1},
        "n2": {"nvidia_com_gpu": 0, "nvidia_com_gpu_shared": 4},
        "n3": {"nvidia_com_mig_1g_10gb": 2},
    }
    for node, amounts in allocatable.items():
        for resource, amount in {**amounts, "cpu": 64}.items():
            own = {"node": node, "resource": resource}
            series.add(setups, "kube_node_status_allocatable", own, amount)


def exporters(series: Series, cluster: str, times: float) -> None:
    """Add the series of dcgm-exporter, with the scrape configuration of the GPU Operator."""

    def gpu(
        node: str, labels: Labels, used: float | Values, free: float, sm: float | Values
    ) -> None:
        setups = [Setup(target(cluster, f"dcgm-{node}", node))]
        series.add(setups, "DCGM_FI_DEV_FB_USED", labels, used)
        series.add(setups, "DCGM_FI_DEV_FB_FREE", labels, free)
        series.add(setups, "DCGM_FI_PROF_SM_ACTIVE", labels, sm)

    def at(pod: str) -> dict[str, str]:
        return {"namespace": "ml", "pod": pod, "container": "main"}

    one = {"gpu": "0", "UUID": f"GPU-1-{cluster}", "modelName": "L40S", "Hostname": "n1"}
    used = odd(6000 * times, 1e9, 50_000_000, 47_000, -5, float("nan"), 140737488355330)
    sm = before(HOUR_S, odd(0.25, 1372, float("nan"), -1, float("inf")))
    gpu("n1", {**one, **at("train-0")}, before(HOUR_S, used), 40_068, sm)
    percent = before(HOUR_S, odd(50, 200_000))
    setups = [Setup(target(cluster, "dcgm-n1", "n1"))]
    series.add(setups, "DCGM_FI_DEV_GPU_UTIL", {**one, **at("train-0")}, percent)
    gpu("n1", one, lambda s: 1.0 if s <= HOUR_S else None, 46_067, lambda s: 0.02)
    two = {"gpu": "0", "uuid": f"GPU-2-{cluster}", "modelName": "L40S", "hostname": "n2"}
    for number, pod in enumerate(("w0", "w1")):
        gpu("n2", {**two, **at(pod), "vgpu": str(number)}, 20_000, 26_068, 0.4 * min(times, 2))
    for instance, pod in (("1", "mig-0"), ("2", "")):
        three = {"gpu": "0", "UUID": f"GPU-3-{cluster}", "modelName": "H100", "Hostname": "n3"}
        three |= {"GPU_I_ID": instance, "GPU_I_PROFILE": "1g.10gb", **(at(pod) if pod else {})}
        gpu("n3", three, 5000, 4728, 0.5)


def agents(series: Series, cluster: str, times: float) -> None:
    """Add the series of Headroom's agents on n2 and n3. The agent on n3 also reports pods of n2."""
    own = {"gpu": "0", "UUID": f"GPU-2-{cluster}", "Hostname": "n2", "model_name": "L40S"}
    main = {**own, "namespace": "ml", "pod": "w0", "container": "main", "pod_uid": "u-w0"}
    side = {**main, "container": "side"}
    past = {**main, "pod": "llm-5d4f-a", "pod_uid": "u-llm"}
    for node in ("n2", "n3"):
        of = target(cluster, f"agent-{node}", node)
        setups = [
            Setup(of, copies=True),
            Setup({**of, "prometheus_replica": "1"}, copies=True),
            Setup({**of, "job": "plain"}, honors=True),
        ]
        factor = times if node == "n2" else 8.0
        series.add(setups, "headroom_pod_used_bytes", main, 2 * factor * GIB)
        series.add(setups, "headroom_pod_sm_activity_ratio", main, 0.125 if node == "n2" else 1.0)
        if node == "n2":
            series.add(setups, "headroom_pod_used_bytes", side, GIB)
            series.add(setups, "headroom_device_memory_bytes", own, 48 * GIB)
            series.add(setups, "headroom_device_used_bytes", own, 3 * GIB)
        peak = before(HOUR_S, odd(8 * factor * GIB / 2, 1e15, 60 * GIB))
        series.add(setups, "headroom_pod_peak_bytes", past, peak)


@dataclass
class FilledPrometheus:
    real: Prometheus
    now_s: float

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.real.port}"

    def ask(self, promql: str) -> list[dict[str, Any]]:
        found = self.real.ask("query", query=promql, time=f"{self.now_s:.3f}")
        return list(found["result"])


@pytest.fixture(scope="module")
@starts_processes
def world() -> Iterator[FilledPrometheus]:
    series = Series(time.time())
    fill(series, "eu", 1.0)
    fill(series, "us", 15.0)
    with prometheus() as real:
        real.scrape([])
        real.remember(series.lines(), longest_block="54h")
        real.run()
        yield FilledPrometheus(real, series.now_s)


def test_costs_count_only_this_cluster(world: FilledPrometheus) -> None:
    within = Range(world.now_s - 2 * HOUR_S, world.now_s)
    covered_s, held = costs._read(PrometheusRanges(world.url, queries=OURS), within)
    assert covered_s == pytest.approx(2 * HOUR_S, abs=60)
    assert {name: round(each.gpus / covered_s, 2) for name, each in held.items()} == {
        "ml": 2.0,
        "web": 1.0,
    }
    assert held["ml"].used_bytes / covered_s == pytest.approx(2 * GIB, rel=0.01)


def last(values: list[float | None]) -> float | None:
    return [each for each in values if each is not None][-1]


def test_the_history_has_only_this_cluster(world: FilledPrometheus) -> None:
    ranges = PrometheusRanges(world.url, queries=OURS)
    within = Range(world.now_s - 2 * HOUR_S, world.now_s)
    fleet = {each.kind: last(each.values) for each in ranges.read(OURS.fleet(), within)}
    assert (fleet["allocatable"], fleet["reserved"]) == (10 * GIB, 20 * GIB)
    assert (fleet["overcommitted_devices"], fleet["pending_pods"]) == (1, 3)
    (pod,) = ranges.read([OURS.pod("ml", "w0")], within)
    names = {name: pod.labels[name] for name in ("namespace", "pod", "pod_uid", "UUID")}
    assert names == {"namespace": "ml", "pod": "w0", "pod_uid": "u-w0", "UUID": "GPU-2-eu"}
    of_device = ranges.read(OURS.device("n2", "GPU-2-eu"), within)
    used = [(each.kind, each.labels.get("pod"), last(each.values)) for each in of_device]
    assert used == [("used", None, 3 * GIB), ("pod", "w0", 3 * GIB)]


def test_a_plan_has_the_pods_and_gpus_of_this_cluster(world: FilledPrometheus) -> None:
    found = read_prometheus(world.url, 1, {}, world.now_s, OURS)
    machines = {each.name: (each.gpus, each.memory_bytes // MIB) for each in found.machines}
    assert machines == {"n1": (1, 46_068), "n2": (1, 46_068), "n3": (1, 2 * 9728)}
    lives = {each.name.removeprefix("ml/"): each for each in found.lives}
    assert lives.keys() == PODS.keys()
    train = lives["train-0"]
    assert train.peak_bytes == 6000 * MIB
    assert train.sm_ratio == pytest.approx(0.25)
    assert train.utilization_ratio == pytest.approx(0.5)
    assert train.run_s == pytest.approx(2 * HOUR_S, abs=120)
    assert (lives["w0"].peak_bytes, lives["w0"].sm_ratio) == (2 * GIB, 0.125)
    assert (lives["w1"].peak_bytes, lives["w1"].sm_ratio) == (None, None)
    mig = lives["mig-0"]
    assert (mig.peak_bytes, mig.request_bytes) == (5000 * MIB, 10 * GIB)


def test_only_pods_that_request_gpus_are_queried(world: FilledPrometheus) -> None:
    owners = {own_label(each["metric"], "pod") for each in world.ask(OURS.lives["owner"])}
    assert owners == PODS.keys()


def test_the_recorder_reads_the_runs_of_this_cluster(world: FilledPrometheus) -> None:
    past = PastLives()
    source = Source(world.url, 20.0, queries=OURS)
    reader = HistoryReader(source, past, lambda: True, lambda: world.now_s, time.monotonic)
    asyncio.run(reader.check())
    assert reader.due_s is None
    owned = running()
    pod = replace(owned.tracked.pod, namespace="ml")
    owned = replace(owned, tracked=replace(owned.tracked, pod=pod))
    (life,) = past.claim([owned], lambda _: True)
    assert life.tracked.life.peak_bytes == 4 * GIB
    assert len(past) == 1  # train-0


def test_sm_activity_is_read_only_from_this_cluster(world: FilledPrometheus) -> None:
    span = Span(0.95, 900.0)
    source = QuerySource(world.url, span, 60.0, 10.0, 180.0, queries=OURS)
    answers, _ = query(source)
    found = history(answers, {}, span, 0.0, time.time(), 600.0)
    ratios = {key: each.ratio for key, each in found.items()}
    assert ratios == {
        ("GPU-1-eu", None): 0.02,
        ("GPU-2-eu", None): 0.4,
        ("GPU-3-eu", 1): 0.5,
        ("GPU-3-eu", 2): 0.5,
    }


def test_alerts_contain_the_cluster_and_the_pod(world: FilledPrometheus) -> None:
    def raised(alert: str) -> list[dict[str, str]]:
        found = (each["metric"] for each in world.ask(str(alerts()[alert]["expr"])))
        return sorted(found, key=lambda each: each["cluster"])

    assert raised("HeadroomDown") == [{"cluster": "eu"}]
    pod = {"namespace": "ml", "pod": "w0", "node": "n2", "device": "GPU-2"}
    assert raised("HeadroomPodOveruse") == [{"cluster": each, **pod} for each in ("eu", "us")]
    device = {"node": "n2", "device": "GPU-2"}
    assert raised("HeadroomOvercommitted") == [{"cluster": e, **device} for e in ("eu", "us")]


@pytest.mark.parametrize(
    ("cluster", "allocatable", "pods"), [("eu", 10, 1), ("us", 150, 1), (".*", 160, 2)]
)
def test_the_dashboard_shows_only_the_selected_clusters(
    world: FilledPrometheus, cluster: str, allocatable: int, pods: int
) -> None:
    panels = {each["title"]: each for each in json.loads(DASHBOARD.read_text())["panels"]}

    def shown(title: str) -> list[dict[str, Any]]:
        return world.ask(chosen(panels[title]["targets"][0]["expr"], cluster=cluster))

    (total,) = shown("Allocatable")
    assert float(total["value"][1]) == allocatable * GIB
    overusing = shown("Pods that use more than they requested")
    assert {(e["metric"]["namespace"], e["metric"]["pod"]) for e in overusing} == {("ml", "w0")}
    assert len(overusing) == pods
    names = [
        (e["metric"]["namespace"], e["metric"]["pod"])
        for e in shown("Pods with the most memory in use")
    ]
    assert names == [("ml", "w0")] * pods


@pytest.mark.parametrize(
    ("values", "overcommitted", "pods", "teams"),
    [
        ({}, True, {"w0"}, {"ml"}),
        ({"namespace": "ml"}, True, {"w0"}, {"ml"}),
        ({"namespace": "(ml|web)", "node": "n2"}, True, {"w0"}, {"ml"}),
        ({"namespace": "web"}, True, set(), set()),
        ({"node": "n3"}, False, set(), {"ml"}),
        ({"model": "L40S"}, True, {"w0"}, {"ml"}),
        ({"model": "H100"}, False, set(), {"ml"}),
    ],
    ids=str,
)
def test_the_dashboard_shows_only_the_selected_namespaces_nodes_and_models(
    world: FilledPrometheus,
    values: dict[str, str],
    overcommitted: bool,
    pods: set[str],
    teams: set[str],
) -> None:
    found = json.loads(DASHBOARD.read_text())["panels"]
    panels = {(each["title"], each["type"]): each for each in found}

    def shown(title: str, kind: str, label: str) -> set[str]:
        expr = panels[title, kind]["targets"][0]["expr"]
        return {each["metric"][label] for each in world.ask(chosen(expr, **values))}

    assert shown("Pods that use more than they requested", "table", "pod") == pods
    assert shown("Pods with the most memory in use", "table", "pod") == pods
    assert bool(shown("Overcommitted devices", "table", "device")) == overcommitted
    assert shown("Teams", "table", "namespace") == teams  # with active GPUs
