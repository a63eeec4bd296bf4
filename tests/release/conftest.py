"""Fixtures that build a release from the tracked files of the working tree, and an environment that
contains only the client.
"""

import importlib.metadata
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from release.packages import build_packages
from release.source import Source, export, version_of
from tests.controlplane import ROOT

REPOSITORY = "https://git.example/headroom"


@dataclass(frozen=True, slots=True)
class Packages:
    wheel: Path
    sdist: Path


def exported(folder: Path) -> Source:
    """Export HEAD together with the uncommitted changes of tracked files."""
    stashed = subprocess.run(
        ["git", "-C", ROOT, "-c", "user.name=t", "-c", "user.email=t@t", "stash", "create"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()
    return export(ROOT, folder, version_of(ROOT), REPOSITORY, stashed or "HEAD")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return exported(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def packages(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Packages:
    return Packages(*build_packages(source, tmp_path_factory.mktemp("packages")))


@pytest.fixture(scope="session")
def client(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with only the wheel and the packages of requirements/client.txt.

    The packages are links to the packages of the tests' environment, because they have the same
    versions and hashes.
    """
    venv = tmp_path_factory.mktemp("client") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    for package in locked("client"):
        try:
            installed = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # The package is for another platform.
        for name in {file.parts[0] for file in installed.files or () if ".." not in file.parts}:
            if name != "__pycache__" and not (site / name).exists():
                (site / name).symlink_to(str(installed.locate_file(name)))
    command = [sys.executable, "-m", "pip", "--python", venv / "bin/python", "install"]
    subprocess.run([*command, "--quiet", "--no-index", "--no-deps", packages.wheel], check=True)
    return venv


def locked(lock: str) -> set[str]:
    """Return the names of the packages in a lock file."""
    text = (ROOT / f"requirements/{lock}.txt").read_text()
    return set(re.findall(r"^([\w.-]+)==", text, re.MULTILINE))
