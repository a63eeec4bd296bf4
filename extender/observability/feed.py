"""What happened lately, for those who follow: a bounded past, and a queue for each follower.

Whoever is too slow for its queue is dropped, not waited for. All of it is called on one event loop.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

#: Happenings that are kept, a quarter of a KiB each, and that may wait for one follower.
KEPT = 4096
MOST_WAITING = 1024
MOST_FOLLOWERS = 32


class TooManyFollowers(Exception):
    """There are ``MOST_FOLLOWERS`` already."""


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """``kind`` is one of a closed set, which docs/debug-api.md explains; what does not apply is
    empty."""

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
    #: What brought it about: one of a few words for each kind.
    cause: str = ""
    #: The same for people, with numbers.
    message: str = ""


@dataclass(slots=True, eq=False)
class Follower:
    """What waits for it; None where nothing more will come."""

    queue: asyncio.Queue[FeedEvent | None] = field(
        default_factory=lambda: asyncio.Queue(MOST_WAITING)
    )
    dropped: bool = False


class Feed:
    """``generation`` is that of the newest snapshot."""

    def __init__(self, wall_s: Callable[[], float], generation: Callable[[], int]) -> None:
        self._wall_s = wall_s
        self._generation = generation
        self._numbers = itertools.count(1)
        self._past: deque[FeedEvent] = deque(maxlen=KEPT)
        self._followers: list[Follower] = []
        self.closed = False

    @classmethod
    def over(cls) -> "Feed":
        """One in which nothing has happened and nothing will."""
        feed = cls(lambda: 0.0, lambda: 0)
        feed.close()
        return feed

    def tell(self, kind: str, **said: str) -> None:
        feed_event = FeedEvent(
            next(self._numbers), self._wall_s(), self._generation(), kind, **said
        )
        self._past.append(feed_event)
        for follower in self._followers:
            _put(follower, feed_event)

    def past(self, after: int = 0, since_s: float = float("-inf")) -> list[FeedEvent]:
        """Those that are kept, the oldest first: with a number above ``after``, not before that
        Unix time. May be called from any thread."""
        return [each for each in list(self._past) if each.number > after and each.at_s >= since_s]

    def join(self) -> Follower:
        """What happens from here on goes to this follower too, until it leaves; raises
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
        """Nothing more will come: whoever follows is told to go."""
        self.closed = True
        for follower in self._followers:
            _put(follower, None)


def _put(follower: Follower, feed_event: FeedEvent | None) -> None:
    try:
        follower.queue.put_nowait(feed_event)
    except asyncio.QueueFull:
        follower.dropped = True
