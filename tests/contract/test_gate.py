"""Which pods are gated, and which of them still wait."""

import msgspec
import pytest

from contract.gate import GATE, is_gated, waits
from contract.kube import (
    Container,
    ContainerState,
    ContainerStatus,
    Pod,
    PodStatus,
    Present,
    Terminated,
)
from tests.builders import GPU, container, pod

GATE_CONTAINER = Container(name=GATE)


def with_state(*states: tuple[str, ContainerState | None], phase: str = "Pending") -> Pod:
    statuses = [ContainerStatus(name=name, state=state) for name, state in states]
    told = PodStatus(phase=phase, init_container_statuses=statuses)
    return msgspec.structs.replace(pod(init=[GATE_CONTAINER]), status=told)


@pytest.mark.parametrize(
    ("init", "gated"),
    [
        pytest.param([GATE_CONTAINER], True, id="the gate comes first"),
        pytest.param([GATE_CONTAINER, container("warm-up")], True, id="others come after it"),
        pytest.param([container("warm-up"), GATE_CONTAINER], False, id="another runs before it"),
        pytest.param([container("warm-up")], False, id="there is another only"),
        pytest.param([], False, id="there is none"),
        pytest.param([container(GATE, resource=GPU)], False, id="it holds a GPU itself"),
        pytest.param(
            [Container(name=GATE, restart_policy="Always")], False, id="nobody waits for a sidecar"
        ),
    ],
)
def test_a_pod_is_gated_where_nothing_runs_before_its_gate_ends(
    init: list[Container], gated: bool
) -> None:
    assert is_gated(pod(init=init)) == gated
    assert waits(pod(init=init)) == gated


@pytest.mark.parametrize(
    ("of", "waiting"),
    [
        pytest.param(with_state(), True, id="the kubelet says nothing yet"),
        pytest.param(with_state((GATE, None)), True, id="nothing is known of it"),
        pytest.param(with_state((GATE, ContainerState(running=Present()))), True, id="it runs"),
        pytest.param(
            with_state((GATE, ContainerState(terminated=Terminated(exit_code=2)))),
            True,
            id="it failed, and is run again",
        ),
        pytest.param(
            with_state(("other", ContainerState(terminated=Terminated()))), True, id="another ended"
        ),
        pytest.param(
            with_state((GATE, ContainerState(terminated=Terminated()))), False, id="it said yes"
        ),
        pytest.param(with_state(phase="Failed"), False, id="the pod was turned away"),
    ],
)
def test_a_gated_pod_waits_until_its_gate_ended_well(of: Pod, waiting: bool) -> None:
    assert waits(of) == waiting


def test_it_is_read_from_what_kubernetes_writes() -> None:
    written = b"""{"metadata": {"name": "p"},
        "spec": {"initContainers": [{"name": "headroom-gate"}]},
        "status": {"phase": "Pending", "initContainerStatuses": [{"name": "headroom-gate", "state":
        {"terminated": {"exitCode": 0, "reason": "Completed"}}}]}}"""
    decoded = msgspec.json.decode(written, type=Pod)
    assert is_gated(decoded)
    assert not waits(decoded)
