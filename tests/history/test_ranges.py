"""Checks that costs of more than an hour come from a real Prometheus."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headroom.console.history.ranges import (
    Found,
    PrometheusRanges,
    Range,
    _at_times,
    of_holdings,
)
from headroom.errors import PrometheusUnreadable
from headroom.runtime.promql import EVERY_CLUSTER
from tests.console.asking import Asked
from tests.debian import Unavailable
from tests.history.server import prometheus
from tests.processes import free_ports, starts_processes
from tests.waiting import PATIENCE_S

HOUR_S = 3600.0
MOST_READERS = 16
DEVICE = '{gpu="0",UUID="GPU-\\"0",Hostname="n"}'
POD = '{gpu="0",UUID="GPU-\\"0",Hostname="n",namespace="ml",pod="a",container="main",pod_uid="u"}'


def sample(name: str, values: list[float], first_s: float) -> list[str]:
    """Return samples of a series every 10 minutes, in the format in which Prometheus stores
    them.
    """
    each = (f"{name} {value} {first_s + 600 * i:.3f}" for i, value in enumerate(values))
    return [f"# TYPE {name.partition('{')[0]} gauge", *each]


def each_minute(name: str, value: float, first_s: float, minutes: int) -> list[str]:
    return [f"{name} {value} {first_s + 60 * i:.3f}" for i in range(minutes)]


def asking(ranges: PrometheusRanges | None) -> Asked:
    asked = Asked(now_s=0.0)
    object.__setattr__(asked.context, "ranges", ranges)
    object.__setattr__(asked.context, "wall_s", time.time)
    return asked


def test_a_range_has_at_most_361_times_and_no_step_below_the_scrape_interval() -> None:
    day = Range(1e9, 1e9 + 24 * HOUR_S)
    assert (day.step_s, len(day.times()), day.times()[-1]) == (240.0, 361, day.end_s)
    short = Range(1e9, 1e9 + 1.5 * HOUR_S)
    assert (short.step_s, len(short.times())) == (15.0, 361)
    odd = Range(1e9, 1e9 + 100_000.0)
    assert odd.step_s == 278.0
    assert odd.end_s <= odd.times()[-1] < odd.end_s + odd.step_s


@pytest.mark.slow
@starts_processes
def test_a_device_a_pod_and_the_fleet_are_read_for_six_hours() -> None:
    first_s = time.time() - 6 * HOUR_S
    try:
        with prometheus() as server:
            server.configure([])
            lines = [
                *sample(
                    f"headroom_device_used_bytes{DEVICE}", [float(n) for n in range(36)], first_s
                ),
                *sample(f"headroom_device_sm_activity_ratio{DEVICE}", [0.5] * 36, first_s),
                *sample(f"headroom_pod_used_bytes{POD}", [7.0] * 18, first_s),
                *sample('headroom_fleet_used_bytes{instance="a"}', [40.0] * 36, first_s),
                # In the last four hours, two consoles exported the same metrics. Team b left early.
                "# TYPE headroom_held_gpus gauge",
                *(
                    line
                    for console in "xy"
                    for namespace, state, value, minutes in (
                        ("a", "active", 2.0, 240),
                        ("a", "idle", 0.5, 240),
                        ("b", "unmeasured", 1.0, 60),
                    )
                    for line in each_minute(
                        f'headroom_held_gpus{{instance="{console}",namespace="{namespace}",'
                        f'state="{state}"}}',
                        *(value, first_s + 2 * HOUR_S, minutes),
                    )
                ),
                "# TYPE headroom_held_bytes gauge",
                *each_minute(
                    'headroom_held_bytes{instance="x",namespace="a",state="unused"}',
                    *(24.0 * (1 << 30), first_s + 2 * HOUR_S, 240),
                ),
                "# TYPE headroom_fleet_devices gauge",
                *each_minute('headroom_fleet_devices{instance="x"}', 8, first_s + 2 * HOUR_S, 240),
            ]
            server.remember(lines)
            server.run()
            ranges = PrometheusRanges(f"http://127.0.0.1:{server.port}")
            asked = asking(ranges)
            asked.add_node("n")
            # Test steps that begin at a sample, and steps that begin between samples.
            for begin_s in (first_s // 60 * 60 + 3 * HOUR_S, first_s // 60 * 60 + 3 * HOUR_S + 7.5):
                within = Range(begin_s, begin_s + HOUR_S)
                covered = of_holdings(EVERY_CLUSTER, within)[-1:]
                (seconds,) = ranges.read(covered, within)
                assert sum(filter(None, seconds.values[1:])) == HOUR_S

            def read(path: str) -> dict[str, Any]:
                answer = asked.get(f"/v1/history{path}since=6h")
                assert answer.status_code == 200, answer.text
                body: dict[str, Any] = answer.json()
                assert body["source"] == "prometheus"
                assert body["resolution_s"] == 60.0
                assert len(body["at_s"]) == 361
                return body

            device = read("/nodes/n/devices/GPU-%220?")
            series = {each["kind"]: each for each in device["series"]}
            assert series.keys() == {"used", "sm", "pod"}
            used = [each for each in series["used"]["values"] if each is not None]
            assert (used[0], used[-1]) == (0.0, 35.0)
            assert set(series["sm"]["values"]) - {None} == {0.5}
            assert (series["pod"]["namespace"], series["pod"]["name"]) == ("ml", "a")
            assert series["pod"]["device"] == 'GPU-"0'
            assert series["pod"]["values"][-1] is None  # The pod left after three hours.
            (of_pod,) = read("?pod=ml/a&")["series"]
            assert (of_pod["device"], of_pod["uid"]) == ('GPU-"0', "u")
            fleet = {each["kind"]: each["values"] for each in read("/fleet?")["series"]}
            assert set(fleet["used"]) - {None} == {40.0}

            costs = asked.get("/v1/costs?since=6h").json()
            assert costs["source"] == "prometheus"
            assert costs["covered_s"] == pytest.approx(4 * HOUR_S, abs=120)
            a, b = costs["namespaces"]
            assert (a["namespace"], b["namespace"]) == ("a", "b")
            assert a["used_gpu_hours"] == pytest.approx(8.0, abs=0.1)
            assert a["idle_gpu_hours"] == pytest.approx(2.0, abs=0.05)
            assert a["unused_gib_days"] == pytest.approx(4.0, abs=0.05)
            # In Prometheus, a series exists until five minutes after its last sample.
            assert b["unmeasured_gpu_hours"] == pytest.approx(1 + 5 / 60, abs=0.05)
            assert b["used_gpu_hours"] == b["idle_gpu_hours"] == 0.0
    except Unavailable as err:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no Prometheus can be had here: {err}")


def test_without_a_response_the_reason_is_reported() -> None:
    asked = asking(None)
    answer = asked.get("/v1/history/fleet?since=2h")
    assert answer.status_code == 503
    assert "for a longer range set prometheus_url" in answer.json()["detail"]
    asked = asking(PrometheusRanges(f"http://127.0.0.1:{free_ports(1)[0]}"))
    answer = asked.get("/v1/history/fleet?since=2h")
    assert answer.status_code == 503
    assert "Prometheus cannot be read" in answer.json()["detail"]
    assert asked.get("/v1/history/fleet?since=30m").json()["source"] == "console"


def test_values_that_are_not_measurements_are_skipped() -> None:
    texts = ["1", "NaN", "+Inf", "-Inf", "1e308", "-5", "0"]
    values = [(60.0 * number, text) for number, text in enumerate(texts)]
    times = [at_s for at_s, _ in values]
    assert list(_at_times(times, 60.0, values)) == [1.0, *[None] * 5, 0.0]


def test_readers_beyond_the_limit_do_not_wait_for_prometheus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, reading = threading.Event(), threading.Semaphore(0)

    def hang(self: PrometheusRanges, *asked: object) -> list[Found]:
        reading.release()
        assert answers.wait(PATIENCE_S)
        return []

    monkeypatch.setattr(PrometheusRanges, "_read", hang)
    ranges, within = PrometheusRanges("http://127.0.0.1:9"), Range(0.0, 60.0)
    with ThreadPoolExecutor(MOST_READERS) as threads:
        waiting = [threads.submit(ranges.read, (), within) for _ in range(MOST_READERS)]
        for _ in waiting:
            assert reading.acquire(timeout=PATIENCE_S)
        with pytest.raises(PrometheusUnreadable, match="16 readers wait for it already"):
            ranges.read((), within)
        answers.set()
        assert [each.result() for each in waiting] == [[]] * MOST_READERS
    assert ranges.read((), within) == []


def test_labels_are_quoted_in_queries() -> None:
    used = next(
        each.promql for each in EVERY_CLUSTER.device("n.1", 'a"b\\c') if each.kind == "used"
    )
    assert used == 'max(headroom_device_used_bytes{UUID="a\\"b\\\\c",node=~"n\\\\.1|"})'
