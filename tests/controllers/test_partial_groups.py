"""Tests the eviction of the bound pods of incomplete groups. The checks read only the API
server.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from extender.event_recorder import EventRecorder
from extender.groups.controller import PartialGroupsController
from extender.ledger.store import Store
from extender.metrics import Telemetry
from headroom.contract.kube import OwnerReference, Pod, SchedulingGate, SchedulingGroup
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodGone, PodSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.notices import Notice
from headroom.core.groups.membership import Group
from headroom.core.groups.partial import Members
from headroom.core.placement.policy import Rules
from headroom.errors import StoreConflict, StoreError, StoreNotFound, StoreRejected
from tests.builders import GIB, gpunode, kube_node, pod, reservation, shared
from tests.examples import examples

AFTER_S = 60.0
JOB = OwnerReference(api_version="batch/v1", kind="Job", name="job", uid="job", controller=True)


class Api:
    """A fake API server with pods and groups, and the extenders that follow it."""

    def __init__(self, minimums: Mapping[str, int], replicas: int = 1) -> None:
        self.minimums = dict(minimums)
        self.now_s = 1000.0
        self.pods: dict[str, Pod] = {}
        self.evicted: list[str] = []
        self.posted: list[Notice] = []
        #: Pods whose eviction is rejected.
        self.protected: set[str] = set()
        #: This method is called when the API server has answered the dry run of an eviction.
        self.asked: Callable[[], None] = lambda: None
        self._versions = itertools.count(1)
        self.telemetry = Telemetry(CollectorRegistry())
        self.states = [ClusterWriter(Rules(), 1e12, 0.0) for _ in range(replicas)]
        self.controllers = [
            PartialGroupsController(
                state.cluster,
                cast(Store, self),
                self,
                self,
                self.telemetry,
                EventRecorder(self._post, self.telemetry),
                lambda: self.now_s,
            )
            for state in self.states
        ]

    def _post(self, notice: Notice) -> bool:
        self.posted.append(notice)
        return True

    def put(self, name: str, node: str = "", group: str = "g", **changes: object) -> None:
        """Create or replace a pod. ``changes`` are passed to ``member``."""
        made = replace(member(name, node, group, **changes))
        version = str(next(self._versions))
        metadata = replace(made.metadata, resource_version=version)
        self.pods[name] = replace(made, metadata=metadata)
        for state in self.states:
            state.apply([PodSeen(self.pods[name])])

    def delete(self, name: str) -> None:
        del self.pods[name]
        for state in self.states:
            state.apply([PodGone(name)])

    def round(self, after_s: float | None = AFTER_S) -> list[str]:
        """Run a check on all replicas at the same time. Return the evicted pods."""
        before = len(self.evicted)

        async def once() -> None:
            await asyncio.gather(*(each.once(after_s) for each in self.controllers))

        asyncio.run(once())
        return sorted(self.evicted[before:])

    def later(self, seconds: float = AFTER_S) -> list[str]:
        self.now_s += seconds
        return self.round()

    # The controller calls the methods below.

    async def read(self, group: Group) -> Members:
        await asyncio.sleep(0)
        spec = {name: each.spec.scheduling_group for name, each in self.pods.items()}
        named = [n for n, of in spec.items() if of is not None and of.pod_group_name == group.name]
        return Members(self.minimums.get(group.name), [self.pods[name] for name in named])

    async def read_pod(self, namespace: str, name: str) -> Pod | None:
        await asyncio.sleep(0)
        return self.pods.get(name)

    async def may_evict(self, pod: Pod) -> None:
        self._evict(pod)
        self.asked()

    async def evict(self, pod: Pod, most_grace_s: int | None = None) -> None:
        assert most_grace_s is None
        self._evict(pod)
        name = pod.metadata.name
        self.evicted.append(name)
        self.delete(name)

    def _evict(self, pod: Pod) -> None:
        held = self.pods.get(pod.metadata.name)
        if held is None:
            raise StoreNotFound(pod.metadata.name)
        if held.metadata != pod.metadata:
            raise StoreConflict(pod.metadata.name)
        if pod.metadata.name in self.protected:
            raise StoreRejected("Cannot evict pod as it would violate the pod's disruption budget.")


def member(
    name: str,
    node: str = "",
    group: str = "g",
    owned: bool = True,
    gated: bool = False,
    **of: object,
) -> Pod:
    made = pod("12Gi", uid=name, name=name, node=node or None, **of)  # type: ignore[arg-type]
    owners = [JOB] if owned else None
    gates = [SchedulingGate("later")] if gated else None
    spec = replace(
        made.spec,
        scheduling_group=SchedulingGroup(pod_group_name=group) if group else None,
        scheduling_gates=gates,
    )
    return replace(made, metadata=replace(made.metadata, owner_references=owners), spec=spec)


def half(minimum: int | None = 4, replicas: int = 1, **last: object) -> Api:
    """Return a cluster in which three pods of the group are bound and the last pod is not."""
    api = Api({} if minimum is None else {"g": minimum}, replicas)
    for i in range(3):
        api.put(f"g-{i}", f"n{i}")
    api.put("g-3", **last)
    return api


def test_the_bound_pods_of_an_incomplete_group_are_evicted_together() -> None:
    api = half()
    assert api.round() == []
    assert api.later(AFTER_S - 0.1) == []
    assert api.later(0.1) == ["g-0", "g-1", "g-2"]
    assert {(each.about.name, each.reason) for each in api.posted} == {
        (f"g-{i}", "EvictedWithGroup") for i in range(3)
    }
    assert {each.message for each in api.posted} == {
        "Only 3 of the 4 pods that group g needs are bound, and the others do not get a node. The "
        "bound pods were evicted together, because they held GPU memory that they could not use."
    }
    assert api.telemetry.evictions.labels("evicted")._value.get() == 3
    assert api.later() == []


@pytest.mark.parametrize(
    "api",
    [
        pytest.param(half(3), id="it has its minimum"),
        pytest.param(half(None), id="no minimum"),
        pytest.param(half(node="n3"), id="completely bound"),
        pytest.param(half(4, gated=True), id="the other pod is gated"),
        pytest.param(half(4, deleted="2026-11-21T00:00:00Z"), id="the other pod is deleted"),
        pytest.param(half(5, node="n3", phase="Failed"), id="no pod waits"),
        pytest.param(half(4, group=""), id="the other pod is in no group"),
    ],
)
def test_no_pod_of_these_groups_is_evicted(api: Api) -> None:
    api.round()
    assert api.later() == []


def test_successfully_ended_and_terminating_pods_count_as_bound() -> None:
    for changes in ({"phase": "Succeeded"}, {"deleted": "2026-11-21T00:00:00Z"}):
        api = half(5)
        api.put("g-4", "n4", **changes)
        api.put("g-5", "n5")
        api.round()
        assert api.later() == []
        api.put("g-4", "n4", phase="Failed")
        api.round()
        assert api.later() == ["g-0", "g-1", "g-2", "g-5"]


def test_pods_without_a_gpu_request_count() -> None:
    """The controller reads these pods from the API server, because the extender does not follow
    them.
    """
    api = half()
    launcher = member("launcher", "n0")
    api.pods["launcher"] = replace(launcher, spec=replace(launcher.spec, containers=[]))
    api.round()
    assert api.later() == []


def test_a_pod_without_a_controller_keeps_its_group() -> None:
    api = half()
    api.put("g-1", "n1", owned=False)
    api.round()
    assert api.later() == []


def test_without_the_setting_no_pod_is_evicted() -> None:
    api = half()
    for _ in range(2):
        assert api.round(None) == []
        api.now_s += 10 * AFTER_S
    # The time starts when the setting is set.
    assert api.round() == []
    assert api.later(AFTER_S - 0.1) == []


def test_a_budget_protects_the_whole_group() -> None:
    api = half()
    api.protected = {"g-2"}
    api.round()
    assert api.later() == []
    assert api.telemetry.evictions.labels("rejected")._value.get() == 1
    api.protected = set()
    assert api.later(AFTER_S - 0.1) == []
    assert api.later(0.1) == ["g-0", "g-1", "g-2"]


def test_a_pod_that_is_bound_at_the_last_moment_keeps_its_group() -> None:
    api = half()
    api.asked = lambda: api.put("g-3", "n3")
    api.round()
    assert api.later() == []


def test_each_further_bind_and_reservation_restarts_the_time() -> None:
    api = half(6)
    api.put("g-4")
    api.put("g-5")
    api.round()
    assert api.later(50) == []
    api.put("g-3", "n3")
    assert api.later(50) == []
    held = gpunode(shared("A"), reservations={"g-4": reservation({"A": 12 * GIB})})
    for state in api.states:  # Another extender has begun to bind this pod.
        state.apply([NodeSeen(kube_node()), GPUNodeSeen(held, api.now_s)])
    assert api.later(50) == []
    assert api.later(50) == []
    assert api.later(10) == ["g-0", "g-1", "g-2", "g-3"]


def test_a_group_that_loses_a_pod_gets_no_additional_time() -> None:
    api = half(5)
    api.put("g-4", "n4")
    api.put("g-5")
    api.round()
    api.put("g-4", "n4", phase="Failed")
    assert api.later() == ["g-0", "g-1", "g-2"]


def test_each_pod_is_evicted_by_only_one_of_two_replicas() -> None:
    api = half(replicas=2)
    api.round()
    assert api.later() == ["g-0", "g-1", "g-2"]
    assert len(api.posted) == 3


def test_one_group_is_evicted_at_a_time() -> None:
    """The other groups may fit into the freed memory. The group with the lowest priority is evicted
    first, and among equal priorities the youngest group.
    """
    api = Api(dict.fromkeys(("old", "young", "important"), 2))
    for group, created, priority in (
        ("old", "2026-11-21T00:00:00Z", 0),
        ("young", "2026-11-22T00:00:00Z", 0),
        ("important", "2026-11-23T00:00:00Z", 5),
    ):
        for i, node in enumerate(("n", "")):
            api.put(f"{group}-{i}", node, group, created=created, priority=priority)
    api.round()
    assert api.later() == ["young-0"]
    assert api.later(AFTER_S - 0.1) == []
    assert api.later(0.1) == ["old-0"]
    assert api.later() == ["important-0"]


def test_an_error_of_the_api_server_evicts_no_pod() -> None:
    api = half()

    async def fails(group: Group) -> Members:
        raise StoreError("no answer")

    api.read = fails  # type: ignore[method-assign]
    api.round()
    assert api.later() == []


STATES = st.sampled_from(["waits", "bound", "bound", "ended", "failed", "ending", "alone", "gated"])


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.lists(STATES, min_size=1, max_size=6)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 2),
    st.randoms(use_true_random=False),
)
def test_exactly_the_groups_below_their_minimum_are_evicted(
    drawn: list[tuple[int, list[str]]], replicas: int, chance: random.Random
) -> None:
    api = Api({f"g{i}": minimum for i, (minimum, _) in enumerate(drawn)}, replicas)
    for i, (_, states) in enumerate(drawn):
        for n, state in enumerate(states):
            create(api, f"g{i}", f"g{i}-{n}", state)
    for _ in range(12):
        before = {f"g{i}": evictable(api, f"g{i}") for i in range(len(drawn))}
        evicted = api.later(chance.choice([0, 30, AFTER_S]))
        # The replicas may have chosen different groups.
        for group in {name.split("-")[0] for name in evicted}:
            assert before[group], group
            assert [name for name in evicted if name.split("-")[0] == group] == before[group]
        if chance.random() < 0.5 and (waits := [n for n, p in api.pods.items() if not p.node]):
            name = chance.choice(waits)
            api.put(name, "n", name.split("-")[0])
    for _ in range(2 * len(drawn) + 2):
        api.later()
    assert not any(evictable(api, f"g{i}") for i in range(len(drawn)))


def create(api: Api, group: str, name: str, state: str) -> None:
    node = "" if state in ("waits", "gated") else "n"
    phase = {"ended": "Succeeded", "failed": "Failed"}.get(state, "Running" if node else "Pending")
    deleted = "2026-11-21T00:00:00Z" if state == "ending" else None
    owned, gated = state != "alone", state == "gated"
    api.put(name, node, group, owned=owned, gated=gated, phase=phase, deleted=deleted)


def evictable(api: Api, group: str) -> list[str]:
    """Return the pods of the group that must be evicted according to the API server's objects."""
    pods = {name: each for name, each in api.pods.items() if name.startswith(f"{group}-")}
    there = [n for n, p in pods.items() if p.node and p.status and p.status.phase != "Failed"]
    run = [
        name
        for name in there
        if (at := pods[name].status) is not None
        and at.phase != "Succeeded"
        and pods[name].metadata.deletion_timestamp is None
    ]
    waits = [n for n, p in pods.items() if not p.node and not p.spec.scheduling_gates]
    short = len(there) < api.minimums[group]
    owned = all(pods[name].metadata.owner_references for name in run)
    return sorted(run) if short and waits and owned else []
