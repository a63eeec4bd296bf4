"""Terminal pictures: the output of real commands as HTML that a browser draws."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

COLUMNS, ROWS = 100, 25
_PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #1b1f24; color: #d9dfe6; width: max-content; }}
pre {{ margin: 0; padding: 16px 20px; font: 14px/1.35 "DejaVu Sans Mono", monospace; }}
</style><pre>{code}</pre>"""


def command(server: str, *arguments: str) -> str:
    """Run ``kubectl headroom`` on a terminal with ``COLUMNS`` columns. Return the page."""
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


def _page(*lines: Text) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    for line in lines:
        console.print(line)
    code = console.export_html(theme=DIMMED_MONOKAI, inline_styles=True, code_format="{code}")
    return _PAGE.format(code=code.rstrip())
