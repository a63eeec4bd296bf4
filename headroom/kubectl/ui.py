"""The page of the debug API in a browser, which cannot send what a kubeconfig says of its user.

A proxy on the loopback adds it. Its address holds a key that nobody else on the machine knows:
whoever could guess it would read with the user's rights. The page asks by relative addresses, so
the key stays in front of all of them.
"""

import http.client
import secrets
import sys
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from headroom.kubectl.client import Trouble, Way

#: Of a request that a browser sends to the page.
_MOST_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16
#: Of its own connection, or made by the proxy.
_NOT_PASSED = {"connection", "transfer-encoding", "content-length", "keep-alive", "server", "date"}


class Page(ThreadingHTTPServer):
    """Serves at ``url`` what lies behind ``way``, until it is shut down."""

    daemon_threads = True

    def __init__(self, way: Way, port: int = 0) -> None:
        """Raises ``OSError`` where the port is taken."""
        prefix = f"/{secrets.token_urlsafe(18)}"

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def do_GET(self) -> None:
                self._pass_on(None)

            def do_POST(self) -> None:
                length = self.headers.get("Content-Length", "")
                if not length.isdecimal() or int(length) > _MOST_BYTES:
                    self.send_error(413)
                    return
                self._pass_on(self.rfile.read(int(length)))

            def _pass_on(self, body: bytes | None) -> None:
                if not self.path.startswith(f"{prefix}/"):
                    self.send_error(404)
                    return
                kept = ("Accept", "Content-Type", "If-None-Match", "Last-Event-ID")
                headers = {name: self.headers[name] for name in kept if name in self.headers}
                try:
                    with closing(way.connect()) as connection:
                        target = self.path.removeprefix(prefix)
                        connection.request(self.command, target, body, {**headers, **way.headers})
                        self._answer(connection.getresponse())
                except (OSError, http.client.HTTPException, Trouble) as err:
                    sys.stderr.write(f"kubectl headroom: {way.name}: {err}\n")
                    self.close_connection = True

            def _answer(self, response: http.client.HTTPResponse) -> None:
                """As it comes, so that events are shown when they happen."""
                self.send_response(response.status)
                for name, value in response.getheaders():
                    if name.lower() not in _NOT_PASSED:
                        self.send_header(name, value)
                self.send_header("Connection", "close")
                self.end_headers()
                while chunk := response.read1(_CHUNK_BYTES):
                    self.wfile.write(chunk)
                self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing of each request."""

        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}{prefix}/"


def show(page: Page, open_browser: Callable[[str], object]) -> None:
    """Until Ctrl-C."""
    print(f"{page.url}  (Ctrl-C ends it)", flush=True)  # noqa: T201
    open_browser(page.url)
    try:
        page.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        page.server_close()
