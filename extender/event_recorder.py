"""Writes each notice as a Kubernetes Event exactly once, even if several replicas have the same
notice.

An Event's name is derived from its object, reason and occurrence. A second replica that tries to
create the same Event gets a conflict and does nothing. An Event whose message changes over time is
written with server-side apply instead, so it remains one object with the message of the last
writer. No decision depends on Events, so a lost or repeated Event does no harm.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
import structlog

from extender.metrics import Telemetry
from headroom.bounded_dict import Bounded
from headroom.contract.keys import DECISION
from headroom.contract.printable import printable
from headroom.core.cluster.notices import Notice
from headroom.runtime.kube.api_errors import ApiError, ApiStatus

if TYPE_CHECKING:  # the Kubernetes client is an optional dependency
    from headroom.runtime.kube.client import KubeApi

log = structlog.get_logger()

COMPONENT = "headroom"
#: Maximum number of Events written in a round. The other notices wait for the next round.
AT_ONCE = 64
#: Number of written notices that are remembered, so that they are not written again.
REMEMBERED = 10_000
#: Number of notices that are checked before the event loop serves other tasks.
CHECKED_AT_ONCE = 64
THREADS = 2
#: The API server's limit for the length of an Event's message.
_MESSAGE_CHARS = 1024
#: The namespace of Events about cluster-scoped objects.
_NODES_NAMESPACE = "default"
#: HTTP status codes after which a retry may succeed.
_LATER = (408, 429)

_encode = msgspec.json.Encoder().encode

#: A function that writes an Event, and returns False if the write must be tried again.
Post = Callable[[Notice], bool]


class KubeEvents:
    """Writes Events. The methods block and may be called from any thread. ``wall_s`` returns Unix
    seconds."""

    def __init__(self, api: "KubeApi", wall_s: Callable[[], float]) -> None:
        self._api = api
        self._wall_s = wall_s

    def post(self, notice: Notice) -> bool:
        """Write the Event. Return False if the write should be tried again, and True if the Event
        is written or can never be written."""
        try:
            self._write(notice)
        except ApiStatus as err:
            if err.status == 409:
                return True  # another replica has created the Event
            if err.status in _LATER or err.status >= 500:
                return False
            # A retry would not help, for example because the namespace is being deleted.
            log.warning("event_rejected", uid=notice.about.uid, message=str(err))
            return True
        except ApiError:
            return False
        return True

    def _write(self, notice: Notice) -> None:
        namespace = notice.about.namespace or _NODES_NAMESPACE
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/events"
        body = _encode(self._event(notice, namespace))
        if notice.follows:
            self._api.call(
                "PATCH",
                f"{path}/{event_name(notice)}",
                query={"fieldManager": COMPONENT, "force": "true"},
                body=body,
                content_type="application/apply-patch+yaml",  # JSON is valid YAML
            )
        else:
            self._api.call("POST", path, body=body)

    def _event(self, notice: Notice, namespace: str) -> dict[str, object]:
        about = notice.about
        now = datetime.fromtimestamp(self._wall_s(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        regarding = {"apiVersion": "v1", "kind": about.kind, "name": about.name, "uid": about.uid}
        if about.namespace:
            regarding["namespace"] = about.namespace
        metadata: dict[str, object] = {"namespace": namespace, "name": event_name(notice)}
        if notice.decision_id:
            metadata["annotations"] = {DECISION: notice.decision_id}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": metadata,
            "involvedObject": regarding,
            "type": "Warning",
            "reason": notice.reason,
            "message": printable(notice.message)[:_MESSAGE_CHARS],
            "source": {"component": COMPONENT},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }


class EventRecorder:
    """Writes Events through ``post`` on its own threads, and counts them. ``post`` is None if there
    is no API server."""

    def __init__(self, post: Post | None, telemetry: Telemetry) -> None:
        self._post = post
        self._telemetry = telemetry
        self._recorded: Bounded[tuple[str, str, str], None] = Bounded(REMEMBERED)
        #: These threads write Events.
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="events")

    @property
    def writes(self) -> bool:
        """Return whether there is an API server to write to."""
        return self._post is not None

    def write_now(self, notice: Notice) -> bool:
        """Write the Event, and return False if it must be tried again.

        The call blocks, so it must run in ``pool``.
        """
        if self._post is None:
            return True
        written = self._post(notice)
        self._telemetry.events.labels(notice.reason, "written" if written else "failed").inc()
        return written

    async def write(self, notice: Notice) -> bool:
        """Write the Event, and return False if it must be tried again."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.pool, self.write_now, notice)

    async def record(self, notices: Iterable[Notice]) -> None:
        """Write the notices that were not recorded before, at most ``AT_ONCE``."""
        pending: dict[tuple[str, str, str], Notice] = {}
        for number, notice in enumerate(notices):
            if (key := (notice.about.uid, notice.reason, notice.key)) not in self._recorded:
                pending[key] = notice
            if len(pending) == AT_ONCE:
                break
            if number % CHECKED_AT_ONCE == 0:
                await asyncio.sleep(0)  # lets the event loop serve kube-scheduler's calls

        async def one(key: tuple[str, str, str], notice: Notice) -> None:
            if await self.write(notice):
                self._recorded[key] = None
                about = notice.about
                log.warning(
                    "event_written",
                    kind=about.kind,
                    name=f"{about.namespace}/{about.name}".lstrip("/"),
                    uid=about.uid,
                    reason=notice.reason,
                    message=notice.message,
                )

        await asyncio.gather(*(one(*each) for each in pending.items()))


def event_name(notice: Notice) -> str:
    """Return a valid name for the Event. It differs between occurrences, but all replicas compute
    the same name for one occurrence."""
    what = "\n".join((notice.about.uid, notice.reason, notice.key))
    digest = hashlib.sha256(what.encode()).hexdigest()[:16]
    return f"{notice.about.name[:200].rstrip('-.')}.{digest}"
