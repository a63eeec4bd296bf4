"""Builds the client as one file for each platform, for krew: a zipapp with all that it needs.

All packages are pure Python, except ``pydantic-core``, which typer and kubernetes need. So each
file contains that package for every supported version of Python. Other compiled modules are left
out, because they have a replacement in Python.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from release.archives import File, write_tar_gz
from release.source import ReleaseError, Source

#: Operating system and architecture, as krew and Go name them -> pip's name.
PLATFORMS = {
    ("linux", "amd64"): "manylinux_2_17_x86_64",
    ("linux", "arm64"): "manylinux_2_17_aarch64",
    ("darwin", "amd64"): "macosx_11_0_x86_64",
    ("darwin", "arm64"): "macosx_11_0_arm64",
}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
COMPILED = "pydantic-core"
#: The asynchronous client of kubernetes, which is half of the package, and packages that only this
#: client imports.
UNUSED = (
    *("kubernetes/aio", "aiohappyeyeballs", "aiohttp", "aiohttp_retry", "aiosignal"),
    *("frozenlist", "multidict", "propcache", "yarl"),
)
#: Files of a package's metadata that depend on the machine that installed it.
_INSTALLED = ("RECORD", "WHEEL", "INSTALLER", "REQUESTED", "direct_url.json")


def build_clients(source: Source, wheel: Path, out: Path) -> dict[tuple[str, str], Path]:
    """Write an archive for each platform into ``out``, and return them by platform."""
    archives = {}
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site-packages")
        install(source, wheel, site)
        for (system, machine), pip_name in PLATFORMS.items():
            for python in PYTHONS:
                add_compiled(source, pip_name, python, site)
            app = Path(folder, "kubectl-headroom")
            pack(source, site, app)
            for module in site.glob("pydantic_core/*.so"):
                module.unlink()
            path = out / f"kubectl-headroom_{source.version}_{system}_{machine}.tar.gz"
            files = [
                File("LICENSE", (source.folder / "LICENSE").read_bytes()),
                File("kubectl-headroom", app.read_bytes(), executable=True),
            ]
            write_tar_gz(path, files, source.epoch_s)
            archives[system, machine] = path
    return archives


def install_all(source: Source, wheel: Path, site: Path) -> None:
    """Install the wheel and the packages of the client's lock, for this platform."""
    to_site = ("install", "--no-compile", "--no-deps", "--target", str(site))
    _pip(*to_site, "--require-hashes", "-r", str(source.folder / "requirements/client.txt"))
    shutil.rmtree(site / "bin")
    _pip(*to_site, "--no-index", str(wheel))
    shutil.rmtree(site / "bin")


def install(source: Source, wheel: Path, site: Path) -> None:
    """Install the wheel and the packages of the client's lock, without compiled modules."""
    install_all(source, wheel, site)
    for name in UNUSED:
        shutil.rmtree(site / name)
    for file in site.rglob("*"):
        if file.suffix == ".so" or (file.parent.suffix == ".dist-info" and file.name in _INSTALLED):
            file.unlink()


def add_compiled(source: Source, platform: str, python: str, site: Path) -> None:
    """Add the compiled modules of ``COMPILED`` for a platform and a version of Python."""
    lock = (source.folder / "requirements/client.txt").read_text()
    pinned = re.search(rf"^{COMPILED}==.*?(?=^\S|\Z)", lock, re.MULTILINE | re.DOTALL)
    if pinned is None:
        raise ReleaseError(f"requirements/client.txt does not contain {COMPILED}: run make lock")
    with tempfile.TemporaryDirectory() as folder:
        requirement = Path(folder, "requirement.txt")
        requirement.write_text(pinned[0])
        where = ("--platform", platform, "--python-version", python, "--only-binary", ":all:")
        options = ("--no-deps", "--require-hashes", "-r", str(requirement), "-d", folder)
        _pip("download", *where, *options)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as content:
            for name in content.namelist():
                if name.endswith(".so"):
                    content.extract(name, site)


def pack(source: Source, site: Path, app: Path) -> None:
    """Write the zipapp."""
    command = [sys.executable, "-m", "shiv", "--reproducible", "--site-packages", str(site)]
    command += ["--preamble", str(source.folder / "release/preamble.py")]
    command += ["--entry-point", "headroom.plugin:main", "--output-file", str(app)]
    epoch = {"SOURCE_DATE_EPOCH": str(source.epoch_s)}
    subprocess.run(
        [*command, "-p", "/usr/bin/env python3"], env=os.environ | epoch, umask=0o022, check=True
    )


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*command, *arguments], umask=0o022, check=True)
