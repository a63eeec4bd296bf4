"""Tests which devices count as overused, and how much sooner overuse is reported."""

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random

import msgspec
import pytest

from agent.kube_publisher import Held
from agent.overuse import overuse
from agent.status_writer import NO_OVERUSE, Overuse, StatusWriter, worth_writing
from headroom.contract.gpunode import (
    GPUNodeSpec,
    GPUNodeStatus,
    OveruseEviction,
    PodUse,
    Reservation,
)
from headroom.contract.heartbeat import Confirmation
from tests.builders import GIB, MIB, mig, reservation, shared, use

INTERVAL_S = 5.0
LEDGER = {"p": reservation({"GPU-0": 8 * GIB}), "q": reservation({"GPU-1": 8 * GIB}, name="r")}


def sample(*pods: PodUse, devices: int = 2) -> GPUNodeStatus:
    found = [shared(f"GPU-{i}", used_bytes=sum_on(pods, f"GPU-{i}")) for i in range(devices)]
    return GPUNodeStatus(devices=found, pods=list(pods), observed_at="t0")


def sum_on(pods: tuple[PodUse, ...], uuid: str) -> int:
    return sum(pod.used_bytes or 0 for pod in pods if pod.device == uuid)


@pytest.mark.parametrize(
    ("pods", "devices"),
    [
        pytest.param([use("p", "GPU-0", 8 * GIB)], set(), id="exactly what it reserved"),
        pytest.param([use("p", "GPU-0", 8 * GIB + 1)], {"GPU-0"}, id="one byte more"),
        pytest.param([use("p", "GPU-0", None)], set(), id="not measured"),
        pytest.param([use("x", "GPU-0", 20 * GIB)], set(), id="without a reservation"),
        pytest.param(
            [use("p", "GPU-0", 5 * GIB, container="a"), use("p", "GPU-0", 4 * GIB, container="b")],
            {"GPU-0"},
            id="both containers together",
        ),
        pytest.param(
            [use("p", "GPU-0", 8 * GIB), use("q", "GPU-1", 9 * GIB)],
            {"GPU-1"},
            id="another pod on another device",
        ),
        pytest.param([use("p", "GPU-1", 9 * GIB)], {"GPU-1"}, id="on a device not predicted"),
        pytest.param(
            [use("", "GPU-0", 9 * GIB, namespace="default", name="q")],
            {"GPU-0"},
            id="only the name of the pod is known",
        ),
    ],
)
def test_a_device_is_overused_if_a_pod_uses_more_there_than_it_reserved(
    pods: list[PodUse], devices: set[str]
) -> None:
    assert overuse(sample(*pods), GPUNodeSpec(reservations=LEDGER)) == Overuse(frozenset(devices))


def test_devices_that_share_memory_are_overused_together() -> None:
    status = GPUNodeStatus(
        devices=[mig("MIG-a", 1), mig("MIG-b", 1)],
        pods=[use("p", "MIG-a", 5 * GIB)],
    )
    ledger = GPUNodeSpec(reservations={"p": reservation({"MIG-a": 4 * GIB})})
    assert overuse(status, ledger).devices == {"MIG-a", "MIG-b"}


def test_a_decision_counts_until_its_eviction_is_rejected() -> None:
    def decided(decision: OveruseEviction) -> Overuse:
        held: dict[str, Reservation] = {"p": msgspec.structs.replace(LEDGER["p"], overuse=decision)}
        return overuse(sample(), GPUNodeSpec(reservations=held))

    assert decided(OveruseEviction("GPU-0", "t1", "t0")) == Overuse(decided=True)
    assert decided(OveruseEviction("GPU-0", "t1", "t0", rejected_at="t2")) == NO_OVERUSE


def test_growth_by_one_byte_is_written_only_on_an_overused_device() -> None:
    before = sample(use("p", "GPU-0", 9 * GIB), use("q", "GPU-1", 2 * GIB))
    grown = sample(use("p", "GPU-0", 9 * GIB + 1), use("q", "GPU-1", 2 * GIB))
    other = sample(use("p", "GPU-0", 9 * GIB), use("q", "GPU-1", 2 * GIB + 64 * MIB - 1))
    assert worth_writing(before, grown, 5.0, {"GPU-0"})
    assert not worth_writing(before, grown, 4.9, {"GPU-0"})
    assert not worth_writing(before, grown, 1e9)
    assert not worth_writing(before, other, 1e9, {"GPU-0"})


@dataclass
class Api:
    """A fake API server that accepts every request."""

    reports: list[GPUNodeStatus] = field(default_factory=list)
    sampled_at: list[str] = field(default_factory=list)

    def held(self) -> Held:
        return Held("uid", "1")

    def report(self, status: GPUNodeStatus) -> Held:
        self.reports.append(status)
        return self.held()

    def heartbeat(self, now: datetime, confirmation: Confirmation) -> str:
        self.sampled_at.append(confirmation.sampled_at)
        return "1"


def hour(rate_bytes_per_s: int, ledger: dict[str, Reservation]) -> Api:
    """Simulate an hour of a pod that uses 7 GiB and leaks. Return the writes of its agent."""
    api, spec = Api(), GPUNodeSpec(reservations=ledger)
    at_s = 0.0
    writer = StatusWriter(
        api,  # type: ignore[arg-type]
        30.0,
        lambda: at_s,
        lambda: datetime.now(UTC),
        Random(1),
        lambda status: overuse(status, spec),
    )
    for step in range(720):
        at_s = step * INTERVAL_S
        used_bytes = 7 * GIB + int(rate_bytes_per_s * at_s)
        status = msgspec.structs.replace(
            sample(use("p", "GPU-0", used_bytes)), observed_at=f"{step}"
        )
        assert writer.deliver(status, at_s) == math.inf
    return api


def test_a_slow_leak_is_reported_every_64_mib_and_in_every_sample_above_its_reservation() -> None:
    small, large = reservation({"GPU-0": 8 * GIB}), reservation({"GPU-0": 24 * GIB})
    # The pod leaks 3 GiB in the hour. During the first 205 samples, in which it leaks 1 GiB, it
    # stays below the small reservation.
    assert len(hour(MIB, {"p": large}).reports) == 1 + 719 * 5 // 65
    assert len(hour(MIB, {"p": small}).reports) == 1 + 204 * 5 // 65 + 515
    # Constant overuse causes no writes.
    assert len(hour(0, {"p": reservation({"GPU-0": GIB})}).reports) == 1


def test_every_sample_is_confirmed_while_the_ledger_has_a_decision() -> None:
    over = reservation({"GPU-0": GIB})
    assert len(hour(0, {"p": over}).sampled_at) == 120
    decided = msgspec.structs.replace(over, overuse=OveruseEviction("GPU-0", "t1", "t0"))
    assert hour(0, {"p": decided}).sampled_at == [f"{step}" for step in range(720)]
