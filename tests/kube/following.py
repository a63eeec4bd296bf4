"""Runs a reflector on a scripted API server."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from headroom.contract.watched import Relisted
from headroom.core.cluster.changes import Event
from headroom.runtime.kube.client import KubeApi
from headroom.runtime.kube.reflector import Pace, Reflector
from headroom.runtime.kube.resources import watched_kinds
from tests.scripted import Answer, Exchange, ScriptedServer, scripted_server
from tests.waiting import PATIENCE_S, until

KINDS = {kind.name: kind for kind in watched_kinds("headroom-system")}
#: Maximum time without data in a response or a watch. It is long enough for a busy machine.
SILENT_S = 5.0
QUICK = Pace(page_size=2, watch_s=0, grace_s=SILENT_S, backoff_base_s=1.0, backoff_cap_s=8.0)
#: A pace for tests in which a call ends because no data arrives.
IMPATIENT = replace(QUICK, grace_s=0.5)


def obj(name: str, version: int, **rest: Any) -> dict[str, Any]:
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": metadata, **rest}


def change(kind: str, name: str = "", version: int = 0, **rest: Any) -> dict[str, Any]:
    return {"type": kind, "object": obj(name, version, **rest)}


def error(code: int) -> dict[str, Any]:
    return {"type": "ERROR", "object": {"kind": "Status", "code": code, "message": "words"}}


def page(version: int, *items: dict[str, Any], token: str = "") -> Answer:
    metadata = {"resourceVersion": str(version), "continue": token}
    return lambda exchange: exchange.reply(200, {"metadata": metadata, "items": list(items)})


def status(code: int, **headers: str) -> Answer:
    return lambda exchange: exchange.reply(code, {"message": "words", "code": code}, **headers)


def watch(*chunks: Any, then: Callable[[Exchange], None] = Exchange.end_stream) -> Answer:
    def answer(exchange: Exchange) -> None:
        exchange.begin_stream()
        for chunk in chunks:
            exchange.chunk(chunk)
        then(exchange)

    return answer


def breaks_off(exchange: Exchange) -> None:
    """Close the connection in the middle of a chunk."""
    exchange.raw(b"ff\r\n{")


class Recorder:
    """Receives events instead of the state's writer."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, events: Sequence[Event]) -> None:
        self.events += events

    def until(
        self, enough: Callable[[list[Event]], object], timeout_s: float = PATIENCE_S
    ) -> list[Event]:
        """Wait until the received events are ``enough``, and return them."""
        until(
            lambda: enough(self.events), "enough events", timeout_s, logs=lambda: f"{self.events}"
        )
        return list(self.events)


@dataclass
class Followed:
    reflector: Reflector
    server: ScriptedServer
    seen: Recorder
    #: Durations of all pauses in seconds. The test's reflector records them instead of sleeping.
    waits: list[float] = field(default_factory=list)

    @property
    def queries(self) -> list[str]:
        """Return the requests in order, as ``list`` or as ``watch`` with its version."""
        return [
            f"watch {request.query['resourceVersion']}" if "watch" in request.query else "list"
            for request in self.server.requests
        ]

    def told(self, count: int) -> list[Event]:
        return self.seen.until(lambda events: len(events) >= count)


@contextmanager
def following(
    *script: Answer,
    kind: str = "nodes",
    pace: Pace = QUICK,
    deliver: Callable[[Sequence[Event]], None] | None = None,
    clock: Callable[[], float] = lambda: 100.0,
) -> Iterator[Followed]:
    seen = Recorder()
    waits: list[float] = []
    with scripted_server(*script) as server:
        api = KubeApi(server.configuration(), read_timeout_s=pace.grace_s)
        reflector = Reflector(
            KINDS[kind],
            api,
            deliver or seen,
            pace=pace,
            jitter=lambda: 1.0,
            wait=waits.append,
            clock=clock,
        )
        thread = threading.Thread(target=reflector.run)
        thread.start()
        try:
            yield Followed(reflector, server, seen, waits)
        finally:
            reflector.stop()
            thread.join(2 * SILENT_S)
            api.close()
        assert not thread.is_alive()


def relisted(*names: str) -> Callable[[Event], bool]:
    return lambda event: (
        isinstance(event, Relisted) and [each.metadata.name for each in event.objects] == [*names]
    )


def last_relisted(*names: str) -> Callable[[list[Event]], bool]:
    return lambda events: any(map(relisted(*names), events))


HANG = watch(then=Exchange.hang)
