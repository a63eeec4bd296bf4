"""TokenReviews and SubjectAccessReviews: requests, answers and failures."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from extender.console.auth import GetPod, ReadPath, ReviewFailed
from extender.console.reviews import KubeReviews
from extender.kube.client import KubeApi
from extender.server.client_certificates import User
from tests.scripted import Answer, ScriptedServer, scripted_server

ANN = User("ann", "u1", ("dev",), {"scopes": ["a"]})


def says(status: object) -> Answer:
    """Answer with this status and the spec that was asked about."""
    return lambda asked: asked.reply(200, json.loads(asked.body) | {"status": status})


@contextmanager
def reviews(*answers: Answer) -> Iterator[tuple[KubeReviews, ScriptedServer]]:
    with scripted_server(*answers) as server:
        api = KubeApi(server.configuration())
        try:
            yield KubeReviews(api), server
        finally:
            api.close()


def asked(server: ScriptedServer) -> list[tuple[str, str, Any]]:
    return [
        (each.method, each.path.rpartition("/")[2], json.loads(each.body)["spec"])
        for each in server.requests
    ]


@pytest.mark.parametrize(
    ("status", "user"),
    [
        pytest.param(
            {
                "authenticated": True,
                "user": {
                    "username": "ann",
                    "uid": "u1",
                    "groups": ["dev"],
                    "extra": {"scopes": ["a"]},
                },
            },
            ANN,
            id="known",
        ),
        pytest.param({"authenticated": True, "user": {"username": "bob"}}, User("bob"), id="bare"),
        pytest.param({"error": "expired"}, None, id="unknown"),
        pytest.param({"authenticated": False, "user": {"username": "ann"}}, None, id="denied"),
        pytest.param({"authenticated": True}, None, id="without a name"),
    ],
)
def test_the_user_of_a_token(status: dict[str, Any], user: User | None) -> None:
    with reviews(says(status)) as (api_server, server):
        assert api_server.authenticate("secret") == user
        assert asked(server) == [("POST", "tokenreviews", {"token": "secret"})]


@pytest.mark.parametrize(
    ("status", "allowed"),
    [({"allowed": True}, True), ({"allowed": False}, False),
     ({"allowed": True, "denied": True}, False)],
)  # fmt: skip
def test_a_subject_access_review_is_sent_for_each_permission(
    status: dict[str, Any], allowed: bool
) -> None:
    who = {"user": "ann", "uid": "u1", "groups": ["dev"], "extra": {"scopes": ["a"]}}
    pod = {"verb": "get", "version": "v1", "resource": "pods", "namespace": "ml", "name": "p"}
    path = {"verb": "get", "path": "/v1/nodes"}
    with reviews(says(status), says(status)) as (api_server, server):
        assert api_server.authorize(ANN, GetPod("ml", "p")) is allowed
        assert api_server.authorize(ANN, ReadPath("get", "/v1/nodes")) is allowed
        assert asked(server) == [
            ("POST", "subjectaccessreviews", who | {"resourceAttributes": pod}),
            ("POST", "subjectaccessreviews", who | {"nonResourceAttributes": path}),
        ]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        pytest.param(
            lambda asked: asked.reply(403, {}), "may not create a TokenReview", id="no right to ask"
        ),
        pytest.param(
            lambda asked: asked.reply(500, {}), "answered 500 to a TokenReview", id="broken"
        ),
        pytest.param(
            lambda asked: asked.reply(429, {}, Retry_After="0"),
            "answered 429 to a TokenReview",
            id="too many",
        ),
        pytest.param(lambda asked: None, "did not answer a TokenReview", id="silent"),
        pytest.param(
            lambda asked: asked.reply(200, b"{"), "did not answer a TokenReview", id="cut off"
        ),
        pytest.param(says(1), "did not answer a TokenReview", id="something else"),
    ],
)
def test_a_failed_review_permits_nothing(answer: Answer, why: str) -> None:
    with reviews(answer) as (api_server, server):
        with pytest.raises(ReviewFailed, match=why):
            api_server.authenticate("secret")
        assert len(server.requests) == 1, "asked again"
