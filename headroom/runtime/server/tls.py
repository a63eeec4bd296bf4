"""Serves TLS on a port: the certificate, the CAs of clients, and limits on handshakes.

Certificates are renewed by replacing their files. Every handshake checks whether a file has changed
and then reads the files again. This costs little, because kube-scheduler makes few handshakes. New
connections use the new certificate, and open connections stay open. If the new files cannot be
used, for example because they are half written or the key belongs to another certificate, the error
is logged once and the last valid certificate stays in use.

kube-scheduler's port accepts only clients with a certificate from a CA of its own.

uvicorn gets a connection only after the handshake, so it can limit neither the duration nor the
number of handshakes. An open handshake takes 50 KiB, even if the client sends nothing. If too many
handshakes are open, the oldest is dropped, so a client that responds quickly is always served.
"""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from headroom.bounded_dict import Bounded
from headroom.errors import BadSettings

log = structlog.get_logger()

#: Modification time, size and inode of each file, or None for a missing file.
_Stamps = tuple[tuple[int, int, int] | None, ...]

#: Maximum duration of a handshake in seconds. kube-scheduler waits 5 s for a whole call.
HANDSHAKE_S = 5.0

#: Maximum number of open handshakes of one port.
MAX_HANDSHAKES = 128

#: Seconds between two log lines with the same reason for failed handshakes. Any pod can cause
#: thousands of failures.
REPEAT_S = 60.0
#: Maximum number of remembered reasons. OpenSSL has about this many.
MAX_REASONS = 256

#: Seconds to wait after a failed accept, for example if there are no free file descriptors.
_RETRY_AFTER_S = 0.1


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files. With ``client_ca``, clients must present a certificate that this CA has
    signed."""

    cert: Path
    key: Path
    client_ca: Path | None = None
    #: Prefix of the settings that name the files. Errors quote it.
    setting: str = "tls"


class Rejections:
    """Logs why handshakes failed. Each reason is logged at most once in ``REPEAT_S`` seconds, with
    the number of failures."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        #: When each reason was last logged, and the number of failed handshakes with this reason
        #: since then.
        self._seen: Bounded[str, tuple[float, int]] = Bounded(MAX_REASONS)

    def log(self, err: ssl.SSLError) -> None:
        reason = err.reason or str(err)
        if isinstance(err, ssl.SSLCertVerificationError):
            reason = f"{reason}: {err.verify_message}"
        now_s = self._monotonic_s()
        logged_s, since = self._seen.get(reason, (float("-inf"), 0))
        if now_s - logged_s < REPEAT_S:
            self._seen[reason] = logged_s, since + 1
            return
        self._seen[reason] = now_s, 0
        log.warning("tls_client_rejected", message=reason, handshakes=since + 1)


class _Connection(ssl.SSLObject):
    """Logs why a handshake failed.

    The event loop sends no TLS alert, so kube-scheduler reports only "EOF". Without the log, the
    reason would be unknown.
    """

    rejections: Rejections

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as err:
            self.rejections.log(err)
            raise


class ServerTls:
    """The TLS context of a server, kept up to date with its files.

    ``max_handshakes`` may be open on a port, each for ``handshake_s``. Raises ``BadSettings`` if
    the files cannot be used.
    """

    def __init__(
        self,
        files: TlsFiles,
        max_handshakes: int = MAX_HANDSHAKES,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self.max_handshakes, self.handshake_s = max_handshakes, handshake_s
        self._files = files
        self._stamps = _stamps(files)
        self._newest = _context(files)
        # Each renewal creates a new context, and each handshake is moved to the newest context. If
        # a context in use were changed and the renewal failed, it could be left without a
        # certificate.
        self.context = _context(files)
        self.context.sni_callback = self._use_newest
        rejections = {"rejections": Rejections()}
        self.context.sslobject_class = type("_OwnConnection", (_Connection,), rejections)

    def _use_newest(
        self, connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext
    ) -> None:
        """Move a handshake to the newest context, after reading files that have changed.

        OpenSSL calls this for each handshake, even if the client sends no server name.
        """
        stamps = _stamps(self._files)
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._newest = _context(self._files)
                log.info("tls_renewed", cert=str(self._files.cert))
            except BadSettings as err:
                log.warning(
                    "tls_renewal_refused", message=str(err), hint="the last one stays in use"
                )
        connection.context = self._newest


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A client could resume a session that an earlier CA file had accepted. So disable session
    # resumption and also TLS 1.2, which can resume sessions without tickets.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    cert, key = f"{files.setting}_cert", f"{files.setting}_key"
    _read(cert, files.cert)
    if b"ENCRYPTED" in _read(key, files.key):
        raise BadSettings(
            f"{key}: {files.key}: is encrypted, and a server cannot ask for its password; "
            "decrypt it: openssl pkey -in encrypted.key -out tls.key"
        )
    _check_certificates(cert, files.cert)
    try:
        context.load_cert_chain(files.cert, files.key)
    except ssl.SSLError as err:
        if err.reason == "KEY_VALUES_MISMATCH":
            raise BadSettings(
                f"{key}: {files.key}: is not the key of the certificate in {files.cert}; "
                "use tls.crt and tls.key of the same Secret"
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


class Handshakes:
    """Accepts TLS connections. ``protocol`` creates the protocol object of each connection."""

    def __init__(self, protocol: Callable[[], asyncio.Protocol], tls: ServerTls) -> None:
        self._protocol = protocol
        self._tls = tls
        #: Open handshakes, oldest first.
        self._open: dict[asyncio.Task[None], socket.socket] = {}

    async def accept(self, listening: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listening)
                except Exception as err:  # noqa: BLE001 - the port must stay open
                    log.warning("connection_not_accepted", message=str(err))
                    await asyncio.sleep(_RETRY_AFTER_S)
                    continue
                if len(self._open) >= self._tls.max_handshakes:
                    _end(self._open.pop(next(iter(self._open))))
                task = loop.create_task(self._shake_hands(connection))
                self._open[task] = connection
                task.add_done_callback(self._ended)
        finally:
            for connection in self._open.values():
                _end(connection)

    async def _shake_hands(self, connection: socket.socket) -> None:
        """Complete one handshake or drop the connection. ``_Connection`` logs the reason."""
        with contextlib.suppress(OSError):  # includes ssl.SSLError
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._tls.context,
                ssl_handshake_timeout=self._tls.handshake_s,
            )

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)
        if not task.cancelled() and (err := task.exception()) is not None:
            log.error("handshake_failed", exc_info=err)


def _end(connection: socket.socket) -> None:
    """Shut down the socket, so that its handshake fails immediately. With uvloop, a cancelled
    handshake would wait for its timeout."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
