"""What the API server says of a token and of a right, and what is no answer at all."""

import json
from typing import Any, cast

import pytest

from extender.kubeapi import ApiError, ApiStatus, KubeApi, NoAnswer
from extender.kubereviews import KubeReviews
from extender.web.auth import GetPod, ReadPath, ReviewFailed
from extender.web.certificates import User

TOLD = {"username": "ann", "uid": "u1", "groups": ["dev"], "extra": {"scopes": ["a"]}}
ANN = User("ann", "u1", ("dev",), {"scopes": ["a"]})


class Server:
    def __init__(self, answer: dict[str, Any] | bytes | ApiError) -> None:
        self._answer = answer
        self.spec: Any = None

    def call(self, method: str, path: str, *, body: bytes) -> bytes:
        assert (method, path.rpartition("/")[2]) in (
            ("POST", "tokenreviews"),
            ("POST", "subjectaccessreviews"),
        )
        self.spec = json.loads(body)["spec"]
        if isinstance(self._answer, ApiError):
            raise self._answer
        return (
            self._answer if isinstance(self._answer, bytes) else json.dumps(self._answer).encode()
        )


def reviews(server: Server) -> KubeReviews:
    return KubeReviews(cast(KubeApi, server))


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
def test_whose_a_token_is(status: dict[str, Any], user: User | None) -> None:
    server = Server({"status": status})
    assert reviews(server).who("secret") == user
    assert server.spec == {"token": "secret"}


@pytest.mark.parametrize(
    ("status", "allowed"),
    [({"allowed": True}, True), ({"allowed": False}, False), ({}, False),
     ({"allowed": True, "denied": True}, False)],
)  # fmt: skip
def test_what_somebody_may(status: dict[str, Any], allowed: bool) -> None:
    server = Server({"status": status})
    assert reviews(server).may(ANN, GetPod("ml", "p")) is allowed
    who = {"user": "ann", "uid": "u1", "groups": ["dev"], "extra": {"scopes": ["a"]}}
    pod = {"verb": "get", "version": "v1", "resource": "pods", "namespace": "ml", "name": "p"}
    assert server.spec == who | {"resourceAttributes": pod}
    reviews(server).may(ANN, ReadPath("get", "/v1/nodes"))
    path = {"verb": "get", "path": "/v1/nodes"}
    assert server.spec == who | {"nonResourceAttributes": path}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        pytest.param(ApiStatus("POST", 403, "no"), "create no TokenReview", id="no right to ask"),
        pytest.param(ApiStatus("POST", 500, "x"), "answers 500 to a TokenReview", id="broken"),
        pytest.param(NoAnswer("lost"), "did not answer a TokenReview", id="silent"),
        pytest.param(b"{", "did not answer a TokenReview", id="cut off"),
        pytest.param(b'{"status": 1}', "did not answer a TokenReview", id="something else"),
    ],
)
def test_what_is_no_answer_lets_nobody_in(answer: ApiError | bytes, says: str) -> None:
    with pytest.raises(ReviewFailed, match=says):
        reviews(Server(answer)).who("secret")
