"""What is wrong with a request, or with us, as ``application/problem+json`` (RFC 9457).

Whatever raises ``HTTPException``, or is not what a route declares, ends here, so that a client
reads one form. ``detail`` names what is wrong, where, and a right example; the type is one for
each status, for programs.
"""

import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from extender.console.field_docs import describe_fields

log = structlog.get_logger()

#: Header that names the replica that answers.
REPLICA = "Headroom-Replica"
PROBLEM_JSON = "application/problem+json"
_TYPES = {
    400: "bad-request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    413: "too-large",
    422: "bad-parameter",
    500: "internal",
    503: "unavailable",
}
#: Of a value that is quoted.
_MOST_CHARS = 80


class ProblemBody(BaseModel):
    """Why a request was not answered as asked."""

    #: One for each kind of problem, for programs: urn:headroom:problem:not-found.
    type: str
    #: The same in words.
    title: str
    status: int
    #: What is wrong, where, and what would be right.
    detail: str


def problem(status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    body = ProblemBody(
        type=f"urn:headroom:problem:{_TYPES.get(status, status)}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
    )
    return Response(body.model_dump_json(), status, headers, PROBLEM_JSON)


def tell_problems(app: FastAPI, replica: str) -> None:
    """Have the application answer every error in this form, and describe that; and name the
    replica with every answer."""

    async def rejected(request: Request, err: Exception) -> Response:
        assert isinstance(err, HTTPException)
        detail = err.detail
        if err.status_code == 404 and "route" not in request.scope:
            detail = f"{request.url.path} is no view; GET /openapi.json describes all"
        if err.status_code == 405:
            allowed = (err.headers or {}).get("Allow", "another method")
            detail = f"{request.url.path} takes no {request.method}; right is {allowed}"
        return problem(err.status_code, detail, dict(err.headers or {}))

    async def malformed(request: Request, err: Exception) -> Response:
        assert isinstance(err, RequestValidationError)
        examples = _examples(request.scope.get("route"))
        return problem(422, "; ".join(_said(finding, examples) for finding in err.errors()))

    app.add_exception_handler(HTTPException, rejected)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_middleware(_Edge, replica=replica)
    describe = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _with_problems(describe())
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]


class _Edge:
    """A fault of ours is logged whole, and answered without a word of it."""

    def __init__(self, app: ASGIApp, replica: str) -> None:
        self._app = app
        self._replica = REPLICA.lower().encode(), replica.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), self._replica]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            log.exception("view_failed", path=scope.get("path"))
            if begun:
                raise  # half an answer is worse than a connection that breaks
            answer = problem(500, "internal error in Headroom: see the log of the extender")
            await answer(scope, receive, noting)


def _said(finding: dict[str, Any], examples: dict[str, object]) -> str:
    kind, *where = [str(part) for part in finding["loc"]]
    name = where[0] if where else kind
    said = f"{kind} {'.'.join(where)}".strip() + f": {finding['msg']}"
    if kind != "body" and finding["type"] != "missing":
        said += f", not {str(finding['input'])[:_MOST_CHARS]!r}"
    example = examples.get("body" if kind == "body" else name)
    if example is None:
        return f"{said}; GET /openapi.json describes what is right"
    right = json.dumps(example) if kind == "body" else f"{name}={example}"
    return f"{said}; right is, for example, {right}"


def _examples(route: object) -> dict[str, object]:
    """Of each parameter of the route by its name, and of its body, what it declares as examples."""
    if not isinstance(route, APIRoute):
        return {}
    found: dict[str, object] = {}
    for each in _all(route.dependant):
        for field in (*each.path_params, *each.query_params, *each.header_params):
            if field.field_info.examples:
                found[field.alias] = field.field_info.examples[0]
        for field in each.body_params:
            declared = field.field_info.examples
            model = field.field_info.annotation
            if not declared and isinstance(model, type) and issubclass(model, BaseModel):
                declared = model.model_json_schema().get("examples")
            if declared:
                found["body"] = declared[0]
    return found


def _all(dependant: Dependant) -> Iterator[Dependant]:
    yield dependant
    for each in dependant.dependencies:
        yield from _all(each)


def _with_problems(schema: dict[str, Any]) -> dict[str, Any]:
    """The description, in which every error of every view has the form that it comes in."""
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    components["ProblemBody"] = ProblemBody.model_json_schema()
    describe_fields(components)
    for unused in ("HTTPValidationError", "ValidationError"):
        components.pop(unused, None)
    form = {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/ProblemBody"}}}
    for path in schema["paths"].values():
        for operation in path.values():
            answers = operation["responses"]
            answers.setdefault("500", {"description": "A fault of ours; the log says which"})
            for status, answer in answers.items():
                if int(status) >= 400 and "text/plain" not in answer.get("content", {}):
                    answer["content"] = form
    return schema
