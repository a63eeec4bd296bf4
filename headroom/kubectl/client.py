"""Asks the debug API, whichever way leads there, and says what went wrong in one sentence."""

import http.client
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any, Protocol
from urllib.parse import quote, urlencode

TIMEOUT_S = 30.0
#: What none of our answers comes near to; beyond it somebody else answers.
_MOST_BYTES = 256 << 20


OBSERVES = "Headroom only observes (mode: observe): nothing is refused, preferred or evicted."


class Trouble(Exception):
    """What a person is told; ``exit_code`` is that of the command."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


#: Exit codes: what was asked for is not there, or was refused as a question; nobody could be asked.
NOT_THERE, UNREACHABLE = 1, 3


class Way(Protocol):
    """Leads to a debug API; each call has a connection of its own, open until it is closed."""

    name: str

    @property
    def headers(self) -> Mapping[str, str]:
        """With what says who asks."""
        ...

    def connect(self) -> http.client.HTTPConnection:
        """Raises ``OSError`` and ``Trouble``."""
        ...


class DebugApi:
    def __init__(self, way: Way, say: Callable[[str], object] = lambda text: None) -> None:
        """``say`` is told, once, what a person has to know about all answers."""
        self._way = way
        self._say = say
        self._said = False

    def get(self, *path: str, **query: str | int | bool | None) -> Any:
        """The body at /v1/ and the parts of the path, which are quoted here. Raises ``Trouble``."""
        return self._call("GET", _target(path, query), None)

    def post(self, *path: str, body: object) -> Any:
        return self._call("POST", _target(path, {}), json.dumps(body).encode())

    def lines(self, *path: str, **query: str | int | bool | None) -> Iterator[str]:
        """Of a stream of server-sent events, until it ends. Raises ``Trouble``."""
        target = _target(path, query)
        headers = {"Accept": "text/event-stream", **self._way.headers}
        try:
            with closing(self._way.connect()) as connection:
                connection.request("GET", target, None, headers)
                response = connection.getresponse()
                if response.status != 200:
                    answer = json.loads(response.read(_MOST_BYTES))
                    raise Trouble(_told(answer, target, response.status), UNREACHABLE)
                for line in response:
                    yield line.decode("utf-8", "replace").rstrip("\r\n")
        except (OSError, http.client.HTTPException, ValueError) as err:
            why = f"{self._way.name} does not answer: {err or type(err).__name__}"
            raise Trouble(why, UNREACHABLE) from err

    def _call(self, method: str, target: str, body: bytes | None) -> Any:
        headers = {"Accept": "application/json", **self._way.headers}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            with closing(self._way.connect()) as connection:
                connection.request(method, target, body, headers)
                response = connection.getresponse()
                status, payload = response.status, response.read(_MOST_BYTES)
                observes = response.getheader("Headroom-Mode") == "observe"
        except (OSError, http.client.HTTPException) as err:
            why = f"{self._way.name} does not answer: {err or type(err).__name__}"
            raise Trouble(why, UNREACHABLE) from err
        try:
            answer = json.loads(payload)
        except ValueError as err:
            why = f"{self._way.name} is no debug API of Headroom: {target} answered {status}"
            raise Trouble(f"{why}, and not with JSON", UNREACHABLE) from err
        if observes and not self._said:
            self._said = True
            self._say(OBSERVES)
        if status != 200:
            raise Trouble(_told(answer, target, status), _exit_code(status))
        return answer


def _target(path: tuple[str, ...], query: Mapping[str, str | int | bool | None]) -> str:
    given = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in query.items()
        if value is not None
    }
    where = "/v1/" + "/".join(quote(part, safe="") for part in path)
    return f"{where}?{urlencode(given)}" if given else where


def _told(answer: Any, target: str, status: int) -> str:
    """The detail of problem+json, or what there is."""
    detail = answer.get("detail") if isinstance(answer, dict) else None
    return detail if isinstance(detail, str) else f"{target} answered {status}"


def _exit_code(status: int) -> int:
    return NOT_THERE if status in (400, 404, 422) else UNREACHABLE
