"""Manifests of the node templates and pods of one form of a scenario."""

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from benchmarks.autoscaling.scenarios import Form, Group, Pods, Scenario
from tests.admission.reviews import around, mutated
from tests.controlplane import SCHEDULER_NAME

#: Label of nodes and pods with the play that they belong to.
PLAY = "play"
#: Label by which the provider groups its templates.
GROUP = "kwok-nodegroup"
#: The annotation of pods, which is also the name of the extended resource.
VRAM = "headroom.gpu/vram"
#: Label that GPU feature discovery sets, in MiB.
MEMORY = "nvidia.com/gpu.memory"
_TAINT = {"key": "team", "value": "ml", "effect": "NoSchedule"}


def play_name(number: int, form: Form) -> str:
    return f"{number:02}-{form}"


def group_name(play: str, group: Group) -> str:
    return f"{play}-{group.name}"


def template(play: str, group: Group, form: Form) -> dict[str, Any]:
    amounts = {
        "cpu": str(group.cpus),
        "memory": f"{8 * group.cpus}Gi",
        "pods": "110",
        group.resource: str(group.gpus * group.replicas),
    }
    if form != "plain":
        amounts[VRAM] = str(group.sum_mib)
    name = group_name(play, group)
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"benchmark": "autoscaling"},
            "labels": {GROUP: name, PLAY: play, MEMORY: str(1024 * group.memory_gib)},
        },
        "spec": {"taints": [_TAINT] if group.tainted else []},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    }


def configuration(templates: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield name and data of each ConfigMap that the provider reads."""
    config = {
        "apiVersion": "v1alpha1",
        "readNodesFrom": "configmap",
        "nodegroups": {"fromNodeLabelKey": GROUP},
        "nodes": {"skipTaint": True},
        "configmap": {"name": "kwok-provider-templates"},
    }
    yield "kwok-provider-config", {"config": yaml.safe_dump(config)}
    yield "kwok-provider-templates", {"templates": yaml.safe_dump_all(templates)}


def pods(play: str, scenario: Scenario, form: Form) -> Iterator[dict[str, Any]]:
    """Yield the pods as the webhook stores them."""
    for kind, each in enumerate(scenario.pods):
        for number in range(each.count):
            yield _pod(play, f"{play}-{kind}-{number:02}", each, scenario, form)


def _pod(play: str, name: str, pods: Pods, scenario: Scenario, form: Form) -> dict[str, Any]:
    amounts = {"cpu": "100m", "memory": "64Mi", pods.resource: "1"}
    spec: dict[str, Any] = {
        "schedulerName": SCHEDULER_NAME,
        "nodeSelector": {PLAY: play},
        "containers": [
            {"name": "main", "image": "none", "resources": {"limits": amounts, "requests": amounts}}
        ],
    }
    if pods.group:
        spec["nodeSelector"][GROUP] = f"{play}-{pods.group}"
    if pods.tolerates:
        spec["tolerations"] = [{"key": "team", "operator": "Exists"}]
    if form == "fixed" and "memory" in scenario.fixes and isinstance(pods.vram, int):
        least = {"key": MEMORY, "operator": "Gt", "values": [str(1024 * pods.vram - 1)]}
        spec["affinity"] = {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [least]}]
                }
            }
        }
    owner = name.rpartition("-")[0]
    controller = {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "name": owner,
        "uid": str(uuid.uuid5(uuid.NAMESPACE_DNS, owner)),
        "controller": True,
    }
    annotations = {} if pods.annotation is None else {VRAM: pods.annotation}
    stored, _ = mutated(
        {
            "metadata": {"name": name, "annotations": annotations, "ownerReferences": [controller]},
            "spec": spec,
        },
        around(mirror=form != "plain", scheduler=SCHEDULER_NAME),
    )
    return stored


def play_of(node: Mapping[str, Any]) -> str:
    play: str = node["metadata"]["labels"].get(PLAY, "")
    return play
