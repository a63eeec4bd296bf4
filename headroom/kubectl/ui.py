"""Serves the debug API's page to a browser, which does not have the kubeconfig's credentials.

A proxy on the loopback interface adds the credentials. Its URL contains a random key, because any
local process that can guess the URL can read with the user's permissions. The page uses relative
URLs, so all its requests contain the key.
"""

import http.client
import secrets
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

from headroom.kubectl.debug_api_client import CommandError, Response, Transport
from headroom.kubectl.output import show

#: Maximum size of the body of a browser's request.
_MAX_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16
#: Headers that belong to a connection, or that the proxy sets itself.
_NOT_PASSED = {"connection", "transfer-encoding", "content-length", "keep-alive", "server", "date"}


class Page(ThreadingHTTPServer):
    """A local server that forwards requests below ``url`` to a debug API."""

    daemon_threads = True

    def __init__(self, transport: Transport, port: int = 0) -> None:
        """Listen on 127.0.0.1. Raises ``OSError`` if the port is in use."""
        self._lock = Lock()
        #: The last error that was printed; empty after an answer.
        self._printed = ""
        page, prefix = self, f"/{secrets.token_urlsafe(18)}"

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def do_GET(self) -> None:
                self._pass_on(None)

            def do_POST(self) -> None:
                length = self.headers.get("Content-Length", "")
                if not length.isdecimal() or int(length) > _MAX_BYTES:
                    self.send_error(413)
                    return
                self._pass_on(self.rfile.read(int(length)))

            def _pass_on(self, body: bytes | None) -> None:
                if not self.path.startswith(f"{prefix}/"):
                    self.send_error(404)
                    return
                passed = ("Accept", "Content-Type", "If-None-Match", "Last-Event-ID")
                headers = {name: self.headers[name] for name in passed if name in self.headers}
                target = self.path.removeprefix(prefix)
                try:
                    with transport.open(self.command, target, body, headers) as response:
                        page.answered()
                        self._answer(response)
                        return
                except (OSError, http.client.HTTPException, CommandError) as err:
                    error = f"{transport.name}: {err or type(err).__name__}"
                self.close_connection = True
                page.lost(error)

            def _answer(self, response: Response) -> None:
                """Forward the answer in chunks as they arrive, so that events appear at once."""
                self.send_response(response.status)
                for name, value in response.headers.items():
                    if name.lower() not in _NOT_PASSED:
                        self.send_header(name, value)
                self.send_header("Connection", "close")
                self.end_headers()
                self.close_connection = True
                while chunk := response.read1(_CHUNK_BYTES):
                    try:
                        self.wfile.write(chunk)
                    except OSError:  # the browser has closed the connection
                        return

            def log_message(self, format: str, *args: object) -> None:
                """Log no requests."""

        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}{prefix}/"

    def answered(self) -> None:
        self._printed = ""

    def lost(self, error: str) -> None:
        """Print the error, unless it was the last that was printed."""
        with self._lock:
            if error != self._printed:
                self._printed = error
                show(f"kubectl headroom: {error}", error=True)


def show_page(page: Page, open_browser: Callable[[str], object]) -> None:
    """Print the URL, open it in a browser, and serve the page until Ctrl-C."""
    show(f"{page.url}  (Ctrl-C stops it)")
    open_browser(page.url)
    try:
        page.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        page.server_close()
