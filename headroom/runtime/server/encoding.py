"""Answers HEAD requests by the routes of GET, and compresses JSON for clients that accept gzip."""

import gzip
import zlib

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Bodies are compressed with the fastest level, which is nearly as good for JSON.
LEVEL = 1
#: Smaller bodies fit into one packet, so compressing them saves no time.
_LEAST_BYTES = 1024
#: Media types that are compressed. Streams of events and lines are not, because a compressor would
#: hold their lines back.
_COMPRESSED = ("application/json", "application/problem+json")
#: Streaming a gzip body: window size of zlib plus 16 for the gzip header.
_GZIP_WINDOW = zlib.MAX_WBITS | 16


class Encoding:
    """Middleware for HEAD and gzip."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            answer = _HeadAnswer(send)
            try:
                await self._app({**scope, "method": "GET"}, receive, answer.send)
            except _Answered:
                return
        elif "gzip" in Headers(scope=scope).get("accept-encoding", ""):
            await self._app(scope, receive, _GzipAnswer(send).send)
        else:
            await self._app(scope, receive, _NamedAnswer(send).send)


class _Answered(Exception):
    """Ends a stream after its headers have answered a HEAD request."""


class _HeadAnswer:
    """Sends the headers of an answer without its body."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_sent = False

    async def send(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            await self._send(message)
        elif not self._is_sent:
            self._is_sent = True
            await self._send({"type": "http.response.body", "body": b""})
            if message.get("more_body"):
                raise _Answered


class _NamedAnswer:
    """Names Accept-Encoding in ``Vary``, so that caches keep compressed and plain bodies apart."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_compressible(message):
            MutableHeaders(scope=message).setdefault("Vary", "Accept-Encoding")
        await self._send(message)


class _GzipAnswer:
    """Compresses a JSON body. Large bodies and parts are compressed on threads."""

    def __init__(self, send: Send) -> None:
        self._send = send
        #: The headers of the answer, until the first part of its body decides how they change.
        self._start: Message | None = None
        self._stream: zlib._Compress | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if _is_compressible(message):
                MutableHeaders(scope=message).setdefault("Vary", "Accept-Encoding")
                self._start = message
            else:
                await self._send(message)
            return
        start, self._start = self._start, None
        body, more = message.get("body", b""), message.get("more_body", False)
        if start is not None and (more or len(body) >= _LEAST_BYTES):
            headers = MutableHeaders(scope=start)
            headers["Content-Encoding"] = "gzip"
            del headers["Content-Length"]
            if more:
                self._stream = zlib.compressobj(LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
            else:
                body = await run_in_threadpool(gzip.compress, body, LEVEL)
                headers["Content-Length"] = str(len(body))
        if start is not None:
            await self._send(start)
        if self._stream is not None:
            body = await run_in_threadpool(_next_part, self._stream, body, more)
            if more and not body:
                return  # the compressor has kept all of this part
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _next_part(stream: "zlib._Compress", body: bytes, more: bool) -> bytes:
    return stream.compress(body) + (b"" if more else stream.flush())


def _is_compressible(start: Message) -> bool:
    headers = Headers(raw=start["headers"])
    kind = headers.get("content-type", "").partition(";")[0]
    return kind in _COMPRESSED and "content-encoding" not in headers
