"""The debug API and its page: read-only views of what decides, on a port of their own.

Handlers are plain functions, which run on threads and encode their answers there. What they read is
immutable; the snapshot is taken before them, on the event loop, which alone may make one. A new
group of views is a module of ``web.api`` with a ``router``, and a line here.
"""

from fastapi import FastAPI

from extender.web.api import decisions, drift, events, explain, nodes, probes, status
from extender.web.api.context import Context
from extender.web.api.problems import tell_problems

_GROUPS = (probes, nodes, explain, decisions, drift, events, status)


def debug_app(context: Context) -> FastAPI:
    """The ASGI application of the debug port; it describes itself in /openapi.json."""
    app = FastAPI(
        title="Headroom debug API",
        description="Why pods are where they are, from the objects that decided.",
        version="v1",
        # The usual viewers are loaded from elsewhere, which a closed network does not have.
        docs_url=None,
        redoc_url=None,
    )
    for group in _GROUPS:
        app.include_router(group.router(context))
    tell_problems(app, context.replica)
    return app
