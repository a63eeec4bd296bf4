"""The pages name what is there: folders, values of the chart, components."""

import re
from typing import Any

import pytest
import yaml

from tests.controlplane import ROOT
from tests.deploy.rendered import COMPONENTS, DEPLOY, PLATFORMS

pytestmark = pytest.mark.slow

PAGES = ("install.md", "operations.md")


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


@pytest.mark.parametrize("page", PAGES)
def test_paths_of_the_repository_are_there(page: str) -> None:
    named = set(re.findall(r"(?<![\w/-])deploy/[\w./-]*[\w-]", read(page)))
    assert named
    missing = {path for path in named if path != "deploy/overlays/OVERLAY"}
    assert {path for path in missing if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", read(page)):
        name, _, anchor = target.partition("#")
        text = read(name or page)
        headings = {
            re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
            for line in text.splitlines()
            if line.startswith("#")
        }
        assert not anchor or anchor in headings, target


def test_every_component_and_platform_is_in_the_page_with_its_value() -> None:
    page = read("install.md")
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
        assert f"`{platform}` | `{platform}.yaml`" in page


def flat(values: Any, begin: str = "") -> list[tuple[str, Any]]:
    if not isinstance(values, dict):
        return [(begin, values)]
    return [
        pair for key, each in values.items() for pair in flat(each, f"{begin}.{key}".lstrip("."))
    ]


def test_images_set_with_helm_are_those_of_the_chart() -> None:
    values = yaml.safe_load((DEPLOY / "chart/headroom/values.yaml").read_text())
    assert set(re.findall(r"--set images\.(\w+)=", read("install.md"))) == values["images"].keys()


def test_what_the_agent_may_is_in_the_page() -> None:
    page = read("install.md").split("## What an agent may do")[1]
    (daemonset,) = yaml.safe_load_all((DEPLOY / "base/agent.yaml").read_text())
    spec = daemonset["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    for mount in container["volumeMounts"]:
        read_only = ", read only" if mount.get("readOnly") else " |"
        assert f"| `{mount['mountPath']}`{read_only}" in page
    for capability in container["securityContext"]["capabilities"]["add"]:
        assert f"`{capability}`" in page
    assert "`hostPID`" in page
