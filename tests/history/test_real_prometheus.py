"""Tests the effect of SM activity from a real Prometheus, and placement while Prometheus fails.

Two exporters serve GPUs in the formats of dcgm-exporter 4.5, 4.6, 4.9.0, and 4.2 with MIG.
Prometheus has samples of a quarter of an hour. Headroom queries it through a proxy that can be
stalled or redirected. The sample of every agent is the opposite of the history.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.agent.exporter import EXPOSITIONS, StandIn
from tests.debian import Unavailable
from tests.history.server import Prometheus, past, prometheus, recorded_lines, saying
from tests.processes import starts_processes
from tests.reverse_proxy import Service, Wire, proxy_to
from tests.serving import Server, binding, offer, pod, serving
from tests.waiting import until

SM, NEW_SM = "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_UTIL_RATIO"
GIB = 1 << 30
FLEET = """
nodes:
- {name: steered, gpus: 2, memory: 24Gi, sharing: time-slicing, replicas: 4}
- {name: left, gpus: 1, memory: 24Gi, sharing: time-slicing, replicas: 4}
- {name: right, gpus: 1, memory: 24Gi, sharing: time-slicing, replicas: 4}
- {name: odd, gpus: 8, memory: 24Gi}
"""
CONFIG = """
prometheus_url: http://127.0.0.1:{port}
prometheus_refresh_s: 1
prometheus_timeout_s: 2
prometheus_stale_after_s: 4
"""
#: SM activity in the agents' samples, by node and device.
SAMPLES = {"steered": (0.1, 0.6), "left": (0.1,), "right": (0.6,), "odd": (0.15,) * 8}
HISTORY = "dcgm-history"


def shared_line(uuid: str) -> list[str]:
    return recorded_lines(EXPOSITIONS / "4.5.3-4.8.2-shared.txt", SM, a=uuid)


def renamed_line(uuid: str) -> str:
    """Return the line in which the labels ``uuid`` and ``hostname`` are in lower case, and the
    labels of the pod start with ``exported_``.
    """
    return recorded_lines(EXPOSITIONS / "4.6.0-renamed.txt", SM, b=uuid)[1]


def new_line(uuid: str) -> str:
    """Return the line with the metric name of version 4.9.0 and newer."""
    return recorded_lines(EXPOSITIONS / "4.9.0-new-names.txt", NEW_SM, a=uuid)[0]


def mig_lines(parent: str) -> list[str]:
    return recorded_lines(EXPOSITIONS / "4.2.3-4.1.3-mig.txt", SM, a=parent)


def told_by_one(now_ms: int) -> list[str]:
    odd = [shared_line(f"GPU-odd-{i}")[0] for i in range(8)]
    return [
        *(saying(line, 0.05) for line in shared_line("GPU-steered-0")),
        *(saying(line, 0.2) for line in shared_line("GPU-steered-1")),
        *(saying(line, 0.05) for line in shared_line("GPU-left-0")),
        saying(renamed_line("GPU-right-0"), 0.2),
        saying(odd[0], "NaN"),
        saying(odd[1], 0.3),
        saying(odd[2], 140737488355330.0),  # This number stands for a missing value in DCGM.
        saying(odd[3], 0.7, at=str(now_ms - 20_000)),  # later than the stored samples
        saying(odd[4], 0.7, at=str(now_ms + 300_000)),
        saying(odd[5], "+Inf"),
        saying(new_line("GPU-odd-6"), 0.0),
        *mig_lines("GPU-cut"),
    ]


def lines_of_the_other_exporter() -> list[str]:
    values = {1: 0.65, 2: 0.4, 3: "NaN"}
    return [saying(shared_line(f"GPU-odd-{i}")[0], value) for i, value in values.items()]


def remembered(one: StandIn) -> list[str]:
    """Return the series of devices that were busy until now and of devices that were always
    idle.
    """
    busy, quiet = [0.9, 0.8] * 15, [0.2] * 30
    series = [
        (line, busy) for uuid in ("steered-0", "left-0") for line in shared_line(f"GPU-{uuid}")
    ]
    series += [(line, quiet) for line in shared_line("GPU-steered-1")]
    lines = [text for line, values in series for text in past(line, one, values)]
    return [f"# TYPE {SM} gauge", *lines]


@dataclass
class SteeredFleet:
    prometheus: Prometheus
    #: The proxy between Headroom and Prometheus.
    proxy: Service
    wire: Wire
    server: Server

    def device(self, node: str, index: int = 0) -> dict[str, Any]:
        body = self.server.get(f"/v1/nodes/{node}").json()
        found: dict[str, Any] = body["node"]["devices"][index]
        return found

    def witness(self, node: str, index: int = 0) -> str:
        return str(self.device(node, index)["sm_activity_source"])

    def queries(self, outcome: str) -> float:
        name = f'headroom_history_queries_total{{outcome="{outcome}"}} '
        lines = self.server.get("/metrics").body.decode().splitlines()
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    def placed(self, *nodes: str) -> dict[str, Any]:
        """Place a pod. Return the explanation of its device."""
        asking = pod("asking", "2Gi")
        answer = self.server.post("/filter", offer(asking, *nodes)).json()
        assert answer["NodeNames"], answer
        scores = {
            each["Host"]: each["Score"]
            for each in self.server.post("/prioritize", offer(asking, *nodes)).json()
        }
        body = self.server.get("/v1/explain?pod=default/asking").json()
        of = {each["node"]: each for each in body["nearest"]}
        (candidate,) = of[max(scores, key=lambda node: scores[node])]["candidates"]
        found: dict[str, Any] = candidate["device"]
        return found

    def messages(self) -> list[str]:
        return self.server.log.read_text().splitlines()


def report(server: Server) -> None:
    """Write a report for each node, with the pods of each device and the SM activity in
    ``SAMPLES``.
    """
    nodes = {each["name"]: each for each in server.get("/v1/nodes").json()["nodes"]}
    reports = []
    for name, samples in SAMPLES.items():
        pods = []
        devices = []
        for i, ratio in enumerate(samples):
            seen = nodes[name]["devices"][i]
            holders = [h for h in seen["holders"] if chosen(server, h["name"]) == seen["uuid"]]
            pods += [
                {"uid": h["uid"], "device": seen["uuid"], "namespace": h["namespace"],
                 "name": h["name"], "replica": f"{seen['uuid']}::0", "used": 0}
                for h in holders
            ]  # fmt: skip
            total = 4 if seen["sharing"] == "time-slicing" else 1
            devices.append({
                "uuid": seen["uuid"], "memory": seen["memory_bytes"], "reserved": 0, "used": 0,
                "unattributed": 0, "sharing": seen["sharing"], "resource": seen["resource"],
                "replicas": {"free": total - len(holders), "allocated": len(holders)},
                "smActivity": {"ratio": ratio, "source": "gpm"},
            })  # fmt: skip
        if name == "odd":
            devices[7] |= {"kind": "mig", "parent": "GPU-cut", "gpuInstance": 2}
        plugin = {"allocationPolicy": "distributed", "topologyManagerPolicy": "none"}
        plugin |= {"steered": ["nvidia.com/gpu"] if name == "steered" else []}
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        status = {"observedAt": stamp, "devices": devices, "pods": pods, "plugin": plugin}
        reports.append({"node": name, "status": status})
    assert server.debug_post("/embedded/v1/reports", reports).status == 204


def chosen(server: Server, name: str) -> str:
    body = server.get(f"/v1/explain?pod=default/{name}").json()
    (container,) = json.loads(body["annotations"]["headroom.gpu/placement"])["containers"].values()
    (uuid,) = container["bytes"]
    return str(uuid)


def bind(server: Server, name: str, node: str) -> None:
    one = pod(name, "8Gi")
    one["metadata"]["annotations"]["headroom.gpu/policy"] = "spread"
    assert server.post("/filter", offer(one, node)).json()["NodeNames"] == [node]
    assert server.post("/bind", binding(one, node)).json() == {"Error": ""}


@pytest.fixture(scope="module")
@starts_processes
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteeredFleet]:
    """A cluster in which each GPU, except those with odd samples, has one pod of the same size."""
    config = tmp_path_factory.mktemp("config") / "config.yaml"
    try:
        with prometheus() as real, StandIn().serving() as one, StandIn().serving() as other:
            one.text = "\n".join(told_by_one(round(time.time() * 1000))) + "\n"
            other.text = "\n".join(lines_of_the_other_exporter()) + "\n"
            real.configure([one, other])
            real.remember(remembered(one))
            real.run()
            with proxy_to(f"http://127.0.0.1:{real.port}") as (proxy, wire):
                config.write_text(CONFIG.format(port=proxy.port))
                with serving(FLEET, "--config", str(config)) as server:
                    report(server)
                    for name, node in (("l", "left"), ("r", "right"), ("s", "steered")):
                        bind(server, name, node)
                    report(server)
                    bind(server, "t", "steered")
                    report(server)
                    yield SteeredFleet(real, proxy, wire, server)
    except Unavailable as err:
        pytest.skip(f"needs a real Prometheus: {err}")


@pytest.fixture
def shown(world: SteeredFleet) -> SteeredFleet:
    """The cluster after all history has arrived."""
    # Wait for the last series of each exporter, because it arrives together with the other series.
    waited_for = ("right", 0), ("odd", 7), ("odd", 2)
    until(lambda: {world.witness(*each) for each in waited_for} == {HISTORY}, "history comes in")
    until(lambda: world.device("odd", 1)["sm_activity_ratio"] != 0.3, "the other's as well")
    return world


def test_the_idler_device_is_chosen_by_history_and_not_by_the_last_sample(
    shown: SteeredFleet,
) -> None:
    assert {shown.device("steered", i)["headroom_bytes"] for i in (0, 1)} == {16 * GIB}
    device = shown.placed("steered")
    assert device["uuid"] == "GPU-steered-1"
    assert device["sm_activity_ratio"] == 0.2
    assert device["sm_activity_source"] == HISTORY
    assert device["sm_activity_quantile"] == 0.95
    assert device["sm_activity_window_s"] == 900
    assert device["sm_activity_age_s"] >= 0
    loud = shown.device("steered", 0)
    assert loud["sm_activity_ratio"] == pytest.approx(0.9, abs=0.05)


def test_the_node_with_the_idler_device_is_chosen(shown: SteeredFleet) -> None:
    """Both nodes have one device, with the same reservations."""
    for order in (("left", "right"), ("right", "left")):
        device = shown.placed(*order)
        assert (device["uuid"], device["sm_activity_source"]) == ("GPU-right-0", HISTORY)
    # Wait until the assumed bind of the last filter call no longer counts.
    until(
        lambda: shown.device("left")["headroom_bytes"] == shown.device("right")["headroom_bytes"],
        "both devices have the same headroom",
    )


@pytest.mark.parametrize(
    ("index", "ratio", "source"),
    [
        pytest.param(0, 0.15, "gpm", id="NaN"),
        pytest.param(1, 0.65, HISTORY, id="two exporters: the higher"),
        pytest.param(2, 0.4, HISTORY, id="two exporters, one without a value"),
        pytest.param(3, 0.15, "gpm", id="a too old sample and later impossible values"),
        pytest.param(4, 0.15, "gpm", id="a sample five minutes in the future"),
        pytest.param(5, 0.15, "gpm", id="infinite"),
        pytest.param(6, 0.0, HISTORY, id="idle"),
        pytest.param(7, 0.713002, HISTORY, id="a GPU instance, by its parent"),
    ],
)
def test_impossible_and_missing_values_are_ignored(
    shown: SteeredFleet, index: int, ratio: float, source: str
) -> None:
    device = shown.device("odd", index)
    # The comparison is approximate, because Prometheus computes the quantile with other rounding.
    assert device["sm_activity_ratio"] == pytest.approx(ratio)
    assert device["sm_activity_source"] == source


def test_lower_case_and_exported_labels_are_read(shown: SteeredFleet) -> None:
    right = shown.device("right")
    assert (right["sm_activity_ratio"], right["sm_activity_source"]) == (0.2, HISTORY)


def test_the_sm_limit_uses_history_and_the_explanation_shows_it(shown: SteeredFleet) -> None:
    asking = pod("calm", "1Gi")
    asking["metadata"]["annotations"]["headroom.gpu/max-sm"] = "50%"
    answer = shown.server.post("/filter", offer(asking, "left", "right")).json()
    assert answer["NodeNames"] == ["right"]
    body = shown.server.get("/v1/explain?pod=default/calm").json()
    lines = [line.strip() for node in body["nearest"] for line in node["lines"]]
    over = "the 0.95 quantile of 15 minutes in DCGM's history; the pod requires less than 50 %"
    assert f"SM activity 20 %, {over}" in lines
    assert any(line.startswith("SM activity 9") and line.endswith(over) for line in lines)


def test_placement_continues_during_any_fault_of_prometheus(shown: SteeredFleet) -> None:
    world, real, wire = shown, shown.prometheus, shown.wire

    def placed_by(source: str, why: str) -> dict[str, Any]:
        placed: list[dict[str, Any]] = []

        def so_placed() -> bool:
            placed.append(world.placed("steered"))
            return placed[-1]["sm_activity_source"] == source

        until(so_placed, why)
        return placed[-1]

    def by_history(why: str) -> None:
        device = placed_by(HISTORY, why)
        assert (device["uuid"], device["sm_activity_ratio"]) == ("GPU-steered-1", 0.2)
        assert device["sm_activity_age_s"] >= 0

    def by_agents(why: str) -> None:
        device = placed_by("gpm", why)
        assert (device["uuid"], device["sm_activity_ratio"]) == ("GPU-steered-0", 0.1)
        assert device["sm_activity_window_s"] is device["sm_activity_quantile"] is None
        assert device["sm_activity_age_s"] >= 0

    def fails(says: str) -> None:
        failed = world.queries("failed")
        until(lambda: world.queries("failed") > failed, f"a query fails: {says}")
        assert world.placed("steered")["uuid"] == "GPU-steered-0"
        assert world.placed("left", "right")["uuid"] == "GPU-left-0"
        until(lambda: any(says in line for line in world.messages()), says)

    by_history("Prometheus serves")
    real.kill()
    by_agents("Prometheus was killed")
    fails("cannot be asked")

    real.run()
    by_history("Prometheus is back")
    wire.faults = {"stalled": 1.0}
    by_agents("Prometheus does not answer")
    fails("no complete answer within 2 s")

    with StandIn().serving() as broken:
        world.proxy.wires = {broken.url.removesuffix("/metrics"): wire}
        wire.faults = {}
        for status, text, says in (
            (500, "", "it answers 500"),
            (200, '{"status":"success","data":{', "its answer is not in the format of Prometheus"),
            (200, '{"status":"error","errorType":"internal","error":"x"}', "internal: x"),
            (503, '{"status":"error","errorType":"timeout","error":"y"}', "503: timeout: y"),
        ):
            broken.status, broken.text = status, text
            fails(says)
        world.proxy.wires = {f"http://127.0.0.1:{real.port}": wire}
    by_history("Prometheus answers again")
