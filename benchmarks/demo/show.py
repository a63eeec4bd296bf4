"""Runs the demo from its first line to its last, and decides how it ends."""

import signal
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.demo import fleet as fleets
from benchmarks.demo import story
from benchmarks.demo.fleet import Fleet
from benchmarks.demo.match import BATCH, Advance, Result, play_counting, play_headroom
from benchmarks.demo.server import Server
from benchmarks.demo.table import summary, table, total
from benchmarks.demo.trace import BadTrace, read_shapes, read_workload
from benchmarks.demo.wire import ServerFailed
from benchmarks.demo.workload import NAMESPACE, PUBLISHED_PODS, Workload, published

#: Pods per seed when nobody says: three seeds of them end in about 25 s on two shared cores.
PODS = 2000


@dataclass(slots=True)
class _Results:
    counting: list[Result] = field(default_factory=list)
    headroom: list[Result] = field(default_factory=list)


def run(trace: Path | None, pods: int | None, seeds: int) -> int:
    """Tell the story, play ``seeds`` matches of ``pods`` pods, print the table; the exit status.

    ``trace`` is a folder to take nodes and pods from; None: the built-in fleet and workload.
    0: Headroom overcommitted nothing; 1: it did; 2: bad input or no server; 130: interrupted.
    On a terminal the server of the last seed stays up until Ctrl-C, which is then no interruption.
    Otherwise the demo ends by itself, and its last line sums up all seeds for programs to read.
    """
    # Not Console.is_terminal, which FORCE_COLOR makes true for a pipe.
    watched = sys.stdout.isatty()
    console = Console(highlight=False)
    # A stop from outside ends the demo as Ctrl-C does, so that the servers are stopped in order;
    # and Ctrl-C does even where a shell started us with it ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        return _run(console, trace, PODS if pods is None else pods, seeds, watched)
    except (BadTrace, ServerFailed, OSError) as err:
        console.print(f"demo: {err}", style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("\nThe demo was stopped, and its server with it.")
        return 130


def _run(console: Console, trace: Path | None, pods: int, seeds: int, watched: bool) -> int:
    if pods < 1 or seeds < 1:
        raise BadTrace("the numbers of pods and of seeds are at least 1")
    workload = published(pods) if trace is None else read_workload(trace).first(pods)
    shapes = fleets.PUBLISHED if trace is None else read_shapes(trace)
    fleet = fleets.divide(shapes, workload)
    began_s = monotonic()
    results = _Results()
    with ExitStack() as stack:
        # The next server starts while this one is busy: there is a second core.
        next_server = stack.enter_context(Server(fleet.yaml()))
        story.tell(console)
        _introduce(console, fleet, workload, seeds)
        with _progress(console) as progress:
            for seed in range(1, seeds + 1):
                server = next_server
                if seed < seeds:
                    next_server = stack.enter_context(Server(fleet.yaml()))
                advance = _bar(progress, f"seed {seed}: replica counting", workload)
                results.counting.append(play_counting(fleet, workload, seed, advance))
                advance = _bar(progress, f"seed {seed}: Headroom over HTTP", workload)
                results.headroom.append(play_headroom(fleet, workload, seed, server, advance))
                if seed < seeds:
                    server.stop()
        console.print(table(results.counting, results.headroom))
        _explain(console, results, workload, monotonic() - began_s)
        if watched:
            _stay(console, server, fleet, results.headroom[-1])
    line, status = summary(results.counting, results.headroom)
    if not watched:
        console.print(line, soft_wrap=True)
    return status


def _introduce(console: Console, fleet: Fleet, workload: Workload, seeds: int) -> None:
    shared = [group for group in fleet.groups if group.shared]
    replicas = ", ".join(
        f"{model} {count}" for model, count in sorted({(g.shape.model, g.replicas) for g in shared})
    )
    asked_mib = sum(workload.sharing_mib)
    pool_mib = fleet.memory_mib(shared=True)
    nodes = sum(group.count for group in fleet.groups)
    console.rule(f"[bold]{nodes:,} GPU nodes, {fleet.gpus:,} GPUs, {len(workload.pods):,} pods")
    console.print(
        f"Shared pool: {sum(g.count for g in shared):,} nodes, those with few GPUs and the largest "
        f"model, time-slicing, as many replicas as typical pods fit (at least 2): {replicas}.\n"
        f"{len(workload.sharing_mib):,} pods share a GPU and ask for {asked_mib // 1024:,} GiB, "
        f"{asked_mib * 100 // max(1, pool_mib)} % of that pool's memory; "
        f"{len(workload.pods) - len(workload.sharing_mib):,} ask for {workload.whole_gpus:,} whole "
        "GPUs in a pool of their own.\n"
        f"No pod names a GPU model. Seeds: {seeds}; each draws anew what kubelet and plugin "
        f"choose. Kubelets admit after every {BATCH} binds; reports arrive {BATCH} binds later.\n"
        f"(--pods {PUBLISHED_PODS} plays the whole published list.)\n",
        soft_wrap=True,
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        disable=not console.is_terminal,
    )


def _bar(progress: Progress, label: str, workload: Workload) -> Advance:
    task = progress.add_task(label, total=len(workload.pods))
    return lambda: progress.advance(task)


def _explain(console: Console, results: _Results, workload: Workload, took_s: float) -> None:
    refused_binds = total(results.headroom, lambda r: r.refused_binds)
    sharing = sum(pod.vram_mib is not None for r in results.headroom for pod in r.waiting)
    waiting = total(results.headroom, lambda r: len(r.waiting))
    console.print(
        "The judge is a referee that shares no code with the ledger, for both sides the same.\n"
        "A pod dies when its memory does not fit beside the living pods that came before it.\n"
        "Stranded: memory of shared GPUs in use that no living pod uses, where no replica is left\n"
        f"or less than the median request ({workload.median_mib:,} MiB).\n"
        f"Of the pods that wait for Headroom, {sharing:,} of {waiting:,} share a GPU; "
        f"binds refused and tried again: {refused_binds}. All of it took {took_s:.0f} s.\n",
        soft_wrap=True,
    )


def _stay(console: Console, server: Server, fleet: Fleet, last: Result) -> None:
    """Say what to open and what to type next, then wait for Ctrl-C."""
    debug = server.debug_url
    shared = next((g.names[0] for g in fleet.groups if g.shared), fleet.groups[0].names[0])
    console.print(f"The server of the last seed is still up. Open [bold]{debug}/[/] or type:")
    for command in (
        f"headroom --server {debug} top gpu",
        f"headroom --server {debug} decisions",
        f"curl -s '{debug}/v1/nodes/{shared}'",
        *(f"headroom --server {debug} why {NAMESPACE}/{pod.name}" for pod in last.waiting[:1]),
    ):
        console.print(f"  {command}", style="cyan", soft_wrap=True)
    with suppress(KeyboardInterrupt):
        console.print("Ctrl-C ends the demo and its server.")
        signal.pause()
