"""`top --watch`: what it lists, how it fits the terminal, and how it ends."""

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
from headroom.kubectl.watch_frame import (
    ASCII,
    BLOCKS,
    Choice,
    Detail,
    Reading,
    bar,
    frame,
    plain,
    sparkline,
)
from headroom.kubectl.watched_fleet import KINDS, RISKS, Order, Row, WatchedFleet, ordered
from tests.controlplane import ROOT
from tests.kubectl.bodies import GIB
from tests.serving import serving
from tests.waiting import PATIENCE_S, until

FIX = "lower headroom.gpu/vram to 11.5Gi or less: that fits now"
RISK = "26.0 GiB are reserved or used of 24.0 GiB: 2.0 GiB too much"
AT_S = 1_800_000_000.0


def map_body(**changed: Any) -> Any:
    """Return an answer of /v1/map: a has two GPUs, b one, and c reports none."""
    return {
        **{"version": "r.1.7", "complete": True, "models": ["L4", "H100"]},
        "reasons": ["", "GPU report of the node is stale", "no GPU report from the node"],
        **{"node": ["a", "b", "c"], "reason": [0, 0, 2], "devices": [2, 1, 0]},
        **{"gpu": ["0", "1", "0"], "model": [0, 0, 1], "memory_gib": [24.0, 24.0, 80.0]},
        **{"reserved": [50, 108, 90], "used": [80, 40, -1], "sm": [-1, 30, 60]},
        **{"state": [1, 0, 0], "risk": [0, 4, 0], "stale": [], "cordoned": ["b"], **changed},
    }


def fleet(**changed: Any) -> WatchedFleet:
    found = WatchedFleet()
    found.take(map_body(**changed))
    return found


def reading(found: WatchedFleet, detail: Detail | None = None) -> Reading:
    model = {
        **{"devices": 3, "allocatable_bytes": 128 * GIB, "reservation_bytes": 96 * GIB},
        **{"used_bytes": 32 * GIB, "headroom_bytes": 12 * GIB},
    }
    risk = {
        **{"node": "a", "gpu": "1", "pods": [{"namespace": "team-a", "name": "llm"}]},
        **{"kind": "overcommitted", "message": RISK},
    }
    group = {"namespace": "team-b", "owner_name": "job", "pods": 3, "oldest_s": 300.0}
    return Reading(
        at_s=AT_S,
        fleet={"nodes": 3, "models": [model]},
        overview={
            "totals": {"at_risk": 1, "waiting_pods": 3, "broken": 0},
            "at_risk": [risk],
            "waiting": [group | {"message": "no node can take the pod", "fix": FIX}],
            "broken": [],
        },
        history={
            "at_s": [AT_S - 1800, AT_S],
            "series": [{"kind": "reserved", "values": [64 * GIB, 96 * GIB]}],
        },
        gpus=found.gpus(),
        nodes=found.nodes(),
        detail=detail,
    )


def detail() -> Detail:
    device = {
        **{"model": "L4", "memory_bytes": 24 * GIB, "used_bytes": 10 * GIB, "unhealthy": None},
        **{"headroom_bytes": -2 * GIB, "unattributed_bytes": 3 * GIB},
    }
    holder = {
        **{"namespace": "team-a", "name": "llm", "requested_bytes": 6 * GIB, "reserved": True},
        **{"measured_bytes": 7 * GIB, "charged_bytes": 7 * GIB, "exceeds_by_bytes": GIB},
    }
    used = {"kind": "used", "values": [5 * GIB, 10 * GIB]}
    history = {"at_s": [AT_S - 1800, AT_S], "series": [used]}
    return Detail(
        "a",
        "1",
        {"device": device, "holders": [holder], "risk": {"kind": "growing", "message": RISK}},
        history,
    )


def test_a_frame_of_80_columns_and_24_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    found = reading(fleet(), detail())
    rows = ordered(found.gpus, Order.WORST)
    lines = frame(found, rows, Choice(), 80, 24, AT_S + 2)
    head, *texts = [text for _, text in lines]
    assert re.fullmatch(r"3 nodes, 3 GPUs, 128\.0 GiB allocatable +As of [\d:]+ \S+, live", head)
    assert [text.rstrip() for text in texts] == [
        "RESERVED  96.0 GiB   75 %  [#########---]               ▅▅▅▅▅▅▅▅▅▅▅▅▇  last hour",
        "USED      32.0 GiB   25 %  [###---------]",
        "HEADROOM  12.0 GiB    9 %  [#-----------]",
        "At risk 1 GPU   Waiting 3 pods   Broken 0 problems",
        "  a GPU 1: overcommitted: 26.0 GiB are reserved or used of 24.0 GiB: 2.0 GiB too",
        "    much; team-a/llm",
        "  team-b/job (3 pods waiting for 5m): no node can take the pod",
        f"    Fix: {FIX}",
        "NODE           GPU  RESERVED      USED             SM  STATE",
        "a                1  108 % ######   40 % ##----   30 %  overcommitted",
        "b                0   90 % #####-      -          60 %  node cordoned",
        "a                0   50 % ###---   80 % #####-      -  unhealthy",
        *[""] * 5,
        "a GPU 1, L4",
        "  full soon: 26.0 GiB are reserved or used of 24.0 GiB: 2.0 GiB too much",
        "  in use 10.0 GiB of 24.0 GiB                     ▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▄  last hour",
        "  3.0 GiB unattributed: used by no known pod",
        "  team-a/llm: 6.0 GiB reserved, 7.0 GiB in use, 1.0 GiB more than reserved",
        "1 of 3 by worst   q quit  n/g nodes, GPUs  w/a/r/u/m sort  t troubled  / search",
    ]
    assert [style for style, _ in lines[10:13]] == ["selected", "red", "red"]


@pytest.mark.parametrize("by_node", [False, True])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (20, 5), (40, 12), (132, 43), (250, 3)])
def test_every_frame_fits_the_terminal(width: int, height: int, by_node: bool) -> None:
    many = 100
    body = map_body(
        node=[f"gke-prod-gpu-pool-1a2b3c4d-{n}" for n in range(many)],
        **{"reason": [0] * many, "devices": [1] * many, "gpu": ["0"] * many, "model": [0] * many},
        **{"memory_gib": [24.0] * many, "reserved": [5] * many, "used": [1000] * many},
        **{"sm": [100] * many, "state": [0] * many, "risk": [1] * many},
    )
    found = WatchedFleet()
    found.take(body)
    shown = reading(found)
    for selected in (0, 50, 10_000):
        choice = Choice(by_node=by_node, selected=selected)
        rows = ordered(shown.nodes if by_node else shown.gpus, Order.NAME)
        lines = frame(shown, rows, choice, width, height, AT_S, "the console does not answer")
        assert len(lines) <= height
        assert [text for _, text in lines if len(text) > width] == []
        assert choice.selected == min(selected, many - 1)
        if height >= 24:
            assert [style for style, _ in lines].count("selected") == 1


def test_only_changed_nodes_are_read_again() -> None:
    found = fleet()
    changes = map_body(
        **{"complete": False, "version": "r.1.9", "node": ["b"], "reason": [1], "devices": [1]},
        **{"gpu": ["0"], "model": [1], "reserved": [95], "used": [91], "sm": [10]},
        **{"memory_gib": [80.0], "state": [2], "risk": [0], "stale": ["a"], "cordoned": []},
    )
    found.take(changes)
    assert found.version == "r.1.9"
    assert [(row.node, row.gpu, row.reserved, row.problems) for row in found.gpus()] == [
        ("a", "0", 50, ("GPU report of the node is stale", "unhealthy")),
        ("a", "1", 108, ("GPU report of the node is stale", "overcommitted")),
        ("b", "0", 95, ("GPU report of the node is stale", "cordoned")),
    ]


def test_nodes_have_the_sums_of_their_gpus() -> None:
    found = {row.node: row for row in fleet().nodes()}
    assert (found["a"].devices, found["a"].memory_gib, found["a"].reserved) == (2, 48.0, 79)
    assert (found["a"].used, found["a"].sm, found["a"].gpu) == (60, -1, "1")
    assert found["a"].problems == ("1 of 2 GPUs: overcommitted", "1 of 2 GPUs: unhealthy")
    assert found["b"].problems == ("node cordoned",)
    assert (found["c"].gpu, found["c"].reserved) == (None, -1)
    assert found["c"].problems == ("no GPU report from the node",)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (Order.WORST, ["a1", "b0", "a0"]),
        (Order.NAME, ["a0", "a1", "b0"]),
        (Order.RESERVED, ["a1", "b0", "a0"]),
        (Order.USED, ["a0", "a1", "b0"]),
        (Order.SM, ["b0", "a1", "a0"]),
    ],
)
def test_each_key_sorts(order: Order, expected: list[str]) -> None:
    assert [f"{row.node}{row.gpu}" for row in ordered(fleet().gpus(), order)] == expected


def test_a_search_and_the_troubled_filter_rows() -> None:
    def names(**filters: Any) -> list[Row]:
        return ordered(fleet(cordoned=[]).gpus(), Order.NAME, **filters)

    assert [row.node for row in names(search="h100")] == ["b"]
    assert [row.gpu for row in names(search="overc")] == ["1"]
    assert [(row.node, row.gpu) for row in names(troubled=True)] == [("a", "0"), ("a", "1")]


def test_a_sparkline_holds_each_value_until_the_next() -> None:
    at_s, values = [AT_S - 3600, AT_S - 1800, AT_S - 900, AT_S], [0.0, None, 8.0, 4.0]
    assert sparkline(at_s, values, 8.0, 9) == "▁▁▁▁  ██▅"
    assert sparkline(at_s, values, 8.0, 9, ASCII) == "____  ##="
    assert sparkline([AT_S - 1800, AT_S], [8.0, 8.0], 8.0, 5) == "  ███"
    assert sparkline([], [], 8.0, 5) == sparkline([AT_S], [1.0], 0.0, 5) == "     "
    assert (bar(0, 6), bar(1, 6), bar(99, 6), bar(130, 6)) == (
        "------",
        "#-----",
        "#####-",
        "######",
    )
    assert bar(-1, 6) == "      "


def test_the_words_are_those_of_the_page() -> None:
    script = (ROOT / "extender/console/page/fleet.js").read_text(encoding="utf-8")
    (risks,) = re.findall(r"const RISKS = \[(.*)\];", script)
    assert re.findall(r'"([^"]+)"', risks) == [*RISKS]
    script = (ROOT / "extender/console/page/device.js").read_text(encoding="utf-8")
    (kinds,) = re.findall(r"const RISKS = \{(.*)\};", script)
    words_of = dict(re.findall(r'(\w+): "([^"]+)"', kinds))
    assert {kind: words for kind, words in words_of.items() if kind != words} == KINDS
    for words in (" more than reserved", "no reservation", "use unknown", " free for reservation"):
        assert words in script


def test_old_data_show_their_age_and_the_reason() -> None:
    found = reading(fleet())
    lines = [
        text for _, text in frame(found, found.gpus, Choice(), 80, 24, AT_S + 95, "it is gone")
    ]
    assert re.fullmatch(r"Not up to date since [\d:]+ \S+ \(95s\): it is gone", lines[1])
    assert lines[0] == "3 nodes, 3 GPUs, 128.0 GiB allocatable"
    silent = [text for _, text in frame(found, found.gpus, Choice(), 80, 24, AT_S + 9)]
    assert re.fullmatch(
        r"Not up to date since [\d:]+ \S+ \(9s\): the console does not answer", silent[1]
    )
    text = plain(found, found.gpus, Choice(), AT_S)
    assert "\x1b" not in text
    assert not set(text) & set(BLOCKS)
    assert "a                1  " in text.replace("GPU", "")


@contextmanager
def on_terminal(
    address: str, *arguments: str, **variables: str
) -> Iterator[tuple[Any, int, Callable[[], str]]]:
    """Run the plugin on a terminal. Yields the process, the terminal, and what was written."""
    ours, theirs = pty.openpty()
    resize(theirs, 80, 24)
    before = termios.tcgetattr(theirs)
    environment = {
        **{"PATH": "/usr/bin:/bin", "HEADROOM_SERVER": address},
        **{"TERM": "xterm", "LANG": "C.UTF-8", **variables},
    }
    # setsid makes it the controlling terminal, which sends Ctrl-C and the change of its size. A
    # shell lets its background jobs, such as these tests, ignore Ctrl-C.
    command = ["env", "--default-signal=INT", "setsid", "--ctty"]
    process = subprocess.Popen(
        [*command, sys.executable, "-m", "headroom.plugin", "top", *arguments],
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


#: Leaves the alternate screen.
RESTORED = "\x1b[?1049l"
FLEET = """\
nodes:
  - {name: shared, count: 2, gpus: 2, memory: 24Gi, model: L4, sharing: time-slicing, replicas: 4}
"""


@pytest.mark.slow
def test_it_follows_the_terminal_and_a_lost_console_and_restores_the_terminal() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serving(FLEET))
        with on_terminal(server.debug, "gpu", "-w") as (process, terminal, written):
            until(lambda: "4 GPUs, 96.0 GiB allocatable" in written(), "the first frame")
            until(lambda: "No pod holds memory of this GPU." in written(), "the selected GPU")
            assert "MEMORY" not in written()
            resize(terminal, 120, 30)
            until(lambda: "MEMORY" in written(), "a wider table")
            os.write(terminal, b"n")
            until(lambda: "GPUS" in written(), "nodes")
            stack.close()
            until(lambda: "Not up to date since " in written(), "the age of the data")
            os.write(terminal, b"\x03")
            assert process.wait(PATIENCE_S) == 0
            until(lambda: RESTORED in written(), "a restored terminal")
            assert "Traceback" not in written()


@pytest.mark.parametrize(("keys", "status"), [(b"q", 0), (b"", 143)])
@pytest.mark.slow
def test_q_and_sigterm_restore_the_terminal(keys: bytes, status: int) -> None:
    with (
        serving(FLEET) as server,
        on_terminal(server.debug, "--watch") as (process, terminal, written),
    ):
        until(lambda: "2 nodes, 4 GPUs" in written(), "the first frame")
        if keys:
            os.write(terminal, keys)
        else:
            process.terminate()
        assert process.wait(PATIENCE_S) == status
        until(lambda: RESTORED in written(), "a restored terminal")


@pytest.mark.slow
def test_a_terminal_that_cannot_move_its_cursor_gets_frames_that_fit() -> None:
    with (
        serving(FLEET) as server,
        on_terminal(server.debug, "gpu", "-w", TERM="dumb") as (process, terminal, written),
    ):
        until(lambda: "4 GPUs, 96.0 GiB allocatable" in written(), "the first frame")
        until(lambda: "shared-0000: reading ..." in written(), "its last line")
        lines = written().replace("\r", "").splitlines()
        assert lines[0].startswith("2 nodes, 4 GPUs, 96.0 GiB allocatable")
        assert max(map(len, lines)) <= 80
        assert "\x1b" not in written()
        os.write(terminal, b"\x03")
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_a_locale_that_is_not_installed_gets_ascii() -> None:
    """ssh sends the locale of the other host; Python then writes UTF-8, but curses does not."""
    fleet = FLEET.replace("name: shared", "name: gke-prod-gpu-pool-with-a-long-name-1a2b3c4d")
    with (
        serving(fleet) as server,
        on_terminal(server.debug, "gpu", "-w", LC_ALL="xx_XX.UTF-8") as (
            process,
            terminal,
            written,
        ),
    ):
        until(lambda: "No pod holds memory of this GPU." in written(), "the selected GPU")
        until(lambda: "_  last hour" in written(), "a sparkline")
        assert re.search(r"gke-prod-[\w-]*~[\w-]*-0000 ", written())
        assert written().isascii()
        os.write(terminal, b"q")
        assert process.wait(PATIENCE_S) == 0


def test_options_that_it_does_not_have_are_rejected_with_an_example() -> None:
    for arguments, message in (
        (["pod"], "--watch lists nodes or GPUs, with the pods of the selected GPU, not pods."),
        (["-o", "json"], "--watch and --output exclude each other."),
        (["--sort-by", "headroom"], "--watch does not sort by headroom;"),
    ):
        with pytest.raises(CommandError, match=re.escape(message)) as raised:
            app(
                ["--server", "http://127.0.0.1:1", "top", "--watch", *arguments],
                standalone_mode=False,
            )
        assert raised.value.exit_code == 2
        assert "Example: " in str(raised.value)
