"""Creates and deletes pods with large foreign annotations; the extender's memory must stay flat.

Every pod is decoded as from a watch, filtered from a body as kube-scheduler sends it, reserved on a
node, reported by its agent, ended and deleted. Exits with 1 if the resident memory at the end is
more than 10 % above that after the first fifth.

    PYTHONPATH=. .venv/bin/python -m benchmarks.soak --pods 50000 --nodes 1000
"""

import argparse
import json
import logging
import math
import sys
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from extender.kube.resources import watched_kinds
from extender.observability.metrics import Telemetry
from extender.placement.policy import Rules
from extender.scheduler.scheduling_state import SchedulingState
from extender.scheduler.server import Verbs
from extender.state.changes import GPUNodeSeen, NodeSeen, PodGone, PodSeen
from extender.state.cluster_writer import ClusterWriter
from extender.state.journal import Journal
from tests.builders import GIB, gpunode, kube_node, reservation, shared, use

NOTE_BYTES = 250_000
MAX_GROWTH = 1.1


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def rss_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / (1 << 20)


def manifest(number: int, node: str = "") -> dict[str, Any]:
    note = f"{number:09}" + "x" * NOTE_BYTES
    annotations = {"headroom.gpu/vram": "1Gi", "example.com/note": note}
    metadata = {"namespace": f"ns-{number % 500}", "name": f"p{number}", "uid": f"u{number}"}
    limits = {"nvidia.com/gpu": "1"}
    return {
        "metadata": {**metadata, "annotations": annotations, "labels": {"job": f"{number}"}},
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]}
        | ({"nodeName": node} if node else {}),
    }


def soak(pods: int, nodes: int) -> tuple[float, float]:
    """Returns the resident memory in MiB after the first fifth and at the end."""
    decode = next(kind for kind in watched_kinds("x") if kind.name == "pods").decode
    state, names = ClusterWriter(Rules(), 1e9, time.time()), [f"n{n}" for n in range(nodes)]
    replica: Any = SimpleNamespace(
        observes=False,
        best_only=False,
        bind_deadline_s=math.inf,
        unready=lambda: "",
        deliver=state.apply,
    )
    no_binds: Any = None
    scheduling = SchedulingState(state, Journal(), Telemetry(CollectorRegistry()), replica, time)
    verbs = Verbs(scheduling, no_binds)
    for name in names:
        report = gpunode(shared(name, free=10), name=name, uid=f"g-{name}")
        state.apply([NodeSeen(kube_node(name)), GPUNodeSeen(report, time.monotonic())])
    early = 0.0
    for number in range(pods):
        uid, node = f"u{number}", names[number % nodes]
        waiting = manifest(number)
        state.apply([PodSeen(decode(msgspec.Raw(json.dumps(waiting).encode())))])
        body = {"Pod": waiting, "Nodes": None, "NodeNames": names}
        answer = json.loads(verbs.filter(json.dumps(body, separators=(",", ":")).encode()))
        assert not answer["Error"], answer["Error"]
        own = {uid: reservation({node: GIB}, name=f"p{number}")}
        rows = [use(uid, node, GIB, replica=f"{node}::0")]
        state.apply([PodSeen(decode(msgspec.Raw(json.dumps(manifest(number, node)).encode())))])
        steps: list[dict[str, Any]] = [
            {"reservations": own},
            {"reservations": own, "pods": rows},
            {"reservations": {}},
        ]
        for step, known in enumerate(steps):
            given = gpunode(
                shared(node, free=10), name=node, uid=f"g-{node}",
                version=f"{10 + 3 * number + step}", **known,
            )  # fmt: skip
            state.apply([GPUNodeSeen(given, time.monotonic())])
        state.apply([PodGone(uid, ended=True)])
        if number + 1 == pods // 5:
            early = rss_mib()
        if (number + 1) % max(1, pods // 10) == 0:
            say(f"{number + 1} pods came and went: {rss_mib():.0f} MiB")
    return early, rss_mib()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=50_000)
    parser.add_argument("--nodes", type=int, default=1_000)
    asked = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    early, late = soak(asked.pods, asked.nodes)
    say(f"after a fifth {early:.0f} MiB, at the end {late:.0f} MiB: {late / early - 1:+.1%}")
    return 0 if late <= MAX_GROWTH * early else 1


if __name__ == "__main__":
    sys.exit(main())
