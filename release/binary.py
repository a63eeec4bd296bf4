"""Builds the client as a program that needs no Python, for the platform on which this runs.

    python -m release.binary VERSION

It writes ``binaries/kubectl-headroom-binary_VERSION_OS_ARCH.tar.gz``. The release workflow runs it
on each platform, and `make release` includes all archives in that folder.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from release.archives import File, write_tar_gz
from release.client import install_all
from release.packages import build_packages
from release.source import ReleaseError, Source, export
from release.tools import ROOT

BINARIES = ROOT / "binaries"
#: Go's names of architectures.
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
_MAIN = "from headroom.plugin import main\n\nmain()\n"


def build_binary(source: Source, out: Path) -> Path:
    """Write the archive for this platform into ``out``, and return its path."""
    system = platform.system().lower()
    machine = _MACHINES.get(platform.machine(), platform.machine())
    with tempfile.TemporaryDirectory() as folder:
        site, main, built = Path(folder, "site"), Path(folder, "main.py"), Path(folder, "dist")
        wheel, _ = build_packages(source, Path(folder))
        install_all(source, wheel, site)
        main.write_text(_MAIN)
        command = [sys.executable, "-m", "PyInstaller", "--onefile", "--log-level", "WARN"]
        command += ["--name", "kubectl-headroom", "--copy-metadata", "headroom-gpu"]
        command += ["--exclude-module", "kubernetes.aio"]
        command += ["--distpath", str(built), "--workpath", str(Path(folder, "work"))]
        path = {"PYTHONPATH": str(site), "SOURCE_DATE_EPOCH": str(source.epoch_s)}
        subprocess.run([*command, str(main)], cwd=folder, env=os.environ | path, check=True)
        archive = out / f"kubectl-headroom-binary_{source.version}_{system}_{machine}.tar.gz"
        files = [
            File("LICENSE", (source.folder / "LICENSE").read_bytes()),
            File("kubectl-headroom", (built / "kubectl-headroom").read_bytes(), executable=True),
        ]
        write_tar_gz(archive, files, source.epoch_s)
    return archive


def main() -> int:
    parser = argparse.ArgumentParser(prog="release.binary")
    parser.add_argument("version", help="the version in pyproject.toml")
    args = parser.parse_args()
    BINARIES.mkdir(exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            archive = build_binary(export(ROOT, Path(folder), args.version, ""), BINARIES)
    except ReleaseError as err:
        sys.stderr.write(f"release: {err}\n")
        return 1
    sys.stdout.write(f"{archive}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
