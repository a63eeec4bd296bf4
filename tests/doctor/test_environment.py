"""Tests the doctor's findings about the pods around Headroom, and about schedulers' ConfigMaps."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from headroom.contract.kube import Node, ObjectMeta
from headroom.doctor.component_pods import ComponentPod
from headroom.doctor.environment import PARTS, Environment, examine_environment
from headroom.doctor.findings import Finding, Weight
from headroom.doctor.scheduler_flags import BACKOFF_FLAG
from headroom.runtime.settings.settings import Settings

APPS = [part.app for part in PARTS]
VERSION = "1.0"


def neighbour(
    name: str,
    node: str,
    waits: str = "",
    tag: str = "v0.20.0",
    labels: dict[str, str] | None = None,
) -> ComponentPod:
    """Return a ready pod. If ``waits`` is a reason, the pod is not ready, and its container waits
    for this reason.
    """
    waiting = {"state": {"waiting": {"reason": waits}}}
    return msgspec.convert(
        {
            "metadata": {
                "namespace": "gpu-operator",
                "name": f"{name}-{node}",
                "labels": labels or {"app": name},
            },
            "spec": {
                "nodeName": node,
                "containers": [{"image": f"images.example:5000/nvidia/{name}:{tag}@sha256:0"}],
            },
            "status": {
                "phase": "Pending" if waits else "Running",
                "conditions": [{"type": "Ready", "status": "False" if waits else "True"}],
                "containerStatuses": [waiting] if waits else [{"state": {"running": {}}}],
            },
        },
        ComponentPod,
    )


def node(name: str, **labels: str) -> Node:
    wanted = {f"nvidia.com/gpu.deploy.{part.name}": "true" for part in PARTS}
    return Node(metadata=ObjectMeta(name=name, labels=wanted | labels))


def examined(pods: Sequence[ComponentPod] = (), **how: Any) -> list[Finding]:
    around = Environment(pods, **{"nodes": [node("n"), node("m")], **how})
    return examine_environment(around, Settings(), VERSION)


def operator(*nodes: str, but: Sequence[str] = ()) -> list[ComponentPod]:
    return [neighbour(app, name) for name in nodes for app in APPS if app not in but]


def test_a_healthy_environment_has_no_findings() -> None:
    assert examined() == []
    assert examined(operator("n", "m")) == []


@pytest.mark.parametrize("app", APPS)
def test_a_broken_component_is_reported_with_its_nodes(app: str) -> None:
    broken = [neighbour(app, name, "CrashLoopBackOff") for name in ("m", "n")]
    (one,) = examined([*operator("n", "m", but=[app]), *broken])
    assert one.nodes == ("m", "n")
    assert f"{app} is not ready (CrashLoopBackOff)" in one.found
    assert one.do == f"run: kubectl -n gpu-operator describe pods -l app={app}"
    assert (one.weight is Weight.ADVICE) == (app == "nvidia-dcgm-exporter")


def test_if_components_wait_for_each_other_the_first_component_is_reported() -> None:
    waiting = ["nvidia-device-plugin-daemonset", "gpu-feature-discovery"]
    pods = [
        *operator("n", but=["nvidia-container-toolkit-daemonset", *waiting]),
        neighbour("nvidia-container-toolkit-daemonset", "n", "ImagePullBackOff"),
        *(neighbour(app, "n", "PodInitializing") for app in waiting),
    ]
    (one,) = examined(pods, nodes=[node("n")])
    assert "nvidia-container-toolkit-daemonset is not ready (ImagePullBackOff)" in one.found
    assert one.found.endswith(f"; these parts may wait for it: {', '.join(waiting)}")


def test_a_component_is_missing_if_the_operator_deploys_it_and_other_nodes_have_it() -> None:
    there = operator("n", "m", but=["gpu-feature-discovery"])
    (one,) = examined([*there, neighbour("gpu-feature-discovery", "m")])
    assert one.nodes == ("n",)
    assert "gpu-feature-discovery has no pod on the node" in one.found
    # The component is disabled for the whole cluster, or someone created it by hand on this node.
    assert examined(there) == []
    by_hand = node("n", **{"nvidia.com/gpu.deploy.driver": "pre-installed"})
    pods = [*operator("n", but=["nvidia-driver-daemonset"]), *operator("m")]
    assert examined(pods, nodes=[by_hand, node("m")]) == []


def test_during_a_replacement_the_ready_pod_counts() -> None:
    old = neighbour(APPS[0], "n", "ContainerCreating")
    assert examined([*operator("n", "m"), old]) == []
    assert examined([old, *operator("n", "m")]) == []


def test_device_plugins_of_several_versions_are_distinguished() -> None:
    chart = {"app.kubernetes.io/name": "nvidia-device-plugin"}
    pods = [neighbour("a", "n", tag="v0.19.2", labels=chart), neighbour("b", "m", tag="v0.20.0")]
    assert examined(pods) == []  # The second pod does not have the label of a plugin.
    pods = [pods[0], neighbour("nvidia-device-plugin-daemonset", "m")]
    newer, older = examined(pods, nodes=[])
    assert {newer.nodes, older.nodes} == {("n",), ("m",)}
    assert any(
        "has version v0.19.2, and other nodes have v0.20.0" in one.found for one in (newer, older)
    )


@pytest.mark.parametrize(
    "labels",
    [{"app": "cluster-autoscaler"}, {"app.kubernetes.io/name": "karpenter"}],
)
def test_an_autoscaler_that_counts_replicas_is_reported(labels: dict[str, str]) -> None:
    (one,) = examined([neighbour("scaler", "n", labels=labels)])
    assert (one.weight, one.nodes) == (Weight.ADVICE, ("gpu-operator/scaler-n",))
    assert "counts replicas, not memory" in one.found


def test_karpenter_is_detected_by_its_nodes_if_the_cloud_runs_it() -> None:
    (one,) = examined(nodes=[node("n", **{"karpenter.sh/nodepool": "gpus"})])
    assert one.nodes == ("Karpenter",)


def test_an_extender_of_another_version_is_reported() -> None:
    ours = {"app.kubernetes.io/name": "headroom", "app.kubernetes.io/component": "extender"}
    recorder = neighbour("r", "n", labels=ours | {"app.kubernetes.io/component": "recorder"})
    (one,) = examined([neighbour("e", "n", tag="v0.9", labels=ours), recorder])
    assert "image has version 0.9, and this doctor has version 1.0" in one.found
    assert examined([neighbour("e", "n", tag="v1.0", labels=ours), recorder]) == []
    assert examined([neighbour("e", "n", tag="latest", labels=ours), recorder]) == []


@pytest.mark.parametrize(
    ("tags", "settings", "found"),
    [
        (["v1.37.2"], {}, ""),
        (["v1.37.2"], {"evict_for_memory": True}, ""),
        (["v1.38.0", "v1.37.2"], {"preempt_for_memory": True}, "kube-scheduler 1.37 cannot"),
        (["v1.38.0"], {"preempt_for_memory": True}, ""),
        (["v1.38.0-beta.0"], {"evict_for_memory": True}, "kube-scheduler 1.38 can preempt"),
        (["set-me"], {"preempt_for_memory": True}, ""),
    ],
)
def test_kube_scheduler_must_support_the_setting_preempt_for_memory(
    tags: Sequence[str], settings: dict[str, Any], found: str
) -> None:
    labels = {"app.kubernetes.io/name": "headroom", "app.kubernetes.io/component": "extender"}
    recorder = neighbour("r", "n", labels=labels | {"app.kubernetes.io/component": "recorder"})
    pods = [recorder]
    for number, tag in enumerate(tags):
        pod = msgspec.to_builtins(neighbour("e", f"n{number}", tag="v1.0", labels=labels))
        image = f"registry.k8s.io/kube-scheduler:{tag}"
        scheduler = {"name": "kube-scheduler", "image": image, "args": [BACKOFF_FLAG]}
        pod["spec"]["containers"].append(scheduler)
        pods.append(msgspec.convert(pod, ComponentPod))
    around = Environment(pods, [node("n"), node("m")])
    texts = [each.found for each in examine_environment(around, Settings(**settings), VERSION)]
    assert len(texts) == bool(found)
    assert all(found in text for text in texts)


def scheduler(**how: Any) -> dict[str, Any]:
    managed = [{"name": "nvidia.com/gpu"}, {"name": "nvidia.com/gpu.shared"}]
    ours = {
        "filterVerb": "filter",
        "bindVerb": "bind",
        "managedResources": managed,
        "nodeCacheCapable": True,
    }
    return {
        "kind": "KubeSchedulerConfiguration",
        "percentageOfNodesToScore": 100,
        "extenders": [ours | how],
    }


def test_mistakes_in_a_schedulers_config_map_are_reported_with_its_name() -> None:
    where = "ConfigMap kube-system/scheduler, config.yaml"
    (one,) = examined(schedulers={where: scheduler(ignorable=True)})
    assert (one.weight, one.nodes) == (Weight.WARNING, (f"{where} extenders[0]",))
    assert "it is ignorable" in one.found
    assert examined(schedulers={where: scheduler()}) == []


def test_schedulers_without_headroom_are_reported_only_if_no_scheduler_has_it() -> None:
    other = {"kind": "KubeSchedulerConfiguration", "extenders": []}
    (one,) = examined(schedulers={"b": other, "a": other})
    assert (one.weight, one.nodes) == (Weight.ADVICE, ("a", "b"))
    assert "does not call Headroom" in one.found
    assert examined(schedulers={"a": other, "b": scheduler()}) == []


def test_missing_checks_are_reported_without_a_warning() -> None:
    (one,) = examined(unreadable=["ConfigMaps of kube-system (403)"])
    assert (one.weight, one.nodes) == (Weight.ADVICE, ())
    assert one.found == "not read: ConfigMaps of kube-system (403)"
