"""What a call takes while the whole fleet reports and somebody looks, against the same when all is
quiet, in one run.

    python -m benchmarks.hotpath.busy [--nodes 5000] [--pods-per-device 2] [--seconds 20]
        [--rounds 3] [--json]

The extender is the real process, ``headroom serve``. Its API server is a stand-in that lists the
fleet and then tells, on the watches, what agents write: see ``feeder``. One caller asks filter and
prioritize for one pod after the other, as kube-scheduler does, and notes what each took. Rounds of

* quiet: nobody reports and nobody looks;
* growing: each agent reports every 5 s, as often as memory that grows lets it, with heartbeats and
  pods that change;
* growing and watched: the same, and the page is open, which looks again 0.3 s after any news: here
  each bind is;
* freeing and watched: each agent reports every second, as often as memory that is freed lets it;
* bursts and watched: all of them at once, every 5 s;
* growing and read: as growing, and somebody reads all nodes, all drift and an explanation without a
  pause, which is more than any open page asks for;

and, before each of the last five, the same with a second extender as the one that is told and read
while the first, which is asked, is left in peace: what the p99 grows by then is the price of
sharing these cores with so much work, and of nothing that the extender does.

Goal: the p99 of filter at most doubles in each, and the loop is never more than 5 ms late.
"""

import contextlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import typer
import yaml

from benchmarks.agent import vitals
from benchmarks.hotpath.bodies import SEED, Bodies, bind_of
from benchmarks.hotpath.calling import Caller, Spread, spread
from benchmarks.hotpath.feeder import Order, feed
from benchmarks.hotpath.machine import cores, processor, versions

SCHEMA = "headroom.busy/v1"
ROOT = Path(__file__).parents[2]
_PATIENCE_S = 300.0
#: Between two pods.
_PAUSE_S = 0.02
_BURST_EVERY_S = 5.0
#: An extender that takes less of a core, since the last look, has taken in what it was told.
_IDLE_RATIO, _LOOK_EVERY_S = 0.3, 0.5
_LATE_S = "0.005"


#: What the page asks for each time it looks, and how long it waits when it has been told of news.
_PAGE = ("v1/fleet", "v1/nodes?order=fullest&limit=50", "v1/pending?limit=1")
_TOGETHER_S = 0.3
_EVERYTHING = ("v1/nodes", "v1/drift", "v1/explain/pods/default/train-1")


class Views(msgspec.Struct, frozen=True):
    """What somebody reads, again and again."""

    paths: tuple[str, ...] = ()
    #: After all of them.
    pause_s: float = 0.0


NOBODY, PAGE, READER = Views(), Views(_PAGE, _TOGETHER_S), Views(_EVERYTHING)


class Phase(msgspec.Struct, frozen=True):
    name: str
    #: Of each agent, in a second.
    reports_per_s: float = 0.0
    bursts: bool = False
    views: Views = NOBODY
    #: Whether it is another extender that all this happens to.
    elsewhere: bool = False


QUIET = Phase("quiet")
BURSTS = Phase("bursts and watched", bursts=True, views=PAGE)
LOADED = (
    Phase("growing", 1 / 5),
    Phase("growing and watched", 1 / 5, views=PAGE),
    Phase("freeing and watched", 1.0, views=PAGE),
    BURSTS,
    Phase("growing and read", 1 / 5, views=READER),
)
PHASES = (
    QUIET,
    *(
        phase
        for here in LOADED
        for phase in (
            msgspec.structs.replace(here, name=f"{here.name}, elsewhere", elsewhere=True),
            here,
        )
    ),
)


class Found(msgspec.Struct):
    """All rounds of one phase."""

    phase: str
    calls: int
    filter: Spread
    prioritize: Spread
    #: Of the p99, to that of the quiet phase.
    filter_ratio_p99: float
    prioritize_ratio_p99: float
    #: Of the p99 of filter, to the same load elsewhere; None where there is no such phase.
    filter_ratio_to_elsewhere_p99: float | None
    #: Bodies that the viewer read whole.
    views: int
    #: Of the loop's lag: samples, and how many of them were above 5 ms.
    lag_samples: int
    lag_above_5_ms: int
    lag_at_most_ms: float
    #: The extender's, in each second.
    cpu_ratio: float
    resident_mib: float
    #: From the order until the node that reports last is shown so; the longest of all bursts.
    burst_taken_in_s: float | None


class Results(msgspec.Struct):
    schema: str
    machine: str
    cores: int
    versions: dict[str, str]
    seed: int
    nodes: int
    pods_per_device: int
    seconds: float
    rounds: int
    phases: list[Found]


class _Samples(msgspec.Struct):
    filters: list[int] = []
    prioritizes: list[int] = []
    views: int = 0
    lag: dict[str, float] = {}
    cpu_s: float = 0.0
    took_s: float = 0.0
    resident_mib: float = 0.0
    bursts_s: list[float] = []


@contextlib.contextmanager
def _child(target: Any, *args: Any) -> Iterator[Connection]:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=target, args=(*args, theirs))
    child.start()
    try:
        yield ours
    finally:
        child.terminate()
        child.join()


@contextlib.contextmanager
def _extender(api_port: int) -> Iterator[tuple[int, dict[str, int]]]:
    """The real process: its id, and its ports."""
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{api_port}"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "current-context": "c",
    }
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "kubeconfig"), Path(folder, "log")
        file.write_text(yaml.safe_dump(kubeconfig), encoding="utf-8")
        command = [sys.executable, "-m", "extender", "serve", "--debug-open"]
        command += ["--verbs-port", "0", "--debug-port", "0"]
        with (
            log.open("wb") as stderr,
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "KUBECONFIG": str(file)},
                stdout=subprocess.PIPE,
                stderr=stderr,
            ) as process,
        ):
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError(f"the extender did not start: {log.read_text()}")
                said = msgspec.json.decode(line)
                ports = {name: urlsplit(said[name]).port or 0 for name in ("verbs", "debug")}
                _await_ready(ports["debug"], log)
                yield process.pid, ports
            finally:
                process.terminate()
                process.wait(60)


def _await_ready(debug_port: int, log: Path) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    with contextlib.closing(Caller(debug_port)) as debug:
        while debug.get("readyz")[0] != b"ok\n":
            if time.monotonic() > until_s:
                raise RuntimeError(f"the extender is not ready: {log.read_text()[-4000:]}")
            time.sleep(0.1)


def view(debug_port: int, pipe: Connection) -> None:
    """The child process: reads what it was told to last; answers with how many bodies it read."""
    debug = Caller(debug_port)
    views, count = NOBODY, 0
    while True:
        if not views.paths or pipe.poll():
            views = pipe.recv()
            pipe.send(count)
        for path in views.paths:
            debug.get(path)
            count += 1
        time.sleep(views.pause_s)


class _Side(msgspec.Struct):
    """An extender, the one who tells it of its fleet, and the one who reads its page."""

    orders: Connection
    viewer: Connection
    pid: int
    ports: dict[str, int]

    def order(self, order: Order) -> None:
        self.orders.send(order)
        self.orders.recv()

    def look(self, views: Views) -> int:
        """How many bodies were read so far."""
        self.viewer.send(views)
        count: int = self.viewer.recv()
        return count

    def settle(self) -> None:
        """Until what was told is taken in: then the extender has hardly anything to do."""
        until_s, before = time.monotonic() + _PATIENCE_S, vitals(self.pid)
        while time.monotonic() < until_s:
            time.sleep(_LOOK_EVERY_S)
            now = vitals(self.pid)
            if now.cpu_s - before.cpu_s < _IDLE_RATIO * (now.at_s - before.at_s):
                return
            before = now
        raise RuntimeError("the extender does not come to rest")


@contextlib.contextmanager
def _side(nodes: int, pods_per_device: int) -> Iterator[_Side]:
    with (
        _child(feed, nodes, pods_per_device) as orders,
        _extender(orders.recv()) as (pid, ports),
        _child(view, ports["debug"]) as viewer,
    ):
        yield _Side(orders, viewer, pid, ports)


class _Play:
    def __init__(self, nodes: int, here: _Side, elsewhere: _Side) -> None:
        self._nodes = nodes
        self._here, self._elsewhere = here, elsewhere
        self._verbs, self._debug = Caller(here.ports["verbs"]), Caller(here.ports["debug"])
        self._bodies = Bodies(nodes, ("1Gi", "2Gi", "4Gi", "8Gi", "5%"))

    def close(self) -> None:
        self._verbs.close()
        self._debug.close()

    def play(self, phase: Phase, seconds: float, samples: _Samples) -> None:
        busy, pid = self._elsewhere if phase.elsewhere else self._here, self._here.pid
        busy.order(Order(phase.reports_per_s * self._nodes, others=phase is not QUIET))
        seen = busy.look(phase.views)
        self._for(min(1.0, seconds), _Samples())  # what was begun before is over
        lag, before = self._lag(), vitals(pid)
        self._for(seconds, samples, busy if phase.bursts else None)
        after = vitals(pid)
        for le, count in self._lag().items():
            samples.lag[le] = samples.lag.get(le, 0.0) + count - lag[le]
        samples.views += busy.look(NOBODY) - seen
        busy.order(Order())
        busy.settle()
        samples.cpu_s += after.cpu_s - before.cpu_s
        samples.took_s += after.at_s - before.at_s
        samples.resident_mib = max(samples.resident_mib, after.resident_mib)

    def _for(self, seconds: float, samples: _Samples, bursts_at: _Side | None = None) -> None:
        burst_at_s = time.monotonic()
        until_s = burst_at_s + seconds
        while time.monotonic() < until_s:
            if bursts_at is not None and time.monotonic() >= burst_at_s:
                burst_at_s += _BURST_EVERY_S
                bursts_at.order(Order(burst=True, others=True))
            body = self._bodies.another()
            answer, took = self._verbs.post("filter", body)
            samples.filters.append(took)
            passed = self._bodies.of_those_that_passed(body, answer)
            if len(passed) < len(body) / 2:
                raise RuntimeError(f"the fleet takes no pods: {answer[-400:]!r}")
            samples.prioritizes.append(self._verbs.post("prioritize", passed)[1])
            # To a node that is not known, since nothing here takes a promise: without it room would
            # be left for the pod.
            self._verbs.post("bind", bind_of(body))
            time.sleep(_PAUSE_S)

    def burst(self) -> float:
        """Seconds from the order until the node that reports last is shown so."""
        began_s = time.monotonic()
        before = self._shown()
        self._here.order(Order(burst=True))
        while self._shown() == before:
            time.sleep(0.01)
        return time.monotonic() - began_s

    def _shown(self) -> str:
        body = self._debug.get(f"v1/nodes/gpu-a100-{self._nodes - 1:04d}")[0]
        shown: str = msgspec.json.decode(body)["node"]["observed_at"]
        return shown

    def _lag(self) -> dict[str, float]:
        """Samples of the loop's lag so far, by the most that they were."""
        text = self._debug.get("metrics")[0].decode()
        found = re.findall(r'^headroom_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', text, re.M)
        return {le: float(count) for le, count in found}


def results(nodes: int, pods_per_device: int, seconds: float, rounds: int) -> Results:
    samples = {phase.name: _Samples() for phase in PHASES}
    with (
        _side(nodes, pods_per_device) as here,
        _side(nodes, pods_per_device) as elsewhere,
        contextlib.closing(_Play(nodes, here, elsewhere)) as play,
    ):
        for turn in range(rounds):
            for phase in PHASES:
                typer.echo(f"round {turn + 1} of {rounds}: {phase.name}", err=True)
                play.play(phase, seconds, samples[phase.name])
            samples[BURSTS.name].bursts_s.append(play.burst())
    return Results(
        schema=SCHEMA,
        machine=processor(),
        cores=cores(),
        versions=versions(),
        seed=SEED,
        nodes=nodes,
        pods_per_device=pods_per_device,
        seconds=seconds,
        rounds=rounds,
        phases=[_found(name, samples) for name in samples],
    )


def _found(name: str, all_of: dict[str, _Samples]) -> Found:
    of, quiet, control = all_of[name], all_of[QUIET.name], all_of.get(f"{name}, elsewhere")
    filters, prioritizes = spread(of.filters), spread(of.prioritizes)
    at_most = min((float(le) for le, n in of.lag.items() if n == of.lag["+Inf"]), default=0.0)
    return Found(
        phase=name,
        calls=len(of.filters),
        filter=filters,
        prioritize=prioritizes,
        filter_ratio_p99=round(filters.p99_ms / spread(quiet.filters).p99_ms, 3),
        prioritize_ratio_p99=round(prioritizes.p99_ms / spread(quiet.prioritizes).p99_ms, 3),
        filter_ratio_to_elsewhere_p99=(
            round(filters.p99_ms / spread(control.filters).p99_ms, 3) if control else None
        ),
        views=of.views,
        lag_samples=int(of.lag["+Inf"]),
        lag_above_5_ms=int(of.lag["+Inf"] - of.lag[_LATE_S]),
        lag_at_most_ms=round(1e3 * at_most, 3),
        cpu_ratio=round(of.cpu_s / of.took_s, 3),
        resident_mib=round(of.resident_mib, 1),
        burst_taken_in_s=max(of.bursts_s, default=None),
    )


def show(found: Results) -> None:
    typer.echo(
        f"{found.machine}, {found.cores} cores; {found.nodes} nodes of 8 GPUs, "
        f"{found.pods_per_device} pods on each, {found.rounds} rounds of {found.seconds:g} s"
    )
    head = ("", "calls", "p50", "p99", "max", "ratio", "own", "prio p99", "ratio", "late", "most")
    row = "{:<31}{:>7}{:>8}{:>8}{:>8}{:>7}{:>7}{:>10}{:>7}{:>12}{:>8}{:>6}{:>7}"
    typer.echo(row.format(*head, "CPU", "views"))
    for of in found.phases:
        own = of.filter_ratio_to_elsewhere_p99
        typer.echo(
            row.format(
                of.phase,
                of.calls,
                of.filter.p50_ms.__format__(".2f"),
                of.filter.p99_ms.__format__(".2f"),
                of.filter.max_ms.__format__(".2f"),
                of.filter_ratio_p99.__format__(".2f"),
                "-" if own is None else f"{own:.2f}",
                of.prioritize.p99_ms.__format__(".2f"),
                of.prioritize_ratio_p99.__format__(".2f"),
                f"{of.lag_above_5_ms}/{of.lag_samples}",
                f"{of.lag_at_most_ms:g}",
                of.cpu_ratio,
                of.views,
            )
        )
        if of.burst_taken_in_s is not None:
            typer.echo(f"  a burst is taken in within {of.burst_taken_in_s:.2f} s")


def main(
    nodes: Annotated[int, typer.Option(help="Nodes of 8 GPUs.")] = 5_000,
    pods_per_device: Annotated[int, typer.Option(help="Pods on each of them.")] = 2,
    seconds: Annotated[float, typer.Option(help="Of each phase in each round.")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often all phases are played.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="All figures, as JSON.")] = False,
) -> None:
    found = results(nodes, pods_per_device, seconds, rounds)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    else:
        show(found)


if __name__ == "__main__":
    typer.run(main)
