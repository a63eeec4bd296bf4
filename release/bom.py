"""Writes software bills of materials in the CycloneDX format, from the lock files.

The list of an image has its Python packages. The packages of its base image are known only when the
image is built (RELEASING.md).
"""

import subprocess
import sys
from pathlib import Path

from release.source import Source

#: The artefact that contains the packages of a lock, by the lock's name.
SUBJECTS = {
    "client": "headroom_gpu",
    "extender": "headroom-extender",
    "agent": "headroom-agent",
}


def build_boms(source: Source, out: Path) -> list[Path]:
    """Write a list for each artefact into ``out``, and return their paths."""
    paths = []
    for lock, subject in SUBJECTS.items():
        path = out / f"{subject}_{source.version}.cdx.json"
        command = [sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements"]
        command += [
            "--output-reproducible",
            "--pyproject",
            "pyproject.toml",
            "--mc-type",
            "application",
        ]
        command += ["--output-file", str(path.resolve()), f"requirements/{lock}.txt"]
        subprocess.run(command, cwd=source.folder, check=True)
        paths.append(path)
    return paths
