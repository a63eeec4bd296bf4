"""`top --watch`: shows the table of `top` on the whole terminal until Ctrl-C."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headroom.contract.printable import printable
from headroom.kubectl.debug_api_client import BAD_INPUT, CommandError, DebugApi
from headroom.kubectl.table import Style, Table, laid_out
from headroom.kubectl.top import age

#: Seconds between two readings.
EVERY_S = 2.0


def keep_showing(
    connect: Callable[[Callable[[str], object]], DebugApi], read: Callable[[DebugApi], Table]
) -> None:
    """Show what ``read`` returns until Ctrl-C. Raises ``CommandError`` if the first reading fails.

    ``connect`` returns a client, which passes its notes to the given function.
    """
    from rich.console import Console, Group  # slow to import
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        raise CommandError(
            "--watch needs a terminal that can move its cursor. "
            "Example without one: while sleep 10; do kubectl headroom top; done",
            BAD_INPUT,
        )
    # Leave the alternate screen even if the terminal is closed or the process is killed.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    notes: dict[str, None] = {}
    api = connect(notes.setdefault)
    table, at_s, problem = read(api), time.time(), ""
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            heads = [status(at_s, time.time(), problem), *(("", note) for note in notes)]
            lines = frame(heads, table, console.width, console.height)
            texts = (Text(text, style, no_wrap=True, overflow="crop") for style, text in lines)
            live.update(Group(*texts), refresh=True)
            time.sleep(EVERY_S)
            try:
                if problem:  # another console may be ready
                    api = connect(notes.setdefault)
                table, now_s = read(api), time.time()
                lost_s, problem = lost(api.get("inputs"))
                at_s = now_s - lost_s
            except CommandError as err:
                problem = str(err)


def lost(body: Any) -> tuple[float, str]:
    """Return how many seconds the console has had no contact with the API server, and the reason.

    ``body`` is the answer of /v1/inputs. The reason is empty if there is contact.
    """
    for each in body["inputs"]:
        if each["kind"] == "api_server" and each["message"]:
            return each["age_s"] or 0.0, each["message"]
    return 0.0, ""


def status(at_s: float, now_s: float, problem: str) -> tuple[Style, str]:
    """Return the first line: the time of the figures, and why there are no newer figures."""
    clock = time.strftime("%H:%M:%S %Z", time.localtime(at_s))
    if problem:
        return "red", f"Not up to date since {clock} ({age(now_s - at_s)}): {problem}"
    return "", f"As of {clock}; Ctrl-C ends it"


def frame(
    heads: list[tuple[Style, str]], table: Table, width: int, height: int
) -> list[tuple[Style, str]]:
    """Return the lines that fit the terminal: heads, the total, and as many rows as possible."""
    totals: list[tuple[Style, str]] = [("bold", line) for line in table.total]
    lines = [*heads, *totals, *laid_out(replace(table, total=[]), width)]
    if len(lines) > height:
        lines[height - 1 :] = [("", f"... {len(lines) - height + 1} more lines")]
    return [(style, printable(text)) for style, text in lines]
