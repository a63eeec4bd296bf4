"""Tests label selectors of disruption budgets and of kube-scheduler's preferences."""

from typing import Any

import msgspec
import pytest

from headroom.contract.kube import LabelSelector, Node, NodeSelectorRequirement, Pod, PodStatus
from headroom.contract.watched import PodGone, PodSeen, Relisted
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.trackers.pod_selectors import (
    Neighbours,
    prefers,
    prefers_no_schedule,
    selects,
)
from headroom.core.placement.policy import Rules

WEB = {"matchLabels": {"app": "web"}}
IN_WEB = {"matchExpressions": [{"key": "app", "operator": "In", "values": ["web", "api"]}]}
PREFERRED, REQUIRED = (
    f"{how}DuringSchedulingIgnoredDuringExecution" for how in ("preferred", "required")
)
NODE_TERM = {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}


def pod(
    uid: str = "p", namespace: str = "team", labels: dict[str, str] | None = None, **spec: Any
) -> Pod:
    metadata = {"name": uid, "uid": uid, "namespace": namespace, "labels": labels}
    wire = {"metadata": metadata, "spec": spec}
    return msgspec.json.decode(msgspec.json.encode(wire), type=Pod)


def beside(how: str, kind: str = "podAffinity", **term: Any) -> dict[str, Any]:
    """Return an affinity with one term."""
    whole = {"topologyKey": "kubernetes.io/hostname"} | term
    listed = whole if how == REQUIRED else {"weight": 1, "podAffinityTerm": whole}
    return {kind: {how: [listed]}}


@pytest.mark.parametrize(
    ("asking", "has"),
    [
        pytest.param(pod(), False, id="no preference"),
        pytest.param(
            pod(nodeSelector={"zone": "a"}), False, id="a node selector, which no score depends on"
        ),
        pytest.param(
            pod(affinity={"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [NODE_TERM]}}}),
            False,
            id="required node affinity",
        ),
        pytest.param(
            pod(affinity={"nodeAffinity": {PREFERRED: [{"weight": 1, "preference": NODE_TERM}]}}),
            True,
            id="preferred node affinity",
        ),
        pytest.param(
            pod(affinity=beside(PREFERRED, labelSelector=WEB)), True, id="preferred pod affinity"
        ),
        pytest.param(
            pod(affinity=beside(PREFERRED, "podAntiAffinity", labelSelector=WEB)),
            True,
            id="preferred anti-affinity",
        ),
        pytest.param(
            pod(affinity=beside(REQUIRED, "podAntiAffinity", labelSelector=WEB)),
            False,
            id="required anti-affinity, which no score depends on",
        ),
        pytest.param(
            pod(topologySpreadConstraints=[{"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}]),
            True,
            id="topology spread",
        ),
    ],
)
def test_preferences_of_a_pod_are_recognised(asking: Pod, has: bool) -> None:
    assert prefers(asking) is has


def test_a_prefer_no_schedule_taint_counts_unless_it_is_tolerated() -> None:
    def node(*effects: str) -> Node:
        taints = [{"key": "spot", "value": "yes", "effect": effect} for effect in effects]
        wire = {"metadata": {"name": "n"}, "spec": {"taints": taints}}
        return msgspec.json.decode(msgspec.json.encode(wire), type=Node)

    tolerant = pod(tolerations=[{"key": "spot", "operator": "Exists"}])
    assert prefers_no_schedule(node("PreferNoSchedule"), pod())
    assert not prefers_no_schedule(node("PreferNoSchedule"), tolerant)
    assert not prefers_no_schedule(node("NoSchedule"), pod())
    assert not prefers_no_schedule(node(), pod())
    assert not prefers_no_schedule(Node(metadata=pod().metadata), pod())


@pytest.mark.parametrize(
    ("affinity", "spoken_of"),
    [
        (beside(PREFERRED, labelSelector=WEB), True),
        (beside(PREFERRED, "podAntiAffinity", labelSelector=WEB), True),
        # The pod is attracted by hardPodAffinityWeight.
        (beside(REQUIRED, labelSelector=WEB), True),
        (beside(REQUIRED, "podAntiAffinity", labelSelector=WEB), False),
        (beside(PREFERRED, labelSelector=IN_WEB), True),
        (beside(PREFERRED, labelSelector={}), True),
        (beside(PREFERRED), False),  # A missing selector matches no pod.
        (beside(PREFERRED, labelSelector={"matchLabels": {"app": "db"}}), False),
        (beside(PREFERRED, labelSelector=WEB, namespaces=["other"]), False),
        (beside(PREFERRED, labelSelector=WEB, namespaces=["other", "team"]), True),
        (beside(PREFERRED, labelSelector=WEB, namespaceSelector={}), True),
    ],
)
def test_affinity_terms_of_existing_pods_match_a_new_pod(
    affinity: dict[str, Any], spoken_of: bool
) -> None:
    neighbours, newcomer = Neighbours(), pod("new", labels={"app": "web"})
    assert not neighbours.match(newcomer)
    neighbours.pod_seen(pod("one", affinity=affinity), False)
    neighbours.pod_seen(pod("two", affinity=affinity), False)
    assert neighbours.match(newcomer) is spoken_of
    neighbours.pod_gone("one", None)
    assert neighbours.match(newcomer) is spoken_of, "the other pod has the same term"
    neighbours.pod_seen(pod("two"), False)
    assert not neighbours.match(newcomer)
    neighbours.pod_gone("two", None)
    assert neighbours.known() == set()


def test_an_ended_pod_has_no_terms_any_more() -> None:
    neighbours, newcomer = Neighbours(), pod("new", labels={"app": "web"})
    speaker = pod("one", affinity=beside(PREFERRED, labelSelector=WEB))
    neighbours.pod_seen(speaker, False)
    neighbours.pod_seen(
        msgspec.structs.replace(speaker, status=PodStatus(phase="Succeeded")), False
    )
    assert not neighbours.match(newcomer)


def test_the_state_keeps_terms_of_pods_without_a_gpu_while_they_exist() -> None:
    state = ClusterWriter(Rules(), 90.0, 0.0)
    speaker = pod("one", affinity=beside(PREFERRED, labelSelector=WEB))
    newcomer = pod("new", labels={"app": "web"})
    assert state.cluster.concerns(speaker)
    assert not state.cluster.concerns(pod("silent"))
    for end in (PodGone("one"), Relisted(Pod, (), 0.0)):
        state.apply([PodSeen(speaker)])
        assert state.cluster.neighbours.match(newcomer)
        state.apply([end])
        assert not state.cluster.neighbours.match(newcomer)
    state.apply([Relisted(Pod, (speaker,), 0.0)])
    assert state.cluster.neighbours.match(newcomer)


def expression(operator: str, *values: str) -> dict[str, Any]:
    return {
        "match_expressions": [
            NodeSelectorRequirement(key="app", operator=operator, values=list(values))
        ]
    }


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        pytest.param({}, False, id="an empty selector selects no pod"),
        pytest.param({"match_labels": {"app": "web"}}, True, id="label"),
        pytest.param({"match_labels": {"app": "web", "x": "y"}}, False, id="all labels"),
        pytest.param(expression("In", "web", "db"), True, id="in"),
        pytest.param(expression("NotIn", "web"), False, id="not in"),
        pytest.param(expression("NotIn", "db"), True, id="not in another"),
        pytest.param(expression("Exists"), True, id="exists"),
        pytest.param(expression("DoesNotExist"), False, id="does not exist"),
        pytest.param(expression("Gt", "1"), False, id="an invalid selector selects no pod"),
    ],
)
def test_selectors_match_pods(selector: dict[str, Any], expected: bool) -> None:
    assert selects(LabelSelector(**selector), {"app": "web"}) is expected
