"""Measures how long ordinary pods are pending while kube-scheduler retries rejected pods.

    python -m benchmarks.storm [--nodes 1000] [--rejected 200] [--changes 200] [--rounds 2]

The newest kube-schedulers retry every pod that an extender rejected whenever any bound pod changes,
as fast as they can. Here 200 pods that fit nowhere are pending, while bound pods change 200 times a
second. Ordinary pods are created one at a time, with a GPU and without. They must not be pending
more than twice as long as in a quiet cluster. Then memory is freed for the rejected pods one after
the other, and the benchmark measures the time until each is bound. The ways to reject:

    headroom       as shipped: every node in FailedAndUnresolvableNodes, and kube-scheduler without
                   SchedulerPopFromBackoffQ
    with-pop       the same, with kube-scheduler's defaults
    sooner         headroom, with podMaxBackoffSeconds 10, the default
    unresolvable   the same answer as headroom, from a minimal extender: the cheapest rejection
    failed         every node in FailedNodes
    omitted        no node and no reason
    error          an Error, after which kube-scheduler backs off for 1 to 10 s

The last four use benchmarks/real/nothing.py and kube-scheduler's defaults. The benchmark sends it
the pod that fits now and annotates that pod, as Headroom does.
"""

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
import urllib3

from benchmarks.hotpath.machine import machine
from benchmarks.real.stage import Bound, Stage, latencies, pending, quantile, stage
from benchmarks.real.start import start_nothing, start_scheduler
from benchmarks.scale_objects import gpunode, node_name, pod
from headroom.contract.annotations import RETRY
from tests.e2e.cluster import GPUNODES, PODS, scheduling_message
from tests.kubernetes_version import scheduler_flags
from tests.processes import free_ports

OF_HEADROOM = ("headroom", "with-pop", "sooner")
SHIPPED = ("headroom", "sooner")
WAYS = {"unresolvable": "FailedAndUnresolvableNodes", "failed": "FailedNodes"}
ROWS = (*OF_HEADROOM, *WAYS, "omitted", "error")
SOONER = {"podMaxBackoffSeconds": 10}
#: An ordinary request, and a request that is larger than the free memory of every device.
SMALL, LARGE = "8Gi", "72Gi"
EVERY_S = 0.2


class Room:
    """Makes the rejected pods fit, one at a time."""

    def __init__(self, on: Stage, extender_url: str, way: str) -> None:
        self._on, self._way = on, way
        self._url = extender_url
        self._http = urllib3.PoolManager(retries=False, timeout=30.0)
        self._allowed: list[str] = []

    def script(self, **what: Any) -> int:
        """Send the script to the extender; return how many filter calls it has received."""
        if self._way in OF_HEADROOM:
            sample = 'headroom_verb_duration_seconds_count{verb="filter"}'
            return int(self._on.headroom.metric(sample))
        return int(self._http.request("POST", f"{self._url}/script", json=what).data)

    def make(self, number: int, name: str) -> None:
        """Make the named pod fit: end a device's last pod, or make the extender accept it."""
        if self._way not in OF_HEADROOM:
            self._allowed.append(name)
            self.script(allowed=self._allowed)
            retry = {"metadata": {"annotations": {RETRY: f"{time.monotonic_ns()}"}}}
            self._on.plane.call("PATCH", f"{PODS}/{name}", retry)
            return
        pods = range(number, self._on.nodes * self._on.held, self._on.nodes)
        path = f"{PODS}/pod-{pods[0]}/status"
        ended = {"phase": "Succeeded", "containerStatuses": None}
        self._on.plane.call("PATCH", path, {"status": ended})
        status = gpunode(number, pods)["status"]
        uuid = status["devices"][0]["uuid"]
        status["pods"] = [use for use in status["pods"] if use["device"] != uuid]
        status["devices"][0] |= {"usedBytes": 0}
        status["devices"][0]["replicas"] |= {"free": 4, "allocated": 0}
        status["observedAt"] = datetime.now(UTC).isoformat()
        path = f"{GPUNODES}/{node_name(number)}/status"
        self._on.plane.call("PATCH", path, {"status": status})


@contextlib.contextmanager
def changes(on: Stage, per_s: int) -> Iterator[None]:
    """Update running pods ``per_s`` times a second while the context lasts."""
    stop = threading.Event()
    indices = itertools.cycle(range(on.nodes, on.nodes * on.held))

    def change() -> None:
        due_s = time.monotonic()
        for turn in itertools.count():
            changed = []
            for index in itertools.islice(indices, per_s // 20):
                changed.append(pod(index, index % on.nodes, gpu=True))
                changed[-1]["metadata"]["annotations"]["changed"] = str(turn)
            on.put(changed)
            due_s += 0.05
            if stop.wait(max(0.0, due_s - time.monotonic())):
                return

    thread = threading.Thread(target=change)
    if per_s:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if per_s:
            thread.join()


def waits(on: Stage, bound: Bound, prefix: str, count: int) -> tuple[list[float], list[float]]:
    """Return the seconds that ordinary pods waited: with a GPU, and without."""
    names = [f"{prefix}-{number:03d}" for number in range(count)]
    took_s = latencies(on, bound, names, [SMALL, None] * (count // 2), EVERY_S)
    return took_s[::2], took_s[1::2]


def reject(on: Stage, turn: int, way: str, count: int) -> list[str]:
    """Create pods that fit nowhere; return when all were rejected."""
    names = [f"rejected-{turn}-{way}-{number:03d}" for number in range(count)]
    on.put(pending(name, LARGE) for name in names)
    deadline_s = time.monotonic() + 120
    while True:
        listed = {each["metadata"]["name"]: each for each in on.plane.call("GET", PODS)["items"]}
        if all(scheduling_message(listed[name]) for name in names):
            return names
        if time.monotonic() > deadline_s:
            raise TimeoutError("the pods were not rejected")
        time.sleep(1.0)


def play(
    on: Stage,
    turn: int,
    way: str,
    rejected: int,
    per_s: int,
    count: int,
    rooms: int,
    settle_s: float,
    binary: str,
) -> None:
    with contextlib.ExitStack() as stack:
        if way in OF_HEADROOM:
            url = on.start_headroom()
            stack.callback(on.kill, "extender")
        else:
            (port,) = free_ports(1)
            url = start_nothing(on.plane, port)
            stack.callback(on.kill, "nothing")
        bound = stack.enter_context(Bound(on.plane))
        config = SOONER if way == "sooner" else {}
        flags = scheduler_flags(binary) if way in SHIPPED else ()
        start_scheduler(on.plane, url, config, flags=flags, binary=binary)
        stack.callback(on.kill, binary)
        room = Room(on, url, way)
        room.script(reject=WAYS.get(way, way))
        prefix = f"run-{turn}-{way}"
        on.put([pending(f"{prefix}-first", SMALL)])
        bound.wait([f"{prefix}-first"])
        quiet = waits(on, bound, f"{prefix}-quiet", count)
        with changes(on, per_s):
            busy = waits(on, bound, f"{prefix}-busy", count)
            names = reject(on, turn, way, rejected)
            time.sleep(settle_s)
            began_s, calls = time.monotonic(), -room.script()
            before = on.spent(binary, "kube-apiserver")
            stormy = waits(on, bound, f"{prefix}-stormy", count)
            took_s = time.monotonic() - began_s
            spent = on.spent(binary, "kube-apiserver").since(before)
            calls += room.script() - count // 2
            roomy_s = [until_taken(bound, room, number, names) for number in range(rooms)]
    typer.echo(
        f"{way:<13}{turn:>5}  {calls / took_s:>9.0f}  "
        + "  ".join(f"{figure:>15}" for figure in compared(quiet, busy, stormy))
        + f"  {statistics.median(roomy_s):>6.2f}  {max(roomy_s):>6.2f}  "
        + "  ".join(f"{cpu_s / took_s:.2f}" for cpu_s in spent.of.values())
    )
    on.clear("run-")
    on.clear("rejected-")
    on.refill(range(rooms))


def until_taken(bound: Bound, room: Room, number: int, names: Sequence[str]) -> float:
    """Return the seconds from when one pod fits until one of the rejected pods is bound."""
    already = bound.at_s.keys() & set(names)
    began_s = time.monotonic()
    room.make(number, next(name for name in names if name not in already))
    while time.monotonic() < began_s + 60:
        if taken := (bound.at_s.keys() & set(names)) - already:
            return min(bound.at_s[name] for name in taken) - began_s
        time.sleep(0.01)
    return float("inf")


def compared(*phases: tuple[Sequence[float], Sequence[float]]) -> Iterator[str]:
    """Yield the median and p90 of the first phase in milliseconds, and the median and p90 of the
    other phases as multiples of the first phase. Pods with a GPU come first."""
    for kind in (0, 1):
        first, *others = (phase[kind] for phase in phases)
        p50, p90 = statistics.median(first), quantile(first, 0.9)
        yield f"{1e3 * p50:.0f} ({1e3 * p90:.0f}) ms"
        for other in others:
            yield f"{statistics.median(other) / p50:.2f} ({quantile(other, 0.9) / p90:.2f})"


def main(
    nodes: Annotated[int, typer.Option(help="Number of nodes, with 8 GPUs each.")] = 1_000,
    rejected: Annotated[int, typer.Option(help="Number of pods that fit nowhere.")] = 200,
    per_s: Annotated[
        int, typer.Option("--changes", help="Updates of bound pods per second.")
    ] = 200,
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    count: Annotated[int, typer.Option("--pods", help="Ordinary pods in each phase.")] = 60,
    rooms: Annotated[
        int, typer.Option(help="Number of rejected pods for which memory is freed.")
    ] = 5,
    settle_s: Annotated[
        float,
        typer.Option("--settle", help="Seconds from the last rejection to the ordinary pods."),
    ] = 2.0,
    ways: Annotated[str, typer.Option(help="Comma-separated list of ways.")] = ",".join(ROWS),
    binary: Annotated[
        str, typer.Option("--scheduler", help="kube-scheduler to use. Example: kube-scheduler-1.34")
    ] = "kube-scheduler",
) -> None:
    """Print how long ordinary pods are pending: idle, while pods change, with rejected pods."""
    typer.echo(machine(), err=True)
    phases = "quiet", "changes", "and rejected"
    columns = [f"{kind} {phase}" for kind in ("GPU", "CPU") for phase in phases]
    typer.echo(
        f"{'way':<13}{'round':>5}  {'rejections/s':>9}  "
        + "  ".join(f"{each:>15}" for each in columns)
        + "  fits s  (most)  CPU of scheduler, API server"
    )
    with stage(nodes, held=8) as on:
        for turn in range(rounds):
            for way in ways.split(","):
                play(on, turn, way, rejected, per_s, count, rooms, settle_s, binary)


if __name__ == "__main__":
    typer.run(main)
