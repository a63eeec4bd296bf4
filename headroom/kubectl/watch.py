"""`top --watch`: reads the console in a thread, and draws on the terminal until q or Ctrl-C.

curses writes only what differs from the last frame, so the screen does not flicker, and it restores
the terminal at the end. Into a pipe, and on a terminal that cannot move its cursor, each frame is
written as plain text.
"""

import contextlib
import locale
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headroom.kubectl.debug_api_client import BAD_INPUT, CommandError, DebugApi
from headroom.kubectl.output import show
from headroom.kubectl.watch_frame import (
    ASCII,
    BLOCKS,
    PIPE_WIDTH,
    Choice,
    Detail,
    Reading,
    Style,
    frame,
    plain,
)
from headroom.kubectl.watched_fleet import Order, Row, WatchedFleet, ordered

#: Seconds between two readings; the history has a value every 10 s.
EVERY_S = 2.0
_HISTORY_EVERY_S = 10.0
#: Seconds between two frames in a pipe.
_PIPE_EVERY_S = 10.0
#: Maximum seconds to wait for a key. Then the frame is drawn again, with the new age of the data.
_KEY_S = 0.25
_ORDERS = {
    "w": Order.WORST,
    "a": Order.NAME,
    "r": Order.RESERVED,
    "u": Order.USED,
    "m": Order.SM,
}
_ESCAPE, _BACKSPACES, _ENTERS = "\x1b", ("\x7f", "\x08"), ("\n", "\r")


class Reader:
    """Reads the console again and again; ``reading`` is the last complete set of answers.

    After an error it makes a new connection, because another console can be ready.
    """

    def __init__(self, connect: Callable[[], DebugApi]) -> None:
        """Read once. Raises ``CommandError``."""
        self._connect, self._api = connect, connect()
        self._fleet = WatchedFleet()
        self._history: Any = None
        self._history_at_s = float("-inf")
        #: Node and name of the selected GPU, and its UUID; None before it was read.
        self._uuid: tuple[tuple[str, str], str] | None = None
        #: The GPU whose pods are shown. Set by the thread that draws.
        self.wanted: tuple[str, str] | None = None
        #: Why the last attempt failed; empty if it did not.
        self.problem = ""
        self.observes = False
        self._wake = threading.Event()
        self.reading = self._read()

    def follow(self) -> None:
        """Read every ``EVERY_S``, and at once after ``select``. Never returns."""
        while True:
            self._wake.wait(EVERY_S)
            self._wake.clear()
            try:
                self.reading = self._read()
                self.problem = ""
            except CommandError as err:
                self.problem = str(err)
                self._fleet, self._uuid = WatchedFleet(), None
                with contextlib.suppress(CommandError):
                    self._api = self._connect()

    def select(self, row: Row | None) -> None:
        """Read the GPU of a row with the next answers."""
        wanted = None if row is None or row.gpu is None else (row.node, row.gpu)
        if wanted != self.wanted:
            self.wanted = wanted
            self._wake.set()

    def _read(self) -> Reading:
        api, now_s = self._api, time.time()
        self._fleet.take(api.get("map", after=self._fleet.version))
        fleet, overview = api.get("fleet"), api.get("overview", limit=10)
        if time.monotonic() - self._history_at_s >= _HISTORY_EVERY_S or self._history is None:
            self._history = api.get("history", "fleet")
            self._history_at_s = time.monotonic()
        reading = Reading(
            now_s, fleet, overview, self._history, self._fleet.gpus(), self._fleet.nodes()
        )
        inputs = api.get("inputs")["inputs"]
        return replace(reading, detail=self._detail(), observes=self.observes, inputs=inputs)

    def _detail(self) -> Detail | None:
        if self.wanted is None:
            return None
        node, gpu = self.wanted
        try:
            if self._uuid is None or self._uuid[0] != (node, gpu):
                devices = self._api.get("nodes", node)["node"]["devices"]
                uuid = next((d["uuid"] for d in devices if d["gpu"] == gpu), None)
                if uuid is None:
                    return None
                self._uuid = (node, gpu), uuid
            path = "nodes", node, "devices", self._uuid[1]
            body, history = self._api.get(*path), self._api.get("history", *path)
        except CommandError as err:
            if err.exit_code == 1:  # the node or GPU has gone since
                self._uuid = None
                return None
            raise
        return Detail(node, gpu, body, history)


def keep_watching(connect: Callable[[Callable[[str], object]], DebugApi], choice: Choice) -> None:
    """Show the fleet until q, Ctrl-C or a signal. Raises ``CommandError`` if nothing can be read.

    ``connect`` returns a client; it is given a function that is called if Headroom observes.
    """
    # Libraries would write their warnings across the screen.
    logging.getLogger().addHandler(logging.NullHandler())
    observed: list[str] = []
    reader = Reader(lambda: connect(observed.append))
    reader.observes = bool(observed)
    threading.Thread(target=reader.follow, daemon=True).start()
    if not sys.stdout.isatty():
        with contextlib.suppress(KeyboardInterrupt):
            _print_frames(reader, choice, PIPE_WIDTH)
        return
    try:
        import curses
    except ImportError as err:
        raise CommandError(
            "--watch needs Python's module curses, which this platform lacks. To print the list "
            "every 10 s instead: kubectl headroom top --watch | cat",
            BAD_INPUT,
        ) from err
    # A terminal that is closed, or kill, must not leave the alternate screen behind.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    os.environ.setdefault("ESCDELAY", "25")
    try:
        curses.setupterm()
        with contextlib.suppress(KeyboardInterrupt):
            if curses.tigetstr("cup"):
                curses.wrapper(_draw_until_quit, reader, choice)
            else:  # such as TERM=dumb: the cursor cannot be moved
                _print_frames(reader, choice, shutil.get_terminal_size().columns)
    except curses.error as err:
        raise CommandError(
            f"the terminal cannot be used: {err}; set TERM. Example: TERM=xterm", BAD_INPUT
        ) from err


def _rows(reading: Reading, choice: Choice) -> list[Row]:
    listed = reading.nodes if choice.by_node else reading.gpus
    return ordered(listed, choice.order, choice.search, choice.troubled)


def _print_frames(reader: Reader, choice: Choice, width: int) -> None:
    while True:
        reading, now_s = reader.reading, time.time()
        rows = _rows(reading, choice)
        text = plain(reading, rows, choice, now_s, reader.problem, width)
        for line in [*text.split("\n"), ""]:
            show(line)
        reader.select(rows[0] if rows else None)
        time.sleep(_PIPE_EVERY_S)


def _draw_until_quit(screen: Any, reader: Reader, choice: Choice) -> None:
    import curses

    with contextlib.suppress(curses.error):  # some terminals cannot hide the cursor
        curses.curs_set(0)
    styles = _styles()
    levels = BLOCKS if _shows_blocks() else ASCII
    screen.timeout(int(1000 * _KEY_S))
    known: tuple[Any, ...] = ()
    rows: list[Row] = []
    while True:
        reading = reader.reading
        wanted = (reading, choice.by_node, choice.order, choice.search, choice.troubled)
        if not known or known[0] is not reading or known[1:] != wanted[1:]:
            known, rows = wanted, _rows(reading, choice)
        height, width = screen.getmaxyx()
        lines = frame(reading, rows, choice, width, height, time.time(), reader.problem, levels)
        reader.select(rows[choice.selected] if rows else None)
        screen.erase()
        for number, (style, text) in enumerate(lines):
            # The last cell of a screen cannot be written without an error.
            with contextlib.suppress(curses.error):
                screen.addnstr(number, 0, text, width, styles[style])
        screen.refresh()
        try:
            key = screen.get_wch()
        except curses.error:
            continue
        if not _pressed(key, choice, height):
            return


def _shows_blocks() -> bool:
    """Return whether curses shows characters that are not ASCII. It uses the encoding of the
    locale; ``sys.stdout.encoding`` is UTF-8 also in locale C, and in locales that are not
    installed, as after ssh from a host that has them."""
    try:
        BLOCKS.encode(locale.getencoding())
    except (UnicodeError, LookupError):
        return False
    return True


def _styles() -> dict[Style, int]:
    import curses

    red = curses.A_BOLD
    if curses.has_colors() and not os.environ.get("NO_COLOR"):
        curses.use_default_colors()
        curses.init_pair(1, curses.COLOR_RED, -1)
        red = curses.color_pair(1)
    return {
        "": curses.A_NORMAL,
        "bold": curses.A_BOLD,
        "red": red,
        "quiet": curses.A_DIM,
        "selected": curses.A_REVERSE,
    }


def _pressed(key: int | str, choice: Choice, height: int) -> bool:
    """Apply a key; return whether to go on."""
    import curses

    if choice.typing:
        _typed(key, choice)
        return True
    steps = {
        curses.KEY_UP: -1,
        curses.KEY_DOWN: 1,
        "k": -1,
        "j": 1,
        curses.KEY_PPAGE: -height // 2,
        curses.KEY_NPAGE: height // 2,
        curses.KEY_HOME: -(10**9),
        curses.KEY_END: 10**9,
    }
    if key in steps:
        choice.selected = max(0, choice.selected + steps[key])
    elif key in ("n", "g"):
        choice.by_node, choice.selected = key == "n", 0
    elif key in _ORDERS:
        choice.order, choice.selected = _ORDERS[str(key)], 0
    elif key == "t":
        choice.troubled, choice.selected = not choice.troubled, 0
    elif key == "/":
        choice.typing = True
    elif key == _ESCAPE:
        choice.search = ""
    return key != "q"


def _typed(key: int | str, choice: Choice) -> None:
    """Apply a key while the search is typed."""
    import curses

    if key in _ENTERS:
        choice.typing = False
    elif key == _ESCAPE:
        choice.typing, choice.search = False, ""
    elif key in _BACKSPACES or key == curses.KEY_BACKSPACE:
        choice.search = choice.search[:-1]
    elif isinstance(key, str) and key.isprintable():
        choice.search = f"{choice.search}{key}"[:100]
    choice.selected = 0
