"""Asks the other replicas, all at once and for a moment only.

They are found by name each time, since replicas come and go: a headless Service has an address for
each. Its own is among them; a replica knows itself by its name in the answer, once.

Where the debug ports speak TLS a peer is who shows the very certificate that this replica shows:
both have it from the same Secret, and names and addresses of replicas are in none.
"""

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from extender.web.peers import REPLICA, PeerAnswer

T = TypeVar("T")
#: More replicas than anybody runs.
MOST_PEERS = 16
#: Of an answer: a page of decisions is a fraction of it.
MOST_BYTES = 8 << 20
_PIECE_BYTES = 1 << 16

#: Host and port.
Address = tuple[str, int]


class Peers:
    """``places`` are hosts with or without a port; ``name`` is this replica's own, and ``cert``
    the file of the certificate that it is served with, where that is over TLS."""

    def __init__(
        self,
        places: Sequence[str],
        usual_port: int,
        timeout_s: float,
        name: str,
        cert: Path | None = None,
    ) -> None:
        self._places = [(place, usual_port) for place in places]
        self._timeout_s = timeout_s
        self._name = name
        self._cert = cert
        #: What turned out to be ourselves.
        self._own: set[Address] = set()
        self._pool = ThreadPoolExecutor(2 * MOST_PEERS, thread_name_prefix="peers")

    def ask(self, path: str, authorization: str | None) -> list[PeerAnswer]:
        """What every peer says to this path, as far as it came in time; ourselves left out."""
        until_s = time.monotonic() + self._timeout_s
        answers: list[PeerAnswer] = []
        addresses: dict[Address, None] = {}
        for place, found in self._in_time(_addresses, self._places, until_s):
            if isinstance(found, list):
                addresses.update(dict.fromkeys(found))
            else:
                answers.append(PeerAnswer(place[0], None, f"its name was not resolved: {found}"))
        others = [address for address in addresses if address not in self._own][:MOST_PEERS]

        def one(address: Address) -> bytes | None:
            return self._get(address, path, authorization, until_s)

        for address, body in self._in_time(one, others, until_s):
            if isinstance(body, str):
                answers.append(PeerAnswer(_said(address), None, body))
            elif body is None:
                self._own.add(address)
            else:
                answers.append(PeerAnswer(_said(address), body))
        return answers

    def _in_time(
        self, do: Callable[[Address], T], addresses: Sequence[Address], until_s: float
    ) -> list[tuple[Address, T | str]]:
        """Each with what came of it, or why nothing did."""
        futures = {address: self._pool.submit(do, address) for address in addresses}
        wait(futures.values(), max(0.0, until_s - time.monotonic()))
        came: list[tuple[Address, T | str]] = []
        for address, future in futures.items():
            said = self._came(future)
            came.append((address, said))
        return came

    def _came(self, future: Future[T]) -> T | str:
        if not future.done():
            future.cancel()
            return f"no answer within {self._timeout_s:g} s"
        try:
            return future.result()
        except (OSError, http.client.HTTPException, ValueError) as err:
            return str(err) or type(err).__name__

    def _get(
        self, address: Address, path: str, authorization: str | None, until_s: float
    ) -> bytes | None:
        """The body of the answer, empty for 404; None where it is our own."""
        left_s = max(0.001, until_s - time.monotonic())
        connection = self._connection(address, left_s)
        with contextlib.closing(connection):
            headers = {"Accept": "application/json"}
            if authorization:
                headers["Authorization"] = authorization
            connection.request("GET", path, headers=headers)
            with connection.getresponse() as answer:
                if answer.status == 401 and not authorization:
                    raise ValueError("it needs a token: a client certificate is not passed on")
                return self._read(answer, until_s)

    def _connection(self, address: Address, timeout_s: float) -> http.client.HTTPConnection:
        if self._cert is None:
            return http.client.HTTPConnection(*address, timeout=timeout_s)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        # The first of the file is trusted by itself, whoever signed it. Read each time, since it
        # is renewed in place.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        end = "-----END CERTIFICATE-----\n"
        context.load_verify_locations(cadata=self._cert.read_text().partition(end)[0] + end)
        return http.client.HTTPSConnection(*address, timeout=timeout_s, context=context)

    def _read(self, answer: http.client.HTTPResponse, until_s: float) -> bytes | None:
        if answer.headers.get(REPLICA) == self._name:
            return None
        if answer.status == 404:
            return b""
        if answer.status != 200:
            raise ValueError(f"it answered {answer.status} {answer.reason}")
        body = b""
        while piece := answer.read(_PIECE_BYTES):
            body += piece
            if len(body) > MOST_BYTES or time.monotonic() > until_s:
                raise ValueError("its answer is too long")
        return body


def _addresses(place: Address) -> list[Address]:
    """All that the name stands for."""
    parts = urlsplit(f"//{place[0]}")
    port = parts.port or place[1]
    found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    return [(str(each[4][0]), port) for each in found]


def _said(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
