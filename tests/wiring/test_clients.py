"""The CA of the cluster's clients: kept while nobody answers, dropped when there is none."""

import asyncio
import json
from collections.abc import Sequence
from typing import cast

import pytest
from structlog.testing import capture_logs

from extender.errors import BadSettings
from extender.kubeapi import ApiError, ApiStatus, KubeApi, NoAnswer
from extender.wiring import clients
from extender.wiring.clients import keep_client_ca


class Ended(Exception):
    """There is nothing more to answer."""


class Server:
    def __init__(self, answers: Sequence[str | ApiError]) -> None:
        self._answers = list(answers)

    def call(self, method: str, path: str) -> bytes:
        assert (method, path.rpartition("/")[2]) == ("GET", "extension-apiserver-authentication")
        if not self._answers:
            raise Ended
        answer = self._answers.pop(0)
        if isinstance(answer, ApiError):
            raise answer
        return answer.encode()


def published(ca: str) -> str:
    return json.dumps({"data": {"client-ca-file": ca}})


@pytest.mark.parametrize(
    ("answers", "known"),
    [
        pytest.param([published("a"), published("b")], ["a", "b"], id="renewed"),
        pytest.param([published("a"), NoAnswer("lost")], ["a", "a"], id="no answer"),
        pytest.param([published("a"), ApiStatus("GET", 500, "")], ["a", "a"], id="broken"),
        pytest.param([published("a"), ApiStatus("GET", 403, "")], ["a", None], id="forbidden"),
        pytest.param([published("a"), ApiStatus("GET", 404, "")], ["a", None], id="none"),
        pytest.param([published("a"), '{"data": {}}'], ["a", None], id="no client certificates"),
        pytest.param(["{", published("a")], [None, "a"], id="cut off, then whole"),
        pytest.param([NoAnswer("lost"), published("a")], [None, "a"], id="late"),
        pytest.param([published("no PEM"), published("a")], ["no PEM", "a"], id="unusable"),
    ],
)
def test_what_is_known_after_each_answer(
    answers: list[str | ApiError], known: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "REFRESH_S", 0)
    monkeypatch.setattr(clients, "RETRY_S", 0)
    told: list[str | None] = []

    def know(ca: str | None) -> None:
        told.append(ca)
        if ca == "no PEM":
            raise BadSettings(ca)

    with pytest.raises(Ended):
        asyncio.run(keep_client_ca(cast(KubeApi, Server(answers)), know))
    assert told == known


def test_only_a_ca_that_is_not_known_is_said_to_be_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clients, "REFRESH_S", 0)
    monkeypatch.setattr(clients, "RETRY_S", 0)
    lost, forbidden = NoAnswer("lost"), ApiStatus("GET", 403, "")
    answers = [lost, lost, published("a"), lost, lost, published("a"), forbidden]
    with capture_logs() as logged, pytest.raises(Ended):
        asyncio.run(keep_client_ca(cast(KubeApi, Server(answers)), lambda ca: None))
    assert [line["event"] for line in logged] == [
        "client_ca_unknown",
        "client_ca_known",
        "client_ca_not_renewed",
        "client_ca_known",
        "client_ca_unknown",
    ]
