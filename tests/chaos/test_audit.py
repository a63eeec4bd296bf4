"""Tests each rule of the auditor with histories that violate the rule, and with the same histories
without the violation.
"""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.chaos.audit import RESOURCE, Auditor, Machine

GIB = 1 << 30
#: ``ONE`` is a node with one shared GPU, and ``TWO`` is a node with two shared GPUs.
ONE, TWO = "one", "two"
MACHINES = {
    ONE: Machine(["GPU-one-0"], 24 * GIB, 4),
    TWO: Machine(["GPU-two-0", "GPU-two-1"], 24 * GIB, 4),
}


def pod(
    name: str,
    vram: str | None,
    node: str = "",
    ours: bool = True,
    phase: str = "Running",
    containers: Iterable[str] = ("main",),
    **metadata: Any,
) -> dict[str, Any]:
    """Return a pod. If ``ours`` is true, Headroom has bound it."""
    annotations = {} if vram is None else {"headroom.gpu/vram": vram}
    if node and ours:
        annotations["headroom.gpu/placement"] = "{}"
    limits = {"limits": {RESOURCE: "1"}}
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "annotations": annotations, **metadata},
        "spec": {"containers": [{"name": each, "resources": limits} for each in containers]}
        | ({"nodeName": node} if node else {}),
        "status": {"phase": phase},
    }


def gpunode(name: str, **reserved_gib: int) -> dict[str, Any]:
    """Return a GPUNode. ``reserved_gib`` maps pod names to the GiB that are reserved on each
    device.
    """
    devices = MACHINES[name].devices
    reservations = {
        f"uid-{pod}": {
            "name": pod,
            "charges": [{"candidates": dict.fromkeys(devices, gib * GIB)}],
        }
        for pod, gib in reserved_gib.items()
    }
    return {"metadata": {"name": name}, "spec": {"reservations": reservations}}


def shown(*pods: dict[str, Any]) -> Auditor:
    auditor = Auditor(MACHINES)
    for name in MACHINES:
        show(auditor, gpunode(name))
    for each in pods:
        show(auditor, each)
    return auditor


def show(auditor: Auditor, changed: dict[str, Any]) -> None:
    is_pod = "containers" in changed["spec"]
    (auditor.pods_changed if is_pod else auditor.gpunodes_changed)("MODIFIED", [changed])


def holds(*names: str, device: str = "GPU-one-0") -> dict[tuple[str, str], list[str]]:
    return {(f"uid-{name}", "main"): [device] for name in names}


def rules(auditor: Auditor) -> list[str]:
    return [finding.rule for finding in auditor.findings]


def in_the_end(auditor: Auditor) -> list[str]:
    return [finding.rule for finding in auditor.settled()]


def test_more_bound_requests_than_a_nodes_memory_are_a_finding() -> None:
    assert rules(shown(pod("a", "16Gi", ONE), pod("b", "8Gi", ONE))) == []
    auditor = shown(pod("a", "16Gi", ONE), pod("b", "8193Mi", ONE))
    assert rules(auditor) == ["reserved twice"]
    (finding,) = auditor.findings
    assert "has 25769803776 bytes" in finding.what
    assert "a=17179869184, b=8590983168" in finding.what


def test_every_form_of_a_request_counts() -> None:
    assert rules(shown(pod("a", "50%", ONE), pod("b", "50%", ONE))) == []
    assert rules(shown(pod("a", "51%", ONE), pod("b", "50%", ONE))) == ["reserved twice"]
    # Without an annotation, the request is the share of one of four replicas: 6 GiB.
    assert rules(shown(pod("a", "18Gi", ONE), pod("b", None, ONE))) == []
    assert rules(shown(pod("a", "19Gi", ONE), pod("b", None, ONE))) == ["reserved twice"]
    both = ("main", "side")
    assert rules(shown(pod("a", "main=16Gi,side=8Gi", ONE, containers=both))) == []
    assert rules(shown(pod("a", "main=16Gi,side=9G", ONE, containers=both))) == ["reserved twice"]


def test_an_ended_or_deleted_pod_frees_memory() -> None:
    for goes in ("ends", "is gone", "is missing from a list"):
        auditor = shown(pod("a", "20Gi", ONE))
        if goes == "ends":
            show(auditor, pod("a", "20Gi", ONE, phase="Succeeded"))
        elif goes == "is gone":
            auditor.pods_changed("DELETED", [pod("a", None)])
        auditor.pods_changed("LISTED", [pod("b", "20Gi", ONE)])
        assert rules(auditor) == [], goes
    auditor.pods_changed("LISTED", [pod("b", "20Gi", ONE), pod("c", "20Gi", ONE)])
    assert rules(auditor) == ["reserved twice"]


def test_a_terminating_pod_does_not_free_memory_yet() -> None:
    leaving = pod("a", "20Gi", ONE, deletionTimestamp="2026-11-21T00:00:00Z")
    assert rules(shown(leaving, pod("b", "20Gi", ONE))) == ["reserved twice"]


def test_outsiders_do_not_count() -> None:
    theirs = pod("theirs", "20Gi", ONE, ours=False)
    auditor = shown(theirs, pod("a", "20Gi", ONE))
    assert rules(auditor) == []
    auditor.look(ONE, holds("theirs", "a"), {})
    assert rules(auditor) == []
    show(auditor, pod("b", "20Gi", ONE))
    assert rules(auditor) == ["reserved twice"]


def test_more_allocated_pods_than_fit_on_a_device_are_a_finding() -> None:
    auditor = shown(pod("a", "14Gi", TWO), pod("b", "14Gi", TWO))
    auditor.look(TWO, holds("a", device="GPU-two-0") | holds("b", device="GPU-two-1"), {})
    assert rules(auditor) == []
    auditor.look(TWO, holds("a", "b", device="GPU-two-0"), {})
    assert rules(auditor) == ["overcommitted"]


def test_processes_count_after_their_pod_is_deleted() -> None:
    auditor = shown(pod("a", "20Gi", ONE))
    auditor.pods_changed("DELETED", [pod("a", None)])
    left = {("uid-a", "GPU-one-0"): 20 * GIB}
    auditor.look(ONE, {}, left)
    assert rules(auditor) == []
    show(auditor, pod("b", "20Gi", ONE))
    auditor.look(ONE, holds("b"), left)
    assert rules(auditor) == ["overcommitted"]


def test_a_failed_allocation_in_the_driver_is_a_finding() -> None:
    auditor = shown(pod("a", "20Gi", ONE), pod("theirs", "20Gi", TWO, ours=False))
    auditor.look(ONE, holds("a"), {})
    auditor.look(TWO, holds("theirs", device="GPU-two-0"), {})
    auditor.look(TWO, holds("theirs", device="GPU-two-0"), {}, ["GPU-two-0"])
    assert rules(auditor) == []
    auditor.look(ONE, holds("a"), {}, ["GPU-one-0"])
    assert rules(auditor) == ["overdrawn"]


def test_a_reservation_without_its_pod_is_an_orphan() -> None:
    for left in (
        pod("a", "20Gi"),
        pod("a", "20Gi", TWO),
        pod("a", "20Gi", ONE, phase="Failed"),
    ):
        auditor = shown(left)
        show(auditor, gpunode(ONE, a=20))
        assert "orphan" in in_the_end(auditor)
    auditor = shown(pod("a", "20Gi", ONE))
    show(auditor, gpunode(ONE, a=20))
    assert in_the_end(auditor) == []
    auditor.pods_changed("DELETED", [pod("a", None)])
    assert in_the_end(auditor) == ["orphan"]
    auditor.gpunodes_changed("DELETED", [gpunode(ONE)])
    assert in_the_end(auditor) == []


def test_a_pod_must_be_charged_completely_on_exactly_its_node() -> None:
    for charged in ({}, {ONE: 19}, {TWO: 20}, {ONE: 20, TWO: 20}):
        auditor = shown(pod("a", "20Gi", ONE))
        for name, gib in charged.items():
            show(auditor, gpunode(name, a=gib))
        auditor.look(ONE, holds("a"), {})
        assert "charged" in in_the_end(auditor), charged


def test_outsiders_must_be_charged_too() -> None:
    auditor = shown(pod("theirs", "4Gi", ONE, ours=False))
    auditor.look(ONE, holds("theirs"), {})
    assert in_the_end(auditor) == ["charged"]
    show(auditor, gpunode(ONE, theirs=4))
    assert in_the_end(auditor) == []


def test_a_pending_pod_that_fits_is_a_finding() -> None:
    assert in_the_end(shown(pod("a", "25Gi", phase="Pending"))) == []
    assert in_the_end(shown(pod("a", "24Gi", phase="Pending"))) == ["waits"]
    going = pod("a", "24Gi", phase="Pending", deletionTimestamp="2026-11-21T00:00:00Z")
    assert in_the_end(shown(going)) == []
    # The pod must fit on every device of the node, and a replica must be free.
    busy = pod("c", "20Gi", TWO)
    auditor = shown(pod("b", "20Gi", ONE), busy, pod("a", "20Gi", phase="Pending"))
    show(auditor, gpunode(ONE, b=20))
    show(auditor, gpunode(TWO, c=20))
    auditor.look(ONE, holds("b"), {})
    auditor.look(TWO, holds("c", device="GPU-two-1"), {})
    assert in_the_end(auditor) == []
    four = [pod(name, "1Gi", ONE) for name in "bcde"]
    auditor = shown(*four, pod("f", "20Gi", TWO), pod("a", "20Gi", phase="Pending"))
    show(auditor, gpunode(ONE, b=1, c=1, d=1, e=1))
    show(auditor, gpunode(TWO, f=20))
    auditor.look(TWO, {("uid-f", "main"): ["GPU-two-0", "GPU-two-1"]}, {})
    assert "waits" not in in_the_end(auditor)


@pytest.mark.parametrize(("size", "found"), [("20Gi", ["waits"]), ("21Gi", [])])
def test_a_pod_on_two_devices_is_charged_on_each_for_its_container(
    size: str, found: list[str]
) -> None:
    """A pod with 4 GiB on one device and 3 GiB on the other device leaves at least 20 GiB free on
    each device.
    """
    both = "main", "side"
    devices = MACHINES[TWO].devices
    full = pod("full", "24Gi", ONE)
    split = pod("split", "main=4Gi,side=3Gi", TWO, containers=both)
    auditor = shown(full, split, pod("waits", size, phase="Pending"))
    show(auditor, gpunode(ONE, full=24))
    show(auditor, gpunode(TWO, split=7))
    auditor.look(ONE, holds("full"), {})
    held = {("uid-split", each): [device] for each, device in zip(both, devices, strict=True)}
    auditor.look(TWO, held, {})
    assert in_the_end(auditor) == found
