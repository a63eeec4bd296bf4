"""The amounts in an explanation do not contradict each other, although they are rounded."""

from extender.placement.explain import explain
from extender.placement.explanation_text import explanation_lines
from extender.placement.policy import Weights
from tests.builders import GIB, device, judged, weighed


def test_a_need_is_rounded_up_and_free_memory_down() -> None:
    almost = weighed(device(memory_bytes=24 * GIB - (GIB >> 5)))
    _, verdicts = judged(str(24 * GIB - (GIB >> 6)), almost)
    lines = explanation_lines(explain(verdicts, Weights()).nearest[0])
    assert lines[1].startswith("  GPU-0: needs 24.0 GiB, 23.9 GiB free, 0.1 GiB short; ")
