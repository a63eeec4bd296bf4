"""The agent's serving certificate, read again whenever its files change."""

import ssl
from pathlib import Path

import structlog

_log = structlog.get_logger()

#: Modification time, size and inode of each file, or None for a missing file.
_Stamps = tuple[tuple[int, int, int] | None, ...]


class ServingTls:
    """Builds the TLS context from PEM files with a certificate chain and its key.

    The kubelet replaces the files when the certificate is renewed. If the new files cannot be used,
    the last valid certificate stays in use.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert, self._key = cert, key
        self._stamps: _Stamps = ()
        self._context: ssl.SSLContext | None = None

    def context(self) -> ssl.SSLContext | None:
        """Return the context for a new connection, or None if there is no certificate yet."""
        stamps = _stamp(self._cert), _stamp(self._key)
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._context = _context(self._cert, self._key)
                _log.info("certificate_read", cert=str(self._cert))
            except (OSError, ValueError) as err:  # ssl.SSLError is an OSError
                _log.warning(
                    "certificate_not_read",
                    cert=str(self._cert),
                    reason=str(err),
                    hint="the last one stays in use; without any, metrics are not served",
                )
        return self._context


def _context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Sessions are not resumed, because a ticket for each connection would cost more than it saves.
    context.num_tickets = 0
    # Pass an empty password, because otherwise OpenSSL would ask for one at the terminal.
    context.load_cert_chain(cert, key, password=lambda: b"")
    return context


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
