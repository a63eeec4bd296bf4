"""The wheel and the source distribution."""

import os
import subprocess
import sys
from pathlib import Path

from release.archives import normalise
from release.source import Source

#: The hooks of pyproject.toml's build backend, with the setuptools of this environment.
_BUILD = """\
import sys
from setuptools import build_meta
out = sys.argv[1]  # the hooks change sys.argv
print(build_meta.build_sdist(out), build_meta.build_wheel(out))
"""


def build_packages(source: Source, out: Path) -> tuple[Path, Path]:
    """Write wheel and sdist into ``out``, and return their paths in this order."""
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, str(out.resolve())],
        cwd=source.folder,
        env=os.environ | {"SOURCE_DATE_EPOCH": str(source.epoch_s)},
        stdout=subprocess.PIPE,
        umask=0o022,  # the modes of files are part of the archives
        text=True,
        check=True,
    )
    sdist, wheel = (out / name for name in done.stdout.splitlines()[-1].split())
    normalise(sdist, source.epoch_s)
    return wheel, sdist
