"""The certificate that a port is served with, and whom it lets in: as the files say now.

Certificates are renewed in place, hours before the old one ends. So the files are looked at again
at every handshake, which kube-scheduler makes seldom, and read again when one of them changed: a
connection made from then on uses the new ones, those that are open go on. A renewal that cannot be
used, half of it written or the key of another certificate, is logged once, and the last good one
stays.

kube-scheduler's port lets in nobody without a certificate of its own CA. The debug port asks for
one of the cluster's CA, which comes from the API server, and does without: others have a token.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

import structlog

from extender.errors import BadSettings

log = structlog.get_logger()

#: Time of the last change, size and inode of each file; None for one that is not there.
_Stamps = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """All in PEM. With ``client_ca``, only who shows a certificate signed by it is let in."""

    cert: Path
    key: Path
    client_ca: Path | None = None
    #: Begins the names of the settings that they are from.
    setting: str = "tls"


class _Connection(ssl.SSLObject):
    """Says why a client was not let in: the event loop drops the alert that would tell the client,
    so all that kube-scheduler has to show is "EOF"."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as err:
            log.warning("tls_client_refused", message=err.reason or str(err))
            raise


class ServerTls:
    """``context`` is for the server; raises ``BadSettings`` where the files cannot be used."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamps = _stamps(files)
        #: In PEM: who shows a certificate signed by one of them is known, and nobody has to.
        self._known_ca: str | None = None
        self._newest = _context(files, None)
        # A context in use is not changed: a renewal that fails half way would leave it with
        # neither certificate. So each renewal makes its own, and each handshake is handed to it.
        self.context = _context(files, None)
        self.context.sni_callback = self._hand_over
        self.context.sslobject_class = _Connection

    def know(self, ca: str | None) -> None:
        """Ask who connects from now on for a certificate of these CAs, in PEM; None: for none.

        On the event loop. Raises ``BadSettings`` where it holds no certificate; then, and where
        the server's own files are half renewed, all stays as it was.
        """
        if ca == self._known_ca:
            return
        self._newest = _context(self._files, ca)
        self._known_ca = ca
        # Whether a certificate is asked for is settled before the handshake is handed over.
        self.context.verify_mode = self._newest.verify_mode

    def _hand_over(
        self, connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext
    ) -> None:
        """Called at every handshake, whether the client names a server or not."""
        stamps = _stamps(self._files)
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._newest = _context(self._files, self._known_ca)
                log.info("tls_renewed", cert=str(self._files.cert))
            except BadSettings as err:
                log.warning("tls_renewal_refused", message=str(err), hint="the last one stays")
        connection.context = self._newest


def _context(files: TlsFiles, known_ca: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A session resumed would be let in for what an earlier file of client CAs said. TLS 1.2 can
    # resume without a ticket, too, and so none of it is spoken.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    cert, key = f"{files.setting}_cert", f"{files.setting}_key"
    _read(cert, files.cert)
    if b"ENCRYPTED" in _read(key, files.key):
        raise BadSettings(
            f"{key}: {files.key}: is encrypted, and nobody is there to type its password; "
            "right is a key without one: openssl pkey -in encrypted.key -out tls.key"
        )
    _check_certificates(cert, files.cert)
    try:
        context.load_cert_chain(files.cert, files.key)
    except ssl.SSLError as err:
        if err.reason == "KEY_VALUES_MISMATCH":
            raise BadSettings(
                f"{key}: {files.key}: is not the key of the certificate in {files.cert}; "
                "right are the two of one Secret, tls.crt and tls.key"
            ) from err
        raise BadSettings(
            f"{key}: {files.key}: holds no private key in PEM, "
            "which begins with -----BEGIN PRIVATE KEY-----"
        ) from err
    if files.client_ca is not None:
        _read("tls_client_ca", files.client_ca)
        _check_certificates("tls_client_ca", files.client_ca)
        context.load_verify_locations(files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    if known_ca is not None:
        try:
            context.load_verify_locations(cadata=known_ca)
        except (ssl.SSLError, ValueError) as err:
            raise BadSettings("the CA of the cluster's clients is no certificate in PEM") from err
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def _read(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise BadSettings(f"{setting}: {path}: cannot be read: {err.strerror}") from err


def _check_certificates(setting: str, path: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError as err:
        raise BadSettings(
            f"{setting}: {path}: holds no certificate in PEM, "
            "which begins with -----BEGIN CERTIFICATE-----"
        ) from err


def _stamps(files: TlsFiles) -> _Stamps:
    return tuple(
        _stamp(path) for path in (files.cert, files.key, files.client_ca) if path is not None
    )


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
