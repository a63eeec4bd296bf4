"""The wires of a storm, in a process of their own: python -m tests.chaos.proxy CONFIG.json

In front of the API server stands one reverse proxy for each process of ours, which may be slow, let
connections drop, answer in the server's place, before it has passed the request on or after, or
pass it on long after the client has given up. In front of extenders, journals and webhooks is
what a Service is: one address, each connection to the next that takes it. What goes wrong is set by
lines of JSON on a control port; each is answered with how often what has happened so far, and with
kube-scheduler's calls since they were asked for last.
"""

import asyncio
import contextlib
import itertools
import json
import random
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LONGEST = 1 << 26
_WATCH = "WATCH"


@dataclass
class Wire:
    """How the requests of one process fare, and those to it; all ratios are of requests."""

    name: str
    latency_s: float = 0.0
    #: No call gets through.
    refuses: bool = False
    #: Connections are taken and nothing passes.
    holds: bool = False
    flows: asyncio.Event = field(default_factory=asyncio.Event)
    #: Connections that break before a request is passed on, or with it.
    drop_ratio: float = 0.0
    #: Status that is answered instead of passing a request on, and how often.
    answer: int = 0
    answer_ratio: float = 0.0
    #: The same after it was passed on and done; 0: the connection breaks.
    after: int = 0
    after_ratio: float = 0.0
    #: Requests that are passed on so much later.
    late_s: float = 0.0
    late_ratio: float = 0.0
    done: Counter[str] = field(default_factory=Counter)
    #: Open connections, and whether each carries a watch.
    open: dict[asyncio.StreamWriter, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.flows.set()

    def set(self, told: dict[str, Any]) -> None:
        """Omitted fields return to their initial values."""
        for key, of in Wire.__dataclass_fields__.items():
            if key not in ("name", "flows", "done", "open"):
                setattr(self, key, told.get(key, of.default))
        (self.flows.clear if self.holds else self.flows.set)()

    def cut(self, watches_only: bool) -> None:
        for writer, watches in list(self.open.items()):
            if watches or not watches_only:
                self.done["cut"] += 1
                writer.transport.abort()

    async def passes(self, lots: random.Random) -> None:
        """Return when a request, or a part of one, may pass."""
        if self.latency_s:
            await asyncio.sleep(self.latency_s * lots.uniform(0.5, 1.5))
        await self.flows.wait()
        if self.refuses:
            raise _Broken


class _Broken(Exception):
    """The connection is to end without a word."""


class Reverse:
    """The way of one process to the API server."""

    def __init__(self, wire: Wire, upstream_port: int, ca: str, lots: random.Random) -> None:
        self._wire = wire
        self._upstream_port = upstream_port
        self._tls = ssl.create_default_context(cafile=ca)
        self._lots = lots

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._wire.open[writer] = False
        try:
            if self._wire.refuses:
                raise _Broken
            upstream = await asyncio.open_connection(
                "127.0.0.1", self._upstream_port, ssl=self._tls, limit=LONGEST
            )
            while await self._exchange(reader, writer, *upstream):
                self._wire.open[writer] = False
        except (_Broken, OSError, EOFError, asyncio.LimitOverrunError, ValueError):
            writer.transport.abort()
        finally:
            del self._wire.open[writer]
            for each in (writer, *(upstream[1:] if upstream else ())):
                each.close()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> bool:
        """One request and its answer; whether another may follow."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        body = await reader.readexactly(_length(head))
        method, target = head.split(b" ", 2)[:2]
        watches = b"watch=true" in target
        wire, chance = self._wire, self._lots.random
        wire.open[writer] = watches
        wire.done[_WATCH if watches else method.decode()] += 1
        await wire.passes(self._lots)
        if chance() < wire.drop_ratio:
            wire.done["dropped"] += 1
            raise _Broken
        if chance() < wire.answer_ratio and self._fits(wire.answer, method):
            wire.done[f"answered {wire.answer}"] += 1
            writer.write(_answer(wire.answer))
            await writer.drain()
            return True
        if not watches and chance() < wire.late_ratio:
            wire.done["late"] += 1
            await asyncio.sleep(wire.late_s)
        to_server.write(head + body)
        await to_server.drain()
        if not watches and chance() < wire.after_ratio and self._fits(wire.after, method):
            wire.done[f"done, answered {wire.after or 'nothing'}"] += 1
            await _relay(from_server, None)
            if not wire.after:
                raise _Broken
            writer.write(_answer(wire.after))
            await writer.drain()
            return True
        return await _relay(from_server, writer)

    def _fits(self, status: int, method: bytes) -> bool:
        """Only writes conflict."""
        return status != 409 or method != b"GET"


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter | None) -> bool:
    """Pass one answer on, or let it fall; whether the connection can be used again."""

    async def give(data: bytes) -> None:
        if writer is not None:
            writer.write(data)
            await writer.drain()

    head = await reader.readuntil(b"\r\n\r\n")
    await give(head)
    lowered = head.lower()
    if b"transfer-encoding: chunked" in lowered:
        while True:
            line = await reader.readuntil(b"\r\n")
            size = int(line.partition(b";")[0], 16)
            await give(line + await reader.readexactly(size + 2))
            if not size:
                break
    elif b"content-length:" in lowered:
        await give(await reader.readexactly(_length(head)))
    elif not lowered.startswith((b"http/1.1 204", b"http/1.1 304")):
        return False
    return b"connection: close" not in lowered


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _answer(status: int) -> bytes:
    """In the format of the API server."""
    reason = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError"}[status]
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": "made up by the storm",
        "code": status,
    }
    data = json.dumps(body).encode()
    retry = "Retry-After: 1\r\n" if status == 429 else ""
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n{retry}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Calls:
    """The outcomes of kube-scheduler's calls."""

    def __init__(self) -> None:
        self._ended: list[dict[str, Any]] = []
        self._open: list[Conversation] = []

    def begin(self) -> "Conversation":
        conversation = Conversation(self._ended)
        self._open.append(conversation)
        return conversation

    def end(self, conversation: "Conversation") -> None:
        conversation.end()
        self._open.remove(conversation)

    def take(self) -> list[dict[str, Any]]:
        """Those that have ended since the last time, and those that go on."""
        ended = [*self._ended, *(each.call(False) for each in self._open if each.asked)]
        self._ended.clear()
        return ended


class Conversation:
    """One connection's calls: one after the other, as HTTP/1.1 has it."""

    def __init__(self, ended: list[dict[str, Any]]) -> None:
        self._ended = ended
        self.asked, self._answer, self._began_s = b"", b"", 0.0

    def ask(self, data: bytes) -> None:
        if not self.asked:
            self._began_s = time.monotonic()
        self.asked += data

    def answer(self, data: bytes) -> None:
        self._answer += data
        head, _, body = self._answer.partition(b"\r\n\r\n")
        if len(body) >= _length(head) and body:
            self.end()

    def end(self) -> None:
        if self.asked:
            self._ended.append(self.call(True))
        self.asked = self._answer = b""

    def call(self, ended: bool) -> dict[str, Any]:
        head, _, body = self._answer.partition(b"\r\n\r\n")
        asked, _, args = self.asked.partition(b"\r\n\r\n")
        call = {
            "verb": asked.split(b" ", 2)[1].rpartition(b"/")[2].decode(),
            "took_s": time.monotonic() - self._began_s,
            "ended": ended,
            "asked": None,
            "answer": None,
        }
        with contextlib.suppress(ValueError):  # it broke off in the middle, or is a rejection
            call["asked"] = json.loads(args)
            call["answer"] = json.loads(body)
        call["answered"] = head.startswith(b"HTTP/1.1 200 ") and call["answer"] is not None
        return call


class Service:
    """One address for all backends, each with the wire that leads to it."""

    def __init__(
        self, backends: list[tuple[int, Wire]], lots: random.Random, calls: Calls | None
    ) -> None:
        self._turns = itertools.cycle(backends)
        self._count = len(backends)
        self._lots, self._calls = lots, calls

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(self._count):
            port, wire = next(self._turns)
            try:
                if wire.refuses:
                    continue
                backend = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                continue
            wire.open[writer] = False
            talk = self._calls.begin() if self._calls else None
            await asyncio.gather(
                self._pump(reader, backend[1], wire, talk and talk.ask),
                self._pump(backend[0], writer, wire, talk and talk.answer),
            )
            if self._calls and talk:
                self._calls.end(talk)
            wire.open.pop(writer, None)
            break
        writer.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        wire: Wire,
        note: Callable[[bytes], None] | None,
    ) -> None:
        with contextlib.suppress(OSError, _Broken):
            while data := await reader.read(1 << 16):
                if note is not None:
                    note(data)
                await wire.passes(self._lots)
                writer.write(data)
                await writer.drain()
        writer.close()


async def main(config: dict[str, Any]) -> None:
    wires = {each["name"]: Wire(each["name"]) for each in config["wires"]}
    calls = Calls()

    async def control(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told = json.loads(await reader.readline() or "{}")  # a port check sends nothing
        for name, settings in told.get("set", {}).items():
            wires[name].set(settings)
        for name in told.get("cut", ()):
            wires[name].cut(watches_only=False)
        for name in told.get("cut_watches", ()):
            wires[name].cut(watches_only=True)
        counts = {name: dict(wire.done) for name, wire in wires.items()}
        told = {"done": counts, "calls": calls.take() if told.get("calls") else []}
        writer.write(json.dumps(told).encode() + b"\n")
        await writer.drain()
        writer.close()

    async with contextlib.AsyncExitStack() as stack:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(config["cert"], config["key"])
        for each in config["wires"]:
            lots = random.Random(f"{config['seed']} {each['name']}")
            way = Reverse(wires[each["name"]], config["upstream_port"], config["ca"], lots)
            server = await asyncio.start_server(
                way.serve, "127.0.0.1", each["port"], ssl=tls, limit=LONGEST
            )
            await stack.enter_async_context(server)
        for each in config["services"]:
            backends = [(port, wires.get(name, Wire(""))) for port, name in each["backends"]]
            heard = calls if each["port"] == config["port"] else None
            service = Service(backends, random.Random(config["seed"]), heard)
            await stack.enter_async_context(
                await asyncio.start_server(service.serve, "127.0.0.1", each["port"])
            )
        await stack.enter_async_context(
            await asyncio.start_server(control, "127.0.0.1", config["control_port"])
        )
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
