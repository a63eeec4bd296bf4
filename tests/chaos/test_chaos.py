"""A short storm with a fixed seed on the real API server. ``make chaos`` runs a long one."""

from pathlib import Path

import pytest

from tests.chaos.__main__ import storm
from tests.chaos.faults import KINDS
from tests.chaos.mutants import MUTANTS, mutated
from tests.chaos.site import SCHEDULERS, Plan
from tests.controlplane import built

pytestmark = pytest.mark.slow

#: Few nodes, and shorter timeouts than by default.
SMALL = Plan(
    seed=10,
    lasts_s=48.0,
    alone_s=12.0,
    every_s=0.75,
    longest_s=5.0,
    settle_s=120.0,
    quiet_s=2.0,
    nodes=6,
    clients=2,
    most_pods=30,
    warm_pods=15,
    admission_s=0.5,
    agent_interval_s=1.0,
    heartbeat_s=3.0,
    settings={"orphan_after_s": 3.0, "stale_after_s": 9.0},
)


def test_after_a_short_storm_nothing_is_lost_and_nothing_was_reserved_twice(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # the first build takes minutes
        built("etcd", "kube-apiserver", *SCHEDULERS)
    findings, counts = storm(SMALL, logs=tmp_path)
    assert not findings
    assert counts["faults"].keys() == {f"{of} {what}" for of in KINDS for what in KINDS[of]}
    assert counts["pods"]["bound"] >= 15
    assert counts["calls"].keys() >= {"filter", "bind"}
    # The proxies did what the faults demand.
    assert counts["requests"]["cut"]
    assert sum(n for what, n in counts["requests"].items() if "answered" in what) > 5
    request.node.user_properties.append(("measured", f"{counts['pods']}"))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_still_of_this_product(name: str) -> None:
    with mutated(name) as code:
        module = code / MUTANTS[name][0]
        compile(module.read_text(), str(module), "exec")
