"""Draws Headroom's processes and their calls. A test compares the names with deploy/base."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.pictures.svg import BLUE, QUIET, Drawing


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload of the manifests: its containers and their ports."""

    kind: str
    name: str
    ports: dict[str, tuple[int, ...]]


SCHEDULER = Workload(
    "Deployment", "headroom-scheduler", {"extender": (8889,), "kube-scheduler": ()}
)
CONSOLE = Workload("Deployment", "headroom-console", {"console": (8889,)})
WEBHOOK = Workload("Deployment", "headroom-webhook", {"webhook": (9443, 8889)})
RECORDER = Workload("Deployment", "headroom-recorder", {"recorder": (8889,)})
AGENT = Workload("DaemonSet", "headroom-agent", {"agent": (9410, 9412)})
WORKLOADS = (SCHEDULER, CONSOLE, WEBHOOK, RECORDER, AGENT)
#: Address at which kube-scheduler calls the extender.
EXTENDER_URL = "https://127.0.0.1:8888"
CALLS = ("filter", "prioritize", "preempt", "bind")

_LIGHT = "#ddf4ff"


def of_manifests(folder: Path) -> Iterator[Workload]:
    """Yield the Deployments and DaemonSets of the manifests."""
    for each in _documents(folder):
        if each.get("kind") in ("Deployment", "DaemonSet"):
            containers = each["spec"]["template"]["spec"]["containers"]
            ports = {
                container["name"]: tuple(port["containerPort"] for port in container["ports"])
                if "ports" in container
                else ()
                for container in containers
            }
            yield Workload(each["kind"], each["metadata"]["name"], ports)


def extenders(folder: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the address and the calls of each extender in kube-scheduler's configuration."""
    for each in _documents(folder):
        if each.get("kind") == "KubeSchedulerConfiguration":
            for extender in each["extenders"]:
                yield extender["urlPrefix"], tuple(v for k, v in extender.items() if "Verb" in k)


def _documents(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.yaml")):
        for each in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if each:
                yield each


def draw() -> str:
    """Return the picture as SVG."""
    drawing = Drawing(840, 590, "Headroom's processes and who calls whom")
    _scheduler(drawing)
    for left, workload, does in (
        (330, CONSOLE, "debug API, page"),
        (500, WEBHOOK, "checks GPU pods"),
        (670, RECORDER, "memory peaks"),
    ):
        (ports,) = workload.ports.values()
        _part(drawing, left, 16, 158, 136, workload)
        drawing.text(left + 79, 92, f"{does}\nport {ports[0]}", anchor="middle")
    drawing.arrow(330, 84, 268, 84)
    drawing.text(299, 76, "journal", size=13, anchor="middle")
    drawing.box(16, 258, 812, 44, fill="#f6f8fa")
    drawing.text(422, 286, "Kubernetes API server", size=16, bold=True, anchor="middle")
    for x, both, says in (
        (60, True, "watch,\nnominate"),
        (176, True, "reserve in\nGPUNode.spec,\nBinding"),
        (352, True, "watch,\naccess reviews,\nproxy"),
        (530, False, "new pods"),
        (700, True, "read status,\nwrite\nVRAMProfile"),
    ):
        drawing.arrow(x, 256, x, 154, both=both)
        drawing.text(x + 10, 190, says, size=13)
    _node(drawing)
    drawing.box(600, 394, 228, 66)
    drawing.text(714, 422, "kubectl headroom, page", bold=True, anchor="middle")
    drawing.text(714, 444, "with your permissions", size=13, anchor="middle")
    drawing.arrow(714, 392, 714, 304)
    drawing.text(724, 352, "proxy", size=13)
    drawing.box(600, 494, 228, 72)
    drawing.text(714, 522, "Prometheus", bold=True, anchor="middle")
    drawing.text(714, 544, "metrics of each part", size=13, anchor="middle")
    return str(drawing)


def _part(
    drawing: Drawing, x: float, y: float, width: float, height: float, workload: Workload
) -> None:
    drawing.box(x, y, width, height, fill=_LIGHT, line=BLUE)
    middle = x + width / 2
    drawing.text(middle, y + 22, workload.kind, size=13, fill=QUIET, anchor="middle")
    drawing.text(middle, y + 43, workload.name, size=13.5, bold=True, anchor="middle")


def _scheduler(drawing: Drawing) -> None:
    _part(drawing, 16, 16, 252, 136, SCHEDULER)
    extender, scheduler = SCHEDULER.ports
    drawing.box(26, 68, 116, 32)
    drawing.text(84, 89, scheduler, size=13, anchor="middle")
    drawing.box(176, 68, 82, 32)
    drawing.text(217, 89, extender, size=13, anchor="middle")
    drawing.arrow(142, 84, 174, 84)
    called = EXTENDER_URL.removeprefix("https://")
    drawing.text(142, 120, f"{', '.join(CALLS)}\n{called}", size=13, anchor="middle")


def _node(drawing: Drawing) -> None:
    drawing.box(16, 394, 556, 172, dashed=True)
    drawing.text(556, 414, "each GPU node", size=13, fill=QUIET, anchor="end")
    _part(drawing, 32, 424, 166, 96, AGENT)
    ports = ", ".join(map(str, AGENT.ports["agent"]))
    drawing.text(115, 492, f"ports {ports}", anchor="middle")
    drawing.box(306, 424, 88, 38)
    drawing.text(350, 448, "kubelet", anchor="middle")
    drawing.box(432, 424, 124, 38)
    drawing.text(494, 448, "device plugin", anchor="middle")
    drawing.box(306, 482, 250, 38)
    drawing.text(431, 506, "NVIDIA driver", anchor="middle")
    drawing.arrow(198, 443, 304, 443)
    drawing.text(252, 436, "pods' GPUs", size=13, anchor="middle")
    drawing.arrow(198, 501, 304, 501)
    drawing.text(252, 494, "memory, faults", size=12.5, anchor="middle")
    drawing.arrow(396, 443, 430, 443, both=True)
    drawing.text(
        32, 548, "On steered nodes the agent is between kubelet and device plugin.", size=13
    )
    drawing.arrow(115, 422, 115, 304)
    drawing.text(125, 348, "GPUNode.status,\nLease (heartbeat)", size=13)
    drawing.arrow(350, 304, 350, 422, both=True)
    drawing.text(360, 356, "bound pods", size=13)
