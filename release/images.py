"""Builds the images of extender and agent as archives."""

import os
import shutil
import subprocess
from pathlib import Path

from release.source import Source

SCRIPT = "deploy/images.sh"
BUILDERS = ("docker", "podman", "buildah")


def build_images(source: Source, registry: str, out: Path) -> tuple[list[Path], str]:
    """Write an archive for each image into ``out``, unless a tool or a variable is missing.

    Returns the paths, and if there are none, the reason.
    """
    if not os.environ.get("BASE"):
        return [], (
            "BASE is not set. Example: BASE=python:3.12-slim@sha256:... "
            "(docs/get-started/images.md)"
        )
    if not os.environ.get("BUILDER") and not any(map(shutil.which, BUILDERS)):
        return [], f"none of {', '.join(BUILDERS)} is installed"
    given = {"VERSION": source.version, "REVISION": source.revision, "OUT": str(out.resolve())}
    if registry:
        given["REGISTRY"] = registry
    subprocess.run(["sh", SCRIPT], cwd=source.folder, env=os.environ | given, check=True)
    return sorted(out.glob("headroom-*.tar")), ""
