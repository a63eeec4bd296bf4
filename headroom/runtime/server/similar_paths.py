"""Suggests a view for a path that is not a view."""

import re
from collections.abc import Sequence
from difflib import get_close_matches

from fastapi.routing import APIRoute

from headroom.runtime.server.known_parameters import parameters_of

#: Longer paths get no suggestion.
_MOST_CHARS = 300


def nearest_path(path: str, routes: Sequence[APIRoute]) -> str:
    """Return the path, with its query, that the caller probably meant, or ""."""
    if len(path) > _MOST_CHARS:
        return ""
    without_slash = path.rstrip("/")
    if any(route.path_regex.match(without_slash) for route in routes):
        return without_slash
    for route in routes:
        # A pod in the path, such as /v1/score/NAMESPACE/NAME.
        name = re.fullmatch(rf"{re.escape(route.path)}/(?:pods?/)?([^/]+/[^/]+)", without_slash)
        if name and "pod" in parameters_of(route):
            return f"{route.path}?pod={name[1]}"
    near = get_close_matches(without_slash, dict.fromkeys(route.path for route in routes), 1, 0.75)
    return near[0] if near else ""
