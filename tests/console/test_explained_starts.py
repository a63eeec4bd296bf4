"""Checks when the explanation of a pod that starts alone shows that the pod waits to start
again.
"""

from typing import Any

import msgspec
import pytest

from headroom.contract.gate import GATE, gate_container
from headroom.contract.kube import (
    ContainerState,
    ContainerStatus,
    InitContainer,
    Pod,
    PodStatus,
    Terminated,
)
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from tests.builders import GATE_IMAGE, GIB, gpunode, kube_node, pod, reservation, shared
from tests.console.asking import Asked

GATED = msgspec.convert(gate_container(GATE_IMAGE), InitContainer)
OPENED = ContainerState(terminated=Terminated(exit_code=0))


def engine(gate: ContainerState | None) -> Pod:
    """Return a pod that starts alone. ``gate`` is the state of its gate, or None if it has
    no gate.
    """
    made = pod("4Gi", uid="u", name="llm", node="n", annotations={"headroom.gpu/startup": "alone"})
    if gate is None:
        return made
    spec = msgspec.structs.replace(made.spec, init_containers=[GATED])
    status = PodStatus(
        phase="Running", init_container_statuses=[ContainerStatus(name=GATE, state=gate)]
    )
    return msgspec.structs.replace(made, spec=spec, status=status)


@pytest.mark.parametrize(
    ("phase", "gate", "start"),
    [
        ("", None, None),
        (
            "starting",
            None,
            "starts alone: other pods with headroom.gpu/startup: alone wait until its start on "
            "its GPU has ended",
        ),
        (
            "running",
            ContainerState(),
            "starts alone and waits at its gate. To see what it waits for: "
            "kubectl logs -n default llm -c headroom-gate",
        ),
        (
            "running",
            OPENED,
            "has started alone. If all its containers start again (reboot, "
            "RestartAllContainers), its gate waits for other such pods on its GPU. A container "
            "that restarts by itself does not wait",
        ),
        (
            "running",
            None,
            "has started alone. If it starts again in place, it does not wait for other such "
            "pods, because it has no gate. To add a gate, annotate its template. Example: "
            "headroom.gpu/gated: 'true'",
        ),
    ],
)
def test_the_explanation_shows_whether_a_pod_that_starts_alone_waits(
    phase: Any, gate: ContainerState | None, start: str | None
) -> None:
    held = msgspec.structs.replace(reservation({"a": 4 * GIB}, name="llm"), phase=phase)
    fleet = Asked()
    report = gpunode(shared("a"), name="n", reservations={"u": held})
    fleet.writer.apply([NodeSeen(kube_node("n")), GPUNodeSeen(report, 0.0), PodSeen(engine(gate))])
    assert fleet.get("/v1/explain?pod=default/llm").json()["start"] == start
