"""Checks that the console shows overuse as a cause of pending pods, and whether a pod will be
evicted.
"""

import numpy as np

from headroom.console.facts.device_occupants import blockers
from headroom.console.facts.suggestions import Suggestion, suggest
from headroom.console.views.explain import unnamed
from headroom.contract.kube import Pod
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.cluster.changes import Event
from headroom.core.placement.explain import explain
from headroom.core.placement.fit import fit
from headroom.core.placement.request import VramRequest
from headroom.core.rules.eligible_nodes import eligible_nodes, feasible
from tests.builders import DISTRIBUTED, GIB, gpunode, kube_node, pod, reservation, shared, use
from tests.console.test_devices import since
from tests.console.test_suggestions import asked, explained, kinds


def leaking_node(leaks: int, other: int = 12) -> list[Event]:
    """Return the events of a node with one 24 GiB GPU. Pod leaky uses more than its reservation of
    4 GiB, and pod other uses nothing.
    """
    held = {
        f"u-{who}": since(reservation({"GPU-a": gib * GIB}, name=who))
        for who, gib in (("leaky", 4), ("other", other))
    }
    rows = [
        use("u-leaky", "GPU-a", leaks * GIB, replica="GPU-a::0", namespace="default", name="leaky"),
        use("u-other", "GPU-a", 0, replica="GPU-a::1", namespace="default", name="other"),
    ]
    report = gpunode(
        shared("GPU-a", free=2, allocated=2, used_bytes=leaks * GIB),
        name="a",
        reservations=held,
        pods=rows,
        plugin=DISTRIBUTED,
    )
    pods = [
        PodSeen(pod(f"{gib}Gi", uid=f"u-{who}", name=who, node="a", phase="Running"))
        for who, gib in (("leaky", 4), ("other", other))
    ]
    return [NodeSeen(kube_node("a")), *pods, GPUNodeSeen(report, 0.0)]


def test_overuse_is_reported_as_the_cause_if_the_pod_would_fit_without_it() -> None:
    waits = pod("8Gi", uid="uw", name="waits")
    body = explained(asked(*leaking_node(5), waits=waits))  # 7 GiB are free.
    (over,) = (one for one in body["advice"] if one["kind"] == "overuse")  # type: ignore[attr-defined]
    assert over["sentence"] == (
        "limit pod default/leaky on node a, which uses 1.0 GiB more than it reserved: without "
        "this overuse, the pod fits there (kubectl headroom top pod shows whether it is evicted)"
    )
    assert (over["node"], over["wait_for"]["name"]) == ("a", "leaky")
    assert explained(asked(*leaking_node(4), waits=waits))["verdict"] == "fits"


def test_overuse_is_not_the_cause_if_the_pod_would_not_fit_without_it() -> None:
    body = explained(asked(*leaking_node(5), waits=pod("9Gi", uid="uw", name="waits")))
    assert body["verdict"] == "rejected"
    assert "overuse" not in kinds(body)


def test_why_and_the_node_show_whether_an_overusing_pod_is_evicted() -> None:
    fleet = asked(*leaking_node(13))
    body = fleet.get("/v1/explain?pod=default/leaky").json()
    (over,) = body["overuse"]
    assert body["message"] == "bound to node a, and uses more memory than it reserved"
    assert (over["outcome"], over["used_bytes"], over["reserved_bytes"]) == (
        "protected",
        13 * GIB,
        4 * GIB,
    )
    assert over["decided_at"] is None
    assert fleet.get("/v1/nodes").json()["nodes"][0]["overuse"] == [over]
    other = fleet.get("/v1/explain?pod=default/other").json()
    assert (other["overuse"], other["message"]) == ([], "bound to node a")
    assert explained(fleet)["overuse"] == []


def test_a_caller_who_may_not_read_the_overusing_pod_does_not_get_its_name() -> None:
    waits = pod("8Gi", uid="uw", name="waits")
    (advice,) = suggested(waits)
    hidden = unnamed(advice, lambda namespace, name: False)
    assert hidden.sentence == (
        "pods on node a that you may not read use more than they reserved: without this overuse, "
        "the pod fits there"
    )
    assert hidden.held is None
    assert unnamed(advice, lambda namespace, name: True) == advice


def suggested(waits: Pod) -> list[Suggestion]:
    """Return the suggestions about overuse for a pending pod."""
    fleet = asked(*leaking_node(5), waits=waits)
    snap = fleet.cluster.snapshot()
    request = fleet.cluster.understand(waits)
    assert isinstance(request, VramRequest)
    verdicts = fit(request, snap, np.arange(1), 0.0)
    explanation = explain(verdicts, fleet.cluster.rules.weights)
    blocking = [blockers(fleet.cluster, verdicts, each) for each in explanation.nearest]
    where = feasible(waits, eligible_nodes(waits, snap, fleet.cluster.node), verdicts, None)
    found = suggest(fleet.cluster, waits, verdicts, explanation, blocking, where)
    return [each for each in found if each.kind == "overuse"]
