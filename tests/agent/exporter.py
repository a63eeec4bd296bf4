"""A dcgm-exporter over real HTTP that serves given text, or misbehaves on request."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

from agent.probes.dcgm_exposition import DcgmReading, Exposition

EXPOSITIONS = Path(__file__).with_name("expositions")

#: How the exporter reacts to a request. "drip" sends one byte of the header or body at a time, and
#: "cut off" closes the connection in the middle of the body.
Manner = Literal["answer", "silent", "drip headers", "drip body", "endless", "cut off", "not http"]


def recorded(name: str) -> str:
    return (EXPOSITIONS / f"{name}.txt").read_text()


def parse(text: str) -> tuple[list[DcgmReading], int]:
    """Return the values of an exposition, and the number of invalid lines."""
    exposition = Exposition()
    for start in range(0, len(body := text.encode("utf-8", "surrogatepass")), 7):
        exposition.feed(body[start : start + 7])
    scraped = exposition.end()
    return list(scraped.readings), scraped.bad_lines


class StandIn:
    def __init__(self) -> None:
        self.text = ""
        self.status = 200
        self.manner: Manner = "answer"
        #: Number of requests by path, and the headers of the last request.
        self.asked = 0
        self.paths: list[str] = []
        self.heard: Mapping[str, str] = {}
        self._ended = threading.Event()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stand_in.asked += 1
                stand_in.paths.append(self.path)
                stand_in.heard = dict(self.headers)
                try:
                    self._behave()
                except OSError:
                    self.close_connection = True  # The client disconnected.

            def _behave(self) -> None:
                body = stand_in.text.encode()
                match stand_in.manner:
                    case "answer":
                        self.send_response(stand_in.status)
                        self.send_header("Content-Length", str(len(body)))
                        self.end_headers()
                        self.wfile.write(body)
                    case "silent":
                        stand_in._ended.wait()
                    case "drip headers":
                        self._drip(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                    case "drip body":
                        self._drip(b"HTTP/1.1 200 OK\r\n\r\n")
                    case "endless":
                        self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                        while not stand_in._ended.is_set():
                            self.wfile.write(b"# nothing\n" * 10_000)
                    case "cut off":
                        self.send_response(200)
                        self.send_header("Content-Length", str(len(body)))
                        self.end_headers()
                        self.wfile.write(body[: len(body) // 2])
                        self.close_connection = True
                    case "not http":
                        self.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")

            def _drip(self, first: bytes) -> None:
                self.wfile.write(first)
                while not stand_in._ended.wait(0.02):
                    self.wfile.write(b"x")

            def log_message(self, format: str, *args: object) -> None:
                """Do not log requests."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.002,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/metrics"

    @contextmanager
    def serving(self) -> Iterator["StandIn"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
