"""Checks that the real helm renders a chart without a network or a cluster."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.controlplane import built
from tests.processes import starts_processes


@pytest.fixture(scope="session")
@starts_processes
def binary(request: pytest.FixtureRequest) -> Path:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    # Show the progress of the build, because the first build takes minutes.
    with capture.global_and_fixture_disabled():
        return built("helm")["helm"]


def test_helm_renders_the_chart_that_it_creates(binary: Path, tmp_path: Path) -> None:
    def helm(*arguments: str) -> str:
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KUBECONFIG": os.devnull}
        command = [str(binary), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout

    helm("create", "chart")
    rendered = helm("template", "release", "chart", "--set", "replicaCount=3")
    objects = {each["kind"]: each for each in yaml.safe_load_all(rendered) if each}
    assert objects["Deployment"]["metadata"]["name"] == "release-chart"
    assert objects["Deployment"]["spec"]["replicas"] == 3
