"""Checks that a stopping agent restores the device plugin as soon as no bound pod depends on the
agent's choice.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import pytest

from agent.steering.leaving import leave

STALE_AFTER_S = 300.0
#: Seconds that are longer than the maximum duration of a bind.
BIND_S = 15.0


class Ending:
    """A fake of steering. ``answers`` determine whether it may end, and the last answer is
    repeated.
    """

    has_resources = True

    def __init__(self, answers: Sequence[bool | None]) -> None:
        self._answers: Iterator[bool | None] = chain(answers, repeat(answers[-1]))
        self.now_s = 0.0
        self.last_report_s = 0.0
        self.returned: bool | None = None

    @property
    def may_leave(self) -> bool | None:
        return next(self._answers)

    def leave(self) -> None:
        pass

    def stop(self, bring_back: bool = True) -> None:
        self.returned = bring_back

    def report(self) -> None:
        self.last_report_s = self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def end(self) -> None:
        leave(self, self.report, 0.5, STALE_AFTER_S, lambda: self.now_s, self.sleep)


@pytest.mark.parametrize(
    ("answers", "returned", "after_s"),
    [
        pytest.param([True], True, 0.0, id="no unconfirmed pod"),
        pytest.param([False, False, True], True, 1.0, id="confirmed soon"),
        pytest.param([False], False, 6.0, id="never confirmed"),
        pytest.param([None, None, True], True, 1.0, id="a short outage"),
        pytest.param([None] * 20 + [False, False, True], True, 13.5, id="a longer outage"),
        pytest.param([None] * 20 + [False], False, 19.0, id="a longer outage, never confirmed"),
    ],
)
def test_the_plugin_is_restored_only_when_no_pod_depends_on_the_agent(
    answers: Sequence[bool | None], returned: bool, after_s: float
) -> None:
    ending = Ending(answers)
    ending.end()
    assert ending.returned is returned
    assert ending.now_s == pytest.approx(after_s)


def test_an_agent_without_the_ledger_waits_until_no_extender_uses_its_node() -> None:
    ending = Ending([None])
    ending.end()
    assert ending.returned
    waited_s = ending.now_s - ending.last_report_s
    assert STALE_AFTER_S + BIND_S <= waited_s <= STALE_AFTER_S + BIND_S + 1.0


def test_an_agent_that_does_not_steer_ends_at_once() -> None:
    ending = Ending([None])
    ending.has_resources = False
    ending.end()
    assert ending.now_s == 0.0
    assert ending.returned
