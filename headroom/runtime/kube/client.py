"""The blocking client of the Kubernetes API, for threads.

Small calls use the typed API of the ``kubernetes`` package through ``KubeApi.client``. Lists and
watches use raw requests and bodies, because the package's models take too much memory and time (ADR
37). This layer never sends a request twice, because only the caller can decide whether a write may
be repeated. Code on the event loop uses ``runtime.kube.async_client``.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Generic, TypeVar
from urllib.parse import urlencode

import kubernetes.config
import msgspec
import urllib3
from kubernetes.client import ApiClient
from kubernetes.client import Configuration as Configuration
from kubernetes.client.exceptions import ApiException

from headroom.client import kubeconfig as kubeconfigs
from headroom.client.kube_protocol import authentication
from headroom.errors import BadSettings
from headroom.runtime.kube.api_errors import ApiStatus, NoAnswer, Unreadable, describe, rejection

#: Errors of a broken connection: urllib3's own errors, and errors that it passes through from TLS
#: or from a socket that this process shut down.
_BROKEN = (urllib3.exceptions.HTTPError, HTTPException, OSError)
JSON = "application/json"
USER_AGENT = "headroom"
#: Accept header that requests only metadata.
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"

Query = Mapping[str, str]
T = TypeVar("T")


#: Maximum number of seconds to receive a body. The read timeout limits only the pauses in it.
BODY_S = 60.0
_BODY_PART_BYTES = 1 << 20


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct, frozen=True):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


_page_decoder = msgspec.json.Decoder(_Page)


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """A complete and consistent list. A watch can continue from ``resource_version``."""

    items: list[T]
    resource_version: str


def load_configuration(
    kubeconfig: str | None = None,
    context: str | None = None,
    hint: str = "example: export KUBECONFIG=$HOME/.kube/config",
) -> Configuration:
    """Return the configuration of the cluster that kubectl uses.

    Raises ``BadSettings`` if there is none. The error message ends with ``hint``.
    """
    configuration = Configuration()
    try:
        kubeconfigs.configure(configuration, kubeconfig, context)
    except kubeconfigs.BadKubeconfig as err:
        raise BadSettings(f"no cluster is configured: {err}; {hint}") from err
    return configuration


class Stream:
    """The open body of a watch. One thread reads it. Another thread may call ``interrupt``."""

    def __init__(self, call: str, response: urllib3.BaseHTTPResponse) -> None:
        self._call = call
        self._response = response
        self._interrupted = False

    def read(self) -> bytes:
        """Return data as soon as any has arrived, or b"" if the stream has ended normally.

        Raises ``NoAnswer`` if the connection breaks, is silent for too long or is interrupted.
        """
        try:
            data = self._response.read1(1 << 16)
        except _BROKEN as err:
            raise NoAnswer(f"{self._call}: {describe(err)}") from err
        if self._interrupted:
            # Shutting down a TLS socket first removes its cipher, so data that is read after that
            # is still encrypted.
            raise NoAnswer(f"{self._call}: interrupted")
        return data

    def interrupt(self) -> None:
        """Make a ``read`` in progress return or raise immediately."""
        self._interrupted = True
        try:
            self._response.shutdown()
        except (*_BROKEN, ValueError):  # the stream has already ended
            return

    def close(self) -> None:
        self._response.close()


class KubeApi:
    """Calls one API server. Its methods block, and may be called from any thread."""

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
        configuration.retries = False  # otherwise urllib3 repeats a request up to three times
        #: The client of the typed API of the ``kubernetes`` package. Use it within ``asking``.
        self.client = ApiClient(configuration)
        self.client.user_agent = USER_AGENT
        self._pool: urllib3.PoolManager = self.client.rest_client.pool_manager

    def close(self) -> None:
        """Make later calls raise ``NoAnswer``, which ends threads that have many calls to make.

        A call in progress may continue until its timeout.
        """
        self._is_closed = True
        self._pool.clear()

    @contextmanager
    def asking(self, call: str) -> Iterator[tuple[float, float]]:
        """Convert errors that a typed API raises within the context to ``ApiError``.

        Yield the value to pass as ``_request_timeout`` to each call. ``call`` names the call in
        errors.
        """
        if self._is_closed:
            raise NoAnswer(f"{call}: not sent, because this process is stopping")
        try:
            yield self._connect_timeout_s, self._read_timeout_s
        except ApiException as err:
            if not err.status:
                raise NoAnswer(f"{call}: {err.reason}") from err
            body, headers = (err.body or "").encode(), err.headers or {}
            raise rejection(call, err.status, body, err.reason, headers) from err
        except (*_BROKEN, kubernetes.config.ConfigException) as err:
            raise NoAnswer(f"{call}: {describe(err)}") from err
        except (ValueError, RecursionError):  # their text can quote a secret from the answer
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
        """Return the body of a successful answer. Raises ``ApiStatus`` or ``NoAnswer``."""
        call = f"{method} {path}"
        timeout_s = self._read_timeout_s
        response = self._send(method, path, query, body, content_type, timeout_s, accept)
        return self._body_of(call, response)

    def stream(self, path: str, *, query: Query, read_timeout_s: float) -> Stream:
        """Open a watch. ``read_timeout_s`` limits the silence between two pieces of data.

        Raises ``ApiStatus``, ``NoAnswer`` or ``Unreadable``.
        """
        call = f"WATCH {path}"
        response = self._send("GET", path, query, None, "", read_timeout_s)
        if response.status != 200:
            self._body_of(call, response)
            raise Unreadable(f"{call}: answered {response.status} instead of a stream")
        return Stream(call, response)

    def list(
        self,
        path: str,
        take: Callable[[msgspec.Raw], T | None],
        *,
        page_size: int,
        query: Query | None = None,
    ) -> Listing[T]:
        """Return all objects under ``path`` as they are at one moment. They are fetched in pages.
        Raises ``ApiError``.

        ``take`` converts each object, in the order of the list. Objects for which it returns None
        are omitted. A continue token can expire (410), because etcd keeps only minutes of history.
        In this case the list starts again as a single page, which cannot expire, and ``take`` is
        called again for all objects.
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
        while True:
            body = self.call("GET", path, query=page_query)
            try:
                page = _page_decoder.decode(body)
            except (ValueError, RecursionError) as err:
                raise Unreadable(f"GET {path}: not a list: {err}") from err
            items += (item for raw in page.items or () if (item := take(raw)) is not None)
            if not page.metadata.continue_:
                return Listing(items, page.metadata.resource_version)
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
            raise NoAnswer(f"{method} {path}: not sent, because this process is stopping")
        headers = {"Accept": accept, "User-Agent": USER_AGENT}
        if body is not None:
            headers["Content-Type"] = content_type
        try:
            headers |= authentication(self._configuration)
            return self._pool.request(
                method,
                self._host + path + (f"?{urlencode(query)}" if query else ""),
                body=body,
                headers=headers,
                preload_content=False,
                retries=False,  # follow no redirect, and never repeat a lost POST
                timeout=urllib3.Timeout(connect=self._connect_timeout_s, read=read_timeout_s),
            )
        except _BROKEN as err:
            raise NoAnswer(f"{method} {path}: {describe(err)}") from err

    def _body_of(self, call: str, response: urllib3.BaseHTTPResponse) -> bytes:
        """Return the body of a successful answer. Raises ``ApiStatus`` or ``NoAnswer``."""
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


def authorization(configuration: Configuration) -> str:
    """Return the value of the Authorization header with this process's token, or "" if it has
    none."""
    return next(iter(authentication(configuration).values()), "")
