"""Follows the journals of the other extenders, each on its own thread.

kube-scheduler may call any extender, and each extender keeps only its own decisions and holds. A
process that follows all extenders can show and count all decisions and holds.

The extenders' names are resolved every few seconds, because replicas come and go. A headless
Service resolves to one address for each replica. One of the addresses may belong to this process,
which recognizes itself by the name in the first line.

If the ports use TLS, an extender must present a certificate of a given CA, issued for the name that
was resolved. This process authenticates with its own token, never with the token of a caller.
"""

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from headroom.console.feed.journals import Followed
from headroom.core.cluster.changes import Event, HoldsSeen
from headroom.core.journal.decision_records import Bounds
from headroom.core.journal.journal import Journal
from headroom.runtime.follow.journal_stream import BadLine, Copy
from headroom.runtime.loops import Loops
from headroom.system.listening import host_port

log = structlog.get_logger()

#: Maximum number of followed extenders, including stopped extenders whose journal is still shown.
MAX_FOLLOWED = 4
PATH = "/v1/journal"
#: Seconds between two name resolutions.
RESOLVE_S = 5.0
#: Seconds before a broken stream is opened again.
RECONNECT_S = 1.0
#: A stream counts as broken after this many seconds without a line. An extender sends a line at
#: least every ``extender.scheduler.journal_endpoint.STATE_S`` seconds.
SILENT_S = 15.0
#: Maximum bytes of one line. A decision contains a pod, which can have up to 1.5 MiB at the API
#: server.
MAX_LINE_BYTES = 8 << 20
#: Seconds between two checks for new holds.
HOLDS_EVERY_S = 0.25
#: Holds expire after their extender has sent no line for this many seconds. By then the holds have
#: ended, and the API server shows their reservations.
EXPIRES_S = SILENT_S

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another process of Headroom."""

    address: Address
    #: The host name that was resolved to the address. The certificate must be valid for it.
    name: str
    #: PEM file with the CA of the process; None if its port does not use TLS.
    ca: Path | None


class JournalFollower:
    """Follows the extenders at ``places``, which are hosts with or without a port.

    ``name`` is this process's own name. ``ca`` is the file with the CA of the extenders'
    certificates, if their ports use TLS. Each journal may use the memory of ``bounds`` for
    decisions and half as much for pods. ``resolve`` returns the addresses of a place; by default,
    the addresses of its name."""

    def __init__(
        self,
        places: Sequence[str],
        usual_port: int,
        name: str,
        bounds: Bounds,
        ca: Path | None = None,
        resolve: Callable[[Address], list[Address]] | None = None,
        resolve_every_s: float = RESOLVE_S,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        self._resolve_place, self._resolve_every_s = resolve or addresses, resolve_every_s
        self.reconnect_s = reconnect_s
        self._places = [(place, usual_port) for place in places]
        self._name = name
        self._bounds = bounds
        self._ca = ca
        #: A function that returns the header that authenticates this process. If the function
        #: returns an empty string, no header is sent.
        self.authorization: Callable[[], str] = str
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._resolve, name="extenders", daemon=True)
        #: The stream of each followed extender. The dict is replaced as a whole, because other
        #: threads read it.
        self._streams: dict[Address, _Stream] = {}
        self._own: set[Address] = set()
        #: The addresses to which the name of each place was last resolved.
        self._addresses: dict[Address, list[Address]] = {}
        #: The reason why the name of a place could not be resolved, by the host of the place.
        self._unresolved: dict[str, str] = {}
        #: Journals of extenders whose address another extender has taken over, the earliest first.
        self._ended: list[Followed] = []
        self._ended_lock = threading.Lock()

    def start(self) -> None:
        """Start the loop that resolves names and follows their addresses."""
        self._thread.start()

    def stop(self) -> None:
        """Stop all streams."""
        self._stop.set()
        for stream in self._streams.values():
            stream.stop()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def now(self) -> list[Followed]:
        """Return all current and former extenders, and the names that have no address."""
        found = [stream.followed() for at, stream in self._streams.items() if at not in self._own]
        unresolved = [
            Followed(place, Journal(self._bounds), None, None, why)
            for place, why in self._unresolved.items()
        ]
        return [*found, *self._ended, *unresolved]

    def _resolve(self) -> None:
        """Resolve the names and follow their addresses, every ``resolve_every_s`` until stopped."""
        while not self._stop.is_set():
            unresolved: dict[str, str] = {}
            for place in self._places:
                try:
                    self._addresses[place] = self._resolve_place(place)
                except (OSError, ValueError) as err:
                    # The addresses that the last resolution returned may still be valid.
                    if not self._addresses.get(place):
                        unresolved[place[0]] = f"its name could not be resolved: {err}"
            self._unresolved = unresolved
            self._follow(
                {each: place for place, found in self._addresses.items() for each in found}
            )
            self._stop.wait(self._resolve_every_s)

    def _follow(self, resolved: Mapping[Address, Address]) -> None:
        """Start streams to new addresses, and stop the streams to addresses that are gone.

        ``resolved`` maps each address to its place.
        """
        streams = dict(self._streams)
        for gone in streams.keys() - resolved.keys():
            streams[gone].stop()
        for address in sorted(resolved.keys() - self._own)[:MAX_FOLLOWED]:
            if address in streams and not streams[address].ended:
                continue
            peer = Peer(address, host_of(resolved[address]), self._ca)
            stream = _Stream(peer, self._name, self._bounds, self)
            streams[address] = stream
            stream.start()
        ended = sorted(
            streams.keys() - resolved.keys(), key=lambda address: streams[address].last_line_at_s
        )
        with self._ended_lock:  # if there are too many journals, drop ended journals first
            while len(streams) + len(self._ended) > MAX_FOLLOWED and (self._ended or ended):
                if self._ended:
                    self._ended = self._ended[1:]
                else:
                    del streams[ended.pop(0)]
        self._streams = streams

    def keep(self, followed: Followed) -> None:
        """Keep the journal of a stopped extender after another extender got its address."""
        with self._ended_lock:
            self._ended = [*self._ended, followed][-MAX_FOLLOWED:]

    def is_own(self, address: Address) -> None:
        """Record that the address belongs to this process, which does not follow itself."""
        self._own.add(address)


class _Stream:
    """The stream of one extender. It is opened again whenever it breaks."""

    def __init__(
        self, peer: Peer, own_name: str, bounds: Bounds, follower: JournalFollower
    ) -> None:
        self._peer = peer
        self._address = peer.address
        self._own_name = own_name
        self._bounds = bounds
        self._follower = follower
        self._copy = Copy(Journal(bounds, bounds.size_bytes // 2))
        self._problem = "it was not reached yet"
        self.last_line_at_s = float("-inf")
        self._stop = threading.Event()
        self._connection: http.client.HTTPConnection | None = None

    def start(self) -> None:
        name = f"journal-{self._address[0]}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        self._problem = "it is gone"
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    @property
    def ended(self) -> bool:
        return self._stop.is_set()

    def followed(self) -> Followed:
        problem, copy, address = self._problem, self._copy, host_port(*self._address)
        age_s = time.monotonic() - self.last_line_at_s if copy.state else None
        return Followed(address, copy.journal, copy.state, age_s, problem, self.ended, copy.holds)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._read()
                self._problem = "it ended the stream"
            except TimeoutError:
                if not self._stop.is_set():
                    self._problem = f"it sent nothing for {SILENT_S:.0f} s"
            except (OSError, http.client.HTTPException, BadLine) as err:
                if not self._stop.is_set():
                    self._problem = str(err) or type(err).__name__
            except Exception:  # without this, the thread would end unnoticed
                log.exception("journal_not_followed", extender=host_port(*self._address))
                self._problem = "its journal could not be read: see the log"
            self._stop.wait(self._follower.reconnect_s)

    def _read(self) -> None:
        """Read the stream until it ends. Raises ``OSError``, ``HTTPException`` or ``BadLine``."""
        self._connection = connection = connect(self._peer, SILENT_S)
        with contextlib.closing(connection):
            headers = {"Accept": "application/x-ndjson"}
            if shown := self._follower.authorization():
                headers["Authorization"] = shown
            state = self._copy.state
            after = f"?replica={state.replica}&after={self._copy.version}" if state else ""
            connection.request("GET", PATH + after, headers=headers)
            with connection.getresponse() as answer:
                if answer.status != 200:
                    raise http.client.HTTPException(f"it answered {answer.status} {answer.reason}")
                while line := answer.readline(MAX_LINE_BYTES):
                    if not self._take(line):
                        return

    def _take(self, line: bytes) -> bool:
        """Apply one line. Return False if the stream ends here, because it was stopped or because
        this process is reading its own stream. Raises ``BadLine``."""
        if not line.endswith(b"\n"):
            raise BadLine("a line of the journal is too long, or was cut off")
        before = self.followed()
        self._copy.take(line)
        state = self._copy.state
        assert state is not None, "the first line is the state"
        if before.state is not None and before.state.replica != state.replica:
            self._follower.keep(replace(before, is_gone=True))
            self._copy = Copy(Journal(self._bounds, self._bounds.size_bytes // 2))
            self._copy.take(line)
        if state.replica == self._own_name:
            self._follower.is_own(self._address)
            self._stop.set()
            return False
        self.last_line_at_s = time.monotonic()
        self._problem = ""
        return not self._stop.is_set()


def connect(peer: Peer, timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection to another process of Headroom. Raises ``OSError``."""
    if peer.ca is None:
        return http.client.HTTPConnection(*peer.address, timeout=timeout_s)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Read the file each time, because it changes when the CA is rotated.
    context.load_verify_locations(peer.ca)
    return _NamedConnection(peer, context, timeout_s)


class _NamedConnection(http.client.HTTPSConnection):
    """Connects to an address and checks that the certificate is valid for the peer's name."""

    def __init__(self, peer: Peer, context: ssl.SSLContext, timeout_s: float) -> None:
        super().__init__(*peer.address, timeout=timeout_s)
        self._headroom_context = context
        self._headroom_name = peer.name

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._headroom_context.wrap_socket(
            self.sock, server_hostname=self._headroom_name
        )


def host_of(place: Address) -> str:
    """Return the host of a place without its port. Raises ``ValueError``."""
    return urlsplit(f"//{place[0]}").hostname or ""


def addresses(place: Address) -> list[Address]:
    """Return all addresses that the host of a place resolves to.

    If the place has a port, the addresses have this port. Raises ``OSError`` or ``ValueError``.
    """
    parts = urlsplit(f"//{place[0]}")
    port = parts.port or place[1]
    found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    return [(str(each[4][0]), port) for each in found]


def holds_of(followed: Iterable[Followed]) -> HoldsSeen:
    """Return the holds that these extenders reported and that have not expired, or None if no
    extender reported any."""
    lines = [
        each.holds
        for each in followed
        if each.holds is not None
        and not each.is_gone
        and each.line_age_s is not None
        and each.line_age_s < EXPIRES_S
    ]
    return HoldsSeen(tuple(hold for line in lines for hold in line.holds) if lines else None)


class HoldsUpdater:
    """Applies the holds of the extenders whenever they change."""

    def __init__(
        self, followed: Callable[[], Iterable[Followed]], apply: Callable[[Sequence[Event]], None]
    ) -> None:
        self._followed = followed
        self._apply = apply
        self._last = HoldsSeen(None)

    def start(self, loops: Loops) -> None:
        loops.start("holds", self.once, HOLDS_EVERY_S)

    async def once(self) -> None:
        seen = holds_of(self._followed())
        if seen != self._last:
            self._apply([seen])
            self._last = seen
