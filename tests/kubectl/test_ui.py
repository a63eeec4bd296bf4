"""`kubectl headroom ui` finds another console after the one that it used has gone."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from headroom.kubectl.debug_api_client import UNREACHABLE, CommandError, Transport
from headroom.kubectl.transport import Address
from headroom.kubectl.ui import Page
from tests.loopback import LOOPBACK

GONE = CommandError("no console is ready", UNREACHABLE)


class OfPod:
    """Connections to a pod that has gone."""

    hint = ""

    def __init__(self, name: str) -> None:
        self.headers = {"Authorization": "Bearer t"}
        self.name = f"pod headroom-system/{name}"

    def connect(self) -> http.client.HTTPConnection:
        raise CommandError("404 Not Found", UNREACHABLE)


class Console(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"fleet")

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests."""


@pytest.fixture
def console() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Console) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_another_console_is_selected_and_each_error_is_printed_once(
    console: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[Transport | CommandError] = [OfPod("a"), GONE, GONE, OfPod("b"), Address(console)]

    def select() -> Transport:
        match found.pop(0):
            case CommandError() as err:
                raise err
            case transport:
                return transport

    with ExitStack() as after:
        page = after.enter_context(Page(select))
        thread = threading.Thread(target=page.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        after.callback(thread.join)
        after.callback(page.shutdown)
        for _ in range(4):
            with pytest.raises(httpx.TransportError):
                LOOPBACK.get(f"{page.url}v1/fleet")
        assert LOOPBACK.get(f"{page.url}v1/fleet").text == "fleet"
    assert not found
    assert capsys.readouterr().err.splitlines() == [
        "kubectl headroom: pod headroom-system/a: 404 Not Found",
        "kubectl headroom: pod headroom-system/b: 404 Not Found",
    ]
