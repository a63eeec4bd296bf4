"""Checks that peaks survive a restart of the agent, because the agent keeps them in a file."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from agent.peaks import Lives
from tests.agent.lives import GIB, A, Node
from tests.agent.whole import Whole
from tests.driver import AGENT_PATH, h100
from tests.waiting import PATIENCE_S


def test_peaks_survive_a_restart_of_the_agent(tmp_path: Path) -> None:
    node = Node(tmp_path / "agent.lives.json")
    node.hold("u")
    node.sample()
    node.run("c1", "u")
    node.used[A] = 9 * GIB
    node.samples(lambda _: 9 * GIB, 10, A)
    node.used[A] = GIB
    node.start_agent()  # The old agent saved nothing at its end, as after SIGKILL.
    row = node.one(30.0)
    assert (row.peak_bytes, row.peak_partial, row.started_at) == (
        9 * GIB,
        False,
        "2026-11-20T20:16:45Z",
    )
    row = node.samples(lambda _: GIB, 20, A)
    assert (row.startup_peak_bytes, bool(row.settled_at)) == (9 * GIB, True)


def test_an_agent_that_was_away_for_long_reports_a_partial_peak(tmp_path: Path) -> None:
    node = Node(tmp_path / "agent.lives.json")
    node.hold("u")
    node.run("c1", "u")
    node.used[A] = 9 * GIB
    node.sample()
    node.start_agent()
    row = node.one(61.0)
    assert (row.peak_bytes, row.peak_partial, row.startup_peak_bytes) == (9 * GIB, True, None)


def test_a_container_that_restarts_together_with_the_agent_begins_a_new_run(tmp_path: Path) -> None:
    node = Node(tmp_path / "agent.lives.json")
    node.hold("u")
    node.run("c1", "u")
    node.used[A] = 9 * GIB
    node.sample()
    node.end("c1")
    node.run("c2", "u")
    node.used["GPU-a", "c2"] = GIB
    node.start_agent()
    row = node.one(20.0)
    assert (row.peak_bytes, row.peak_partial) == (GIB, False)


def test_runs_from_before_a_reboot_are_dropped(tmp_path: Path) -> None:
    node = Node(tmp_path / "agent.lives.json")
    node.hold("u")
    node.run("c1", "u")
    node.used[A] = 9 * GIB
    node.sample()
    node.now_s = 10.0
    node.used[A] = GIB
    node.start_agent()
    assert node.one().peak_bytes == GIB


@pytest.mark.parametrize("content", [b"", b"{", b'{"lives": [{"uid": 5}]}', b"\xff"])
def test_an_unreadable_file_is_logged_and_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "agent.lives.json"
    path.write_bytes(content)
    with capture_logs() as logs:
        node = Node(path)
    assert [log["event"] for log in logs] == ["peaks_not_kept"]
    assert "earlier peaks are unknown" in logs[0]["reason"]
    node.hold("u")
    node.run("c1", "u")
    node.used[A] = GIB
    node.sample()
    assert [life.sampled_bytes for life in _stored(path).lives] == [GIB]


def test_an_unwritable_file_is_logged_once_and_changes_no_report(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with capture_logs() as logs:
        node = Node(tmp_path / "file" / "agent.lives.json")
        node.hold("u")
        node.run("c1", "u")
        for used in (1, 2, 3):
            node.used[A] = used * GIB
            assert node.one().peak_bytes == used * GIB
    read, written = [log["reason"] for log in logs]
    assert "cannot be read, so earlier peaks are unknown" in read
    assert "cannot be written, so peaks are lost at a restart" in written


def test_the_file_is_written_when_a_peak_changes_and_otherwise_every_15_s(tmp_path: Path) -> None:
    path = tmp_path / "agent.lives.json"
    node = Node(path)
    node.hold("u")
    node.run("c1", "u")
    written: list[int] = []
    for used in (1, 1, 1, 1, 2, 1, 1, 1):
        node.used[A] = used * GIB
        before = path.stat()[stat.ST_INO] if path.exists() else 0
        node.sample()
        written.append(path.stat()[stat.ST_INO] != before)
    assert written == [True, False, False, True, True, False, False, True]


def _stored(path: Path) -> Lives:
    return msgspec.json.decode(path.read_bytes(), type=Lives)


@contextmanager
def sampling(whole: Whole, state: Path) -> Iterator[subprocess.Popen[str]]:
    """Start an agent that prints a sample every second. It keeps its peaks next to the file
    ``state``.
    """
    flags = [*whole.flags, "--no-publish", "--json", "--interval", "1", "--state", str(state)]
    kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    with subprocess.Popen(
        [sys.executable, "-m", "agent", *flags],
        env=kept | whole.environment | {"PYTHONPATH": AGENT_PATH, "NODE_NAME": "n1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until_used(process: subprocess.Popen[str], used: int) -> dict[str, Any]:
    """Wait for a sample in which the pod uses ``used`` bytes, and return its row."""
    assert process.stdout is not None
    for line in process.stdout:
        (pod,) = json.loads(line)["pods"]
        if pod["used"] == used:
            return dict(pod)
    raise AssertionError("the agent ended")


@pytest.mark.slow
def test_an_agent_process_reads_the_peaks_of_the_previous_one(tmp_path: Path) -> None:
    """The new process reads the peaks after SIGKILL and after SIGTERM."""
    state = tmp_path / "run/agent.json"
    whole = Whole(tmp_path / "node", [h100("GPU-a")], 4)
    try:
        device = whole.run("00000001-1111-4222-8333-000000000001", "p", 9 * GIB)
        pid = whole.node.processes["00000001-1111-4222-8333-000000000001", "main"].pid
        with sampling(whole, state) as agent:
            first = until_used(agent, 9 * GIB)
        assert (first["peak"], first["peakPartial"]) == (9 * GIB, True)  # The pod started at boot.
        whole.driver.use(pid, {device: 2 * GIB})
        with sampling(whole, state) as agent:
            second = until_used(agent, 2 * GIB)
            agent.terminate()
            agent.wait(PATIENCE_S)
        assert (second["peak"], second["startedAt"]) == (9 * GIB, first["startedAt"])
        whole.driver.use(pid, {device: GIB})
        with sampling(whole, state) as agent:
            assert until_used(agent, GIB)["peak"] == 9 * GIB
        # `--once` shows values that the file lacks, but does not change the file.
        before = (state.parent / "agent.lives.json").read_bytes()
        once = json.loads(whole.once("--json", "--pause", "0", "--state", str(state)).stdout)
        assert once["pods"][0]["peak"] == GIB
        assert (state.parent / "agent.lives.json").read_bytes() == before
    finally:
        whole.stop()
