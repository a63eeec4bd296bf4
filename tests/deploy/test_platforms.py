"""A real API server accepts what the chart renders for each platform, field by field."""

from pathlib import Path
from typing import Any

import pytest

from tests.controlplane import ControlPlane
from tests.deploy.rendered import (
    CHART,
    CHART_ONLY,
    EVERYTHING,
    INSTEAD,
    PLATFORMS,
    objects,
    pod_specs,
    template,
)

pytestmark = pytest.mark.slow

ALL = (*PLATFORMS, *CHART_ONLY)


def accepted(plane: ControlPlane, text: str, folder: Path) -> int:
    """Return how many objects the API server accepts; raise ``CalledProcessError`` otherwise."""
    file = folder / "rendered.yaml"
    file.write_text(text)
    flags = "--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts"
    lines = plane.kubectl("apply", *flags, f"--filename={file}").splitlines()
    assert all(line.endswith("serverside-applied (server dry run)") for line in lines)
    return len(lines)


@pytest.mark.parametrize("platform", ALL)
def test_the_api_server_accepts_every_object_of_a_platform(
    platform: str, plane: ControlPlane, tmp_path: Path
) -> None:
    text = template(tmp_path, {}, platform)
    assert accepted(plane, text, tmp_path) == len(objects(text)) > 60


@pytest.mark.parametrize("values", [EVERYTHING, INSTEAD], ids=["all options", "other options"])
def test_the_api_server_accepts_all_options(
    values: dict[str, Any], plane: ControlPlane, tmp_path: Path
) -> None:
    text = template(tmp_path, values)
    assert accepted(plane, text, tmp_path) == len(objects(text)) > 60


@pytest.mark.parametrize("platform", ALL)
def test_the_first_lines_of_a_platform_list_what_was_tested(platform: str) -> None:
    text = (CHART / f"platforms/{platform}.yaml").read_text()
    comments = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    assert " Tested: " in comments
    # Nothing of the clouds is tested on them, and no cloud is named as tested.
    if platform != "trial":
        assert "untested: " in comments or "Untested: " in comments


def test_everything_but_the_agents_runs_on_control_plane_nodes_of_kubeadm(tmp_path: Path) -> None:
    specs = pod_specs(objects(template(tmp_path, {}, "kubeadm")))
    taint = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
    assert len(specs) == 7
    for key, spec in specs.items():
        expected = [{"operator": "Exists"}] if key[2] == "headroom-agent" else [taint]
        assert spec["tolerations"] == expected, key
