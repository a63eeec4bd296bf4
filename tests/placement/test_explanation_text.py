"""The amounts in an explanation do not contradict each other, although they are rounded."""

import pytest

from extender.placement.explain import explain
from extender.placement.explanation_text import explanation_lines
from extender.placement.policy import Weights
from tests.builders import GIB, device, judged, mig, weighed


def test_a_need_is_rounded_up_and_free_memory_down() -> None:
    almost = weighed(device(memory_bytes=24 * GIB - (GIB >> 5)))
    _, verdicts = judged(str(24 * GIB - (GIB >> 6)), almost)
    lines = explanation_lines(explain(verdicts, Weights()).nearest[0])
    assert lines[1].startswith("  GPU-0: needs 24.0 GiB, 23.9 GiB free, 0.1 GiB short; ")


@pytest.mark.parametrize(("cordoned", "names"), [("M", "it"), ("GPU-7", "its GPU, GPU-7")])
def test_a_cordoned_device_is_shown_with_the_annotation_that_cordons_it(
    cordoned: str, names: str
) -> None:
    _, verdicts = judged("8Gi", weighed(mig("M", 1, parent="GPU-7"), cordoned={cordoned}))
    lines = explanation_lines(explain(verdicts, Weights()).nearest[0])
    assert lines[1] == f"  M: cordoned: annotation headroom.gpu/cordon of the node names {names}"
