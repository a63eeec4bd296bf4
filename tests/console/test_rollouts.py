"""Tests suggestions for a new pod of a workload whose old pods fill the GPU."""

import json
import shlex
from typing import Any

import msgspec
import pytest

from headroom.contract.kube import Pod, PodStatus
from headroom.contract.watched import PodSeen
from headroom.core.cluster.changes import Event
from tests.builders import pod
from tests.console.explained import asked, explained, kinds, node, owned

HASH = "pod-template-hash"
#: The end of all suggestions.
UNCHECKED = " (not checked: CPU, memory and other resources)"


def full(old: Pod) -> list[Event]:
    """Return the events of node a with pod ``old``, which holds 20 of 24 GiB."""
    return [PodSeen(old) if isinstance(event, PodSeen) else event for event in node("a", old=20)]


def of(kind: str, name: str, label: str, old: str, new: str, **how: Any) -> dict[str, object]:
    """Explain a pod of revision ``new`` next to a pod of revision ``old``."""
    placed = pod("20Gi", uid="u-old", name="old", node="a", phase="Running")
    waits = pod("20Gi", uid="uw", name="waits")
    return explained(
        asked(
            *full(owned(placed, kind, name.format(old), **how, **{label: old})),
            waits=owned(waits, kind, name.format(new), **{label: new}),
        )
    )


def test_a_rolling_update_on_a_full_gpu_must_end_the_old_pod_first() -> None:
    body = of("ReplicaSet", "llm-{}", HASH, "aaa", "bbb")
    assert kinds(body) == ["rollout"]
    first = body["advice"][0]  # type: ignore[index]
    assert first["sentence"] == (
        "set maxSurge: 0 and maxUnavailable: 1, or strategy Recreate, in Deployment llm: its "
        "rolling update ends the old pod on node a only when this pod is ready, and this pod fits "
        f"there only without the old pod{UNCHECKED}"
    )
    *command, patch = shlex.split(first["fix"])
    assert command == shlex.split("kubectl -n default patch deployment llm --type merge -p")
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    assert json.loads(patch) == {"spec": {"strategy": rolling}}


@pytest.mark.parametrize(
    ("kind", "name", "label", "shown", "field"),
    [
        ("DaemonSet", "llm", "controller-revision-hash", "DaemonSet llm", "updateStrategy"),
        ("ReplicaSet", "llm-{}", "rollouts-pod-template-hash", "Rollout llm", None),
    ],
)
def test_other_controllers_that_start_new_pods_first_are_named(
    kind: str, name: str, label: str, shown: str, field: str | None
) -> None:
    body = of(kind, name, label, "aaa", "bbb")
    first = body["advice"][0]  # type: ignore[index]
    assert first["sentence"].startswith(f"set maxSurge: 0 and maxUnavailable: 1 in {shown}: its")
    assert (field in first["fix"]) if field else (first["fix"] is None)


def test_a_larger_revision_needs_the_end_of_all_old_pods_on_the_gpu() -> None:
    """A rolling update ends one old pod, and then waits until the new pod is ready."""

    def old(name: str) -> Pod:
        placed = pod("12Gi", uid=f"u-{name}", name=name, node="a", phase="Running")
        return owned(placed, "ReplicaSet", "llm-aaa", **{HASH: "aaa"})

    events: list[Event] = [
        PodSeen(old(event.pod.metadata.name)) if isinstance(event, PodSeen) else event
        for event in node("a", one=12, two=12)
    ]
    new = owned(pod("20Gi", uid="uw", name="waits"), "ReplicaSet", "llm-bbb", **{HASH: "bbb"})
    (first,) = explained(asked(*events, waits=new))["advice"]  # type: ignore[misc]
    assert first["sentence"] == (
        "set strategy Recreate in Deployment llm: its rolling update ends the 2 old pods on node a "
        f"only when this pod is ready, and this pod fits there only without them{UNCHECKED}"
    )
    *command, patch = shlex.split(first["fix"])
    assert command == shlex.split("kubectl -n default patch deployment llm --type merge -p")
    assert json.loads(patch) == {"spec": {"strategy": {"type": "Recreate", "rollingUpdate": None}}}


def test_memory_held_for_another_pod_is_not_offered_to_the_new_pod() -> None:
    """The nominated pod gets the memory when the old pod ends."""
    first = pod("20Gi", uid="u-first", name="first", priority=5)
    status = PodStatus(phase="Pending", nominated_node_name="a")
    old = owned(
        pod("20Gi", uid="u-old", name="old", node="a", phase="Running"),
        "ReplicaSet",
        "llm-aaa",
        **{HASH: "aaa"},
    )
    new = owned(pod("20Gi", uid="uw", name="waits"), "ReplicaSet", "llm-bbb", **{HASH: "bbb"})
    held = PodSeen(msgspec.structs.replace(first, status=status))
    assert "rollout" not in kinds(explained(asked(*full(old), held, waits=new)))


def test_the_new_pod_waits_for_an_old_pod_that_is_being_deleted() -> None:
    body = of("ReplicaSet", "llm-{}", HASH, "aaa", "bbb", deleted=True)
    assert kinds(body) == ["wait"]


def test_a_pod_does_not_wait_for_another_pod_of_its_revision() -> None:
    """Waiting would be useless, because the Deployment would create a deleted pod again."""
    assert kinds(of("ReplicaSet", "llm-{}", HASH, "aaa", "aaa")) == []
    assert kinds(of("StatefulSet", "llm", "controller-revision-hash", "aaa", "aaa")) == []


def test_pods_of_one_job_wait_for_each_other() -> None:
    assert kinds(of("Job", "train", "job-name", "train", "train")) == ["wait"]


def test_an_old_pod_that_would_not_free_enough_memory_is_not_suggested() -> None:
    old = owned(
        pod("1Gi", uid="u-old", name="old", node="a", phase="Running"),
        "ReplicaSet",
        "llm-aaa",
        **{HASH: "aaa"},
    )
    events = [
        PodSeen(old) if isinstance(event, PodSeen) and event.pod.metadata.name == "old" else event
        for event in node("a", old=1, other=18)
    ]
    waits = owned(pod("20Gi", uid="uw", name="waits"), "ReplicaSet", "llm-bbb", **{HASH: "bbb"})
    assert kinds(explained(asked(*events, waits=waits))) == ["wait"]


def test_the_old_pod_is_found_although_other_nodes_lack_less_memory() -> None:
    """Ten nodes lack less memory than the old pod's node."""
    old = owned(
        pod("20Gi", uid="u-old", name="old", node="a", phase="Running"),
        "ReplicaSet",
        "llm-aaa",
        **{HASH: "aaa"},
    )
    others = [event for n in range(10) for event in node(f"b{n}", **{f"other-{n}": 5})]
    waits = owned(pod("20Gi", uid="uw", name="waits"), "ReplicaSet", "llm-bbb", **{HASH: "bbb"})
    body = explained(asked(*full(old), *others, waits=waits))
    assert "a" not in [each["node"] for each in body["nearest"]]  # type: ignore[union-attr]
    assert kinds(body)[0] == "rollout"
