"""Checks the network policies and the nodes of components in clusters whose tenants do not trust
each other.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.deploy.rendered import (
    CHART_ONLY,
    DEPLOY,
    EVERYTHING,
    PLATFORMS,
    Objects,
    objects,
    overlay,
    pod_specs,
    template,
    with_components,
)

pytestmark = pytest.mark.slow

#: Platforms on which all nodes can have GPUs.
ON_GPU_NODES = ("k3s", "trial")
#: The labels by which agents select nodes (deploy/base/agent.yaml), with values that a GPU node
#: has.
GPU_LABELS = {
    "nvidia.com/gpu.present": "true",
    "nvidia.com/gpu.count": "8",
    "feature.node.kubernetes.io/pci-10de.present": "true",
}


def policies(found: Objects) -> dict[str, dict[str, Any]]:
    return {
        name: each["spec"] for (kind, _, name), each in found.items() if kind == "NetworkPolicy"
    }


def admits(expression: dict[str, Any], labels: dict[str, str]) -> bool:
    value = labels.get(expression["key"])
    match expression["operator"]:
        case "DoesNotExist":
            return value is None
        case "Exists":
            return value is not None
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
    raise AssertionError(expression)


def may_run(spec: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return whether the pod's required node affinity selects a node with these labels."""
    affinity = spec.get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    return any(
        all(admits(each, labels) for each in term["matchExpressions"])
        for term in required["nodeSelectorTerms"]
    )


@pytest.mark.parametrize("platform", PLATFORMS)
def test_only_agents_run_on_gpu_nodes_by_default(platform: str) -> None:
    specs = pod_specs(objects(overlay(DEPLOY / "overlays" / platform)))
    for (kind, _, name), spec in specs.items():
        assert may_run(spec, {}) == (kind != "DaemonSet"), name
        if kind == "DaemonSet":
            continue
        for key, value in GPU_LABELS.items():
            assert may_run(spec, {key: value}) == (platform in ON_GPU_NODES), (name, key)


@pytest.mark.parametrize("platform", [*PLATFORMS, *CHART_ONLY])
def test_the_chart_also_keeps_other_pods_off_gpu_nodes(platform: str, tmp_path: Path) -> None:
    for key, spec in pod_specs(objects(template(tmp_path, {}, platform))).items():
        if key[0] != "DaemonSet":
            everywhere = platform in ON_GPU_NODES
            assert may_run(spec, {"nvidia.com/gpu.present": "true"}) == everywhere, key


def test_every_pod_has_a_network_policy_for_both_directions(tmp_path: Path) -> None:
    found = objects(template(tmp_path, EVERYTHING))
    selected = [each["podSelector"]["matchLabels"] for each in policies(found).values()]
    assert all(each["policyTypes"] == ["Ingress", "Egress"] for each in policies(found).values())
    for key, each in found.items():
        if key in pod_specs(found):
            spec = each["spec"]
            template_ = spec.get("jobTemplate", {"spec": spec})["spec"]["template"]
            labels = template_["metadata"]["labels"]
            assert any(chosen.items() <= labels.items() for chosen in selected), key


def peers(found: Objects) -> list[tuple[str, dict[str, Any]]]:
    return [
        (name, peer)
        for name, spec in policies(found).items()
        for direction in ("ingress", "egress")
        for rule in spec.get(direction, ())
        for peer in rule.get("from", rule.get("to", ()))
    ]


def test_no_policy_trusts_a_label_that_a_tenant_can_set(tmp_path: Path) -> None:
    """A policy may match labels of pods only in namespaces that it selects by the label that
    Kubernetes sets.
    """
    components = tmp_path / "with"
    components.mkdir()
    rendered = objects(with_components(components, ["device-taints"]))
    for found in (rendered, objects(template(tmp_path, EVERYTHING))):
        assert peers(found)
        for name, peer in peers(found):
            selector = peer.get("namespaceSelector", {"matchLabels": {}})
            if selector == {}:
                # Gates run in any namespace.
                assert name == "headroom-agent"
            elif "namespaceSelector" in peer:
                assert selector == {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}


def test_values_set_the_addresses_of_prometheus_and_the_api_server(tmp_path: Path) -> None:
    values = {
        "monitors": {"prometheus": {"namespace": "theirs"}},
        "networkPolicies": {"apiServerCidrs": ["10.0.0.2/32"], "apiServerPorts": [7443]},
    }
    found = objects(template(tmp_path, values))
    named = {
        peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for _, peer in peers(found)
        if peer.get("namespaceSelector")
    }
    assert named == {"theirs"}
    server = [{"ipBlock": {"cidr": "10.0.0.2/32"}}]
    for name, spec in policies(found).items():
        (rule,) = (
            r for r in spec["egress"] if r.get("to") == [{"ipBlock": {"cidr": "10.0.0.2/32"}}]
        )
        assert rule["ports"] == [{"protocol": "TCP", "port": 7443}], name
    reviews, metrics = policies(found)["headroom-webhook"]["ingress"]
    assert (reviews["ports"][0]["port"], reviews["from"]) == (9443, server)
    assert metrics["ports"][0]["port"] == 8889
    # The API server connects users to the console.
    others, users = policies(found)["headroom-console"]["ingress"]
    assert (users["ports"][0]["port"], users["from"]) == (8889, server)
    assert server[0] not in others["from"]
    values["networkPolicies"]["prometheusNamespace"] = "pods-of-it"
    text = template(tmp_path, values)
    assert "kubernetes.io/metadata.name: pods-of-it" in text
    assert "kubernetes.io/metadata.name: theirs" not in text
