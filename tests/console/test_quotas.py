"""Tests /v1/quotas, which shows hard, used and reserved memory of each quota."""

from headroom.contract.kube import ObjectMeta
from headroom.core.rules.pod_requests import QuotaStatus, ResourceQuota
from tests.builders import GIB, NOW_S
from tests.console.asking import Asked
from tests.state.evictions import On
from tests.state.test_defrag import node, world

COUNTED, MIRROR = "requests.headroom.gpu/vram-bytes", "requests.headroom.gpu/vram"


def quota(name: str, hard: dict[str, str], used: dict[str, str], of: str) -> ResourceQuota:
    metadata = ObjectMeta(name=name, namespace=of)
    return ResourceQuota(metadata=metadata, status=QuotaStatus(hard=hard, used=used))


QUOTAS = [
    quota("z", {COUNTED: "64Gi", "pods": "4"}, {COUNTED: "12Gi", "pods": "2"}, "default"),
    quota("a", {MIRROR: "2048"}, {}, "default"),
    quota("b", {"requests.nvidia.com/gpu": "4"}, {}, "default"),
    quota("c", {COUNTED: "1k"}, {COUNTED: "1k"}, "ml"),
]


def test_quotas_of_gpu_memory_are_listed_with_the_sum_of_reservations() -> None:
    asked_for: list[str] = []

    def read(namespace: str) -> list[ResourceQuota]:
        asked_for.append(namespace)
        return [each for each in QUOTAS if namespace in ("", each.metadata.namespace)]

    asked = Asked(NOW_S, world(node("n", [On("one", 8)], [On("two", 4)])), quotas=read)
    rows = [
        (row["namespace"], row["name"], row["hard_bytes"], row["used_bytes"], row["reserved_bytes"])
        for row in asked.get("/v1/quotas").json()["quotas"]
    ]
    assert rows == [
        ("default", "a", 2 * GIB, 0, 12 * GIB),
        ("default", "z", 64 * GIB, 12 * GIB, 12 * GIB),
        ("ml", "c", 1000, 1000, 0),
    ]
    found = asked.get("/v1/quotas?namespace=ml").json()["quotas"]
    assert [(row["name"], row["resource"]) for row in found] == [("c", COUNTED)]
    assert asked_for == ["", "ml"]


def test_unreadable_quotas_are_an_error() -> None:
    answer = Asked(NOW_S, quotas=lambda namespace: None).get("/v1/quotas")
    assert (answer.status_code, answer.json()["detail"]) == (
        503,
        "the ResourceQuotas cannot be read: see the log of the console",
    )
