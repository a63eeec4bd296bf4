"""Runs the whole demo, prints its output and returns its exit status."""

import os
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
from headroom.contract.quantity import gib

#: Default number of pods per seed. Three seeds take about 25 s on two shared cores.
PODS = 2000


@dataclass(slots=True)
class _Results:
    counting: list[Result] = field(default_factory=list)
    headroom: list[Result] = field(default_factory=list)


def run(trace: Path | None, pods: int | None, seeds: int) -> int:
    """Run the four-pod example and ``seeds`` comparisons, and print a table. Return the exit
    status.

    ``trace`` is a folder with nodes.csv and pods.csv, or None for the built-in fleet and workload.
    ``pods`` limits the pods of each seed; None stands for 2,000. The exit status is 0 if Headroom
    overcommitted no device, 1 if it did, 2 after invalid input or a failure of the server, and 130
    after an interruption.

    On a terminal, the server of the last seed runs until Ctrl-C, which does not count as an
    interruption. Otherwise the last line sums up all seeds for programs.
    """
    # Console.is_terminal cannot be used, because FORCE_COLOR makes it true for a pipe.
    on_terminal = sys.stdout.isatty()
    console = Console(highlight=False)
    # SIGTERM ends the demo like Ctrl-C, so that the servers are stopped too. SIGINT is also set,
    # because a shell can start the demo with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        return _run(console, trace, PODS if pods is None else pods, seeds, on_terminal)
    except (BadTrace, ServerFailed, OSError) as err:
        console.print(f"demo: {err}", style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("\nThe demo and its server were stopped.")
        return 130


def _run(console: Console, trace: Path | None, pods: int, seeds: int, on_terminal: bool) -> int:
    if pods < 1 or seeds < 1:
        raise BadTrace("--pods and --seeds must be at least 1")
    workload = published(pods) if trace is None else read_workload(trace).first(pods)
    shapes = fleets.PUBLISHED if trace is None else read_shapes(trace)
    fleet = fleets.divide(shapes, workload)
    began_s = monotonic()
    results = _Results()
    with ExitStack() as stack:
        # Start the next server while the current one works, to use a second core.
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
        if on_terminal:
            _stay(console, server, fleet, results.headroom[-1])
    line, status = summary(results.counting, results.headroom)
    if not on_terminal:
        console.print(line, soft_wrap=True)
    return status


def _introduce(console: Console, fleet: Fleet, workload: Workload, seeds: int) -> None:
    shared = [group for group in fleet.groups if group.shared]
    replicas = ", ".join(
        f"{model} {count}" for model, count in sorted({(g.shape.model, g.replicas) for g in shared})
    )
    requested_mib = sum(workload.sharing_mib)
    pool_mib = fleet.memory_mib(shared=True)
    nodes = sum(group.count for group in fleet.groups)
    console.rule(f"[bold]{nodes:,} GPU nodes, {fleet.gpus:,} GPUs, {len(workload.pods):,} pods")
    console.print(
        f"Shared pool: {sum(g.count for g in shared):,} nodes with time-slicing, preferably with "
        "few GPUs or the largest model. Each GPU has as many replicas as median pods fit (at least "
        f"2): {replicas}.\n"
        f"Pods that share GPUs: {len(workload.sharing_mib):,}, which request "
        f"{gib(requested_mib << 20)}, {round(100 * requested_mib / max(1, pool_mib))} % of that "
        f"pool's memory. Pods with whole GPUs: {len(workload.pods) - len(workload.sharing_mib):,}, "
        f"which request {workload.whole_gpus:,} GPUs of the other pool.\n"
        f"No pod selects a GPU model. Seeds: {seeds}; each draws the choices of kubelet and plugin "
        f"again. Kubelets admit pods every {BATCH} binds; agents report {BATCH} binds later.\n"
        f"(--pods {PUBLISHED_PODS} uses the whole published workload.)\n",
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
    rejected_binds = total(results.headroom, lambda r: r.rejected_binds)
    sharing = sum(pod.vram_mib is not None for r in results.headroom for pod in r.waiting)
    waiting = total(results.headroom, lambda r: len(r.waiting))
    console.print(
        "Both schedulers are judged by the same referee, which shares no code with Headroom.\n"
        "A pod dies if its memory does not fit beside the running pods admitted before it.\n"
        "Stranded: free memory of shared GPUs with pods, if no replica is free or less than the\n"
        f"median request ({workload.median_mib:,} MiB) is free.\n"
        f"With Headroom, {sharing:,} of {waiting:,} pending pods share a GPU. Rejected binds: "
        f"{rejected_binds}. Duration: {took_s:.0f} s.\n",
        soft_wrap=True,
    )


def _stay(console: Console, server: Server, fleet: Fleet, last: Result) -> None:
    """Print the URL of the page and example commands, then wait for Ctrl-C."""
    debug = server.debug_url
    shared = next((g.names[0] for g in fleet.groups if g.shared), fleet.groups[0].names[0])
    console.print(f"The server of the last seed is still running. Open [bold]{debug}/[/] or run:")
    # A clone has no `headroom` on the PATH.
    headroom = f"{os.path.relpath(sys.executable)} -m headroom --server {debug}"
    for command in (
        f"{headroom} top gpu",
        f"{headroom} decisions",
        f"curl -s '{debug}/v1/nodes/{shared}'",
        *(f"{headroom} why {NAMESPACE}/{pod.name}" for pod in last.waiting[:1]),
    ):
        console.print(f"  {command}", style="cyan", soft_wrap=True)
    with suppress(KeyboardInterrupt):
        console.print("Ctrl-C ends the demo and its server.")
        signal.pause()
