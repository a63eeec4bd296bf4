"""Tests the agent's writes to a real API server: the number of writes in an hour, conflicts, and
outages.
"""

import logging
import math
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
import urllib3
from structlog.testing import capture_logs

from agent.kube_publisher import Held, KubernetesPublisher
from agent.status_writer import StatusWriter
from headroom.contract.gpunode import (
    GPUNodeSpec,
    GPUNodeStatus,
    PodUse,
    Reservation,
)
from headroom.contract.gpunode_json import decode_gpunode
from headroom.contract.heartbeat import Confirmation, confirmation_of
from headroom.contract.kube import Lease
from headroom.errors import StoreConflict
from headroom.runtime.kube.client import KubeApi
from tests.agent.installed_agent import GPUNODES, LEASES, lease, publishing, reported, status
from tests.blocking import Blocking, Loop
from tests.controlplane import ADMIN_TOKEN, ControlPlane
from tests.waiting import PATIENCE_S, until

#: Logs the measured figures. ``--log-cli-level=info`` shows them.
log = logging.getLogger(__name__)

HOUR_S = 3600.0


@dataclass
class Clock:
    """The clock of an agent. The test sets its status."""

    at_s: float = 1000.0
    wall: datetime = field(default_factory=lambda: datetime(2026, 11, 21, tzinfo=UTC))

    def monotonic(self) -> float:
        return self.at_s

    def now(self) -> datetime:
        return self.wall

    def passes(self, seconds: float) -> None:
        self.at_s += seconds
        self.wall += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def status_writer(installed: ControlPlane, clock: Clock) -> Iterator[StatusWriter]:
    with publishing(installed, "agent-a", "agent-a") as publisher:
        yield StatusWriter(publisher, 30.0, clock.monotonic, clock.now, random.Random(1))


def sample(clock: Clock, used_bytes: int = 5, sm_ratio: float = 0.0) -> GPUNodeStatus:
    return status(used_bytes, clock.now().strftime("%Y-%m-%dT%H:%M:%S.%fZ"), sm_ratio)


def writes(plane: ControlPlane) -> dict[str, int]:
    """Return how many patches and creations of reports and heartbeats the API server has
    counted.
    """
    with urllib3.PoolManager(ca_certs=str(plane.ca_file), retries=False) as http:
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        text = http.request("GET", f"{plane.url}/metrics", headers=headers).data.decode()
    counted = {"status": 0, "lease": 0, "read": 0}
    for line in text.splitlines():
        if not line.startswith("apiserver_request_total{") or 'code="2' not in line:
            continue
        count = int(float(line.rpartition(" ")[2]))
        if 'resource="gpunodes"' in line and 'subresource="status"' in line:
            counted["status"] += count if 'verb="PATCH"' in line else 0
        elif 'resource="gpunodes"' in line and 'verb="GET"' in line:
            counted["read"] += count
        elif 'resource="leases"' in line and ('verb="PATCH"' in line or 'verb="POST"' in line):
            counted["lease"] += count
    return counted


class TestAnHour:
    """Tests that simulate an hour of the agent's clock as fast as possible. The API server counts
    the writes.
    """

    def test_a_steady_node_writes_rarely(
        self, installed: ControlPlane, status_writer: StatusWriter, clock: Clock
    ) -> None:
        before, figures = writes(installed), random.Random(2)
        for _ in range(int(HOUR_S / 5)):
            # Even on an idle node, the measured memory and SM activity vary slightly.
            used_bytes = (10 << 30) + figures.randrange(1 << 20)
            status_writer.deliver(sample(clock, used_bytes, figures.uniform(0.4, 0.48)), clock.at_s)
            clock.passes(5.0)
        made = {kind: count - before[kind] for kind, count in writes(installed).items()}
        log.info("steady node, an hour: %s", made)
        assert made["lease"] <= 2 * 60
        assert made["status"] <= 60
        held = confirmation_of(lease(installed, "agent-a"))
        assert held is not None
        assert held.observed_at == reported(installed, "agent-a").observed_at

    @pytest.mark.parametrize(
        ("interval_s", "most"),
        [
            pytest.param(5.0, 720, id="sampled every 5 s"),
            pytest.param(0.25, 3600, id="triggered all the time"),
        ],
    )
    def test_a_node_where_all_values_change_stays_within_the_budget(
        self, clock: Clock, interval_s: float, most: int
    ) -> None:
        counting = Counting()
        status_writer = StatusWriter(counting, 30.0, clock.monotonic, clock.now, random.Random(1))
        figures = random.Random(3)
        with capture_logs():
            for i in range(int(HOUR_S / interval_s)):
                moved = sample(clock, figures.randrange(1 << 36), figures.random())
                pods = [PodUse(uid=f"uid-{i}", device="GPU-a")]
                status_writer.deliver(msgspec.structs.replace(moved, pods=pods), clock.at_s)
                clock.passes(interval_s)
        log.info("everything moves, every %s s, an hour: %s", interval_s, counting)
        assert most - 60 <= counting.reports <= most
        assert 115 <= counting.heartbeats <= 120

    def test_a_node_where_memory_and_sm_activity_change_stays_within_the_budget(
        self, installed: ControlPlane, status_writer: StatusWriter, clock: Clock
    ) -> None:
        """Simulate only ten minutes, because every sample causes a write."""
        before, figures = writes(installed), random.Random(3)
        for _ in range(120):
            moved = sample(clock, figures.randrange(1 << 36), figures.random())
            status_writer.deliver(moved, clock.at_s)
            clock.passes(5.0)
        made = {kind: count - before[kind] for kind, count in writes(installed).items()}
        log.info("memory and SM move, ten minutes: %s", made)
        assert 100 <= made["status"] <= 120
        assert 18 <= made["lease"] <= 20


@dataclass
class Counting:
    """A fake API server that accepts and counts every request."""

    reports: int = 0
    heartbeats: int = 0

    def report(self, status: GPUNodeStatus) -> Held:
        self.reports += 1
        return Held()

    def held(self) -> Held:
        return Held()

    def reported(self) -> tuple[Held, str]:
        raise AssertionError("no other client writes")

    def heartbeat(self, now: datetime, vouch: Confirmation) -> str:
        self.heartbeats += 1
        return str(self.heartbeats)


class TestBadDays:
    def test_a_status_write_never_conflicts_with_reservations(
        self, installed: ControlPlane, status_writer: StatusWriter, clock: Clock
    ) -> None:
        """Reservations are written with compare-and-swap, which would fail after a concurrent
        status write.
        """
        lost, stop = 0, threading.Event()
        written: set[str] = set()

        def keep_writing_reservations(store: Blocking) -> None:
            nonlocal lost
            for i in range(10_000):
                if stop.is_set():
                    return
                held = store.read_gpunode("agent-a")
                assert held is not None
                reservations = {f"uid-{i}": Reservation(namespace="default", name=f"p{i}")}
                try:
                    store.write_spec(held, GPUNodeSpec(reservations=reservations))
                except StoreConflict:
                    lost += 1
                else:
                    written.clear()
                    written.add(f"uid-{i}")

        configuration = installed.configuration()
        with Loop() as loop:
            store = loop.store(configuration, KubeApi(configuration))
            extender = threading.Thread(target=keep_writing_reservations, args=(store,))
            extender.start()
            try:
                for used_bytes in range(100, 0, -1):
                    assert status_writer.deliver(sample(clock, used_bytes), clock.at_s) == math.inf
                    assert reported(installed, "agent-a").devices[0].used_bytes == used_bytes
                    clock.passes(1.0)
            finally:
                stop.set()
                extender.join()
        held = decode_gpunode(msgspec.json.encode(installed.call("GET", f"{GPUNODES}/agent-a")))
        assert set(held.spec.reservations) == written != set()
        log.info("100 statuses written; %d writes of reservations had to be repeated", lost)

    def test_later_reservations_cause_no_new_report(
        self, installed: ControlPlane, status_writer: StatusWriter, clock: Clock
    ) -> None:
        status_writer.deliver(sample(clock), clock.at_s)
        before = writes(installed)
        for figure in range(3):
            spec = {"spec": {"reserved": f"{figure}Gi"}}
            installed.call("PATCH", f"{GPUNODES}/agent-a", spec, "application/merge-patch+json")
            clock.passes(30.0)
            status_writer.deliver(sample(clock), clock.at_s)
        made = {kind: count - before[kind] for kind, count in writes(installed).items()}
        assert (made["status"], made["lease"]) == (0, 3)

    def test_a_status_of_another_writer_is_corrected(
        self, installed: ControlPlane, status_writer: StatusWriter, clock: Clock
    ) -> None:
        """The other writer can be an old write of this agent that arrives after its timeout."""
        status_writer.deliver(sample(clock, 7), clock.at_s)
        with publishing(installed, "agent-a", "agent-a") as late:
            late.report(status(used_bytes=3, observed_at="2026-11-20T00:00:00Z"))
        clock.passes(30.0)
        status_writer.deliver(sample(clock, 7), clock.at_s)
        assert reported(installed, "agent-a").devices[0].used_bytes == 7
        held = confirmation_of(lease(installed, "agent-a"))
        assert held is not None
        assert held.observed_at == reported(installed, "agent-a").observed_at

    @pytest.mark.parametrize("year", [1970, 2038, 2200])
    def test_a_wrong_clock_is_reported_and_blocks_nothing(
        self, installed: ControlPlane, status_writer: StatusWriter, clock: Clock, year: int
    ) -> None:
        """The extender computes the age of the report with its own clock
        (tests/state/test_clock_skew.py).
        """
        # The clock is stepped forward and back.
        for days_back, used_bytes in ((0, 8), (2, 7), (0, 6)):
            clock.wall = datetime(year, 6, 3, tzinfo=UTC) - timedelta(days=days_back)
            newest = sample(clock, used_bytes)
            assert status_writer.deliver(newest, clock.at_s) == math.inf
            assert reported(installed, "agent-a") == newest
            held = installed.call("GET", f"{LEASES}/agent-a")
            assert held["spec"]["renewTime"].startswith(clock.wall.strftime("%Y-%m-%dT"))
            vouched = confirmation_of(msgspec.convert(held, Lease))
            assert vouched is not None
            assert vouched.sampled_at == vouched.observed_at == newest.observed_at
            clock.passes(30.0)

    @pytest.mark.parametrize("how", ["freezes", "is killed"])
    def test_after_minutes_without_the_api_server_only_the_newest_report_is_sent(
        self, installed: ControlPlane, clock: Clock, how: str
    ) -> None:
        with publishing(installed, "agent-a", "agent-a", timeout_s=0.5) as hasty:
            status_writer = StatusWriter(hasty, 30.0, clock.monotonic, clock.now, random.Random(1))
            self.goes_away(installed, hasty, status_writer, clock, how)

    def goes_away(
        self,
        installed: ControlPlane,
        hasty: KubernetesPublisher,
        status_writer: StatusWriter,
        clock: Clock,
        how: str,
    ) -> None:
        def delivered(newest: GPUNodeStatus) -> bool:
            clock.passes(30.0)
            return status_writer.deliver(newest, clock.at_s) == math.inf

        until(lambda: delivered(sample(clock, 1)), "the first report is delivered")
        before = writes(installed)
        wanted_s: list[float] = []
        with capture_logs() as logs:
            if how == "freezes":
                installed.pause("kube-apiserver")
            else:
                installed.kill("kube-apiserver")
            try:
                for used_bytes in range(2, 42):  # These samples cover 200 seconds.
                    clock.passes(5.0)
                    # Pods start and end continuously.
                    wanted_s.append(
                        status_writer.deliver(sample(clock, used_bytes << 30), clock.at_s)
                    )
            finally:
                if how == "freezes":
                    installed.resume("kube-apiserver")
                else:
                    installed.start_apiserver()
        # Do not repeat a write that takes long on a busy machine from now on.
        hasty._timeout_s = PATIENCE_S
        tries = [each for each in logs if each["event"] == "report_not_delivered"]
        assert 6 <= len(tries) <= 12
        assert max(wanted_s) <= 30.0
        if how == "is killed":
            before = dict.fromkeys(before, 0)  # A restarted server counts from zero.
        newest = sample(clock, 99 << 30)

        # A frozen server may apply old writes after the newest write. Before its next heartbeat,
        # the agent notices and corrects this.
        def settled() -> bool:
            return delivered(newest) and reported(installed, "agent-a") == newest

        until(settled, "the API server has the newest report")
        made = {kind: count - before[kind] for kind, count in writes(installed).items()}
        late = 0 if how == "is killed" else len(tries)
        assert (
            made["status"] <= 1 + late * 2
        )  # The agent corrects each late write with another write.
