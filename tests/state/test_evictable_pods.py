"""Tests which pods may be evicted for a pod of higher priority. Their authors cannot exempt
them.
"""

from typing import Any

import msgspec
import pytest

from headroom.contract.kube import OwnerReference
from headroom.core.preemption.evictable_pods import is_evictable
from tests.builders import pod

PREEMPTOR = pod(uid="boss", priority=1_000_000)


@pytest.mark.parametrize(
    "wrote",
    [
        pytest.param(
            {"owner_references": [OwnerReference("x.example/v1", "Node", "n", "u")]},
            id="an owner of kind Node",
        ),
        pytest.param(
            {"owner_references": [OwnerReference("v1", "Node", "n", "n", True)]},
            id="the owner of a static pod",
        ),
        pytest.param({"annotations": {"headroom.gpu/on-overuse": "report"}}, id="on-overuse"),
        pytest.param({"finalizers": ["team/keep"]}, id="a finalizer"),
        pytest.param({"labels": {"app": "x"}}, id="a label"),
    ],
)
def test_metadata_that_a_pods_author_writes_does_not_exempt_it(wrote: dict[str, Any]) -> None:
    plain = pod(uid="p")
    metadata = msgspec.structs.replace(plain.metadata, **wrote)
    assert is_evictable(msgspec.structs.replace(plain, metadata=metadata), PREEMPTOR)


def test_a_static_pod_is_exempt() -> None:
    static = pod(uid="p", annotations={"kubernetes.io/config.mirror": "x"})
    assert not is_evictable(static, PREEMPTOR)


@pytest.mark.parametrize(("priority", "evictable"), [(999_999, True), (1_000_000, False)])
def test_only_a_pod_of_lower_priority_is_evicted(priority: int, evictable: bool) -> None:
    assert is_evictable(pod(uid="p", priority=priority), PREEMPTOR) is evictable
