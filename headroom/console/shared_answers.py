"""Computes an answer once for all readers that ask for it at nearly the same time.

A view that reads ``Visible`` pods must not share its answers, because they depend on the reader. A
view requests the shared answer in its own code, which runs only after the guard has authorized the
reader. So a shared answer never bypasses authorization.
"""

from collections.abc import Callable
from threading import Lock

from starlette.requests import Request
from starlette.responses import Response

from headroom.bounded_dict import Bounded

#: Maximum age of a shared answer, in seconds. The page reads a view at least 0.3 s after the event
#: of a change (``BURST_MS`` of app.js). So an answer that is younger than 0.3 s was computed after
#: that event, and sharing it delays no change on the page.
SHARED_S = 0.25
#: Maximum number of answers, and maximum size of an answer. Larger answers are not shared.
MOST_ANSWERS, MOST_BYTES = 8, 1 << 20


class _Answer:
    """The latest answer to one request. The holder of ``lock`` may compute it."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.response: Response | None = None
        #: Monotonic time until which the answer is sent to other readers.
        self.until_s = float("-inf")


class SharedAnswers:
    """The latest answers by request. Several threads may use it."""

    def __init__(self, shared_s: float = SHARED_S) -> None:
        self._shared_s = shared_s
        self._lock = Lock()
        #: The latest answer for each path and query.
        self._answers: Bounded[tuple[str, bytes], _Answer] = Bounded(MOST_ANSWERS)

    def of(self, request: Request, now_s: float, compute: Callable[[], Response]) -> Response:
        """Return the answer of an earlier call for the same path and query, or compute it.

        If another thread is computing the answer, the call waits for it. ``now_s`` is the monotonic
        time of this call. ``compute`` returns a response with a whole body, which includes its own
        time and generation. If ``compute`` raises, the exception passes through and nothing is
        stored.
        """
        key = request.scope["path"], request.scope["query_string"]
        with self._lock:
            answer = self._answers[key] = self._answers.get(key) or _Answer()
        with answer.lock:
            if answer.response is None or now_s >= answer.until_s:
                computed = compute()
                if len(computed.body) > MOST_BYTES:
                    answer.response = None
                    return computed
                answer.response, answer.until_s = computed, now_s + self._shared_s
            shared = answer.response
        # Return a copy, because middleware may add headers to the response of one reader.
        return Response(shared.body, shared.status_code, dict(shared.headers))
