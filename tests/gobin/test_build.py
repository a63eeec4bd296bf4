"""Tests the targets of the build script, and checks that it builds nothing if no file has
changed.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.gobin import kubernetes

SCRIPT = Path(__file__).with_name("build.py")


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gobin_build", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_module_is_pinned_and_has_a_package(build: ModuleType) -> None:
    modules = sorted(SCRIPT.parent.glob("*/go.mod"))
    assert {"etcd", "nvidia-device-plugin", "gpu-feature-discovery", "helm"} <= {
        module.parent.name for module in modules
    }
    for module in modules:
        assert build.tool_lines(module.read_text())
        assert build.required_go(module.read_text()) >= (1, 22, 0)
        assert module.with_name("go.sum").exists()


def test_each_version_of_kubernetes_is_pinned_in_its_own_folder(build: ModuleType) -> None:
    folders = {path.parent for path in SCRIPT.parent.glob("kubernetes-*/go.mod")}
    pinned = {folder.name: (folder / "go.mod").read_text() for folder in folders}
    assert {name: build.kubernetes_version(go_mod) for name, go_mod in pinned.items()} == {
        f"kubernetes-{kubernetes.minor_of(version)}": version for version in kubernetes.VERSIONS
    }
    for version in kubernetes.VERSIONS:
        packages = build.tool_lines(pinned[f"kubernetes-{kubernetes.minor_of(version)}"])
        expected = [
            f"k8s.io/kubernetes/cmd/{name}" for name in kubernetes.built_components(version)
        ]
        assert packages == expected


#: A go.mod without dependencies, so that the build needs no network.
GO_MOD = "module small\n\ngo 1.24.0\n\ntool small\n"
MAIN_GO = 'package main\n\nfunc main() { println("small") }\n'


@pytest.mark.slow
def test_a_module_is_built_once_and_again_if_its_own_program_changes(tmp_path: Path) -> None:
    module = tmp_path / "modules/small"
    module.mkdir(parents=True)
    (module / "go.mod").write_text(GO_MOD)
    (module / "go.sum").touch()
    (module / "main.go").write_text(MAIN_GO)
    script = shutil.copy(SCRIPT, module.parent)
    command = [sys.executable, script, f"--cache={tmp_path / 'cache'}"]

    def built() -> tuple[str, str]:
        """Run the build. Return the output of the built program, and the output of the build
        without the path.
        """
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        name, path = done.stdout.strip().split("\t")
        assert name == "small"
        shown = subprocess.run([path], capture_output=True, text=True, check=True).stderr
        return shown, done.stderr

    shown, progress = built()
    assert shown == "small\n"
    assert re.fullmatch(r"small: built in \d+ s", progress.splitlines()[-1])
    assert built() == ("small\n", "")
    (module / "main.go").write_text(MAIN_GO.replace("small", "changed"))
    assert built()[0] == "changed\n"
