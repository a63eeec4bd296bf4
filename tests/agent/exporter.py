"""A fake dcgm-exporter that serves the test's text over real HTTP, or misbehaves as the test
requests.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from agent.probes.dcgm_exposition import DcgmReading, Exposition
from tests.answering import Answer, Request, answering

EXPOSITIONS = Path(__file__).with_name("expositions")

#: How the exporter reacts to a request. "drip headers" and "drip body" send one byte at a time, and
#: "cut off" closes the connection in the middle of the body.
Manner = Literal["answer", "silent", "drip headers", "drip body", "endless", "cut off", "not http"]


def recorded(name: str) -> str:
    return (EXPOSITIONS / f"{name}.txt").read_text()


def parse(text: str) -> tuple[list[DcgmReading], int]:
    """Return the values of a Prometheus exposition, and the number of invalid lines."""
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
        #: Number of requests, the path of each request, and the headers of the last request.
        self.asked = 0
        self.paths: list[str] = []
        self.heard: Mapping[str, str] = {}
        self._ended = threading.Event()
        self.url = ""

    def _answer(self, request: Request) -> Answer:
        self.asked += 1
        self.paths.append(request.path)
        self.heard = dict(request.headers)
        body, write = self.text.encode(), request.write
        match self.manner:
            case "answer":
                return self.status, body
            case "silent":
                self._ended.wait()
            case "drip headers":
                self._drip(write, b"HTTP/1.1 200 OK\r\nX-Slow: ")
            case "drip body":
                self._drip(write, b"HTTP/1.1 200 OK\r\n\r\n")
            case "endless":
                write(b"HTTP/1.1 200 OK\r\n\r\n")
                while not self._ended.is_set():
                    write(b"# nothing\n" * 10_000)
            case "cut off":
                write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
                write(body[: len(body) // 2])
            case "not http":
                write(b"SSH-2.0-OpenSSH_9.2\r\n")
        return None

    def _drip(self, write: Callable[[bytes], object], first: bytes) -> None:
        write(first)
        while not self._ended.wait(0.02):
            write(b"x")

    @contextmanager
    def serving(self) -> Iterator["StandIn"]:
        with answering(self._answer) as url:
            self.url = f"{url}/metrics"
            try:
                yield self
            finally:
                self._ended.set()
