"""Runs `headroom plan --prometheus` on a real Prometheus with a week of a simulated cluster."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

from benchmarks.plan import exported, generated
from benchmarks.plan.exported import Ran
from benchmarks.plan.generated import Row
from headroom.commands import app
from headroom.errors import BadSettings
from headroom.planner.prometheus_source import read_prometheus
from headroom.planner.workload import History
from tests.debian import Unavailable
from tests.history.server import prometheus
from tests.processes import free_ports

pytestmark = pytest.mark.slow

DAYS, NODES, DAY_S = 7, 5, 86_400
#: The cluster is simulated from a Monday to the noon of the Thursday in the next week.
SPAN_S = 21 * DAY_S // 2
SEED = 1
HOUR_S = 3600
#: Samples are a minute apart, so shorter events are invisible.
UNSEEN_S = 120
#: Pods that every seed has: some that run at the end, one that runs when the last four days begin,
#: and a batch larger than all other concurrent pods together.
PLANNED = [
    *(Row(f"runs-{n}", "runs", 1, 2000, 0.1, SPAN_S - HOUR_S, SPAN_S + HOUR_S) for n in range(3)),
    Row("long", "long", 1, 2000, 0.1, SPAN_S - 9 * DAY_S // 2, SPAN_S - 7 * DAY_S // 2),
    *(
        Row(f"burst-{n}", "burst", 1, 2000, 0.1, 4 * DAY_S + HOUR_S, 4 * DAY_S + 3 * HOUR_S)
        for n in range(16)
    ),
]


@dataclass(frozen=True)
class Filled:
    url: str
    ran: list[Ran]
    start_s: float
    end_s: float

    def history(self, days: int = DAYS, **labels: str) -> History:
        return read_prometheus(self.url, days, labels, self.end_s)


@pytest.fixture(scope="module")
def filled() -> Iterator[Filled]:
    rows = [*generated.rows(11, SEED, scale=0.08), *PLANNED]
    played = exported.play(sorted(rows, key=lambda row: row.created_s), NODES)
    since_s, late_s = SPAN_S - DAYS * DAY_S + UNSEEN_S, SPAN_S - 600
    # All pods start in the window, and in its last minutes nothing happens.
    ran = [
        each
        for each in played
        if each.row.created_s > since_s
        and each.started_s < late_s
        and not late_s < each.ended_s <= SPAN_S
    ]
    end_s = time.time()
    start_s = end_s - SPAN_S
    try:
        with prometheus() as real:
            real.configure([])
            # The command reads until now, which is later.
            lines = list(exported.lines(ran, NODES, start_s, end_s, longer_s=HOUR_S))
            real.remember(lines, longest_block="54h")
            real.run()
            yield Filled(f"http://127.0.0.1:{real.port}", ran, start_s, end_s)
    except Unavailable as err:
        pytest.skip(f"needs a real Prometheus: {err}")


def test_pods_peaks_and_nodes_equal_the_simulated_cluster(filled: Filled) -> None:
    history = filled.history()
    truth = {each.row.name: each for each in filled.ran}
    assert len(history.lives) == len(truth) > 50
    assert (len(history.machines), history.gpus) == (NODES, NODES * 4)
    machine = history.machines[0]
    assert (machine.model, machine.memory_bytes) == ("L40S", 46_068 << 20)
    assert (machine.cpu_milli, machine.host_bytes) == (64_000, 512 << 30)
    first_s = min(each.row.created_s for each in filled.ran)
    for life in history.lives:
        ran = truth[life.name.removeprefix("ml/")]
        row = ran.row
        assert life.workload == f"ml/{row.workload}"
        assert life.gpus == row.gpus
        assert life.peak_bytes == row.peak_mib << 20
        assert life.sm_ratio == pytest.approx(row.sm_ratio, abs=1e-6)
        assert (life.cpu_milli, life.host_bytes) == (4000 * row.gpus, (16 << 30) * row.gpus)
        assert life.created_s == pytest.approx(row.created_s - first_s, abs=2)
        ended_s = min(ran.ended_s, SPAN_S)
        assert life.run_s == pytest.approx(ended_s - ran.started_s, abs=UNSEEN_S)
    (note,) = history.assumptions
    running = sum(each.ended_s > SPAN_S for each in filled.ran)
    assert running >= 3
    assert note == f"{running} pods still ran at the end of the window, which counts as the end."


def test_the_window_and_the_nodes_can_be_limited(filled: Filled) -> None:
    days = filled.history(days=4)
    since_s = SPAN_S - 4 * DAY_S
    created = {each.row.name: each.row.created_s for each in filled.ran}
    ended = {each.row.name: each.ended_s for each in filled.ran}
    found = {life.name.removeprefix("ml/") for life in days.lives}
    assert {name for name in ended if ended[name] > since_s + UNSEEN_S} <= found
    assert found <= {name for name in ended if ended[name] > since_s - UNSEEN_S}
    (noted,) = re.findall(r"(\d+) pods began before the window", " ".join(days.assumptions))
    assert int(noted) == sum(created[name] < since_s for name in found) >= 1
    some = filled.history(label_pool="b")
    assert [machine.name for machine in some.machines] == ["node-01", "node-03"]
    assert len(some.lives) == sum(each.node in (1, 3) for each in filled.ran)


def test_a_report_is_computed_from_prometheus(filled: Filled) -> None:
    given = ["plan", "--prometheus", filled.url, "--device-choice", "steered", "--replicas", "4"]
    found = CliRunner().invoke(app, [*given, "--seeds", "1", "--processes", "1", "--json"])
    assert found.exit_code == 0, found.stderr
    data = json.loads(found.stdout)
    assert data["pods"] == len(filled.ran)
    assert data["vram"] == "peaks + 10 %"
    replays = {each["configuration"]: each["replays"][0] for each in data["configurations"]}
    assert list(replays) == [
        "unshared",
        "4 replicas, steered",
        "4 replicas, steered, vram from each pod's own peak + 10 %",
        "4 replicas, steered, vram from recommendations",
        # The trainers need four GPUs a pod.
        "4 replicas, steered, one pool",
        # The history has SM activity.
        "4 replicas, steered, max-sm 70 %",
        "4 replicas, steered, max-sm 40 %",
    ]
    unshared, shared = replays["unshared"], replays["4 replicas, steered"]
    assert 0 < shared["gpus"] < unshared["gpus"] <= NODES * 4
    assert {each["workload"] for each in data["exclusive_workloads"]} <= {
        "ml/chat-70b",
        "ml/trainer",
    }


def test_a_history_without_pods_is_an_error_with_the_next_step(filled: Filled) -> None:
    with pytest.raises(BadSettings, match="no node with label_pool=c with both kube_node_status"):
        filled.history(label_pool="c")
    closed = f"http://127.0.0.1:{free_ports(1)[0]}"
    refused = f"--prometheus {closed}: Connection refused. To check the address: curl {closed}/api"
    with pytest.raises(BadSettings, match=refused):
        read_prometheus(closed, 1, {})
    other = f"{filled.url}/other"
    with pytest.raises(BadSettings, match=f"--prometheus {other}: .*404"):
        read_prometheus(other, 1, {})
