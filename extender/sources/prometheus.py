"""SM activity from DCGM's history in Prometheus, asked for in the background.

One thread asks now and then, and hands on what it learned; nothing waits for it. A query runs on a
thread of its own: one that gives no whole answer in time is left behind, so that figures grow old
whatever Prometheus does. While there is no fresh history the agents' own samples count.
"""

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import requests
import structlog
from prometheus_api_client import PrometheusConnect

from extender.cluster.activity import Key
from extender.placement.activity import Activity
from extender.sources.history import (
    Answer,
    Span,
    Unreadable,
    fault,
    history,
    moved,
    question,
    read,
    still_fresh,
)

log = structlog.get_logger()
T = TypeVar("T")

#: 5,000 nodes of 8 devices are 11 MB.
MOST_BYTES = 64 << 20
_CHUNK_BYTES = 64 << 10
#: Queries left behind; while so many hang there is no new one.
_MOST_LEFT = 3
#: Figures to let go of at once.
_TOGETHER = 1024
#: Between two pieces of work: whoever waits for the interpreter's lock gets it.
_BREATH_S = 0.0005
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


#: Takes all history that is fresh, and the devices in which it moved; returns early where the event
#: is set.
HandOn = Callable[[Mapping[Key, Activity], Collection[Key], threading.Event], None]
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
        #: What was held before that: by now nobody looks things up in it.
        self._outdated: dict[Key, Activity] = {}
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
        self._hand_on(after, _whole(moved(before, after)), self._stopping)
        _let_go(self._outdated)
        self._outdated = before

    def _left_over(self) -> dict[Key, Activity]:
        return _whole(still_fresh(self._held, self._monotonic_s(), self._asked.stale_after_s))

    def _newer(self) -> dict[Key, Activity]:
        """Raises ``Unreadable``."""
        asked = self._asked
        asked_at_s, wall_s = self._monotonic_s(), self._wall_s()
        answer = self._answer()
        if answer.warnings:
            log.warning("history_in_part", warnings="; ".join(answer.warnings)[:_MOST_SAID])
        after = _whole(
            history(answer, self._held, asked.span, asked_at_s, wall_s, asked.stale_after_s)
        )
        _let_go(answer.ratios)
        _let_go(answer.sampled_at_s)
        return after

    def _tell(self, trouble: str) -> None:
        self._told(not trouble, len(self._held))
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if trouble:
            log.warning("history_unavailable", message=trouble, hint="agents' own samples count")
        else:
            log.info("history_available", devices=len(self._held))

    def _answer(self) -> Answer:
        self._left = [thread for thread in self._left if thread.is_alive()]
        if len(self._left) >= _MOST_LEFT:
            raise Unreadable("earlier queries still hang")
        box: queue.SimpleQueue[Answer | Unreadable] = queue.SimpleQueue()
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


def _ask(asked: Asked, box: "queue.SimpleQueue[Answer | Unreadable]") -> None:
    try:
        box.put(query(asked))
    except Unreadable as err:
        box.put(err)
    except Exception as err:  # noqa: BLE001 - of four libraries; none is told what is secret
        box.put(Unreadable(f"cannot be asked: {_cause(err)}"))


def query(asked: Asked) -> Answer:
    """Ask once. Raises ``Unreadable``, and what requests and urllib3 raise."""
    url = urlsplit(asked.url)
    # Errors quote the address: it is to hold nothing that nobody is to know.
    public = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
    headers = {"Accept-Encoding": "gzip"}
    auth = None
    if url.username:
        auth = unquote(url.username), unquote(url.password or "")
    if asked.token_file is not None:
        headers["Authorization"] = f"Bearer {_token(asked.token_file)}"
    within_s = asked.timeout_s + _LEAVE_S
    with _Session(within_s) as session:
        session.trust_env = False  # a .netrc would win over what is set here
        session.verify = True if asked.ca is None else str(asked.ca)
        connection = PrometheusConnect(
            public.rstrip("/"),
            headers=headers,
            retry=0,
            auth=auth,
            session=session,
            timeout=within_s,
        )
        limits = {"timeout": f"{asked.timeout_s:g}s"}
        answer: Answer = connection.custom_query(question(asked.span), params=limits)
        return answer


def _token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as err:
        raise Unreadable(f"prometheus_token_file: {path}: cannot be read") from err
    if not token.isprintable() or not token or " " in token:
        raise Unreadable(f"prometheus_token_file: {path}: holds no token")
    return token


class _Reply:
    """What ``PrometheusConnect`` looks at; its result is an ``Answer``."""

    status_code = 200

    def __init__(self, body: bytes) -> None:
        self.content = body

    def json(self) -> dict[str, Any]:
        return {"data": {"result": _whole(read(self.content))}}


class _Session(requests.Session):
    """Reads no more and no longer than is set, and decodes without keeping others waiting."""

    def __init__(self, within_s: float) -> None:
        super().__init__()
        self._until_s = time.monotonic() + within_s

    def request(self, method: str, url: str, **how: Any) -> _Reply:  # type: ignore[override]
        with super().request(method, url, stream=True, **how) as reply:
            body = self._body(reply)
        if reply.status_code != requests.codes.ok:
            raise Unreadable(f"it answers {reply.status_code}{fault(body)}")
        return _Reply(body)

    def _body(self, reply: requests.Response) -> bytes:
        body = bytearray()
        while chunk := reply.raw.read1(_CHUNK_BYTES, decode_content=True):
            body += chunk
            if len(body) > MOST_BYTES:
                raise Unreadable(f"its answer is larger than {MOST_BYTES >> 20} MiB")
            if time.monotonic() > self._until_s:
                raise Unreadable("nobody waits any more")
        return bytes(body)


def _whole(pieces: Iterable[T]) -> T:
    """The last of them, with a breath after each."""
    for piece in pieces:
        time.sleep(_BREATH_S)
        last = piece
    return last


def _let_go(figures: dict[Key, Any]) -> None:
    """Free a large map piece by piece: all at once would take others milliseconds of their time,
    and on whichever thread held it last."""
    while figures:
        for _ in range(min(_TOGETHER, len(figures))):
            figures.popitem()
        time.sleep(_BREATH_S)


def _cause(err: BaseException) -> str:
    """What was at the bottom of it: each library wraps the one below."""
    while (below := err.__cause__ or err.__context__) is not None:
        err = below
    said = getattr(err, "strerror", None) or str(err)
    return f"{type(err).__name__}: {said}"[:_MOST_SAID]
