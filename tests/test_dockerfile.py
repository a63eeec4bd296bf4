"""Runs the steps of the Dockerfile one by one, in an empty folder with a separate interpreter.

Tests have no container engine. A virtual environment replaces the base image, and a folder replaces
the file system of each stage. All other instructions are executed as written, with the folder
before absolute paths. Instead of downloading packages, pip finds those packages of the tests'
environment that a lock names, and no others. So pip checks that they are sufficient, in these
versions. Their hashes were checked when the tests' environment was installed, from a lock with the
same hashes.
"""

import contextlib
import glob
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.controlplane import ROOT
from tests.processes import starts_processes

#: pip's settings: what is not there cannot be had.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
DIGEST = f"sha256:{'0' * 64}"
#: The pip option that names a lock.
_LOCK = re.compile(r"-r requirements/(\w+)\.txt")
#: Absolute paths of a stage.
_PATH = re.compile(r"(?<![\w./-])/(?=(?:opt|src|dist)\b)")


@dataclass
class Image:
    """The state of a stage after its instructions."""

    #: The folder of its files while it is built or run.
    root: Path
    #: The interpreter of the base image.
    base: Path
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def path(self, inside: str) -> Path:
        return self.root / os.path.normpath(os.path.join(self.workdir, inside)).lstrip("/")

    def run(self, command: list[str] | str) -> subprocess.CompletedProcess[str]:
        cwd = self.path(".")
        cwd.mkdir(parents=True, exist_ok=True)
        shell = ["/bin/sh", "-c", command] if isinstance(command, str) else command
        path = f"{self.base}/bin:/usr/bin:/bin"
        env = {**os.environ, **OFFLINE, "PATH": path}
        env.pop("PYTHONPATH", None)
        for name, value in self.env.items():
            env[name] = _PATH.sub(f"{self.root}/", value.replace("$PATH", path))
        # As the image's PATH finds it.
        shell[0] = shutil.which(shell[0], path=env["PATH"]) or shell[0]
        return subprocess.run(
            [*self._as_user(), *(_PATH.sub(f"{self.root}/", word) for word in shell)],
            cwd=cwd,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def _as_user(self) -> list[str]:
        """Become the image's user, where we may. It keeps the right to read all files, because
        the interpreter may lie in a home that is closed to others; it may write none of them."""
        if not self.user or os.geteuid() != 0:
            return []
        uid, _, gid = self.user.partition(":")
        reading = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        return ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", *reading]


@dataclass(frozen=True)
class Stage:
    base: str
    steps: list[tuple[str, str]]

    @property
    def needs(self) -> list[str]:
        """Stages that this stage copies from."""
        copied = (re.match(r"--from=(\S+)", rest) for name, rest in self.steps if name == "COPY")
        return list(dict.fromkeys(each[1] for each in copied if each))


def stages() -> dict[str, Stage]:
    """Return the stages of the Dockerfile, with its build arguments filled in."""
    arguments = {"PYTHON_DIGEST": DIGEST}
    found: dict[str, Stage] = {}
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        instruction, rest = line.split(maxsplit=1)
        if instruction == "ARG":
            name, _, default = rest.partition("=")
            arguments.setdefault(name, default)
        elif instruction == "FROM":
            base, _, stage = re.sub(r"\$\{(\w+)\}", lambda m: arguments[m[1]], rest).split()
            found[stage] = Stage(base, [])
            last = found[stage]
        else:
            last.steps.append((instruction, rest))
    return found


def build(target: str, folder: Path) -> Image:
    """Carry out ``target`` and the stages that it copies from, unless the folder has them already;
    an instruction that is not known here fails. Each stage begins with nothing but the base image's
    interpreter."""
    all_stages = stages()
    for last in ("root", "base"):
        shutil.rmtree(folder / last, ignore_errors=True)

    def carry_out(name: str) -> Image:
        for needed in all_stages[name].needs:
            if not (folder / f"root-of-{needed}").exists():
                carry_out(needed)
        interpreter(folder / "base")
        image = Image(folder / "root", folder / "base")
        for instruction, rest in all_stages[name].steps:
            step(image, instruction, rest)
        if name != target:
            image.root.rename(folder / f"root-of-{name}")
            shutil.rmtree(image.base)
        return image

    return carry_out(target)


def interpreter(where: Path) -> None:
    """Create the base image: Python and pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", where], check=True)
    (site,) = where.glob("lib/python*/site-packages")
    put("pip", site)
    command = where / "bin/pip"
    command.write_text(f'#!/bin/sh\nexec "{where}/bin/python" -m pip "$@"\n')
    command.chmod(0o755)


def step(image: Image, instruction: str, rest: str) -> None:
    match instruction:
        case "ENV":
            image.env |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        case "WORKDIR":
            image.workdir = rest
        case "COPY":
            copy(image, *rest.split())
        case "RUN":
            if lock := _LOCK.search(rest):
                environment = re.search(r"--python (\S+)/bin/python", rest)
                where = image.path(environment[1]) if environment else image.base
                (site,) = where.glob("lib/python*/site-packages")
                for package in locked(lock[1]):
                    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                        put(package, site)  # else it is for another platform
            done = image.run(rest)
            assert done.returncode == 0, f"RUN {rest}: {done.stdout}{done.stderr}"
        case "USER":
            image.user = rest
        case "ENTRYPOINT":
            image.entrypoint = json.loads(rest)
        case "CMD":
            image.command = json.loads(rest)
        case "EXPOSE" | "LABEL":
            pass
        case _:
            pytest.fail(f"the Dockerfile has an instruction that this test does not know: {rest}")


def copy(image: Image, *words: str) -> None:
    """Copy from another stage, or files that .dockerignore does not exclude."""
    *sources, target = (word for word in words if not word.startswith("--from="))
    from_stage = [word.removeprefix("--from=") for word in words if word.startswith("--from=")]
    for name in sources:
        if from_stage:
            source = image.root.with_name(f"root-of-{from_stage[0]}") / name.lstrip("/")
        else:
            sent = (ROOT / ".dockerignore").read_text().splitlines()
            assert f"!{name}" in sent or f"!{name.split('/')[0]}/" in sent, f"{name} is not sent"
            source = ROOT / name
        destination = image.path(target)
        if source.is_dir():
            left_out = shutil.ignore_patterns("__pycache__")
            ignore = None if from_stage else left_out
            shutil.copytree(source, destination, symlinks=True, ignore=ignore, dirs_exist_ok=True)
        else:
            destination = destination / source.name if target.endswith("/") else destination
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, destination)


def locked(lock: str) -> dict[str, str]:
    """Return the entries of a lock by package name: version, condition and hashes, as written."""
    blocks = re.split(r"\n(?=\w)", (ROOT / f"requirements/{lock}.txt").read_text().strip())
    return {block.partition("==")[0]: block for block in blocks}


def put(package: str, site: Path) -> None:
    """Have that package of the tests' own in this folder, as far as it is not a command."""
    installed = importlib.metadata.distribution(package)
    for name in {file.parts[0] for file in installed.files or () if ".." not in file.parts}:
        # Several packages may have one folder.
        if name != "__pycache__" and not (site / name).exists():
            (site / name).symlink_to(str(installed.locate_file(name)))


@pytest.mark.parametrize("target", ["extender", "agent"])
def test_the_image_has_the_package_versions_of_the_tests(target: str) -> None:
    own, tests = locked(target), locked("test")
    assert len(own) > 5
    assert {name: tests.get(name) for name in own} == own
    assert locked("build") == {"setuptools": tests["setuptools"]}


def test_every_stage_uses_the_base_image_by_digest() -> None:
    assert {stage.base for stage in stages().values()} == {f"python:3.12-slim@{DIGEST}"}
    assert "ARG PYTHON_DIGEST\n" in (ROOT / "Dockerfile").read_text()  # of which none is a default


def environment_of(image: Image) -> set[str]:
    """Names of what is installed beside the interpreter, from its metadata."""
    (site,) = glob.glob(f"{image.root}/opt/headroom/lib/python*/site-packages")
    found = importlib.metadata.distributions(path=[site])
    return {re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower() for each in found}


@pytest.fixture(scope="module")
@starts_processes
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lines of the stages, which both images share in part."""
    return tmp_path_factory.mktemp("images")


def test_extender_image_runs_as_nonroot_and_reports_a_missing_cluster(folder: Path) -> None:
    image = build("extender", folder)
    assert image.user == "65532:65532"
    assert environment_of(image) - locked("extender").keys() == {"headroom-gpu"}
    assert {each.name for each in image.root.iterdir()} == {"opt"}
    helped = image.run([*image.entrypoint, "--help"])
    assert helped.returncode == 0, helped.stderr
    assert "serve" in helped.stdout
    started = image.run([*image.entrypoint, *image.command])
    assert started.returncode == 2
    assert "no cluster is configured" in started.stderr
    # Other commands of the manifests, and those of a debugging shell.
    for command in (["certs"], ["why"]):
        helped = image.run(["headroom", *command, "--help"])
        assert helped.returncode == 0, helped.stderr
    compiled = glob.glob(f"{image.root}/opt/headroom/lib/*/site-packages/extender/__pycache__/*")
    assert compiled, "a container that cannot write would compile at every start"


def test_agent_image_runs_as_nonroot_and_reports_a_missing_driver(folder: Path) -> None:
    image = build("agent", folder)
    assert image.user == "65532:65532"
    assert environment_of(image) - locked("agent").keys() == {"headroom-gpu"}
    helped = image.run([*image.entrypoint, "--help"])
    assert helped.returncode == 0, helped.stderr
    assert "--once" in helped.stdout
    started = image.run([*image.entrypoint, "--once", "--json"])
    assert started.returncode == 1, started.stderr
    driver = json.loads(started.stdout)["conditions"][0]
    assert (driver["type"], driver["status"], driver["reason"]) == (
        "DriverReady", "False", "NoDriver",
    )  # fmt: skip
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert json.loads(started.stdout)["agentVersion"] == version
    for gate in (["headroom", "gate"], ["python", "-m", "agent.gate_client"]):
        asked = image.run(gate)
        assert asked.returncode == 2
        assert "POD_UID is not set" in asked.stdout + asked.stderr
