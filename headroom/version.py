"""The version of the installed package."""

import functools


@functools.cache
def own_version() -> str:
    """Return the package's version, or "unknown" if it runs from its sources."""
    # Import here, because it is slow and most commands do not need it.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("headroom-gpu")
    except PackageNotFoundError:
        return "unknown"
