"""Lists and watches one kind of object, and retries after every error.

A reflector is one thread with one invariant: the events that it has delivered describe the API
server's state at ``_version``. There are two types of failure:

* After silence or 429 (too many requests), the version is still valid, so the watch resumes from
  it.
* After any other failure, such as 410 (the history was compacted), the version may be invalid, so
  the kind is listed again. Known objects that are missing from ``Relisted`` were deleted in the
  meantime.

The pause before the next call grows with each consecutive failure, and has full jitter.

The server ends each watch after ``watch_s``. If it does not, the reflector ends it a little later,
so a half-open connection is detected within ``watch_s + grace_s``.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from headroom.client.kube_protocol import LineTooLong, whole_lines
from headroom.contract.kube import ObjectMeta
from headroom.contract.watched import Relisted, WatchEvent
from headroom.runtime.kube.api_errors import ApiError, ApiStatus, NoAnswer, StatusBody, Unreadable
from headroom.runtime.kube.client import KubeApi, Listing, Stream
from headroom.runtime.kube.resources import Health, Kind, KubeObject, decode_identity

log = structlog.get_logger(__name__)

Deliver = Callable[[Sequence[WatchEvent]], None]


@dataclass(frozen=True, slots=True)
class Pace:
    """Intervals and limits of a reflector, in seconds. The page size is a number of objects."""

    page_size: int = 1000
    #: Duration of a watch that is requested from the server. Bookmarks arrive about once a minute.
    watch_s: int = 60
    #: Maximum delay with which the server may end a watch.
    grace_s: float = 10.0
    backoff_base_s: float = 0.5
    backoff_cap_s: float = 30.0
    #: Interval of checks for a kind that the server does not serve.
    absent_s: float = 60.0


DEFAULT_PACE = Pace()

#: Maximum size of one change in bytes. An API server stores objects of up to 1.5 MiB and sends them
#: as JSON.
MOST_LINE_BYTES = 8 << 20
#: A watch that ends sooner than this without data counts as a failure. Otherwise, without a pause,
#: it would be opened hundreds of times a second.
_SHORT_S = 1.0
#: A watch that lasted longer than this resets the backoff, even if it delivered no change.
#: Otherwise kinds that seldom change would get the longest pauses and become stale.
_LONG_S = 10.0


class Backoff:
    """Exponential backoff with full jitter: the pause is random between 0 and a limit that doubles
    from ``base_s`` to ``cap_s``. ``random`` returns a number from 0 to 1.

    Full jitter spreads out replicas and kinds that lost the same API server at the same time.
    """

    def __init__(self, base_s: float, cap_s: float, random: Callable[[], float]) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._random = random
        self._failures = 0

    def next_s(self, at_least_s: float = 0.0) -> float:
        """Return the seconds to wait after another failure.

        ``at_least_s`` is the pause that the server requested. It is added, up to ``cap_s``.
        """
        bound_s = min(self._cap_s, self._base_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return min(at_least_s, self._cap_s) + bound_s * self._random()

    def reset(self) -> None:
        self._failures = 0


class Reflector:
    """Delivers the changes of one kind. ``run`` blocks until ``stop`` is called. Other methods
    never block."""

    def __init__(
        self,
        kind: Kind,
        api: KubeApi,
        deliver: Deliver,
        *,
        pace: Pace = DEFAULT_PACE,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self._kind = kind
        self._api = api
        self._deliver = deliver
        self._pace = pace
        self._clock = clock
        self._backoff = Backoff(pace.backoff_base_s, pace.backoff_cap_s, jitter)
        self._stopping = threading.Event()
        self._wait = wait or self._stopping.wait
        #: The resourceVersion up to which all events were delivered, or None if the kind must be
        #: listed before the next watch.
        self._version: str | None = None
        #: The path at which the server serves the kind.
        self._path = kind.path
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._synced = False
        self._contact_s: float | None = None
        self._reconnects = 0
        self._lists = 0
        self._error = ""
        #: Names of unreadable objects. Each name is logged once per list.
        self._unreadable: set[str] = set()

    @property
    def health(self) -> Health:
        contact_s = self._contact_s
        return Health(
            kind=self._kind.name,
            synced=self._synced,
            contact_age_s=None if contact_s is None else self._clock() - contact_s,
            reconnects=self._reconnects,
            lists=self._lists,
            unreadable=len(self._unreadable),
            error=self._error,
        )

    def stop(self) -> None:
        """Make ``run`` return. During a watch it returns immediately, otherwise when the current
        call ends."""
        self._stopping.set()
        with self._lock:
            if self._stream is not None:
                self._stream.interrupt()

    def run(self) -> None:
        """List and watch until ``stop``."""
        while not self._stopping.is_set():
            try:
                if self._version is None and not self._list():
                    self._wait(self._pace.absent_s)
                    continue
                self._watch()
            except NoAnswer as err:
                self._pause("source_unanswered", err, list_again=False)
            except ApiStatus as err:
                event = "source_expired" if err.status == 410 else "source_refused"
                self._pause(event, err, list_again=err.status != 429, at_least_s=err.retry_after_s)
            except ApiError as err:
                self._pause("source_unreadable", err, list_again=True)
            except Exception as err:  # if the thread ended, the cache would silently become stale
                log.exception("source_broken", kind=self._kind.name)
                self._pause("source_restarted", err, list_again=True)

    def _pause(
        self, event: str, err: Exception, *, list_again: bool, at_least_s: float = 0.0
    ) -> None:
        if self._stopping.is_set():
            return
        self._reconnects += 1
        self._error = str(err)
        if list_again:
            self._version = None
        wait_s = self._backoff.next_s(at_least_s)
        log.warning(
            event, kind=self._kind.name, error=str(err), list_again=list_again, wait_s=wait_s
        )
        self._wait(wait_s)

    def _list(self) -> bool:
        """Deliver all objects. Return False if the server does not serve the kind."""
        # Take the time before the request, because a slow list must not make heartbeats look newer.
        at_s = self._clock()
        self._unreadable.clear()
        listing = self._find()
        objects = tuple(listing.items) if listing else ()
        self._contact_s = self._clock()
        self._deliver([Relisted(self._kind.type, objects, at_s)])
        self._version = listing.resource_version if listing else None
        self._lists += 1
        self._synced, self._error = True, ""
        log.info(
            "source_listed", kind=self._kind.name, objects=len(objects), served=listing is not None
        )
        return listing is not None

    def _find(self) -> Listing[KubeObject] | None:
        """Return the list from the first path that the server serves, or None if it serves none and
        the kind is optional."""
        for path in (self._kind.path, *self._kind.other_paths):
            self._path = path
            try:
                return self._api.list(path, self._listed, page_size=self._pace.page_size)
            except ApiStatus as err:
                if err.status != 404 or not self._kind.other_paths:
                    raise
        return None

    def _watch(self) -> None:
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version or "",
            "timeoutSeconds": str(self._pace.watch_s),
        }
        silence_s = self._pace.watch_s + self._pace.grace_s
        stream = self._api.stream(self._path, query=query, read_timeout_s=silence_s)
        begun_s = self._contact_s = self._clock()
        self._error = ""
        with self._lock:
            self._stream = stream
        try:
            received = False
            for lines in whole_lines(self._chunks(stream), MOST_LINE_BYTES):
                self._contact_s = self._clock()
                if lines:
                    self._take(lines, self._contact_s)
                    self._backoff.reset()
                    received = True
            if not received and self._clock() - begun_s < _SHORT_S:
                raise NoAnswer(f"WATCH {self._path}: ended at once, without data")
            self._backoff.reset()
        except LineTooLong as err:
            raise Unreadable(f"WATCH {self._path}: {err}") from err
        except EOFError as err:
            raise NoAnswer(f"WATCH {self._path}: {err}") from err
        finally:
            if self._clock() - begun_s > _LONG_S:
                self._backoff.reset()
            with self._lock:
                self._stream = None
            stream.close()

    def _chunks(self, stream: Stream) -> Iterator[bytes]:
        while not self._stopping.is_set() and (chunk := stream.read()):
            yield chunk

    def _take(self, lines: Iterable[bytes], at_s: float) -> None:
        """Deliver the changes in these lines of a watch with one call. If a line contains an error,
        deliver the changes before it and then raise the error."""
        events: list[WatchEvent] = []
        failure: ApiError | None = None
        version = self._version
        for line in filter(None, lines):
            try:
                change = _change_decoder.decode(line)
                if change.type == "ERROR":
                    status = _status_decoder.decode(change.object)
                    failure = ApiStatus(f"WATCH {self._path}", status.code, status.message)
                    break
                is_seen = change.type in ("ADDED", "MODIFIED")
                obj = self._decode(change.object) if is_seen else None
                metadata = obj.metadata if obj is not None else decode_identity(change.object)
            except (ValueError, RecursionError) as err:
                failure = Unreadable(f"WATCH {self._path}: {err}")
                break
            version = metadata.resource_version or version
            if change.type == "DELETED":
                self._unreadable.discard(_name(metadata))
                events.append(self._kind.gone(metadata))
            elif obj is not None:
                events.append(self._kind.seen(obj, at_s))
        if events:
            self._deliver(events)
        self._version = version
        if failure is not None:
            raise failure

    def _listed(self, raw: msgspec.Raw) -> KubeObject | None:
        """Return one object of a list, or None if it is unreadable or not ``concerns``."""
        obj = self._decode(raw)
        return obj if obj is not None and self._kind.concerns(obj) else None

    def _decode(self, raw: msgspec.Raw) -> KubeObject | None:
        """Return the object or its readable part, or None if no part is readable."""
        try:
            obj = self._kind.decode(raw)
        except (ValueError, RecursionError) as err:
            return self._salvage(raw, err)
        if self._unreadable:
            self._unreadable.discard(_name(obj.metadata))
        return obj

    def _salvage(self, raw: msgspec.Raw, err: Exception) -> KubeObject | None:
        try:
            identity = decode_identity(raw)
        except (ValueError, RecursionError):
            log.error("object_unreadable", kind=self._kind.name, name="", error=str(err))
            return None
        name = _name(identity)
        if name not in self._unreadable:
            self._unreadable.add(name)
            log.error("object_unreadable", kind=self._kind.name, name=name, error=str(err))
        return self._kind.salvage(raw, identity)


class _Change(msgspec.Struct, frozen=True):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


_change_decoder = msgspec.json.Decoder(_Change)
_status_decoder = msgspec.json.Decoder(StatusBody)


def _name(metadata: ObjectMeta) -> str:
    return f"{metadata.namespace}/{metadata.name}".lstrip("/")
