"""Generates the section of docs/design/device-truth.md that explains a pod on each kind of node.

python -m tests.state.kinds generates the section again
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.probes.unified_memory import UNSET
from headroom.contract.annotations import DEVICE_CHOICE
from headroom.contract.gpunode import Device, GPUNode, Plugin
from headroom.contract.kube import Node, NodeStatus, ObjectMeta, Pod
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.explain import explain
from headroom.core.placement.explanation_text import explanation_lines
from headroom.core.placement.fit import fit
from headroom.core.placement.policy import Rules, VisibleDevices, Weights
from tests.builders import (
    GATE_IMAGE,
    GIB,
    GPU,
    NOW_S,
    choosing,
    container,
    device,
    gate,
    gpunode,
    mig,
    pod,
    reservation,
    shared,
    use,
)

DOCUMENT = Path(__file__).parents[2] / "docs/design/device-truth.md"
BEGIN, END = "<!-- kinds of nodes -->", "<!-- end of kinds -->"

STOCK = Plugin(allocation_policy="distributed", topology_manager_policy="none")
PACKED = Plugin(allocation_policy="packed", topology_manager_policy="none")
STEERED = Plugin(allocation_policy="distributed", topology_manager_policy="none", steered=[GPU])
GATED = pod("8Gi", init=[gate()])
SMALL = "nvidia.com/mig-1g.10gb"
LABELS = {
    "nvidia.com/gpu.count": "1",
    "nvidia.com/gpu.replicas": "1",
    "nvidia.com/gpu.memory": "23034",
    "nvidia.com/gpu.product": "NVIDIA-L4",
    "nvidia.com/gpu.sharing-strategy": "none",
}


@dataclass(frozen=True)
class Kind:
    title: str
    #: Describes the pod's request on the page.
    asked: str
    pod: Pod
    gpunode: GPUNode
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    rules: Rules = field(default_factory=lambda: Rules(gate_image=GATE_IMAGE))
    allocatable: tuple[tuple[str, str], ...] = ((GPU, "1"),)

    def told(self) -> list[str]:
        metadata = ObjectMeta(name="n", uid="n", labels=self.labels, annotations=self.annotations)
        node = Node(metadata=metadata, status=NodeStatus(allocatable=dict(self.allocatable)))
        state = ClusterWriter(self.rules, stale_after_s=90.0, epoch_s=0.0)
        running = (PodSeen(pod(uid=uid, node="n")) for uid in self.gpunode.spec.reservations)
        state.apply([NodeSeen(node), *running, GPUNodeSeen(self.gpunode, NOW_S)])
        request: Any = state.cluster.understand(self.pod)
        snap = state.cluster.snapshot()
        # Ignore the age of reports, because the builders give reports a fixed time.
        verdicts = fit(request, snap, snap.rows(["n"]), float("-inf"))
        (nearest,) = explain(verdicts, Weights()).nearest
        judged = state.cluster.judge(self.pod, self.gpunode, float("-inf"))
        assert (judged if isinstance(judged, Reason) else None) is nearest.reason, "bind agrees"
        return explanation_lines(nearest)


def node(*devices: Device, plugin: Plugin = STOCK, **other: Any) -> GPUNode:
    return gpunode(*devices, plugin=plugin, **other)


def used(uuid: str, gib: int, taken: int, **other: Any) -> Device:
    """Return a shared device with ``taken`` allocated replicas. Unattributed processes use ``gib``
    of its memory.
    """
    size = gib * GIB
    return shared(uuid, 4 - taken, taken, used_bytes=size, unattributed_bytes=size, **other)


def of(*containers: Any) -> Pod:
    return pod("8Gi", *containers)


KINDS = (
    Kind(
        "GPUs that are not shared",
        "8 GiB",
        pod("8Gi"),
        node(device("GPU-a"), device("GPU-b")),
    ),
    Kind(
        "MIG, strategy single: an instance is a GPU",
        "8 GiB",
        pod("8Gi"),
        node(mig("MIG-a", 1), mig("MIG-b", 2)),
    ),
    Kind(
        "MIG, strategy mixed, two compute instances in one GPU instance",
        "6 GiB of one 1g.10gb",
        pod("6Gi", container(resource=SMALL)),
        node(
            mig("MIG-a", 1, resource=SMALL),
            mig("MIG-b", 1, resource=SMALL),
            reservations={"u": reservation({"MIG-a": 6 * GIB, "MIG-b": 6 * GIB}, resource=SMALL)},
        ),
        allocatable=((SMALL, "2"),),
    ),
    Kind(
        "Time-slicing, policy distributed",
        "8 GiB",
        pod("8Gi"),
        node(used("GPU-a", 4, 1), used("GPU-b", 4, 1), used("GPU-c", 20, 2)),
    ),
    Kind(
        "Time-slicing, policy packed: most replicas in use is next, with or without free memory",
        "8 GiB",
        pod("8Gi"),
        node(used("GPU-a", 4, 1), used("GPU-c", 20, 2), plugin=PACKED),
    ),
    Kind(
        "Time-slicing, policy unknown",
        "8 GiB",
        pod("8Gi"),
        node(used("GPU-a", 4, 1), used("GPU-c", 20, 2), plugin=Plugin()),
    ),
    Kind(
        "Annotated `device-choice: any`, which was removed",
        "8 GiB",
        pod("8Gi"),
        node(used("GPU-a", 4, 1), used("GPU-c", 20, 2)),
        annotations={DEVICE_CHOICE: "any"},
    ),
    Kind(
        "Gated, and the pod has its gate",
        "8 GiB",
        GATED,
        node(used("GPU-a", 4, 1), used("GPU-b", 4, 1), used("GPU-c", 20, 2)),
        annotations={DEVICE_CHOICE: "gated"},
    ),
    Kind(
        "Gated, and the pod has no gate",
        "8 GiB",
        pod("8Gi"),
        node(used("GPU-a", 4, 1), used("GPU-b", 4, 1)),
        annotations={DEVICE_CHOICE: "gated"},
    ),
    Kind(
        "MPS",
        "8 GiB, where each process may take 6",
        pod("8Gi"),
        node(shared("GPU-a", sharing="mps")),
    ),
    Kind(
        "MPS, more processes",
        "8 GiB with `headroom.gpu/processes: 2`",
        pod("8Gi", annotations={"headroom.gpu/processes": "2"}),
        node(shared("GPU-a", sharing="mps")),
    ),
    Kind(
        "The pod sets NVIDIA_VISIBLE_DEVICES, and the node may honor it",
        "8 GiB, `NVIDIA_VISIBLE_DEVICES: all`",
        of(choosing(container())),
        node(shared("GPU-a")),
    ),
    Kind(
        "The same with `visible_devices: charge`",
        "8 GiB, `NVIDIA_VISIBLE_DEVICES: all`",
        of(choosing(container())),
        node(used("GPU-a", 4, 1), used("GPU-b", 20, 3)),
        rules=Rules(visible_devices=VisibleDevices.CHARGE),
    ),
    Kind(
        "Steered: the fullest device with enough memory",
        "8 GiB",
        pod("8Gi"),
        node(used("GPU-a", 4, 1), used("GPU-b", 12, 2), used("GPU-c", 20, 0), plugin=STEERED),
    ),
    Kind(
        "Steered, while another pod is unconfirmed",
        "16 GiB",
        pod("16Gi"),
        node(
            used("GPU-b", 12, 2),
            used("GPU-c", 2, 0),
            reservations={"uid-q": reservation({"GPU-b": 8 * GIB}, choices=["GPU-b"])},
            plugin=STEERED,
        ),
    ),
    Kind(
        "Labels only, no agent has reported",
        "8 GiB",
        pod("8Gi"),
        gpunode(),
        labels=LABELS,
    ),
    Kind(
        "Insufficient labels, `require_report: false`",
        "8 GiB",
        pod("8Gi"),
        gpunode(),
        labels={"kubernetes.azure.com/accelerator": "nvidia"},
        rules=Rules(require_report=False),
    ),
    Kind(
        "A foreign allocator",
        "8 GiB",
        pod("8Gi"),
        node(shared("GPU-a")),
        annotations={"hami.io/node-handshake": "Reported 2026.11.21 12:00:00"},
    ),
    Kind(
        "MIG is being reconfigured",
        "8 GiB",
        pod("8Gi"),
        node(mig("MIG-a", 1), mig("MIG-b", 2)),
        labels={"nvidia.com/mig.config.state": "pending"},
    ),
    Kind(
        "A MIG layout that strategy single cannot offer",
        "8 GiB",
        pod("8Gi"),
        node(mig("MIG-a", 1), mig("MIG-b", 2)),
        labels={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-INVALID"},
    ),
    Kind(
        "A vGPU guest or WSL: the driver lists no processes",
        "8 GiB",
        pod("8Gi"),
        node(
            shared("GPU-a", 3, 1, used_bytes=10 * GIB, unattributed_bytes=None),
            pods=[use("u", "GPU-a", None)],
            reservations={"u": reservation({"GPU-a": 6 * GIB})},
        ),
    ),
    Kind(
        "Jetson, DGX Spark: the driver does not report the memory of a shared GPU",
        "8 GiB",
        pod("8Gi"),
        node(
            shared(
                "GPU-a",
                memory_bytes=-1,
                reserved_bytes=-1,
                used_bytes=-1,
                healthy=False,
                health_reason=UNSET,
            )
        ),
    ),
    Kind(
        "A broken GPU that the plugin still offers",
        "8 GiB",
        pod("8Gi"),
        node(shared("GPU-a"), shared("GPU-b", healthy=False, health_reason="XID 79")),
    ),
)


def section() -> Iterator[str]:
    """Yield the lines between the two marks on the page."""
    for kind in KINDS:
        yield f"**{kind.title}.** A pod requests {kind.asked}:"
        yield ""
        yield "```"
        yield from kind.told()
        yield "```"
        yield ""


def between(lines: Iterable[str]) -> list[str]:
    after = itertools.dropwhile(lambda line: line != BEGIN, lines)
    return list(itertools.takewhile(lambda line: line != END, itertools.islice(after, 2, None)))


def write() -> None:
    lines = DOCUMENT.read_text().splitlines()
    begin, end = lines.index(BEGIN), lines.index(END)
    new = [*lines[: begin + 1], "", *section(), *lines[end:]]
    DOCUMENT.write_text("\n".join(new) + "\n")


if __name__ == "__main__":
    write()
