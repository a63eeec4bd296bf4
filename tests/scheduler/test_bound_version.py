"""Checks that bind uses the version of the pod that filter decided about. If the watch has this
version, bind uses the watched copy.
"""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from extender.ledger.bind_call import BindRequest, Bound, Outcome
from headroom.contract.kube import Pod
from headroom.contract.watched import PodSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.policy import Rules
from tests.builders import DISTRIBUTED, NOW_S
from tests.scheduler.verbs_on import verbs_on
from tests.serving import binding, offer, pod
from tests.state.evictions import full_node
from tests.state.states import EPOCH_S, STALE_AFTER_S


class Recording:
    """A ledger that binds every pod and records the bind requests."""

    def __init__(self) -> None:
        self.asked: list[BindRequest] = []

    async def bind(self, ask: BindRequest) -> Outcome:
        self.asked.append(ask)
        return Bound()


def bound(watched: dict[str, Any], *filtered: dict[str, Any]) -> Pod | None:
    """Bind a pod after these filter calls. Return the pod that the ledger gets."""
    cluster, ledger = ClusterWriter(Rules(), STALE_AFTER_S, EPOCH_S), Recording()
    cluster.apply(full_node("n", plugin=DISTRIBUTED))
    cluster.apply([PodSeen(msgspec.convert(watched, Pod))])
    verbs = verbs_on(cluster, lambda: NOW_S, ledger, epoch_s=EPOCH_S)
    for each in filtered:
        verbs.filter(json.dumps(offer(each, "n")).encode())
    answer = asyncio.run(verbs.bind(json.dumps(binding(watched, "n")).encode()))
    assert json.loads(answer) == {"Error": ""}
    (ask,) = ledger.asked
    return ask.pod


@pytest.mark.parametrize(
    ("watched", "filtered", "used"),
    [
        pytest.param(("8Gi", "1"), [], "8Gi", id="no call of filter"),
        pytest.param(("8Gi", "1"), [("1Gi", "1")], "8Gi", id="a forged copy of the version"),
        pytest.param(("8Gi", "1"), [("4Gi", "2")], "4Gi", id="the watch is late"),
        pytest.param(("8Gi", "2"), [("4Gi", "1")], "4Gi", id="the pod changed after filter"),
    ],
)
def test_bind_reserves_memory_for_the_version_that_filter_decided_about(
    watched: tuple[str, str], filtered: list[tuple[str, str]], used: str
) -> None:
    versions = [pod("p", vram, version=version) for vram, version in filtered]
    found = bound(pod("p", watched[0], version=watched[1]), *versions)
    assert found is not None
    assert found.annotation("headroom.gpu/vram") == used
