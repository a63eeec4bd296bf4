"""Checks that the chart's values reach images, settings and pods, and that messages name the values
to set.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from headroom.doctor.scheduler_flags import BACKOFF_FLAG, accepts_gate
from tests.controlplane import ROOT
from tests.deploy.rendered import (
    CHART,
    DEPLOY,
    IMAGE_VALUES,
    NAMESPACE,
    Refused,
    helm,
    objects,
    pod_specs,
    settings_of,
    template,
)
from tests.gobin.build import version_tuple

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("image", "shown"),
    [
        pytest.param(
            {"repository": ""}, "images.extender.repository is not set. Set", id="missing"
        ),
        pytest.param(
            {"repository": "registry.example/e:1"},
            "images.extender.repository is registry.example/e:1, with a tag or a digest. Set "
            "images.extender.tag or images.extender.digest instead.",
            id="with a tag",
        ),
        pytest.param(
            {"repository": f"registry.example/e@sha256:{'0' * 64}"},
            "with a tag or a digest. Set images.extender.tag or images.extender.digest instead.",
            id="with a digest",
        ),
        pytest.param(
            {"repository": "set-me.invalid/headroom-extender"},
            "images.extender.repository is still set-me.invalid/headroom-extender. Set",
            id="the placeholder",
        ),
    ],
)
def test_the_message_about_an_image_names_the_value_and_an_example(
    image: dict[str, str], shown: str, tmp_path: Path
) -> None:
    with pytest.raises(Refused) as refused:
        template(tmp_path, {"images": {**IMAGE_VALUES, "extender": image}})
    assert shown in str(refused.value)
    example = "Example: --set images.extender.repository=registry.example/headroom-extender"
    assert example in str(refused.value)


def test_a_chart_from_a_clone_has_no_default_tag(tmp_path: Path) -> None:
    extender = {"repository": "registry.example/e"}
    with pytest.raises(Refused) as refused:
        template(tmp_path, {"images": {**IMAGE_VALUES, "extender": extender}})
    assert "images.extender.tag is not set, and this chart has no version" in str(refused.value)
    assert "Example: --set images.extender.tag=1.2.3" in str(refused.value)


@pytest.mark.parametrize(
    ("image", "reference"),
    [
        ({"tag": "v2"}, "r.example:5000/e:v2"),
        ({"digest": f"sha256:{'0' * 64}"}, f"r.example:5000/e@sha256:{'0' * 64}"),
        (
            {"tag": "v2", "digest": f"sha256:{'0' * 64}"},
            f"r.example:5000/e:v2@sha256:{'0' * 64}",
        ),
    ],
)
def test_an_image_has_a_repository_a_tag_and_a_digest(
    image: dict[str, str], reference: str, tmp_path: Path
) -> None:
    extender = {"repository": "r.example:5000/e", **image}
    found = objects(template(tmp_path, {"images": {**IMAGE_VALUES, "extender": extender}}))
    images = {
        key: spec["containers"][0]["image"]
        for key, spec in pod_specs(found).items()
        if key[2] != "headroom-agent"
    }
    assert len(images) == 7
    assert set(images.values()) == {reference}


@pytest.mark.parametrize(
    ("cluster", "tag", "has_gate"),
    [
        ("v1.39.0", "v1.39.0", False),
        ("v1.38.0-beta.0", "v1.38.0", True),
        ("v1.36.3", "v1.36.3", True),
        ("v1.33.4-eks-99bf5f1", "v1.33.4", True),
        ("v1.32.9-gke.1027000", "v1.32.9", False),
        ("v1.31.5+k3s1", "v1.31.5", False),
    ],
)
def test_kube_scheduler_has_the_version_of_the_cluster(
    cluster: str, tag: str, has_gate: bool, tmp_path: Path
) -> None:
    images = {name: IMAGE_VALUES[name] for name in ("extender", "agent")}
    found = objects(template(tmp_path, {"images": images}, flags=[f"--kube-version={cluster}"]))
    _, scheduler = pod_specs(found)["Deployment", NAMESPACE, "headroom-scheduler"]["containers"]
    assert scheduler["image"] == f"registry.k8s.io/kube-scheduler:{tag}"
    assert (BACKOFF_FLAG in scheduler["command"]) is has_gate
    assert has_gate is accepts_gate(version_tuple(tag.removeprefix("v")))


@pytest.mark.parametrize(
    ("image", "note"),
    [
        ({"tag": "v1.38.9"}, ""),
        ({"tag": "v1.32.13"}, ""),  # This version has no such gate and always backs off.
        ({"tag": "v1.39.0"}, "kube-scheduler v1.39.0 is newer than 1.38, so the chart"),
        (
            {"digest": f"sha256:{'0' * 64}"},
            "kube-scheduler has no version in its tag, so the chart",
        ),
        ({"tag": "v1.37.2", "digest": f"sha256:{'0' * 64}"}, ""),
    ],
    ids=lambda each: str(each)[:24],
)
def test_the_notes_explain_a_missing_feature_gate(
    image: dict[str, str], note: str, tmp_path: Path
) -> None:
    scheduler = {"repository": "registry.example/kube-scheduler", **image}
    values = {"images": {**IMAGE_VALUES, "kubeScheduler": scheduler}}
    command = ["install", "headroom", CHART, "--dry-run=client", "--namespace", NAMESPACE]
    shown = helm(tmp_path, *command, values=values).split("\nNOTES:\n")[1]
    assert ("docs/how-to/kube-scheduler.md" in shown) is bool(note)
    assert note in shown


def test_without_agents_the_agent_image_is_not_required(tmp_path: Path) -> None:
    images = {**IMAGE_VALUES, "agent": {"repository": ""}}
    found = objects(template(tmp_path, {"images": images, "agent": {"enabled": False}}))
    assert ("DaemonSet", NAMESPACE, "headroom-agent") not in found


@pytest.mark.parametrize(
    ("settings", "waits", "grace_s"),
    [
        pytest.param({}, None, 150, id="as shipped"),
        pytest.param({"stale_after_s": 30}, None, 150, id="less"),
        pytest.param({"stale_after_s": 300}, 300, 360, id="more"),
        pytest.param({"stale_after_s": 120.5}, 120.5, 181, id="a fraction"),
        pytest.param({"stale_after_s": 1000000}, 1000000, 1000060, id="a number with many digits"),
    ],
)
def test_the_grace_period_of_a_steering_agent_covers_a_stale_report(
    settings: dict[str, float], waits: float | None, grace_s: int, tmp_path: Path
) -> None:
    values = {"settings": settings, "agent": {"steering": {"permitted": True}}}
    agents = objects(template(tmp_path, values))["DaemonSet", NAMESPACE, "headroom-agent"]
    pod = agents["spec"]["template"]["spec"]
    environment = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    found = environment.get("HEADROOM_STALE_AFTER")
    assert (found and float(found)) == waits
    assert pod["terminationGracePeriodSeconds"] == grace_s


def test_agents_of_a_node_pool_have_their_own_values(tmp_path: Path) -> None:
    label = {"key": "pool", "value": "gpu-canary"}
    steering = {"permitted": True, "byDefault": True}
    both = [{"name": "B", "value": "2"}, {"name": "C", "value": "3"}]
    pool = {"name": "canary", "nodeLabel": label, "steering": steering, "extraEnv": both}
    shared = [{"name": "A", "value": "1"}, {"name": "C", "value": "1"}]
    found = objects(template(tmp_path, {"agent": {"extraEnv": shared, "pools": [pool]}}))
    plain = found["DaemonSet", NAMESPACE, "headroom-agent"]
    canary = found["DaemonSet", NAMESPACE, "headroom-agent-canary"]
    for agents, operator, choice, writable in (
        (plain, "NotIn", None, False),
        (canary, "In", "steered", True),
    ):
        pod = agents["spec"]["template"]
        terms = pod["spec"]["affinity"]["nodeAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]["nodeSelectorTerms"]
        assert len(terms) == 3
        expected = {"key": "pool", "operator": operator, "values": ["gpu-canary"]}
        assert all(len(term["matchExpressions"]) == 2 for term in terms)
        assert all(term["matchExpressions"][1] == expected for term in terms)
        (container,) = pod["spec"]["containers"]
        environment = {each["name"]: each.get("value") for each in container["env"]}
        assert environment.get("HEADROOM_DEVICE_CHOICE") == choice
        assert len(environment) == len(container["env"])
        assert environment["A"] == "1"
        assert environment.get("B") == ("2" if writable else None)
        assert environment["C"] == ("3" if writable else "1")
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "device-plugins"]
        assert mount["readOnly"] is not writable
        labels = agents["spec"]["selector"]["matchLabels"]
        assert labels.items() <= pod["metadata"]["labels"].items()
    assert plain["spec"]["selector"] != canary["spec"]["selector"]


@pytest.mark.parametrize("platform", ["gpu-operator", "trial"])
def test_helm_lint_finds_nothing(platform: str, tmp_path: Path) -> None:
    chart = DEPLOY / "chart/headroom"
    values = {"images": IMAGE_VALUES}
    platform_values = ["--values", chart / f"platforms/{platform}.yaml"]
    shown = helm(tmp_path, "lint", chart, "--strict", *platform_values, values=values)
    assert "1 chart(s) linted, 0 chart(s) failed" in shown
    assert "[WARNING]" not in shown
    assert "[ERROR]" not in shown


def test_helm_installs_into_any_namespace(tmp_path: Path) -> None:
    on = {"enabled": True}
    everything = {"monitors": on, "rules": on, "dashboard": on, "securityContextConstraints": True}
    text = template(tmp_path, everything, namespace="gpu-team")
    assert NAMESPACE not in text
    namespaces = {key[1] for key in objects(text)}
    assert namespaces == {"", "gpu-team", "kube-system"}


def test_helms_values_reach_settings_scheduler_and_pods(tmp_path: Path) -> None:
    dcgm = {"name": "HEADROOM_DCGM_URL", "value": "http://dcgm:9400/metrics"}
    found = objects(
        template(
            tmp_path,
            {
                "settings": {"policy": "spread"},
                "kubeScheduler": {"config": {"podMaxBackoffSeconds": 60}},
                "extender": {"resources": {"limits": {"memory": "1Gi"}}},
                "imagePullSecrets": ["pull"],
                "networkPolicies": {"enabled": False},
                "crd": False,
                "agent": {"extraEnv": [dcgm]},
            },
        )
    )
    settings = settings_of(found)
    assert (settings["policy"], settings["agent_namespace"]) == ("spread", NAMESPACE)
    config = found["ConfigMap", NAMESPACE, "headroom-scheduler-config"]["data"]
    scheduler = yaml.safe_load(config["kube-scheduler.yaml"])
    assert scheduler["podMaxBackoffSeconds"] == 60
    assert scheduler["percentageOfNodesToScore"] == 100
    specs = pod_specs(found)
    extender = specs["Deployment", NAMESPACE, "headroom-scheduler"]["containers"][0]
    assert extender["resources"]["limits"] == {"memory": "1Gi"}
    assert extender["resources"]["requests"]["memory"] == "192Mi"
    assert all(spec["imagePullSecrets"] == [{"name": "pull"}] for spec in specs.values())
    agent = specs["DaemonSet", NAMESPACE, "headroom-agent"]["containers"][0]
    assert dcgm in agent["env"]
    assert not {"NetworkPolicy", "CustomResourceDefinition"} & {key[0] for key in found}


def test_a_changed_scheduler_configuration_rolls_its_pods(tmp_path: Path) -> None:
    def annotations(values: dict[str, Any]) -> dict[str, str]:
        found = objects(template(tmp_path, values))
        deployment = found["Deployment", NAMESPACE, "headroom-scheduler"]
        annotated: dict[str, str] = deployment["spec"]["template"]["metadata"]["annotations"]
        return annotated

    usual = annotations({})
    # The pods do not restart, because they reload this setting.
    assert usual == annotations({"settings": {"policy": "spread"}})
    assert usual != annotations({"kubeScheduler": {"config": {"podMaxBackoffSeconds": 60}}})


def test_a_chart_without_its_links_names_the_packaged_chart(tmp_path: Path) -> None:
    copy = tmp_path / "headroom"
    shutil.copytree(CHART, copy, ignore=shutil.ignore_patterns("files"))
    with pytest.raises(Refused, match="Use a clone, or a package made by: helm package"):
        helm(tmp_path, "template", "headroom", copy, values={"images": IMAGE_VALUES})


def test_a_packaged_chart_renders_the_same_objects(tmp_path: Path) -> None:
    helm(tmp_path, "package", CHART, "--destination", tmp_path)
    (package,) = tmp_path.glob("headroom-*.tgz")
    values = {"images": IMAGE_VALUES, "monitors": {"enabled": True}}
    command = "template", "headroom", package, "--namespace", NAMESPACE
    packaged = objects(helm(tmp_path, *command, values=values))
    assert packaged == objects(template(tmp_path, values))
    assert len(packaged) > 60


def test_links_of_the_chart_lead_to_the_files_of_kustomize() -> None:
    links = {each.name: each.resolve() for each in (DEPLOY / "chart/headroom/files").iterdir()}
    assert links == {
        "values.yaml": CHART / "values.yaml",
        "base": DEPLOY / "base",
        "default-scheduler": DEPLOY / "default-scheduler",
        "device-taints.yaml": DEPLOY / "components/device-taints/device-taints.yaml",
        "mirror.yaml": DEPLOY / "components/in-tree-mirror/rbac.yaml",
        "cert-manager.yaml": DEPLOY / "components/cert-manager/certificates.yaml",
        "monitors.yaml": DEPLOY / "components/monitors/monitors.yaml",
        "monitors-rbac.yaml": DEPLOY / "components/monitors/rbac.yaml",
        "scc.yaml": DEPLOY / "components/openshift/scc.yaml",
        "rules.yaml": DEPLOY / "components/rules/rules.yaml",
        "dashboard.json": DEPLOY / "components/dashboard/headroom.json",
    }
    assert ROOT in DEPLOY.parents
