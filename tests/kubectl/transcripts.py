"""Serves a fleet with long names and problems, and records the output of `kubectl headroom` on a
terminal.

``python -m tests.kubectl.transcripts 100`` prints the transcript of a terminal with 100 columns.
"""

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from headroom.plugin import main
from tests.serving import Server, serving
from tests.waiting import until

GIB = 1 << 30
EKS = [f"ip-10-0-123-{number}.eu-central-1.compute.internal" for number in (45, 46)]
GKE = [f"gke-prod-gpu-pool-1a2b3c4d-xyz{number}" for number in (1, 2)]
NODES = [*EKS, *GKE]
FLEET = f"""\
nodes:
  - {{name: {EKS[0]}, gpus: 8, memory: 80Gi, reserved: 512Mi, model: NVIDIA H100 80GB HBM3,
     sharing: time-slicing, replicas: 4}}
  - {{name: {EKS[1]}, gpus: 8, memory: 80Gi, reserved: 512Mi, model: NVIDIA H100 80GB HBM3,
     sharing: time-slicing, replicas: 4}}
  - {{name: {GKE[0]}, gpus: 1, memory: 24Gi, model: NVIDIA L4, sharing: time-slicing, replicas: 8}}
  - {{name: {GKE[1]}, gpus: 1, memory: 24Gi, model: NVIDIA L4, sharing: mps, replicas: 8}}
"""
TEAM = "ml-platform-inference-production"
LLAMA = "llama-3-70b-instruct-vllm-7d4c9b6f5-9xk4t"
MIXTRAL = "mixtral-8x22b-instruct-vllm-6f9d8c7b5-x7k2p"
EMBEDDER = "embedder-5c9f7d6b8d-2q4xz"
COMMANDS = (
    "top",
    "top gpu",
    "top pod -A",
    "top model",
    "capacity --vram 20Gi",
    "capacity --vram 20Gi --by-node",
    "pending -A",
    f"why {TEAM}/{MIXTRAL}",
    f"why -n team-a {EMBEDDER}",
    "why -n team-a trainer-0",
    f"score -n team-a {EMBEDDER} --node {EKS[1]}",
    f"whatif --pods 9 --vram 60Gi --drain {EKS[0]}",
    "drift -A",
    "log",
)


@contextlib.contextmanager
def fleet() -> Iterator[Server]:
    """Serve four nodes. Unattributed use overcommits one node, and another node has an unhealthy
    GPU.
    """
    with serving(FLEET) as server:
        _place(server, _pod(TEAM, LLAMA, "60Gi"), EKS[0])
        _place(server, _pod("team-a", EMBEDDER, "8Gi"), GKE[0])
        _filter(server, _pod(TEAM, MIXTRAL, "90Gi"), NODES)
        _filter(server, _pod("team-a", "trainer-0", "25Gi", {"gpu": "l4"}), GKE)
        nodes = {node["name"]: node for node in server.get("/v1/nodes").json()["nodes"]}
        reports = [
            _report(nodes[EKS[0]], _use(LLAMA, EKS[0], 79)),
            _report(nodes[GKE[0]], _use(EMBEDDER, GKE[0], 4), unattributed=19),
            _report(nodes[GKE[1]], healthy=False, healthReason="XID 79: GPU fell off the bus"),
        ]
        # Wait for the changes of binds, because the changes of the report must come after them in
        # the list of events.
        _listed(server, 6)
        reported = server.debug_post("/embedded/v1/reports", reports)
        assert reported.status == 204, reported.body
        _listed(server, 10)
        yield server


def _listed(server: Server, count: int) -> None:
    def events() -> list[Any]:
        listed: list[Any] = server.get("/v1/events?follow=false").json()["events"]
        return listed

    until(lambda: len(events()) == count, f"{count} events", logs=lambda: str(events()))


def _pod(namespace: str, name: str, vram: str, selector: dict[str, str] | None = None) -> Any:
    container = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    metadata = {"namespace": namespace, "name": name, "uid": f"uid-{name}", "resourceVersion": "1"}
    metadata["annotations"] = {"headroom.gpu/vram": vram}  # type: ignore[assignment]
    return {"metadata": metadata, "spec": {"containers": [container], "nodeSelector": selector}}


def _filter(server: Server, pod: Any, nodes: list[str]) -> None:
    assert server.post("/filter", {"Pod": pod, "NodeNames": nodes}).status == 200


def _place(server: Server, pod: Any, node: str) -> None:
    _filter(server, pod, NODES)
    metadata = pod["metadata"]
    binding = {"PodName": metadata["name"], "PodNamespace": metadata["namespace"]}
    bound = server.post("/bind", binding | {"PodUID": metadata["uid"], "Node": node})
    assert bound.json() == {"Error": ""}


def _use(pod: str, node: str, used: int) -> dict[str, Any]:
    return {"uid": f"uid-{pod}", "device": f"GPU-{node}-0", "used": used * GIB}


def _report(
    node: Any, use: dict[str, Any] | None = None, unattributed: int = 0, **first: Any
) -> dict[str, Any]:
    """Return a report of the node. ``use``, ``unattributed`` and ``first`` apply to its first
    device.
    """
    devices = []
    for device in node["devices"]:
        here = device["driver_index"] == 0
        pods = 1 if use and here else 0
        used = (use["used"] if use else 0) + unattributed * GIB if here else 0
        replicas = device["replicas_free"] + device["replicas_allocated"]
        devices.append(
            {
                "index": device["driver_index"],
                **{key: device[key] for key in ("uuid", "model", "resource", "sharing")},
                "memory": device["memory_bytes"],
                "reserved": device["driver_reserve_bytes"],
                "used": used,
                "unattributed": unattributed * GIB if here else 0,
                "replicas": {"free": replicas - pods, "allocated": pods},
                **(first if here else {}),
            }
        )
    status = {
        "observedAt": "2026-11-22T03:00:00Z",
        "devices": devices,
        "pods": [use] if use else [],
        "plugin": {"allocationPolicy": "distributed"},
    }
    return {"node": node["name"], "status": status}


@dataclass(frozen=True, slots=True)
class Shown:
    returncode: int
    stdout: str
    stderr: str


def run(
    address: str, *arguments: str | Path, width: int | None = None, variable: str = ""
) -> Shown:
    """Run the plugin in this process, because a new process takes longer to start.

    ``address`` is the value of --server. If it is empty, the option is left out. ``variable`` is
    the value of HEADROOM_SERVER. ``width`` is the number of terminal columns, or None for output
    that is not a terminal.
    """
    server = ["--server", address] if address else []
    stdout, stderr = io.StringIO(), io.StringIO()
    returncode = 0
    with (
        mock.patch.dict(os.environ, {"HEADROOM_SERVER": variable, "HOME": "/nonexistent"}),
        mock.patch.object(sys, "argv", ["kubectl-headroom", *server, *map(str, arguments)]),
        mock.patch("headroom.kubectl.output.terminal_width", return_value=width),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as err:
            returncode = int(err.code or 0)
    return Shown(returncode, stdout.getvalue(), stderr.getvalue())


def transcript(server: Server, width: int) -> str:
    """Return the commands and their output. Times, durations and generations are replaced by
    constants.
    """
    lines = []
    for command in COMMANDS:
        shown = run(server.debug, *shlex.split(command), width=width)
        assert shown.stderr == ""
        lines.append(f"$ kubectl headroom {command}\n{shown.stdout}")
    text = re.sub(r"\d+\.\d ms", "0.5 ms", "\n".join(lines))
    text = re.sub(r"generation \d+", "generation 7", text)
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+\+00:00|Z)"
    return re.sub(time, "2026-11-22T03:00:00Z", text)


if __name__ == "__main__":
    with fleet() as running:
        print(transcript(running, int(sys.argv[1])), end="")  # noqa: T201
