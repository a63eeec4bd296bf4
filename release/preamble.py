"""Runs first in the client's zipapp; shiv sets ``site_packages``.

It removes the files of earlier releases from shiv's folder, which would otherwise grow with each
upgrade.
"""

import shutil
import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 - the user's Python, not the project's
    sys.exit(
        "kubectl headroom: Python 3.11 or newer is needed; this is {}.{}".format(*sys.version_info)
    )

site_packages: Path = globals()["site_packages"]
own = site_packages.parent
name = own.name.rpartition("_")[0]
for other in own.parent.glob(name + "_*"):
    if other != own:
        shutil.rmtree(other, ignore_errors=True)
        (own.parent / ("." + other.name + "_lock")).unlink(missing_ok=True)
