"""The version of the installed package."""

import functools
from importlib.metadata import PackageNotFoundError, version


@functools.cache
def own_version() -> str:
    """Return the package's version; "unknown" if it runs from its sources."""
    try:
        return version("headroom-gpu")
    except PackageNotFoundError:
        return "unknown"
