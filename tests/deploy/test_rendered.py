"""Checks that Kustomize and Helm install the same objects on every platform, without
placeholders.
"""

import functools
import json
import operator
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from headroom.contract.annotations import ScoringPolicy
from headroom.runtime.settings.loading import EXAMPLES, load_settings
from headroom.runtime.settings.settings import Mode, Settings
from tests.deploy.rendered import (
    AS_OVERLAYS,
    CHART_ONLY,
    COMPONENTS,
    DEPLOY,
    IMAGES,
    NAMESPACE,
    PLATFORMS,
    SERVING,
    Key,
    Objects,
    named_images,
    objects,
    overlay,
    pod_specs,
    template,
    with_components,
)

pytestmark = pytest.mark.slow


#: Labels that only Helm writes. Helm also writes a checksum that restarts the pods after a change.
_HELMS_LABELS = ("app.kubernetes.io/managed-by", "helm.sh/chart")


_CHECKSUM = "checksum/scheduler-config"


#: Fields with CEL expressions, in which kustomize breaks lines.
_CEL = ("expression", "messageExpression")


#: Lists whose order has no meaning, and the field by which their entries are sorted.
_UNORDERED = {"env": "name", "volumes": "name", "volumeMounts": "mountPath"}


def plain(found: Objects) -> Objects:
    """Return the objects in a form that can be compared. Remove fields that only Helm writes and
    the Namespace, which Helm creates itself, and use one spelling for equal values.
    """
    plain_objects = [_plain(each) for key, each in found.items() if key[0] != "Namespace"]
    return {
        (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]): each
        for each in plain_objects
    }


def _plain(each: dict[str, Any]) -> dict[str, Any]:
    metadata = each["metadata"]
    for name in _HELMS_LABELS:
        metadata.get("labels", {}).pop(name, None)
    if (
        each["kind"] == "Job"
    ):  # test_jobs_stay_for_gitops_tools covers how a Job survives an upgrade.
        metadata["name"] = re.sub("-[0-9a-f]{8}$", "", metadata["name"])
        metadata.pop("annotations", None)
        each["spec"].pop("ttlSecondsAfterFinished", None)
    if each["kind"] == "Deployment":
        each["spec"]["template"]["metadata"].get("annotations", {}).pop(_CHECKSUM, None)
    if each["kind"] == "ConfigMap":  # The layout of the text differs.
        each["data"] = {name: yaml.safe_load(text) for name, text in each["data"].items()}
        if metadata["name"] == "headroom-config":  # The names of the files differ.
            each["data"] = functools.reduce(operator.or_, each["data"].values())
    ordered: dict[str, Any] = _in_order(each)
    return ordered


def _in_order(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _in_order(each, key) for key, each in value.items()}
    if name in _CEL and isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, list):
        by = _UNORDERED.get(name)
        return [_in_order(each) for each in (sorted(value, key=lambda e: e[by]) if by else value)]
    return value


def same(kustomized: Objects, templated: Objects) -> None:
    one, other = plain(kustomized), plain(templated)
    assert one.keys() == other.keys()
    for key in one:
        assert one[key] == other[key], key


@pytest.mark.parametrize("platform", PLATFORMS)
def test_kustomize_and_helm_render_the_same_objects(platform: str, tmp_path: Path) -> None:
    kustomized = objects(named_images(overlay(DEPLOY / "overlays" / platform)))
    templated = objects(template(tmp_path, AS_OVERLAYS, platform))
    assert ("Deployment", NAMESPACE, "headroom-scheduler") in kustomized
    same(kustomized, templated)


#: Sets of components that do not conflict. Together they contain each component once.
TOGETHER = (
    ("privileged", "deny-other-schedulers", "dashboard", "openshift", "gitops"),
    ("control-on-gpu-nodes",),
    ("console-host-network",),
    ("no-ptrace", "selinux", "backoff-gate", "in-tree-mirror", "webhook-host-network"),
    ("steering", "mig", "cert-manager", "monitors", "rules", "device-taints", "open-metrics"),
)


@pytest.mark.parametrize("components", TOGETHER, ids=" ".join)
def test_each_component_has_an_equivalent_value_of_the_chart(
    components: tuple[str, ...], tmp_path: Path
) -> None:
    values: dict[str, Any] = dict(AS_OVERLAYS)
    for component in components:
        for name, value in COMPONENTS[component].items():
            values[name] = {**values[name], **value} if name in values else value
    kustomized = objects(named_images(with_components(tmp_path, components)))
    same(kustomized, objects(template(tmp_path, values)))


def test_the_variant_for_the_clusters_own_scheduler_has_an_equivalent_value(tmp_path: Path) -> None:
    kustomized = objects(named_images(with_components(tmp_path, ["../default-scheduler"])))
    templated = template(tmp_path, {"defaultScheduler": {"enabled": True}})
    same(kustomized, objects(templated))
    moved = template(tmp_path, {"defaultScheduler": {"enabled": True, "clusterIP": "10.43.0.9"}})
    assert moved == templated.replace("10.96.0.53", "10.43.0.9")


@pytest.mark.parametrize("component", sorted(COMPONENTS))
def test_each_component_changes_something_by_itself(component: str) -> None:
    kustomization = yaml.safe_load(
        (DEPLOY / "components" / component / "kustomization.yaml").read_text()
    )
    assert {"patches", "resources", "configMapGenerator"} & kustomization.keys()


def test_every_overlay_and_component_is_compared() -> None:
    def folders(where: str) -> set[str]:
        return {each.name for each in (DEPLOY / where).iterdir()}

    assert folders("overlays") == set(PLATFORMS)
    assert folders("components") == set(COMPONENTS)
    assert sorted(each for group in TOGETHER for each in group) == sorted(COMPONENTS)
    platforms = {each.stem for each in (DEPLOY / "chart/headroom/platforms").iterdir()}
    assert platforms == {*PLATFORMS, *CHART_ONLY}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_images_have_impossible_names_until_a_user_sets_them(platform: str) -> None:
    specs = pod_specs(objects(overlay(DEPLOY / "overlays" / platform)))
    images = {
        container["image"]
        for spec in specs.values()
        for container in (*spec["containers"], *spec.get("initContainers", ()))
    }
    assert images
    assert images <= set(IMAGES)


def test_processes_that_read_prometheus_mount_its_token_and_ca(tmp_path: Path) -> None:
    secret = {"secretName": "headroom-prometheus", "optional": True, "defaultMode": 0o440}
    examples = {EXAMPLES[name] for name in ("prometheus_token_file", "prometheus_ca")}
    (folder,) = {str(Path(each).parent) for each in examples}
    default = {"defaultScheduler": {"enabled": True}}
    for found in (
        objects(overlay(DEPLOY / "overlays/device-plugin")),
        objects(template(tmp_path, {})),
        objects(template(tmp_path, default)),
    ):
        mounting = set()
        for (_, _, name), spec in pod_specs(found).items():
            for each in spec["containers"]:
                for mount in each.get("volumeMounts", ()):
                    if mount["name"] == "prometheus":
                        assert mount["mountPath"] == folder
                        assert mount["readOnly"] is True
                        (volume,) = (v for v in spec["volumes"] if v["name"] == "prometheus")
                        assert volume["secret"] == secret
                        mounting.add((name, each["name"]))
        assert {container for _, container in mounting} == {"extender", "console", "recorder"}


def test_the_rules_for_the_operator_equal_those_for_prometheus() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/rules.yaml").read_text())
    resource = yaml.safe_load((DEPLOY / "components/rules/rules.yaml").read_text())
    assert resource["spec"] == rules
    assert len(rules["groups"]) > 2


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_object_has_headrooms_label(platform: str) -> None:
    found = objects(overlay(DEPLOY / "overlays" / platform))
    unlabelled = [
        key
        for key, each in found.items()
        if each["metadata"]["labels"].get("app.kubernetes.io/part-of") != "headroom"
    ]
    assert unlabelled == []


#: Prefixes of roles that exist in every cluster, or in every OpenShift cluster.
OF_KUBERNETES = ("system:", "extension-apiserver-authentication-reader")


def references(specs: dict[Key, dict[str, Any]]) -> set[tuple[str, str]]:
    """Return the kind and the name of each ConfigMap, ServiceAccount and class that the pods refer
    to.
    """
    found: set[tuple[str, str]] = set()
    for spec in specs.values():
        found.add(("ServiceAccount", spec["serviceAccountName"]))
        if "priorityClassName" in spec:
            found.add(("PriorityClass", spec["priorityClassName"]))
        for volume in spec.get("volumes", ()):
            if "configMap" in volume:
                found.add(("ConfigMap", volume["configMap"]["name"]))
    return found


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_referenced_object_exists(platform: str) -> None:
    found = objects(overlay(DEPLOY / "overlays" / platform))
    there = {(kind, name) for kind, _, name in found}
    assert references(pod_specs(found)) <= there
    for (kind, namespace, name), each in found.items():
        if kind.endswith("RoleBinding"):
            role = each["roleRef"]
            ours = (role["kind"], namespace if role["kind"] == "Role" else "", role["name"])
            assert ours in found or role["name"].startswith(OF_KUBERNETES), name
            for subject in each["subjects"]:
                assert (subject["kind"], subject["namespace"], subject["name"]) in found, name
        if kind == "Service":
            selected = [
                template["spec"]["template"]
                for key, template in found.items()
                if key[0] in SERVING
                and each["spec"]["selector"].items()
                <= template["spec"]["template"]["metadata"]["labels"].items()
            ]
            assert selected, name
            ports = {
                port["name"]
                for pod in selected
                for container in pod["spec"]["containers"]
                for port in container.get("ports", ())
            }
            assert {port["targetPort"] for port in each["spec"]["ports"]} <= ports, name


#: Settings of a user. Each value differs from the default and from the value in deploy/.
OWN = {"mode": "enforce", "policy": "pack", "stale_after_s": 31, "bind_deadline_s": 1.25}


@pytest.mark.parametrize("platform", sorted(path.name for path in DEPLOY.glob("overlays/*")))
def test_a_new_installation_observes_until_the_user_says_otherwise(
    platform: str, tmp_path: Path
) -> None:
    """With each overlay, each component, and the variant for the cluster's own kube-scheduler, the
    user's file changes only the settings that it contains.
    """
    variant = DEPLOY / "default-scheduler"
    # Components change no settings, so one overlay is enough for all of them.
    components = sorted(COMPONENTS) if platform == "device-plugin" else ()
    shipped = rendered_settings(tmp_path / "shipped", platform, [], None)
    of_variant = rendered_settings(tmp_path / "variant", platform, [variant], None)
    # A trial enforces at once, because no workloads run on its simulated GPUs.
    expected_mode = Mode.ENFORCE if platform == "trial" else Mode.OBSERVE
    assert {shipped.mode, of_variant.mode} == {expected_mode}
    expected = OWN | {"mode": Mode.ENFORCE, "policy": ScoringPolicy.PACK}
    chosen = ([], [variant], *([DEPLOY / "components" / each] for each in components))
    for number, parts in enumerate(chosen):
        own = rendered_settings(tmp_path / f"{number}", platform, parts, OWN)
        before = of_variant if variant in parts else shipped
        assert own.model_dump(exclude=set(OWN)) == before.model_dump(exclude=set(OWN)), parts
        assert {name: getattr(own, name) for name in OWN} == expected, parts
        assert own.tls is not None
        assert (own.scheduler_name == "default-scheduler") == (variant in parts)


def test_every_file_of_settings_is_added_and_replaces_no_other() -> None:
    behaviors = {
        path.parent.relative_to(DEPLOY).as_posix(): generator.get("behavior", "create")
        for path in DEPLOY.glob("**/kustomization.yaml")
        for generator in yaml.safe_load(path.read_text()).get("configMapGenerator", ())
        if generator["name"] == "headroom-config"
    }
    assert behaviors == {
        "base": "create",
        "default-scheduler": "merge",
        "overlays/multi-tenant": "merge",
        "overlays/trial": "merge",
    }


def rendered_settings(
    folder: Path, platform: str, parts: Sequence[Path], own: Mapping[str, Any] | None
) -> Settings:
    """Render a user's overlay in the empty ``folder``. Return the settings that the programs read
    from the mounted ConfigMap.
    """
    folder.mkdir()
    kustomization: dict[str, Any] = {
        "resources": [os.path.relpath(DEPLOY / "overlays" / platform, folder)],
        "components": [os.path.relpath(part, folder) for part in parts],
        "generatorOptions": {"disableNameSuffixHash": True},
    }
    if own is not None:
        (folder / "headroom.yaml").write_text(yaml.safe_dump(dict(own)))
        config = {"name": "headroom-config", "namespace": NAMESPACE, "behavior": "merge"}
        kustomization["configMapGenerator"] = [config | {"files": ["headroom.yaml"]}]
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization))
    mounted = folder / "mounted"
    mounted.mkdir()
    for name, text in objects(overlay(folder))["ConfigMap", NAMESPACE, "headroom-config"][
        "data"
    ].items():
        (mounted / name).write_text(text)
    return load_settings(mounted, {})
