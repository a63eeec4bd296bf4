"""Terminal pictures: the output of real commands, as HTML that a browser draws."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from headroom.kubectl.debug_api_client import DebugApi
from headroom.kubectl.transport import Address
from headroom.kubectl.watch import Reader
from headroom.kubectl.watch_frame import Choice, Reading, Style, frame
from headroom.kubectl.watched_fleet import Row, ordered
from tests.waiting import until

COLUMNS, ROWS = 100, 25
_STYLES: dict[Style, str] = {
    "": "",
    "bold": "bold",
    "red": "red",
    "quiet": "dim",
    "selected": "#1b1f24 on #d9dfe6",
}
_PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #1b1f24; color: #d9dfe6; width: max-content; }}
pre {{ margin: 0; padding: 16px 20px; font: 14px/1.35 "DejaVu Sans Mono", monospace; }}
</style><pre>{code}</pre>"""


def command(server: str, *arguments: str) -> str:
    """Run ``kubectl headroom`` on a terminal of ``COLUMNS`` columns; return the page."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"HEADROOM_SERVER": server, "TERM": "xterm-256color"}
    started = [sys.executable, "-m", "headroom.plugin", *arguments]
    with subprocess.Popen(started, stdout=theirs, env=environment) as process:
        os.close(theirs)
        output = b""
        try:
            while part := os.read(ours, 1 << 16):
                output += part
        except OSError:
            pass  # Linux reports the end of a terminal as an error.
        finally:
            os.close(ours)
    assert process.returncode == 0, output
    typed = Text(f"$ kubectl headroom {' '.join(arguments)}", style="bold")
    return _page(typed, Text.from_ansi(output.decode().replace("\r\n", "\n")))


def watch(server: str, search: str) -> str:
    """Return the page with a frame of ``top gpu --watch``, with the pods of its first GPU."""
    choice = Choice(search=search)
    reader = Reader(lambda: DebugApi(Address(server)))
    threading.Thread(target=reader.follow, daemon=True).start()
    reader.select(_rows(reader.reading, choice)[0])
    until(lambda: reader.reading.detail is not None, "the pods of a GPU")
    reading = reader.reading
    lines = frame(reading, _rows(reading, choice), choice, COLUMNS, ROWS, time.time())
    return _page(*(Text(f"{text:{COLUMNS}}", style=_STYLES[style]) for style, text in lines))


def _rows(reading: Reading, choice: Choice) -> list[Row]:
    return ordered(reading.gpus, choice.order, choice.search, choice.troubled)


def _page(*lines: Text) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    for line in lines:
        console.print(line)
    code = console.export_html(theme=DIMMED_MONOKAI, inline_styles=True, code_format="{code}")
    return _PAGE.format(code=code.rstrip())
