"""Any replica answers for all: what its peers know is asked for, in a moment or not at all."""

import contextlib
import http.server
import json
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from extender.wiring.peers import Peers
from tests.certificates import Authority
from tests.serving import Server, binding, offer, pod, serving

FLEET = """
nodes:
  - {name: a, gpus: 1, memory: 24Gi, sharing: time-slicing, replicas: 4}
  - {name: b, gpus: 1, memory: 24Gi, sharing: time-slicing, replicas: 4}
"""
PATIENCE_S = 20.0


class Peer(http.server.BaseHTTPRequestHandler):
    """Answers with what it was asked; /slow never, until it is let go."""

    let_go = threading.Event()

    def do_GET(self) -> None:
        if self.path.startswith("/slow"):
            self.let_go.wait(PATIENCE_S)
        status = {"/unknown": 404, "/broken": 500, "/needs-a-token": 401}.get(self.path, 200)
        body = json.dumps([self.path, self.headers["Authorization"]]).encode()
        self.send_response(status)
        self.send_header("Headroom-Replica", "peer")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def peer() -> Iterator[str]:
    Peer.let_go.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Peer) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        Peer.let_go.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def over_tls(peer: str, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A peer that speaks TLS, and the file of its certificate."""
    signed = Authority(tmp_path, "ca").sign("replica")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(signed.cert, signed.key)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Peer) as server:
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}", signed.cert
        server.shutdown()
        thread.join()


def test_over_tls_a_peer_shows_the_certificate_that_we_show(
    over_tls: tuple[str, Path], tmp_path: Path
) -> None:
    place, cert = over_tls
    (answer,) = Peers([place], 1, PATIENCE_S, "me", cert).ask("/v1/x", "Bearer token")
    assert json.loads(answer.body or b"") == ["/v1/x", "Bearer token"]
    # Who shows another one is not sent the token.
    other = tmp_path / "another.crt"
    other.write_bytes(Authority(tmp_path, "another").sign("replica-of-another").cert.read_bytes())
    (answer,) = Peers([place], 1, PATIENCE_S, "me", other).ask("/v1/x", "Bearer token")
    assert answer.body is None
    assert "certificate verify failed" in answer.trouble


def test_a_peer_that_needs_a_token_is_named_with_that(peer: str) -> None:
    (answer,) = Peers([peer], 1, PATIENCE_S, "me").ask("/needs-a-token", None)
    assert (answer.body, answer.trouble) == (
        None,
        "it needs a token: a client certificate is not passed on",
    )


def nobody_there() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_a_peer_is_asked_with_the_credentials_of_the_caller(peer: str) -> None:
    (answer,) = Peers([peer], 1, PATIENCE_S, "me").ask("/v1/x?a=b", "Bearer token")
    assert (answer.peer, json.loads(answer.body or b"")) == (peer, ["/v1/x?a=b", "Bearer token"])
    (answer,) = Peers([peer], 1, PATIENCE_S, "me").ask("/v1/x", None)
    assert json.loads(answer.body or b"") == ["/v1/x", None]


def test_who_does_not_answer_is_named_and_keeps_nobody_else_out(peer: str) -> None:
    gone = nobody_there()
    answers = Peers([gone, peer, "no.such.name.invalid"], 1, PATIENCE_S, "me").ask("/x", None)
    told = {answer.peer: (answer.body is None, answer.trouble) for answer in answers}
    assert told[peer] == (False, "")
    assert told[gone][0]
    assert "refused" in told[gone][1]
    assert "was not resolved" in told["no.such.name.invalid"][1]


def test_nobody_is_waited_for_longer_than_said(peer: str) -> None:
    (answer,) = Peers([peer], 1, 0.2, "me").ask("/slow", None)
    assert (answer.body, answer.trouble in ("no answer within 0.2 s", "timed out")) == (None, True)


def test_not_found_is_an_answer_and_a_fault_is_none(peer: str) -> None:
    peers = Peers([peer], 1, PATIENCE_S, "me")
    (unknown,), (broken,) = peers.ask("/unknown", None), peers.ask("/broken", None)
    assert (unknown.body, broken.body) == (b"", None)
    assert "500" in broken.trouble


def test_a_replica_finds_itself_among_its_peers_and_asks_itself_no_more(peer: str) -> None:
    peers = Peers([peer], 1, PATIENCE_S, "peer")
    assert peers.ask("/x", None) == []
    Peer.let_go.clear()
    assert peers.ask("/slow", None) == []  # it would not have answered


def port(server: Server) -> int:
    found = urlsplit(server.debug).port
    assert found is not None
    return found


@contextlib.contextmanager
def beside(other: Server, *more: str) -> Iterator[Server]:
    """A second replica, which has the first for a peer."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
        config.write(json.dumps({"peers": [f"127.0.0.1:{port(other)}", *more]}))
        config.flush()
        with serving(FLEET, "--config", config.name) as server:
            yield server


def test_whoever_is_asked_answers_for_both_replicas() -> None:
    """Filter and prioritize came to one, bind to the other; both keep fleets of their own."""
    shown, gone = pod("p", "12Gi"), nobody_there()
    with serving(FLEET) as one, beside(one, gone) as two:
        one.post("/filter", offer(shown, "a", "b", "unknown"))
        (best,) = one.post("/prioritize", offer(shown, "a", "b")).json()
        two.post("/filter", offer(pod("other", "1Gi"), "a"))
        # It knows the pod from its store, as a cluster tells every replica.
        two.post("/filter", offer(shown, "a", "b"))
        assert two.post("/bind", binding(shown, best["Host"])).json()["Error"] == ""

        alone = two.get("/v1/decisions/uid-p.1?peers=false").json()
        assert alone["decision"]["prioritize"] is None
        whole = two.get("/v1/decisions/uid-p.1").json()
        decision: dict[str, Any] = whole["decision"]
        assert decision["prioritize"]["winner"] == best["Host"] == decision["bind"]["node"]
        assert decision["bind"]["outcome"] == "bound"
        replicas = {decision[verb]["replica"] for verb in ("prioritize", "bind")}
        assert len(replicas) == 2
        assert decision["filter"]["times"] == 2
        assert [each["peer"] for each in whole["unanswered"]] == [gone]

        listed = two.get("/v1/decisions").json()["decisions"]
        assert [each["decision_id"] for each in listed] == ["uid-p.1", "uid-other.1"]
        assert one.get("/v1/decisions").json()["unanswered"] == []

        explained = two.get("/v1/explain/pods/default/p").json()
        assert explained["last_decision"] == decision
        placement = json.loads(explained["annotations"]["headroom.gpu/placement"])
        assert placement["decision"] == "uid-p.1"
        logged = [json.loads(line) for line in Path(two.log).read_text().splitlines()]
        assert [entry["decision_id"] for entry in logged if entry["event"] == "bind"] == ["uid-p.1"]
