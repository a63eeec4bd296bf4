"""Tests the user of a client certificate, and the requests that it authenticates."""

import asyncio

import pytest
from fastapi.security import HTTPAuthorizationCredentials
from starlette.exceptions import HTTPException
from starlette.requests import Request

from headroom.runtime.server.auth import Guard, Permission, ReadPath
from headroom.runtime.server.client_certificates import PEER, Certificate, Peer, User, user_of

NODES = ReadPath("get", "/v1/nodes")
SHA256 = "ab" * 32
EXTRA = {"authentication.kubernetes.io/credential-id": [f"X509SHA256={SHA256}"]}
ANN = User("ann", groups=("dev", "system:authenticated"), extra=EXTRA)
NOW_S = 1000.0


@pytest.mark.parametrize(
    ("subject", "user"),
    [
        pytest.param(
            [[("organizationName", "dev")], [("commonName", "ann")]], ANN, id="a user of a group"
        ),
        pytest.param(
            [[("organizationName", "a"), ("organizationName", "b")], [("commonName", "c")]],
            User("c", groups=("a", "b", "system:authenticated"), extra=EXTRA),
            id="two groups in one part",
        ),
        pytest.param(
            [[("commonName", "first")], [("commonName", "last")]],
            User("last", groups=("system:authenticated",), extra=EXTRA),
            id="the last name counts, as in Go",
        ),
        pytest.param([[("organizationName", "dev")]], None, id="nobody"),
        pytest.param([[("commonName", "")]], None, id="an empty name"),
    ],
)
def test_the_subject_contains_user_and_groups(
    subject: list[list[tuple[str, str]]], user: User | None
) -> None:
    assert user_of(subject, SHA256) == user


class Reviews:
    """Accepts no token, and lets ann see the nodes."""

    def authenticate(self, token: str) -> User | None:
        return None

    def authorize(self, user: User, permission: Permission) -> bool:
        return (user, permission) == (ANN, NODES)


def status(peer: Peer | None, token: str = "", path: str = "/v1/nodes") -> tuple[int, str]:
    headers = [(b"x-remote-user", b"ann"), (b"headroom.peer", b"ann")]
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}
    scope |= {"path_params": {}, "server": ("debug", 80), "scheme": "https"}
    if peer is not None:
        scope[PEER] = peer
    shown = HTTPAuthorizationCredentials(scheme="Bearer", credentials=token) if token else None
    guard = Guard(Reviews(), lambda: 0.0, wall_s=lambda: NOW_S)
    try:
        asyncio.run(guard.check(Request(scope), shown))
    except HTTPException as err:
        return err.status_code, str(err.detail)
    return 200, ""


def held_by(user: User | None, not_after_s: float = NOW_S + 1) -> Peer:
    return Peer(True, Certificate(user, not_after_s, SHA256))


def test_a_client_with_a_certificate_acts_as_its_user() -> None:
    assert status(held_by(ANN)) == (200, "")
    assert status(held_by(User("bob")))[0] == 403
    assert status(held_by(ANN), path="/v1/drift")[0] == 403


@pytest.mark.parametrize(
    ("peer", "token", "says"),
    [
        pytest.param(None, "", "need a TLS port (settings debug_tls_cert", id="no TLS"),
        pytest.param(Peer(False, None), "", "see client_ca_unknown in the log", id="no CA"),
        pytest.param(Peer(True, None), "", "neither a token nor a client certificate", id="none"),
        pytest.param(held_by(None), "", "has no common name", id="nobody's"),
        pytest.param(held_by(ANN, NOW_S - 1), "", "has expired", id="expired"),
        pytest.param(
            held_by(ANN), "unknown-user", "does not accept this token", id="a token first"
        ),
    ],
)
def test_a_certificate_without_a_user_is_rejected_with_the_reason(
    peer: Peer | None, token: str, says: str
) -> None:
    code, detail = status(peer, token)
    assert code == 401
    assert says in detail
    assert "Bearer $(kubectl create token" in detail
