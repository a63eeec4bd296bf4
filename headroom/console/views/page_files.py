"""The page: static files with scripts that call the other views.

All files are part of Headroom. The Content-Security-Policy keeps browsers from loading files from
anywhere else.
"""

import hashlib
from pathlib import Path

from fastapi import APIRouter, HTTPException
from starlette.responses import Response

from headroom.console.responses import IfNoneMatch, is_current, unchanged

_FOLDER = Path(__file__).parents[1] / "page"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_FILES = {each.name: each.read_bytes() for each in _FOLDER.iterdir() if each.suffix in _TYPES}


routes = APIRouter()


@routes.get("/", include_in_schema=False)
def page(etag: IfNoneMatch = None) -> Response:
    return _file("index.html", etag)


@routes.get("/page/{name}", include_in_schema=False)
def file(name: str, etag: IfNoneMatch = None) -> Response:
    if name not in _FILES:
        raise HTTPException(404, f"the page has no file {name[:80]!r}; the page itself is at /")
    return _file(name, etag)


def _file(name: str, etag: str | None) -> Response:
    body = _FILES[name]
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    if is_current(etag, tag):
        return unchanged(tag)
    headers = {"ETag": tag, **_HEADERS}
    return Response(body, media_type=_TYPES[Path(name).suffix], headers=headers)
