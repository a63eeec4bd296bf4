"""The CA of the cluster's clients: kept while nobody answers, dropped when there is none."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import cast

import pytest
from structlog.testing import capture_logs

from extender.errors import BadSettings
from extender.kubeapi import ApiError, ApiStatus, KubeApi, NoAnswer
from extender.wiring.clients import ClientCa


class Server:
    def __init__(self, answers: Sequence[str | ApiError]) -> None:
        self._answers = list(answers)

    def call(self, method: str, path: str) -> bytes:
        assert (method, path.rpartition("/")[2]) == ("GET", "extension-apiserver-authentication")
        answer = self._answers.pop(0)
        if isinstance(answer, ApiError):
            raise answer
        return answer.encode()


def rounds(answers: Sequence[str | ApiError], know: Callable[[str | None], None]) -> None:
    kept = ClientCa(cast(KubeApi, Server(answers)), know)

    async def all_rounds() -> None:
        for _ in answers:
            await kept.once()

    asyncio.run(all_rounds())


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
    answers: list[str | ApiError], known: list[str | None]
) -> None:
    told: list[str | None] = []

    def know(ca: str | None) -> None:
        told.append(ca)
        if ca == "no PEM":
            raise BadSettings(ca)

    rounds(answers, know)
    assert told == known


def test_only_a_ca_that_is_not_known_is_said_to_be_unknown() -> None:
    lost, forbidden = NoAnswer("lost"), ApiStatus("GET", 403, "")
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
