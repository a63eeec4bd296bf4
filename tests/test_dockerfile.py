"""The Dockerfile's steps, run one by one in an empty folder with an interpreter of its own.

There is no container engine where tests run, so a virtual environment stands for the base image
and a folder for its file system; every other instruction is carried out as it is written. What pip
would fetch is there already: of the tests' own packages those, and only those, that the image's
lock names. So pip sees to it that they are all that is needed, in these versions; that they are
the files with these hashes was seen to when the tests' own were installed, by a lock of the same.
"""

import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.serving import ROOT

#: pip's settings: what is not there cannot be had.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}


@dataclass
class Image:
    """What a stage has come to."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def path(self, inside: str) -> Path:
        return self.root / os.path.normpath(f"{self.workdir}/{inside}").lstrip("/")

    def run(self, command: list[str] | str) -> subprocess.CompletedProcess[str]:
        cwd = self.path(".")
        cwd.mkdir(parents=True, exist_ok=True)
        venv = f"{self.root}/venv/bin"
        shell = ["/bin/sh", "-c", command] if isinstance(command, str) else command
        return subprocess.run(
            [*self._as_user(), *shell],
            cwd=cwd,
            env={**os.environ, **OFFLINE, **self.env, "PATH": f"{venv}:/usr/bin:/bin"},
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


def build(target: str, root: Path) -> Image:
    """Carry out the stages that lead to ``target``; an instruction not known here fails."""
    stages: dict[str, list[tuple[str, str]]] = {}
    base_of: dict[str, str] = {}
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        instruction, rest = line.split(maxsplit=1)
        if instruction == "FROM":
            base, _, stage = rest.split()
            stages[stage], base_of[stage] = [], base
        else:
            stages[stage].append((instruction, rest))
    image = Image(root)
    order = [target]
    while base_of[order[0]] in stages:
        order.insert(0, base_of[order[0]])
    for stage in order:
        for instruction, rest in stages[stage]:
            step(image, instruction, rest)
    return image


def step(image: Image, instruction: str, rest: str) -> None:
    match instruction:
        case "ENV":
            image.env |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        case "WORKDIR":
            image.workdir = rest
        case "COPY":
            source, target = (ROOT / rest.split()[0], image.path(rest.split()[1]))
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        case "RUN":
            done = image.run(rest)
            assert done.returncode == 0, f"RUN {rest}: {done.stderr}"
        case "USER":
            image.user = rest
        case "ENTRYPOINT":
            image.entrypoint = json.loads(rest)
        case "CMD":
            image.command = json.loads(rest)
        case "EXPOSE":
            pass
        case _:
            pytest.fail(f"the Dockerfile has an instruction that this test does not know: {rest}")


def locked(lock: str) -> dict[str, str]:
    """What a lock pins, by name: versions, the condition they are for, and hashes, as written."""
    blocks = re.split(r"\n(?=\w)", (ROOT / f"requirements/{lock}.txt").read_text().strip())
    return {block.partition("==")[0]: block for block in blocks}


def put(package: str, site: Path) -> None:
    """Have that package of the tests' own in this folder, as far as it is not a command."""
    installed = importlib.metadata.distribution(package)
    for file in installed.files or ():
        if ".." not in file.parts and (found := Path(str(installed.locate_file(file)))).exists():
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).symlink_to(found)


@pytest.fixture
def root(tmp_path: Path, target: str) -> Path:
    """A folder with the base image in ``venv``, and in that what ``target`` installs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    for package in ("pip", *locked(target)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # for another platform
            put(package, site)
    command = tmp_path / "venv/bin/pip"
    command.write_text(f'#!/bin/sh\nexec "{tmp_path}/venv/bin/python" -m pip "$@"\n')
    command.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("target", ["extender", "agent"])
def test_an_image_is_locked_to_what_the_tests_run_with(target: str) -> None:
    own, tests = locked(target), locked("test")
    assert len(own) > 5
    assert {name: tests.get(name) for name in own} == own


@pytest.mark.parametrize("target", ["extender"])
def test_extender_image_starts_as_nobody_and_says_that_it_lacks_a_cluster(
    root: Path, target: str
) -> None:
    image = build(target, root)
    assert image.user == "65532:65532"
    helped = image.run([*image.entrypoint, "--help"])
    assert helped.returncode == 0, helped.stderr
    assert "serve" in helped.stdout
    started = image.run([*image.entrypoint, *image.command])
    assert started.returncode == 2
    assert "no cluster is configured" in started.stderr


@pytest.mark.parametrize("target", ["agent"])
def test_agent_image_starts_as_nobody_and_says_that_it_lacks_a_driver(
    root: Path, target: str
) -> None:
    image = build(target, root)
    assert image.user == "65532:65532"
    helped = image.run([*image.entrypoint, "--help"])
    assert helped.returncode == 0, helped.stderr
    assert "--once" in helped.stdout
    started = image.run([*image.entrypoint, "--once", "--json"])
    assert started.returncode == 1, started.stderr
    driver = json.loads(started.stdout)["conditions"][0]
    assert (driver["type"], driver["status"], driver["reason"]) == (
        "DriverReady", "False", "NoDriver",
    )  # fmt: skip
