"""Takes over the history of another console when this one starts.

The other console sends its history once, as lines of JSON: a head, then a line for each node. A
console that starts while no other one runs begins without history.
"""

import http.client
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import structlog

from extender.observability.journal_follower import Address, Peer, addresses, connect, host_of
from extender.state.history import RESOLUTION_S, UNIT_BYTES, Block, History, Layout, Totals
from extender.state.holdings import Minute

log = structlog.get_logger()

PATH = "/v1/history/stream"
#: Version of the lines. A console takes over no other version.
FORMAT = 1
#: Seconds for which another console is looked for, and between two attempts.
WITHIN_S = 60.0
RETRY_S = 5.0
#: Seconds without a byte after which a connection is given up.
SILENT_S = 15.0
MAX_LINE_BYTES = 4 << 20
#: Limit of all lines together: more than any history has.
MAX_LINES_BYTES = 400 << 20


class Head(msgspec.Struct, frozen=True):
    """The first line."""

    replica: str
    format: int
    resolution_s: int
    unit_bytes: int
    totals: tuple[Totals, ...]
    held: tuple[Minute, ...] = ()


class PackedRows(msgspec.Struct, frozen=True, array_like=True):
    """A block; ``layout`` is a position in the layouts of its line."""

    layout: int
    first_step: int
    last_step: int
    packed: bytes


class NodeLine(msgspec.Struct, frozen=True):
    node: str
    layouts: tuple[Layout, ...]
    blocks: tuple[PackedRows, ...]


_heads = msgspec.json.Decoder(Head)
_nodes = msgspec.json.Decoder(NodeLine)


class NotTaken(Exception):
    """The history of the other console cannot be taken over. The message is the reason."""


def head_line(replica: str, history: History) -> bytes:
    totals = tuple(history.totals())
    held = tuple(history.held.since(0.0))
    head = Head(replica, FORMAT, RESOLUTION_S, UNIT_BYTES, totals, held)
    return msgspec.json.encode(head) + b"\n"


def node_line(node: str, blocks: Sequence[Block]) -> bytes:
    layouts: dict[int, Layout] = {id(each.layout): each.layout for each in blocks}
    positions = {key: position for position, key in enumerate(layouts)}
    rows = (
        PackedRows(positions[id(each.layout)], each.first_step, each.last_step, each.packed)
        for each in blocks
    )
    return msgspec.json.encode(NodeLine(node, tuple(layouts.values()), tuple(rows))) + b"\n"


def read_node(line: bytes) -> tuple[str, list[Block]]:
    """Return the node and the blocks of a line; raise ``NotTaken``."""
    try:
        read = _nodes.decode(line)
        return read.node, [
            Block(read.layouts[each.layout], each.first_step, each.last_step, each.packed)
            for each in read.blocks
        ]
    except (ValueError, RecursionError, IndexError) as err:
        raise NotTaken(f"a line of its history cannot be read: {err}") from err


class HistoryHandover:
    """Reads the history of one of the consoles at ``places`` once, on a thread.

    ``take`` runs a function on the thread that owns ``history``. ``name`` is this process's own.
    ``ca`` is the file with the CA of the consoles' ports, if they use TLS.
    """

    def __init__(
        self,
        places: Sequence[Address],
        name: str,
        history: History,
        take: Callable[[Callable[[], None]], object],
        ca: Path | None = None,
    ) -> None:
        self._places = places
        self._name = name
        self._history = history
        self._take = take
        self._ca = ca
        #: Returns the header that authenticates this process; empty: none is sent.
        self.authorization: Callable[[], str] = str
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)

    def start(self) -> None:
        if self._places:
            self._thread.start()

    def stop(self) -> None:
        """Stop looking for another console. A reading in progress ends with its connection."""
        self._stop.set()

    def _run(self) -> None:
        until_s = time.monotonic() + WITHIN_S
        problem = "no other console answered"
        while not self._stop.is_set() and time.monotonic() < until_s:
            for place in self._places:
                try:
                    for address in addresses(place):
                        if replica := self._read(Peer(address, host_of(place), self._ca)):
                            log.info("history_taken_over", console=replica)
                            return
                except (NotTaken, OSError, ValueError, http.client.HTTPException) as err:
                    problem = str(err) or type(err).__name__
                except Exception:  # a thread that ended would go unnoticed
                    log.exception("history_not_taken_over")
                    return
            self._stop.wait(RETRY_S)
        log.info("history_begins", message=problem, hint="the console has no earlier history")

    def _read(self, peer: Peer) -> str:
        """Take over the history of a console. Return the name of the console; "" if it is this
        process itself. Raise ``NotTaken``, ``OSError`` or ``HTTPException``."""
        with closing(connect(peer, SILENT_S)) as connection:
            shown = self.authorization()
            connection.request("GET", PATH, headers={"Authorization": shown} if shown else {})
            with connection.getresponse() as answer:
                if answer.status != 200:
                    raise NotTaken(f"it answered {answer.status} {answer.reason}")
                return self._take_lines(iter(lambda: answer.readline(MAX_LINE_BYTES), b""))

    def _take_lines(self, lines: Iterable[bytes]) -> str:
        head: Head | None = None
        left_bytes = MAX_LINES_BYTES
        for line in lines:
            left_bytes -= len(line)
            if not line.endswith(b"\n") or left_bytes < 0:
                raise NotTaken("a line of its history is too long, or was cut off")
            if head is None:
                head = _head(line)
                if head.replica == self._name:
                    return ""
                self._take(partial(self._history.adopt_totals, head.totals))
                self._take(partial(self._history.held.adopt, head.held))
                continue
            self._take(partial(self._history.adopt, *read_node(line)))
            if self._stop.is_set():
                break
        if head is None:
            raise NotTaken("it sent nothing")
        return head.replica


def _head(line: bytes) -> Head:
    try:
        head = _heads.decode(line)
    except (ValueError, RecursionError) as err:
        raise NotTaken(f"its history cannot be read: {err}") from err
    if (head.format, head.resolution_s, head.unit_bytes) != (FORMAT, RESOLUTION_S, UNIT_BYTES):
        raise NotTaken("it is of another version, whose history cannot be read")
    return head
