"""The certificate that the verbs are served with, and whom it lets in: as the files say now.

Certificates are renewed in place, hours before the old one ends. So the files are looked at again
at every handshake, which kube-scheduler makes seldom, and read again when one of them changed: a
connection made from then on uses the new ones, those that are open go on. A renewal that cannot be
used, half of it written or the key of another certificate, is logged once, and the last good one
stays.
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
        self._newest = _context(files)
        # A context in use is not changed: a renewal that fails half way would leave it with
        # neither certificate. So each renewal makes its own, and each handshake is handed to it.
        self.context = _context(files)
        self.context.sni_callback = self._hand_over
        self.context.sslobject_class = _Connection

    def _hand_over(
        self, connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext
    ) -> None:
        """Called at every handshake, whether the client names a server or not."""
        stamps = _stamps(self._files)
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._newest = _context(self._files)
                log.info("tls_renewed", cert=str(self._files.cert))
            except BadSettings as err:
                log.warning("tls_renewal_refused", message=str(err), hint="the last one stays")
        connection.context = self._newest


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A session resumed would be let in for what an earlier file of client CAs said.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    _read("tls_cert", files.cert)
    if b"ENCRYPTED" in _read("tls_key", files.key):
        raise BadSettings(
            f"tls_key: {files.key}: is encrypted, and nobody is there to type its password; "
            "right is a key without one: openssl pkey -in encrypted.key -out tls.key"
        )
    _check_certificates("tls_cert", files.cert)
    try:
        context.load_cert_chain(files.cert, files.key)
    except ssl.SSLError as err:
        if err.reason == "KEY_VALUES_MISMATCH":
            raise BadSettings(
                f"tls_key: {files.key}: is not the key of the certificate in {files.cert}; "
                "right are the two of one Secret, tls.crt and tls.key"
            ) from err
        raise BadSettings(
            f"tls_key: {files.key}: holds no private key in PEM, "
            "which begins with -----BEGIN PRIVATE KEY-----"
        ) from err
    if files.client_ca is not None:
        _read("tls_client_ca", files.client_ca)
        _check_certificates("tls_client_ca", files.client_ca)
        context.load_verify_locations(files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
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
