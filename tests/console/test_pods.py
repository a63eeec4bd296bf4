"""Tests /v1/pods, which lists all pods in pages."""

from typing import Any

import msgspec
import pytest

from headroom.contract.gpunode import PodUse
from headroom.contract.kube import Node
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from tests.builders import GIB, gpunode, kube_node, pod, reservation, shared, use
from tests.console.asking import Asked
from tests.console.test_teams import owned

#: The node, reserved GiB and used GiB of each pod. None means that no report shows the pod.
BOUND: dict[str, tuple[str, int, int | None]] = {
    "half": ("a", 8, 4),
    "new": ("a", 6, None),
    "over": ("b", 4, 6),
    "idle": ("b", 10, 9),
}
IDLE_SINCE = "2026-11-20T22:00:00Z"  # two hours before the reports


def labelled(name: str, labels: dict[str, str]) -> Node:
    node = kube_node(name)
    metadata = msgspec.structs.replace(node.metadata, labels=labels)
    return msgspec.structs.replace(node, metadata=metadata)


def fleet() -> Asked:
    asked = Asked()
    for node, model, pool in (("a", "L4", "blue"), ("b", "A100", "")):
        mine = {name: each for name, each in BOUND.items() if each[0] == node}
        devices = [
            msgspec.structs.replace(shared(f"GPU-{name}"), index=number, model=model)
            for number, name in enumerate(mine)
        ]
        held = {
            f"u-{name}": reservation({f"GPU-{name}": gib * GIB}, name=name)
            for name, (_, gib, _) in mine.items()
        }
        rows: list[PodUse] = [
            use(
                f"u-{name}",
                f"GPU-{name}",
                gib * GIB,
                namespace="default",
                name=name,
                replica=f"GPU-{name}::0",
                peak_bytes=gib * GIB,
                idle_since=IDLE_SINCE if name == "idle" else "",
            )
            for name, (_, _, gib) in mine.items()
            if gib is not None
        ]
        labels = {"cloud.google.com/gke-nodepool": pool, "zone": "z"} if pool else {"zone": "z"}
        asked.writer.apply(
            [
                NodeSeen(labelled(node, labels)),
                *(PodSeen(owned(name, "default", f"of-{name}", node)) for name in mine),
                GPUNodeSeen(gpunode(*devices, name=node, reservations=held, pods=rows), 0.0),
            ]
        )
    waiting = pod(
        "90Gi", uid="u-late", name="late", namespace="web", created="2026-11-20T01:00:00Z"
    )
    asked.writer.apply([PodSeen(waiting), PodSeen(owned("stray", "web", "s", "b"))])
    asked.writer.parts.overuses.update(0.0)
    asked.writer.parts.overuses.update(1e6)
    return asked


def read(query: str, asked: Asked | None = None) -> dict[str, Any]:
    answer = (asked or fleet()).get(f"/v1/pods{query}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def names(query: str) -> list[str]:
    return [each["name"] for each in read(query)["pods"]]


def test_pods_are_listed_with_their_memory_and_all_their_states() -> None:
    body = read("")
    assert [(each["namespace"], each["name"], each["states"]) for each in body["pods"]] == [
        ("default", "half", ["running"]),
        ("default", "idle", ["running", "idle"]),
        ("default", "new", ["unconfirmed"]),
        ("default", "over", ["running", "overusing"]),
        ("web", "late", ["waiting"]),
        ("web", "stray", ["unconfirmed", "unreserved"]),
    ]
    half, _, new, over, late, _ = body["pods"]
    assert {key: half[key] for key in ("owner_kind", "owner_name", "node", "model", "devices")} == {
        **{"owner_kind": "StatefulSet", "owner_name": "of-half"},
        **{"node": "a", "model": "L4", "devices": ["0"]},
    }
    memory = ("reserved_bytes", "used_bytes", "peak_bytes", "unused_bytes", "overuse_bytes")
    assert [half[key] for key in memory] == [8 * GIB, 4 * GIB, 4 * GIB, 4 * GIB, 0]
    assert [new[key] for key in memory] == [6 * GIB, None, None, 0, 0]
    assert [over[key] for key in memory] == [4 * GIB, 6 * GIB, 6 * GIB, 0, 2 * GIB]
    assert late["request"] == "1 x nvidia.com/gpu with 90Gi"
    assert (late["owner_kind"], late["owner_name"], late["node"]) == ("Pod", "late", None)
    assert body["sums"] == {
        **{
            "waiting_pods": 1,
            "waiting_bytes": 90 * GIB,
            "reserved_bytes": 29 * GIB,
            "used_bytes": 19 * GIB,
        },
        **{"unused_bytes": 5 * GIB, "overuse_bytes": 2 * GIB},
    }


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("?search=HAL", ["half"]),
        ("?search=of-new", ["new"]),
        ("?namespace=web", ["late", "stray"]),
        ("?owner=StatefulSet/of-idle", ["idle"]),
        ("?owner=Pod/late", ["late"]),
        ("?node=b", ["idle", "over", "stray"]),
        ("?model=L4", ["half", "new"]),
        ("?state=waiting", ["late"]),
        ("?state=bound", ["half", "idle", "new", "over", "stray"]),
        ("?state=unconfirmed", ["new", "stray"]),
        ("?state=unreserved", ["stray"]),
        ("?state=overusing", ["over"]),
        ("?state=idle", ["idle"]),
        ("?node=b&state=idle&search=over", []),
        ("?order=reserved&state=bound", ["idle", "half", "new", "over", "stray"]),
        ("?order=unused&node=a", ["half", "new"]),
        ("?order=overuse&limit=1", ["over"]),
        ("?order=oldest&limit=1", ["late"]),
    ],
)
def test_pods_can_be_searched_filtered_and_sorted(query: str, expected: list[str]) -> None:
    assert names(query) == expected


@pytest.mark.parametrize("order", ["name", "reserved", "used", "unused", "overuse", "oldest"])
def test_pages_show_each_pod_once_in_every_order(order: str) -> None:
    asked, found, after = fleet(), [], ""
    for page in range(3):
        body = read(f"?order={order}&limit=2&continue={after}", asked)
        assert (body["matching"], body["remaining"]) == (6, 4 - 2 * page)
        found += [each["name"] for each in body["pods"]]
        after = body["continue"]
    assert after is None
    assert sorted(found) == ["half", "idle", "late", "new", "over", "stray"]


def test_a_reserved_pod_that_is_not_bound_yet_is_listed_once() -> None:
    asked = fleet()
    before = read("", asked)["sums"]
    late = msgspec.structs.replace(reservation({"GPU-c": 20 * GIB}, name="late"), namespace="web")
    node = gpunode(shared("GPU-c"), name="c", reservations={"u-late": late})
    asked.writer.apply([NodeSeen(kube_node("c")), GPUNodeSeen(node, 0.0)])
    (row,) = read("?search=late", asked)["pods"]
    assert (row["node"], row["states"], row["reserved_bytes"]) == ("c", ["waiting"], 20 * GIB)
    teams = {each["namespace"]: each for each in asked.get("/v1/teams").json()["teams"]}
    assert (teams["web"]["pods"], teams["web"]["waiting_pods"]) == (2, 0)
    sums = read("", asked)["sums"]
    assert (before["waiting_pods"], sums["waiting_pods"]) == (1, 0)
    assert sums["reserved_bytes"] - before["reserved_bytes"] == 20 * GIB


def test_a_pod_with_reservations_on_two_nodes_is_listed_on_both() -> None:
    asked = fleet()
    held = {"u-half": reservation({"GPU-c": 8 * GIB}, name="half")}
    node = gpunode(shared("GPU-c"), name="c", reservations=held)
    asked.writer.apply([NodeSeen(kube_node("c")), GPUNodeSeen(node, 0.0)])
    first = read("?search=half&limit=1", asked)
    second = read(f"?search=half&continue={first['continue']}", asked)
    assert [each["node"] for body in (first, second) for each in body["pods"]] == ["a", "c"]


def test_a_pod_is_listed_after_it_is_bound() -> None:
    asked = fleet()
    assert read("?node=a", asked)["matching"] == 2
    asked.writer.apply([PodSeen(owned("third", "default", "of-third", "a"))])
    assert [each["name"] for each in read("?node=a", asked)["pods"]] == ["half", "new", "third"]
