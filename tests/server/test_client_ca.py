"""Checks that the CA of client certificates is kept if the API server does not answer, and dropped
if it is unpublished.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from structlog.testing import capture_logs

from headroom.errors import BadSettings
from headroom.runtime.kube.client import KubeApi
from headroom.runtime.server.client_ca import ClientCa
from tests.scripted import Answer, Exchange, scripted_server


def published(ca: str) -> Answer:
    return partial(Exchange.reply, status=200, body={"data": {"client-ca-file": ca}})


def rejected(status: int) -> Answer:
    return partial(Exchange.reply, status=status, body={})


def lost(exchange: Exchange) -> None:
    """Close the connection without a response."""


CUT_OFF = partial(Exchange.reply, status=200, body=b"{")
NO_CA = partial(Exchange.reply, status=200, body={"data": {}})


def rounds(answers: Sequence[Answer], know: Callable[[str | None], None]) -> None:
    """Run a round with each of these responses."""

    async def all_rounds(api: KubeApi) -> None:
        kept = ClientCa(api, know)
        for _ in answers:
            await kept.once()

    with scripted_server(*answers) as server:
        api = KubeApi(server.configuration())
        try:
            asyncio.run(all_rounds(api))
        finally:
            api.close()
    assert {(each.method, each.path.rpartition("/")[2]) for each in server.requests} == {
        ("GET", "extension-apiserver-authentication")
    }
    assert len(server.requests) == len(answers)


@pytest.mark.parametrize(
    ("answers", "known"),
    [
        pytest.param([published("a"), published("b")], ["a", "b"], id="renewed"),
        pytest.param([published("a"), lost], ["a", "a"], id="no answer"),
        pytest.param([published("a"), rejected(500)], ["a", "a"], id="broken"),
        pytest.param([published("a"), rejected(403)], ["a", None], id="forbidden"),
        pytest.param([published("a"), rejected(404)], ["a", None], id="none"),
        pytest.param([published("a"), NO_CA], ["a", None], id="no client certificates"),
        pytest.param([CUT_OFF, published("a")], [None, "a"], id="cut off, then whole"),
        pytest.param([lost, published("a")], [None, "a"], id="late"),
        pytest.param([published("no PEM"), published("a")], ["no PEM", "a"], id="unusable"),
    ],
)
def test_the_ca_is_kept_or_dropped_after_each_response(
    answers: list[Answer], known: list[str | None]
) -> None:
    shown: list[str | None] = []

    def know(ca: str | None) -> None:
        shown.append(ca)
        if ca == "no PEM":
            raise BadSettings(ca)

    rounds(answers, know)
    assert shown == known


def test_a_missing_ca_is_logged_differently_from_a_kept_one() -> None:
    forbidden = rejected(403)
    answers = [lost, lost, published("a"), lost, lost, published("a"), forbidden]
    with capture_logs() as logged:
        rounds(answers, lambda ca: None)
    assert [line["event"] for line in logged] == [
        "client_ca_unknown",
        "client_ca_known",
        "client_ca_not_renewed",
        "client_ca_known",
        "client_ca_unknown",
    ]
