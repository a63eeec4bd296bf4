"""The gate to the Kubernetes API for threads. The event loop uses ``extender.kube.async_client``.

Small calls use the typed API of the ``kubernetes`` package over ``KubeApi.client``. Lists and
watches are raw requests and raw bodies, because its models take too much memory and time (ADR 37).
Nothing is sent twice by this layer: whether a lost write may be repeated is the caller's to decide
(DESIGN section 6).

    ApiError
    ├── ApiStatus    the server answered, and not with success
    ├── NoAnswer     it did not answer; what was asked may have been done all the same
    └── Unreadable   it answered something that is not what it was asked for
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

import kubernetes.config
import msgspec
import urllib3
from kubernetes.client import ApiClient
from kubernetes.client import Configuration as Configuration
from kubernetes.client.exceptions import ApiException

from extender.errors import BadSettings

#: What a broken connection can raise below urllib3's own errors (TLS, a socket shut down by us).
_BROKEN = (urllib3.exceptions.HTTPError, HTTPException, OSError)
_MESSAGE_CHARS = 1000
JSON = "application/json"
USER_AGENT = "headroom"
#: For an answer of which only the metadata is read.
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"

Query = Mapping[str, str]
T = TypeVar("T")


#: A body may take so long altogether, also if it never pauses for as long as the read timeout.
BODY_S = 60.0
_BODY_PART_BYTES = 1 << 20


class ApiError(Exception):
    """Base of what can go wrong with a call; the text names the call."""


class ApiStatus(ApiError):
    """``status`` is the HTTP code, ``message`` what the server said; ``retry_after_s`` what it
    asked for, in seconds."""

    def __init__(self, call: str, status: int, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{call}: {status} {message[:_MESSAGE_CHARS]}".rstrip())
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s


class NoAnswer(ApiError):
    pass


class Unreadable(ApiError):
    pass


class StatusBody(msgspec.Struct, frozen=True):
    """Kubernetes' own error object, in the body of an answer or in a watch."""

    message: str = ""
    reason: str = ""
    code: int = 0


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct, frozen=True):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


_page_decoder = msgspec.json.Decoder(_Page)
_status_decoder = msgspec.json.Decoder(StatusBody)


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """A complete, consistent list; ``resource_version`` is where a watch continues it."""

    items: list[T]
    resource_version: str


def load_configuration(
    kubeconfig: str | None = None,
    context: str | None = None,
    hint: str = "example: export KUBECONFIG=$HOME/.kube/config",
) -> Configuration:
    """Return the pod's own service account inside a cluster, else (or if named) a kubeconfig.

    Raises ``BadSettings``, which ends with ``hint``, if there is neither.
    """
    configuration = Configuration()
    load: Any = kubernetes.config  # typed in some releases, in part
    try:
        if kubeconfig is None and context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            load.load_incluster_config(client_configuration=configuration)
        else:
            load.load_kube_config(
                config_file=kubeconfig, context=context, client_configuration=configuration
            )
    except kubernetes.config.ConfigException as err:
        raise BadSettings(f"no cluster is configured: {err}; {hint}") from err
    return configuration


class Stream:
    """The open body of a watch, read by one thread; ``interrupt`` may come from another."""

    def __init__(self, call: str, response: urllib3.BaseHTTPResponse) -> None:
        self._call = call
        self._response = response
        self._interrupted = False

    def read(self) -> bytes:
        """What has arrived, as soon as anything has; empty at the proper end.

        Raises ``NoAnswer`` when the connection breaks, stays silent for too long or is interrupted.
        """
        try:
            data = self._response.read1(1 << 16)
        except _BROKEN as err:
            raise NoAnswer(f"{self._call}: {describe(err)}") from err
        if self._interrupted:
            # Shutting a TLS socket down takes its cipher away first: what is read from then on,
            # until the end is noticed, is the encrypted stream as it came.
            raise NoAnswer(f"{self._call}: interrupted")
        return data

    def interrupt(self) -> None:
        """Make a ``read`` in progress return or raise at once."""
        self._interrupted = True
        try:
            self._response.shutdown()
        except (*_BROKEN, ValueError):  # it had ended by itself
            return

    def close(self) -> None:
        self._response.close()


class KubeApi:
    """Calls to one API server. Methods block, and may be called from any thread."""

    _is_closed = False

    def __init__(
        self,
        configuration: Configuration,
        *,
        connect_timeout_s: float = 3.0,
        read_timeout_s: float = 10.0,
    ) -> None:
        self._configuration = configuration
        self._host = configuration.host.rstrip("/")
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        configuration.retries = False  # else urllib3 sends a request three times more
        #: For the typed API of the ``kubernetes`` package, within ``asking``.
        self.client = ApiClient(configuration)
        self.client.user_agent = USER_AGENT
        self._pool: urllib3.PoolManager = self.client.rest_client.pool_manager

    def close(self) -> None:
        """No call begins after this: a thread that has a long way to go ends with the one it is
        in, which it may wait for as long as any."""
        self._is_closed = True
        self._pool.clear()

    @contextmanager
    def asking(self, call: str) -> Iterator[tuple[float, float]]:
        """Raise ``ApiError`` for what a typed API raises within the context, which gets the
        ``_request_timeout`` of each call."""
        if self._is_closed:
            raise NoAnswer(f"{call}: not sent, as this process ends")
        try:
            yield self._connect_timeout_s, self._read_timeout_s
        except ApiException as err:
            if not err.status:
                raise NoAnswer(f"{call}: {err.reason}") from err
            body, headers = (err.body or "").encode(), err.headers or {}
            raise rejection(call, err.status, body, err.reason, headers) from err
        except _BROKEN as err:
            raise NoAnswer(f"{call}: {describe(err)}") from err
        except (ValueError, RecursionError):  # which would quote the answer, perhaps a secret
            raise Unreadable(f"{call}: the answer cannot be read") from None

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: bytes | None = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> bytes:
        """The body of a successful answer; raises ``ApiStatus`` or ``NoAnswer``."""
        call = f"{method} {path}"
        timeout_s = self._read_timeout_s
        response = self._send(method, path, query, body, content_type, timeout_s, accept)
        return self._success(call, response)

    def stream(self, path: str, *, query: Query, read_timeout_s: float) -> Stream:
        """Open a watch; ``read_timeout_s`` bounds the silence between two pieces of it."""
        call = f"WATCH {path}"
        response = self._send("GET", path, query, None, "", read_timeout_s)
        if response.status != 200:
            self._success(call, response)
            raise Unreadable(f"{call}: answered {response.status}, which is no stream")
        return Stream(call, response)

    def list(
        self,
        path: str,
        take: Callable[[msgspec.Raw], T | None],
        *,
        page_size: int,
        query: Query | None = None,
    ) -> Listing[T]:
        """Everything under ``path`` at one moment, fetched in pages.

        What ``take`` makes of an object is listed, unless that is None; it is called in the order
        of the list, from a thread of its own while the server makes the next page. Nothing else of
        a page is kept in memory when the one after the next comes. A continue token can expire
        (etcd keeps minutes of history): then the list starts anew, in one page, so that it ends
        however long the pages take.
        """
        try:
            return self._list(path, take, query, page_size)
        except ApiStatus as err:
            if err.status != 410 or not page_size:
                raise
            return self._list(path, take, query, 0)

    def _list(
        self,
        path: str,
        take: Callable[[msgspec.Raw], T | None],
        query: Query | None,
        page_size: int,
    ) -> Listing[T]:
        items: list[T] = []
        page_query = dict(query or {}) | ({"limit": str(page_size)} if page_size else {})
        with ThreadPoolExecutor(1, thread_name_prefix="list") as hands:
            taking: Future[list[T]] | None = None
            while True:
                body = self.call("GET", path, query=page_query)
                try:
                    page = _page_decoder.decode(body)
                except (ValueError, RecursionError) as err:
                    raise Unreadable(f"GET {path}: not a list: {err}") from err
                if taking is not None:
                    items += taking.result()
                if not page.metadata.continue_:
                    items += _taken(take, page.items or ())
                    return Listing(items, page.metadata.resource_version)
                taking = hands.submit(_taken, take, page.items or ())
                page_query["continue"] = page.metadata.continue_

    def _send(
        self,
        method: str,
        path: str,
        query: Query | None,
        body: bytes | None,
        content_type: str,
        read_timeout_s: float,
        accept: str = JSON,
    ) -> urllib3.BaseHTTPResponse:
        if self._is_closed:
            raise NoAnswer(f"{method} {path}: not sent, as this process ends")
        headers = request_headers(self._configuration, accept)
        if body is not None:
            headers["Content-Type"] = content_type
        try:
            return self._pool.request(
                method,
                self._host + path + (f"?{urlencode(query)}" if query else ""),
                body=body,
                headers=headers,
                preload_content=False,
                retries=False,  # no redirect either; urllib3 would send a lost POST again
                timeout=urllib3.Timeout(connect=self._connect_timeout_s, read=read_timeout_s),
            )
        except _BROKEN as err:
            raise NoAnswer(f"{method} {path}: {describe(err)}") from err

    def _success(self, call: str, response: urllib3.BaseHTTPResponse) -> bytes:
        until_s = time.monotonic() + BODY_S
        parts: list[bytes] = []
        try:
            while part := response.read1(_BODY_PART_BYTES):
                parts.append(part)
                if time.monotonic() > until_s:
                    raise TimeoutError(f"the answer took longer than {BODY_S:.0f} s")
            body = b"".join(parts)
        except _BROKEN as err:
            response.close()
            raise NoAnswer(f"{call}: {response.status}, then {describe(err)}") from err
        response.release_conn()
        if 200 <= response.status < 300:
            return body
        raise rejection(call, response.status, body, response.reason, response.headers)


def _taken(take: Callable[[msgspec.Raw], T | None], raws: Sequence[msgspec.Raw]) -> list[T]:
    return [item for raw in raws if (item := take(raw)) is not None]


def request_headers(configuration: Configuration, accept: str) -> dict[str, str]:
    """Who asks, as what, and for what; of a request without a body."""
    headers = {"Accept": accept, "User-Agent": USER_AGENT}
    # Asked anew each time: service account tokens are rotated under a running process.
    settings: Any = configuration.auth_settings()
    for setting in settings.values():
        if setting["in"] == "header" and setting["value"]:
            headers[setting["key"]] = setting["value"]
    return headers


def authorization(configuration: Configuration) -> str:
    """The header that authenticates this process by its token; empty if it has none."""
    settings: Any = configuration.auth_settings()
    values = (setting["value"] for setting in settings.values() if setting["in"] == "header")
    return next(filter(None, values), "")


def rejection(
    call: str, status: int, body: bytes, phrase: str | None, headers: Mapping[str, str]
) -> ApiStatus:
    """What an answer other than success says; ``phrase`` stands beside its status."""
    message = status_message(body) or phrase or ""
    retry_after = headers.get("Retry-After", "")
    retry_after_s = float(retry_after) if retry_after.isdecimal() else 0.0
    return ApiStatus(call, status, message, retry_after_s)


def status_message(body: bytes) -> str:
    """The server's own words, whatever it wrapped them in."""
    try:
        status = _status_decoder.decode(body)
    except (ValueError, RecursionError):
        return body[:_MESSAGE_CHARS].decode(errors="replace").strip()
    return f"{status.reason}: {status.message}" if status.reason else status.message


def describe(err: BaseException) -> str:
    """An error in one line; some of urllib3's have no text of their own."""
    return f"{type(err).__name__}: {err}" if str(err) else type(err).__name__
