"""`log --follow`: follows the changes until Ctrl-C, and reconnects if the connection is lost.

The new connection may lead to another console. Each console has its own numbers and times of
changes, and publishes the decisions of the extenders again when it starts. So the changes of
another console are compared with the changes that were already shown."""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

from headroom.kubectl.debug_api_client import UNREACHABLE, CommandError, DebugApi

#: Seconds between two attempts to connect.
RETRY_S = 2.0
#: Maximum number of changes that are remembered. A console keeps as many.
MOST_SHOWN = 4096
#: Maximum difference between the times at which two consoles notice a change.
OVERLAP = timedelta(seconds=5)
#: Fields that are the same on all consoles. The message is not, because a later attempt can change
#: the message of a decision.
_CONTENT = "kind", "node", "device", "uid", "cause", "message"
_DECISION = "decision_id", "cause"
#: The kind of events that contain only the number of a new snapshot, and no change.
_SNAPSHOT = "snapshot"


class Changes:
    """Yields changes. ``note`` is called with sentences about the connection."""

    def __init__(
        self,
        connect: Callable[[], DebugApi],
        note: Callable[[str], object],
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._connect, self._note, self._wait = connect, note, wait
        #: The id and the time of the last change. Both are empty before the first change.
        self._last_id = self._last_at = ""
        #: For the content of each change, the console that published it last, and the time.
        self._shown: OrderedDict[tuple[Any, ...], tuple[str, datetime]] = OrderedDict()

    def since(self, since: str | None) -> Iterator[Any]:
        """Yield each change once, and never end. Raises ``CommandError`` if the first connection
        fails, or if the request is wrong."""
        # ``lost`` is the printed reason why the connection is lost, or empty while it works.
        api, answered, lost = self._connect(), False, ""
        while True:
            try:
                lines = api.lines("events", self._last_id, since=self._asked(since))
                for event in _events(lines):
                    answered = True
                    if lost:
                        lost = ""
                        self._note("connected again")
                    if event is not None and self._is_new(event):
                        yield event
                problem = "the console ended the connection"
            except CommandError as err:
                if not answered or err.exit_code != UNREACHABLE:
                    raise
                problem = str(err)
            if problem != lost:
                lost = problem
                self._note(f"connection lost: {problem}; trying again every {RETRY_S:.0f} s")
            api = self._connected_again(api)

    def _connected_again(self, api: DebugApi) -> DebugApi:
        self._wait(RETRY_S)
        try:
            return self._connect()
        except CommandError:
            return api

    def _asked(self, since: str | None) -> str | None:
        """Return the time from which another console should list its changes."""
        if not self._last_at:
            return since
        return (datetime.fromisoformat(self._last_at) - OVERLAP).isoformat()

    def _is_new(self, event: Any) -> bool:
        """Return whether no other console has published the change. Remember the change."""
        console, last = (each.rpartition(".")[0] for each in (event["id"], self._last_id))
        if last and console != last:
            self._note(
                f"another console answers: changes since {self._last_at} can be missing, "
                "except decisions"
            )
        self._last_id, self._last_at = event["id"], event["at"]
        content = tuple(event[field] for field in (_DECISION if event["decision_id"] else _CONTENT))
        at = datetime.fromisoformat(event["at"])
        publisher, published_at = self._shown.get(content, (console, at))
        if publisher != console and (event["decision_id"] or abs(at - published_at) <= OVERLAP):
            return False
        self._shown[content] = console, at
        self._shown.move_to_end(content)
        if len(self._shown) > MOST_SHOWN:
            self._shown.popitem(last=False)
        return True


def _events(lines: Iterator[str]) -> Iterator[Any]:
    """Yield the changes of a stream of server-sent events, and None for all other lines."""
    kind = ""
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            kind = value
        yield json.loads(value) if field == "data" and kind != _SNAPSHOT else None
