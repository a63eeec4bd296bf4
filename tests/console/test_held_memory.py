"""Checks that views count memory that is held for unbound pods in the same way as filter.

The clusters are random and have nominations, assumed binds and groups. Filter computes the expected
results.
"""

import json
from collections.abc import Sequence
from typing import Any

import hypothesis
import msgspec
from hypothesis import strategies as st

from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Pod, PodStatus
from headroom.contract.watched import GPUNodeSeen, PodGone, PodSeen
from headroom.core.cluster.changes import Event
from headroom.core.groups.membership import POD_GROUP
from headroom.core.placement.request import VramRequest
from tests.builders import GIB, pod, reservation
from tests.console.asking import Asked
from tests.console.explained import node, owned
from tests.examples import examples
from tests.scheduler.verbs_on import verbs_on

NODES = ("a", "b")
SIZES = st.sampled_from([1, 2, 5, 8, 11, 16, 22])
KINDS = ("nominated", "assumed", "grouped")


def waiting(name: str, gib: int, priority: int = 0, **status: Any) -> Pod:
    made = pod(f"{gib}Gi", uid=f"u-{name}", name=name, priority=priority)
    return msgspec.structs.replace(made, status=PodStatus(phase="Pending", **status))


def of_revision(of: Pod, revision: str) -> Pod:
    return owned(of, "ReplicaSet", f"llm-{revision}", **{"pod-template-hash": revision})


class Cluster:
    """A cluster of nodes with one 24 GiB GPU. Filter and the views use the same state."""

    def __init__(self, sizes: Sequence[Sequence[int]]) -> None:
        self.fleet = Asked()
        for name, on_node in zip(NODES, sizes, strict=True):
            pods = {f"{name}-{n}": gib for n, gib in enumerate(on_node)}
            self.apply(*node(name, free=3, **pods))
        self.verbs = verbs_on(self.fleet.writer, lambda: self.fleet.now_s)

    def apply(self, *events: Event) -> None:
        self.fleet.writer.apply(events)

    def hold(self, kind: str, name: str, gib: int, priority: int, on: str) -> None:
        """Hold memory of a node for a pod with a nomination or an assumed bind."""
        nominated = on if kind == "nominated" else None
        held = waiting(name, gib, priority, nominated_node_name=nominated)
        if kind == "grouped":
            metadata = msgspec.structs.replace(held.metadata, labels={POD_GROUP: "group"})
            held = msgspec.structs.replace(held, metadata=metadata)
        self.apply(PodSeen(held))
        if kind != "nominated":
            request = self.fleet.cluster.understand(held)
            assert isinstance(request, VramRequest)
            self.fleet.writer.parts.calls.assumed.assume(held, request, on, self.fleet.now_s)

    def filter(self, asked: Pod) -> tuple[set[str], dict[str, str]]:
        """Return the nodes that pass filter, and the reasons for the other nodes. Remove the
        assumed bind that filter records.
        """
        body = {"Pod": msgspec.to_builtins(asked), "NodeNames": list(NODES)}
        answer = json.loads(self.verbs.filter(json.dumps(body).encode()))
        self.fleet.writer.parts.calls.assumed.forget(asked.metadata.uid)
        assert not answer.get("Error"), answer
        return set(answer["NodeNames"]), {
            **answer["FailedNodes"],
            **answer["FailedAndUnresolvableNodes"],
        }

    def get(self, path: str) -> dict[str, Any]:
        answer = self.fleet.get(path)
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def end(self, uid: str) -> None:
        """Remove a running pod with its reservation, its rows and its memory."""
        for gpunode in self.fleet.cluster.gpunodes():
            assert gpunode.status is not None
            rest = {u: r for u, r in gpunode.spec.reservations.items() if u != uid}
            rows = [each for each in gpunode.status.pods if each.uid != uid]
            self.apply(GPUNodeSeen(_with(gpunode, rest, rows), self.fleet.now_s))
        self.apply(PodGone(uid, ended=True))


def _with(gpunode: GPUNode, reservations: Any, rows: Any) -> GPUNode:
    assert gpunode.status is not None
    (device,) = gpunode.status.devices
    replicas = msgspec.structs.replace(
        device.replicas,
        free=device.replicas.free + device.replicas.allocated - len(rows),
        allocated=len(rows),
    )
    status = msgspec.structs.replace(
        gpunode.status,
        pods=rows,
        devices=[msgspec.structs.replace(device, replicas=replicas)],
    )
    metadata = msgspec.structs.replace(
        gpunode.metadata, resource_version=str(int(gpunode.metadata.resource_version) + 1)
    )
    spec = msgspec.structs.replace(gpunode.spec, reservations=reservations)
    return GPUNode(metadata=metadata, spec=spec, status=status)


HOLDS = st.lists(
    st.tuples(st.sampled_from(KINDS), SIZES, st.sampled_from([-1, 0, 5]), st.sampled_from(NODES)),
    max_size=3,
)
ON_NODE = st.lists(SIZES, max_size=3).filter(lambda sizes: sum(sizes) <= 24)


@hypothesis.settings(max_examples=examples(40), deadline=None)
@hypothesis.given(ON_NODE, ON_NODE, HOLDS, SIZES, st.sampled_from([0, 5]))
def test_views_agree_with_filter_and_a_pod_that_follows_a_suggestion_passes_filter(
    on_a: list[int],
    on_b: list[int],
    holds: list[tuple[str, int, int, str]],
    gib: int,
    priority: int,
) -> None:
    cluster = Cluster([on_a, on_b])
    for number, (kind, held_gib, held_priority, on) in enumerate(holds):
        cluster.hold(kind, f"held-{number}", held_gib, held_priority, on)
    asked = waiting("asked", gib, priority)
    cluster.apply(PodSeen(asked))

    explained = cluster.get("/v1/explain?pod=default/asked")
    live = {n: cluster.get(f"/v1/score?pod=default/asked&node={n}")["live"] for n in NODES}
    views = {each["name"]: each for each in cluster.get("/v1/pending")["pods"]}
    capacity = cluster.get(f"/v1/capacity?vram={gib}Gi")
    whatif = cluster.fleet.post("/v1/whatif", {"pods": [{"vram": f"{gib}Gi"}]}).json()
    passed, reasons = cluster.filter(asked)
    fits_plain = bool(cluster.filter(waiting("plain", gib))[0])

    assert explained["verdict"] == ("fits" if passed else "rejected")
    assert explained["fits"] == views["asked"]["fits"] == len(passed)
    shown = {each["node"]: each["message"] for each in explained["nearest"] if not each["fits"]}
    assert shown == reasons
    for name, score in live.items():
        assert score["node"]["fits"] == (name in passed)
        assert [each["message"] for each in score["failing"]][:1] == [
            reasons[name] for _ in range(name in reasons)
        ]
    assert (capacity["pods"] > 0, whatif["placed"]) == (fits_plain, int(fits_plain))

    assert not (passed and explained["advice"])
    for advice in explained["advice"]:
        match advice["kind"]:
            case "lower":
                lower_gib = advice["lower_to_bytes"] // GIB
                assert cluster.filter(waiting("lower", lower_gib, priority))[0], advice
            case "wait":
                uid = advice["wait_for"]["uid"]
                cluster.end(uid)
                assert cluster.filter(asked)[0], advice
                break
            case kind:
                assert kind == "replicas", advice


def test_a_pods_own_reservation_does_not_count_against_it_in_views() -> None:
    """The bind of the pod has not finished. For other pods, the memory counts as reserved."""
    cluster = Cluster([[], [22]])
    asked = waiting("asked", 20)
    gpunode = cluster.fleet.cluster.gpunode("a")
    assert gpunode is not None
    assert gpunode.status is not None
    (device,) = gpunode.status.devices
    own = {"u-asked": reservation({device.uuid: 20 * GIB}, name="asked")}
    cluster.apply(PodSeen(asked), PodSeen(waiting("other", 20)))
    cluster.apply(GPUNodeSeen(_with(gpunode, own, []), cluster.fleet.now_s))
    for name, fits in (("asked", 1), ("other", 0)):
        explained = cluster.get(f"/v1/explain?pod=default/{name}")
        assert explained["fits"] == fits
        score = cluster.get(f"/v1/score?pod=default/{name}&node=a")["live"]
        assert score["node"]["fits"] == bool(fits)
        pods = {each["name"]: each for each in cluster.get("/v1/pending")["pods"]}
        assert pods[name]["fits"] == fits
    assert cluster.filter(asked)[0] == {"a"}


@hypothesis.settings(max_examples=examples(300), deadline=None)
@hypothesis.given(ON_NODE.filter(bool), HOLDS.filter(bool), SIZES)
def test_a_pod_passes_filter_after_the_suggested_old_pods_have_ended(
    sizes: list[int], holds: list[tuple[str, int, int, str]], gib: int
) -> None:
    asked = of_revision(waiting("asked", gib), "bbb")

    def without(*ended: str) -> Cluster:
        cluster = Cluster([sizes, [22]])
        for running in list(cluster.fleet.cluster.pods()):
            if running.node == "a":
                cluster.apply(PodSeen(of_revision(running, "aaa")))
        for number, (kind, held_gib, priority, _) in enumerate(holds):
            cluster.hold(kind, f"held-{number}", held_gib, priority, "a")
        cluster.apply(PodSeen(asked))
        for uid in ended:
            cluster.end(uid)
        return cluster

    old = [f"u-a-{number}" for number in range(len(sizes))]
    for advice in without().get("/v1/explain?pod=default/asked")["advice"]:
        if advice["kind"] == "rollout":
            all_end = "Recreate in" in advice["sentence"]
            ways = [old] if all_end else [[uid] for uid in old]
            assert any(without(*ended).filter(asked)[0] for ended in ways), advice


def test_the_pod_for_which_memory_is_held_is_reported_with_the_end_of_the_hold() -> None:
    cluster = Cluster([[], [22]])
    cluster.hold("nominated", "held", 20, 5, "a")
    cluster.apply(PodSeen(waiting("asked", 10)))
    explained = cluster.get("/v1/explain?pod=default/asked")
    assert explained["message"] == (
        "no node can take the pod now: GPU memory of 1 node is held for other pods, which go first"
    )
    nearest, _ = explained["nearest"]
    assert (nearest["node"], nearest["reason"], nearest["short_bytes"]) == ("a", "held", 6 * GIB)
    hold = {"namespace": "default", "name": "held", "uid": "u-held"}
    assert nearest["holds"] == [hold | {"until": "2026-11-21T00:01:00Z"}]
    assert (
        "  memory is held for pod default/held until it is bound, at the latest until "
        "2026-11-21T00:01:00Z" in nearest["lines"]
    )
    score = cluster.get("/v1/score?pod=default/asked&node=a")["live"]
    assert [each["reason"] for each in score["failing"]] == ["held"]
    (device,) = cluster.get("/v1/nodes/a")["node"]["devices"]
    assert device["headroom_bytes"] == 4 * GIB
    cluster.fleet.now_s = 61.0
    assert cluster.get("/v1/explain?pod=default/asked")["verdict"] == "fits"


def test_a_pod_that_precedes_the_nominated_pod_is_not_asked_to_wait() -> None:
    cluster = Cluster([[], [22]])
    cluster.hold("nominated", "held", 20, 0, "a")
    cluster.apply(PodSeen(waiting("asked", 10, priority=5)))
    assert cluster.get("/v1/explain?pod=default/asked")["verdict"] == "fits"
    own = cluster.get("/v1/explain?pod=default/held")
    assert (own["verdict"], own["nearest"][0]["holds"]) == ("fits", [])


def test_a_whatif_leaves_the_rows_that_views_share() -> None:
    """The what-if must not change these rows, although it uses a snapshot in which held memory
    counts as reserved.
    """
    cluster = Cluster([[4], []])
    cluster.fleet.get("/v1/pods")
    cluster.hold("assumed", "held", 8, 0, "b")
    asked = cluster.fleet.post("/v1/whatif", {"pods": [{"vram": "2Gi"}]}).json()
    assert asked["before"]["reserved_bytes"] == 12 * GIB
    shown = {pod["name"]: pod["node"] for pod in cluster.fleet.get("/v1/pods").json()["pods"]}
    assert shown == {"a-0": "a", "held": None}
