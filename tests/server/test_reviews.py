"""Tests the requests, responses and failures of the reviews with which a console checks a
reader.
"""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headroom.contract.console import AUDIENCE, csr_name
from headroom.runtime.kube.client import KubeApi
from headroom.runtime.server.auth import GetPod, ReadPath, ReviewFailed, User
from headroom.runtime.server.reviews import KubeReviews
from tests.scripted import Answer, ScriptedServer, scripted_server

ANN = User("ann", "u1", ("dev",), {"scopes": ["a"]})
SECRET = "s" * 43
#: 2026-11-20T12:00:00Z in seconds since 1970.
NOW_S = 1795176000.0
#: The fields about the creator that the API server writes into a request.
OF_ANN = {"username": "ann", "uid": "u1", "groups": ["dev"], "extra": {"scopes": ["a"]}}


def says(status: object) -> Answer:
    """Return a handler that answers a review with this status and the review's spec."""
    return lambda asked: asked.reply(200, json.loads(asked.body) | {"status": status})


@contextmanager
def reviews(*answers: Answer) -> Iterator[tuple[KubeReviews, ScriptedServer]]:
    with scripted_server(*answers) as server:
        api = KubeApi(server.configuration())
        try:
            yield KubeReviews(api, lambda: NOW_S), server
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
        pytest.param(
            {"authenticated": True, "user": {"username": "bob"}}, User("bob"), id="only a name"
        ),
        pytest.param({"error": "expired"}, None, id="unknown"),
        pytest.param({"authenticated": False, "user": {"username": "ann"}}, None, id="denied"),
        pytest.param({"authenticated": True}, None, id="without a name"),
    ],
)
def test_a_token_review_returns_the_user(status: dict[str, Any], user: User | None) -> None:
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
            lambda asked: asked.reply(403, {}),
            "may not create a TokenReview",
            id="no permission to review",
        ),
        pytest.param(
            lambda asked: asked.reply(500, {}), "answered 500 to a TokenReview", id="server error"
        ),
        pytest.param(
            lambda asked: asked.reply(429, {}, Retry_After="0"),
            "answered 429 to a TokenReview",
            id="too many",
        ),
        pytest.param(lambda asked: None, "did not answer a TokenReview", id="no answer"),
        pytest.param(
            lambda asked: asked.reply(200, b"{"),
            "did not answer a TokenReview",
            id="truncated response",
        ),
        pytest.param(says(1), "did not answer a TokenReview", id="another object"),
    ],
)
def test_a_failed_review_permits_nothing(answer: Answer, why: str) -> None:
    with reviews(answer) as (api_server, server):
        with pytest.raises(ReviewFailed, match=why):
            api_server.authenticate("secret")
        assert len(server.requests) == 1, "asked again"


def jwt(aud: object) -> str:
    claims = base64.urlsafe_b64encode(json.dumps({"aud": aud}).encode()).decode().rstrip("=")
    return f"e30.{claims}.c2ln"


@pytest.mark.parametrize(
    ("token", "only"),
    [
        pytest.param(jwt([AUDIENCE]), [AUDIENCE], id="our audience"),
        pytest.param(jwt(AUDIENCE), [AUDIENCE], id="audience as text"),
        pytest.param(
            jwt(["https://kubernetes.default.svc"]), None, id="audience of the API server"
        ),
        *(
            pytest.param(jwt(odd), None, id=f"odd: {odd}")
            for odd in (None, 7, {}, [], [7], "", [None])
        ),
        *(
            pytest.param(odd, None, id=f"no JWT: {odd}")
            for odd in ("opaque", "a.b.c", "..", "a.W10.c", "a." + "W" * 9999 + ".c", "ü.ü.ü")
        ),
    ],
)
def test_a_token_for_the_debug_api_is_reviewed_for_its_audience(
    token: str, only: list[str] | None
) -> None:
    with reviews(says({"authenticated": True, "user": {"username": "bob"}})) as (api, server):
        assert api.authenticate(token) == User("bob")
        spec = {"token": token} | ({"audiences": only} if only else {})
        assert asked(server) == [("POST", "tokenreviews", spec)]


def session(
    spec: dict[str, Any] = OF_ANN,
    created: str = "2026-11-20T11:30:00Z",
    signer: str = "headroom.gpu/console",
    **status: Any,
) -> Answer:
    csr = {
        "metadata": {"name": "n", "creationTimestamp": created, "managedFields": []},
        "spec": {"request": "LS0=", "signerName": signer, "usages": ["client auth"], **spec},
        "status": status,
    }
    return lambda asked: asked.reply(200, csr)


@pytest.mark.parametrize(
    ("answer", "user"),
    [
        pytest.param(session(), ANN, id="pending"),
        pytest.param(session(conditions=[{"type": "Approved"}]), ANN, id="approved"),
        pytest.param(session({"username": "bob"}), User("bob"), id="only a name"),
        pytest.param(session(created="2026-11-20T12:00:09Z"), ANN, id="a clock ahead of ours"),
        pytest.param(session(created="2026-11-20T10:59:59Z"), None, id="an hour old"),
        pytest.param(session(conditions=[{"type": "Denied"}]), None, id="denied"),
        pytest.param(session(conditions=[{"type": "Failed"}]), None, id="failed"),
        pytest.param(session({}), None, id="without a name"),
        pytest.param(
            session(signer="kubernetes.io/kube-apiserver-client"), None, id="another signer"
        ),
        pytest.param(lambda asked: asked.reply(404, {}), None, id="unknown or deleted"),
    ],
)
def test_the_user_of_a_session_is_the_creator_of_its_request(
    answer: Answer, user: User | None
) -> None:
    with reviews(answer) as (api, server):
        assert api.creator(SECRET) == user
        ((method, path),) = [(each.method, each.path) for each in server.requests]
        assert method == "GET"
        assert path.endswith(f"/v1/certificatesigningrequests/{csr_name(SECRET)}")
        assert SECRET not in path


@pytest.mark.parametrize(
    "secret", ["", "short", "s" * 42 + "/", "s" * 44, "s" * 42 + "\n", "é" * 43]
)
def test_an_impossible_secret_is_not_looked_up(secret: str) -> None:
    with reviews() as (api, server):
        assert api.creator(secret) is None
        assert not server.requests


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        pytest.param(
            lambda asked: asked.reply(403, {}),
            "may not get a CertificateSigning",
            id="no permission",
        ),
        pytest.param(
            lambda asked: asked.reply(500, {}), "answered 500 to a Certificate", id="server error"
        ),
        pytest.param(lambda asked: None, "did not answer", id="no answer"),
        pytest.param(
            lambda asked: asked.reply(200, b"{"), "cannot be read", id="truncated response"
        ),
        pytest.param(lambda asked: asked.reply(200, {}), "cannot be read", id="another object"),
        pytest.param(session({"groups": "all"}), "cannot be read", id="odd groups"),
    ],
)
def test_an_unreadable_certificate_request_permits_nothing(answer: Answer, why: str) -> None:
    with reviews(answer) as (api, server):
        with pytest.raises(ReviewFailed, match=why):
            api.creator(SECRET)
        assert len(server.requests) == 1, "asked again"
