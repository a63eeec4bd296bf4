"""The build script: what it would build, and that it does nothing where nothing changed."""

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


def test_kubernetes_gets_its_version(build: ModuleType) -> None:
    go_mod = "go 1.26.0\n\ntool k8s.io/kubernetes/cmd/kubelet\nrequire k8s.io/kubernetes v1.36.3\n"
    *_, ldflags = build.build_flags(go_mod)
    assert "-X k8s.io/component-base/version.gitVersion=v1.36.3" in ldflags
    assert "gitMinor=36 " in ldflags


def test_a_module_without_a_build_target_is_rejected(build: ModuleType) -> None:
    with pytest.raises(SystemExit, match="tool"):
        build.tool_lines("go 1.26.0\n")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("", "0", id="no C, so that a binary runs wherever it is copied"),
        pytest.param("// build: CGO_ENABLED=1\n", "1", id="C if the module asks for it"),
    ],
)
def test_a_module_declares_whether_it_needs_c(build: ModuleType, line: str, expected: str) -> None:
    assert build.build_environment(f"go 1.26.0\n{line}tool x/y\n")["CGO_ENABLED"] == expected


def test_every_module_is_pinned_and_names_a_package(build: ModuleType) -> None:
    modules = sorted(SCRIPT.parent.glob("*/go.mod"))
    assert {"etcd", "nvidia-device-plugin", "gpu-feature-discovery", "helm"} <= {
        module.parent.name for module in modules
    }
    for module in modules:
        assert build.tool_lines(module.read_text())
        assert build.required_go(module.read_text()) >= (1, 22, 0)
        assert module.with_name("go.sum").exists()


def test_each_version_of_kubernetes_is_pinned_in_a_folder_of_its_own(build: ModuleType) -> None:
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


def test_a_component_without_a_version_is_the_newest_that_is_no_prerelease(
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
        pytest.param("kubelet-1.36", True, id="a version that runs beside it"),
        pytest.param("kubelet-1.37", False, id="the newest version, by its number"),
        pytest.param("kubelet-1.33", False, id="another version"),
        pytest.param("helm", True, id="not of Kubernetes"),
        pytest.param("kube-proxy", False, id="for checks by hand"),
    ],
)
def test_make_test_builds_what_it_runs(build: ModuleType, name: str, expected: bool) -> None:
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


#: A module that needs no other and no network.
GO_MOD = "module small\n\ngo 1.24.0\n\ntool small\n"
MAIN_GO = 'package main\n\nfunc main() { println("small") }\n'


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A copy of the script among modules of its own; the one there is called ``small``."""
    return copy_into(tmp_path)


def copy_into(folder: Path) -> Path:
    module = folder / "modules/small"
    module.mkdir(parents=True)
    (module / "go.mod").write_text(GO_MOD)
    (module / "go.sum").touch()
    (module / "main.go").write_text(MAIN_GO)
    return Path(shutil.copy(SCRIPT, module.parent))


@pytest.fixture(scope="module")
def first_build(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a script that has built its module once, and what it printed."""
    script = copy_into(tmp_path_factory.mktemp("built"))
    first = run(script)
    name, path = first.stdout.strip().split("\t")
    assert name == "small"
    assert subprocess.run([path], capture_output=True, text=True, check=True).stderr == "small\n"
    assert re.fullmatch(r"small: built in \d+ s", first.stderr.splitlines()[-1])
    return script.parent.parent, first.stdout


@pytest.fixture
def built_script(first_build: tuple[Path, str], tmp_path: Path) -> Path:
    """A script like ``script``, which has built its module already."""
    shutil.copytree(first_build[0], tmp_path / "copy")
    return tmp_path / "copy/modules/build.py"


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), f"--cache={script.parent.parent / 'cache'}"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_build_runs_once_and_its_seconds_are_printed_at_the_end(
    first_build: tuple[Path, str],
) -> None:
    folder, printed = first_build
    again = run(folder / "modules/build.py")
    assert (again.returncode, again.stdout, again.stderr) == (0, printed, "")


@pytest.mark.slow
def test_after_a_change_of_a_pin_the_earlier_build_is_kept(built_script: Path) -> None:
    first = run(built_script).stdout
    (built_script.parent / "small/go.mod").write_text(f"// build: CGO_ENABLED=0\n{GO_MOD}")
    second = run(built_script)
    assert "small: built in" in second.stderr
    assert second.stdout != first
    (built_script.parent / "small/go.mod").write_text(GO_MOD)
    assert run(built_script).stdout == first


@pytest.mark.slow
def test_a_change_of_the_folders_own_program_is_built(built_script: Path) -> None:
    first = run(built_script).stdout
    (built_script.parent / "small/main.go").write_text(MAIN_GO.replace("small", "changed"))
    second = run(built_script).stdout
    assert second != first
    path = second.strip().partition("\t")[2]
    assert subprocess.run([path], capture_output=True, text=True, check=True).stderr == "changed\n"


@pytest.mark.slow
def test_a_build_that_was_killed_goes_on(built_script: Path) -> None:
    path = Path(run(built_script).stdout.strip().partition("\t")[2])
    path.rename(path.with_suffix(".unfinished")).write_text("half a binary")
    assert "small: built in" in run(built_script).stderr
    assert path.read_bytes().startswith(b"\x7fELF")
    assert [each.name for each in path.parent.iterdir()] == ["small"]


@pytest.mark.slow
def test_a_failed_build_shows_the_reason_and_leaves_no_binary(script: Path) -> None:
    (script.parent / "small/main.go").write_text("package main\n\nfunc main() { nonsense() }\n")
    failed = run(script)
    assert failed.returncode == 1
    assert "small: go build failed:" in failed.stderr
    assert "undefined: nonsense" in failed.stderr
    assert failed.stdout == ""
    assert not list(script.parent.parent.glob("cache/*/small"))


def test_an_unknown_module_is_rejected() -> None:
    answer = subprocess.run(
        [sys.executable, str(SCRIPT), "nonsense"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 2
    assert "no such module: nonsense" in answer.stderr
