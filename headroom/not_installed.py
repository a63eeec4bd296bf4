"""Messages about packages that are not installed, and about programs that run in their images."""

#: Messages about programs that the published package does not contain, by name
#: (docs/design/adr/0112).
_IN_IMAGES = {
    "agent": "the agent is not installed here. It is in the image headroom-agent; "
    "or clone the repository, and run there: python -m agent --once",
    "extender": "the extender is not installed here. It is in the image headroom-extender; "
    "or clone the repository, and run there: make demo",
}


def missing(err: ImportError, extra: str) -> str:
    """Return a message about a failed import and the package to install. ``extra`` is the extra
    that contains it, or "" for the client."""
    if err.name in _IN_IMAGES:
        return _IN_IMAGES[err.name]
    package = f"'headroom-gpu[{extra}]'" if extra else "headroom-gpu"
    return f"{err}; install it: pip install {package}"
