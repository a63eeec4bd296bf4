"""Tests all components on nodes with real kubelets, plugins and agents.

Only the driver and the container runtime are simulated. The referee compares the users' requests
with the plugin's allocations and the driver's memory. It does not read Headroom's data.
"""

import os
import random
import statistics
import time
from collections.abc import Iterator

import pytest

from tests.controlplane import ControlPlane
from tests.driver import GIB
from tests.e2e.cluster import GPUNODES, PODS
from tests.e2e.cluster import NODES as NODES_PATH
from tests.e2e.conftest import Tell
from tests.e2e.real import Outcome, RealCluster, is_refused
from tests.e2e.watching import Object, Watch

#: Number of nodes. ``make real`` measures with twenty nodes.
NODES = int(os.environ.get("TEST_REAL_NODES", "3"))
#: Number of times that a pod waits for memory on each node.
ROUNDS = int(os.environ.get("TEST_REAL_ROUNDS", "1"))
MIXED_GIB = (2, 3, 4, 6, 8, 12)
STRANGER_PID = 99_999
RESULTS = ("hit", "shifted", "miss", "unseen")
WINDOW = "headroom_prediction_window_seconds_sum"


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane, binaries: None) -> Iterator[RealCluster]:
    """A cluster that all tests in this file share. Its nodes have two 24 GiB GPUs each, and four
    pods can share a GPU.
    """
    real = RealCluster(plane, NODES, gpus=2, replicas=4)
    try:
        real.create()
        real.bring_up()
        yield real
    finally:
        real.close()


@pytest.fixture(autouse=True)
def _empty(cluster: RealCluster) -> Iterator[None]:
    """Empty the nodes after each test, even if it fails."""
    yield
    for machine in cluster.machines.values():
        machine.driver.use(STRANGER_PID, {})
    cluster.empty()


def test_a_burst_of_more_pods_than_replicas_overcommits_no_device(
    cluster: RealCluster, tell: Tell
) -> None:
    chance = random.Random(7)
    before = {result: predictions(cluster, result) for result in RESULTS}
    window_before_s = cluster.metric(WINDOW)
    for i in range(10 * NODES):
        cluster.ask(f"p{i}", chance.choice(MIXED_GIB))
    cluster.until(lambda: cluster.outcome().undecided == 0, "every pod is bound or rejected")
    cluster.until(cluster.decided, "bound pods run, or were rejected by the kubelet")
    # kube-scheduler retries a pod at every change of a bound pod, after a back-off of at most ten
    # seconds. Kubelets still report their pods.
    with Watch(cluster.plane, PODS) as pods:
        cluster.until(lambda: pods.quiet_s() > 12, "nothing changes any more")
    with Watch(cluster.plane, NODES_PATH) as nodes:
        calls_before = filter_calls(cluster)
        time.sleep(10.0)
        calls = filter_calls(cluster) - calls_before
    outcome = cluster.outcome()
    tell(f"{shown(outcome)}; {calls:.0f} filter calls in 10 s or more without a change of a pod")
    assert_no_memory_is_used_twice(outcome)
    assert outcome.bound > 2 * NODES
    assert outcome.rejected > 0
    # kube-scheduler tries a pod again only after an event. The last change of a pod may still cause
    # an attempt, and each node status that a kubelet writes may cause another.
    assert calls <= outcome.rejected * (1 + len(nodes.changes))
    # No unpredictable event occurred between binding and admission.

    def seen(*results: str) -> float:
        return sum(predictions(cluster, result) - before[result] for result in results)

    cluster.until(lambda: seen("hit", "shifted") == outcome.bound, "all are seen")
    assert seen("miss", "unseen") == 0
    seconds = (cluster.metric(WINDOW) - window_before_s) / outcome.bound
    tell(
        f"predictions: {seen('hit'):.0f} hit, {seen('shifted'):.0f} shifted; "
        f"from the reservation to the report {seconds:.2f} s on average"
    )


def test_an_extender_killed_in_a_second_wave_keeps_each_reservation_once(
    cluster: RealCluster, tell: Tell
) -> None:
    # The running pods still hold their memory when the new pods arrive.
    for i in range(2 * NODES):
        cluster.ask(f"p{i}", 8)
    cluster.until(lambda: len(cluster.bound()) == 2 * NODES, "the first wave is bound")
    cluster.until(cluster.decided, "it runs")
    cluster.delete_all()
    wave = [f"q{i}" for i in range(3 * NODES)]
    for name in wave[: 2 * NODES]:
        cluster.ask(name, 2)
    cluster.until(lambda: len(of_wave(cluster, wave)) >= NODES // 2, "the second wave is under way")
    cluster.kill("extender")
    at_kill = len(of_wave(cluster, wave))
    for name in wave[2 * NODES :]:
        cluster.ask(name, 2)
    cluster.start_extender()
    cluster.until(lambda: len(of_wave(cluster, wave)) == len(wave), "all are bound, as all fit")
    cluster.until(cluster.decided, "they run, or were rejected by the kubelet")
    outcome = cluster.outcome()
    tell(f"{shown(outcome)}; extender killed when {at_kill} were bound")
    assert_no_memory_is_used_twice(outcome)


def requeued(cluster: RealCluster) -> tuple[list[float], list[float]]:
    """Return, for each node, the seconds from the report of free memory to the binding, and from
    the end of the process to the binding. The process is unattributed, so only the report shows its
    end.
    """
    cluster.empty()
    for machine in cluster.machines.values():
        machine.driver.use(STRANGER_PID, {gpu.uuid: 23 * GIB for gpu in machine.driver.gpus})
    cluster.until(
        lambda: not any(map(is_free, cluster.plane.call("GET", GPUNODES)["items"])),
        "all memory is reported to be in use",
    )
    with Watch(cluster.plane, GPUNODES) as reports, Watch(cluster.plane, PODS) as pods:
        for name in cluster.names:
            cluster.ask(f"on-{name}", 8, nodeSelector={"kubernetes.io/hostname": name})
        cluster.until(lambda: all(map(is_refused, cluster.pods())), "all pods are rejected")
        freed_s = {}
        for name, machine in cluster.machines.items():
            time.sleep(0.3)  # The end of each process gets its own report.
            freed_s[name] = time.monotonic()
            machine.driver.use(STRANGER_PID, {})

        def waits_s() -> list[float]:
            """Return the durations for each pod whose report and binding were both observed."""
            free = (reports.first(name, is_free, freed_s[name]) for name in cluster.names)
            bound = (pods.first(f"on-{name}", is_bound) for name in cluster.names)
            return [to - since for since, to in zip(free, bound, strict=True) if since and to]

        cluster.until(lambda: len(waits_s()) == NODES, "all pods are bound")
        # The agent must first take a sample, which it does every second in this test.
        exits = [
            bound - freed_s[name]
            for name in cluster.names
            if (bound := pods.first(f"on-{name}", is_bound)) is not None
        ]
        return waits_s(), exits


def test_an_unschedulable_pod_is_bound_soon_after_a_report_of_free_memory(
    cluster: RealCluster, tell: Tell
) -> None:
    found_s: list[float] = []
    exits: list[float] = []
    for _ in range(ROUNDS):
        for all_s, more_s in zip((found_s, exits), requeued(cluster), strict=True):
            all_s += more_s
        assert_no_memory_is_used_twice(cluster.outcome())
    tell(
        f"from the exit of the process to the binding: {percentiles(exits)}, of which up to 1 s is "
        "the agent's interval"
    )
    # Without Headroom, kube-scheduler would retry the pods only after 5 minutes.
    tell(f"from the report to the binding: {percentiles(found_s)}")


def percentiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    p50_s, p99_s = statistics.median(ordered), ordered[-(-99 * len(ordered) // 100) - 1]
    return f"p50 {p50_s:.2f} s, p99 {p99_s:.2f} s, most {ordered[-1]:.2f} s of {len(ordered)}"


def of_wave(cluster: RealCluster, wave: list[str]) -> list[Object]:
    return [pod for pod in cluster.bound() if pod["metadata"]["name"] in wave]


def is_free(gpunode: Object) -> bool:
    """Return whether the report shows an unused device."""
    return any(device["used"] == 0 for device in gpunode["status"]["devices"])


def is_bound(pod: Object) -> bool:
    return bool(pod["spec"].get("nodeName"))


def filter_calls(cluster: RealCluster) -> float:
    return cluster.metric('headroom_verb_duration_seconds_count{verb="filter"}')


def predictions(cluster: RealCluster, result: str) -> float:
    return cluster.metric(f'headroom_predictions_total{{result="{result}"}}')


def shown(outcome: Outcome) -> str:
    return (
        f"{outcome.pods} pods: {outcome.bound} bound ({outcome.asked_ratio:.0%} of the memory), "
        f"{outcome.rejected} rejected, {outcome.turned_away} rejected by kubelets; "
        f"devices overcommitted: {outcome.overcommitted}"
    )


def assert_no_memory_is_used_twice(outcome: Outcome) -> None:
    assert outcome.overcommitted == outcome.overdrawn == outcome.turned_away == 0
    assert outcome.asked_ratio > 0
