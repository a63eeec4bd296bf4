"""Runs the complete demo, with the real server in its own process."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks.demo.match import Result
from benchmarks.demo.referee import Verdict
from benchmarks.demo.table import summary
from tests.deploy.pages import blocks_of, play, steps
from tests.processes import starts_processes
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
SMALL = ["--pods", "150", "--seeds", "2"]
LAST = re.compile(
    r"placed=(\d+) pending=(\d+) overcommitted_devices=(\d+) counting_overcommitted_devices=(\d+)"
)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.demo", *arguments]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


@pytest.fixture(scope="module")
@starts_processes
def small() -> subprocess.CompletedProcess[str]:
    """Run the make target of docs/get-started/local-cluster.md with fewer pods and seeds."""
    (step,) = steps(*blocks_of("get-started/local-cluster.md", "demo"))
    make, target = step.command.split()
    arguments = f"RUN={sys.executable}", f"ARGS={' '.join(SMALL)}"
    return subprocess.run(
        [make, "--no-print-directory", "--old-file=.venv/demo.stamp", *arguments, target],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_no_device_is_overcommitted_and_the_last_line_reports_it(
    small: subprocess.CompletedProcess[str],
) -> None:
    assert small.returncode == 0, small.stdout + small.stderr
    match = LAST.fullmatch(small.stdout.splitlines()[-1])
    assert match is not None, small.stdout
    placed, pending, ours, counting = map(int, match.groups())
    assert placed + pending == 2 * 150
    assert ours == 0
    assert counting > 0, (
        "the referee finds no overcommitment by counting either, so its verdict proves nothing"
    )


def test_the_page_shows_the_output_of_the_demo(small: subprocess.CompletedProcess[str]) -> None:
    play("get-started/local-cluster.md", "demo", lambda _: (small.stdout, small.returncode))


def test_the_four_pod_example_prints_the_answers_of_filter(
    small: subprocess.CompletedProcess[str],
) -> None:
    assert '"FailedAndUnresolvableNodes":{"l4-1x-shared":"insufficient GPU memory' in small.stdout
    assert "0/1 nodes are available: 1 insufficient GPU memory on any device." in small.stdout
    assert "2 pods run on 24.0 GiB of 24.0 GiB, 2 stay pending, 0 die." in small.stdout


def result(overcommitted: int) -> Result:
    verdict = Verdict(
        bound=10,
        devices_overcommitted=overcommitted,
        worst_ratio=Fraction(2),
        worst_excess_bytes=1,
        died=frozenset(),
        too_large=frozenset(),
        turned_away=frozenset(),
        shared_bytes=1,
        working_bytes=1,
        stranded_bytes=0,
    )
    return Result(verdict, waiting=())


@pytest.mark.parametrize(
    ("ours", "status"),
    [
        pytest.param([0, 0], 0, id="no device: success"),
        pytest.param([0, 1], 1, id="one device in one seed: failure"),
    ],
)
def test_exit_status_is_1_if_any_device_is_overcommitted(ours: list[int], status: int) -> None:
    line, got = summary([result(5), result(6)], [result(count) for count in ours])
    assert got == status
    assert line == (
        f"placed=20 pending=0 overcommitted_devices={sum(ours)} counting_overcommitted_devices=11"
    )


@pytest.fixture
@starts_processes
def staying(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a demo that has a terminal and waits for Ctrl-C. Yield its process and the port of its
    debug API.
    """
    terminal, far_end = os.openpty()
    # Use pytest's folder for temporary files, because a killed demo cannot delete them.
    demo = subprocess.Popen(
        command("--pods", "40", "--seeds", "1"),
        env=environment(TMPDIR=str(tmp_path), TERM="dumb"),
        cwd=ROOT,
        stdout=far_end,
    )
    os.close(far_end)
    with open(terminal, encoding="utf-8") as shown:
        try:
            port, printed = 0, ""
            for line in shown:
                if match := re.search(r"headroom --server http://127\.0\.0\.1:(\d+) top gpu", line):
                    port, printed = int(match[1]), line
                if line.startswith("Ctrl-C"):
                    break
            assert answers(port)
            shown_gpus = subprocess.check_output(printed, shell=True, cwd=ROOT, text=True)
            assert re.search(r"^TOTAL  [\d,]+ GPUs, ", shown_gpus, re.MULTILINE)
            yield demo, port
        finally:
            demo.kill()
            demo.wait()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_ctrl_c_ends_the_demo_and_its_server(staying: tuple[subprocess.Popen[bytes], int]) -> None:
    demo, port = staying
    demo.send_signal(signal.SIGINT)
    assert demo.wait(PATIENCE_S) == 0
    assert not answers(port)
