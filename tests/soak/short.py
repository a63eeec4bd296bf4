"""A short day of churn, with few objects."""

import pytest

from tests.controlplane import built
from tests.soak.__main__ import run_day
from tests.soak.day import Amounts
from tests.soak.judge import findings, table
from tests.soak.site import running

HOURS = 12
#: Few objects with long strings, so that a process that keeps them grows by several MiB.
SHORT = Amounts(
    nodes=3, owners=1, pods=2, agent_pods=1, agent_steps=4, requests=5, text_bytes=20_000
)


def growing(request: pytest.FixtureRequest, *altered: str) -> set[str]:
    """Run the day. Return the names of the processes that grow with history.

    ``altered`` are components that get a second process with a mutant.
    """
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with (
        capture.global_and_fixture_disabled()
    ):  # Show the progress, because the first build takes minutes.
        built("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
    # Limit the journal, so that it is full after an hour.
    with running(nodes=400, altered=altered, settings={"journal_decisions": 20}) as site:
        run_day(site, SHORT, HOURS)
        for line in table(site.memory, site.limits):
            request.node.user_properties.append(("measured", line))
        found = findings(site.memory, site.limits)
        # The inputs have arrived.
        calls = HOURS * (SHORT.requests + 2 * SHORT.nodes)
        assert site.answered("extender verbs", 200) == calls
        assert site.answered("webhook", 200) == 2 * HOURS * SHORT.requests
        assert site.answered("console", 200) >= HOURS * SHORT.requests
        for name in ("extender", "console", "recorder", "agent metrics"):
            assert site.answered(name, 401), f"{name} rejected no token"
        assert all(site.wires[name].done["cut"] >= HOURS for name in site.names)
    return {line.partition(":")[0] for line in found}
