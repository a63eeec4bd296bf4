"""Rejects query parameters that a view does not have."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from fastapi import HTTPException
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.requests import Request

#: Maximum length of a quoted name.
_MOST_CHARS = 80


async def known_parameters(request: Request) -> None:
    """Raise ``HTTPException`` 422 if the query has a parameter that the view does not have.

    A dependency of all views.
    """
    route = request.scope.get("route")
    if not request.query_params or not isinstance(route, APIRoute):
        return
    known = parameters_of(route)
    for name in request.query_params:
        if name not in known:
            raise HTTPException(422, _unknown(name, known, request.scope["path"]))


def parameters_of(route: APIRoute) -> tuple[str, ...]:
    """Return the names of the query parameters of a route, as clients write them."""
    return tuple(
        dict.fromkeys(
            field.alias
            for each in with_dependencies(route.dependant)
            for field in each.query_params
        )
    )


def with_dependencies(dependant: Dependant) -> Iterator[Dependant]:
    yield dependant
    for each in dependant.dependencies:
        yield from with_dependencies(each)


def _unknown(name: str, known: Sequence[str], path: str) -> str:
    shown = name[:_MOST_CHARS]
    if not known:
        return f"query {shown}: {path} has no parameters; remove it"
    near = get_close_matches(name[:_MOST_CHARS].lower(), known, 1, 0.6)
    suggestion = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
    return f"query {shown}: {path} has no such parameter; {suggestion}"
