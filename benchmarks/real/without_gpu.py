"""Schedules pods without a GPU in a real kube-scheduler, with and without ``managedResources``.

Prints the calls that Headroom gets for each pod, the pods bound per second, and the ratio of the
two rates from alternating rounds of one run (docs/design/adr/0028).
"""

import argparse
import contextlib
import statistics
import sys
import time

from tests.controlplane import (
    ControlPlane,
    control_plane,
    managed_resources,
    scheduler_configuration,
)
from tests.e2e.cluster import PlayedCluster
from tests.e2e.nodes import Shape

VERBS = ("filter", "prioritize", "bind")
VARIANTS = ("with managedResources", "without managedResources")


def bound_per_second(plane: ControlPlane, nodes: int, pods: int, named: bool) -> float:
    """Create ``pods`` pods at once, and wait until kube-scheduler has bound them all."""
    with contextlib.closing(PlayedCluster(plane, nodes, Shape())) as cluster:
        cluster.create()
        url = cluster.start_extender()
        config = scheduler_configuration(url, plane.kubeconfig("scheduler-of-the-tests"))
        config["clientConnection"] |= {"qps": 5000, "burst": 5000}
        if named:
            config["extenders"][0]["managedResources"] = managed_resources()
        cluster.start_scheduler_as("kube-scheduler", config)
        cluster.settle()
        since_s = time.monotonic()
        for number in range(pods):
            cluster.create_pod(f"plain-{number}", None, gpus=0)
        while len(cluster.bound()) < pods:
            time.sleep(0.02)
        took_s = time.monotonic() - since_s
        calls = {
            verb: cluster.metric(f'headroom_verb_duration_seconds_count{{verb="{verb}"}}') / pods
            for verb in VERBS
        }
    shown = ", ".join(f"{calls[verb]:.2f} {verb}" for verb in VERBS)
    say(f"{VARIANTS[not named]}: {pods / took_s:.0f} pods/s; calls per pod: {shown}")
    return pods / took_s


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--pods", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    ratios = []
    with control_plane() as plane:
        for _ in range(given.rounds):
            with_names = bound_per_second(plane, given.nodes, given.pods, named=True)
            without = bound_per_second(plane, given.nodes, given.pods, named=False)
            ratios.append(without / with_names)
    say(
        f"without / with, pods per second: median {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}, {given.rounds} rounds)"
    )


if __name__ == "__main__":
    main()
