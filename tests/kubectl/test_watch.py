"""Tests the output of `top --watch`, how the output fits the terminal, and how the command ends."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Thread
from typing import Any

import pytest

from headroom.kubectl.commands import app
from headroom.kubectl.debug_api_client import CommandError
from headroom.kubectl.table import Table
from headroom.kubectl.watch import frame, lost, status
from tests.controlplane import ROOT
from tests.serving import serving
from tests.waiting import PATIENCE_S, until

AT_S = 1_800_000_000.0


def table(rows: int) -> Table:
    found = Table(("NODE", "STATE"), total=["TOTAL  2 nodes"])
    for number in range(rows):
        found.add(f"node-{number}", "ok")
    return found


def test_the_total_precedes_the_rows_and_rows_that_do_not_fit_are_counted() -> None:
    assert frame([("", "As of 10:00:00")], table(2), 80, 24) == [
        ("", "As of 10:00:00"),
        ("bold", "TOTAL  2 nodes"),
        ("bold", "NODE    STATE"),
        ("", "node-0  ok"),
        ("", "node-1  ok"),
    ]
    assert [text for _, text in frame([("", "As of 10:00:00")], table(9), 80, 5)] == [
        *("As of 10:00:00", "TOTAL  2 nodes", "NODE    STATE", "node-0  ok"),
        "... 8 more lines",
    ]


def test_the_first_line_shows_since_when_the_figures_are_outdated() -> None:
    style, text = status(AT_S, AT_S + 95, "it is gone")
    assert style == "red"
    assert re.fullmatch(r"Not up to date since [\d:]+ \S+ \(95s\): it is gone", text)
    assert re.fullmatch(r"As of [\d:]+ \S+; Ctrl-C ends it", status(AT_S, AT_S, "")[1])


def test_a_console_without_its_api_server_is_not_up_to_date() -> None:
    of = {"kind": "api_server", "age_s": 40.0, "message": "no contact with the API server"}
    other = {"kind": "prometheus", "age_s": 3.0, "message": "no answer"}
    assert lost({"inputs": [other, of]}) == (40.0, "no contact with the API server")
    assert lost({"inputs": [other, of | {"message": ""}]}) == (0.0, "")


@contextmanager
def on_terminal(
    address: str, *arguments: str, **variables: str
) -> Iterator[tuple[Any, int, Callable[[], str]]]:
    """Run the plugin on a terminal. Yield the process, the terminal, and the output."""
    ours, theirs = pty.openpty()
    resize(theirs, 80, 24)
    before = termios.tcgetattr(theirs)
    environment = {
        **{"PATH": "/usr/bin:/bin", "TERM": "xterm", "LANG": "C.UTF-8", **variables},
    }
    # setsid makes the terminal the controlling terminal of the command, so that the command gets
    # Ctrl-C and size changes. --default-signal is needed because a shell makes background jobs,
    # such as these tests, ignore Ctrl-C.
    command = ["env", "--default-signal=INT", "setsid", "--ctty"]
    process = subprocess.Popen(
        [*command, sys.executable, "-m", "headroom.plugin", "top", "--server", address, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    written: list[bytes] = []

    def read() -> None:
        while True:
            try:
                written.append(os.read(ours, 65_536))
            except OSError:
                return

    thread = Thread(target=read, daemon=True)
    thread.start()
    try:
        yield process, ours, lambda: b"".join(written).decode("utf-8", "replace")
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        os.close(theirs)
        thread.join(PATIENCE_S)
        os.close(ours)


def resize(terminal: int, columns: int, lines: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


#: The control sequence that leaves the alternate screen.
RESTORED = "\x1b[?1049l"
FLEET = """\
nodes:
  - {name: shared, count: 2, gpus: 2, memory: 24Gi, model: L4, sharing: time-slicing, replicas: 4}
"""


@pytest.mark.slow
def test_watch_follows_the_terminal_size_reports_a_lost_console_and_restores_the_terminal() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serving(FLEET))
        with on_terminal(server.debug, "gpu", "-w") as (process, terminal, written):
            until(lambda: "4 GPUs, 96.0 GiB allocatable" in written(), "the first frame")
            assert "more lines" not in written()
            resize(terminal, 80, 9)
            until(lambda: "... 2 more lines" in written(), "rows that fit a lower terminal")
            stack.close()
            until(lambda: "Not up to date since " in written(), "the age of the data")
            os.write(terminal, b"\x03")
            assert process.wait(PATIENCE_S) == 0
            until(lambda: RESTORED in written(), "a restored terminal")
            assert "Traceback" not in written()


@pytest.mark.slow
def test_sigterm_restores_the_terminal() -> None:
    with (
        serving(FLEET) as server,
        on_terminal(server.debug, "--watch") as (process, _, written),
    ):
        until(lambda: "2 nodes, 4 GPUs" in written(), "the first frame")
        process.terminate()
        assert process.wait(PATIENCE_S) == 143
        until(lambda: RESTORED in written(), "a restored terminal")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "json"], "--watch and --output json cannot be combined."),
        ([], "--watch needs a terminal that can move its cursor."),
    ],
)
def test_unsupported_options_are_rejected_with_an_example(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(CommandError, match=re.escape(message)) as raised:
        app(
            ["--server", "http://127.0.0.1:1", "top", "--watch", *arguments],
            standalone_mode=False,
        )
    assert raised.value.exit_code == 2
    assert "Example" in str(raised.value)
