"""Follows the pages of docs/get-started on a clean Debian, as a newcomer does in the first hour,
and measures the time.

    make newcomer ARGS=docs/design/first-hour.md

The newcomer has a Debian root with only the packages that the page names, and a copy of the
checked-out commit. The binaries of ``make cluster`` are already built, and the newcomer has a
cluster whose node has the images. The measured time includes the commands but not the reading time.
Needs root.
"""

import contextlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from release.source import version_of
from tests.controlplane import ROOT, built
from tests.debian import containers
from tests.deploy.pages import blocks_of, commands, play, steps
from tests.deploy.terminal import Terminal
from tests.gobin.build import default_cache, say
from tests.images.building import SUITE
from tests.install.versions import REGISTRY
from tests.processes import DIE_WITH_PARENT
from tests.waiting import until

#: Goals, and the number of minutes after the start in which each goal must be reached.
GOALS = {"make demo": 2, "a pending pod explained": 6, "the chart in mode observe": 10}
PATIENCE_S = 1800.0
#: Number of lines that the transcript keeps from the beginning and from the end of a long output.
_KEPT = 8
#: Files of the machine that programs in the root need for name resolution, downloads and trusted
#: certificates.
_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
NOT_ON_THE_CLOCK = (
    "Not on the clock: reading, and the first build of the binaries of `make cluster`",
    "Given for Helm: a cluster of one node with real containers, and images that it can pull",
)
PAGE = """\
# The first hour

This page shows how long a first visitor takes, from `git clone` on a clean Debian. `make newcomer`
follows docs/get-started literally and writes this page.

| reached | goal, minutes | minutes | seconds of CPU |
|---|---|---|---|
{rows}

{about}
{transcript}
"""
_VARIABLES = ("PIP_CERT", "PIP_DEFAULT_TIMEOUT", "PIP_INDEX_URL", "SSL_CERT_FILE")


class Root:
    """A clean Debian installation in a folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "root"
        (install,) = commands("get-started/local-cluster.md", "packages")
        self.packages = shlex.split(install)[3:]
        make = ["mmdebstrap", "--variant=minbase", "--mode=root", "--quiet"]
        make += [f"--include={','.join(self.packages)}", SUITE, str(self.path)]
        inside = f'{containers()} && exec "$@"'
        subprocess.run(["unshare", "--mount", "sh", "-c", inside, "sh", *make], check=True)
        for each in filter(os.path.exists, _FILES):
            shutil.copy(each, self.path / each[1:])
        bare = self.path / "srv/headroom.git"
        subprocess.run(["git", "clone", "--quiet", "--bare", str(ROOT), str(bare)], check=True)
        # Create the folder in which make cluster finds its built binaries.
        (self.path / "root/.cache/headroom/gobin").mkdir(parents=True)

    def terminal(self, network_of: int | None = None) -> Terminal:
        """Open a shell. If ``network_of`` is a process ID, the shell uses the network of this
        process.
        """
        gobin = self.path / "root/.cache/headroom/gobin"
        mount = (
            f"mount --bind {default_cache()} {gobin} && "
            f"mount --rbind /dev {self.path}/dev && "
            f"mount -t proc proc {self.path}/proc && "
            f"exec chroot {self.path} /bin/bash --norc"
        )
        enter = [] if network_of is None else ["nsenter", f"--net=/proc/{network_of}/ns/net"]
        alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", mount]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin", "HOME": "/root"}
        environment |= {key: os.environ[key] for key in _VARIABLES if key in os.environ}
        terminal = Terminal([*enter, *alone], Path("/"), {**environment, "LANG": "C.UTF-8"})
        terminal.enter("cd ~")
        return terminal


@dataclass
class Transcript:
    """The commands of the newcomer, their outputs, and the elapsed time."""

    began: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))
    load: tuple[float, float, float] = field(default_factory=os.getloadavg)
    clock_s: float = 0.0
    cpu_s: float = 0.0
    lines: list[str] = field(default_factory=list)
    reached: dict[str, tuple[float, float]] = field(default_factory=dict)

    def page(self, name: str) -> None:
        self.lines += ["", f"## `{name}`"]
        say(name)

    def add(self, command: str, output: str, took_s: float, cpu_s: float) -> None:
        self.clock_s += took_s
        self.cpu_s += cpu_s
        at = f"{int(self.clock_s) // 60:02}:{int(self.clock_s) % 60:02}"
        say(f"{at} +{took_s:.0f} s, {cpu_s:.0f} s of CPU: {command.splitlines()[0]}")
        shown = [line.rstrip()[:160] for line in output.rstrip().splitlines()]
        if len(shown) > 2 * _KEPT:
            left = f"... ({len(shown) - 2 * _KEPT} lines)"
            shown = [*shown[:_KEPT], left, *shown[-_KEPT:]]
        entered = command.rstrip().replace("\n", "\n> ")
        self.lines += ["", f"{at} (this took {took_s:.0f} s, {cpu_s:.0f} s of CPU):", "", "```"]
        self.lines += [f"$ {entered}", *shown, "```"]

    def when(self, goal: str) -> str:
        """Return two table cells, which contain the minutes and the CPU seconds until the goal was
        reached.
        """
        if goal not in self.reached:
            return "not reached | "
        at_s, cpu_s = self.reached[goal]
        return f"{at_s / 60:.1f} | {cpu_s:.0f}"

    def reach(self, goal: str) -> None:
        self.reached[goal] = self.clock_s, self.cpu_s


class Newcomer:
    """Enters commands into a terminal and writes the transcript."""

    def __init__(self, terminal: Terminal, transcript: Transcript) -> None:
        self.terminal = terminal
        self._transcript = transcript

    def enter(self, command: str) -> tuple[str, int]:
        cpu_s, began_s = cpu_seconds(self.terminal.pid), time.monotonic()
        output, status = self.terminal.enter(command.rstrip("\n"))
        took_s = time.monotonic() - began_s
        self._transcript.add(command, output, took_s, cpu_seconds(self.terminal.pid) - cpu_s)
        return output, status


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants, including ended children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    found = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            with contextlib.suppress(OSError):
                found += cpu_seconds(int(child))
    return found


def try_on_one_machine(root: Root, transcript: Transcript) -> None:
    with contextlib.closing(root.terminal()) as terminal:
        newcomer = Newcomer(terminal, transcript)
        transcript.page("docs/get-started/local-cluster.md")
        words = {"REPOSITORY": "/srv/headroom.git"}
        play("get-started/local-cluster.md", "clone", newcomer.enter, words)
        play("get-started/local-cluster.md", "demo", newcomer.enter)
        transcript.reach("make demo")
        (start,) = commands("get-started/local-cluster.md", "start")
        printed = root.path / "tmp/printed"
        printed.touch()
        cpu_s, began_s = cpu_seconds(terminal.pid), time.monotonic()
        terminal.enter(f"{start.strip()} > /tmp/printed 2>&1 &")
        ends = "Ctrl-C ends all of it"
        up = lambda: ends in printed.read_text()  # noqa: E731
        until(up, "the cluster is up", PATIENCE_S, every_s=0.5, logs=printed.read_text)
        took_s = time.monotonic() - began_s
        cpu_s = cpu_seconds(terminal.pid) - cpu_s
        transcript.add(start, printed.read_text(), took_s, cpu_s)
        second = stack_second(root, printed, transcript)
        with contextlib.closing(second.terminal):
            play("get-started/local-cluster.md", "why", second.enter)
            transcript.reach("a pending pod explained")
            play("get-started/local-cluster.md", "pod", second.enter)


def stack_second(root: Root, printed: Path, transcript: Transcript) -> Newcomer:
    """Open a second terminal, and enter the commands that ``make cluster`` printed."""
    second = Newcomer(root.terminal(), transcript)
    second.terminal.enter("cd headroom")
    exports = [line.strip() for line in printed.read_text().splitlines() if "  export " in line]
    second.enter("\n".join(exports))
    return second


def install_the_chart(root: Root, cluster: Path, pid: int, transcript: Transcript) -> None:
    """Install the chart into the cluster from a terminal in the cluster's network."""
    words = {
        "REGISTRY": REGISTRY,
        "VERSION": version_of(ROOT),
        "gpu-operator": "device-plugin",
        # Run Headroom on the only node, which has a GPU.
        "--set images.extender": "--set onGpuNodes=true,images.extender",
    }
    for name in ("kubectl", "helm"):
        shutil.copy(built(name)[name], root.path / "usr/local/bin" / name)
    settings = root.path / "root/.kube/config"
    settings.parent.mkdir(exist_ok=True)
    content = json.loads((cluster / "kubeconfig").read_text())
    content["clusters"][0]["cluster"]["certificate-authority"] = "/root/.kube/ca.crt"
    settings.write_text(json.dumps(content))
    shutil.copy(cluster / "ca.crt", settings.parent)
    with (
        contextlib.closing(root.terminal()) as outside,
        contextlib.closing(root.terminal(pid)) as inside,
    ):
        for terminal in (outside, inside):
            terminal.enter("cd headroom")
        transcript.page("docs/get-started/helm.md")
        newcomer = Newcomer(inside, transcript)
        play("get-started/helm.md", "install", newcomer.enter, words)
        for block in blocks_of("get-started/helm.md", "check"):
            for step in steps(block):
                output, status = newcomer.enter(step.command)
                assert status == 0, output
        play("get-started/helm.md", "plugin", Newcomer(outside, transcript).enter)
        inside.enter("export PATH=$HOME/.headroom/bin:$PATH")
        (top,) = [
            step for block in blocks_of("get-started/helm.md", "top") for step in steps(block)
        ]
        output, status = newcomer.enter(top.command)
        assert status == 0, output
        transcript.reach("the chart in mode observe")


@contextlib.contextmanager
def newcomers_cluster(folder: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Start the cluster of the newcomer. Yield its process."""
    cluster = [sys.executable, "-m", "tests.install.newcomers_cluster", str(folder)]
    with subprocess.Popen([*DIE_WITH_PARENT, str(os.getpid()), *cluster], cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(cluster: Path, process: "subprocess.Popen[bytes]") -> None:
    def ready() -> bool:
        assert process.poll() is None, "the cluster has ended"
        return (cluster / "ready").exists()

    until(ready, "the cluster takes pods", PATIENCE_S, every_s=0.5)


def in_the_network(pid: int) -> int:
    """Return the ID of a descendant of ``pid`` that uses a different network than this process."""
    ours = os.readlink("/proc/self/ns/net")
    found = [pid]
    while found:
        pid = found.pop(0)
        if os.readlink(f"/proc/{pid}/ns/net") != ours:
            return pid
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    raise LookupError("no process has a network of its own")


def machine() -> Mapping[str, str]:
    cpus = Path("/proc/cpuinfo").read_text().split("model name\t: ")
    model = cpus[1].splitlines()[0] if len(cpus) > 1 else platform.machine()
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "processors": f"{os.cpu_count()}, {model}",
        "memory": f"{memory_kib / 2**20:.0f} GiB",
    }


def written(transcript: Transcript, packages: list[str], commit: str) -> str:
    """Return the transcript as a Markdown page."""
    rows = [
        f"| {goal} | {minutes} | " + transcript.when(goal) + " |" for goal, minutes in GOALS.items()
    ]
    load = ", ".join(f"{each:.1f}" for each in transcript.load)
    about = [
        f"Date: {transcript.began}, commit `{commit}`",
        *(f"{name.capitalize()}: {value}" for name, value in machine().items()),
        f"Load of the machine at the start, by other work: {load}",
        f"Priority of this run over other work: nice {os.nice(0)}",
        f"Root: Debian {SUITE}, minimal, with {', '.join(packages)}",
        *NOT_ON_THE_CLOCK,
    ]
    return PAGE.format(
        rows="\n".join(rows),
        about="\n".join(f"* {each}." for each in about),
        transcript="\n".join(transcript.lines),
    )


def main(page: Annotated[Path, typer.Argument(help="File to write.")]) -> None:
    built("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "helm")
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headroom-newcomer-")))
        cluster = folder / "cluster"
        cluster.mkdir()
        say("making a clean Debian, and the cluster for the chart")
        process = stack.enter_context(newcomers_cluster(cluster))
        root = Root(folder)
        wait_for(cluster, process)
        transcript = Transcript()
        # Write the page even after an error, because it shows which goals were reached.
        stack.callback(lambda: page.write_text(written(transcript, root.packages, commit)))
        try_on_one_machine(root, transcript)
        install_the_chart(root, cluster, in_the_network(process.pid), transcript)


if __name__ == "__main__":
    typer.run(main)
