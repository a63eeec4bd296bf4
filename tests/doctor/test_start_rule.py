"""Tests the doctor's finding about pods that start alone without a probe."""

import msgspec

from headroom.contract.kube import Container, Pod, Present
from headroom.contract.watched import PodSeen
from headroom.doctor.findings import line
from headroom.doctor.node_rules import examine
from tests.builders import NOW_S, container, pod
from tests.state.states import state_of

ALONE = {"headroom.gpu/startup": "alone"}
PROBED = msgspec.structs.replace(container(), startup_probe=Present())


def found(*pods: Pod) -> list[str]:
    return [line(each) for each in examine(state_of(*map(PodSeen, pods)).cluster, NOW_S)]


def engine(name: str, *containers: Container, phase: str = "Running", alone: bool = True) -> Pod:
    annotations = ALONE if alone else {}
    return pod("4Gi", *containers, uid=name, name=name, annotations=annotations, phase=phase)


def test_pods_that_start_alone_without_a_probe_are_reported() -> None:
    log = container("log", gpus=0)
    assert found(
        engine("b", container(), log),
        engine("a", PROBED, container("second")),
        engine("probed", PROBED, log),
        engine("ordinary", container(), alone=False),
        engine("ended", container(), phase="Succeeded"),
    ) == [
        "advice: default/a, default/b: these pods start alone, and a GPU container has no "
        "readiness or startup probe: their start ends only when the agent finds that its memory "
        "use has settled, or times out. To do: add a readinessProbe that succeeds when the model "
        "is loaded: docs/how-to/starting-alone.md."
    ]
