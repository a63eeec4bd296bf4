"""Finds and hashes the inputs of test modules.

The inputs of a test module are all Python modules that it imports directly or indirectly, the
``conftest.py`` of its folders, what it read when it passed (tests/tiers/reads.py), and the files
that ``DECLARED`` declares.
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

#: Sources of the real binaries, and the script that builds them.
BINARIES = "tests/gobin/*"
#: Manifests and the chart.
MANIFESTS = "deploy/*"
#: CustomResourceDefinitions of other projects.
FOREIGN = "tests/deploy/crds/*"
#: Source of the fake NVIDIA driver library.
DRIVER = "tests/fake_nvml.c"
#: These files must be declared here, because a C++ library reads them, which the check of reads
#: cannot detect.
PROTOCOLS = "tests/kubelet/*.proto"
#: The agent.
AGENT = ("-m agent", "agent/*", "deploy/base/rbac.yaml")
#: The product. A module that starts a Python program has all of it as inputs, unless ``DECLARED``
#: contains the module.
PRODUCT = ("agent/*", "extender/*", "headroom/*", "deploy/*")
#: Maps test modules that start programs, but hardly depend on the product's code, to patterns of
#: the files that these programs read. ``*`` also matches slashes. A pattern that ends with a slash
#: matches only the files directly in the folder. ``-m NAME`` matches all that a Python program
#: imports.
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
    "tests/deploy/test_rights.py": (MANIFESTS, FOREIGN, BINARIES, "docs/design/security.md"),
    "tests/gobin/test_build.py": (BINARIES,),
    "tests/helm/test_helm.py": (BINARIES,),
    **dict.fromkeys(
        (
            "tests/kubelet/test_node.py",
            "tests/nvidia/test_replicas.py",
            "tests/standin/test_conformance.py",
            "tests/standin/test_fleet.py",
            "tests/standin/test_plugin.py",
        ),
        (DRIVER, PROTOCOLS, BINARIES, "deploy/base/crd.yaml"),
    ),
    # These are not about the rest of the product, and take long.
    **dict.fromkeys(
        (
            "tests/kubelet/test_device_sets.py",
            "tests/kubelet/test_init_containers.py",
            "tests/kubelet/test_steering.py",
            "tests/kubelet/test_steering_states.py",
            "tests/kubelet/test_steering_without_rights.py",
            "tests/kubelet/test_unsteered_kubelet.py",
        ),
        (DRIVER, PROTOCOLS, BINARIES, "deploy/base/crd.yaml", *AGENT),
    ),
    "tests/benchmarks/test_gpu.py": (
        *(*AGENT, DRIVER, "tests/fake_cuda.c"),
        *("benchmarks/gpu/*", "tests/benchmarks/gpu/*"),
    ),
    # The pages are followed in shells, and the package is made of these files.
    **dict.fromkeys(
        ("tests/deploy/test_installed.py", "tests/install/test_install.py"),
        (
            *(*PRODUCT, DRIVER, PROTOCOLS, BINARIES, "tests/deploy/*", "tests/install/*"),
            *("docs/get-started/*", "docs/operate/*", "release/*", "requirements/*", "*.md"),
        ),
    ),
    "tests/images/test_images.py": (
        *(*PRODUCT, "Dockerfile", ".dockerignore", "LICENSE", "README.md", "requirements/*"),
        *("release/minimal_root.py", "docs/get-started/images.md", "tests/images/*"),
    ),
    # The modules that the altered processes change.
    "tests/soak/test_detection.py": (
        *("headroom/core/journal/journal.py", "headroom/webhook/mutation.py"),
        *("agent/http_endpoints.py", "deploy/base/*", DRIVER, BINARIES),
    ),
    "tests/tiers/test_tiers.py": ("tests/tiers/*.py", "tests/gobin/build.py"),
}

#: Files that every test module depends on.
COMMON = ("pyproject.toml", "requirements/test.txt", "tests/conftest.py")
#: Modules whose imports do not count as inputs.
NOT_FOLLOWED = {
    # The module checks the product's states. A test module that creates a state imports the product
    # itself.
    "tests/state/validation.py",
}
#: Files in which a Linux distribution lists the versions of installed programs.
SYSTEM = ("/etc/os-release", "/var/lib/dpkg/status")


@dataclass(eq=False)
class Repository:
    """The files of a clone that git does not ignore, and their imports."""

    root: Path
    files: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        """Raise ``CalledProcessError`` or ``OSError`` if the folder is not a clone."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=True)
        self.files = frozenset(filter(None, done.stdout.split("\0")))

    def inputs(self, module: str, reads: Iterable[str]) -> frozenset[str]:
        """Return all inputs of a test module. ``reads`` are the patterns of the files that it
        reads.
        """
        parents = [str(parent) for parent in Path(module).parents if str(parent) != "."]
        settings = {f"{parent}/conftest.py" for parent in parents} & self.files
        return self.closure(module, *settings, *COMMON) | self.matching(reads)

    def matching(self, patterns: Iterable[str]) -> frozenset[str]:
        """Return the files that match one of the patterns of ``DECLARED``, and the files that
        Python imports if a pattern is ``-m`` and the name of a module.
        """
        return frozenset().union(*map(self._matching, patterns))

    @functools.cache  # noqa: B019 -- a session has one
    def _matching(self, pattern: str) -> frozenset[str]:
        if pattern.startswith("-m "):
            name = pattern.removeprefix("-m ")
            return self.closure(*self.modules(name), *self.modules(f"{name}.__main__"))
        if pattern.endswith("/"):
            folder = pattern[:-1]
            return frozenset(
                each for each in self.files if (each.rpartition("/")[0] or ".") == folder
            )
        if "*" in pattern:
            return frozenset(each for each in self.files if fnmatchcase(each, pattern))
        return self.files & {pattern}

    def closure(self, *files: str) -> frozenset[str]:
        """Return these files and all files of the repository that they import, including imports in
        functions.
        """
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
        """Return the files that Python source code imports directly."""
        return frozenset(
            each for name in _names(ast.parse(source), file) for each in self.modules(name)
        )

    def modules(self, name: str) -> Iterator[str]:
        """Yield the files that importing a name can execute, which are its packages and the
        module.
        """
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = "/".join(parts[:end])
            yield from {f"{path}.py", f"{path}/__init__.py"} & self.files

    def fingerprint(self, module: str, reads: Iterable[str]) -> str:
        """Return a hash of the contents of the inputs and of the versions of programs."""
        digest = hashlib.sha256(f"{module}\0{machine()}".encode())
        for each in sorted(self.inputs(module, reads)):
            digest.update(self._state(each))
        return digest.hexdigest()

    @functools.cache  # noqa: B019 -- a session has one
    def _state(self, file: str) -> bytes:
        """Return the name of a file, and hashes of its kind and content."""
        path = self.root / file
        kind = f"\0{file}\0{path.is_file()}\0{os.path.islink(path)}\0"
        return kind.encode() + hashlib.sha256(_content(path)).digest()


def _content(path: Path) -> bytes:
    """Return the content of a file, or the target of a symbolic link to a folder."""
    if path.is_file():
        return path.read_bytes()
    return os.readlink(path).encode() if path.is_symlink() else b""


def _names(tree: ast.AST, file: str) -> Iterator[str]:
    """Yield the names that a module imports, and the names of its pytest plugins."""
    package = Path(file).parent.parts
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *filter(None, (node.module,))))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Assign) and "pytest_plugins" in ast.dump(node.targets[0]):
            yield from ast.literal_eval(node.value)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements of a module, but no expressions, because they are most of it."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        below = getattr(node, name, ())
        for each in below if isinstance(below, list) else ():
            yield each
            yield from _statements(each)


@functools.cache
def machine() -> str:
    """Describe what tests can depend on outside the repository, such as versions, the user and
    environment variables.
    """
    packages = {f"{each.name}=={each.version}" for each in importlib.metadata.distributions()}
    system = [hashlib.sha256(_content(Path(each))).hexdigest() for each in SYSTEM]
    variables = [f"{name}={text}" for name, text in os.environ.items() if name.startswith("TEST_")]
    uname = platform.uname()
    parts = (sys.version, uname.machine, uname.release, str(os.geteuid()), *system)
    return "\n".join((*parts, *sorted(packages), *sorted(variables)))
