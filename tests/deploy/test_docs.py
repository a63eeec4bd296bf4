"""Checks that the folders, chart values and components that the docs name exist."""

import os
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from headroom.contract.annotations import PREFIX, USER_ANNOTATIONS, VRAM_FROM, VRAM_REQUESTED
from headroom.kubectl.debug_api_client import OBSERVES
from tests.controlplane import ROOT, built
from tests.deploy.pages import blocks, read
from tests.deploy.rendered import (
    CHART,
    CHART_ONLY,
    COMPONENTS,
    DEPLOY,
    PLATFORMS,
    objects,
    run,
    template,
)

pytestmark = pytest.mark.slow

PAGES = (
    *(f"get-started/{page.name}" for page in sorted((ROOT / "docs/get-started").glob("*.md"))),
    *("operate/uninstall.md", "operate/upgrade.md"),
)


def test_repository_paths_on_the_pages_exist() -> None:
    named = {
        (page, path)
        for page in PAGES
        for path in re.findall(r"(?<![\w/-])deploy/[\w./-]*[\w-]", read(page))
    }
    assert len(named) > 12
    example = {"deploy/overlays/OVERLAY", "deploy/components/NAME"}
    assert {
        each for each in named if not (ROOT / each[1]).exists() and each[1] not in example
    } == set()


def test_every_component_and_platform_is_on_the_page_with_its_value() -> None:
    page = read("get-started/kustomize.md")
    platforms = read("get-started/platforms.md")
    values = yaml.safe_load((DEPLOY / "chart/headroom/values.yaml").read_text())
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for component, does in COMPONENTS.items():
        (row,) = [each for each in rows if f"`{component}`" in each.split("|")[1]]
        for path, value in flat(does):
            written = f"{path}: {yaml.safe_dump(value, default_flow_style=True).split()[0]}"
            assert written.removesuffix("...") in row, row
            here: Any = values
            for part in path.split("."):
                here = here[part]
    for platform in PLATFORMS:
        assert f"`{platform}` | `{platform}.yaml`" in platforms
    for platform, overlay in CHART_ONLY.items():
        assert f"`{overlay}` | `{platform}.yaml`" in platforms


def test_the_pages_name_the_overlays_that_do_not_observe_at_first() -> None:
    def sets_mode(text: str) -> bool:
        return "mode: enforce" in text

    enforcing = {
        path.parent.name
        for path in (DEPLOY / "overlays").glob("*/headroom.yaml")
        if sets_mode(path.read_text())
    }
    charts = {
        path.stem
        for path in (DEPLOY / "chart/headroom/platforms").glob("*.yaml")
        if sets_mode(path.read_text())
    }
    assert enforcing == charts == {"trial"}
    platforms = read("get-started/platforms.md").splitlines()
    rows = [line for line in platforms if line.startswith("|") and "Its mode is `enforce`" in line]
    assert [row.split("|")[2].strip() for row in rows] == ["`trial`"]
    assert "overlay `trial` enforces" in read("get-started/kustomize.md")
    assert "Only `trial.yaml` sets mode enforce" in " ".join(read("get-started/helm.md").split())
    assert OBSERVES.partition(":")[0] in read("get-started/helm.md")


def flat(values: Any, begin: str = "") -> list[tuple[str, Any]]:
    if not isinstance(values, dict):
        return [(begin, values)]
    return [
        pair for key, each in values.items() for pair in flat(each, f"{begin}.{key}".lstrip("."))
    ]


def test_documented_helm_commands_set_the_required_images() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    required = {name for name, image in values["images"].items() if not image["repository"]}
    named = re.findall(r"--set images\.(\w+)\.repository=", read("get-started/helm.md"))
    assert set(named) == required


def test_helm_and_kustomize_allow_the_same_prometheus(tmp_path: Path) -> None:
    """Compare the first two blocks of the page, which are for kube-prometheus-stack."""
    values, patches, *_ = (
        yaml.safe_load(block.text)
        for block in blocks("get-started/monitoring.md")
        if block.language == "yaml"
    )
    components = [os.path.relpath(DEPLOY / f"components/{name}", tmp_path) for name in values]
    overlay = os.path.relpath(DEPLOY / "overlays/device-plugin", tmp_path)
    kustomization = {"resources": [overlay], "components": components, **patches}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    kustomized = objects(run([built("kubectl")["kubectl"], "kustomize", tmp_path], tmp_path))
    templated = objects(template(tmp_path, values))
    binding = "ClusterRoleBinding", "", "headroom-metrics"
    assert kustomized[binding]["subjects"] == templated[binding]["subjects"]
    assert kustomized[binding]["subjects"] == [
        {
            "kind": "ServiceAccount",
            "name": "RELEASE-kube-prometheus-stack-prometheus",
            "namespace": "monitoring",
        }
    ]
    operated = ("ServiceMonitor", "PodMonitor", "PrometheusRule")
    for found in (kustomized, templated):
        labelled = [
            each["metadata"]["labels"]["release"] == "RELEASE"
            for key, each in found.items()
            if key[0] in operated
        ]
        assert labelled == [True] * 7


def test_the_chart_and_the_page_agree_on_the_requirements_of_a_pod(tmp_path: Path) -> None:
    notes = (CHART / "templates/NOTES.txt").read_text()
    begin = notes.index("apiVersion: v1")
    shown = textwrap.dedent(f"  {notes[begin:].split(chr(10) * 2)[0]}")
    page = [block.text for block in blocks("get-started/helm.md") if block.language == "yaml"]
    assert [yaml.safe_load(shown)] == [yaml.safe_load(each) for each in page]
    assert "schedulerName" not in notes


def test_uninstalling_keeps_annotations_of_users() -> None:
    (kept,) = re.findall(r"' headroom\.gpu/\(([\w|-]+)\)\$'", read("operate/uninstall.md"))
    of_webhook = {VRAM_FROM, VRAM_REQUESTED}
    assert {PREFIX + key for key in kept.split("|")} == set(USER_ANNOTATIONS) - of_webhook


def test_the_permissions_of_the_agent_are_on_the_page() -> None:
    page = read("operate/security.md").split("## Permissions of the agent on its node")[1]
    (daemonset,) = yaml.safe_load_all((DEPLOY / "base/agent.yaml").read_text())
    spec = daemonset["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    for mount in container["volumeMounts"]:
        read_only = ", read only" if mount.get("readOnly") else " |"
        assert f"| `{mount['mountPath']}`{read_only}" in page
    for capability in container["securityContext"]["capabilities"]["add"]:
        assert f"`{capability}`" in page
    assert "`hostPID`" in page


def test_the_files_for_usual_changes_exist() -> None:
    text = (ROOT / "docs/design/where-to-change.md").read_text()
    named = re.findall(r"`((?:[\w-]+/)+[\w.-]+)`", text)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


_FILE = re.compile(r"(?<![\w./$~{}\"'-])(?:[\w-]+/)+[\w-]+\.(?:py|md|yaml|toml|sh|js)\b")
#: Paths that exist only in a user's clone or in the unpacked chart, and paths that a test uses as
#: missing files.
_ELSEWHERE = {
    *("files/base/crd.yaml", "files/base/crd-vramprofile.yaml"),
    "tests/test_figure.py",
}


def test_files_in_docs_and_code_exist() -> None:
    """A path may start below a folder of the repository, such as `core/placement/fit.py`."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    known = {"/".join(name.split("/")[depth:]) for name in files for depth in range(9)}
    named = {
        (name, path)
        for name in files
        if Path(name).suffix in ("", ".py", ".md", ".yaml", ".toml", ".sh", ".js")
        for path in _FILE.findall((ROOT / name).read_text(errors="replace"))
    }
    assert len(named) > 300
    assert {
        (name, path)
        for name, path in named
        if path not in known | _ELSEWHERE and not (ROOT / name).parent.joinpath(path).exists()
    } == set()
