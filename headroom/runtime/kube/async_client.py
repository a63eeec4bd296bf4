"""The asynchronous client of the Kubernetes API, for the ledger's calls on the event loop.

Like ``runtime.kube.client``, it sends each request once and raises the same errors, but no thread
waits for an answer. If each step of a bind ran on a thread, switching threads would cost almost as
much as the step, and the event loop would wait for the interpreter's lock. Use the blocking client
for answers that take long to decode, such as lists.
"""

import asyncio
import ssl
from collections.abc import Callable
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import structlog
from kubernetes.client import Configuration
from kubernetes.client.rest import should_bypass_proxies
from yarl import URL

from headroom.client.kube_protocol import authentication
from headroom.errors import BadSettings
from headroom.runtime.kube.api_errors import NoAnswer, describe, rejection
from headroom.runtime.kube.client import JSON, USER_AGENT
from headroom.runtime.loops import progressed

log = structlog.get_logger()

#: Errors of a connection that broke or was silent for too long.
_BROKEN = (aiohttp.ClientError, OSError)
#: Maximum number of concurrent calls. Additional calls wait.
CONNECTIONS = 32
#: Seconds after which an unused connection is closed. The API server closes it after 90 s.
_KEEPALIVE_S = 60.0
#: A larger body is sent in pieces.
_MAX_ONE_PIECE_BYTES = 1 << 18


#: Seconds after which credentials are read again. Tokens are renewed minutes before they expire.
_CREDENTIALS_S = 10.0
#: Seconds that a call waits for the first credentials.
_FIRST_READ_S = 15.0


class Credentials:
    """The headers that authenticate this process.

    ``read`` returns the headers. It runs on a thread, because the exec plugin of a kubeconfig can
    take seconds. While it runs, the previous headers stay in use.
    """

    def __init__(
        self,
        read: Callable[[], dict[str, str]],
        fresh_s: float = _CREDENTIALS_S,
        first_read_s: float = _FIRST_READ_S,
    ) -> None:
        self._read = read
        self._fresh_s = fresh_s
        self._first_read_s = first_read_s
        self._headers: dict[str, str] | None = None
        self._reading: asyncio.Future[dict[str, str]] | None = None
        self._due_s = 0.0

    async def headers(self) -> dict[str, str]:
        """Return the headers. Raise ``OSError`` if they cannot be read in time."""
        loop = asyncio.get_running_loop()
        if self._reading is None and (self._headers is None or loop.time() >= self._due_s):
            self._reading = loop.run_in_executor(None, self._read)
            self._reading.add_done_callback(self._done)
        if self._headers is None and self._reading is not None:
            done, _ = await asyncio.wait([self._reading], timeout=self._first_read_s)
            if not done:
                raise TimeoutError(
                    f"not read within {self._first_read_s:g} s; does the exec plugin of the "
                    "kubeconfig hang?"
                )
            return done.pop().result()
        return self._headers or {}

    def _done(self, reading: "asyncio.Future[dict[str, str]]") -> None:
        self._reading = None
        self._due_s = reading.get_loop().time() + self._fresh_s
        if reading.cancelled():
            return
        if (err := reading.exception()) is None:
            self._headers = reading.result()
        else:
            log.warning("credentials_not_read", error=describe(err))


class AsyncKubeApi:
    """Calls one API server from the event loop on which it was created."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        connect_timeout_s: float = 3.0,
        read_timeout_s: float = 10.0,
        total_timeout_s: float = 15.0,
    ) -> None:
        """Prepare a session. Raise ``BadSettings`` if the configured proxy is not an HTTP proxy.

        ``read_timeout_s`` limits how long the server may send nothing. ``total_timeout_s`` limits
        the whole call, even if the answer arrives byte by byte or all connections are in use.
        """
        self._credentials = Credentials(lambda: authentication(configuration))
        self._host = configuration.host.rstrip("/")
        self._routing = _routing(configuration)
        timeout = aiohttp.ClientTimeout(
            total=total_timeout_s, sock_connect=connect_timeout_s, sock_read=read_timeout_s
        )
        # Without TLS, for example behind kubectl proxy, skip loading CAs, which takes 40 ms.
        tls = _tls(configuration) if self._host.startswith("https:") else True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=CONNECTIONS, keepalive_timeout=_KEEPALIVE_S, ssl=tls
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding", "Content-Type"),
            timeout=timeout,
        )

    async def close(self) -> None:
        await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> bytes:
        """Send a request once and return the body of a successful answer. Raises ``ApiStatus`` or
        ``NoAnswer``."""
        call = f"{method} {path}"
        try:
            headers = {"Accept": accept, "User-Agent": USER_AGENT}
            headers |= await self._credentials.headers()
        except OSError as err:
            raise NoAnswer(f"{call}: the credentials cannot be read: {describe(err)}") from err
        data: bytes | BytesIO | None = body
        if body is not None:
            headers["Content-Type"] = content_type
            # Send a large body in pieces, because other calls wait while a piece is encrypted.
            data = body if len(body) <= _MAX_ONE_PIECE_BYTES else BytesIO(body)
        try:
            async with self._session.request(
                method,
                URL(self._host + path, encoded=True),
                data=data,
                headers=headers,
                allow_redirects=False,
                **self._routing,
            ) as response:
                content = await response.read()
        except _BROKEN as err:
            raise NoAnswer(f"{call}: {describe(err)}") from err
        except RuntimeError as err:
            if self._session.closed:
                raise NoAnswer(f"{call}: not sent, because this process is stopping") from err
            raise
        finally:
            progressed()
        if 200 <= response.status < 300:
            return content
        raise rejection(call, response.status, content, response.reason, response.headers)


def _routing(configuration: Any) -> dict[str, Any]:
    """Return the options that each request takes from the configuration: TLS server name and proxy.
    Raises ``BadSettings`` if the proxy is not an HTTP proxy."""
    options: dict[str, Any] = {}
    if configuration.tls_server_name:
        options["server_hostname"] = configuration.tls_server_name
    proxy = configuration.proxy
    if proxy and not should_bypass_proxies(configuration.host, configuration.no_proxy or ""):
        if urlsplit(proxy).scheme not in ("http", "https"):
            raise BadSettings(
                f"the kubeconfig's proxy-url is {proxy}, which is not an HTTP proxy. Example: "
                "proxy-url: http://proxy.example.com:3128"
            )
        options |= {"proxy": proxy, "proxy_headers": configuration.proxy_headers}
    return options


def _tls(configuration: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    if configuration.assert_hostname is False:
        context.check_hostname = False
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
