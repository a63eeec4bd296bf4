"""What the agent reads before it answers the kubelet, and what it says when it cannot."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent.publish import NotDelivered
from agent.steering.helm import Helm
from agent.steering.messages import Wish
from agent.steering.relay import Refused
from contract.gpunode import (
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
from contract.kube import ObjectMeta

RESOURCE = "nvidia.com/gpu"
GIB = 1 << 30
WISH = Wish(("A::0", "B::0"), (), 1)


def status(**device: Any) -> GPUNodeStatus:
    given = {
        "memory_bytes": 24 * GIB,
        "reserved_bytes": 0,
        "used_bytes": 0,
        "unowned_bytes": 0,
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

    def gpunode(self) -> GPUNode | None:
        if self.failures:
            self.failures -= 1
            raise NotDelivered("API server not reached")
        charge = Charge(RESOURCE, 1, {"B": 8 * GIB}, choice=self.choice)
        spec = GPUNodeSpec(True, {"u": Reservation("default", "p", [charge])})
        return GPUNode(ObjectMeta(name="n"), spec=spec, status=self.told)


def helm(
    folder: Path, ledger: Ledger, sample: GPUNodeStatus | None, patience_s: float = 60.0
) -> Helm:
    return Helm(
        [RESOURCE],
        folder / "checkpoint",
        folder / "no.sock",
        ledger,
        lambda: sample,
        lambda: 0,
        lambda: None,
        patience_s,
    )


def answer(steering: Helm) -> Any:
    return steering._choose(RESOURCE, WISH)


def test_the_ledger_is_asked_again_until_it_answers(tmp_path: Path) -> None:
    steering = helm(tmp_path, Ledger(failures=1), status())
    assert answer(steering) == ("B::0",)
    assert steering.answers == {(RESOURCE, "promised"): 1}


@pytest.mark.parametrize(
    ("failures", "sample", "checkpoint", "why"),
    [
        pytest.param(99, status(), None, "the ledger cannot be read", id="no ledger"),
        pytest.param(0, None, None, "no fresh sample", id="no sample"),
        pytest.param(0, status(), "{}", "checkpoint cannot be read", id="no checkpoint"),
    ],
)
def test_nobody_is_given_a_device_by_guess(
    failures: int, sample: Any, checkpoint: str | None, why: str, tmp_path: Path
) -> None:
    if checkpoint is not None:
        (tmp_path / "checkpoint").write_text(checkpoint)
    with pytest.raises(Refused, match=why):
        answer(helm(tmp_path, Ledger(failures=failures), sample, patience_s=0.0))


def test_the_plugin_is_asked_about_devices_that_nobody_shares(tmp_path: Path) -> None:
    assert answer(helm(tmp_path, Ledger(), status(sharing="none"))) is None


def test_parts_of_a_gpu_are_chosen_like_whole_ones(tmp_path: Path) -> None:
    assert answer(helm(tmp_path, Ledger(), status(kind="mig"))) == ("B::0",)


def test_it_may_leave_when_nobody_counts_on_a_choice_any_more(tmp_path: Path) -> None:
    ledger = Ledger()
    steering = helm(tmp_path, ledger, status())
    steering.leave()
    assert not steering.may_leave  # it still says that it steers
    ledger.told = GPUNodeStatus()
    assert not steering.may_leave  # somebody is on his way
    ledger.told = GPUNodeStatus(pods=[PodUse("u", "B")])
    assert steering.may_leave
    ledger.told, ledger.choice = GPUNodeStatus(), ""
    assert steering.may_leave
    ledger.told = status()
    assert not steering.may_leave  # nobody yet, but somebody may still be promised a choice
    ledger.told, ledger.failures = GPUNodeStatus(), 1
    assert not steering.may_leave
