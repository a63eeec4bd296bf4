"""Tests binds to a node that another scheduler has filled after kube-scheduler chose the node."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from extender.ledger.bind_call import Bound, Declined
from extender.ledger.node_capacity import NodeCapacity
from headroom.contract.annotations import VRAM
from headroom.contract.kube import Container, ObjectMeta, Pod, PodSpec, ResourceRequirements
from headroom.contract.reasons import Reason
from headroom.core.rules.bound_pods import BoundPod
from headroom.errors import StoreTimeout
from tests.blocking import Ledger, now
from tests.ledger.stage import WALL_S, Stage, adopt, judge

NODE = {"cpu": "128", "memory": "1Ti", "pods": "110"}


def gpu_pod(name: str = "p", cpu: str = "100", scheduler: str = "headroom") -> Pod:
    metadata = ObjectMeta(
        namespace="a",
        name=name,
        uid=f"uid-{name}",
        resource_version="100",
        annotations={VRAM: "6"},
    )
    resources = ResourceRequirements(requests={"cpu": cpu})
    containers = [Container(name="main", resources=resources)]
    return Pod(metadata=metadata, spec=PodSpec(scheduler_name=scheduler, containers=containers))


def on_node(
    uid: str, cpu: str = "100", scheduler: str = "default-scheduler", started: bool = False
) -> BoundPod:
    content = {
        "metadata": {"uid": uid},
        "spec": {
            "schedulerName": scheduler,
            "containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}}}],
        },
        "status": {"startTime": "2026-11-28T12:00:00Z"} if started else {},
    }
    return msgspec.json.decode(msgspec.json.encode(content), type=BoundPod)


class Node:
    """The pods on node ``n``, and a ledger that lists the pods before each Binding."""

    def __init__(self, stage: Stage, allocatable: Mapping[str, str] | None = NODE) -> None:
        self.stage = stage
        self.pods: list[BoundPod] = []
        self.error: Exception | None = None
        self.lists = 0
        self.observes = False
        self.capacity = NodeCapacity(self._list, lambda node: allocatable)
        ids = iter(f"L-{number}" for number in range(1000))
        self.ledger = Ledger(
            stage.store,
            judge,
            adopt,
            stage.written.append,
            lambda: WALL_S,
            lambda: next(ids),
            observes=lambda: self.observes,
            capacity=self.capacity,
        )
        stage.store.delete_pod("a", "p")
        stage.store.admit(gpu_pod())

    async def _list(self, node: str) -> list[BoundPod]:
        assert node == "n"
        self.lists += 1
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self.pods

    def bind(self, pod: Pod | None = None) -> Any:
        return self.ledger.bind(self.stage.ask(pod or gpu_pod()))


@pytest.fixture
def node(stage: Stage) -> Node:
    return Node(stage)


def test_a_node_that_another_scheduler_has_filled_is_declined(node: Node) -> None:
    node.pods = [on_node("other")]
    assert node.bind() == Declined(Reason.NODE_FILLED)
    assert not node.stage.pod().node
    # No memory stays reserved for the declined pod, because kube-scheduler may choose another node
    # next.
    assert not node.stage.reserved
    node.pods = []
    assert node.bind() == Bound()
    assert node.stage.pod().node == "n"


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param([on_node("other", cpu="28")], id="it fits"),
        pytest.param([on_node("other", started=True)], id="kube-scheduler has counted the pod"),
        pytest.param([on_node("other", scheduler="headroom")], id="bound by its own scheduler"),
        pytest.param([on_node("uid-p")], id="the pod itself"),
    ],
)
def test_other_pods_do_not_prevent_the_bind(node: Node, pods: list[BoundPod]) -> None:
    node.pods = pods
    assert node.bind() == Bound()


def test_pods_accepted_by_the_kubelet_count_together_with_a_new_pod(node: Node) -> None:
    node.pods = [on_node("old", cpu="20", started=True), on_node("new", cpu="9")]
    assert node.bind() == Declined(Reason.NODE_FILLED)


def test_an_unknown_node_is_not_checked(stage: Stage) -> None:
    node = Node(stage, allocatable=None)
    node.pods = [on_node("other")]
    assert node.bind() == Bound()
    assert node.lists == 0


def test_mode_observe_binds_without_a_check(node: Node) -> None:
    node.observes, node.pods = True, [on_node("other")]
    assert node.bind() == Bound()
    assert node.lists == 0


def test_a_failed_list_is_repeated(node: Node) -> None:
    node.error = StoreTimeout("no answer")
    assert node.bind() == Bound()
    assert node.lists == 2


def test_pods_that_are_being_bound_count_for_later_ones(node: Node) -> None:
    """kube-scheduler has counted both pods, but not the pod of the other scheduler."""
    first, second = gpu_pod("first", cpu="60"), gpu_pod("second", cpu="60")
    node.pods = [on_node("other", cpu="10")]
    capacity = node.capacity
    with capacity.arriving(first, "n"), capacity.arriving(second, "n"):
        assert not now(capacity.exceeded(first, "n"))
        assert now(capacity.exceeded(second, "n"))
        # The first pod counts only once when the list shows it.
        node.pods.append(on_node("uid-first", cpu="58"))
        assert not now(capacity.exceeded(second, "n"))
    with capacity.arriving(second, "n"):
        node.pods.pop()
        assert not now(capacity.exceeded(second, "n"))


def test_a_bind_that_ends_does_not_drop_later_ones(node: Node) -> None:
    """kube-scheduler can repeat a bind while its first call still runs."""
    first, second, capacity = gpu_pod("first", cpu="60"), gpu_pod("second", cpu="60"), node.capacity
    node.pods = [on_node("other", cpu="10")]
    repeated, again = capacity.arriving(first, "n"), capacity.arriving(first, "n")
    repeated.__enter__()
    again.__enter__()
    repeated.__exit__(None, None, None)
    with capacity.arriving(gpu_pod("third", cpu="60"), "n"):
        again.__exit__(None, None, None)
        with capacity.arriving(second, "n"):
            assert now(capacity.exceeded(second, "n"))
