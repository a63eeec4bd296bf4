"""Checks that only authorized clients read metrics, because metrics contain pods of all tenants."""

import contextlib
import http.client
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from agent import http_server
from agent.http_connection import Answer
from agent.http_endpoints import MetricsPort, Server
from agent.kube_client import NotReached
from agent.metrics_access import (
    ALLOWED_S,
    REJECTED_S,
    REVIEWS_AT_ONCE,
    REVIEWS_PER_S,
    MetricsAccess,
)
from agent.serving_tls import ServingTls
from headroom.contract.gpunode import GPUNodeStatus
from tests.agent.served import ServedSample, client, world
from tests.builders import shared
from tests.certificates import Authority, Certificate
from tests.waiting import PATIENCE_S

__all__ = ["world"]

GOOD, OUTSIDER = "of-prometheus", "of-a-tenant"
FORBIDDEN = Answer(403, b"may not\n")
NOT_ACCEPTED = Answer(401, b"not accepted\n")


class Reviews:
    """A fake API server that accepts two tokens and counts its reviews."""

    def __init__(self) -> None:
        self.now_s = 1024.0
        self.asked: list[str] = []
        self.answers: dict[str, Answer | None] = {GOOD: None, OUTSIDER: FORBIDDEN}
        self.is_down = False
        self.access = MetricsAccess(self.review, lambda: self.now_s)

    def review(self, token: str) -> Answer | None:
        self.asked.append(token)
        if self.is_down:
            raise NotReached("connection refused")
        return self.answers.get(token, NOT_ACCEPTED)


@pytest.fixture
def reviews() -> Reviews:
    return Reviews()


def test_a_review_of_the_api_server_is_cached_for_some_time(reviews: Reviews) -> None:
    for token, expected, kept_s in ((GOOD, None, ALLOWED_S), (OUTSIDER, FORBIDDEN, REJECTED_S)):
        reviews.asked.clear()
        assert reviews.access.at_once(token) == (None, False)
        for _ in range(3):
            assert reviews.access.ask(token) == expected
            assert reviews.access.at_once(token) == (expected, True)
        assert reviews.asked == [token]
        reviews.now_s += kept_s
        assert reviews.access.at_once(token) == (None, False)
        assert reviews.access.ask(token) == expected
        assert reviews.asked == [token, token]


def test_a_client_without_a_token_causes_no_review(reviews: Reviews) -> None:
    rejection, known = reviews.access.at_once("")
    assert known
    assert rejection is not None
    assert rejection.status == 401
    assert b"kubectl create token" in rejection.body
    assert not reviews.asked


def test_a_revoked_permission_ends_with_the_cached_review(reviews: Reviews) -> None:
    assert reviews.access.ask(GOOD) is None
    reviews.answers[GOOD] = FORBIDDEN
    assert reviews.access.ask(GOOD) is None
    reviews.now_s += ALLOWED_S
    assert reviews.access.ask(GOOD) == FORBIDDEN


def test_unknown_tokens_cause_a_limited_number_of_reviews_and_do_not_block_prometheus(
    reviews: Reviews,
) -> None:
    assert reviews.access.ask(GOOD) is None
    reviews.now_s += ALLOWED_S
    statuses = [reviews.access.ask(f"guess-{number}") for number in range(10_000)]
    assert {each.status for each in statuses if each} == {401, 429}
    assert len(reviews.asked) == 1 + REVIEWS_AT_ONCE
    assert reviews.access.ask(GOOD) is None, "a flood kept out a token that was accepted before"
    reviews.now_s += 10.0
    reviews.asked.clear()
    for number in range(10_000):
        reviews.access.ask(f"another-{number}")
    assert len(reviews.asked) == 10 * REVIEWS_PER_S
    assert reviews.access.at_once(GOOD) == (None, True)


def test_without_the_api_server_only_cached_clients_are_admitted(reviews: Reviews) -> None:
    assert reviews.access.ask(GOOD) is None
    reviews.is_down = True
    assert reviews.access.ask(GOOD) is None
    for token in (OUTSIDER, "unknown"):
        rejection = reviews.access.ask(token)
        assert rejection is not None
        assert rejection.status == 503
    reviews.is_down = False
    assert reviews.access.ask(OUTSIDER) == FORBIDDEN  # A failed review is not cached.


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "headroom-ca")


@pytest.fixture
def certificate(authority: Authority) -> Certificate:
    return authority.sign("agent")


@contextlib.contextmanager
def serving(
    world: ServedSample, port: MetricsPort | None, open_metrics: bool = False
) -> Iterator[Server]:
    world.board.set(GPUNodeStatus(devices=[shared("GPU-1")]))
    server = Server(
        world.board, "127.0.0.1", 0, 0, None, {}, metrics_port=port, open_metrics=open_metrics
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def server(world: ServedSample, reviews: Reviews, certificate: Certificate) -> Iterator[Server]:
    tls = ServingTls(certificate.cert, certificate.key)
    with serving(world, MetricsPort("127.0.0.1", 0, tls, reviews.access)) as server:
        yield server


def connection(server: Server, authority: Authority) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cafile=str(authority.cert))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    assert server.metrics_port is not None
    return http.client.HTTPSConnection(
        "127.0.0.1", server.metrics_port, timeout=PATIENCE_S, context=context
    )


def asked(scraper: http.client.HTTPSConnection, token: str | None) -> tuple[int, str]:
    """Scrape the metrics once. Return the status and the body of the response."""
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    scraper.request("GET", "/metrics", headers=headers)
    answer = scraper.getresponse()
    return answer.status, answer.read().decode()


@pytest.mark.parametrize(
    ("token", "status"), [(GOOD, 200), (OUTSIDER, 403), ("unknown", 401), ("", 401), (None, 401)]
)
def test_only_an_authorized_client_reads_metrics(
    server: Server, authority: Authority, token: str | None, status: int
) -> None:
    with contextlib.closing(connection(server, authority)) as scraper:
        found, body = asked(scraper, token)
    assert found == status
    assert ("GPU-1" in body) == (status == 200)


def test_the_public_port_serves_no_metrics_and_the_local_port_does(server: Server) -> None:
    with client(server.port) as public, client(server.local_port) as local:
        answer = public.get("/metrics", headers={"Authorization": f"Bearer {GOOD}"})
        assert answer.status_code == 403
        assert "GPU-1" not in answer.text
        assert "--metrics-listen" in answer.text
        assert "GPU-1" in local.get("/metrics").text


def test_metrics_can_be_opened_to_all_clients(
    world: ServedSample, authority: Authority, certificate: Certificate
) -> None:
    tls = ServingTls(certificate.cert, certificate.key)
    with (
        serving(world, MetricsPort("127.0.0.1", 0, tls, None), open_metrics=True) as server,
        client(server.port) as public,
        contextlib.closing(connection(server, authority)) as scraper,
    ):
        assert "GPU-1" in public.get("/metrics").text
        assert asked(scraper, None)[0] == 200


def test_an_authorized_client_keeps_its_connection_and_others_lose_theirs(
    server: Server, authority: Authority
) -> None:
    with contextlib.closing(connection(server, authority)) as scraper:
        assert asked(scraper, GOOD)[0] == 200
        first = scraper.sock
        for _ in range(50):
            assert asked(scraper, GOOD)[0] == 200
        assert scraper.sock is first, "each scrape would cost a handshake"
        assert asked(scraper, OUTSIDER)[0] == 403
        assert scraper.sock is None, "each guess must cost a handshake"


def test_an_address_can_open_few_connections_and_open_ones_continue(
    server: Server, authority: Authority, reviews: Reviews
) -> None:
    """The limit exists because handshakes use CPU. Each connection causes at most one review of an
    unknown token.
    """
    with contextlib.closing(connection(server, authority)) as scraper:
        assert asked(scraper, GOOD)[0] == 200
        opened = 0
        for number in range(100):
            with (
                contextlib.closing(connection(server, authority)) as stranger,
                contextlib.suppress(OSError, http.client.HTTPException),
            ):
                asked(stranger, f"guess-{number}")
                opened += 1
        assert opened < 100 // 2
        assert len(reviews.asked) == 1 + opened
        assert asked(scraper, GOOD)[0] == 200


def test_a_renewed_certificate_is_used_but_a_damaged_one_is_not(
    server: Server, authority: Authority, certificate: Certificate
) -> None:
    def shown() -> bytes:
        with contextlib.closing(connection(server, authority)) as scraper:
            scraper.connect()
            found = scraper.sock.getpeercert(binary_form=True)
            assert found is not None
            return found

    first = shown()
    certificate.put(authority.sign("renewed"))
    second = shown()
    assert second != first
    with capture_logs() as logs:
        certificate.cert.write_text("damaged")
        assert shown() == second
    assert [each["event"] for each in logs] == ["certificate_not_read"]


def test_the_port_opens_when_the_certificate_arrives(
    world: ServedSample, reviews: Reviews, authority: Authority, tmp_path: Path
) -> None:
    """The Secret may be created after the agent has started, and gates must not wait for it."""
    cert, key = tmp_path / "later.crt", tmp_path / "later.key"
    with (
        capture_logs() as logs,
        serving(
            world, MetricsPort("127.0.0.1", 0, ServingTls(cert, key), reviews.access)
        ) as server,
    ):
        with contextlib.closing(connection(server, authority)) as early, pytest.raises(OSError):  # noqa: PT011 - closed or reset
            asked(early, GOOD)
        assert "certificate_not_read" in {each["event"] for each in logs}
        signed = authority.sign("later")
        assert (signed.cert, signed.key) == (cert, key)
        with contextlib.closing(connection(server, authority)) as scraper:
            assert asked(scraper, GOOD)[0] == 200


def test_a_client_that_never_completes_its_handshake_is_closed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setattr(http_server, "REQUEST_S", 0.2)
    assert server.metrics_port is not None
    with socket.create_connection(("127.0.0.1", server.metrics_port)) as silent:
        silent.settimeout(PATIENCE_S)
        assert silent.recv(1) == b""


def test_a_slow_reader_receives_the_whole_of_a_large_response(
    world: ServedSample, reviews: Reviews, certificate: Certificate, authority: Authority
) -> None:
    tls = ServingTls(certificate.cert, certificate.key)
    with serving(world, MetricsPort("127.0.0.1", 0, tls, reviews.access)) as server:
        world.board.set(GPUNodeStatus(devices=[shared(f"GPU-{n}") for n in range(3000)]))
        with contextlib.closing(connection(server, authority)) as scraper:
            scraper.request("GET", "/metrics", headers={"Authorization": f"Bearer {GOOD}"})
            answer = scraper.getresponse()
            body = b""
            while part := answer.read(4096):
                body += part
            assert len(body) > 1 << 20
            assert b"GPU-2999" in body
            assert asked(scraper, GOOD)[0] == 200
