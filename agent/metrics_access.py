"""Asks the API server which clients may read the metrics, because they name pods of all tenants.

A client sends a bearer token. A TokenReview returns the user of the token, and a
SubjectAccessReview returns whether this user may ``get`` the path /metrics. The API server protects
its own metrics in the same way. Responses are cached, so a Prometheus server causes only two
requests in two minutes. The token itself is never stored.

Any pod can send tokens, so reviews of tokens that were never accepted are rate limited. After each
such review the client's connection is closed, and ``agent.http_server`` limits new connections per
address. A token that was accepted before is always reviewed again, so a flood of requests cannot
block Prometheus.
"""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from agent.http_connection import Answer
from agent.kube_client import ApiServer, NotReached, request
from agent.rate_limit import RateLimit
from headroom.client.kube_protocol import status_message

#: Seconds for which a response of the API server is cached.
ALLOWED_S = 120.0
REJECTED_S = 10.0
#: Maximum number of reviews of unknown tokens per second, and maximum burst.
REVIEWS_PER_S, REVIEWS_AT_ONCE = 1.0, 20
#: Responses are cached for at most this many accepted tokens, and as many rejected tokens.
_MAX_KEPT = 64
_TIMEOUT_S = 3.0
_PATH = "/metrics"
_EXAMPLE = 'Example: -H "Authorization: Bearer $(kubectl create token NAME)"'

_T = TypeVar("_T")

#: A function that returns None if the bearer of a token may read the metrics, and otherwise the
#: rejection. It raises ``NotReached``.
Review = Callable[[str], Answer | None]


class _Tokens:
    """Cached responses by the hash of their token. The oldest responses are dropped first."""

    def __init__(self) -> None:
        self._kept: dict[bytes, tuple[Answer | None, float]] = {}

    def put(self, key: bytes, answer: Answer | None, until_s: float) -> None:
        self._kept.pop(key, None)
        self._kept[key] = answer, until_s
        if len(self._kept) > _MAX_KEPT:
            del self._kept[next(iter(self._kept))]

    def drop(self, key: bytes) -> None:
        self._kept.pop(key, None)

    def get(self, key: bytes) -> tuple[Answer | None, float] | None:
        return self._kept.get(key)


class MetricsAccess:
    """Decides for each token whether its bearer may read the metrics. Threads may share it.

    ``monotonic`` returns seconds.
    """

    def __init__(self, review: Review, monotonic: Callable[[], float]) -> None:
        self._review = review
        self._monotonic = monotonic
        self._lock = threading.Lock()
        #: Tokens that the last review accepted, even if the response has expired.
        self._accepted = _Tokens()
        self._rejected = _Tokens()
        self._strangers = RateLimit(REVIEWS_PER_S, REVIEWS_AT_ONCE, monotonic)

    def at_once(self, token: str) -> tuple[Answer | None, bool]:
        """Return (rejection or None, True) if the response is cached, otherwise (None, False)."""
        if not token:
            return NO_TOKEN, True
        key = _key(token)
        with self._lock:
            for kept in (self._accepted.get(key), self._rejected.get(key)):
                if kept is not None and self._monotonic() < kept[1]:
                    return kept[0], True
        return None, False

    def ask(self, token: str) -> Answer | None:
        """Return None if the bearer may read the metrics, and otherwise the rejection. The call can
        block on the API server.
        """
        rejection, known = self.at_once(token)
        if known:
            return rejection
        key = _key(token)
        with self._lock:
            if self._accepted.get(key) is None and not self._strangers.allows(""):
                return _TOO_MANY
        try:
            rejection = self._review(token)
        except NotReached as err:
            return Answer(503, f"the API server did not review the token: {err}\n".encode())
        now_s = self._monotonic()
        with self._lock:
            if rejection is None:
                self._accepted.put(key, None, now_s + ALLOWED_S)
            else:
                self._accepted.drop(key)
                self._rejected.put(key, rejection, now_s + REJECTED_S)
        return rejection


def _key(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


class _User(msgspec.Struct, frozen=True):
    username: str = ""
    uid: str = ""
    groups: list[str] = []
    extra: dict[str, list[str]] = {}


class _TokenStatus(msgspec.Struct, frozen=True):
    authenticated: bool = False
    user: _User = _User()


class _TokenReview(msgspec.Struct, frozen=True):
    status: _TokenStatus = _TokenStatus()


class _AccessStatus(msgspec.Struct, frozen=True):
    allowed: bool = False
    denied: bool = False


class _AccessReview(msgspec.Struct, frozen=True):
    status: _AccessStatus = _AccessStatus()


@dataclass(frozen=True, slots=True)
class KubeReview:
    """Reviews tokens at the API server."""

    server: ApiServer

    def __call__(self, token: str) -> Answer | None:
        """Return None if the token may read the metrics, otherwise the rejection. Raises
        ``NotReached``."""
        spec: dict[str, object] = {"token": token}
        user = self._create("authentication.k8s.io", "TokenReview", spec, _TokenReview).status
        if not user.authenticated or not user.user.username:
            return _unauthenticated("the API server does not accept this token")
        spec = {
            "user": user.user.username,
            "uid": user.user.uid,
            "groups": user.user.groups,
            "extra": user.user.extra,
            "nonResourceAttributes": {"path": _PATH, "verb": "get"},
        }
        access = self._create("authorization.k8s.io", "SubjectAccessReview", spec, _AccessReview)
        if access.status.allowed and not access.status.denied:
            return None
        why = f"{user.user.username} may not get path {_PATH}; bind ClusterRole headroom-metrics"
        return Answer(403, f"{why} (deploy/components/monitors) to it\n".encode())

    def _create(self, group: str, kind: str, spec: object, answer: type[_T]) -> _T:
        path = f"/apis/{group}/v1/{kind.lower()}s"
        body = {"apiVersion": f"{group}/v1", "kind": kind, "spec": spec}
        response = request(self.server, "POST", path, _TIMEOUT_S, body=body)
        if response.status != 201:
            raise NotReached(f"{kind}: {response.status}: {status_message(response.data)}")
        try:
            return msgspec.json.decode(response.data, type=answer)
        except (ValueError, RecursionError) as err:
            raise NotReached(f"{kind}: its answer cannot be read: {err}") from err


def _unauthenticated(why: str) -> Answer:
    return Answer(401, f"{why}. {_EXAMPLE}\n".encode())


NO_TOKEN = _unauthenticated("no token was sent")
_TOO_MANY = Answer(429, b"too many unknown tokens; try again in a second\n")
