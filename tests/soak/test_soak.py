"""A short day of churn, in which no process may grow with history; ``make soak`` runs a long one.

A second process of most parts keeps what it should forget, and gets the same inputs. So the same
run shows that the judge notices.
"""

import pytest

from tests.controlplane import built
from tests.soak.__main__ import run_day
from tests.soak.day import Amounts
from tests.soak.judge import findings, table
from tests.soak.site import ALTERED, running
from tests.soak.started import MUTANTS

pytestmark = pytest.mark.slow

HOURS = 12
#: Few objects, with long texts of their authors: what keeps them grows by MiB.
SHORT = Amounts(
    nodes=3, owners=1, pods=2, agent_pods=1, agent_steps=4, requests=5, text_bytes=20_000
)


def test_no_process_grows_with_history_and_those_that_keep_it_are_found(
    request: pytest.FixtureRequest,
) -> None:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # the first build takes minutes
        built("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
    # The journal is full after an hour.
    with running(nodes=400, altered=[*MUTANTS], settings={"journal_decisions": 20}) as site:
        run_day(site, SHORT, HOURS)
        for line in table(site.memory, site.limits):
            request.node.user_properties.append(("measured", line))
        found = findings(site.memory, site.limits)
        # The inputs arrived.
        calls = HOURS * (SHORT.requests + 2 * SHORT.nodes)
        assert site.answered("extender verbs", 200) == calls
        assert site.answered("webhook", 200) == 2 * HOURS * SHORT.requests
        assert site.answered("console", 200) >= HOURS * SHORT.requests
        for name in ("extender", "console", "recorder", "agent metrics"):
            assert site.answered(name, 401), f"{name} rejected no token"
        assert all(site.wires[name].done["cut"] >= HOURS for name in site.names)
    assert {line.partition(":")[0] for line in found} == {f"{part}{ALTERED}" for part in MUTANTS}
