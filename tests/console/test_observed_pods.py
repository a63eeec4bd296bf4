"""Tests that no message reports a pod as unable to run while the mode is observe, because Headroom
then passes the pod on all nodes.
"""

import json

import pytest

from headroom.contract.decision import decision_id
from headroom.contract.reasons import Reason
from headroom.core.journal.journal import Decision
from headroom.kubectl.why import why
from tests.console.asking import WALL_S, Asked
from tests.console.explained import WAITS, asked, node


@pytest.fixture
def observing() -> Asked:
    """Return a fleet in mode observe that passed the pod, which fits on no node."""
    fleet = asked(*node("a", whole=20), *node("b", full=20))
    view = fleet.context.settings()
    object.__setattr__(
        fleet.context, "settings", lambda: view.model_copy(update={"mode": "observe"})
    )
    which = decision_id(WAITS.metadata.uid, WAITS.metadata.resource_version)
    rejected = {Reason.MEMORY_ON_ANY: 2}
    fleet.journal.record(
        Decision(WAITS, which, WALL_S, 7, offered=2, fits=0, rejected=rejected, observed=True)
    )
    return fleet


CANNOT = ("no node can take", "cannot take", "could take", "0 of 2 nodes fit", "it retries")


def test_why_says_that_the_pod_passed_and_what_enforce_would_do(observing: Asked) -> None:
    lines = why(observing.get("/v1/explain?pod=default/waits").json())
    assert lines[0] == (
        "Pod default/waits: Headroom passes the pod, because it only observes; mode enforce would "
        "keep it waiting"
    )
    assert "Nodes that mode enforce would reject" in lines
    assert (
        "kube-scheduler offered 2 nodes, of which all passed, because Headroom only observes; mode "
        "enforce would pass none"
    ) in lines
    (filtered,) = (line for line in lines if "filter:" in line)
    assert filtered.startswith(
        "  filter: all of 2 nodes passed in mode observe (mode enforce would pass 0), in "
    )
    assert not [line for line in lines if any(text in line for text in CANNOT)]


@pytest.mark.parametrize("path", ["/v1/pending", "/v1/timeline?pod=default/waits"])
def test_lists_do_not_say_that_it_cannot_run(observing: Asked, path: str) -> None:
    body = json.dumps(observing.get(path).json())
    assert "mode enforce would" in body
    assert not [text for text in CANNOT if text in body]
