"""Tests that errors in options are reported before any connection, and that each user has a
session.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import cast
from urllib.parse import parse_qsl, urlsplit

import pytest
import urllib3

from headroom.contract.console import AUDIENCE, HEADER
from headroom.kubectl.debug_api_client import CommandError, DebugApi, Response, Transport
from headroom.kubectl.transport import Proxied, transport_for
from tests.answering import Answer, Request, answering
from tests.certificates import Authority

URL = "https://127.0.0.1:8889"


def token_for(*audiences: str) -> str:
    claims = json.dumps({"aud": audiences}).encode()
    return f"e30.{base64.urlsafe_b64encode(claims).decode().rstrip('=')}.c2ln"


def test_unusable_files_are_reported(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    absent, text = str(tmp_path / "absent"), tmp_path / "text"
    text.write_text("not PEM")
    cases = [
        (URL, absent, f"--certificate-authority: {absent}: "),
        (URL, str(text), f"--certificate-authority: {text}: "),
        ("http://127.0.0.1:8889", str(authority.cert), "does not use TLS; use https"),
        (None, str(authority.cert), "needs --server"),
    ]
    for server, ca, says in cases:
        with pytest.raises(CommandError) as caught:
            transport_for(server, None, ca, None, None, "headroom-system")
        assert says in str(caught.value)
        assert caught.value.exit_code == 2
    transport_for(URL, None, str(authority.cert), None, None, "")


@pytest.mark.parametrize("host", ["10.0.0.7", "console.example", "[fd00::7]", "0.0.0.0"])
@pytest.mark.parametrize("token", [None, token_for(AUDIENCE)])
def test_plain_http_is_accepted_only_for_this_machine(host: str, token: str | None) -> None:
    """Otherwise, other people could read the token and change the responses."""
    with pytest.raises(CommandError, match="is neither encrypted nor on this machine"):
        transport_for(f"http://{host}:8889", token, None, None, None, "headroom-system")
    for own in ("127.0.0.1", "localhost", "[::1]"):
        transport_for(f"http://{own}:8889", token, None, None, None, "headroom-system")
    transport_for(f"https://{host}:8889", token, None, None, None, "headroom-system")


@pytest.mark.parametrize(
    "token",
    [
        pytest.param("opaque", id="opaque token"),
        pytest.param(token_for("https://kubernetes.default.svc"), id="token of the API server"),
        pytest.param(token_for(AUDIENCE, "https://kubernetes.default.svc"), id="token of both"),
        pytest.param(token_for(), id="token without an audience"),
    ],
)
def test_a_token_for_other_servers_is_not_sent(token: str) -> None:
    for server in (URL, "http://127.0.0.1:8889"):
        with pytest.raises(CommandError, match=r"--audience headroom\.gpu/console") as caught:
            transport_for(server, token, None, None, None, "headroom-system")
        assert token not in str(caught.value)


def test_users_of_one_machine_share_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path / "cache"))
    opened_by, used = [], []

    def answer(request: Request) -> Answer:
        """Accept every session, and answer other requests as the console does."""
        if request.method == "POST":
            opened_by.append(request.headers["Authorization"])
            return 201, {}
        used.append(request.headers[HEADER])
        return 200, {}

    with answering(answer) as url:
        for token in ("admin", "tenant", "admin"):
            content = {
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {"token": token}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
            (tmp_path / "kubeconfig").write_text(json.dumps(content))
            transport = Proxied(str(tmp_path / "kubeconfig"), None, "headroom-system")
            with transport.open("GET", "/v1/nodes", None, {}) as response:
                assert response.status == 200
    assert opened_by == ["Bearer admin", "Bearer tenant"]
    first, second, again = used
    assert first == again != second


class Pages:
    """Serves a list of five nodes in pages of two, and records what is requested."""

    name, hint = "pages", ""

    def __init__(self) -> None:
        self.targets: list[str] = []

    @contextmanager
    def open(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Iterator[Response]:
        self.targets.append(target)
        begin = int(dict(parse_qsl(urlsplit(target).query)).get("continue", 0))
        remaining = max(0, 3 - begin)
        answer = {
            "nodes": [{"name": f"n{n}"} for n in range(begin, min(begin + 2, 5))],
            "remaining": remaining,
            "continue": str(begin + 2) if remaining else None,
        }
        yield cast(
            Response,
            urllib3.HTTPResponse(
                BytesIO(json.dumps(answer).encode()), status=200, preload_content=False
            ),
        )


def test_a_list_in_several_pages_is_read_to_its_end() -> None:
    pages = Pages()
    body = DebugApi(cast(Transport, pages)).all_pages("nodes", search="a b")
    assert [each["name"] for each in body["nodes"]] == ["n0", "n1", "n2", "n3", "n4"]
    assert (body["remaining"], body["continue"]) == (0, None)
    assert pages.targets == [
        "/v1/nodes?search=a+b",
        "/v1/nodes?search=a+b&continue=2",
        "/v1/nodes?search=a+b&continue=4",
    ]


class Rejecting:
    """A transport whose debug API rejects every request with one message."""

    name, hint = "debug API", "start it"

    def __init__(self, detail: str) -> None:
        self._detail = detail

    @contextmanager
    def open(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Iterator[Response]:
        answer = BytesIO(json.dumps({"detail": self._detail}).encode())
        yield cast(Response, urllib3.HTTPResponse(answer, status=422, preload_content=False))


@pytest.mark.parametrize(
    ("view", "detail", "shown"),
    [
        (
            "score",
            "query decision: a decision on record has only the ranking; remove query node. "
            "Example: pod=e2e/none&decision=last",
            "--decision: a decision on record has only the ranking; remove --node. "
            "Example: e2e/none --decision last",
        ),
        (
            "score",
            "query against: also name the other node. Example: node=gpu-a&against=gpu-2",
            "--against: also name the other node. Example: --node gpu-a --against gpu-2",
        ),
        (
            "score",
            "decision x about pod e2e/none is unknown or no longer on record; "
            "GET /v1/decisions?pod=e2e/none lists its decisions",
            "decision x about pod e2e/none is unknown or no longer on record; "
            "kubectl headroom decisions --pod e2e/none lists its decisions",
        ),
        (
            "decisions",
            "query since: '5x' is not an age. Example: since=15m or since=2026-11-21",
            "--since: '5x' is not an age. Example: --since 15m or --since 2026-11-21",
        ),
        (
            "decisions",
            "query pod: 'a/b/c' is not namespace/name. Example: pod=default/train-0",
            "--pod: 'a/b/c' is not namespace/name. Example: --pod default/train-0",
        ),
        (
            "defrag",
            "query pod: cannot be combined with query free_node; remove one of them",
            "POD: cannot be combined with --free-node; remove one of them",
        ),
        (
            "capacity",
            "query vram: 'x' names no container. Example: main=8Gi,cache=2Gi",
            "--vram: 'x' names no container. Example: main=8Gi,cache=2Gi",
        ),
        (
            "idle",
            "node a has no report; GET /v1/nodes lists the nodes and the age of their reports",
            "node a has no report; kubectl headroom top lists the nodes and the age of their "
            "reports",
        ),
    ],
)
def test_errors_name_options_and_commands_of_the_plugin(view: str, detail: str, shown: str) -> None:
    with pytest.raises(CommandError) as caught:
        DebugApi(cast(Transport, Rejecting(detail))).get(view)
    assert str(caught.value) == shown
