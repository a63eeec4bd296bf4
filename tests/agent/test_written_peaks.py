"""Checks that peaks are written together with changed memory use, or once a minute."""

import math
from typing import Any

import pytest

from agent.status_writer import StatusWriter
from headroom.contract.gpunode import GPUNodeStatus, PodUse
from tests.agent.scripted import ApiServer
from tests.agent.writing import GROWN_BYTES, Clock, deliver, status, vouched


def peaked(used: int, peak: int, observed_at: str = "t0", **life: Any) -> GPUNodeStatus:
    life = {"peak_source": "nvml", "started_at": "s1", **life}
    row = PodUse(uid="u", device="GPU-a", used_bytes=used, peak_bytes=peak, **life)
    return status(5, observed_at, pods=[row])


def written_peak(api: ApiServer) -> int:
    assert api.gpunode is not None
    (row,) = api.gpunode["status"]["pods"]
    return int(row["peak"])


def test_peaks_are_written_with_the_report_of_memory(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    deliver(status_writer, clock, peaked(9 * GROWN_BYTES, 9 * GROWN_BYTES))
    clock.at_s += 1
    deliver(status_writer, clock, peaked(GROWN_BYTES, 20 * GROWN_BYTES, "t1"))  # freed
    assert written_peak(api) == 20 * GROWN_BYTES


@pytest.mark.parametrize(
    ("change", "is_written"),
    [
        pytest.param({"peak": 5 + GROWN_BYTES}, True, id="a peak 64 MiB higher"),
        pytest.param({"peak": 5 + GROWN_BYTES - 1}, False, id="a slightly higher peak"),
        pytest.param({"started_at": "s2"}, True, id="another run"),
        pytest.param({"peak": 4, "started_at": "s2"}, True, id="another run with a lower peak"),
        pytest.param({"peak_source": "driver"}, True, id="another source"),
        pytest.param({"peak_partial": True}, True, id="a gap"),
        pytest.param({"startup_peak_bytes": 5}, False, id="another settled_at"),
        pytest.param({}, False, id="no change"),
    ],
)
def test_a_change_of_only_peaks_is_written_once_a_minute(
    api: ApiServer,
    status_writer: StatusWriter,
    clock: Clock,
    change: dict[str, Any],
    is_written: bool,
) -> None:
    api.create("uid-1")
    deliver(status_writer, clock, peaked(5, 5))
    newest = peaked(**{"used": 5, "peak": 5, "observed_at": "t1", **change})
    for _ in range(11):  # until 55 s after the first report
        clock.at_s += 5
        assert deliver(status_writer, clock, newest) == math.inf
        assert written(api) == "t0"
    clock.at_s += 5
    deliver(status_writer, clock, newest)
    assert written(api) == ("t1" if is_written else "t0")


def test_the_end_of_a_start_is_written_at_once(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    deliver(status_writer, clock, peaked(5, 5))
    clock.at_s += 1
    deliver(status_writer, clock, peaked(5, 5, "t1", settled_at="s2"))
    assert written(api) == "t1"
    clock.at_s += 5
    assert deliver(status_writer, clock, peaked(5, 5, "t2", settled_at="s2")) == math.inf
    assert written(api) == "t1"


def test_a_heartbeat_does_not_wait_for_peaks(
    api: ApiServer, status_writer: StatusWriter, clock: Clock
) -> None:
    api.create("uid-1")
    deliver(status_writer, clock, peaked(5, 5))
    clock.at_s += 30
    assert deliver(status_writer, clock, peaked(5, 50 * GROWN_BYTES, "t1")) == math.inf
    assert vouched(api).sampled_at == "t1"


def written(api: ApiServer) -> str:
    assert api.gpunode is not None
    return str(api.gpunode["status"]["observedAt"])
