"""Runs the inflation experiment in a real kube-scheduler, with its own plugins and our weight.

    python -m benchmarks.packing.real --nodes nodes_small.csv --pods pods.csv --policy fgd
        --policy fragmentation [--arrivals arrivals.csv --cluster small] [--seed 100]

It runs a real etcd, API server and kube-scheduler. Nodes are objects, and a simulated agent of each
node reports the devices of its pods. Each pod is bound or rejected before the next is created.
Rejected pods are deleted. A published rule runs as its own extender, which filters, scores and
binds. It passes its score to kube-scheduler in the range of an extender, 0..10. Headroom is the
real process, on steered nodes. Placements are judged as in the simulation. A pod takes some tenths
of a second, so use a small cluster.

``--others`` sets where pods without a GPU go. With "kube", kube-scheduler decides, and the extender
is called only for GPU pods. With "own", the extender is called for all pods, by a second entry as
in deploy/base/kube-scheduler.yaml, and Headroom or the rule returns its own score. With "aside",
the rule is called, and returns the same score as ``--others aside`` in the simulation."""

import contextlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
import urllib3

from benchmarks.packing.__main__ import OPENB, machine_line
from benchmarks.packing.judge import Judge
from benchmarks.packing.play import READ_AT, Filters, Inflation, Placed, Play, Rows, shuffled
from benchmarks.packing.pools import unshared
from benchmarks.packing.real_cluster import Fleetful, manifest
from benchmarks.packing.rules import RULES, Fleet, Rule
from benchmarks.packing.runs import Aside, places
from benchmarks.packing.workload import (
    REPLICAS,
    Ask,
    Demand,
    Node,
    ask,
    read_arrivals,
    read_nodes,
    read_pods,
)
from headroom.contract.gpunode import Device, GPUNodeStatus, Plugin, PodUse, Replicas, Source
from tests.controlplane import control_plane
from tests.e2e.cluster import NAMESPACE, PODS, scheduling_message
from tests.e2e.nodes import RESOURCE

MIB = 1 << 20
PATIENCE_S = 60.0
OURS = ("pack", "fragmentation")


class Real(ABC):
    """Places a pod as kube-scheduler does. Subclasses return the devices that the pod got."""

    def __init__(self, cluster: Fleetful) -> None:
        self.cluster = cluster
        self._row = {node.name: row for row, node in enumerate(cluster.fleet)}

    def choose(self, name: str, asked: Ask, offered: Rows) -> Placed | None:
        cluster = self.cluster
        cluster.plane.call("POST", PODS, manifest(name, asked, bool(cluster.pools)))
        until_s = time.monotonic() + PATIENCE_S
        while True:
            pod = cluster.pod(name)
            if node := pod["spec"].get("nodeName"):
                row = self._row[node]
                if row not in offered:
                    raise AssertionError(f"{name} is on {node}, which is none of its nodes")
                return row, self.devices(name, asked, row, pod) if asked.gpus else ()
            if scheduling_message(pod):
                cluster.delete_by_force(name)
                return None
            if time.monotonic() > until_s:
                logs = {each: cluster.plane.log(each)[-3000:] for each in ("kube-scheduler",)}
                raise TimeoutError(f"{name} is neither bound nor rejected: {logs}")
            time.sleep(0.005)

    def ended(self, name: str) -> None:
        raise AssertionError("no pod leaves in an inflation")

    @abstractmethod
    def devices(self, name: str, asked: Ask, row: int, pod: Any) -> tuple[int, ...]:
        """Return the devices of the node that the pod got."""


class ByRule(Real):
    """Runs a published rule as extender, which sees the nodes that kube-scheduler offers."""

    def __init__(self, cluster: Fleetful, rule: Rule, aside: Rule | None, alone: bool) -> None:
        super().__init__(cluster)
        self._rule, self._aside, self._alone = rule, aside, alone
        self._asked: dict[str, Ask] = {}
        self._devices: dict[str, tuple[int, ...]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def choose(self, name: str, asked: Ask, offered: Rows) -> Placed | None:
        self._asked[name] = asked
        placed = super().choose(name, asked, offered)
        if placed is not None and not asked.gpus:  # no extender binds pods without a GPU
            self._rule.note(name, asked, placed)
        return placed

    def devices(self, name: str, asked: Ask, row: int, pod: Any) -> tuple[int, ...]:
        return self._devices[name]

    def _rows(self, names: Sequence[str]) -> Rows:
        return np.array([self._row[name] for name in names], np.int64)

    def filter(self, args: Any) -> Any:
        names = args["NodeNames"]
        asked = self._asked[args["Pod"]["metadata"]["name"]]
        rows = self._rule.fleet.fits(asked, self._rows(names))
        fits = {self.cluster.fleet[row].name for row in rows}
        no = {name: "no device has enough free memory" for name in names if name not in fits}
        return {
            "NodeNames": [name for name in names if name in fits],
            "FailedAndUnresolvableNodes": no,
        }

    def prioritize(self, args: Any) -> Any:
        names = args["NodeNames"]
        asked, rows = self._asked[args["Pod"]["metadata"]["name"]], self._rows(args["NodeNames"])
        rule, alone = self._rule, self._alone
        if self._aside is not None and not asked.gpus:
            rule, alone = self._aside, True
        scores = np.floor(10 * rule.scores(asked, rows)).clip(0, 10).astype(int)
        if alone:
            scores = np.where(rows == rule.pick(asked, rows), 10, 0)
        return [
            {"Host": name, "Score": int(score)} for name, score in zip(names, scores, strict=True)
        ]

    def bind(self, args: Any) -> Any:
        name, node = args["PodName"], args["Node"]
        row, asked = self._row[node], self._asked[name]
        placed = row, self._rule.devices(asked, row)
        self._rule.note(name, asked, placed)
        self._devices[name] = placed[1]
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/binding"
        self.cluster.plane.call("POST", path, {"metadata": {"name": name}, "target": target})
        return {}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        verbs = {"/filter": self.filter, "/prioritize": self.prioritize, "/bind": self.bind}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps(verbs[self.path](body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        return Handler


class ByHeadroom(Real):
    """Runs Headroom as extender. The agents report each pod before the next one is created."""

    def __init__(self, cluster: Fleetful) -> None:
        super().__init__(cluster)
        self._uses: dict[int, list[PodUse]] = {row: [] for row in range(len(cluster.fleet))}
        self._http = urllib3.PoolManager(retries=False, timeout=30.0)

    def report_all(self) -> None:
        for row in self._uses:
            self._report(row)

    def devices(self, name: str, asked: Ask, row: int, pod: Any) -> tuple[int, ...]:
        placed = json.loads(pod["metadata"]["annotations"]["headroom.gpu/placement"])
        sizes: Mapping[str, int] = placed["containers"]["main"]["bytes"]
        # The kubelet may choose any free device if devices are unshared.
        free = [uuid for uuid in sizes if all(use.device != uuid for use in self._uses[row])]
        given = sorted(free if row in self.cluster.pools else sizes)[: asked.gpus]
        self._uses[row] += [
            PodUse(
                uid=pod["metadata"]["uid"],
                device=uuid,
                namespace=NAMESPACE,
                name=name,
                container="main",
                replica=f"{uuid}::{len(self._uses[row])}",
                used_bytes=sizes[uuid],
                source="test",
            )
            for uuid in given
        ]
        observed_at = self._report(row)
        url = f"{self.cluster.debug_url()}/v1/nodes/{self.cluster.fleet[row].name}"
        until_s = time.monotonic() + PATIENCE_S
        while self._http.request("GET", url).json()["node"]["observed_at"] != observed_at:
            if time.monotonic() > until_s:
                raise TimeoutError(f"the report of {self.cluster.fleet[row].name} is not seen")
            time.sleep(0.005)
        return tuple(int(uuid.rpartition("-")[2]) for uuid in given)

    def _report(self, row: int) -> str:
        node, uses = self.cluster.fleet[row], self._uses[row]
        shared = row not in self.cluster.pools
        replicas = REPLICAS if shared else 1
        devices = []
        for index in range(node.gpus):
            uuid = f"GPU-{node.name}-{index}"
            on = [use for use in uses if use.device == uuid]
            devices.append(
                Device(
                    uuid=uuid,
                    index=index,
                    model=node.model,
                    memory_bytes=node.device_mib * MIB,
                    reserved_bytes=0,
                    used_bytes=sum(use.used_bytes or 0 for use in on),
                    unattributed_bytes=0,
                    sharing="time-slicing" if shared else "none",
                    resource=RESOURCE,
                    replicas=Replicas(free=replicas - len(on), allocated=len(on)),
                )
            )
        status = GPUNodeStatus(
            observed_at=datetime.now(UTC).isoformat(),
            devices=devices,
            pods=uses,
            plugin=Plugin(
                allocation_policy="distributed",
                topology_manager_policy="none",
                steered=[RESOURCE] if shared else [],
            ),
            sources=[Source(name="checkpoint"), Source(name="proc")],
        )
        body = {"status": msgspec.to_builtins(status)}
        path = f"/apis/headroom.gpu/v1alpha1/gpunodes/{node.name}/status"
        self.cluster._unless(404, "PATCH", path, body)
        return status.observed_at


@contextlib.contextmanager
def placing(
    policy: str, cluster: Fleetful, make: Callable[[str], Rule], others: str, alone: bool
) -> Iterator[Real]:
    one_entry = others == "kube"
    if policy in OURS:
        settings = {"policy": policy, "stale_after_s": 1e6}
        ours = ByHeadroom(cluster)
        cluster.start_scheduler(cluster.start_extender(settings=settings), one_entry=one_entry)
        deadline_s = time.monotonic() + PATIENCE_S
        while not cluster.initialised():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not initialised:\n{cluster.plane.log('extender')[-4000:]}")
            ours.report_all()
            time.sleep(0.5)
        ours.report_all()
        time.sleep(1.0)
        yield ours
        return
    rule = make(policy)
    aside = Aside(rule.fleet, rule.demand, (), rule.ranks) if others == "aside" else None
    theirs = ByRule(cluster, rule, aside, alone)
    try:
        cluster.start_scheduler(theirs.url, one_entry=one_entry)
        yield theirs
    finally:
        theirs.close()


def main(
    nodes: Annotated[Path, typer.Option(help="CSV of nodes.")] = OPENB / "nodes_small.csv",
    pods: Annotated[Path, typer.Option(help="CSV of pods.")] = OPENB / "pods.csv",
    arrivals: Annotated[Path | None, typer.Option(help="CSV of the order of pods.")] = None,
    cluster: Annotated[
        str, typer.Option(help="Cluster in the arrivals file: full or small.")
    ] = "small",
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed of the order of pods. Can be repeated.")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Policy. Can be repeated.")] = None,
    others: Annotated[
        list[str] | None, typer.Option(help="kube, own or aside; one for each policy.")
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="Rules return only their best node to kube-scheduler.")
    ] = False,
) -> None:
    """Print what each policy admitted, for each order of arrivals."""
    there = read_nodes(nodes)
    asks = tuple(ask(pod, "vram") for pod in read_pods(pods))
    orders: dict[int, tuple[int, ...]] = dict.fromkeys(seed or (1,), ())
    if arrivals is not None:
        orders = read_arrivals(arrivals, len(asks), "vram", cluster, seed or ())
    demand = Demand(there, "vram")
    pools = unshared(there, asks, "vram")
    typer.echo(f"{nodes.name}, {pods.name}, {len(pools)} nodes unshared; {machine_line()}\n")
    columns = [*(f"admitted % @{at}" for at in READ_AT), "idle % @100", "overcommits", "pods", "s"]
    typer.echo(f"| policy | pods without a GPU | seed | {' | '.join(columns)} |")
    typer.echo("|---" * (3 + len(columns)) + "|")
    policy = policy or ["bestfit", "fgd", *OURS]
    others = others or ["own" if each in OURS else "kube" for each in policy]
    for number, given in orders.items():
        order = given or tuple(
            shuffled([demand.of(each) for each in asks], demand.capacity, number)
        )
        for each, theirs in zip(policy, others, strict=True):
            began_s = time.monotonic()
            found = _inflated(each, there, asks, order, demand, pools, theirs, alone)
            cells = [
                *(f"{found.admitted(at):.2f}" for at in READ_AT),
                f"{found.idle(100):.2f}",
                str(found.overcommits),
                str(len(order)),
                f"{time.monotonic() - began_s:.0f}",
            ]
            typer.echo(f"| {each} | {theirs} | {number} | {' | '.join(cells)} |")


def _inflated(
    policy: str,
    nodes: Sequence[Node],
    asks: Sequence[Ask],
    order: Sequence[int],
    demand: Demand,
    pools: Sequence[int],
    others: str,
    alone: bool,
) -> Inflation:
    with control_plane() as plane:
        there = Fleetful(plane, nodes, pools)
        there.create()

        def rule(policy: str) -> Rule:
            ranks = np.arange(len(nodes))
            return RULES[policy](Fleet(nodes, "vram"), demand, asks, ranks)

        with placing(policy, there, rule, others, alone) as scheduler:
            judge = Judge(places(nodes, "vram", REPLICAS))
            return Play(Filters(nodes, pools), demand, judge, scheduler).inflate(asks, order)


if __name__ == "__main__":
    typer.run(main)
