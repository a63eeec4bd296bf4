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


def test_a_component_without_a_version_is_the_newest_released_version(
    build: ModuleType,
) -> None:
    targets = build.targets()
    assert targets["kubelet"] == targets["kubelet-1.37"]
    assert "kubelet-1.38" not in targets
    assert targets["kube-scheduler"] == targets["kube-scheduler-1.37"]
    assert targets["kube-scheduler-1.38"].module.name == "kubernetes-1.38"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("kubelet", True, id="the newest version"),
        pytest.param("kubelet-1.36", True, id="a version that also runs"),
        pytest.param("kubelet-1.37", False, id="the newest version, by its number"),
        pytest.param("kubelet-1.33", False, id="another version"),
        pytest.param("helm", True, id="not of Kubernetes"),
        pytest.param("kube-proxy", False, id="for manual checks"),
    ],
)
def test_the_default_targets_are_the_binaries_that_make_test_runs(
    build: ModuleType, name: str, expected: bool
) -> None:
    assert build.in_default_set(name) is expected
    assert name in build.targets()


def test_a_version_is_pinned_from_the_go_mod_of_kubernetes() -> None:
    replaced = "".join(
        f"\tk8s.io/{n} => ./staging/src/k8s.io/{n}\n" for n in ("api", "endpointslice")
    )
    upstream = f"module k8s.io/kubernetes\n\ngo 1.23.0\n\nreplace (\n{replaced})\n"
    lines = kubernetes.go_mod("1.32.13", upstream).splitlines()
    assert lines[:3] == [
        "module headroom.gpu/tests/gobin/kubernetes-1.32",
        "go 1.23.0",
        "tool k8s.io/kubernetes/cmd/kube-apiserver",
    ]
    assert lines[-3:] == [
        "require k8s.io/kubernetes v1.32.13",
        "replace k8s.io/api => k8s.io/api v0.32.13",
        "replace k8s.io/endpointslice => k8s.io/endpointslice v0.32.12",
    ]


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
