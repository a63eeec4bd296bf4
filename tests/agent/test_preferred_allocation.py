"""Tests what the agent reads before it answers the kubelet, and the error if it cannot answer."""

import json
import math
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent.kube_publisher import NotDelivered
from agent.probes.readings import (
    HoldingReading,
    ObstacleReading,
    PermissionReading,
    SteeredReading,
)
from agent.steering import preferred_allocation
from agent.steering.messages import ContainerRequest
from agent.steering.plugin_proxy import Rejected
from agent.steering.plugin_registration import PluginRegistration
from agent.steering.preferred_allocation import Arrivals, PreferredAllocation
from headroom.contract.annotations import DeviceChoice
from headroom.contract.gpunode import (
    Charge,
    Device,
    GPUNode,
    GPUNodeSpec,
    GPUNodeStatus,
    Plugin,
    PodUse,
    Replicas,
    Reservation,
)
from headroom.contract.kube import ObjectMeta
from tests.waiting import until

NOT_PERMITTED = (
    "not permitted: the agent can only read the kubelet's device plugin directory (chart "
    "value agent.steering.permitted, or component deploy/components/steering)"
)

MAX_ARRIVALS = 4096

RESOURCE = "nvidia.com/gpu"
GIB = 1 << 30
WISH = ContainerRequest(("A::0", "B::0"), (), 1)


def status(**device: Any) -> GPUNodeStatus:
    given = {
        "memory_bytes": 24 * GIB,
        "reserved_bytes": 0,
        "used_bytes": 0,
        "unattributed_bytes": 0,
        "sharing": "time-slicing",
        "resource": RESOURCE,
        "replicas": Replicas(free=1),
    } | device
    devices = [Device(uuid=uuid, **given) for uuid in ("A", "B")]
    return GPUNodeStatus(devices=devices, plugin=Plugin(steered=[RESOURCE]))


@dataclass
class Ledger:
    told: GPUNodeStatus | None = field(default_factory=status)
    choice: str = "B"
    failures: int = 0
    #: UIDs of the pods that have a reservation.
    pods: list[str] = field(default_factory=lambda: ["u"])
    #: The timeout of each read, in seconds.
    within_s: list[float] = field(default_factory=list)

    def gpunode(self, within_s: float = math.inf) -> GPUNode | None:
        self.within_s.append(within_s)
        if self.failures:
            self.failures -= 1
            raise NotDelivered("API server not reached")
        charge = Charge(RESOURCE, 1, {"B": 8 * GIB}, choices=[self.choice] if self.choice else [])
        reserved = {uid: Reservation("default", f"p-{uid}", [charge]) for uid in self.pods}
        spec = GPUNodeSpec(True, reserved)
        return GPUNode(ObjectMeta(name="n"), spec=spec, status=self.told)


def allocation(
    folder: Path, ledger: Ledger, sample: GPUNodeStatus | None, patience_s: float = 60.0
) -> PreferredAllocation:
    return PreferredAllocation(
        folder / "checkpoint",
        folder / "no.sock",
        ledger,
        lambda: sample,
        lambda: 0,
        lambda: DeviceChoice.STEERED,
        lambda: "v1.36.3",
        lambda: None,
        patience_s,
    )


def answer(steering: PreferredAllocation) -> Any:
    return steering._choose(RESOURCE, WISH)


def test_the_ledger_is_read_again_until_it_answers(tmp_path: Path) -> None:
    steering = allocation(tmp_path, Ledger(failures=1), status())
    assert answer(steering) == ("B::0",)
    assert steering.answers == {(RESOURCE, "reserved"): 1}


def test_an_answer_needs_no_sample_since_the_last_answer(tmp_path: Path) -> None:
    """Pods can be admitted faster than samples are taken."""
    sample = status(replicas=Replicas(free=4))
    ledger = Ledger(sample, pods=[])
    steering = allocation(tmp_path, ledger, sample)
    free = [f"{device}::{replica}" for device in "AB" for replica in range(4)]
    entries: list[dict[str, Any]] = []
    # Device B is reserved for each pod, but has memory for only three pods.
    for number, device in enumerate("BBBA"):
        ledger.pods.append(f"u{number}")
        (chosen,) = steering._choose(RESOURCE, ContainerRequest(tuple(free), (), 1)) or ()
        assert chosen.startswith(device)
        free.remove(chosen)
        entries.append(
            {
                "PodUID": f"u{number}",
                "ContainerName": "main",
                "ResourceName": RESOURCE,
                "DeviceIDs": {"-1": [chosen]},
            }
        )
        data = {"PodDeviceEntries": entries, "RegisteredDevices": {RESOURCE: free}}
        (tmp_path / "checkpoint").write_text(json.dumps({"Data": data, "Checksum": 1}))
    assert steering.answers == {(RESOURCE, "reserved"): 3, (RESOURCE, "elsewhere"): 1}


@pytest.mark.parametrize(
    ("failures", "sample", "checkpoint", "why"),
    [
        pytest.param(99, status(), None, "the ledger cannot be read", id="no ledger"),
        pytest.param(0, None, None, "no fresh sample", id="no sample"),
        pytest.param(0, status(), "{}", "checkpoint cannot be read", id="no checkpoint"),
    ],
)
def test_no_pod_is_assigned_a_guessed_device(
    failures: int, sample: Any, checkpoint: str | None, why: str, tmp_path: Path
) -> None:
    if checkpoint is not None:
        (tmp_path / "checkpoint").write_text(checkpoint)
    with pytest.raises(Rejected, match=why):
        answer(allocation(tmp_path, Ledger(failures=failures), sample, patience_s=0.0))


class Clock:
    """Replaces the module ``time``. ``sleep`` only advances the clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_all_reads_together_end_before_the_deadline_of_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the proxy would end the call first, and the pod's status would lack the reason."""
    clock = Clock()
    monkeypatch.setattr(preferred_allocation, "time", clock)
    (tmp_path / "checkpoint").write_text("{}")
    ledger = Ledger(failures=2)
    steering = allocation(tmp_path, ledger, None, patience_s=preferred_allocation.PATIENCE_S)
    monkeypatch.setattr(steering, "_sample", lambda: status() if clock.now_s > 0.1 else None)
    with pytest.raises(Rejected, match="checkpoint cannot be read"):
        answer(steering)
    assert clock.now_s == pytest.approx(0.8)  # The proxy waits for 1 s.
    # The reads from the API server also get only the remaining time.
    assert ledger.within_s == pytest.approx([0.6, 0.4, 0.2])


class Answering:
    """A registration with a pod that waits for an answer."""

    def __init__(self, clock: Clock, until_s: float) -> None:
        self._clock, self._until_s = clock, until_s

    @property
    def is_answering(self) -> bool:
        return self._clock.now_s < self._until_s


@pytest.mark.parametrize(("until_s", "waits_s"), [(0.0, 0.0), (0.3, 0.3), (9.0, 1.0)])
def test_a_sample_waits_for_an_answer_only_until_the_deadline_of_the_answer(
    until_s: float, waits_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(preferred_allocation, "time", clock)
    steering = allocation(tmp_path, Ledger(), status())
    steering._registrations = {RESOURCE: Answering(clock, until_s)}  # type: ignore[dict-item]
    steering.yield_to_answers()
    assert clock.now_s == pytest.approx(waits_s, abs=0.02)


def test_the_plugin_chooses_unshared_devices(tmp_path: Path) -> None:
    assert answer(allocation(tmp_path, Ledger(), status(sharing="none"))) is None


def test_mig_devices_are_chosen_like_whole_gpus(tmp_path: Path) -> None:
    assert answer(allocation(tmp_path, Ledger(), status(kind="mig"))) == ("B::0",)


def test_steering_may_end_when_no_pod_depends_on_a_choice(tmp_path: Path) -> None:
    ledger = Ledger()
    steering = allocation(tmp_path, ledger, status())
    steering.leave()
    assert not steering.may_leave  # The agent still reports that it steers.
    ledger.told = GPUNodeStatus()
    assert not steering.may_leave  # A pod is unconfirmed.
    ledger.told = GPUNodeStatus(pods=[PodUse("u", "B")])
    assert steering.may_leave
    ledger.told, ledger.choice = GPUNodeStatus(), ""
    assert steering.may_leave
    ledger.told = status()
    assert (
        not steering.may_leave
    )  # There is no pod yet, but a bind may be about to reserve a device.
    ledger.told, ledger.failures = GPUNodeStatus(), 1
    assert not steering.may_leave


def test_a_pod_that_had_its_device_no_longer_depends_on_a_choice(
    tmp_path: Path,
) -> None:
    """The reservation of a deleted pod stays until an extender has processed the deletion."""
    ledger = Ledger(told=GPUNodeStatus())
    (tmp_path / "kubelet.sock").touch()
    steering = allocation(tmp_path, ledger, GPUNodeStatus(pods=[PodUse("u", "B", replica="B::0")]))
    steering.leave()
    assert not steering.may_leave
    list(steering.follow([]))
    assert steering.may_leave


class Steering:
    """Steering with the test's mode, sample and reservations. No plugin listens in the folder."""

    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger(choice="")
        self.mode: DeviceChoice | None = DeviceChoice.STEERED
        self.sample: GPUNodeStatus | None = status()
        self.kubelet_version = "v1.36.3"
        self.samples_wanted = 0
        self.folder = folder
        self.allocation = PreferredAllocation(
            folder / "checkpoint",
            folder / "no.sock",
            self.ledger,
            lambda: self.sample,
            lambda: 0,
            lambda: self.mode,
            lambda: self.kubelet_version,
            self.changed,
        )

    def changed(self) -> None:
        self.samples_wanted += 1

    def obstacles(self) -> list[str]:
        return [r.reason for r in self.allocation.follow([]) if isinstance(r, ObstacleReading)]

    def has_resources(self) -> bool:
        self.obstacles()
        return self.allocation.has_resources


@pytest.fixture
def steering(tmp_path: Path) -> Iterator[Steering]:
    made = Steering(tmp_path)
    yield made
    made.allocation.stop(bring_back=False)


def test_steering_begins_when_the_mode_is_known_and_reports_obstacles(
    steering: Steering,
) -> None:
    steering.mode = None
    assert not steering.has_resources()
    steering.mode, steering.sample = DeviceChoice.STEERED, None
    assert not steering.has_resources()
    steering.sample = status()
    assert steering.has_resources()
    wanted = [f"{RESOURCE}: there is no socket nvidia-gpu.sock"]
    until(lambda: steering.obstacles() == wanted, "an obstacle")
    (steering.folder / "nvidia-gpu.sock").touch()
    wanted = [f"{RESOURCE}: there is no socket kubelet.sock"]
    until(lambda: steering.obstacles() == wanted, "the next obstacle")


@dataclass
class Registered(PluginRegistration):
    """A registration that the kubelet uses. It records the replicas that it has passed on."""

    passed: list[str] = field(default_factory=list)
    bypasses: int = 0
    steers = True
    trouble = ""

    def take_passed(self, replicas: tuple[str, ...]) -> bool:
        known = set(replicas) <= set(self.passed)
        self.passed = [each for each in self.passed if each not in replicas]
        return known

    def bypassed(self) -> None:
        self.bypasses += 1


def test_a_pod_that_one_sample_omits_is_not_a_bypass(tmp_path: Path) -> None:
    """While the kubelet does not answer, the checkpoint shows ended pods."""

    def rows(*uids: str) -> list[HoldingReading]:
        return [HoldingReading("checkpoint", uid, "main", RESOURCE, f"A::{uid}") for uid in uids]

    steering = allocation(tmp_path, Ledger(), None)
    registered = Registered(["A::2", "A::3"])
    steering._registrations[RESOURCE] = registered
    for held in (rows("1", "2"), rows("1"), rows("1", "2"), rows("3"), rows("2", "3")):
        assert SteeredReading(RESOURCE) in steering.follow(held)
    assert registered.bypasses == 0
    assert SteeredReading(RESOURCE) not in steering.follow(rows("4"))
    assert registered.bypasses == 1


def test_steering_begins_after_the_plugin_of_a_killed_agent_is_restored(
    steering: Steering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steering must wait, because at its end the restoration removes the sockets of all proxies."""
    begun, restored = threading.Event(), threading.Event()

    def restore(*_: object) -> None:
        begun.set()
        restored.wait()

    monkeypatch.setattr(preferred_allocation, "restore", restore)
    steering.ledger.told = GPUNodeStatus()  # The agent has reported that it steers nothing.
    (steering.folder / "headroom-nvidia-gpu~1.sock").touch()
    sample, steering.sample = steering.sample, None
    until(lambda: not steering.has_resources() and begun.is_set(), "the restoration begins")
    steering.sample = sample
    try:
        assert not steering.has_resources()
    finally:
        restored.set()
    until(steering.has_resources, "steering begins")


@pytest.mark.parametrize("mode", [DeviceChoice.PREDICTED, DeviceChoice.GATED])
def test_steering_ends_when_no_unconfirmed_pod_depends_on_the_choice(
    mode: DeviceChoice, steering: Steering
) -> None:
    assert steering.has_resources()
    steering.ledger.choice = "B"
    steering.mode = mode
    assert steering.has_resources()
    assert steering.samples_wanted == 1
    steering.ledger.told = GPUNodeStatus()  # The agent reports that it steers nothing.
    assert steering.has_resources()  # A pod is unconfirmed.
    steering.ledger.choice = ""
    until(lambda: not steering.has_resources(), "that nothing is steered")


def test_steering_continues_if_the_mode_is_changed_back_in_time(steering: Steering) -> None:
    assert steering.has_resources()
    steering.ledger.choice = "B"
    steering.mode = DeviceChoice.PREDICTED
    assert steering.has_resources()
    steering.mode = DeviceChoice.STEERED
    assert steering.has_resources()
    steering.ledger.told, steering.ledger.choice = GPUNodeStatus(), ""
    assert steering.has_resources()
    assert RESOURCE not in steering.allocation._returning


def test_a_read_only_folder_is_an_obstacle_to_steering(
    steering: Steering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert steering.obstacles() == [NOT_PERMITTED]
    assert not steering.allocation.has_resources
    steering.mode = DeviceChoice.PREDICTED
    assert steering.obstacles() == []


def test_admitted_pods_are_remembered_until_the_kubelet_restarts(tmp_path: Path) -> None:
    kubelet = tmp_path / "kubelet.sock"
    kubelet.touch()
    arrivals = Arrivals(kubelet)
    arrivals.see(["a"])
    assert arrivals.see(["b"]) == {"a", "b"}
    many = [f"u{number}" for number in range(MAX_ARRIVALS)]
    assert arrivals.see(many) == {*many}
    kubelet.rename(tmp_path / "old")
    kubelet.touch()
    assert arrivals.see(["c"]) == {"c"}


@pytest.mark.parametrize("mode", [None, DeviceChoice.PREDICTED, DeviceChoice.STEERED])
def test_the_permission_to_steer_is_reported_in_every_mode(
    mode: DeviceChoice | None, steering: Steering, monkeypatch: pytest.MonkeyPatch
) -> None:
    steering.mode = mode
    for permitted in (True, False):
        # Replace ``os.access``, because root may write to every directory.
        monkeypatch.setattr(os, "access", lambda path, how, answer=permitted: answer)
        readings = list(steering.allocation.follow([]))
        assert PermissionReading(permitted) in readings
        obstacles = [r.reason for r in readings if isinstance(r, ObstacleReading)]
        assert (NOT_PERMITTED in obstacles) is (mode is DeviceChoice.STEERED and not permitted)
