"""Measures the SM activity queries: the time of their answers, and the CPU of an extender.

    python -m benchmarks.sm_queries [--nodes 5000] [--rounds 3]

A real Prometheus has the last 15 minutes of SM activity of 8 GPUs on each node, one sample every
30 s. Like an extender, this process sends the queries of one refresh one after the other. At the
end it prints the median CPU time to decode one answer, which blocks the event loop because a
decoder holds the interpreter's lock, and the time it would take if all answers were one.
"""

import gc
import json
import random
import statistics
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from benchmarks.hotpath.machine import machine
from headroom.runtime.follow.sm_queries import query
from headroom.runtime.follow.sm_source import QuerySource, Span
from headroom.runtime.prometheus import connected
from tests.history.server import Prometheus, prometheus

SPAN = Span(0.95, 900.0)
EVERY_S = 30
GPUS = 8
TIMEOUT_S = 120.0


def past(nodes: int, now_s: float) -> Iterator[str]:
    """Return the samples as OpenMetrics, with the labels of dcgm-exporter."""
    chance = random.Random(1)
    first_s = now_s - SPAN.window_s
    yield "# TYPE DCGM_FI_PROF_SM_ACTIVE gauge"
    for node in range(nodes):
        for gpu in range(GPUS):
            series = (
                f'DCGM_FI_PROF_SM_ACTIVE{{gpu="{gpu}",UUID="GPU-{node:08d}-0000-0000-0000-{gpu:012d}",'
                f'device="nvidia{gpu}",modelName="NVIDIA H100 80GB HBM3",Hostname="node-{node}"}}'
            )
            for at in range(int(SPAN.window_s) // EVERY_S):
                yield f"{series} {chance.random():.6f} {first_s + EVERY_S * (at + 1):.0f}"


def refresh(source: QuerySource) -> str:
    began_s, cpu_s = time.perf_counter(), time.process_time()
    answers, _ = query(source)
    assert sum(len(answer.ratios) for answer in answers) > 0
    return (
        f"{time.perf_counter() - began_s:.1f} s for a refresh, "
        f"{time.process_time() - cpu_s:.2f} s of CPU"
    )


def decoding(source: QuerySource) -> str:
    with connected(source.url, TIMEOUT_S) as connection:
        promqls = source.queries.sm_activity(source.span.quantile, source.span.window_s)
        results = [connection.client.custom_query(promql) for promql in promqls]
    bodies = [json.dumps(result).encode() for result in results]
    whole = json.dumps([series for result in results for series in result]).encode()

    gc.collect()
    gc.freeze()  # an extender does not collect old garbage either

    def took_ms(each: list[bytes]) -> float:
        took = []
        for body in each:
            began_s = time.thread_time()
            json.loads(body)
            took.append(time.thread_time() - began_s)
        return 1000 * statistics.median(took)

    return (
        f"{len(bodies)} answers, {sum(map(len, bodies)) / 1e6:.1f} MB: decoding one takes "
        f"{took_ms(bodies):.0f} ms, all in one {took_ms([whole]):.0f} ms"
    )


def load(server: Prometheus, nodes: int) -> None:
    server.configure(())
    server.remember(list(past(nodes, time.time())))
    server.run()


def main(
    nodes: Annotated[int, typer.Option(help="Number of nodes, with 8 GPUs each.")] = 5000,
    rounds: Annotated[int, typer.Option(help="Number of refreshes.")] = 3,
) -> None:
    """Print the time and the CPU of each refresh, and how long decoding takes."""
    typer.echo(machine())
    with prometheus() as server:
        load(server, nodes)
        url = f"http://127.0.0.1:{server.port}"
        source = QuerySource(url, SPAN, 60.0, TIMEOUT_S, 180.0)
        for _ in range(rounds):
            typer.echo(refresh(source))
        typer.echo(decoding(source))


if __name__ == "__main__":
    typer.run(main)
