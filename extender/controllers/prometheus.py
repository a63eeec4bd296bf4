"""SM activity from DCGM's history in Prometheus, queried in the background.

One thread queries at intervals and passes the results on; nothing waits for it. Each query runs on
its own thread. A query without a complete answer in time is abandoned, so that old figures expire
even if Prometheus hangs. Without fresh history, the agents' own samples are used.
"""

import io
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import requests
import structlog
from prometheus_api_client import PrometheusConnect
from requests.adapters import HTTPAdapter

from extender.controllers.promql import (
    Answer,
    Span,
    Unreadable,
    examine,
    history,
    moved,
    questions,
    read,
    still_fresh,
)
from extender.placement.device_reading import Activity
from extender.state.sm_activity import Key

log = structlog.get_logger()

#: Limit of one answer. For 5,000 nodes with 8 devices each, answers have 0.6 MB.
MAX_BYTES = 16 << 20
_CHUNK_BYTES = 64 << 10
#: Abandoned queries; while this many still hang, no new query starts.
_MOST_LEFT = 3
#: Extra time after which an abandoned query gives up by itself.
_LEAVE_S = 1.0
#: Length limit of the quoted error of the operating system or a library.
_MAX_QUOTED = 200


@dataclass(frozen=True, slots=True)
class Asked:
    """Address, query and interval. ``url`` may contain a user and a password, which must not be
    logged."""

    url: str
    span: Span
    every_s: float
    timeout_s: float
    #: Figures whose newest sample is older are not used.
    stale_after_s: float
    #: Read before each query, because tokens are renewed.
    token_file: Path | None = None
    ca: Path | None = None


#: One answer per query, and warnings that they may be incomplete.
Answers = tuple[list[Answer], list[str]]
#: Receives all fresh history, and the devices whose figure changed.
HandOn = Callable[[Mapping[Key, Activity], Collection[Key]], None]
#: Receives whether there was an answer, and the number of devices with fresh history.
Queried = Callable[[bool, int], None]


class PrometheusHistory:
    """Queries Prometheus; ``queried`` is called after each query, before its results are passed
    on."""

    def __init__(
        self,
        asked: Asked,
        hand_on: HandOn,
        queried: Queried = lambda answered, devices: None,
        monotonic_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._asked = asked
        self._hand_on = hand_on
        self._queried = queried
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s
        self._held: dict[Key, Activity] = {}
        #: Queries without an answer in time, which may still hang.
        self._left: list[threading.Thread] = []
        #: Why there is no newer answer; empty if there is one. None: before the first query.
        self._trouble: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prometheus", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop, and return when nothing is passed on any more."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.refresh()
            except Exception:  # if the thread ended, old figures would stay in use
                log.exception("history_broken")
            self._stopping.wait(self._asked.every_s)

    def refresh(self) -> None:
        """Query once and pass on the result; without an answer, pass on what is still fresh."""
        try:
            after, trouble = self._newer(), ""
        except Unreadable as err:
            after, trouble = self._left_over(), str(err)
        except Exception:  # our own bug must not keep old figures in use
            log.exception("history_broken")
            after, trouble = self._left_over(), "the answer could not be used"
        if self._stopping.is_set():
            return
        before, self._held = self._held, after
        self._tell(trouble)
        self._hand_on(after, moved(before, after))

    def _left_over(self) -> dict[Key, Activity]:
        return still_fresh(self._held, self._monotonic_s(), self._asked.stale_after_s)

    def _newer(self) -> dict[Key, Activity]:
        """Return the history of a new query; raise ``Unreadable``."""
        asked = self._asked
        asked_at_s, wall_s = self._monotonic_s(), self._wall_s()
        answers, warnings = self._answers()
        if warnings:
            log.warning("history_in_part", warnings="; ".join(warnings)[:_MAX_QUOTED])
        return history(answers, self._held, asked.span, asked_at_s, wall_s, asked.stale_after_s)

    def _tell(self, trouble: str) -> None:
        self._queried(not trouble, len(self._held))
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if trouble:
            log.warning(
                "history_unavailable", message=trouble, hint="the agents' own samples are used"
            )
        else:
            log.info("history_available", devices=len(self._held))

    def _answers(self) -> Answers:
        self._left = [thread for thread in self._left if thread.is_alive()]
        if len(self._left) >= _MOST_LEFT:
            raise Unreadable("earlier queries still hang")
        box: queue.SimpleQueue[Answers | Unreadable] = queue.SimpleQueue()
        thread = threading.Thread(target=_ask, args=(self._asked, box), daemon=True)
        until_s = time.monotonic() + self._asked.timeout_s
        thread.start()
        while not self._stopping.is_set() and time.monotonic() < until_s:
            try:
                got = box.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(got, Unreadable):
                raise got
            return got
        self._left.append(thread)
        raise Unreadable(f"no whole answer within {self._asked.timeout_s:g} s")


def _ask(asked: Asked, box: "queue.SimpleQueue[Answers | Unreadable]") -> None:
    try:
        box.put(query(asked))
    except Unreadable as err:
        box.put(err)
    except Exception as err:  # noqa: BLE001 - from four libraries, which get no secrets
        box.put(Unreadable(f"cannot be asked: {_cause(err)}"))


def query(asked: Asked) -> Answers:
    """Query once; raise ``Unreadable``, and the errors of requests and urllib3."""
    url = urlsplit(asked.url)
    # Errors quote the address, so it must not contain the password.
    public = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl().rstrip("/")
    headers = {"Accept-Encoding": "gzip"}
    auth = None
    if url.username:
        auth = unquote(url.username), unquote(url.password or "")
    if asked.token_file is not None:
        headers["Authorization"] = f"Bearer {_token(asked.token_file)}"
    within_s = asked.timeout_s + _LEAVE_S
    warnings: dict[str, None] = {}

    def look(response: requests.Response, *args: Any, **kwargs: Any) -> None:
        if not response.is_redirect:
            warnings.update(dict.fromkeys(examine(response.status_code, response.content)))

    with requests.Session() as session:
        session.trust_env = False  # else a .netrc would override these settings
        session.verify = True if asked.ca is None else str(asked.ca)
        session.hooks["response"].append(look)
        connection = PrometheusConnect(
            public, headers=headers, auth=auth, session=session, timeout=within_s
        )
        bounded = _Bounded(time.monotonic() + within_s)
        for prefix in ("http://", "https://", public):  # the last replaces one that retries
            session.mount(prefix, bounded)
        limits = {"timeout": f"{asked.timeout_s:g}s"}
        answers = [
            read(connection.custom_query(question, params=limits))
            for question in questions(asked.span)
        ]
    return answers, list(warnings)


def _token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as err:
        raise Unreadable(f"prometheus_token_file: {path}: cannot be read") from err
    if not token.isprintable() or not token or " " in token:
        raise Unreadable(f"prometheus_token_file: {path}: holds no token")
    return token


class _Bounded(HTTPAdapter):
    """Sends a request once and reads the whole answer: at most ``MAX_BYTES``, until ``until_s``."""

    def __init__(self, until_s: float) -> None:
        super().__init__(max_retries=0)
        self._until_s = until_s

    def build_response(self, req: requests.PreparedRequest, resp: Any) -> requests.Response:
        response = super().build_response(req, resp)
        try:
            response.raw = io.BytesIO(self._body(resp))
        except BaseException:
            resp.close()
            raise
        resp.release_conn()
        response.encoding = "utf-8"  # of JSON; else requests guesses it from the whole body
        return response

    def _body(self, resp: Any) -> bytearray:
        body = bytearray()
        while chunk := resp.read1(_CHUNK_BYTES, decode_content=True):
            body += chunk
            if len(body) > MAX_BYTES:
                raise Unreadable(f"its answer is larger than {MAX_BYTES >> 20} MiB")
            if time.monotonic() > self._until_s:
                raise Unreadable("the answer came too late")
        return body


def _cause(err: BaseException) -> str:
    """Return the innermost cause of an error: each library wraps the errors of the one below."""
    while (below := err.__cause__ or err.__context__) is not None:
        err = below
    text = getattr(err, "strerror", None) or str(err)
    return f"{type(err).__name__}: {text}"[:_MAX_QUOTED]
