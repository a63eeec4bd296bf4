"""Tests /v1/history, which returns the last hour of devices, pods and the fleet, and tests its
handover.
"""

from typing import Any

import msgspec
import pytest

from headroom.console.history.recorder import HistoryRecorder
from headroom.console.responses import stamp
from headroom.contract.gpunode import SmActivity
from headroom.contract.watched import GPUNodeGone, GPUNodeSeen, NodeGone, NodeSeen, PodSeen
from headroom.runtime.server.auth import GetPod
from tests.builders import GIB, gpunode, kube_node, pod, reservation, shared, use
from tests.console.asking import STALE_AFTER_S, WALL_S, Asked
from tests.server.test_auth import GuardedApi

#: Seconds between two rounds of the recorder.
ROUND_S = 10.0


class Recorded(Asked):
    """A cluster with recorded history. Its node has two 24 GiB GPUs, and a pod has reserved
    8 GiB.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recorder = HistoryRecorder(self.cluster, self.context.history, self.context.wall_s)
        self.version = 0
        self.writer.apply([NodeSeen(kube_node("n"))])
        self.writer.apply([PodSeen(pod("8Gi", uid="uid-a", name="a", namespace="ml", node="n"))])

    def report(self, used_gib: float, pod_gib: float | None, sm: float = 0.25) -> None:
        """Report the first GPU and record a round, one round after the last report."""
        self.version += 1
        self.now_s += ROUND_S
        used_bytes = int(used_gib * GIB)
        held = reservation({"GPU-0": 8 * GIB}, name="a")
        rows = (
            []
            if pod_gib is None
            else [use("uid-a", "GPU-0", int(pod_gib * GIB), namespace="ml", name="a")]
        )
        devices = (
            shared("GPU-0", used_bytes=used_bytes, sm_activity=SmActivity(sm, "dcgm")),
            shared("GPU-1", 1),
        )
        node = gpunode(
            *devices,
            name="n",
            version=str(self.version),
            observed_at=stamp(WALL_S + self.now_s),
            pods=rows,
            reservations={"uid-a": msgspec.structs.replace(held, namespace="ml")},
        )
        self.writer.apply([GPUNodeSeen(node, self.now_s)])
        self.record()

    def record(self) -> None:
        for _ in self.recorder.record(self.now_s):
            pass

    def history(self, path: str) -> dict[str, Any]:
        answer = self.get(f"/v1/history{path}")
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body


def series(body: dict[str, Any], kind: str) -> list[float | None]:
    (found,) = (each["values"] for each in body["series"] if each["kind"] == kind)
    values: list[float | None] = found
    return values


def test_a_device_has_a_value_for_each_report_that_changed_it() -> None:
    asked = Recorded()
    asked.report(1.0, None)
    asked.report(6.0, 5.0)
    asked.report(6.0, 5.0)
    asked.report(9.5, 7.5, sm=0.5)
    body = asked.history("/nodes/n/devices/GPU-0")
    assert (body["source"], body["resolution_s"], body["resolution_bytes"]) == (
        "console",
        10.0,
        8 << 20,
    )
    assert body["at_s"] == [WALL_S + at for at in (10, 20, 40, 40)]
    assert series(body, "used") == [1.0 * GIB, 6.0 * GIB, 9.5 * GIB, 9.5 * GIB]
    assert series(body, "reserved") == [8.0 * GIB] * 4
    assert series(body, "sm") == [0.25, 0.25, 0.5, 0.5]
    assert series(body, "pod") == [None, 5.0 * GIB, 7.5 * GIB, 7.5 * GIB]
    (of_pod,) = (each for each in body["series"] if each["kind"] == "pod")
    assert (of_pod["namespace"], of_pod["name"], of_pod["requested_bytes"]) == ("ml", "a", 8 * GIB)


def test_a_stale_report_leaves_a_gap() -> None:
    asked = Recorded()
    asked.report(6.0, 5.0)
    asked.now_s += STALE_AFTER_S + 1
    asked.record()
    body = asked.history("/nodes/n/devices/GPU-0")
    assert series(body, "used") == [6.0 * GIB, None, None]
    assert series(body, "pod") == [5.0 * GIB, None, None]


def test_a_deleted_pod_keeps_its_history() -> None:
    asked = Recorded()
    asked.report(6.0, 5.0)
    asked.report(1.0, None)
    body = asked.history("?pod=ml/a")
    assert series(body, "pod") == [5.0 * GIB, None, None]


def test_the_history_of_the_fleet_has_sums_and_the_number_of_pending_pods() -> None:
    asked = Recorded()
    asked.report(6.0, 5.0)
    asked.writer.apply([PodSeen(pod("8Gi", uid="uid-b", name="b"))])
    asked.report(9.0, 8.0)
    body = asked.history("/fleet")
    assert body["at_s"] == [WALL_S + 10, WALL_S + 20]
    assert series(body, "used") == [6.0 * GIB, 9.0 * GIB]
    assert series(body, "allocatable") == [48.0 * GIB] * 2
    assert series(body, "reserved") == [8.0 * GIB] * 2
    assert series(body, "pending_pods") == [0.0, 1.0]


def test_a_known_device_or_pod_without_a_value_has_no_series() -> None:
    asked = Recorded()
    asked.add_node("m")
    for path in ("/nodes/m/devices/GPU-m-0", "?pod=ml/a"):
        body = asked.history(path)
        assert (body["at_s"], body["series"]) == ([], [])


def test_unknown_devices_and_pods_are_404() -> None:
    asked = Recorded()
    asked.report(6.0, 5.0)
    for path, message in (
        ("/nodes/m/devices/GPU-0", "node m is not known"),
        ("/nodes/n/devices/GPU-9", "no history of device GPU-9 of node n"),
        ("?pod=ml/other", "no history of pod ml/other"),
    ):
        answer = asked.get(f"/v1/history{path}")
        assert answer.status_code == 404
        assert message in answer.json()["detail"]


def test_a_deleted_node_keeps_its_history_for_an_hour() -> None:
    asked = Recorded()
    asked.report(6.0, 5.0)
    asked.writer.apply([GPUNodeGone("n"), NodeGone("n")])
    asked.now_s += ROUND_S
    asked.record()
    body = asked.history("/nodes/n/devices/GPU-0")
    assert series(body, "used") == [6.0 * GIB, None, None]


def test_a_device_that_grows_steadily_is_predicted_to_be_full_soon() -> None:
    """For 10 minutes, use grows by 64 MiB every 10 s (6.4 MiB/s). At the end, 24 - 6 GiB
    are free.
    """
    asked = Recorded()
    for number in range(61):
        asked.report(2.25 + number / 16, 2.0 + number / 16)
    (found,) = asked.recorder.growing["n"]
    assert (found.device, found.namespace, found.name) == ("GPU-0", "ml", "a")
    # In the last recorded round, the 60th, 5.9375 GiB are in use.
    assert found.bytes_per_s == pytest.approx(6.4 * (1 << 20), rel=0.02)
    assert found.full_in_s == pytest.approx((24 - 5.9375) * 160, rel=0.02)


def test_a_loaded_model_does_not_count_as_growth() -> None:
    asked = Recorded()
    for number in range(60):
        asked.report(2.0 if number < 30 else 20.0, 1.0)
    assert asked.recorder.growing == {}


def test_a_caller_that_may_get_a_pod_may_read_only_the_history_of_that_pod() -> None:
    world = GuardedApi()
    world.reviews.rights["owner"] = {GetPod("ml", "a")}
    answer = world.get("/v1/history?pod=ml/a", "owner")
    assert (answer.status_code, "no history of pod ml/a" in answer.text) == (404, True)
    for path in ("?pod=ml/b", "/fleet", "/nodes/n/devices/GPU-n-0"):
        assert world.get(f"/v1/history{path}", "owner").status_code == 403
