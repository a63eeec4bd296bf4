"""Tests the chart as a dependency of another chart, and values that are null."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.rendered import (
    CHART,
    IMAGE_VALUES,
    NAMESPACE,
    Refused,
    helm,
    objects,
    settings_of,
    template,
)

pytestmark = pytest.mark.slow

CONDITION = {"condition": "headroom.enabled"}


def parent(folder: Path, values: Mapping[str, Any], **dependency: str) -> Path:
    """Write a chart that depends on Headroom's chart and has Headroom's package in its folder
    ``charts``.
    """
    chart = folder / "platform"
    chart.mkdir()
    about = {"name": "headroom", "version": "0.0.0", "repository": f"file://{CHART}", **dependency}
    chart.joinpath("Chart.yaml").write_text(
        yaml.safe_dump(
            {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [about]}
        )
    )
    name = dependency.get("alias", "headroom")
    given = {name: {"images": IMAGE_VALUES, **values}}
    chart.joinpath("values.yaml").write_text(yaml.safe_dump(given))
    helm(folder, "dependency", "build", "--skip-refresh", chart)
    return chart


def rendered(folder: Path, chart: Path, *flags: str) -> str:
    return helm(folder, "template", "release", chart, "--namespace", NAMESPACE, *flags)


def test_a_dependency_renders_the_same_objects_twice(tmp_path: Path) -> None:
    chart = parent(tmp_path, {}, **CONDITION)
    flags = "--set", "global.imageRegistry=registry.example,headroom.enabled=true"
    found = rendered(tmp_path, chart, *flags)
    assert found == rendered(tmp_path, chart, *flags)
    assert objects(found) == objects(template(tmp_path, {}))


def test_a_disabled_dependency_renders_nothing(tmp_path: Path) -> None:
    chart = parent(tmp_path, {"enabled": False}, **CONDITION)
    assert objects(rendered(tmp_path, chart)) == {}
    assert len(objects(rendered(tmp_path, chart, "--set", "headroom.enabled=true"))) > 60


def test_a_dependency_without_a_condition_cannot_be_disabled(tmp_path: Path) -> None:
    chart = parent(tmp_path, {"enabled": False})
    with pytest.raises(Refused, match=r"Add to its dependency: `condition: headroom\.enabled`"):
        rendered(tmp_path, chart)


def test_a_dependency_can_have_an_alias(tmp_path: Path) -> None:
    chart = parent(tmp_path, {}, alias="gpu", condition="gpu.enabled")
    found = objects(rendered(tmp_path, chart, "--set", "gpu.enabled=true"))
    usual = objects(template(tmp_path, {}))
    assert found.keys() == usual.keys()
    labels = {each["metadata"]["labels"]["helm.sh/chart"] for each in found.values()}
    assert labels == {"gpu-0.0.0"}


def test_labels_are_valid_if_the_version_has_build_metadata(tmp_path: Path) -> None:
    """For example, Flux appends the commit to the version."""
    helm(tmp_path, "package", CHART, "--version", "1.2.3+abc.1", "--destination", tmp_path)
    (package,) = tmp_path.glob("headroom-*.tgz")
    command = "template", "headroom", package, "--namespace", NAMESPACE
    found = objects(helm(tmp_path, *command, values={"images": IMAGE_VALUES}))
    labels = {each["metadata"]["labels"]["helm.sh/chart"] for each in found.values()}
    assert labels == {"headroom-1.2.3_abc.1"}


def nulls(values: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the values once for each value at this depth, with null instead of this value. Images
    keep their values.
    """
    for name, value in values.items():
        if name in ("images", "labels"):
            continue
        if depth == 1:
            yield name, None
        elif isinstance(value, dict) and (below := dict(nulls(value, depth - 1))):
            yield name, below


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("as_dependency", [False, True], ids=["alone", "as a dependency"])
def test_null_means_the_default(depth: int, as_dependency: bool, tmp_path: Path) -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    without = dict(nulls(defaults, depth))
    assert without
    usual = objects(template(tmp_path, {}))
    if as_dependency:
        chart = parent(tmp_path, without, **CONDITION)
        assert objects(rendered(tmp_path, chart)) == usual
    else:
        assert objects(template(tmp_path, without)) == usual


def container(found: str) -> dict[str, Any]:
    """Return the webhook's container."""
    deployment = objects(found)["Deployment", NAMESPACE, "headroom-webhook"]
    (first,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(first)


@pytest.mark.parametrize("limits", [None, {"memory": None}])
def test_null_removes_a_default_limit(limits: Any, tmp_path: Path) -> None:
    assert container(template(tmp_path, {}))["resources"]["limits"] == {"memory": "512Mi"}
    found = container(template(tmp_path, {"webhook": {"resources": {"limits": limits}}}))
    assert not found["resources"].get("limits")
    assert found["resources"]["requests"] == {"cpu": "50m", "memory": "128Mi"}


def test_null_removes_what_the_chart_sets_for_kube_scheduler(tmp_path: Path) -> None:
    def config(values: Mapping[str, Any]) -> Any:
        found = objects(template(tmp_path, values))
        data = found["ConfigMap", NAMESPACE, "headroom-scheduler-config"]["data"]
        return yaml.safe_load(data["kube-scheduler.yaml"])

    usual = config({})
    key = next(iter(usual.keys() - {"apiVersion", "kind"}))
    changed = config({"kubeScheduler": {"config": {key: None}}})
    assert changed == {k: v for k, v in usual.items() if k != key}


def test_null_is_a_value_only_of_settings_that_can_be_unset(tmp_path: Path) -> None:
    """Otherwise, `mode: null` would remove the shipped mode, and the default mode is enforce."""
    found = objects(template(tmp_path, {"settings": {"verbs_host": None}}))
    assert settings_of(found)["verbs_host"] is None
    with pytest.raises(Refused, match="at '/settings/mode': got null, want string"):
        template(tmp_path, {"settings": {"mode": None}})


def test_a_null_label_is_rejected_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="at '/agent/podLabels/team': got null, want string"):
        template(tmp_path, {"agent": {"podLabels": {"team": None}}})


def test_a_copy_without_links_has_the_defaults(tmp_path: Path) -> None:
    """Vendoring tools copy the folder and replace symbolic links with files."""
    copy = tmp_path / "headroom"
    shutil.copytree(CHART, copy)
    command = "template", "headroom", copy, "--namespace", NAMESPACE
    values = {"images": IMAGE_VALUES, "webhook": {"resources": None}}
    assert objects(helm(tmp_path, *command, values=values)) == objects(template(tmp_path, {}))
