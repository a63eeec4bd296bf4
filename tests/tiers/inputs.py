"""The inputs of test modules that hardly depend on the product's code, and a hash of them.

The inputs of a module are the Python modules that it imports, the modules that those import, the
``conftest.py`` of its folders, and the files that ``DECLARED`` declares.
"""

import ast
import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

#: The sources of real binaries, and the script that builds them.
BINARIES = "tests/gobin/*"
#: The manifests and the chart.
MANIFESTS = "deploy/*"
#: Pinned kinds of other projects.
FOREIGN = "tests/deploy/crds/*"
#: The sources of the stand-in for NVIDIA's driver.
DRIVER = "tests/fake_nvml.c"
#: Compiled by a library of C++, whose reads no check sees.
PROTOCOLS = "tests/kubelet/*.proto"
#: Test modules that hardly depend on the product's code, with patterns of the files that they read
#: in addition to the Python modules that they import, which may be a few of the product's. ``*``
#: also matches slashes.
DECLARED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "tests/deploy/test_chart.py",
            "tests/deploy/test_platforms.py",
            "tests/deploy/test_schemas.py",
            "tests/deploy/test_subchart.py",
            "tests/deploy/test_tenants.py",
            "tests/deploy/test_values.py",
        ),
        (MANIFESTS, BINARIES),
    ),
    "tests/deploy/test_gitops.py": (MANIFESTS, FOREIGN, BINARIES),
    "tests/deploy/test_rights.py": (MANIFESTS, FOREIGN, BINARIES, "docs/operate/security.md"),
    "tests/gobin/test_build.py": (BINARIES,),
    "tests/helm/test_helm.py": (BINARIES,),
    **dict.fromkeys(
        (
            "tests/kubelet/test_node.py",
            "tests/kubelet/test_relay.py",
            "tests/nvidia/test_replicas.py",
            "tests/standin/test_conformance.py",
            "tests/standin/test_fleet.py",
            "tests/standin/test_plugin.py",
        ),
        (DRIVER, PROTOCOLS, BINARIES, "deploy/base/crd.yaml"),
    ),
    "tests/tiers/test_tiers.py": ("tests/tiers/*.py", "tests/gobin/build.py"),
}

#: Files on which every test module depends.
COMMON = ("pyproject.toml", "requirements/test.txt", "tests/conftest.py")
#: Modules whose imports are not inputs, with the reason.
NOT_FOLLOWED = {
    # It checks states that the product makes. A test module that makes one imports the product
    # itself.
    "tests/state/validation.py",
}
#: Files in which Linux distributions list the versions of installed programs.
SYSTEM = ("/etc/os-release", "/var/lib/dpkg/status")


@dataclass(eq=False)
class Repository:
    """The files of a clone that git tracks or does not ignore, and what they import."""

    root: Path
    files: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        """Raise ``CalledProcessError`` or ``OSError`` outside of a clone."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=True)
        self.files = frozenset(filter(None, done.stdout.split("\0")))

    def inputs(self, module: str, reads: Iterable[str]) -> frozenset[str]:
        """Return all inputs of a test module that reads files with these patterns."""
        parents = [str(parent) for parent in Path(module).parents if str(parent) != "."]
        settings = {f"{parent}/conftest.py" for parent in parents} & self.files
        declared = {each for each in self.files for glob in reads if fnmatchcase(each, glob)}
        return self.closure(module, *settings, *COMMON) | declared

    def closure(self, *files: str) -> frozenset[str]:
        """Return the files and all files of the repository that they import, also in functions."""
        found: set[str] = set()
        todo = [each for each in files if each in self.files]
        while todo:
            if (file := todo.pop()) not in found:
                found.add(file)
                if file.endswith(".py") and file not in NOT_FOLLOWED:
                    todo += self._imported_by(file)
        return frozenset(found)

    @functools.cache  # noqa: B019 -- a session has one
    def _imported_by(self, file: str) -> frozenset[str]:
        return self.imported((self.root / file).read_text(), file)

    def imported(self, source: str, file: str = "") -> frozenset[str]:
        """Return the files that a text of Python imports directly."""
        return frozenset(
            each for name in _names(ast.parse(source), file) for each in self.modules(name)
        )

    def modules(self, name: str) -> Iterator[str]:
        """Yield the files that the import of a name may execute: packages and the module."""
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = "/".join(parts[:end])
            yield from {f"{path}.py", f"{path}/__init__.py"} & self.files

    def fingerprint(self, module: str, reads: Iterable[str]) -> str:
        """Return the hash of the inputs' contents and of the versions of programs."""
        digest = hashlib.sha256(f"{module}\0{machine()}".encode())
        for each in sorted(self.inputs(module, reads)):
            path = self.root / each
            digest.update(f"\0{each}\0{path.is_file()}\0{os.path.islink(path)}\0".encode())
            digest.update(hashlib.sha256(_content(path)).digest())
        return digest.hexdigest()


def _content(path: Path) -> bytes:
    """Return the content of a file, or the target of a link to a folder."""
    if path.is_file():
        return path.read_bytes()
    return os.readlink(path).encode() if path.is_symlink() else b""


def _names(tree: ast.AST, file: str) -> Iterator[str]:
    """Yield the names that a module imports, and strings that name its pytest plugins."""
    package = Path(file).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *filter(None, (node.module,))))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Assign) and "pytest_plugins" in ast.dump(node.targets[0]):
            yield from ast.literal_eval(node.value)


@functools.cache
def machine() -> str:
    """Return what tests may depend on outside of the repository: versions, user and variables."""
    packages = {f"{each.name}=={each.version}" for each in importlib.metadata.distributions()}
    system = [hashlib.sha256(_content(Path(each))).hexdigest() for each in SYSTEM]
    variables = [f"{name}={text}" for name, text in os.environ.items() if name.startswith("TEST_")]
    uname = platform.uname()
    parts = (sys.version, uname.machine, uname.release, str(os.geteuid()), *system)
    return "\n".join((*parts, *sorted(packages), *sorted(variables)))
