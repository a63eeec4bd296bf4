"""Tests that past runs are read from Prometheus once and despite failures, and reads them from a
real Prometheus.
"""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs

from headroom.core.recommend.lives import DAY_S, Ending
from headroom.errors import PrometheusUnreadable
from headroom.recorder.past_lives import PastLives
from headroom.recorder.prometheus_history import HistoryReader, Source
from headroom.runtime.metric_history import Asked, Sample
from headroom.runtime.promql import EVERY_CLUSTER as QUERIES
from tests.debian import Unavailable
from tests.history.server import prometheus
from tests.recorder.facts import GIB, HOUR_S, NOW_S
from tests.recorder.test_past_lives import OWNED, answers, both, peaks, running
from tests.waiting import PATIENCE_S

SOURCE = Source("http://user:secret@127.0.0.1:1", 1.0)


@dataclass
class Server:
    """Answers queries about the last day from a table. If ``error`` is set, queries raise it."""

    table: dict[str, list[Sample]] = field(default_factory=lambda: answers(**both(peaks(), OWNED)))
    error: Exception | None = None
    count: int = 0
    asked: threading.Event = field(default_factory=threading.Event)
    wait: threading.Event | None = None

    def query(self, source: Source, asked: Asked) -> list[Sample]:
        self.count += 1
        self.asked.set()
        if self.wait is not None:
            self.wait.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        names = {text: name for name, text in (QUERIES.totals(14) | QUERIES.ended_lives).items()}
        names |= {each.promql: name for name, each in QUERIES.peaks.items()}
        return self.table[names[asked.promql]] if asked.at_s == NOW_S else []


class Read:
    def __init__(self, server: Server, source: Source = SOURCE) -> None:
        self.past, self.leads, self.clock_s = PastLives(), True, 0.0
        self.reader = HistoryReader(
            source,
            self.past,
            lambda: self.leads,
            lambda: NOW_S,
            lambda: self.clock_s,
            server.query,
        )

    def check(self) -> list[Any]:
        with capture_logs() as logs:
            asyncio.run(self.reader.check())
        return logs


def test_the_history_is_read_once_while_this_recorder_leads() -> None:
    server = Server()
    read = Read(server)
    (log,) = read.check()
    assert (log["event"], log["lives"], log["days"]) == ("past_lives_read", 1, 14)
    assert server.count == 14 * 16 + 3  # days, queries
    read.clock_s = 10_000
    assert read.check() == []
    assert len(read.past) == 1
    read.leads = False
    read.check()
    assert (server.count, len(read.past)) == (14 * 16 + 3, 0)
    read.leads = True
    read.check()
    assert len(read.past) == 1


def test_a_failure_is_reported_without_secrets_and_retried_later() -> None:
    server = Server(error=ConnectionRefusedError(111, "Connection refused"))
    read = Read(server)
    (log,) = read.check()
    assert log["event"] == "past_lives_unavailable"
    assert log["message"] == (
        "the lives of the last 14 days cannot be read from Prometheus: cannot be asked:"
        " ConnectionRefusedError: Connection refused"
    )
    assert log["hint"] == "new lives are recorded; the next attempt is in 10 min"
    assert read.check() == []
    read.clock_s = 601
    server.error = PrometheusUnreadable("it answers 503")
    assert "it answers 503" in read.check()[0]["message"]
    server.error, read.clock_s = None, 1202
    assert read.check()[0]["event"] == "past_lives_read"


def test_a_hanging_query_is_abandoned_and_no_other_query_starts_meanwhile() -> None:
    server = Server(wait=threading.Event())
    read = Read(server, Source("http://127.0.0.1:1", -1.9))
    assert "no complete answer within 0.1 s" in read.check()[0]["message"]
    read.clock_s = 601
    assert "an earlier query still hangs" in read.check()[0]["message"]
    assert server.count == 1
    assert server.wait is not None
    server.wait.set()
    hanging = read.reader.hanging
    assert hanging is not None
    hanging.join(PATIENCE_S)
    read.clock_s = 1202
    read.reader.source = SOURCE
    assert read.check()[0]["event"] == "past_lives_read"


def test_reading_is_cancelled_with_its_loop() -> None:
    server = Server(wait=threading.Event())
    read = Read(server)

    async def cancelled() -> None:
        task = asyncio.create_task(read.reader.check())
        await asyncio.to_thread(server.asked.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert server.wait is not None
    server.wait.set()
    assert server.count == 1


def test_too_many_samples_are_not_used() -> None:
    read = Read(Server())
    read.reader.most_samples = 3
    assert "it has more than 3 samples" in read.check()[0]["message"]
    assert len(read.past) == 0


EVERY_S = 60


def series(name: str, labels: dict[str, str], values: list[float], end_s: float) -> Iterator[str]:
    """Return samples with intervals of a minute. The last sample is at ``end_s``."""
    text = ",".join(f'{key}="{value}"' for key, value in labels.items())
    for number, value in enumerate(values):
        at_s = end_s - EVERY_S * (len(values) - 1 - number)
        yield f"{name}{{{text}}} {value} {at_s:.3f}"


def exported(now_s: float) -> list[str]:
    """Return the series of a pod from the agent that ended three days ago, of a pod from
    dcgm-exporter that was killed yesterday, and of a running pod.
    """
    metrics: dict[str, list[str]] = {}

    def add(name: str, labels: dict[str, str], values: list[float], end_s: float) -> None:
        metrics.setdefault(name, []).extend(series(name, labels, values, end_s))

    for pod, end_s, own in (
        ("llm-5d4f-first", now_s - 3 * DAY_S, True),
        ("llm-5d4f-second", now_s - DAY_S, False),
        ("llm-5d4f-third", now_s, True),
    ):
        identity = {"namespace": "team", "pod": pod}
        gpu = {"UUID": f"GPU-{pod}", "modelName": "NVIDIA L4", "Hostname": "n"}
        exporter = {"namespace": "gpu", "pod": "exporter", "container": "exporter"}
        of = {f"exported_{key}": text for key, text in {**identity, "container": "main"}.items()}
        mib = [1000.0] * 20 + [6000.0] + [1000.0] * 39
        if own:
            peak = [float(GIB)] * 30 + [8.0 * GIB] * 30
            add("headroom_pod_peak_bytes", {**gpu, **exporter, **of, "pod_uid": pod}, peak, end_s)
        # Half an hour before the end, the exporter is upgraded to 4.9.0.
        labels, upgraded_s = {**gpu, **exporter, **of}, end_s - 30 * EVERY_S
        add("DCGM_FI_DEV_FB_USED", labels, mib[:30], upgraded_s)
        used_bytes = [each * (1 << 20) for each in mib[30:]]
        add("DCGM_FI_DEV_FB_USED_BYTES", labels, used_bytes, end_s)
        requests = {**identity, "container": "main", "resource": "nvidia_com_gpu"}
        add("kube_pod_container_resource_requests", requests, [1.0] * 60, end_s)
        owner = {**identity, "owner_kind": "ReplicaSet", "owner_name": "llm-5d4f"}
        add("kube_pod_owner", owner, [1.0] * 60, end_s)
        image = {**identity, "container": "main", "image_spec": "vllm:1"}
        add("kube_pod_container_info", image, [1.0] * 60, end_s)
        if pod.endswith("second"):
            killed = {**identity, "container": "main", "reason": "OOMKilled"}
            name = "kube_pod_container_status_last_terminated_reason"
            add(name, killed, [1.0] * 10, end_s)
    return [line for lines in metrics.values() for line in lines]


@pytest.mark.slow
def test_past_runs_are_read_from_a_real_prometheus() -> None:
    now_s = time.time()
    try:
        with prometheus() as real:
            real.configure([])
            real.remember(exported(now_s), longest_block="54h")
            real.run()
            past = PastLives()
            source = Source(f"http://127.0.0.1:{real.port}", 10.0)
            reader = HistoryReader(source, past, lambda: True, lambda: now_s, time.monotonic)
            asyncio.run(reader.check())
            assert reader.due_s is None
    except Unavailable as err:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"needs a real Prometheus: {err}")
    first, second = past.claim([running()], lambda _: True)
    assert first.tracked.life.ending is Ending.COMPLETED
    assert first.tracked.life.peak_bytes == 8 * GIB
    assert second.tracked.life.ending is Ending.OOM_KILLED
    assert second.tracked.life.peak_bytes == 6000 << 20
    for each, days in ((first, 3), (second, 1)):
        life = each.tracked.life
        assert each.tracked.model == "NVIDIA L4"
        # The times are approximate, because the queries have steps of five minutes.
        assert life.until_s == pytest.approx(now_s - days * DAY_S, abs=300)
        assert life.until_s - life.started_s == pytest.approx(HOUR_S, abs=301)
