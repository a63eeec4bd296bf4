"""Error answers as ``application/problem+json`` (RFC 9457).

All errors have this form: ``HTTPException``, requests that do not match the declaration of their
route, and internal errors. ``detail`` states what is wrong and where, and gives an example.
``type`` is for programs, and each status has one type.
"""

import json
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headroom.contract.printable import printable_json
from headroom.runtime.server.known_parameters import with_dependencies
from headroom.runtime.server.rejected_values import sentence_of
from headroom.runtime.server.similar_paths import nearest_path

log = structlog.get_logger()
#: Headers of every answer: the name of the replica, and its mode (enforce or observe). Answers with
#: status 304 have them too, because otherwise browsers keep the last values.
REPLICA, MODE = "Headroom-Replica", "Headroom-Mode"
PROBLEM_JSON = "application/problem+json"

_TYPES = {
    400: "bad-request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    411: "length-required",
    413: "too-large",
    422: "bad-parameter",
    500: "internal",
    503: "unavailable",
}
_NO_JSON = (
    "header Content-Type does not name JSON. Example: "
    "curl -H 'Content-Type: application/json' -d '{...}'"
)
#: Maximum length of a quoted value.
_MOST_CHARS = 80
#: Maximum size of a request body in bytes. It does not apply to ``/embedded/``, where agents report
#: whole fleets.
MOST_BYTES, _LIMITED = 1 << 20, "/v1/"


def problem(status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    """Return an error answer. ``console.openapi`` describes its fields."""
    body = {
        "type": f"urn:headroom:problem:{_TYPES.get(status, status)}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
    }
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return Response(printable_json(text), status, headers, PROBLEM_JSON)


def use_problem_details(
    app: FastAPI, replica: str, mode: Callable[[], str], views: Sequence[APIRoute] = ()
) -> None:
    """Make the application return all errors as problem details. One of ``views`` is suggested for
    an unknown path.

    Also answer HEAD, compress JSON, limit request bodies, and add the name of the replica and its
    mode to every answer.
    """

    async def rejected(request: Request, err: Exception) -> Response:
        assert isinstance(err, HTTPException)
        detail, path = err.detail, request.scope["path"]
        if err.status_code == 404 and "route" not in request.scope:
            near = nearest_path(path, views)
            hint = f"did you mean {near}?" if near else "GET /v1 lists all views"
            detail = f"{path[:_MOST_CHARS]} is not a view; {hint}"
        if err.status_code == 405:
            allowed = (err.headers or {}).get("Allow", "another method")
            detail = f"{path} does not support {request.method}; use {allowed}"
        return problem(err.status_code, detail, dict(err.headers or {}))

    async def malformed(request: Request, err: Exception) -> Response:
        assert isinstance(err, RequestValidationError)
        examples = _examples(request.scope.get("route"))
        if "json" not in request.headers.get("content-type", "json").lower():
            return problem(422, _NO_JSON)
        fields = _fields(request.scope.get("route"))
        found = (_detail(finding, examples, fields) for finding in err.errors())
        return problem(422, "; ".join(found))

    app.add_exception_handler(HTTPException, rejected)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_middleware(
        GZipMiddleware, 1024, 1, exclude_content_types=(*DEFAULT_EXCLUDED_CONTENT_TYPES, "text/*")
    )
    app.add_middleware(_Edge, replica=replica, mode=mode)


class _Answered(Exception):
    """Ends the answer to a HEAD request after its headers."""


class _Edge:
    """Adds the headers of every answer, limits bodies, and answers HEAD and internal errors.

    The size of bodies is limited, because a view runs only after its whole body has been read. The
    answer to an internal error contains no details, but the log does.
    """

    def __init__(self, app: ASGIApp, replica: str, mode: Callable[[], str]) -> None:
        self._app = app
        self._replica = replica
        self._mode = mode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer_begun, is_head = False, scope.get("method") == "HEAD"

        async def send_named(message: Message) -> None:
            nonlocal answer_begun
            answer_begun = True
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REPLICA], headers[MODE] = self._replica, self._mode()
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)
            if is_head:
                await send({"type": "http.response.body"})
                raise _Answered

        if is_head:  # routes answer GET only
            scope = {**scope, "method": "GET"}
        if (rejection := _rejected_body(scope)) is not None:
            await rejection(scope, receive, send_named)
            return
        try:
            await self._app(scope, receive, send_named)
        except _Answered:
            return
        except Exception:
            log.exception("view_failed", path=scope.get("path"))
            if answer_begun:
                raise  # a broken connection is better than an incomplete answer
            answer = problem(500, "internal error in Headroom: see the log of this process")
            await answer(scope, receive, send_named)


def _rejected_body(scope: Scope) -> Response | None:
    """Return the rejection of a body that is too large or of unknown length, or None to accept it.

    A request without a body needs no Content-Length.
    """
    if scope["type"] != "http" or not scope["path"].startswith(_LIMITED):
        return None
    headers = Headers(scope=scope)
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not (length.isascii() and length.isdigit()):
        return problem(411, "the request has no valid Content-Length; send one")
    if int(length) > MOST_BYTES:
        return problem(413, f"the body is larger than {MOST_BYTES >> 20} MiB, the maximum size")
    return None


def _detail(
    finding: dict[str, Any], examples: dict[str, object], fields: Sequence[str] = ()
) -> str:
    """Describe one error of pydantic: its place, the value, the mistake and an example.

    ``fields`` are the names of all fields of the request body.
    """
    kind, *where = [str(part) for part in finding["loc"]]
    name = where[0] if where else kind
    detail = f"{kind} {'.'.join(where)}".strip() + f": {sentence_of(finding, fields)}"
    example = examples.get("body" if kind == "body" else name)
    if example is None:
        return f"{detail}; GET /openapi.json describes the parameters"
    correct = json.dumps(example) if kind == "body" else f"{name}={example}"
    return f"{detail}. Example: {correct}"


def _examples(route: object) -> dict[str, object]:
    """Return an example for each parameter of the route by name, and for its body as "body"."""
    if not isinstance(route, APIRoute):
        return {}
    found: dict[str, object] = {}
    for each in with_dependencies(route.dependant):
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


def _fields(route: object) -> list[str]:
    """Return the names of all fields of the route's body and of the objects in it."""
    if not isinstance(route, APIRoute):
        return []
    names = dict[str, None]()
    for field in route.dependant.body_params:
        model = field.field_info.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            schema = model.model_json_schema()
            for each in (schema, *schema.get("$defs", {}).values()):
                names |= dict.fromkeys(each.get("properties", ()))
    return list(names)
