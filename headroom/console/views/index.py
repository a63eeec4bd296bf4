"""The list of all views."""

from typing import Literal

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from headroom.console.responses import encoded
from headroom.console.view import View
from headroom.runtime.server.known_parameters import parameters_of

#: Paths whose answers may change in any release: formats that Headroom's own programs exchange.
INTERNAL = {"/v1/journal", "/v1/map", "/v1/snapshot", "/v1/inputs"}
Stability = Literal["stable", "internal"]


class ViewEntry(View):
    method: str
    path: str
    parameters: list[str]
    """Names of the query parameters."""
    stability: Stability
    """"stable": docs/reference/api-stability.md states what may change. "internal": it may change
    in any release."""
    description: str


class IndexBody(View):
    api_version: str = "headroom.gpu/v1"
    views: list[ViewEntry]


routes = APIRouter()


@routes.get("/v1", response_model=IndexBody)
def index(request: Request) -> Response:
    """List all views, each with its parameters and one sentence."""
    views = [
        ViewEntry(
            method=method,
            path=route.path,
            parameters=list(parameters_of(route)),
            stability=stability_of(route.path),
            description=_first_sentence(route.description),
        )
        for route in routes_of(request)
        for method in sorted(route.methods or ())
    ]
    views.sort(key=lambda each: (each.path, each.method))
    return encoded(IndexBody(views=views))


def routes_of(request: Request) -> list[APIRoute]:
    """Return the routes of all views."""
    found: list[APIRoute] = request.app.state.views
    return found


def stability_of(path: str) -> Stability:
    return "internal" if path in INTERNAL else "stable"


def _first_sentence(text: str) -> str:
    sentence, end, _ = " ".join(text.split()).partition(". ")
    return sentence + end.strip()
