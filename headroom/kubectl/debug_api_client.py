"""The client of the debug API. It reports each error in one sentence."""

import http.client
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol
from urllib.parse import quote, urlencode

from headroom.contract.annotations import VRAM

TIMEOUT_S = 30.0
#: Maximum bytes of an answer. Headroom's own answers are far smaller.
_MAX_BYTES = 256 << 20

#: Note that is printed after an answer from a Headroom in mode observe.
OBSERVES = "Headroom only observes (mode: observe): it rejects, prefers and evicts nothing."


class CommandError(Exception):
    """An error message for the user, and the exit status of the command."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class NotPermitted(CommandError):
    """The user may not read the view."""


#: Exit statuses: the object does not exist; an error on the command line; any other failure of the
#: debug API.
NOT_THERE, BAD_INPUT, UNREACHABLE = 1, 2, 3
#: Query parameters whose option on the command line has another name, if an error may name their
#: value.
_PARAMETERS = frozenset(
    ("pod", "node", "against", "decision", "since", "limit", "count", "held", "hours", "namespace")
)
_OPTIONS = {"count": "gpus"}
#: Views whose command has the pod as its argument.
_OF_POD = ("score", "explain", "defrag")
#: Views that are printed by a command with another name.
_COMMANDS = {"nodes": "top", "pods": "top pod", "events": "log", "explain": "why"}
_VIEW = re.compile(r"\bGET /v1/(\w+)(?:\?(\S+))?")
#: Fields in the body of a what-if whose option on the command line has another name.
_BODY_OPTIONS = {
    "pods": "pods",
    "pods.0": "vram",
    "add.like": "add",
    "device_choices": "device-choice",
}
_FIELD = re.compile(
    r"body (pods|pods\.0|drain|add\.like|release|(?:replicas|device_choices)(?:\.\S+)?): "
)


class Response(Protocol):
    """An answer of ``http.client`` or urllib3. Iteration yields its lines as they arrive."""

    status: int

    @property
    def headers(self) -> Any:  # each package has a mapping of its own
        ...

    def read(self, amt: int, /) -> bytes: ...

    def read1(self, amt: int, /) -> bytes: ...

    def __iter__(self) -> Iterator[bytes]: ...


class Transport(Protocol):
    """Sends requests to a debug API, and authenticates the user."""

    name: str
    #: Advice for the user if the debug API does not answer.
    hint: str

    def open(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> AbstractContextManager[Response]:
        """Send a request. The answer can be read within the context. Raises ``OSError``,
        ``http.client.HTTPException`` and ``CommandError``, also while the answer is read."""
        ...


class DebugApi:
    """A client of the debug API's views."""

    def __init__(
        self, transport: Transport, notify: Callable[[str], object] = lambda text: None
    ) -> None:
        """Create a client. If Headroom only observes, it calls ``notify`` once with
        ``OBSERVES``."""
        self._transport = transport
        self._notify = notify
        self._notified = False

    def get(self, *path: str, **query: str | int | bool | None) -> Any:
        """Return the body of a GET request to the path under /v1/. Raises ``CommandError``."""
        return self._call("GET", _target(path, query), None)

    def all_pages(self, view: str, **query: str | int | bool | None) -> Any:
        """Return the body of a view whose list has the name of the view, with the items of all
        pages. Raises ``CommandError``."""
        body = page = self.get(view, **query)
        while page["continue"]:
            page = self.get(view, **query, **{"continue": page["continue"]})
            body[view] += page[view]
            body["remaining"], body["continue"] = page["remaining"], page["continue"]
        return body

    def post(self, *path: str, body: object, **query: str | int | bool | None) -> Any:
        """Return the body of a POST request to the path under /v1/. Raises ``CommandError``."""
        return self._call("POST", _target(path, query), json.dumps(body, default=str).encode())

    def lines(self, path: str, last_event_id: str = "", *, since: str | None) -> Iterator[str]:
        """Yield the lines of a stream of server-sent events. If ``last_event_id`` is set, begin
        after this event. Raises ``CommandError``."""
        target = _target((path,), {"since": since})
        headers = {"Accept": "text/event-stream"}
        if last_event_id:
            headers["Last-Event-ID"] = last_event_id
        try:
            with self._transport.open("GET", target, None, headers) as response:
                if response.status != 200:
                    answer = json.loads(response.read(_MAX_BYTES))
                    status = response.status
                    raise CommandError(_detail(answer, target, status), _exit_code(status))
                for line in response:
                    yield line.decode("utf-8", "replace").rstrip("\r\n")
        except (OSError, http.client.HTTPException, ValueError) as err:
            raise self._unreachable(err) from err

    def _unreachable(self, err: Exception) -> CommandError:
        where, hint = self._transport.name, self._transport.hint
        why = f"{where} does not answer: {err or type(err).__name__}; {hint}"
        return CommandError(why, UNREACHABLE)

    def _call(self, method: str, target: str, body: bytes | None) -> Any:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            with self._transport.open(method, target, body, headers) as response:
                status, payload = response.status, response.read(_MAX_BYTES)
                observes = response.headers.get("Headroom-Mode") == "observe"
        except (OSError, http.client.HTTPException) as err:
            raise self._unreachable(err) from err
        try:
            answer = json.loads(payload)
        except ValueError as err:
            where = f"{self._transport.name} is not a debug API of Headroom"
            why = f"{target} returned {status} without JSON"
            raise CommandError(f"{where}: {why}; {self._transport.hint}", UNREACHABLE) from err
        if observes and not self._notified:
            self._notified = True
            self._notify(OBSERVES)
        if status != 200:
            error = NotPermitted if status == 403 else CommandError
            raise error(_detail(answer, target, status), _exit_code(status))
        return answer


def _target(path: tuple[str, ...], query: Mapping[str, str | int | bool | None]) -> str:
    """Return the quoted path under /v1/ with the query. Parameters that are None are left out."""
    given = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in query.items()
        if value is not None
    }
    quoted = "/v1/" + "/".join(quote(part, safe="") for part in path)
    return f"{quoted}?{urlencode(given)}" if given else quoted


def _detail(answer: Any, target: str, status: int) -> str:
    """Return the detail of the problem+json, or the HTTP status if the answer has no detail."""
    detail = answer.get("detail") if isinstance(answer, dict) else None
    if not isinstance(detail, str):
        return f"{target} returned {status}"
    return _with_options(detail, target.removeprefix("/v1/").partition("?")[0])


def _with_options(detail: str, view: str) -> str:
    """Return the message of a view with parameters replaced by the options of the command line, and
    views by commands."""
    if found := _FIELD.match(detail):
        by_node = found[1].startswith(("replicas", "device_choices"))
        field, _, node = found[1].partition(".") if by_node else (found[1], "", "")
        option = f"--{_BODY_OPTIONS.get(field, field)} {node}".rstrip()
        rest = detail[found.end() :].replace(f"annotation {VRAM}: ", "")
        detail = f"{option}: {rest}".replace(f"Example: {VRAM}: ", f"Example: {option} ")
    detail = detail.replace("body manifest: ", "--filename: ")
    detail = _VIEW.sub(lambda found: _command(found[1], found[2] or ""), detail)
    what, example, values = detail.partition(" Example: ")
    if "query " in what:
        values = " ".join(_options(word, view) for word in values.split(" "))
    what = re.sub(r"\bquery (\w+)", lambda found: _option(found[1], view), what)
    return f"{what}{example}{values}"


def _command(view: str, query: str) -> str:
    """Return the command that prints a view with the parameters of a query string."""
    options = _options(query, view)
    return f"kubectl headroom {_COMMANDS.get(view, view)}{f' {options}' if options else ''}"


def _options(word: str, view: str) -> str:
    """Return a query string as the options of the command that prints the view. Other words stay as
    they are."""
    pairs = [pair.partition("=") for pair in word.split("&")]
    if not all(equals and name in _PARAMETERS for name, equals, _ in pairs):
        return word
    return " ".join(
        value if name == "pod" and view in _OF_POD else f"{_option(name, view)} {value}"
        for name, _, value in pairs
    )


def _option(name: str, view: str) -> str:
    """Return the option of the command line, or POD if it is the argument of the command."""
    if name == "pod" and view in _OF_POD:
        return "POD"
    return "--" + _OPTIONS.get(name, name).replace("_", "-")


def _exit_code(status: int) -> int:
    return {400: BAD_INPUT, 422: BAD_INPUT, 404: NOT_THERE}.get(status, UNREACHABLE)
