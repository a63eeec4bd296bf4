"""Computes an answer once for all readers that ask for it at nearly the same time.

Only views that do not read ``Visible`` pods may share their answers, because other views depend on
the reader. A view asks for the shared answer in its own code, after the guard has checked its
reader.
"""

from collections.abc import Callable
from threading import Lock

from starlette.requests import Request
from starlette.responses import Response

from headroom.bounded import Bounded

#: Age up to which an answer is sent to further readers, in seconds. The page reads a view at least
#: 0.3 s after the event of a change (``BURST_MS`` of app.js). A lower age means that the answer was
#: computed after that event, so sharing delays no change on the page.
SHARED_S = 0.25
#: Maximum number of answers, and the maximum size of one. Larger answers are not shared.
MOST_ANSWERS, MOST_BYTES = 8, 1 << 20


class _Answer:
    """The latest answer to one request. The holder of ``lock`` may compute it."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.response: Response | None = None
        #: Monotonic time after which the answer is not sent any more.
        self.until_s = float("-inf")


class SharedAnswers:
    """The latest answers by request. Several threads may use it."""

    def __init__(self, shared_s: float = SHARED_S) -> None:
        self._shared_s = shared_s
        self._lock = Lock()
        #: Path, query and encoding -> the latest answer.
        self._answers: Bounded[tuple[str, bytes, str], _Answer] = Bounded(MOST_ANSWERS)

    def of(self, request: Request, now_s: float, compute: Callable[[], Response]) -> Response:
        """Return the answer of an earlier call for the same path and query, or otherwise compute
        it.

        A call that comes while another thread computes the answer waits for it. ``now_s`` is the
        monotonic time of this call. ``compute`` returns a response with a whole body, which states
        its own time and generation. Exceptions of ``compute`` are raised, and nothing is stored.
        """
        encoding = "gzip" if "gzip" in request.headers.get("accept-encoding", "") else ""
        key = request.scope["path"], request.scope["query_string"], encoding
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
        # A copy, because middleware may add headers to the response of one reader.
        return Response(shared.body, shared.status_code, dict(shared.headers))
