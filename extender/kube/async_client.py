"""The gate to the Kubernetes API for the event loop: the calls of the ledger, several for each pod.

As ``extender.kube.client``, and with its errors, but no thread waits for an answer: to wake one for
each step of each bind costs much of what the step does, and then the loop has to wait for the lock
of the interpreter. What is long to decode, as a list is, is not for the loop.
"""

import ssl
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from kubernetes.client import Configuration
from kubernetes.client.rest import should_bypass_proxies
from yarl import URL

from extender.errors import BadSettings
from extender.kube.client import JSON, NoAnswer, describe, rejection, request_headers
from extender.progress import progressed

#: What a broken connection can raise, or one that is silent for too long.
_BROKEN = (aiohttp.ClientError, OSError)
#: Calls at once; what is beyond waits for one of them.
CONNECTIONS = 32
#: A connection that nobody used for so long is closed; the API server waits for 90 s.
_KEPT_S = 60.0
_MOST_AT_ONCE_BYTES = 1 << 18


class AsyncKubeApi:
    """Calls to one API server, from the loop that it was made on."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        connect_timeout_s: float = 3.0,
        read_timeout_s: float = 10.0,
        total_timeout_s: float = 15.0,
    ) -> None:
        """``read_timeout_s`` bounds each silence of the server, ``total_timeout_s`` the whole call,
        also if the answer comes a byte at a time or all connections are in use. Raises
        ``BadSettings`` where the configuration names a proxy that is none of HTTP."""
        self._configuration = configuration
        self._host = configuration.host.rstrip("/")
        self._way = _way(configuration)
        timeout = aiohttp.ClientTimeout(
            total=total_timeout_s, sock_connect=connect_timeout_s, sock_read=read_timeout_s
        )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=CONNECTIONS, keepalive_timeout=_KEPT_S, ssl=_tls(configuration)
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
        """The body of a successful answer; raises ``ApiStatus`` or ``NoAnswer``. Sent once."""
        call = f"{method} {path}"
        headers = request_headers(self._configuration, accept)
        data: bytes | BytesIO | None = body
        if body is not None:
            headers["Content-Type"] = content_type
            # In pieces, so that no call waits for the whole of it to be encrypted.
            data = body if len(body) <= _MOST_AT_ONCE_BYTES else BytesIO(body)
        try:
            async with self._session.request(
                method,
                URL(self._host + path, encoded=True),
                data=data,
                headers=headers,
                allow_redirects=False,
                **self._way,
            ) as response:
                content = await response.read()
        except _BROKEN as err:
            raise NoAnswer(f"{call}: {describe(err)}") from err
        except RuntimeError as err:
            if self._session.closed:
                raise NoAnswer(f"{call}: not sent, as this process ends") from err
            raise
        finally:
            progressed()
        if 200 <= response.status < 300:
            return content
        raise rejection(call, response.status, content, response.reason, response.headers)


def _way(configuration: Any) -> dict[str, Any]:
    """What every request says of the way to the server."""
    way: dict[str, Any] = {}
    if configuration.tls_server_name:
        way["server_hostname"] = configuration.tls_server_name
    proxy = configuration.proxy
    if proxy and not should_bypass_proxies(configuration.host, configuration.no_proxy or ""):
        if urlsplit(proxy).scheme not in ("http", "https"):
            raise BadSettings(
                f"the kubeconfig's proxy-url is {proxy}: an HTTP proxy is needed, as in "
                "http://proxy.example.com:3128"
            )
        way |= {"proxy": proxy, "proxy_headers": configuration.proxy_headers}
    return way


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
