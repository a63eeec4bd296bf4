"""Checks on which nodes the pods of a platform run."""

from pathlib import Path

import pytest

from tests.deploy.rendered import objects, pod_specs, template

pytestmark = pytest.mark.slow


def test_all_pods_except_agents_run_on_control_plane_nodes_with_kubeadm(tmp_path: Path) -> None:
    specs = pod_specs(objects(template(tmp_path, {}, "kubeadm")))
    taint = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
    assert len(specs) == 8
    for key, spec in specs.items():
        expected = [{"operator": "Exists"}] if key[2] == "headroom-agent" else [taint]
        assert spec["tolerations"] == expected, key
