"""Builds the wheel and the source distribution.

The wheel has only the package ``headroom``. Extender and agent run in their images, and packages
with such names could hide a user's own packages (docs/design/adr/0112).
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from release.archives import normalise
from release.source import Source

#: Calls a hook of pyproject.toml's build backend, with the setuptools of this environment.
_BUILD = """\
import sys
from setuptools import build_meta
out = sys.argv[1]  # the hooks change sys.argv
print(getattr(build_meta, sys.argv[2])(out))
"""
#: The parts of the repository that the wheel is built from.
_OF_WHEEL = ("pyproject.toml", "README.md", "LICENSE")


def build_packages(source: Source, out: Path) -> tuple[Path, Path]:
    """Write wheel and sdist into ``out``, and return their paths in this order."""
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder)
        for name in _OF_WHEEL:
            shutil.copy(source.folder / name, alone / name)
        shutil.copytree(source.folder / "headroom", alone / "headroom")
        wheel = _build(source, alone, "build_wheel", out)
    sdist = _build(source, source.folder, "build_sdist", out)
    normalise(sdist, source.epoch_s)
    return wheel, sdist


def _build(source: Source, folder: Path, hook: str, out: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, str(out.resolve()), hook],
        cwd=folder,
        env=os.environ | {"SOURCE_DATE_EPOCH": str(source.epoch_s)},
        stdout=subprocess.PIPE,
        umask=0o022,  # the modes of files are part of the archives
        text=True,
        check=True,
    )
    return out / done.stdout.splitlines()[-1]
