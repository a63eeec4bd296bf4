"""The version of the installed package."""


def own_version() -> str:
    """Return the package's version; "unknown" if it runs from its sources."""
    # It imports `email`, which takes longer than the rest of a command's start.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("headroom-gpu")
    except PackageNotFoundError:
        return "unknown"
