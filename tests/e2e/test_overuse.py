"""Runs pods that leak GPU memory next to other pods, on a real API server with two extenders.

Each node is a separate run, and its sizes, use, priorities, budgets and order come from a seed. The
test acts as the agents, so the other pods never use more than their reservations.
"""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.e2e.cluster import PODS, PlayedCluster
from tests.e2e.conftest import NewCluster, Tell
from tests.e2e.nodes import GIB, Shape
from tests.e2e.test_evictions import (
    BUDGETS,
    HOSTNAME,
    REPLICAS,
    deleted,
    granted,
    run,
    told_of,
    uid_of,
)
from tests.reverse_proxy import round_robin

MIB = 1 << 20
SEED = 28
NODES = 12
ONE_GPU = Shape(gpus=1)
#: Seconds between two samples of an agent. Leaks grow with each sample and not with time.
INTERVAL_S = 0.2
SETTINGS = {"on_overuse": "evict", "overuse_grace_s": 1}
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"


@dataclass
class Leak:
    """A node with one pod that leaks and three pods that do not leak."""

    node: str
    names: list[str]
    leaker: str
    protected: bool
    step_bytes: int
    used: dict[str, int]
    #: Maximum use of all pods of the node.
    most_bytes: int = ONE_GPU.memory_bytes

    def grow(self) -> None:
        """Leak a little more while the GPU has free memory."""
        if sum(self.used.values()) + self.step_bytes <= self.most_bytes:
            self.used[self.leaker] += self.step_bytes


def test_only_leaking_pods_are_evicted_and_each_only_once(
    new_cluster: NewCluster, tell: Tell
) -> None:
    """Two more nodes have pods with limits: one exceeds its limit without any pressure, and the
    other stays between its request and its limit.
    """
    chance = random.Random(SEED)
    cluster = new_cluster(NODES + 2, ONE_GPU)
    ports = cluster.start_replicas(*REPLICAS, settings=SETTINGS)
    cluster.plane.call("POST", PRIORITIES, {"metadata": {"name": "high"}, "value": 1000})
    with round_robin(ports) as url:
        cluster.start_scheduler(url)
        cluster.settle()
        leaks = [leak_on(cluster, node, chance) for node in cluster.names[:NODES]]
        beyond, within = (burst_on(cluster, node) for node in cluster.names[NODES:])
        within.used[within.leaker], within.most_bytes = 9 * GIB, 17 * GIB
        leaks += [beyond, within]
        cluster.until(lambda: len(cluster.bound()) == 4 * NODES + 4, "all pods are bound")
    before = granted(cluster.plane)
    pods = {pod["metadata"]["name"]: pod for pod in cluster.bound()}
    for leak in leaks:
        for name in leak.names:
            run(cluster, pods[name])  # A disruption budget does not protect a pending pod.
            cluster.nodes.give(pods[name], 0, used_bytes=leak.used[name])
    cluster.nodes.report(cluster.names)
    ending = [leak for leak in leaks if not leak.protected and leak is not within]
    expected = {uid_of(pods[leak.leaker]) for leak in ending}
    gone: set[str] = set()

    def all_evicted() -> bool:
        """Report a sample of every agent, and end evicted pods. Return whether all leaking pods
        were evicted.
        """
        time.sleep(INTERVAL_S)
        going = deleted(cluster) - gone
        for leak in leaks:
            uid = uid_of(pods[leak.leaker])
            if uid in going and chance.random() < 0.7:  # Some pods take longer to end.
                gone.add(uid)
                leak.used.pop(leak.leaker)
                cluster.delete_pod(leak.leaker)
            elif uid not in gone | going:
                leak.grow()
        set_used(cluster, leaks)
        cluster.nodes.take_back({uid_of(pod) for pod in cluster.pods()})
        cluster.nodes.report(cluster.names)
        return gone >= expected

    cluster.until(all_evicted, "every leaking pod that may be evicted is gone")
    held = sum(leak.protected for leak in leaks)
    assert 0 < held < NODES

    def all_unresolved() -> bool:
        all_evicted()
        unresolved = [cluster.metric("headroom_overuse_unresolved_devices", r) for r in REPLICAS]
        return unresolved == [held, held]

    cluster.until(all_unresolved, "only pods with a disruption budget are left")
    assert gone | deleted(cluster) == expected
    answers = granted(cluster.plane)
    answers.subtract(before)
    assert answers["201"] == len(expected), answers
    innocent = {uid_of(pods[name]) for leak in leaks for name in leak.names if name != leak.leaker}
    assert innocent <= {uid_of(pod) for pod in cluster.pods()}
    warned = told_of(cluster, "GPUMemoryOveruseEviction")
    assert set(warned) <= {uid_of(pods[leak.leaker]) for leak in leaks if leak is not within}
    cluster.until(
        lambda: set(told_of(cluster, "EvictedForGPUMemoryOveruse")) == expected,
        "each evicted pod has an Event",
    )
    tell(f"{len(expected)} leaking pods evicted once each, {held} held by a budget, no other pod")


def leak_on(cluster: PlayedCluster, node: str, chance: random.Random) -> Leak:
    """Create four pods that fill the GPU. Every fifth leaking pod has a disruption budget."""
    sizes = [chance.randint(2, 7) for _ in range(3)]
    sizes.append(24 - sum(sizes) - chance.randint(0, 1))
    chance.shuffle(sizes)
    names = [f"{node}-{index}" for index in range(4)]
    leaker = chance.choice(names)
    used = {}
    for name, size in zip(names, sizes, strict=True):
        high = chance.random() < 0.5
        spec: dict[str, Any] = {"nodeSelector": {HOSTNAME: node}}
        cluster.create_pod(
            name, f"{size}Gi", **spec, **({"priorityClassName": "high"} if high else {})
        )
        used[name] = int(size * GIB * (1 if name == leaker else chance.uniform(0.2, 1)))
    protected = chance.random() < 0.2
    if protected:
        labels = {"metadata": {"labels": {"leak": node}}}
        cluster.plane.call("PATCH", f"{PODS}/{leaker}", labels, "application/merge-patch+json")
        budget = {"maxUnavailable": 0, "selector": {"matchLabels": {"leak": node}}}
        cluster.plane.call("POST", BUDGETS, {"metadata": {"name": node}, "spec": budget})
    step_bytes = chance.randint(64, 256) * MIB
    return Leak(node, names, leaker, protected, step_bytes, used)


def burst_on(cluster: PlayedCluster, node: str) -> Leak:
    """Create a pod that requests 4 GiB and has a limit of 10 GiB, beside a pod of 8 GiB."""
    names = [f"{node}-burst", f"{node}-other"]
    for name, vram, limit in zip(names, ("4Gi", "8Gi"), ("10Gi", "8Gi"), strict=True):
        cluster.create_pod(name, vram, nodeSelector={HOSTNAME: node})
        noted = {"metadata": {"annotations": {"headroom.gpu/vram-limit": limit}}}
        cluster.plane.call("PATCH", f"{PODS}/{name}", noted, "application/merge-patch+json")
    return Leak(node, names, names[0], False, 128 * MIB, {names[0]: 4 * GIB, names[1]: 8 * GIB})


def set_used(cluster: PlayedCluster, leaks: list[Leak]) -> None:
    figures: Mapping[str, int] = {name: n for leak in leaks for name, n in leak.used.items()}
    cluster.nodes.set_used(figures)
