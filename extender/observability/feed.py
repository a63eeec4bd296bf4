"""The feed of recent changes: a bounded history, and a queue for each follower.

A follower that is too slow for its queue is dropped. All methods run on one event loop, except
``past``.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

#: Events that are kept, a quarter of a KiB each, and events that may wait for one follower.
KEPT = 4096
MOST_WAITING = 1024
MOST_FOLLOWERS = 32


class TooManyFollowers(Exception):
    """There are already ``MOST_FOLLOWERS`` followers."""


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """One change. ``kind`` is from a closed set, see docs/debug-api.md; fields that do not apply
    are empty."""

    number: int
    #: Unix time, seconds.
    at_s: float
    generation: int
    kind: str
    node: str = ""
    device: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""
    decision_id: str = ""
    #: The cause: one of a few words per kind.
    cause: str = ""
    #: The cause as a sentence, with numbers.
    message: str = ""


@dataclass(slots=True, eq=False)
class Follower:
    """A queue of events; None marks its end."""

    queue: asyncio.Queue[FeedEvent | None] = field(
        default_factory=lambda: asyncio.Queue(MOST_WAITING)
    )
    dropped: bool = False


class Feed:
    """Keeps and distributes events; ``generation`` returns that of the newest snapshot."""

    def __init__(self, wall_s: Callable[[], float], generation: Callable[[], int]) -> None:
        self._wall_s = wall_s
        self._generation = generation
        self._numbers = itertools.count(1)
        self._past: deque[FeedEvent] = deque(maxlen=KEPT)
        self._followers: list[Follower] = []
        self.closed = False

    @classmethod
    def over(cls) -> "Feed":
        """Return a closed feed without events."""
        feed = cls(lambda: 0.0, lambda: 0)
        feed.close()
        return feed

    def publish(self, kind: str, **fields: str) -> None:
        """Publish an event to all followers."""
        feed_event = FeedEvent(
            next(self._numbers), self._wall_s(), self._generation(), kind, **fields
        )
        self._past.append(feed_event)
        for follower in self._followers:
            _put(follower, feed_event)

    def past(self, after: int = 0, since_s: float = float("-inf")) -> list[FeedEvent]:
        """Return the kept events, the oldest first: with a number above ``after``, and not before
        ``since_s`` (Unix time). May be called from any thread."""
        return [each for each in list(self._past) if each.number > after and each.at_s >= since_s]

    def join(self) -> Follower:
        """Return a new follower, which receives all later events until it leaves; raise
        ``TooManyFollowers``."""
        if len(self._followers) >= MOST_FOLLOWERS:
            raise TooManyFollowers
        follower = Follower()
        self._followers.append(follower)
        if self.closed:
            _put(follower, None)
        return follower

    def leave(self, follower: Follower) -> None:
        self._followers.remove(follower)

    def close(self) -> None:
        """End the feed: each follower receives the end mark."""
        self.closed = True
        for follower in self._followers:
            _put(follower, None)


def _put(follower: Follower, feed_event: FeedEvent | None) -> None:
    try:
        follower.queue.put_nowait(feed_event)
    except asyncio.QueueFull:
        follower.dropped = True
