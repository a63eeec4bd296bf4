"""Tests /v1/map, which returns all devices in columns, and after that only the changed nodes."""

from typing import Any

import msgspec

from headroom.contract.gpunode import SmActivity
from headroom.contract.kube import NodeSpec
from headroom.contract.watched import GPUNodeSeen, NodeGone, NodeSeen
from tests.builders import DISTRIBUTED, GIB, gpunode, kube_node, reservation, shared, use
from tests.console.asking import STALE_AFTER_S, Asked

POOL = "karpenter.sh/nodepool"


def add(asked: Asked, name: str, *, version: str = "1", used_gib: int = 6, **labels: str) -> None:
    """Add a node with two 24 GiB GPUs. 12 GiB of one GPU are reserved, and the other GPU is
    unhealthy.
    """
    node = kube_node(name)
    node = msgspec.structs.replace(
        node, metadata=msgspec.structs.replace(node.metadata, labels=labels)
    )
    devices = (
        shared(f"{name}-0", index=0, used_bytes=used_gib * GIB, sm_activity=SmActivity(0.5)),
        shared(f"{name}-1", index=1, used_bytes=-1, healthy=False),
    )
    held = {"uid-p": reservation({f"{name}-0": 12 * GIB}, name="p")}
    report = gpunode(
        *devices,
        name=name,
        version=version,
        reservations=held,
        pods=[use("uid-p", f"{name}-0", GIB)],
        plugin=DISTRIBUTED,
    )
    asked.writer.apply([NodeSeen(node), GPUNodeSeen(report, asked.now_s)])


def read(asked: Asked, query: str = "") -> dict[str, Any]:
    answer = asked.get(f"/v1/map{query}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def named(body: dict[str, Any], names: str, numbers: str) -> list[str]:
    return [body[names][number] for number in body[numbers]]


def test_each_device_has_one_value_in_each_column() -> None:
    asked = Asked()
    add(asked, "a", **{POOL: "blue"})
    add(asked, "b")
    body = read(asked)
    assert body["complete"]
    assert (body["node"], body["devices"]) == (["a", "b"], [2, 2])
    assert named(body, "groups", "group") == ["blue", ""]
    assert named(body, "reasons", "reason") == ["", ""]
    assert named(body, "models", "model") == [""] * 4
    assert body["gpu"] == ["0", "1", "0", "1"]
    assert body["memory_gib"] == [24.0] * 4
    assert body["reserved"] == [50, 0, 50, 0]
    assert body["used"] == [25, -1, 25, -1]
    assert body["sm"] == [50, -1, 50, -1]
    assert body["state"] == [0, 1, 0, 1]
    assert (body["stale"], body["cordoned"]) == ([], [])


def test_nodes_are_grouped_by_any_label() -> None:
    asked = Asked()
    add(asked, "a", zone="east")
    add(asked, "b", zone="west")
    body = read(asked, "?label=zone")
    assert named(body, "groups", "group") == ["east", "west"]


def test_a_later_answer_has_only_changed_nodes() -> None:
    asked = Asked()
    add(asked, "a")
    add(asked, "b")
    version = read(asked)["version"]
    assert read(asked, f"?after={version}")["node"] == []
    add(asked, "b", version="2", used_gib=12)
    body = read(asked, f"?after={version}")
    assert (body["complete"], body["node"], body["used"]) == (False, ["b"], [50, -1])
    assert read(asked, f"?after={body['version']}")["node"] == []


def test_a_later_answer_includes_use_that_changed_within_the_reservation() -> None:
    asked = Asked()

    def report(version: str, used_gib: int) -> None:
        report = gpunode(
            shared("GPU-a", used_bytes=used_gib * GIB),
            name="a",
            version=version,
            reservations={"uid-p": reservation({"GPU-a": 12 * GIB}, name="p")},
            pods=[use("uid-p", "GPU-a", used_gib * GIB)],
            plugin=DISTRIBUTED,
        )
        asked.writer.apply([GPUNodeSeen(report, asked.now_s)])

    asked.writer.apply([NodeSeen(kube_node("a"))])
    report("1", 6)
    version = read(asked)["version"]
    report("2", 9)
    assert read(asked, f"?after={version}")["used"] == [38]


def test_all_nodes_are_listed_again_after_an_added_node_or_with_a_version_of_another_process() -> (
    None
):
    asked = Asked()
    add(asked, "a")
    version = read(asked)["version"]
    add(asked, "b")
    for after in (version, "other.1.1", version.rpartition(".")[0] + ".x"):
        body = read(asked, f"?after={after}")
        assert (body["complete"], body["node"]) == (True, ["a", "b"])


def test_cordoned_nodes_are_listed_until_they_are_uncordoned_or_deleted() -> None:
    asked = Asked()
    for name in "abc":
        node = msgspec.structs.replace(kube_node(name), spec=NodeSpec(unschedulable=True))
        asked.writer.apply([NodeSeen(node)])
    assert read(asked)["cordoned"] == ["a", "b", "c"]
    asked.writer.apply([NodeSeen(kube_node("a")), NodeGone("b")])
    assert read(asked)["cordoned"] == ["c"]


def test_stale_nodes_are_listed_even_without_another_change() -> None:
    asked = Asked()
    add(asked, "a")
    version = read(asked)["version"]
    asked.now_s = STALE_AFTER_S + 1
    assert read(asked, f"?after={version}")["stale"] == ["a"]


def test_the_answer_is_compressed_for_clients_that_accept_it() -> None:
    asked = Asked()
    for number in range(40):
        add(asked, f"n-{number}")
    plain = asked.get("/v1/map", {"Accept-Encoding": "identity"})
    packed = asked.get("/v1/map", {"Accept-Encoding": "gzip, br"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < len(plain.content) / 3
    assert packed.json()["node"] == plain.json()["node"]
