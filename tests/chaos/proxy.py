"""The proxies of a storm: every connection of Headroom goes through one of them.

The wire of a process can be slow or cut. On the way to the API server it can also drop requests,
answer them itself, before or after the API server processed them, or pass them on after the client
has given up.
"""

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import Mapping

from aiohttp import web

from tests.chaos.calls import Call
from tests.reverse_proxy import Broken, Service, Wire, watches

_REASONS = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError"}


class ToApiServer(Service):
    """Changes requests and answers."""

    async def before(self, request: web.Request, wire: Wire) -> web.Response | None:
        if _hits(wire, "requests dropped", share=0.5):
            raise Broken
        if error := _error(wire, "answered", request):
            return error
        if not watches(request) and _hits(wire, "passed on late", share=0.5):
            await asyncio.sleep(3.0 + 40.0 * wire.faults.get("passed on late", 0.0))
        return None

    def after(self, request: web.Request, wire: Wire) -> web.Response | None:
        """The API server sends the head of an answer when it has processed the request."""
        if watches(request):
            return None
        if _hits(wire, "done and not answered"):
            raise Broken
        return _error(wire, "done and answered", request)

    async def part_passes(self, request: web.Request, wire: Wire, part: bytes) -> None:
        return


class Recorded(Service):
    """Records all calls, with what was asked and answered."""

    def __init__(self, wires: Mapping[str, Wire]) -> None:
        super().__init__(wires)
        #: Calls, and when each began.
        self._calls: list[tuple[float, Call]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body, began_s = await request.read(), time.monotonic()
        call = Call(request.path.rpartition("/")[2], asked=json.loads(body or b"null"))
        self._calls.append((began_s, call))
        request["content"] = bytearray()
        try:
            reply = await super().answer(request)
            if reply.status == 200:
                call.answer = json.loads(request["content"] or b"null")
        finally:
            call.took_s, call.ended = time.monotonic() - began_s, True
        return reply

    async def part_passes(self, request: web.Request, wire: Wire, part: bytes) -> None:
        await super().part_passes(request, wire, part)
        request["content"] += part

    def taken_calls(self) -> list[Call]:
        """Return all calls, and forget those that ended."""
        now_s, found = time.monotonic(), []
        for began_s, call in [*self._calls]:
            if call.ended:
                self._calls.remove((began_s, call))
                found.append(call)
            else:
                found.append(dataclasses.replace(call, took_s=now_s - began_s))
        return found


def _hits(wire: Wire, fault: str, share: float = 1.0) -> bool:
    """Draw whether this request has the fault: 10 to 60 % of all have, times ``share``."""
    force = wire.faults.get(fault)
    hit = force is not None and random.random() < share * (0.1 + 0.5 * force)
    wire.done[fault] += hit
    return hit


def _error(wire: Wire, fault: str, request: web.Request) -> web.Response | None:
    """Return an error that the proxy makes up, as the API server writes it."""
    for status, reason in _REASONS.items():
        # Only writes conflict.
        if (status != 409 or request.method != "GET") and _hits(wire, f"{fault} {status}"):
            body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
            body |= {"reason": reason, "message": "made up by the storm"}
            headers = {"Retry-After": "1"} if status == 429 else {}
            return web.json_response(body, status=status, headers=headers)
    return None
