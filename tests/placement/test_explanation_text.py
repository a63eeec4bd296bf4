"""Checks that rounded amounts in an explanation do not contradict each other."""

import pytest

from headroom.contract.gpunode import Replicas
from headroom.core.placement.explain import explain
from headroom.core.placement.explanation_text import explanation_lines
from headroom.core.placement.policy import Weights
from tests.builders import GIB, container, device, judged, mig, pod, weighed


def test_a_need_is_rounded_up_and_free_memory_down() -> None:
    almost = weighed(device(memory_bytes=24 * GIB - (GIB >> 5)))
    _, verdicts = judged(str(24 * GIB - (GIB >> 6)), almost)
    lines = explanation_lines(explain(verdicts, Weights()).nearest[0])
    assert lines[1].startswith("  GPU-0: needs 24.0 GiB, 23.9 GiB free, 0.1 GiB short; ")


@pytest.mark.parametrize("cordoned", ["M", "GPU-7"])
def test_a_cordoned_device_is_shown_with_the_command_that_uncordons_it(cordoned: str) -> None:
    _, verdicts = judged("8Gi", weighed(mig("M", 1, parent="GPU-7"), cordoned={cordoned}))
    lines = explanation_lines(explain(verdicts, Weights()).nearest[0])
    command = f"kubectl headroom uncordon n {cordoned}"
    assert lines[1] == f"  M: cordoned; to undo it: {command}"


def test_the_message_shows_that_the_node_has_too_few_gpus() -> None:
    asked = pod("8Gi", container(gpus=16))
    _, verdicts = judged(asked, weighed(device("a"), device("b")))
    lines = explanation_lines(explain(verdicts, Weights()).nearest[0])
    assert lines[:2] == [
        "n: no free GPU replica",
        "  the pod requests 16 nvidia.com/gpu; the node has 2 in total",
    ]
    taken = weighed(device("a", replicas=Replicas(free=0, allocated=1)))
    lines = explanation_lines(explain(judged("8Gi", taken)[1], Weights()).nearest[0])
    assert "in all" not in " ".join(lines)


def test_the_offered_resources_are_named_if_the_requested_one_is_not_among_them() -> None:
    node = weighed(device("a", resource="nvidia.com/gpu.shared"))
    _, verdicts = judged("8Gi", node)
    lines = explanation_lines(explain(verdicts, Weights()).nearest[0])
    assert lines == [
        "n: node reports no GPU of the requested resource",
        "  the node offers nvidia.com/gpu.shared",
    ]
