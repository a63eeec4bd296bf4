"""Tests output on a terminal with golden transcripts at 80 columns, and with properties at other
widths.
"""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headroom.kubectl import top, top_pods
from headroom.kubectl.table import Table, laid_out
from tests.controlplane import ROOT
from tests.kubectl import bodies
from tests.kubectl.bodies import device, holder, node
from tests.kubectl.transcripts import TEAM, fleet, transcript
from tests.processes import starts_processes
from tests.serving import Server
from tests.waiting import PATIENCE_S

GOLDEN = Path(__file__).with_name("transcript_80.txt")


@pytest.fixture(scope="module")
@starts_processes
def server() -> Iterator[Server]:
    with fleet() as started:
        yield started


def test_every_command_at_80_columns_equals_its_transcript(server: Server) -> None:
    """To accept an intended change, run python -m tests.kubectl.transcripts 80."""
    assert transcript(server, 80) == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_no_line_is_longer_than_the_terminal(server: Server, width: int) -> None:
    lines = transcript(server, width).splitlines()
    long = [each for each in lines if len(each) > width and not each.startswith("$ ")]
    assert long == []


def on_terminal(address: str, *arguments: str, columns: int, **variables: str) -> str:
    """Run a command on a real terminal. Return its output, from both stdout and stderr."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", "headroom.plugin", "--server", address, *arguments]
    environment = {"PATH": "/usr/bin:/bin", "TERM": "xterm"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment | variables, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65_536):
            shown += chunk
    except OSError:  # On Linux, this error means that the process has closed the terminal.
        pass
    finally:
        os.close(ours)
    assert process.wait(PATIENCE_S) == 0, shown
    return shown.decode().replace("\r\n", "\n")


def test_a_terminal_gets_colours_and_its_own_width(server: Server) -> None:
    shown = on_terminal(server.debug, "top", columns=80)
    header, worst, *_ = shown.splitlines()
    assert header.startswith("\x1b[1mNODE ")
    assert worst.startswith("\x1b[31mgke-prod…c4d-xyz1 ")
    assert worst.endswith("  overcommitted\x1b[0m")
    plain = on_terminal(server.debug, "top", columns=120, NO_COLOR="1")
    assert plain.splitlines()[1].startswith("gke-prod-gpu-pool-1a2b3c4d-xyz1 ")
    assert "\x1b" not in plain


def test_a_terminal_without_unicode_gets_a_question_mark(server: Server) -> None:
    shown = on_terminal(server.debug, "top", columns=80, LC_ALL="C", PYTHONCOERCECLOCALE="0",
                        PYTHONUTF8="0", NO_COLOR="1")  # fmt: skip
    assert "\ngke-prod?c4d-xyz1 " in shown


def large_fleet(count: int) -> dict[str, list[object]]:
    """Return EKS nodes with eight GPUs. On each GPU is a pod with a long name, and some nodes have
    a problem.
    """
    found = []
    for number in range(count):
        name = f"ip-10-{number // 250}-{number % 250}-45.eu-central-1.compute.internal"
        pods = [
            holder(f"llama-3-70b-instruct-vllm-7d4c9b6f5-{number:05}", 60, 61.5, namespace=TEAM)
        ]
        gpus = [device(index, reserved=60, used=61.5, holders=pods) for index in range(8)]
        if number % 7 == 0:
            gpus[3] = device(3, reserved=83.5, holders=pods)
        stale = "GPU report of the node is stale" if number % 11 == 0 else None
        found.append(node(name, *gpus, message=stale, cordoned=number % 13 == 0))
    return bodies.nodes(*found)


TABLED: dict[str, Callable[[object], Table]] = {
    "node": top.nodes,
    "gpu": top.devices,
    "pod": lambda body: top_pods.pods(body, None),
}


@pytest.mark.parametrize("count", [1, 300])
@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("subject", TABLED)
def test_only_names_are_shortened_and_they_stay_different(
    subject: str, width: int, count: int
) -> None:
    table = TABLED[subject](large_fleet(count))

    def words(columns: int | None) -> Counter[str]:
        return Counter(" ".join(line for _, line in laid_out(table, columns)).split())

    assert max(len(line) for _, line in laid_out(table, width)) <= width
    whole, shown = words(None), words(width)
    names = {cell for row in table.rows for cell in row if re.search(r"compute|vllm|ml-", cell)}
    assert set(whole - shown) <= names
    assert len({word for word in shown if "…" in word}) == len(set(whole - shown))
