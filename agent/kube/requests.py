"""Sends requests to the API server and streams watches, without decoding whole objects."""

from collections.abc import Iterator
from typing import Any

import msgspec
import urllib3

from agent.kube.client import ApiServer

_MERGE_PATCH = "application/merge-patch+json"
#: A GPUNode is smaller than etcd's limit of 1.5 MiB.
_MAX_LINE_BYTES = 4 << 20
_MAX_ERROR_BYTES = 4 << 10


class NotReached(Exception):
    """The API server did not answer."""


def request(
    server: ApiServer,
    method: str,
    path: str,
    timeout_s: float,
    accept: str = "application/json",
    body: object = None,
) -> urllib3.BaseHTTPResponse:
    """Send one request and return the response, whatever its status. Raises ``NotReached``."""
    headers = {"Accept": accept}
    if body is not None:
        headers["Content-Type"] = _MERGE_PATCH if method == "PATCH" else "application/json"
    encoded = None if body is None else msgspec.json.encode(body)
    try:
        return _send(server, method, path, headers, timeout_s, body=encoded)
    except (urllib3.exceptions.HTTPError, OSError) as err:
        raise NotReached(str(err)) from err


def watch_lines(server: ApiServer, path: str, quiet_s: float) -> Iterator[bytes]:
    """Yield the lines of a watch as they arrive, until the API server ends it.

    Raises ``NotReached`` if the watch cannot be opened, breaks, or sends nothing for ``quiet_s``
    seconds.
    """
    headers = {"Accept": "application/json"}
    try:
        response = _send(server, "GET", path, headers, quiet_s, preload_content=False)
        try:
            if response.status != 200:
                message = error_message(response.read(_MAX_ERROR_BYTES))
                raise NotReached(f"{response.status}: {message}")
            rest = b""
            for chunk in response.stream():
                *whole, rest = (rest + chunk).split(b"\n")
                if len(rest) > _MAX_LINE_BYTES:
                    raise NotReached("a line of the watch is too long")
                yield from whole
        finally:
            response.close()
    except (urllib3.exceptions.HTTPError, OSError) as err:
        raise NotReached(str(err)) from err


def error_message(body: bytes, limit: int = 600) -> str:
    """Return the message of a Kubernetes Status object, or else the text, cut to ``limit``."""
    try:
        text = _status.decode(body).message
    except (ValueError, RecursionError):
        text = body.decode("utf-8", "replace")
    return text if len(text) <= limit else text[: limit - 1] + "…"


class _Status(msgspec.Struct, frozen=True):
    """Kubernetes' error object."""

    message: str


_status = msgspec.json.Decoder(_Status)


def _send(
    server: ApiServer,
    method: str,
    path: str,
    headers: dict[str, str],
    timeout_s: float,
    **more: Any,
) -> urllib3.BaseHTTPResponse:
    headers["User-Agent"] = "headroom-agent"
    response: urllib3.BaseHTTPResponse = server.pool.request(
        method,
        server.address + path,
        headers=headers | server.authentication(),
        timeout=timeout_s,
        retries=False,  # the caller tries again with its newest data
        **more,
    )
    return response
