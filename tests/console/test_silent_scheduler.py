"""Checks what is shown of a pod that has GPU memory but waits for something else, or for a
scheduler that does not run."""

import msgspec
import pytest

from headroom.console.facts.scheduler_reports import waits_elsewhere
from headroom.contract.kube import Pod, PodCondition, PodStatus
from headroom.contract.reasons import Reason
from headroom.contract.watched import PodSeen
from headroom.core.journal.decision_records import Filtered
from headroom.kubectl.why import why
from tests.builders import pod
from tests.console.asking import WALL_S, Asked

CREATED = "2026-11-21T00:00:00Z"


def reported(message: str) -> Pod:
    """Return an unbound pod with this message of its scheduler."""
    waits = pod("4Gi", created=CREATED)
    waits = msgspec.structs.replace(
        waits, spec=msgspec.structs.replace(waits.spec, scheduler_name="default-scheduler")
    )
    if not message:
        return waits
    condition = PodCondition("PodScheduled", "False", "Unschedulable", message)
    return msgspec.structs.replace(waits, status=PodStatus("Pending", conditions=[condition]))


def at(now_s: float, waits: Pod) -> Asked:
    asked = Asked()
    asked.add_node("gpu-1")
    asked.writer.apply([PodSeen(waits)])
    asked.now_s = now_s
    return asked


def headline(asked: Asked) -> str:
    return why(asked.get("/v1/explain?pod=default/p").json())[0]


SILENT = (
    "scheduler default-scheduler has not tried the pod since it was created at "
    "2026-11-21T00:00:00Z: is it running? 1 node has GPU memory for the pod"
)


def test_the_first_line_of_why_says_that_the_scheduler_does_not_try_the_pod() -> None:
    asked = at(40, reported(""))
    assert headline(asked).startswith(f"Pod default/p: {SILENT}")
    (pending,) = asked.get("/v1/pending").json()["pods"]
    assert pending["message"].startswith(SILENT)
    assert pending["verdict"] == "not_scheduled"
    (waiting,) = asked.get("/v1/overview").json()["waiting"]
    assert waiting["verdict"] == "not_scheduled"


def test_a_new_pod_is_not_overdue() -> None:
    assert "is it running?" not in headline(at(5, reported("")))


def test_a_pod_that_was_not_retried_for_longer_than_kube_scheduler_waits_is_overdue() -> None:
    asked = at(0, reported(""))
    tried = Filtered(WALL_S - 340, 1, 1, 1, 0, {1: 1}, ())
    asked.journal.note(reported(""), tried, WALL_S - 340)
    assert "is it running?" not in headline(asked)
    asked.now_s = 30
    assert headline(asked).startswith(
        "Pod default/p: scheduler default-scheduler has not tried the pod since "
        "2026-11-20T23:54:20Z: is it running? 1 node "
    )


CPU = (
    "0/3 nodes are available: 3 Insufficient cpu. no new claims to deallocate, preemption: 0/3 "
    "nodes are available: 3 Preemption is not helpful for scheduling."
)


def test_a_pod_that_waits_for_cpu_says_so_first_and_is_not_shown_as_good() -> None:
    asked = at(40, reported(CPU))
    assert headline(asked) == (
        "Pod default/p: waits for CPU (kube-scheduler: 3 Insufficient cpu); 1 node has GPU memory "
        "for the pod"
    )
    (pending,) = asked.get("/v1/pending").json()["pods"]
    assert pending["verdict"] == "waits"
    assert pending["message"].startswith("waits for CPU (kube-scheduler: 3 Insufficient cpu)")


OURS = Reason.MEMORY_ON_ANY.sentence


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        pytest.param("", "", id="no report"),
        pytest.param("anything else", "", id="a message of another form"),
        pytest.param(f"0/2 nodes are available: 2 {OURS}. preemption: x", "", id="only ours"),
        pytest.param(
            f"0/3 nodes are available: 2 {OURS}, 1 Insufficient cpu.", "", id="ours and CPU"
        ),
        pytest.param(
            "0/3 nodes are available: 1 Insufficient memory, 2 Insufficient cpu. preemption: x",
            "waits for memory and CPU (kube-scheduler: 1 Insufficient memory, 2 Insufficient cpu)",
            id="CPU and memory",
        ),
        pytest.param(
            "0/2 nodes are available: 2 node(s) had untolerated taint(s), a second.",
            "kube-scheduler found no node for it (2 node(s) had untolerated taint(s), a second)",
            id="another reason, with a comma",
        ),
    ],
)
def test_reasons_are_read_from_the_report_of_kube_scheduler(message: str, shown: str) -> None:
    assert waits_elsewhere(reported(message)) == shown
