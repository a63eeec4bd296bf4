"""Tests /v1/teams, which sums memory by namespace and owner, sorted by unused memory."""

from typing import Any

import msgspec

from headroom.contract.kube import OwnerReference, Pod
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from tests.builders import GIB, gpunode, kube_node, pod, reservation, shared, use
from tests.console.asking import Asked


def owned(name: str, namespace: str, owner: str, node: str | None = None) -> Pod:
    of = pod("1Gi", uid=f"u-{name}", name=name, namespace=namespace, node=node)
    references = [OwnerReference("apps/v1", "StatefulSet", owner, controller=True)]
    metadata = msgspec.structs.replace(of.metadata, owner_references=references)
    return msgspec.structs.replace(of, metadata=metadata)


#: The namespace, the owner, and the reserved, used and peak GiB of each pod.
PODS: dict[str, tuple[str, str, int, int | None, int]] = {
    "a-0": ("ml", "a", 8, 2, 3),
    "a-1": ("ml", "a", 8, 9, 9),
    "b-0": ("ml", "b", 6, 5, 5),
    "c-0": ("web", "c", 4, None, 0),
}


def read(query: str = "") -> dict[str, Any]:
    asked = Asked()
    devices = [shared(f"GPU-{name}", number) for number, name in enumerate(PODS)]
    held = {
        f"u-{name}": msgspec.structs.replace(
            reservation({f"GPU-{name}": reserved * GIB}, name=name), namespace=namespace
        )
        for name, (namespace, _, reserved, _, _) in PODS.items()
    }
    rows = [
        use(
            f"u-{name}",
            f"GPU-{name}",
            None if used is None else used * GIB,
            namespace=namespace,
            name=name,
            replica=f"GPU-{name}::0",
            peak_bytes=peak * GIB,
        )
        for name, (namespace, _, _, used, peak) in PODS.items()
    ]
    bound = [owned(name, each[0], each[1], "n") for name, each in PODS.items()]
    waiting = [owned(f"b-{number}", "ml", "b") for number in (1, 2)]
    asked.writer.apply(
        [
            NodeSeen(kube_node("n")),
            *map(PodSeen, [*bound, *waiting]),
            GPUNodeSeen(gpunode(*devices, name="n", reservations=held, pods=rows), 0.0),
        ]
    )
    answer = asked.get(f"/v1/teams{query}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def sums(each: dict[str, Any]) -> dict[str, int]:
    return {key.removesuffix("_bytes"): value // GIB if key.endswith("_bytes") else value
            for key, value in each.items() if isinstance(value, int)}  # fmt: skip


def test_owners_are_sorted_by_unused_memory() -> None:
    body = read()
    owners = [(each["namespace"], each["kind"], each["name"]) for each in body["owners"]]
    assert owners == [
        ("ml", "StatefulSet", "a"),
        ("ml", "StatefulSet", "b"),
        ("web", "StatefulSet", "c"),
    ]
    a, b, c = map(sums, body["owners"])
    # The overuse of a-1 does not reduce the unused memory of a-0.
    assert a == {
        **{
            "pods": 2,
            "waiting_pods": 0,
            "waiting": 0,
            "reserved": 16,
            "used": 11,
            "peak": 12,
            "unused": 6,
        },
        **{"overuse": 1, "unmeasured_pods": 0},
    }
    assert (b["pods"], b["waiting_pods"], b["waiting"], b["unused"]) == (1, 2, 2, 1)
    assert (c["reserved"], c["used"], c["unused"], c["unmeasured_pods"]) == (4, 0, 0, 1)


def test_namespaces_have_the_sums_of_their_owners() -> None:
    ml, web = map(sums, read()["teams"])
    assert (ml["pods"], ml["waiting_pods"], ml["reserved"], ml["unused"]) == (3, 2, 22, 7)
    assert (web["pods"], web["reserved"]) == (1, 4)


def test_owners_can_be_limited_to_a_namespace_and_a_number() -> None:
    body = read("?namespace=ml&limit=1")
    assert (body["matching"], [each["name"] for each in body["owners"]]) == (2, ["a"])
