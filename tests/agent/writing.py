"""Builds clocks and statuses for the status writer, and reads the requests that an API server
received.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from agent.status_writer import StatusWriter
from headroom.contract.gpunode import Device, GPUNodeStatus, SmActivity
from headroom.contract.heartbeat import Confirmation, confirmation_of
from headroom.contract.kube import Lease
from tests.agent.scripted import ApiServer

GROWN_BYTES = 64 << 20
VOUCH = Confirmation(sampled_at="later", gpunode="uid-1", observed_at="then", after="7")
NOW = datetime(2026, 11, 21, 1, 2, 3, tzinfo=UTC)


@dataclass
class Clock:
    at_s: float = 1000.0

    def monotonic(self) -> float:
        return self.at_s

    def now(self) -> datetime:
        return NOW


def status(
    used_bytes: int = 0, observed_at: str = "2026-11-21T01:02:03Z", **changes: Any
) -> GPUNodeStatus:
    device = Device(uuid="GPU-a", memory_bytes=1 << 36, reserved_bytes=0, used_bytes=used_bytes)
    return GPUNodeStatus(devices=[device], observed_at=observed_at, **changes)


def vouch(sampled_at: str, gpunode: str, observed_at: str, after: str) -> Confirmation:
    return Confirmation(
        sampled_at=sampled_at, gpunode=gpunode, observed_at=observed_at, after=after
    )


def busy(sm_ratio: float, observed_at: str) -> GPUNodeStatus:
    device = Device(
        uuid="GPU-a", used_bytes=5, sm_activity=SmActivity(ratio=sm_ratio, source="gpm")
    )
    return GPUNodeStatus(devices=[device], observed_at=observed_at)


def deliver(status_writer: StatusWriter, clock: Clock, status: GPUNodeStatus) -> float:
    """Deliver a sample that was taken at the clock's current time."""
    return status_writer.deliver(status, clock.at_s)


def vouched(api: ApiServer) -> Confirmation:
    assert api.lease is not None
    vouch = confirmation_of(msgspec.convert(api.lease, Lease))
    assert vouch is not None
    return vouch


def used(api: ApiServer) -> int:
    assert api.gpunode is not None
    figure: int = api.gpunode["status"]["devices"][0]["used"]
    return figure
