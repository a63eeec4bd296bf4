"""SM activity from DCGM's history in Prometheus, asked for in the background.

One thread asks now and then, and hands on what it learned; nothing waits for it. A query runs on a
thread of its own: one that gives no whole answer in time is left behind, so that figures grow old
whatever Prometheus does. While there is no fresh history the agents' own samples count.
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
from extender.placement.sm_reading import Activity
from extender.state.sm_activity import Key

log = structlog.get_logger()

#: Of one answer. Those for 5,000 nodes of 8 devices have 0.6 MB each.
MOST_BYTES = 16 << 20
_CHUNK_BYTES = 64 << 10
#: Queries left behind; while so many hang there is no new one.
_MOST_LEFT = 3
#: So much later a query that was left behind gives up by itself, where it can.
_LEAVE_S = 1.0
#: Of what the system says when it cannot be asked.
_MOST_SAID = 200


@dataclass(frozen=True, slots=True)
class Asked:
    """Whom, what and how often; ``url`` may name a user and a password, which nobody is told."""

    url: str
    span: Span
    every_s: float
    timeout_s: float
    #: A figure whose newest sample is older is not used.
    stale_after_s: float
    #: Read before each query, since tokens are renewed.
    token_file: Path | None = None
    ca: Path | None = None


#: One for each question, and why they may be only a part.
Answers = tuple[list[Answer], list[str]]
#: Takes all history that is fresh, and the devices in which it moved.
HandOn = Callable[[Mapping[Key, Activity], Collection[Key]], None]
#: Takes whether there was an answer, and the number of devices of which there is fresh history.
Told = Callable[[bool, int], None]


class PrometheusHistory:
    """``told`` is called after each query, before what is learned is handed on."""

    def __init__(
        self,
        asked: Asked,
        hand_on: HandOn,
        told: Told = lambda answered, devices: None,
        monotonic_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._asked = asked
        self._hand_on = hand_on
        self._told = told
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s
        self._held: dict[Key, Activity] = {}
        #: Queries that gave no answer in time, and may still hang.
        self._left: list[threading.Thread] = []
        #: Why there is nothing newer; empty while there is. None: before the first query.
        self._trouble: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prometheus", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when nothing is handed on any more."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.refresh()
            except Exception:  # a thread that ended would leave old figures in use, unseen
                log.exception("history_broken")
            self._stopping.wait(self._asked.every_s)

    def refresh(self) -> None:
        """Ask once and hand on what there is; if there was no answer, what is still fresh."""
        try:
            after, trouble = self._newer(), ""
        except Unreadable as err:
            after, trouble = self._left_over(), str(err)
        except Exception:  # a mistake of ours is to keep no old figure in use
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
        """Raises ``Unreadable``."""
        asked = self._asked
        asked_at_s, wall_s = self._monotonic_s(), self._wall_s()
        answers, warnings = self._answers()
        if warnings:
            log.warning("history_in_part", warnings="; ".join(warnings)[:_MOST_SAID])
        return history(answers, self._held, asked.span, asked_at_s, wall_s, asked.stale_after_s)

    def _tell(self, trouble: str) -> None:
        self._told(not trouble, len(self._held))
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if trouble:
            log.warning("history_unavailable", message=trouble, hint="agents' own samples count")
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
    except Exception as err:  # noqa: BLE001 - of four libraries; none is told what is secret
        box.put(Unreadable(f"cannot be asked: {_cause(err)}"))


def query(asked: Asked) -> Answers:
    """Ask once. Raises ``Unreadable``, and what requests and urllib3 raise."""
    url = urlsplit(asked.url)
    # Errors quote the address: it is to hold nothing that nobody is to know.
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
        session.trust_env = False  # a .netrc would win over what is set here
        session.verify = True if asked.ca is None else str(asked.ca)
        session.hooks["response"].append(look)
        connection = PrometheusConnect(
            public, headers=headers, auth=auth, session=session, timeout=within_s
        )
        bounded = _Bounded(time.monotonic() + within_s)
        for prefix in ("http://", "https://", public):  # the last one has an adapter that retries
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
    """Sends a request once, and reads an answer whole: at most ``MOST_BYTES``, and no longer than
    until ``until_s``."""

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
        response.encoding = "utf-8"  # as JSON is; else a long one is searched for signs of others
        return response

    def _body(self, resp: Any) -> bytearray:
        body = bytearray()
        while chunk := resp.read1(_CHUNK_BYTES, decode_content=True):
            body += chunk
            if len(body) > MOST_BYTES:
                raise Unreadable(f"its answer is larger than {MOST_BYTES >> 20} MiB")
            if time.monotonic() > self._until_s:
                raise Unreadable("nobody waits any more")
        return body


def _cause(err: BaseException) -> str:
    """What was at the bottom of it: each library wraps the one below."""
    while (below := err.__cause__ or err.__context__) is not None:
        err = below
    said = getattr(err, "strerror", None) or str(err)
    return f"{type(err).__name__}: {said}"[:_MOST_SAID]
