"""Checks the chart's values of each platform: the comments about tests, and the nodes of the
pods.
"""

from pathlib import Path

import pytest

from tests.deploy.rendered import CHART, CHART_ONLY, PLATFORMS, objects, pod_specs, template

pytestmark = pytest.mark.slow

ALL = (*PLATFORMS, *CHART_ONLY)


@pytest.mark.parametrize("platform", ALL)
def test_the_first_lines_of_a_platform_state_what_was_tested(platform: str) -> None:
    text = (CHART / f"platforms/{platform}.yaml").read_text()
    comments = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    assert " Tested: " in comments
    # Nothing is tested on the clouds, and no cloud is named as tested.
    if platform != "trial":
        assert "untested: " in comments or "Untested: " in comments


def test_all_pods_except_agents_run_on_control_plane_nodes_with_kubeadm(tmp_path: Path) -> None:
    specs = pod_specs(objects(template(tmp_path, {}, "kubeadm")))
    taint = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
    assert len(specs) == 8
    for key, spec in specs.items():
        expected = [{"operator": "Exists"}] if key[2] == "headroom-agent" else [taint]
        assert spec["tolerations"] == expected, key
