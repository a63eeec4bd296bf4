"""Checks that nodes are eligible for a pod under the conditions that Kubernetes documents."""

from typing import Any

import msgspec
import pytest

from headroom.contract.kube import Node, Pod
from headroom.core.rules.eligible_nodes import eligible

ZONE_A = {"labels": {"zone": "a", "gpus": "8"}}


def node(labels: dict[str, str] | None = None, **spec: Any) -> Node:
    wire = {"metadata": {"name": "n", "labels": labels}, "spec": spec}
    return msgspec.json.decode(msgspec.json.encode(wire), type=Node)


def pod(**spec: Any) -> Pod:
    wire = {"metadata": {"name": "p"}, "spec": spec}
    return msgspec.json.decode(msgspec.json.encode(wire), type=Pod)


def affinity(*terms: dict[str, Any]) -> Pod:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return pod(affinity={"nodeAffinity": required})


def asked(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": values}


@pytest.mark.parametrize(
    ("wanting", "may"),
    [
        pytest.param(pod(), True, id="no conditions"),
        pytest.param(pod(nodeSelector={"zone": "a"}), True, id="selected label"),
        pytest.param(pod(nodeSelector={"zone": "b"}), False, id="another value"),
        pytest.param(
            pod(nodeSelector={"zone": "a", "disk": "ssd"}), False, id="one of two labels is missing"
        ),
        pytest.param(affinity(), False, id="affinity without terms"),
        pytest.param(affinity({}), False, id="a term without expressions"),
        pytest.param(
            affinity({"matchExpressions": [asked("zone", "In", "b", "a")]}), True, id="in"
        ),
        pytest.param(
            affinity({"matchExpressions": [asked("zone", "In", "b")]}), False, id="not in"
        ),
        pytest.param(
            affinity({"matchExpressions": [asked("zone", "NotIn", "a")]}),
            False,
            id="not in, with the value",
        ),
        pytest.param(
            affinity({"matchExpressions": [asked("disk", "NotIn", "a")]}),
            True,
            id="not in, without the label",
        ),
        pytest.param(affinity({"matchExpressions": [asked("zone", "Exists")]}), True, id="exists"),
        pytest.param(
            affinity({"matchExpressions": [asked("disk", "Exists")]}),
            False,
            id="exists, without the label",
        ),
        pytest.param(
            affinity({"matchExpressions": [asked("zone", "DoesNotExist")]}),
            False,
            id="does not exist, with the label",
        ),
        pytest.param(
            affinity({"matchExpressions": [asked("gpus", "Gt", "4")]}), True, id="greater"
        ),
        pytest.param(
            affinity({"matchExpressions": [asked("gpus", "Gt", "8")]}), False, id="not greater"
        ),
        pytest.param(affinity({"matchExpressions": [asked("gpus", "Lt", "9")]}), True, id="less"),
        pytest.param(
            affinity({"matchExpressions": [asked("gpus", "Lt", "8")]}), False, id="not less"
        ),
        pytest.param(
            affinity({"matchExpressions": [asked("zone", "Lt", "9")]}), False, id="not a number"
        ),
        pytest.param(
            affinity({"matchExpressions": [asked("disk", "Gt", "0")]}), False, id="no label"
        ),
        pytest.param(
            affinity({"matchFields": [asked("metadata.name", "In", "n")]}), True, id="name"
        ),
        pytest.param(
            affinity({"matchFields": [asked("metadata.name", "In", "m")]}), False, id="other name"
        ),
        pytest.param(
            affinity(
                {"matchExpressions": [asked("zone", "In", "b")]},
                {"matchExpressions": [asked("zone", "In", "a")]},
            ),
            True,
            id="one of two terms",
        ),
        pytest.param(
            affinity({"matchExpressions": [asked("zone", "In", "a"), asked("disk", "Exists")]}),
            False,
            id="one of two expressions",
        ),
    ],
)
def test_labels_decide_whether_a_node_is_eligible(wanting: Pod, may: bool) -> None:
    assert eligible(wanting, node(ZONE_A["labels"])) is may


@pytest.mark.parametrize(
    ("tolerations", "may"),
    [
        pytest.param([], False, id="no tolerations"),
        pytest.param([{"key": "gpu", "operator": "Exists"}], True, id="of the key"),
        pytest.param([{"key": "gpu", "value": "yes"}], True, id="of key and value"),
        pytest.param([{"key": "gpu", "value": "no"}], False, id="of another value"),
        pytest.param([{"key": "cpu", "operator": "Exists"}], False, id="of another key"),
        pytest.param([{"operator": "Exists"}], True, id="of everything"),
        pytest.param(
            [{"key": "gpu", "value": "yes", "effect": "NoExecute"}], False, id="of another effect"
        ),
    ],
)
def test_taints_decide_whether_a_node_is_eligible(
    tolerations: list[dict[str, str]], may: bool
) -> None:
    tainted = node(taints=[{"key": "gpu", "value": "yes", "effect": "NoSchedule"}])
    assert eligible(pod(tolerations=tolerations), tainted) is may


def test_preferences_exclude_no_node() -> None:
    assert eligible(pod(), node(taints=[{"key": "gpu", "effect": "PreferNoSchedule"}]))


def test_a_cordoned_node_takes_pods_that_tolerate_the_cordon() -> None:
    tolerates = {"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}
    assert not eligible(pod(), node(unschedulable=True))
    assert eligible(pod(tolerations=[tolerates]), node(unschedulable=True))
