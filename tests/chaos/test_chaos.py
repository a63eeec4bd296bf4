"""A short storm with a fixed seed on the real API server. ``make chaos`` runs a long one."""

import pytest

from tests.chaos.__main__ import storm
from tests.chaos.faults import KINDS
from tests.chaos.mutants import MUTANTS, mutated
from tests.chaos.site import SCHEDULERS, Scale
from tests.controlplane import built

pytestmark = pytest.mark.slow

#: Few nodes, and shorter timeouts than by default.
SMALL = Scale(
    nodes=6,
    clients=2,
    rate=4.0,
    most_pods=30,
    admission_s=0.5,
    agent_interval_s=1.0,
    heartbeat_s=3.0,
    settings={"orphan_after_s": 3.0, "stale_after_s": 9.0},
)


def test_after_a_short_storm_nothing_is_lost_and_nothing_was_reserved_twice(
    request: pytest.FixtureRequest,
) -> None:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # the first build takes minutes
        built("etcd", "kube-apiserver", *SCHEDULERS)
    message: list[str] = []
    outcome = storm(
        10,
        48.0,
        SMALL,
        message.append,
        every_s=0.75,
        longest_s=5.0,
        settle_s=120.0,
        quiet_s=2.0,
        warm_pods=15,
        alone_s=12.0,
    )
    story = "\n".join([*message, str(outcome)])
    assert not outcome.findings, story
    assert outcome.faults.keys() == KINDS.keys(), story
    assert outcome.tally["bound"] >= 15, story
    assert outcome.calls.keys() >= {"filter", "bind"}, story
    # The proxies did what the faults demand.
    assert outcome.requests["cut"], story
    assert sum(n for what, n in outcome.requests.items() if "answered" in what) > 5, story
    shown = f"settled after {outcome.settled_s} s; {outcome.tally}"
    request.node.user_properties.append(("measured", shown))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_still_of_this_product(name: str) -> None:
    with mutated(name) as code:
        module = code / MUTANTS[name].module
        compile(module.read_text(), str(module), "exec")
