"""Fills a real Prometheus with days of a simulated cluster, and plans from it.

The pods come from a generated history and run unshared. Their series come from a real
kube-state-metrics. The series of dcgm-exporter have the form of its recorded expositions, because
the exporter itself needs a GPU. The samples have the times of the days until now."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.plan import exported, generated, kube_state_metrics
from benchmarks.plan.exported import Ran
from tests.history.server import prometheus

#: Seconds after the end for which the nodes still exist, while a plan is computed.
_LONGER_S = 7200


@contextmanager
def filled(days: int, nodes: int, scale: float, seed: int) -> Iterator[str]:
    """Run a Prometheus that has these days. Yield its address."""
    ran = exported.play(generated.rows(days, seed, scale), nodes)
    end_s = int(time.time())
    start_s = end_s - days * generated.DAY_S
    ran = [each for each in ran if start_s + each.started_s < end_s]
    with prometheus() as server:
        server.configure([])
        server.remember(list(_lines(ran, nodes, start_s, end_s)), longest_block="54h")
        server.run()
        yield f"http://127.0.0.1:{server.port}"


def _lines(ran: Sequence[Ran], nodes: int, start_s: int, end_s: int) -> Iterator[str]:
    of_nodes, of_pods = kube_state_metrics.series(ran, nodes, start_s)
    for line in of_nodes:
        yield from exported.repeated(line, end_s - exported.SHOWN_S, end_s + _LONGER_S)
    for each in ran:
        for line in of_pods[each.row.name]:
            yield from exported.repeated(line, *exported.life(each, start_s, end_s))
    yield from exported.dcgm_lines(ran, nodes, start_s, end_s, _LONGER_S)
