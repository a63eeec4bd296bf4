"""Tests which client certificates the debug port requests and accepts, as the CA changes.

Both ends are in this process and exchange bytes in memory.
"""

import ssl
from pathlib import Path

import pytest

from headroom.errors import BadSettings
from headroom.runtime.server.client_certificates import Peer, peer_of
from headroom.runtime.server.tls import ServerTls, TlsFiles
from tests.certificates import Authority, Certificate


@pytest.fixture
def server(tmp_path: Path) -> ServerTls:
    signed = Authority(tmp_path, "served-by").sign("extender")
    return ServerTls(TlsFiles(signed.cert, signed.key, setting="debug_tls"))


def met(server: ServerTls, client: Certificate | None) -> Peer:
    """Return the peer of a TLS handshake. Raise ``ssl.SSLError`` if the server rejects it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.context.wrap_bio(to_server, to_client, server_side=True)
    theirs = context.wrap_bio(to_client, to_server)
    waiting = [theirs, ours]
    while waiting:
        end = waiting.pop(0)
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            waiting.append(end)
    return peer_of(ours)


def name(peer: Peer) -> str:
    assert peer.asked
    assert peer.certificate is not None
    assert peer.certificate.user is not None
    return peer.certificate.user.name


def test_known_clients_change_with_the_ca(server: ServerTls, tmp_path: Path) -> None:
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    ann, bob = first.sign("ann", ["dev", "ops"]), second.sign("bob")
    assert met(server, ann) == met(server, None) == Peer(False, None)

    server.request_client_certificates(first.cert.read_text())
    peer = met(server, ann)
    assert name(peer) == "ann"
    assert peer.certificate is not None
    assert peer.certificate.user is not None
    assert peer.certificate.user.groups == ("dev", "ops", "system:authenticated")
    assert met(server, None) == Peer(True, None)
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        met(server, bob)

    both = first.cert.read_text() + second.cert.read_text()  # while the CA is being replaced
    server.request_client_certificates(both)
    assert (name(met(server, ann)), name(met(server, bob))) == ("ann", "bob")

    server.request_client_certificates(second.cert.read_text())
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        met(server, ann)
    with pytest.raises(BadSettings, match="not a certificate in PEM"):
        server.request_client_certificates("no PEM")
    assert name(met(server, bob)) == "bob"

    server.request_client_certificates(None)
    assert met(server, bob) == Peer(False, None)


def test_renewing_the_server_certificate_keeps_the_client_ca(tmp_path: Path) -> None:
    served, clients = Authority(tmp_path, "served-by"), Authority(tmp_path, "clients")
    mine = Certificate(tmp_path / "tls.crt", tmp_path / "tls.key")
    mine.put(served.sign("old"))
    server = ServerTls(TlsFiles(mine.cert, mine.key))
    server.request_client_certificates(clients.cert.read_text())
    mine.put(served.sign("new"))
    assert name(met(server, clients.sign("ann"))) == "ann"


def test_a_certificate_without_client_usage_is_not_accepted(
    server: ServerTls, tmp_path: Path
) -> None:
    clients = Authority(tmp_path, "clients")
    server.request_client_certificates(clients.cert.read_text())
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        met(server, clients.sign("server-s", usage="serverAuth"))


def test_errors_in_files_name_their_setting(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(BadSettings, match=f"^debug_tls_cert: {absent}: cannot be read"):
        ServerTls(TlsFiles(absent, absent, setting="debug_tls"))
