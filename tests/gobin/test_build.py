"""The build script: what it would build, and that it does nothing where nothing changed."""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.controlplane import built

SCRIPT = Path(__file__).with_name("build.py")


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gobin_build", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kubernetes_is_told_its_version(build: ModuleType) -> None:
    go_mod = "go 1.26.0\n\ntool k8s.io/kubernetes/cmd/kubelet\nrequire k8s.io/kubernetes v1.36.3\n"
    *_, ldflags, package = build.build_flags(go_mod)
    assert package == "k8s.io/kubernetes/cmd/kubelet"
    assert "-X k8s.io/component-base/version.gitVersion=v1.36.3" in ldflags
    assert "gitMinor=36 " in ldflags


def test_a_module_that_does_not_say_what_to_build_is_refused(build: ModuleType) -> None:
    with pytest.raises(SystemExit, match="tool"):
        build.build_flags("go 1.26.0\n")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("", "0", id="no C, so that a binary runs wherever it is copied"),
        pytest.param("// build: CGO_ENABLED=1\n", "1", id="C where the module says so"),
    ],
)
def test_a_module_says_whether_it_needs_c(build: ModuleType, line: str, expected: str) -> None:
    assert build.build_environment(f"go 1.26.0\n{line}tool x/y\n")["CGO_ENABLED"] == expected


def test_every_module_is_pinned_and_names_a_package(build: ModuleType) -> None:
    modules = sorted(SCRIPT.parent.glob("*/go.mod"))
    assert {module.parent.name for module in modules} >= {
        "etcd",
        "kube-apiserver",
        "kube-scheduler",
        "kube-scheduler-1.35",
        "kube-scheduler-1.34",
        "kube-controller-manager",
        "kubectl",
    }
    for module in modules:
        assert build.build_flags(module.read_text())
        assert build.required_go(module.read_text()) >= (1, 24, 0)
        assert module.with_name("go.sum").exists()


def test_nothing_is_done_where_nothing_changed(build: ModuleType) -> None:
    first = built("etcd")
    begun_s = time.monotonic()
    assert built("etcd") == first
    assert time.monotonic() - begun_s < 2.0
    assert first["etcd"].parent.parent == build.default_cache()


def test_a_build_that_fails_says_why_and_leaves_no_binary(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "modules/broken"
    module.mkdir(parents=True)
    (module / "go.mod").write_text("module broken\n\ngo 1.21.0\n\ntool broken/missing\n")
    (module / "go.sum").touch()
    monkeypatch.setattr(build, "MODULES", tmp_path / "modules")
    with pytest.raises(SystemExit, match="broken: go build failed"):
        build.build("broken", tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/broken*"))


def test_a_name_that_is_no_module_is_refused() -> None:
    answer = subprocess.run(
        [sys.executable, str(SCRIPT), "nonsense"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 2
    assert "no such module: nonsense" in answer.stderr
