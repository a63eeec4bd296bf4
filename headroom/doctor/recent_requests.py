"""Reads from the console what the pods of the last hours requested, including ended pods.

The console has the decisions of all extenders, up to the limits of the journal (settings
``journal_*``). The API server has only pods that still exist.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from headroom.contract.errors import BadQuantity
from headroom.contract.quantity import parse_bytes
from headroom.doctor.sharing_rules import ContainerRequest

HOURS = 6
#: Maximum number of decisions that are read, newest first, and number of decisions in a page.
MAX_DECISIONS, PAGE = 5000, 1000


class Console(Protocol):
    """A client of the debug API."""

    def get(self, *path: str, **query: str | int | bool | None) -> Any:
        """Return the body of a GET request to the path under /v1/."""


@dataclass(frozen=True, slots=True)
class RecentRequests:
    """The GPU containers of the pods about which extenders decided."""

    requests: tuple[ContainerRequest, ...] = ()
    #: Age of the oldest decision that was read, in seconds.
    span_s: float = 0.0

    def beside(self, present: Sequence[ContainerRequest]) -> list[ContainerRequest]:
        """Return the requests of the ``present`` pods, followed by the requests of all other
        pods."""
        uids = {each.uid for each in present}
        return [*present, *(each for each in self.requests if each.uid not in uids)]


NO_RECENT = RecentRequests()


def recent_requests(
    console: Console, most: int = MAX_DECISIONS, page: int = PAGE
) -> RecentRequests:
    """Read the requests of the last ``HOURS`` hours. Each pod counts once, with its newest request.

    At most the newest ``most`` decisions are read, in pages. Raises the errors of the client.
    """
    of_pod: dict[str, list[ContainerRequest]] = {}
    span_s, more = 0.0, None
    for _ in range(most // page):
        query: dict[str, Any] = {"since": f"{HOURS}h", "limit": page, "continue": more}
        body = console.get("decisions", **query)
        now = datetime.fromisoformat(body["generated_at"])
        for decision in body["decisions"]:  # newest first
            if decision["uid"] not in of_pod:
                of_pod[decision["uid"]] = [
                    _request(decision["uid"], each) for each in decision["request"]
                ]
            at = datetime.fromisoformat(decision["at"])
            span_s = max(span_s, (now - at).total_seconds())
        more = body["continue"]
        if more is None:
            break
    requests = (request for requests in of_pod.values() for request in requests)
    return RecentRequests(tuple(requests), span_s)


def _request(uid: str, ask: Mapping[str, Any]) -> ContainerRequest:
    try:
        count_bytes = parse_bytes(ask["amount"])
    except BadQuantity:  # the amount is a share of the device
        count_bytes = None
    return ContainerRequest(uid, ask["resource"], count_bytes, ask["source"] != "replica")
