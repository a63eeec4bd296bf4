"""Checks that a replica without a view of the cluster reports that, and decides nothing."""

import asyncio
import time

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from extender.extender import Extender
from extender.ledger.embedded_store import AsyncStore, EmbeddedStore
from headroom.console.views.process import source_views
from headroom.runtime.kube.readiness import unready
from headroom.runtime.kube.reflector import DEFAULT_PACE
from headroom.runtime.kube.resources import Health
from headroom.runtime.settings.settings import Settings
from tests.serving import binding, offer, pod

BLIND = "Headroom has had no contact with the API server for too long to decide"


def health(kind: str = "pods", synced: bool = True, age_s: float | None = 1.0) -> Health:
    return Health(kind, synced, age_s, reconnects=0, lists=1, unreadable=0)


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        pytest.param([health()], "", id="ready"),
        pytest.param([health(age_s=90.0)], "", id="quiet cluster"),
        pytest.param([health(), health("nodes", age_s=90.1)], BLIND, id="one kind without contact"),
        pytest.param([health(age_s=None)], BLIND, id="no contact yet"),
        pytest.param(
            [health(), health("poddisruptionbudgets", synced=False, age_s=None)],
            "",
            id="budgets never listed",
        ),
        pytest.param(
            [health(synced=False, age_s=None), health(age_s=500.0)],
            "Headroom has not yet listed: pods",
            id="not listed",
        ),
    ],
)
def test_an_unready_replica_reports_what_is_missing(seen: list[Health], says: str) -> None:
    assert unready(seen, 90.0) == says


def test_the_sentence_stays_the_same_while_the_cause_lasts() -> None:
    assert len({unready([health(age_s=s)], 90.0) for s in (91.0, 3600.0, 1e9)}) == 1


def test_a_quiet_cluster_does_not_count_as_lost_contact() -> None:
    """When nothing happens, watches end and are opened again, which counts as contact."""
    assert Settings().blind_after_s > DEFAULT_PACE.watch_s + DEFAULT_PACE.grace_s


def test_an_unready_replica_answers_filter_and_bind_with_that_sentence_until_it_recovers() -> None:
    async def play() -> None:
        message = ""
        extender = Extender(Settings(), unready=lambda: message)
        server = EmbeddedStore(extender.deliver, time.monotonic)
        transport = httpx.ASGITransport(extender.app())
        debug = httpx.AsyncClient(transport=transport, base_url="http://debug")
        verbs = extender.verbs(extender.open_ledger(AsyncStore(server)))
        asked = msgspec.json.encode(offer(pod("p", "1Gi"), "n"))
        wanted = msgspec.json.encode(binding(pod("p", "1Gi"), "n"))

        message = BLIND
        assert msgspec.json.decode(verbs.filter(asked))["Error"] == BLIND
        assert msgspec.json.decode(await verbs.bind(wanted))["Error"] == BLIND
        answer = await debug.get("/readyz")
        assert (answer.status_code, answer.text) == (503, f"{BLIND}\n")

        message = ""
        assert not msgspec.json.decode(verbs.filter(asked))["Error"]
        assert msgspec.json.decode(await verbs.bind(wanted))["Error"] != BLIND
        assert (await debug.get("/readyz")).status_code == 200

    with capture_logs():
        asyncio.run(play())


def test_the_health_of_watches_is_reported() -> None:
    listed, unheard = Health("pods", True, 1.23456, 2, 3, 4), Health("nodes", False, None, 0, 0, 0)
    pods, nodes = source_views([listed, unheard])
    assert (pods.kind, pods.synced, pods.contact_age_s) == ("pods", True, 1.235)
    assert (pods.reconnects, pods.lists, pods.unreadable) == (2, 3, 4)
    assert (nodes.synced, nodes.contact_age_s) == (False, None)
