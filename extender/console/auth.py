"""Who may read the debug API: whom the API server knows, and lets read the same of the cluster.

Whose a token is the API server says. Where the port speaks TLS, a client certificate names its
user itself (``certificates``); a token comes before it.

Views of a single pod are for whoever may ``get`` that pod; all others, and these too, for whoever
may ``get`` the path itself (``nonResourceURLs``), as of the API server's own /metrics. Whoever may
not ``get`` the path sees in the views of a pod only other pods of namespaces whose pods it may
``get``. A snapshot that is not redacted shows all pods whole: whoever reads it must be allowed to
``get`` all pods as well. Probes and the page, which hold nothing of the cluster, are for everybody.

The API server is asked by threads of its own, a few at a time, once for all who ask the same, and
its answers are kept for some seconds: a view costs it next to nothing, and a right that was taken
away is gone as fast. Where it cannot be asked nobody is let in. Probes and kube-scheduler's calls
never wait for any of it.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from fastapi import HTTPException
from fastapi.security import HTTPAuthorizationCredentials
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request

from extender.bounded import Bounded
from extender.console.visible_pods import Sees, everything
from extender.server.client_certificates import PEER, Peer, User

#: Of anybody's, as are the files of the page.
OPEN_PATHS = frozenset({"/", "/healthz", "/readyz"})
OPEN_FOLDER = "/page/"
#: Views of whose query ``pod`` names the only pod that they tell of.
_OF_A_POD = frozenset({"/v1/decisions", "/v1/score"})
THREADS = 4
#: Namespaces of other pods that the API server is asked about for one view; pods of more namespaces
#: are not shown.
MOST_NAMESPACES = 32
#: Where a request keeps which pods its caller sees.
_SEES = "sees"
_RIGHT = 'right is, for example, -H "Authorization: Bearer $(kubectl create token NAME)"'
_NO_TLS = "and client certificates are for a port with TLS (settings debug_tls_cert, debug_tls_key)"
_NO_CA = (
    "and no client certificate is asked for, since the extender could not read the cluster's CA of "
    "clients: its log says why (client_ca_unknown)"
)
#: Reads a query as the views do.
_is_true = TypeAdapter(bool).validate_python
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Limits:
    #: For so long an answer of the API server holds, and so many are kept.
    kept_s: float = 10.0
    most_kept: int = 4096
    #: Questions that wait for an answer, beyond which nobody else is let wait; and for how long.
    most_under_way: int = 64
    wait_s: float = 5.0


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class GetPod:
    namespace: str
    #: Empty: every pod of the namespace; if that is empty too, every pod.
    name: str

    def __str__(self) -> str:
        if self.name:
            return f"get pod {self.namespace}/{self.name}"
        return f"get all pods of namespace {self.namespace}" if self.namespace else "get all pods"


@dataclass(frozen=True, slots=True)
class ReadPath:
    verb: str
    path: str

    def __str__(self) -> str:
        return f"{self.verb} path {self.path}"


#: What somebody wants to do.
Wish = GetPod | ReadPath
ALL_PODS = GetPod("", "")


class ReviewFailed(Exception):
    """The API server did not say; why, in a sentence."""


class Reviews(Protocol):
    """Asks the API server; blocks. Both raise ``ReviewFailed``."""

    def who(self, token: str) -> User | None:
        """Whose token it is; None where it is nobody's."""

    def may(self, user: User, wish: Wish) -> bool: ...


def wishes(
    method: str, path: str, path_params: Mapping[str, str], query: Mapping[str, str]
) -> list[Wish]:
    """Of these one must be allowed, for this request to be answered."""
    of_path = ReadPath(method.lower(), path)
    if path.startswith("/v1/explain/pods/") and {"namespace", "name"} <= path_params.keys():
        return [GetPod(path_params["namespace"], path_params["name"]), of_path]
    namespace, slash, name = query.get("pod", "").partition("/")
    if path in _OF_A_POD and slash and namespace and name:
        return [GetPod(namespace, name), of_path]
    return [of_path]


def _shows_pods_whole(request: Request) -> bool:
    if request.url.path != "/v1/snapshot":
        return False
    try:
        return not _is_true(request.query_params.get("redact", "false"))
    except ValidationError:
        return True


class Guard:
    """Lets a request pass, or raises what it is answered with. On one event loop."""

    def __init__(
        self,
        reviews: Reviews,
        monotonic_s: Callable[[], float],
        limits: Limits = DEFAULT_LIMITS,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._reviews = reviews
        self._wall_s = wall_s
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="reviews")
        self._users = _Answers[User | None](pool, monotonic_s, limits)
        self._allowed = _Answers[bool](pool, monotonic_s, limits)

    async def check(self, request: Request, shown: HTTPAuthorizationCredentials | None) -> None:
        if request.url.path in OPEN_PATHS or request.url.path.startswith(OPEN_FOLDER):
            return
        token = shown.credentials if shown is not None else ""
        peer: Peer | None = request.scope.get(PEER)
        asked = wishes(request.method, request.url.path, request.path_params, request.query_params)
        try:
            user, key = await self._bearer(token) if token else self._certified(peer)
            may = partial(self._may, user, key)
            for wish in reversed(asked):  # who may read the path sees more
                if await may(wish):
                    sees = _Visible(wish, may).sees if isinstance(wish, GetPod) else everything
                    setattr(request.state, _SEES, sees)
                    if _shows_pods_whole(request) and not await may(ALL_PODS):
                        detail = f"{user.name} may not {ALL_PODS}, which a snapshot shows whole"
                        raise HTTPException(403, f"{detail}; right is redact=true")
                    return
        except ReviewFailed as err:
            raise _unanswered(err) from err
        raise HTTPException(403, _forbidden(user, asked))

    async def _may(self, user: User, key: object, wish: Wish) -> bool:
        return await self._allowed.get((key, wish), partial(self._reviews.may, user, wish))

    async def _bearer(self, token: str) -> tuple[User, bytes]:
        """With what stands for the token, which itself is kept nowhere."""
        key = hashlib.sha256(token.encode()).digest()
        user = await self._users.get(key, partial(self._reviews.who, token))
        if user is None:
            raise _unauthenticated("the API server does not know this token")
        return user, key

    def _certified(self, peer: Peer | None) -> tuple[User, tuple[str, str]]:
        """Likewise of a certificate."""
        if peer is None:
            raise _unauthenticated(f"no token was sent, {_NO_TLS}")
        if not peer.asked:
            raise _unauthenticated(f"no token was sent, {_NO_CA}")
        if peer.certificate is None:
            raise _unauthenticated("neither a token nor a client certificate was sent")
        if peer.certificate.not_after_s < self._wall_s():
            raise _unauthenticated("the client certificate has expired meanwhile")
        if peer.certificate.user is None:
            raise _unauthenticated("the client certificate has no common name, so it is nobody's")
        return peer.certificate.user, ("certificate", peer.certificate.sha256)


class _Visible:
    """Other pods that a reader of one pod may see; made on the event loop, asked by one thread."""

    def __init__(self, own: GetPod, may: Callable[[Wish], Coroutine[Any, Any, bool]]) -> None:
        self._own = own
        self._may = may
        self._loop = asyncio.get_running_loop()
        self._namespaces: dict[str, bool] = {}

    def sees(self, namespace: str, name: str) -> bool:
        if (namespace, name) == (self._own.namespace, self._own.name):
            return True
        if namespace not in self._namespaces:
            if len(self._namespaces) == MOST_NAMESPACES:
                return False
            asked = asyncio.run_coroutine_threadsafe(self._may(GetPod(namespace, "")), self._loop)
            try:
                self._namespaces[namespace] = asked.result()
            except ReviewFailed as err:
                raise _unanswered(err) from err
        return self._namespaces[namespace]


def visible_to(request: Request) -> Sees:
    """Which pods the caller may see, once ``Guard.check`` has let the request pass."""
    sees: Sees = getattr(request.state, _SEES)
    return sees


class _Answers(Generic[V]):
    """What was answered lately, by whatever stands for the question."""

    def __init__(
        self, pool: ThreadPoolExecutor, monotonic_s: Callable[[], float], limits: Limits
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._monotonic_s = monotonic_s
        #: Question -> answer, and until when it holds.
        self._kept: Bounded[Any, tuple[V, float]] = Bounded(limits.most_kept)
        self._under_way: dict[Any, asyncio.Future[V]] = {}

    async def get(self, key: Any, ask: Callable[[], V]) -> V:
        """Raises ``ReviewFailed``."""
        kept = self._kept.get(key)
        if kept is not None and self._monotonic_s() < kept[1]:
            return kept[0]
        future = self._under_way.get(key)
        if future is None:
            if len(self._under_way) >= self._limits.most_under_way:
                raise ReviewFailed("too many wait for its answers")
            future = asyncio.get_running_loop().run_in_executor(self._pool, ask)
            self._under_way[key] = future
            future.add_done_callback(lambda done: self._came(key, done))
        try:
            return await asyncio.wait_for(asyncio.shield(future), self._limits.wait_s)
        except TimeoutError as err:
            raise ReviewFailed(f"no answer within {self._limits.wait_s:g} s") from err

    def _came(self, key: Any, future: asyncio.Future[V]) -> None:
        self._under_way.pop(key, None)
        if future.cancelled() or future.exception() is not None:
            return
        self._kept[key] = future.result(), self._monotonic_s() + self._limits.kept_s


def _unanswered(err: ReviewFailed) -> HTTPException:
    detail = f"who may read this is asked of the API server: {err}; try again in a moment"
    return HTTPException(503, detail, {"Retry-After": "5"})


def _unauthenticated(why: str) -> HTTPException:
    return HTTPException(401, f"{why}; {_RIGHT}", {"WWW-Authenticate": "Bearer"})


def _forbidden(user: User, asked: Sequence[Wish]) -> str:
    may_not = f"{user.name} may not {' or '.join(map(str, asked))}"
    if isinstance(asked[0], GetPod):
        namespace = asked[0].namespace
        return f"{may_not}; right is a Role in {namespace} with {{resources: [pods], verbs: [get]}}"
    return f"{may_not}; right is, for example, ClusterRole headroom-viewer of deploy/base/rbac.yaml"
