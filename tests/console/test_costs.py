"""Tests /v1/costs: the GPU hours and the memory that namespaces held, used and left idle."""

from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from headroom.console.history.holdings import OTHERS, Holdings, limited, summed
from headroom.console.history.ranges import Found, PrometheusRanges, Range
from headroom.console.history.recorder import HistoryRecorder
from headroom.console.metrics import FleetCollector
from headroom.console.views.costs import _read, _view
from headroom.contract.gpunode import Replicas
from headroom.contract.watched import PodGone
from headroom.core.whatif.pending_pods import Pending
from headroom.runtime.server.auth import GetPod, ReadPath
from tests.builders import GIB, device, mig, shared
from tests.console.asking import STALE_AFTER_S, Asked
from tests.console.test_idle import AN_HOUR, SM, TWO_DAYS, add, fleet, row
from tests.promtool import complaints
from tests.server.test_auth import GuardedApi

ROUND_S = 10.0


def recorded(asked: Asked, rounds: int, every_s: float = ROUND_S) -> HistoryRecorder:
    """Record the current state for ``rounds`` rounds. The first round only sets the start time."""
    recorder = HistoryRecorder(asked.cluster, asked.context.history, asked.context.wall_s)
    for number in range(rounds + 1):
        asked.now_s += every_s if number else 0.0
        for _ in recorder.record(asked.now_s):
            pass
    return recorder


def costs(asked: Asked, query: str = "") -> dict[str, Any]:
    answer = asked.get(f"/v1/costs{query}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


@pytest.fixture
def team() -> Asked:
    """A shared 24 GiB GPU on which each pod counts at least a quarter. An idle notebook holds half
    of the memory, and an active trainer uses more than it reserved.
    """
    return fleet(
        shared("A", free=2, allocated=2, sm_activity=SM),
        rows=[row("notebook", "A", 4, TWO_DAYS), row("trainer", "A", 8)],
        held={"notebook": {"A": 12}, "trainer": {"A": 6}},
    )


def test_the_last_hour_has_held_used_and_idle_gpu_hours(team: Asked) -> None:
    recorded(team, 6)
    body = costs(team)
    assert (body["source"], body["covered_s"], body["gpu_hour_price"]) == ("console", 60.0, None)
    minute = 1 / 60
    assert body["namespaces"] == [
        {
            "namespace": "ml",
            "held_gpu_hours": pytest.approx((1 / 2 + 1 / 3) * minute, abs=1e-4),
            "used_gpu_hours": pytest.approx(1 / 3 * minute, abs=1e-4),
            "idle_gpu_hours": pytest.approx(1 / 2 * minute, abs=1e-4),
            "unmeasured_gpu_hours": 0.0,
            # The notebook holds 12 GiB and uses 4 GiB. The trainer holds 8 GiB.
            "held_gib_days": pytest.approx(20 / 24 * minute, abs=1e-4),
            "unused_gib_days": pytest.approx(8 / 24 * minute, abs=1e-4),
            "unmeasured_gib_days": 0.0,
            "cost": None,
            "idle_cost": None,
        }
    ]
    assert {"namespace": "ml", **body["total"]} == body["namespaces"][0]


def test_a_share_of_a_gpu_costs_that_share_of_its_price(team: Asked) -> None:
    object.__setattr__(team.context, "gpu_hour_price", lambda: 3600.0)
    recorded(team, 6)
    (each,) = costs(team)["namespaces"]
    # The costs are for one minute of half a GPU and of a third of a GPU.
    assert (each["cost"], each["idle_cost"]) == (50.0, 30.0)


def test_shares_of_one_gpu_add_up_to_at_most_one() -> None:
    """One pod holds nearly all memory, and three other pods hold a replica each."""
    names = ["big", "b", "c", "d"]
    asked = fleet(
        shared("A", free=0, allocated=4, sm_activity=SM),
        rows=[row(name, "A", 1) for name in names],
        held={name: {"A": 21 if name == "big" else 1} for name in names},
    )
    recorder = recorded(asked, 1)
    assert recorder.held["ml"].gpus == pytest.approx(1.0)


def test_a_whole_gpu_is_held_and_a_mig_device_counts_as_its_part() -> None:
    asked = Asked()
    add(
        asked,
        device("A", replicas=Replicas(allocated=1), sm_activity=SM),
        mig("M1", 1, replicas=Replicas(allocated=1), sm_activity=SM),
        mig("M2", 2, memory_bytes=30 * GIB, sm_activity=SM),
        rows=[row("p", "A", 1), row("q", "M1", 10, AN_HOUR)],
        held={"p": {"A": 2}, "q": {"M1": 10}},
    )
    held = recorded(asked, 1).held["ml"]
    assert (held.active_gpus, held.idle_gpus) == (1.0, 0.25)


def test_without_sm_activity_the_use_of_a_gpu_is_unknown() -> None:
    unknown = msgspec.structs.replace(row("p", "A", 1), used_bytes=None)
    asked = fleet(
        shared("A", allocated=1, sm_activity=None),
        rows=[unknown],
        held={"p": {"A": 12}},
    )
    held = recorded(asked, 1).held["ml"]
    assert held == Holdings(0.0, 0.0, 0.5, 0, 0, 12 * GIB)


def test_pods_of_a_stale_report_hold_their_gpus_until_they_are_deleted(team: Asked) -> None:
    team.now_s += STALE_AFTER_S + 1
    recorder = recorded(team, 1)
    assert recorder.held["ml"].unmeasured_gpus == pytest.approx(1 / 2 + 1 / 3)
    assert recorder.held["ml"].unmeasured_bytes == 20 * GIB
    trainer = team.cluster.pod("u-trainer")
    assert trainer is not None
    team.writer.apply([PodGone(trainer.metadata.uid)])
    assert recorded(team, 1).held["ml"].unmeasured_gpus == pytest.approx(1 / 2)


def test_a_pause_of_the_recorder_does_not_count_as_held_time(team: Asked) -> None:
    recorded(team, 1, every_s=1000.0)
    assert costs(team)["covered_s"] == 30.0


def test_only_the_last_hour_is_kept(team: Asked) -> None:
    recorded(team, 500)
    assert len(team.context.history.held.since(0.0)) == 60
    assert costs(team)["covered_s"] <= 3600.0
    assert costs(team, "?since=10m")["covered_s"] == pytest.approx(600.0, abs=60.0)


def test_costs_can_be_limited_to_one_namespace(team: Asked) -> None:
    recorded(team, 6)
    assert [each["namespace"] for each in costs(team, "?namespace=ml")["namespaces"]] == ["ml"]
    other = costs(team, "?namespace=other")
    assert (other["namespaces"], other["total"]["held_gpu_hours"]) == ([], 0.0)


def test_the_most_idle_namespace_comes_first(team: Asked) -> None:
    of = {"busy": Holdings(9.0), "idle": Holdings(0.0, 2.0), "small": Holdings(1.0, 1.0)}
    for now_s in (0.0, 10.0):
        team.context.history.held.add(of, team.context.wall_s(), now_s)
    names = [each["namespace"] for each in costs(team)["namespaces"]]
    assert names == ["idle", "small", "busy"]


def test_namespaces_beyond_the_limit_are_summed_up() -> None:
    parts = [{"a": Holdings(1.0), "b": Holdings(2.0)}, {"c": Holdings(3.0), "b": Holdings(2.0)}]
    assert summed(parts, most=1) == {"b": Holdings(4.0), OTHERS: Holdings(4.0)}


def test_a_longer_range_needs_prometheus(team: Asked) -> None:
    answer = team.get("/v1/costs?since=30d")
    assert answer.status_code == 503
    assert "set prometheus_url" in answer.json()["detail"]


def test_repeated_series_and_series_without_labels_count_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle = {"namespace": "ml", "state": "idle"}
    found = [Found("gpus", "s", labels, [9.0, 1.0, None, 2.0]) for labels in (idle, idle, {})] + [
        Found("covered", "s", {}, [9.0, 60.0])
    ] * 2
    monkeypatch.setattr(PrometheusRanges, "read", lambda *asked: found)
    covered_s, sums = _read(PrometheusRanges("http://127.0.0.1:9"), Range(0.0, 60.0))
    assert (covered_s, sums["ml"].idle_gpus, sums[""].gpus) == (60.0, 3.0, 0.0)


@pytest.mark.parametrize("since", ["2027-01-01T00:00:00Z", "yesterday"])
def test_invalid_times_are_rejected(team: Asked, since: str) -> None:
    assert team.get(f"/v1/costs?since={since}").status_code == 422


def test_only_viewers_may_read_costs() -> None:
    world = GuardedApi()
    world.reviews.rights["member"] = {GetPod("ml", "p")}
    world.reviews.rights["viewer"] = {ReadPath("get", "/v1/costs")}
    assert world.get("/v1/costs", "member").status_code == 403
    assert world.get("/v1/costs", "viewer").json()["namespaces"] == []


def test_the_metrics_have_a_series_for_each_state(team: Asked) -> None:
    recorder = recorded(team, 1)
    registry = CollectorRegistry()
    snapshot = team.cluster.snapshot()
    registry.register(
        FleetCollector(
            *(team.cluster, lambda: snapshot, Pending, 10, STALE_AFTER_S),
            lambda: recorder.held,
        )
    )

    def sample(name: str, state: str) -> float | None:
        return registry.get_sample_value(name, {"namespace": "ml", "state": state})

    gpus = [sample("headroom_held_gpus", each) for each in ("active", "idle", "unmeasured")]
    assert gpus == [pytest.approx(1 / 3), 0.5, 0.0]
    memory = [sample("headroom_held_bytes", each) for each in ("used", "unused", "unmeasured")]
    assert memory == [12 * GIB, 8 * GIB, 0]


def test_pods_with_unknown_names_have_no_empty_namespace(team: Asked) -> None:
    """Prometheus would replace an empty label with the console's own namespace."""
    registry = CollectorRegistry()
    snapshot = team.cluster.snapshot()
    held = limited({f"team-{n}": Holdings(1.0) for n in range(300)} | {"": Holdings(2.0)})
    registry.register(
        FleetCollector(team.cluster, lambda: snapshot, Pending, 10, STALE_AFTER_S, lambda: held)
    )
    text = generate_latest(registry).decode()
    assert complaints(text) == []
    lines = {line for line in text.splitlines() if "headroom_held_gpus{" in line}
    of = 'headroom_held_gpus{{namespace="({})",state="active"}} {}'
    assert {of.format("unknown", 2.0), of.format("others", 101.0)} <= lines


def test_costs_of_rounded_shares_are_not_lost() -> None:
    """Costs are computed from seconds, not from rounded hours."""
    view = _view(Holdings(idle_gpus=0.1), price=1_000_000.0)
    assert (view.idle_gpu_hours, view.idle_cost) == (0.0, 27.78)
