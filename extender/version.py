"""Which version of the package this is."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """ "unknown" where it runs from its sources."""
    try:
        return version("headroom-gpu")
    except PackageNotFoundError:
        return "unknown"
