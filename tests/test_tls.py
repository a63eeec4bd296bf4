"""Tests TLS on kube-scheduler's port: errors at start-up, accepted clients, and certificate
renewal.

The server runs in its own process, and most clients use Python's ``ssl`` module.
"""

import contextlib
import json
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvloop
from structlog.testing import capture_logs

from headroom.certs.pki import ends_at
from headroom.errors import BadSettings
from headroom.runtime.server.ports import Port, PortServer
from headroom.runtime.server.tls import Rejections, ServerTls, TlsFiles
from headroom.runtime.settings.loading import load_settings
from tests.certificates import Authority, Certificate
from tests.processes import starts_processes
from tests.serving import Server, serving
from tests.waiting import PATIENCE_S

FLEET = "nodes: [{name: a, gpus: 1, memory: 24Gi}]"
REJECTED = r"certificate required|unknown ca|closed|reset|Broken pipe|EOF occurred"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "headroom-ca")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other-ca"), "other-ca")


@pytest.fixture(scope="module")
def clients(authority: Authority, stranger: Authority) -> dict[str, Certificate]:
    return {"known": authority.sign("known"), "unknown": stranger.sign("unknown")}


@pytest.fixture
def files(authority: Authority, stranger: Authority, tmp_path: Path) -> TlsFiles:
    """The files of one test: server certificate, key, and client CA."""
    signed, mine = authority.sign("server"), Certificate(tmp_path / "tls.crt", tmp_path / "tls.key")
    mine.put(signed)
    client_ca = tmp_path / "ca.crt"
    client_ca.write_bytes(authority.cert.read_bytes())
    return TlsFiles(mine.cert, mine.key, client_ca)


@pytest.fixture
@starts_processes
def server(files: TlsFiles) -> Iterator[Server]:
    options = ("--tls-cert", str(files.cert), "--tls-key", str(files.key))
    with serving(FLEET, *options, "--tls-client-ca", str(files.client_ca)) as running:
        yield running


class Caller:
    """A connection like kube-scheduler's, which trusts one CA and may have a client certificate."""

    def __init__(
        self,
        server: Server,
        trusted: Authority,
        client: Certificate | None,
        speaks: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
    ) -> None:
        context = ssl.create_default_context(cafile=str(trusted.cert))
        context.maximum_version = speaks
        if client is not None:
            context.load_cert_chain(client.cert, client.key)
        url = urlsplit(server.verbs)
        assert url.scheme == "https"
        self._http = HTTPSConnection(
            url.hostname or "", url.port, timeout=PATIENCE_S, context=context
        )

    def call(self) -> str:
        """Return the name in the server's certificate. Raise ``OSError`` if the client or the
        server rejects the other's certificate.
        """
        # In TLS 1.3, the server rejects the client only after the client has sent this request.
        self._http.request("POST", "/bind", b"{}")
        connection = self._http.sock
        assert isinstance(connection, ssl.SSLSocket)
        certificate = connection.getpeercert()
        assert certificate is not None
        answer = self._http.getresponse()
        assert (answer.status, b"PodName" in answer.read()) == (200, True)
        (((_, name),),) = certificate["subject"]
        return str(name)

    def close(self) -> None:
        self._http.close()


def shown(server: Server, trusted: Authority, client: Certificate | None) -> str:
    """Return the common name of the server certificate on a new connection."""
    with closing(Caller(server, trusted, client)) as caller:
        return caller.call()


def logged(server: Server, event: str) -> list[str]:
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    return [line.get("message", "") for line in lines if line["event"] == event]


def test_only_clients_with_a_certificate_of_the_ca_get_an_answer(
    server: Server, authority: Authority, clients: dict[str, Certificate]
) -> None:
    assert shown(server, authority, clients["known"]) == "server"
    for nobody in (None, clients["unknown"]):
        with pytest.raises(OSError, match=REJECTED):
            shown(server, authority, nobody)
    # In TLS 1.2, a client of a removed CA could resume a session even without a ticket.
    with (
        closing(Caller(server, authority, clients["known"], ssl.TLSVersion.TLSv1_2)) as old,
        pytest.raises(OSError, match=r"alert protocol version|closed|reset|EOF occurred"),
    ):
        old.call()
    assert logged(server, "tls_client_rejected") == [
        "PEER_DID_NOT_RETURN_A_CERTIFICATE",
        "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate",
        "UNSUPPORTED_PROTOCOL",
    ]


def test_a_reason_for_failed_handshakes_is_logged_once_a_minute_with_their_number() -> None:
    now_s = 0.0
    rejections = Rejections(lambda: now_s)
    expired, unknown = (ssl.SSLCertVerificationError(1, "failed") for _ in range(2))
    expired.reason = unknown.reason = "CERTIFICATE_VERIFY_FAILED"
    expired.verify_message, unknown.verify_message = "certificate has expired", "no issuer"
    with capture_logs() as logs:
        for _ in range(1000):
            rejections.log(expired)
        rejections.log(unknown)
        now_s = 61.0
        rejections.log(expired)
    assert [(each["message"], each["handshakes"]) for each in logs] == [
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", 1),
        ("CERTIFICATE_VERIFY_FAILED: no issuer", 1),
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", 1000),
    ]


def test_a_repeatedly_rejected_client_does_not_fill_the_log(
    server: Server, authority: Authority
) -> None:
    for _ in range(20):
        with pytest.raises(OSError, match=REJECTED):
            shown(server, authority, None)
    assert logged(server, "tls_client_rejected") == ["PEER_DID_NOT_RETURN_A_CERTIFICATE"]


def test_the_expiry_of_the_certificate_in_the_last_call_is_a_metric(
    server: Server, authority: Authority, clients: dict[str, Certificate]
) -> None:
    def exposed() -> float:
        name = "headroom_scheduler_certificate_end_timestamp_seconds "
        text = httpx.get(f"{server.debug}/metrics").text
        (line,) = (line for line in text.splitlines() if line.startswith(name))
        return float(line.removeprefix(name))

    assert exposed() == 0
    shown(server, authority, clients["known"])
    known_s = ends_at(clients["known"].cert.read_bytes()).timestamp()
    assert exposed() == known_s
    renewed = authority.sign("renewed", days=90)
    shown(server, authority, renewed)
    assert exposed() == ends_at(renewed.cert.read_bytes()).timestamp()
    assert exposed() > known_s + 59 * 86400


def test_without_a_certificate_bind_is_unreachable_in_any_protocol(
    server: Server, authority: Authority, clients: dict[str, Certificate]
) -> None:
    where, ca = urlsplit(server.verbs), str(authority.cert)
    trusting = ssl.create_default_context(cafile=ca)
    reported = "without sending a response|CERTIFICATE_REQUIRED|UNKNOWN_CA|EOF|reset"
    for client in (None, clients["unknown"]):
        if client is not None:
            trusting.load_cert_chain(client.cert, client.key)
        with pytest.raises(httpx.TransportError, match=reported):
            httpx.post(f"{server.verbs}/bind", json={}, verify=trusting)
    with pytest.raises(httpx.TransportError, match=reported):
        httpx.post(f"http://{where.netloc}/bind", json={})

    def by_hand(*shows: str) -> str:
        """Send a request with openssl s_client."""
        call = "POST /bind HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
        command = ("openssl", "s_client", "-connect", where.netloc, "-CAfile", ca, "-quiet", *shows)
        return subprocess.run(
            command, input=call, capture_output=True, text=True, check=False
        ).stdout

    assert "HTTP" not in by_hand()
    known = clients["known"]
    assert by_hand("-cert", str(known.cert), "-key", str(known.key)).startswith("HTTP/1.1 200 OK")
    rejected = logged(server, "tls_client_rejected")
    assert rejected[:2] == [
        "PEER_DID_NOT_RETURN_A_CERTIFICATE",
        "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate",
    ]
    assert rejected[2:] == ["HTTP_REQUEST"]
    # The server answered exactly one of these requests, with the error that the body contains no
    # pod.
    assert len(logged(server, "bind_error")) == 1


def test_the_debug_port_stays_plain_http(server: Server) -> None:
    assert server.debug.startswith("http://")
    assert server.get("/v1/nodes").status == 200


@pytest.mark.slow
def test_without_a_client_ca_all_clients_get_an_answer(
    files: TlsFiles, authority: Authority
) -> None:
    options = ("--tls-cert", str(files.cert), "--tls-key", str(files.key))
    with serving(FLEET, *options) as server:
        assert shown(server, authority, None) == "server"


def test_a_renewed_certificate_is_shown_without_a_restart(
    server: Server, files: TlsFiles, authority: Authority, clients: dict[str, Certificate]
) -> None:
    assert shown(server, authority, clients["known"]) == "server"
    Certificate(files.cert, files.key).put(authority.sign("renewed"))
    assert shown(server, authority, clients["known"]) == "renewed"


def test_an_incomplete_renewal_is_ignored_and_logged_once(
    server: Server, files: TlsFiles, authority: Authority, clients: dict[str, Certificate]
) -> None:
    renewed = authority.sign("renewed")
    files.cert.write_bytes(renewed.cert.read_bytes())
    for _ in range(3):
        assert shown(server, authority, clients["known"]) == "server"
    files.key.unlink()
    assert shown(server, authority, clients["known"]) == "server"
    rejected = logged(server, "tls_renewal_refused")
    assert [("not the key" in printed, "cannot be read" in printed) for printed in rejected] == [
        (True, False),
        (False, True),
    ]
    files.key.write_bytes(renewed.key.read_bytes())
    assert shown(server, authority, clients["known"]) == "renewed"


def test_clients_of_a_removed_ca_are_rejected(
    server: Server,
    files: TlsFiles,
    authority: Authority,
    stranger: Authority,
    clients: dict[str, Certificate],
) -> None:
    assert files.client_ca is not None
    assert shown(server, authority, clients["known"]) == "server"
    files.client_ca.write_bytes(stranger.cert.read_bytes())
    assert shown(server, authority, clients["unknown"]) == "server"
    with pytest.raises(OSError, match=REJECTED):
        shown(server, authority, clients["known"])


def test_an_open_connection_survives_a_renewal(
    server: Server, files: TlsFiles, authority: Authority, clients: dict[str, Certificate]
) -> None:
    with closing(Caller(server, authority, clients["known"])) as caller:
        assert caller.call() == "server"
        Certificate(files.cert, files.key).put(authority.sign("renewed"))
        assert shown(server, authority, clients["known"]) == "renewed"
        assert caller.call() == "server"


class _PatientLoop(uvloop.Loop):
    """Waits for at most an hour until a client has completed the TLS close."""

    async def connect_accepted_socket(self, *args: Any, **how: Any) -> Any:
        how["ssl_shutdown_timeout"] = 3600.0
        return await super().connect_accepted_socket(*args, **how)


def _wait_for_clients() -> None:
    """Let the event loop and uvicorn wait for at most an hour until clients close their
    connections.
    """
    uvloop.run.__kwdefaults__["loop_factory"] = _PatientLoop
    begin = PortServer.__init__

    def patient(self: PortServer, port: Port) -> None:
        begin(self, port)
        self.config.timeout_graceful_shutdown = 3600

    PortServer.__init__ = patient  # type: ignore[method-assign]


@pytest.mark.slow
def test_shutdown_does_not_wait_for_the_tls_close_of_a_client(
    files: TlsFiles, authority: Authority, clients: dict[str, Certificate]
) -> None:
    """An example of such a client is an API server that no longer reads from the connection.
    ``serving`` checks that the server ends, although the event loop and uvicorn would wait an hour
    for the client.
    """
    options = ("--tls-cert", str(files.cert), "--tls-key", str(files.key))
    with contextlib.ExitStack() as after:
        options += "--tls-client-ca", str(files.client_ca)
        with serving(FLEET, *options, inside=_wait_for_clients) as server:
            silent = after.enter_context(closing(Caller(server, authority, clients["known"])))
            assert silent.call() == "server"
        with pytest.raises(OSError, match=REJECTED):
            silent.call()


def test_errors_in_files_contain_the_name_of_the_file(
    files: TlsFiles, authority: Authority, tmp_path: Path
) -> None:
    absent, text = tmp_path / "absent", tmp_path / "text"
    text.write_text("not PEM")
    other = authority.sign("other")
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
    cert, key = files.cert, files.key
    cases = [
        (TlsFiles(absent, key), f"tls_cert: {absent}: cannot be read: No such file"),
        (TlsFiles(cert, absent), f"tls_key: {absent}: cannot be read: No such file"),
        (TlsFiles(tmp_path, key), f"tls_cert: {tmp_path}: cannot be read: Is a directory"),
        (TlsFiles(text, key), f"tls_cert: {text}: holds no certificate in PEM, which begins"),
        (TlsFiles(key, cert), f"tls_cert: {key}: holds no certificate in PEM, which begins"),
        (TlsFiles(cert, text), f"tls_key: {text}: holds no private key in PEM, which begins"),
        (TlsFiles(cert, other.key), f"tls_key: {other.key}: is not the key of the certificate"),
        (TlsFiles(cert, encrypted), f"tls_key: {encrypted}: is encrypted"),
        (TlsFiles(cert, key, absent), f"tls_client_ca: {absent}: cannot be read: No such"),
        (TlsFiles(cert, key, text), f"tls_client_ca: {text}: holds no certificate in PEM"),
    ]
    for given, says in cases:
        with pytest.raises(BadSettings) as caught:
            ServerTls(given)
        assert str(caught.value).startswith(says)
    ServerTls(files)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        pytest.param({"tls_cert": "a"}, "tls_cert is set and tls_key is not", id="no key"),
        pytest.param({"tls_key": "a"}, "tls_key is set and tls_cert is not", id="no certificate"),
        pytest.param({"tls_client_ca": "a"}, "tls_client_ca is set without", id="only a client CA"),
    ],
)
def test_incomplete_tls_settings_are_rejected_with_an_example(
    given: dict[str, str], says: str
) -> None:
    with pytest.raises(BadSettings) as caught:
        load_settings(None, **given)
    assert says in str(caught.value)
    assert "Example: --tls-cert tls.crt --tls-key tls.key" in str(caught.value)
