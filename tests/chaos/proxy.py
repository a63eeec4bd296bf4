"""Proxies for a storm. Every connection of Headroom goes through a proxy.

A proxy can slow down or cut the connection of a process. In front of the API server, a proxy can
also drop requests, answer them itself before or after the API server has processed them, or forward
them after the client has given up.
"""

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import Mapping

from aiohttp import web

from tests.chaos.calls import VERBS, Call
from tests.reverse_proxy import Broken, Service, Wire, passed_on, watches

_CALL = web.RequestKey("call", Call)
_REASONS = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError"}


class ToApiServer(Service):
    """Changes requests to the API server and their responses."""

    async def before(self, request: web.Request, wire: Wire) -> web.Response | None:
        if _hits(wire, "requests dropped", share=0.5):
            raise Broken
        if error := _error(wire, "answered", request):
            return error
        if not watches(request) and _hits(wire, "passed on late", share=0.5):
            await asyncio.sleep(3.0 + 40.0 * wire.faults.get("passed on late", 0.0))
        return None

    def after(self, request: web.Request, wire: Wire) -> web.Response | None:
        """Drop or replace the response after the API server has processed the request."""
        if watches(request):
            return None
        if _hits(wire, "done and not answered"):
            raise Broken
        return _error(wire, "done and answered", request)

    async def part_passes(self, request: web.Request, wire: Wire, part: bytes) -> None:
        return


class Recorded(Service):
    """Records all calls with their requests and responses.

    A response counts even if the client has given up, because a timeout depends only on the speed
    of the machine.
    """

    def __init__(self, wires: Mapping[str, Wire]) -> None:
        super().__init__(wires)
        self._calls: list[Call] = []
        #: For each verb, the time when the latest successful call began, on the monotonic clock.
        self._succeeded_s: dict[str, float] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body, began_s = await request.read(), time.monotonic()
        call = Call(request.path.rpartition("/")[2], asked=json.loads(body or b"null"))
        self._calls.append(call)
        request[_CALL] = call
        try:
            return await super().answer(request)
        finally:
            call.ended = True
            if call.succeeded:
                latest_s = max(began_s, self._succeeded_s.get(call.verb, began_s))
                self._succeeded_s[call.verb] = latest_s

    async def pass_on(self, request: web.Request, url: str, wire: Wire) -> web.StreamResponse:
        await wire.passes()
        async with self.sent(request, url) as answer:
            body = await answer.read()
        if answer.status == 200:
            request[_CALL].answer = json.loads(body)
        await wire.passes()
        return web.Response(status=answer.status, headers=passed_on(answer.headers), body=body)

    def succeeds_since(self, monotonic_s: float) -> bool:
        """Return whether a call of each verb that began after this time has succeeded."""
        return all(self._succeeded_s.get(verb, 0.0) > monotonic_s for verb in VERBS)

    def taken_calls(self) -> list[Call]:
        """Return all calls in their current state, and remove the ended calls from the record."""
        found = []
        for call in [*self._calls]:
            found.append(dataclasses.replace(call))
            if found[-1].ended:
                self._calls.remove(call)
        return found


def _hits(wire: Wire, fault: str, share: float = 1.0) -> bool:
    """Return at random whether the fault affects this request. It affects 10 to 60 % of all
    requests, depending on the severity, times ``share``.
    """
    force = wire.faults.get(fault)
    hit = force is not None and random.random() < share * (0.1 + 0.5 * force)
    wire.done[fault] += hit
    return hit


def _error(wire: Wire, fault: str, request: web.Request) -> web.Response | None:
    """Return a simulated error in the format of the API server."""
    for status, reason in _REASONS.items():
        # Only writes can conflict.
        if (status != 409 or request.method != "GET") and _hits(wire, f"{fault} {status}"):
            body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
            body |= {"reason": reason, "message": "made up by the storm"}
            headers = {"Retry-After": "1"} if status == 429 else {}
            return web.json_response(body, status=status, headers=headers)
    return None
