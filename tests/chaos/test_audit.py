"""The auditor sees what is wrong: histories that are sound but for one thing, and the same without.

Of each rule there is a history that breaks it, and next to it what is left out of the sums.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.audit import HINDSIGHT_S, RESOURCE, Auditor, Holding, Machine, Use

GIB = 1 << 30
#: One GPU that is shared, two of which the kubelet takes one.
ONE, TWO = "one", "two"
MACHINES = {
    ONE: Machine({"GPU-one-0": 24 * GIB}, 4),
    TWO: Machine({"GPU-two-0": 24 * GIB, "GPU-two-1": 24 * GIB}, 4),
}


def pod(
    name: str,
    vram: str | None,
    node: str = "",
    devices: Iterable[str] | None = ("GPU-one-0",),
    phase: str = "Running",
    containers: Iterable[str] = ("main",),
    **metadata: Any,
) -> dict[str, Any]:
    """``devices`` are those that our placement names; None: another client bound it."""
    annotations = {} if vram is None else {"headroom.gpu/vram": vram}
    if node and devices is not None:
        named = {each: {"candidates": list(devices)} for each in containers}
        annotations["headroom.gpu/placement"] = json.dumps({"node": node, "containers": named})
    limits = {"limits": {RESOURCE: "1"}}
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "annotations": annotations, **metadata},
        "spec": {"containers": [{"name": each, "resources": limits} for each in containers]}
        | ({"nodeName": node} if node else {}),
        "status": {"phase": phase},
    }


def gpunode(name: str, memory_gib: int = 24, **promised_gib: int) -> dict[str, Any]:
    """It reserves so many GiB on every device for pods of these names."""
    devices = list(MACHINES[name].memory_bytes)
    return {
        "metadata": {"name": name},
        "spec": {
            "reservations": {
                f"uid-{pod}": {
                    "name": pod,
                    "attempt": f"attempt-{pod}",
                    "charges": [{"candidates": dict.fromkeys(devices, gib * GIB)}],
                }
                for pod, gib in promised_gib.items()
            }
        },
        "status": {"devices": [{"uuid": each, "memory": memory_gib * GIB} for each in devices]},
    }


def told(*pods: dict[str, Any]) -> Auditor:
    auditor = Auditor(MACHINES)
    for name in MACHINES:
        auditor.gpunode(gpunode(name))
    for each in pods:
        auditor.pod(each)
    return auditor


def holds(*names: str, device: str = "GPU-one-0") -> list[Holding]:
    return [Holding(f"uid-{name}", "main", device) for name in names]


def rules(auditor: Auditor) -> list[str]:
    return [finding.rule for finding in auditor.findings]


def in_the_end(auditor: Auditor) -> list[str]:
    return [finding.rule for finding in auditor.settled()]


# At any moment.


def test_more_is_bound_to_a_node_than_it_has() -> None:
    assert rules(told(pod("a", "16Gi", ONE), pod("b", "8Gi", ONE))) == []
    auditor = told(pod("a", "16Gi", ONE), pod("b", "8193Mi", ONE))
    assert rules(auditor) == ["reserved twice"]
    (finding,) = auditor.findings
    assert "has 25769803776 bytes" in finding.what
    assert "a=17179869184, b=8590983168" in finding.what


def test_what_asks_in_other_words_is_counted_as_well() -> None:
    assert rules(told(pod("a", "50%", ONE), pod("b", "50%", ONE))) == []
    assert rules(told(pod("a", "51%", ONE), pod("b", "50%", ONE))) == ["reserved twice"]
    # A replica of four is worth 6 GiB for a pod without an annotation.
    assert rules(told(pod("a", "18Gi", ONE), pod("b", None, ONE))) == []
    assert rules(told(pod("a", "19Gi", ONE), pod("b", None, ONE))) == ["reserved twice"]
    both = ("main", "side")
    assert rules(told(pod("a", "main=16Gi,side=8Gi", ONE, containers=both))) == []
    assert rules(told(pod("a", "main=16Gi,side=9G", ONE, containers=both))) == ["reserved twice"]


def test_an_ended_or_deleted_pod_frees_memory() -> None:
    for goes in ("ends", "is gone", "is missing from a list"):
        auditor = told(pod("a", "20Gi", ONE))
        if goes == "ends":
            auditor.pod(pod("a", "20Gi", ONE, phase="Succeeded"))
        elif goes == "is gone":
            auditor.pod_gone("uid-a")
        auditor.listed([pod("b", "20Gi", ONE)])
        assert rules(auditor) == [], goes
    auditor.listed([pod("b", "20Gi", ONE), pod("c", "20Gi", ONE)])
    assert rules(auditor) == ["reserved twice"]


def test_a_terminating_pod_frees_no_memory_yet() -> None:
    leaving = pod("a", "20Gi", ONE, deletionTimestamp="2026-11-21T00:00:00Z")
    assert rules(told(leaving, pod("b", "20Gi", ONE))) == ["reserved twice"]


def test_outsiders_are_not_ours() -> None:
    theirs = pod("theirs", "20Gi", ONE, devices=None)
    auditor = told(theirs, pod("a", "20Gi", ONE))
    assert rules(auditor) == []
    auditor.look(ONE, holds("theirs", "a"), [])
    assert rules(auditor) == []
    auditor.pod(pod("b", "20Gi", ONE))  # but of our own there are too many as well
    assert rules(auditor) == ["reserved twice"]


def test_overcommitment_by_an_overstated_report_is_not_our_fault() -> None:
    auditor = told(pod("a", "20Gi", ONE))
    auditor.gpunode(gpunode(ONE, memory_gib=48, a=20, b=20))
    auditor.pod(pod("b", "20Gi", ONE))
    assert rules(auditor) == []
    # A pod that comes after the true report is.
    auditor.gpunode(gpunode(ONE, a=20, b=20))
    auditor.gpunode(gpunode(ONE, a=20, b=20, c=20, d=20))
    auditor.pod(pod("c", "20Gi", ONE))
    auditor.pod(pod("d", "20Gi", ONE))
    assert rules(auditor) == ["reserved twice"]


def test_an_overstated_report_counts_however_late_its_watch_event_is() -> None:
    auditor = told(pod("a", "20Gi", ONE), pod("b", "20Gi", ONE))
    assert rules(auditor) == ["reserved twice"]
    auditor.gpunode(gpunode(ONE, memory_gib=48, a=20, b=20))
    assert rules(auditor) == []


def test_the_plugin_gave_a_device_to_more_pods_than_fit() -> None:
    candidates = tuple(MACHINES[TWO].memory_bytes)
    pods = [pod(name, "14Gi", TWO, candidates) for name in ("a", "b")]
    auditor = told(*pods)
    auditor.look(TWO, holds("a", device="GPU-two-0") + holds("b", device="GPU-two-1"), [])
    assert rules(auditor) == []
    auditor.look(TWO, holds("a", "b", device="GPU-two-0"), [])
    assert rules(auditor) == ["overcommitted"]


def test_a_device_that_the_placement_does_not_name_is_a_miss_and_reported() -> None:
    pods = [pod("a", "14Gi", TWO, ("GPU-two-0",)), pod("b", "14Gi", TWO, ("GPU-two-1",))]
    auditor = told(*pods)
    auditor.look(TWO, holds("a", "b", device="GPU-two-0"), [])
    assert rules(auditor) == []
    assert auditor.tally.missed == 1


@pytest.mark.parametrize(
    "happens", ["released", "gone before it was admitted", "bypassed", "lied", "lost", "long ago"]
)
def test_unforeseeable_changes_are_left_out_on_predicted_nodes(happens: str) -> None:
    candidates = tuple(MACHINES[TWO].memory_bytes)
    now_s = 1000.0
    auditor = Auditor({TWO: replace(MACHINES[TWO], predicted=True)}, lambda: now_s)
    auditor.gpunode(gpunode(TWO))
    auditor.pod(pod("other", "1Gi", TWO, ("GPU-two-1",)))
    pods = [pod(name, "14Gi", TWO, candidates) for name in ("a", "b")]
    auditor.pod(pods[0])
    auditor.look(TWO, holds("a", device="GPU-two-0") + holds("other", device="GPU-two-1"), [])
    if happens == "released":
        auditor.look(TWO, holds("a", device="GPU-two-0"), [])
    elif happens == "gone before it was admitted":
        auditor.pod(pod("c", "1Gi", TWO, candidates))
        auditor.pod_gone("uid-c")
    elif happens == "bypassed":
        auditor.pod(pod("theirs", "1Gi", TWO, devices=None))
        auditor.look(TWO, holds("a", "theirs", device="GPU-two-0"), [])
    elif happens == "lied":
        auditor.lying(TWO, True)
    elif happens == "lost":
        auditor.gpunode_gone(TWO)
    else:
        auditor.look(TWO, holds("a", device="GPU-two-0"), [])
        now_s += HINDSIGHT_S
    auditor.pod(pods[1])
    auditor.look(TWO, holds("a", "b", device="GPU-two-0"), [])
    if happens == "long ago":
        assert rules(auditor) == ["overcommitted"]
        assert any("b is given GPU-two-0" in line for line in auditor.findings[0].story)
    else:
        assert rules(auditor) == []
        assert auditor.tally.surprised == 1
        (excused,) = auditor.excused
        assert excused.where == "two GPU-two-0"


def test_what_processes_hold_counts_when_their_pod_is_gone() -> None:
    auditor = told(pod("a", "20Gi", ONE))
    auditor.pod_gone("uid-a")
    left = [Use("uid-a", "GPU-one-0", 20 * GIB)]
    auditor.look(ONE, [], left)
    assert rules(auditor) == []
    auditor.pod(pod("b", "20Gi", ONE))
    auditor.look(ONE, holds("b"), left)
    assert rules(auditor) == ["overcommitted"]


def test_what_an_agent_denies_is_not_our_fault() -> None:
    auditor = told(pod("a", "20Gi", ONE))
    auditor.pod_gone("uid-a")
    left = [Use("uid-a", "GPU-one-0", 20 * GIB)]
    auditor.lying(ONE, True)
    auditor.look(ONE, [], left)
    auditor.lying(ONE, False)
    auditor.pod(pod("b", "20Gi", ONE))
    auditor.look(ONE, holds("b"), left)
    assert rules(auditor) == []
    # Reservations do not depend on the agent: a pod on the node is charged whatever it reports.
    auditor.lying(ONE, True)
    auditor.pod(pod("c", "20Gi", ONE))
    auditor.look(ONE, holds("b", "c"), [])
    assert rules(auditor) == ["reserved twice", "overcommitted"]


def test_the_driver_ran_out_of_memory() -> None:
    auditor = told(pod("a", "20Gi", ONE), pod("theirs", "20Gi", TWO, devices=None))
    auditor.look(ONE, holds("a"), [])
    auditor.look(TWO, holds("theirs", device="GPU-two-0"), [])
    auditor.overdrawn(TWO, "GPU-two-0")
    assert rules(auditor) == []
    auditor.overdrawn(ONE, "GPU-one-0")
    assert rules(auditor) == ["overdrawn"]


# In the end.


def test_all_is_well_in_the_end() -> None:
    auditor = told(pod("a", "20Gi", ONE), pod("b", "16Gi"))
    auditor.gpunode(gpunode(ONE, a=20))
    auditor.look(ONE, holds("a"), [])
    for name, device in (("c", "GPU-two-0"), ("d", "GPU-two-1")):
        auditor.pod(pod(name, "9Gi", TWO, (device,)))
    auditor.gpunode(gpunode(TWO, c=9, d=9))
    auditor.look(TWO, holds("c", device="GPU-two-0") + holds("d", device="GPU-two-1"), [])
    assert in_the_end(auditor) == []


def test_reservations_of_missing_pods_are_orphans() -> None:
    for left in (
        pod("a", "20Gi"),
        pod("a", "20Gi", TWO),
        pod("a", "20Gi", ONE, phase="Failed"),
    ):
        auditor = told(left)
        auditor.gpunode(gpunode(ONE, a=20))
        assert "orphan" in in_the_end(auditor)
    auditor = told(pod("a", "20Gi", ONE))
    auditor.gpunode(gpunode(ONE, a=20))
    assert in_the_end(auditor) == []
    auditor.pod_gone("uid-a")
    assert in_the_end(auditor) == ["orphan"]
    auditor.gpunode_gone(ONE)
    assert in_the_end(auditor) == []


def test_every_pod_on_the_node_is_charged_exactly_once() -> None:
    for charged in ({}, {ONE: 19}, {TWO: 20}, {ONE: 20, TWO: 20}):
        auditor = told(pod("a", "20Gi", ONE))
        for name, gib in charged.items():
            auditor.gpunode(gpunode(name, a=gib))
        auditor.look(ONE, holds("a"), [])
        assert "charged" in in_the_end(auditor), charged


def test_outsiders_are_charged_too() -> None:
    auditor = told(pod("theirs", "4Gi", ONE, devices=None))
    auditor.look(ONE, holds("theirs"), [])
    assert in_the_end(auditor) == ["charged"]
    auditor.gpunode(gpunode(ONE, theirs=4))
    assert in_the_end(auditor) == []


def test_pods_that_wait_although_they_fit() -> None:
    assert in_the_end(told(pod("a", "25Gi", phase="Pending"))) == []
    assert in_the_end(told(pod("a", "24Gi", phase="Pending"))) == ["waits"]
    going = pod("a", "24Gi", phase="Pending", deletionTimestamp="2026-11-21T00:00:00Z")
    assert in_the_end(told(going)) == []
    # There must be room wherever on the node it may land, and a replica.
    busy = pod("c", "20Gi", TWO, ("GPU-two-1",))
    auditor = told(pod("b", "20Gi", ONE), busy, pod("a", "20Gi", phase="Pending"))
    auditor.gpunode(gpunode(ONE, b=20))
    auditor.gpunode(gpunode(TWO, c=20))
    auditor.look(ONE, holds("b"), [])
    auditor.look(TWO, holds("c", device="GPU-two-1"), [])
    assert in_the_end(auditor) == []
    four = [pod(name, "1Gi", ONE) for name in "bcde"]
    auditor = told(*four, pod("f", "20Gi", TWO), pod("a", "20Gi", phase="Pending"))
    auditor.gpunode(gpunode(ONE, b=1, c=1, d=1, e=1))
    auditor.gpunode(gpunode(TWO, f=20))
    auditor.look(TWO, [Holding("uid-f", "main", f"GPU-two-{n}") for n in range(2)], [])
    assert "waits" not in in_the_end(auditor)


@pytest.mark.parametrize(("size", "found"), [("17Gi", ["waits"]), ("18Gi", [])])
def test_a_pod_on_two_devices_counts_whole_on_each(size: str, found: list[str]) -> None:
    """A pod with 4 GiB on one device and 3 GiB on the other leaves 17 GiB on each."""
    both = "main", "side"
    devices = list(MACHINES[TWO].memory_bytes)
    full = pod("full", "24Gi", ONE)
    split = pod("split", "main=4Gi,side=3Gi", TWO, devices, containers=both)
    auditor = told(full, split, pod("waits", size, phase="Pending"))
    auditor.gpunode(gpunode(ONE, full=24))
    auditor.gpunode(gpunode(TWO, split=7))
    auditor.look(ONE, holds("full"), [])
    held = [Holding("uid-split", each, device) for each, device in zip(both, devices, strict=True)]
    auditor.look(TWO, held, [])
    assert in_the_end(auditor) == found


def test_a_reservation_beside_an_overstated_report_stays() -> None:
    def after(memory_gib: int) -> Auditor:
        auditor = told(pod("other", "20Gi", TWO, tuple(MACHINES[TWO].memory_bytes)))
        auditor.gpunode(gpunode(TWO, other=20))
        auditor.look(TWO, holds("other", device="GPU-two-0"), [])
        auditor.gpunode(gpunode(ONE, memory_gib, a=12))
        auditor.pod(pod("a", "25%", ONE))
        auditor.gpunode(gpunode(ONE, a=12))
        auditor.look(ONE, holds("a"), [])
        auditor.pod(pod("b", "16Gi", phase="Pending"))
        return auditor

    assert in_the_end(after(48)) == []
    assert in_the_end(after(24)) == ["waits"]


def test_what_was_seen_is_counted() -> None:
    auditor = told(pod("a", "1Gi"), pod("b", "1Gi"), pod("t", "1Gi", ONE, devices=None))
    auditor.pod(pod("a", "1Gi", ONE))
    auditor.pod(pod("b", "1Gi", ONE, phase="Failed"))
    auditor.pod_gone("uid-a")
    tally = auditor.tally
    assert (tally.created, tally.bound, tally.outsiders, tally.rejected, tally.gone) == (
        3,
        3,
        1,
        1,
        1,
    )
