"""Measures every view of the debug API, without a network.

    python -m benchmarks.views [--nodes 5000] [--pods 20000] [--waiting 50] [--calls 100]

The console has nodes of 8 shared GPUs, pods that each hold a part of a GPU, and pending pods.
Before each call, one node reports again, so that no view can return its previous answer. Prints
p50 and p99 of the CPU time and of the elapsed time of each view, the size of its answer, and the
ratio of the highest p99 of CPU to the goal of 1 s. Other programs of the machine change the
elapsed time more than the CPU time. Fails if a view does not answer with status 200."""

import os
import re
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from benchmarks.hotpath.machine import machine
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from tests.builders import DISTRIBUTED, GIB, gpunode, kube_node, pod, reservation, shared, use
from tests.console.asking import Asked

GPUS = 8
#: Goal for the p99 of each view.
GOAL_MS = 1000.0
#: Queries of views that require parameters.
_QUERIES = {
    "/v1/capacity": "vram=8Gi",
    "/v1/defrag": "pod=default/waits-0",
    "/v1/events": "follow=false",
    **dict.fromkeys(
        ("/v1/explain", "/v1/history", "/v1/score", "/v1/timeline"), "pod=default/waits-0"
    ),
}
#: Queries with the longest answers, in addition to the default of the view.
_LONGEST = ("/v1/nodes?limit=1000", "/v1/pods?limit=1000", "/v1/capacity?vram=8Gi&by_node=true")
#: A stream without an end, and a view of one decision, of which there is none.
_LEFT_OUT = {"/v1/journal", "/v1/decisions/{decision_id}"}
_BODIES = {
    "/v1/score": {
        "manifest": {
            "metadata": {"annotations": {"headroom.gpu/vram": "8Gi"}},
            "spec": {
                "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]
            },
        }
    },
    "/v1/whatif": {"pods": [{"vram": "8Gi", "count": 20}]},
}


def filled(nodes: int, pods: int, waiting: int) -> Asked:
    """Return a console with this many nodes, pods on GPUs, and pending pods."""
    asked = Asked()
    for number in range(nodes):
        report(asked, number, range(number, pods, nodes))
    for number in range(waiting):
        asked.writer.apply([PodSeen(pod("22Gi", uid=f"w{number}", name=f"waits-{number}"))])
    return asked


def report(asked: Asked, number: int, on_node: range) -> None:
    """Apply a node, its report and its pods."""
    name, rows, held = f"gpu-{number:04d}", [], {}
    used = [0] * GPUS
    for place, each in enumerate(on_node):
        slot = place % GPUS
        uuid, uid = f"{name}-{slot}", f"u{each}"
        held[uid] = reservation({uuid: 4 * GIB}, name=f"p-{each}")
        rows.append(use(uid, uuid, 3 * GIB, replica=f"{uuid}::{place // GPUS}"))
        used[slot] += 1
        asked.writer.apply([PodSeen(pod("4Gi", uid=uid, name=f"p-{each}", node=name))])
    devices = [
        shared(f"{name}-{slot}", 4 - n, n, used_bytes=3 * GIB * n) for slot, n in enumerate(used)
    ]
    status = gpunode(*devices, name=name, reservations=held, pods=rows, plugin=DISTRIBUTED)
    asked.writer.apply([NodeSeen(kube_node(name)), GPUNodeSeen(status, asked.now_s)])


def targets(asked: Asked) -> Iterator[tuple[str, str]]:
    """Yield the method and the URL of each call, from the list of all views."""
    for view in asked.get("/v1").json()["views"]:
        path = view["path"]
        if path in _LEFT_OUT:
            continue
        url = path.replace("{name}", "gpu-0007").replace("{uuid}", "gpu-0007-0")
        assert not re.search(r"[{}]", url), f"{path} has an unknown parameter"
        if view["method"] == "POST":
            yield "POST", url
            continue
        yield "GET", f"{url}?{_QUERIES[path]}" if path in _QUERIES else url
        yield from (("GET", each) for each in _LONGEST if each.startswith(f"{path}?"))


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main(
    nodes: Annotated[int, typer.Option(help="Number of nodes, at least 8.", min=8)] = 5000,
    pods: Annotated[int, typer.Option(help="Pods that hold memory of a GPU.")] = 20_000,
    waiting: Annotated[int, typer.Option(help="Pending pods, at least 1.", min=1)] = 50,
    calls: Annotated[int, typer.Option(help="Calls of each view.", min=1)] = 100,
) -> None:
    typer.echo(f"{machine()}; load {os.getloadavg()[0]:.1f}")
    asked = filled(nodes, pods, waiting)
    typer.echo(f"{nodes} nodes, {nodes * GPUS} GPUs, {pods} pods, {waiting} pending; {calls} calls")
    typer.echo("CPU in ms and elapsed time in ms, each p50 and p99; kB")
    slowest = 0.0
    for method, url in targets(asked):
        cpu_ms, elapsed_ms, size = [], [], 0
        for call in range(calls):
            report(asked, call % nodes, range(call % nodes, pods, nodes))
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            answer = asked.post(url, _BODIES[url]) if method == "POST" else asked.get(url)
            cpu_ms.append(1000 * (time.process_time() - began_cpu_s))
            elapsed_ms.append(1000 * (time.perf_counter() - began_s))
            assert answer.status_code == 200, f"{url}: {answer.text}"
            size = len(answer.content)
        figures = [quantile(each, q) for each in (cpu_ms, elapsed_ms) for q in (0.5, 0.99)]
        slowest = max(slowest, figures[1])
        columns = " ".join(f"{each:8.1f}" for each in (*figures, size / 1000))
        typer.echo(f"{method} {url:<46} {columns}")
    typer.echo(f"highest p99 of CPU: {slowest:.0f} ms, {slowest / GOAL_MS:.2f} of the goal")
    typer.echo(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    typer.run(main)
