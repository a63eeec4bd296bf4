"""Authenticates and authorizes readers of the debug API, as the API server does.

A session is authenticated through the CertificateSigningRequest that its user created, which is
found by the session's secret (``contract.console``). A bearer token is authenticated with a
TokenReview. If a client sends both, the session takes precedence.

As for /metrics of the API server, a caller may read a view if it may ``get`` the view's path
(``nonResourceURLs``). Any caller that may ``get`` a pod may also read the views of that pod. Such a
caller sees other pods only if it may ``get`` all pods of their namespace. A snapshot that is not
redacted shows all pods in full, so its reader must also be allowed to ``get`` all pods. Probes and
the page contain no cluster data and are open to every client.

A few threads send the reviews. Callers that need the same review share it, and its answer is cached
for a few seconds. So views cost little, and a revoked permission ends soon. If the API server
cannot be reached, requests without a cached answer are rejected. Probes and kube-scheduler's calls
never wait for a review.
"""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Generic, Protocol, TypeVar

from fastapi import HTTPException, Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request

from headroom.bounded_dict import Bounded
from headroom.contract.console import AUDIENCE, HEADER

#: A function that returns whether the caller may see the pod with a namespace and name. It can
#: block on the API server.
Sees = Callable[[str, str], bool]
#: Views that show a single pod, named by the query parameter ``pod``.
_OF_A_POD = frozenset(
    f"/v1/{view}" for view in ("decisions", "explain", "history", "idle", "score", "timeline")
)
THREADS = 4
#: Maximum number of namespaces that are reviewed for one view. Pods of other namespaces are hidden.
MOST_NAMESPACES = 32
#: Attribute of ``request.state`` with the pods that the caller may see.
_SEES = "sees"
_EXAMPLE = f'example: -H "Authorization: Bearer $(kubectl create token NAME --audience {AUDIENCE})"'
#: A function that parses a boolean query parameter as the views do.
_is_true = TypeAdapter(bool).validate_python
V = TypeVar("V")
_Bearer = Annotated[HTTPAuthorizationCredentials | None, Security(HTTPBearer(auto_error=False))]
_Session = Annotated[str | None, Security(APIKeyHeader(name=HEADER, auto_error=False))]


def everything(namespace: str, name: str) -> bool:
    """Return True: the caller may see all pods."""
    return True


@dataclass(frozen=True, slots=True)
class Limits:
    #: Seconds for which an answer of the API server is cached.
    kept_s: float = 10.0
    #: Maximum number of cached answers.
    most_kept: int = 4096
    #: Maximum number of reviews in progress. Additional reviews fail immediately.
    most_under_way: int = 64
    #: Maximum number of seconds that a request waits for its review.
    wait_s: float = 5.0


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class User:
    """The user of a token or a session, as the API server names it."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    #: Other attributes from the authenticator, passed on unchanged.
    extra: Mapping[str, Sequence[str]] | None = None


@dataclass(frozen=True, slots=True)
class GetPod:
    namespace: str
    #: Name of the pod. "" stands for all pods of the namespace, or of the cluster if the namespace
    #: is "" too.
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


#: An action that requires a permission.
Permission = GetPod | ReadPath
ALL_PODS = GetPod("", "")


class ReviewFailed(Exception):
    """The API server did not answer a review. The message gives the reason."""


class Reviews(Protocol):
    """Asks the API server. All methods block and raise ``ReviewFailed``."""

    def creator(self, secret: str) -> User | None:
        """Return the user whose session has this secret, or None if there is no such session or it
        has ended."""

    def authenticate(self, token: str) -> User | None:
        """Return the user of a token, or None if the API server does not accept the token."""

    def authorize(self, user: User, permission: Permission) -> bool: ...


def sufficient_permissions(method: str, path: str, query: Mapping[str, str]) -> list[Permission]:
    """Return the permissions that allow reading the view. Any one of them is sufficient."""
    of_path = ReadPath(method.lower(), path)
    namespace, slash, name = query.get("pod", "").partition("/")
    if path in _OF_A_POD and slash and namespace and name:
        return [GetPod(namespace, name), of_path]
    return [of_path]


def routed_path(request: Request) -> str:
    """Return the path that routed the request to its view.

    The path of ``request.url`` cannot be trusted. It is parsed from a URL that contains the Host
    header, so a client can change it and still reach the same view.
    """
    path: str = request.scope["path"]
    return path


def _shows_pods_whole(request: Request) -> bool:
    """Return whether the request is for a snapshot that is not redacted."""
    if routed_path(request) != "/v1/snapshot":
        return False
    try:
        return not _is_true(request.query_params.get("redact", "false"))
    except ValidationError:
        return True


class Guard:
    """Authorizes requests to views. Use it on one event loop."""

    def __init__(
        self,
        reviews: Reviews,
        monotonic_s: Callable[[], float],
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._reviews = reviews
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="reviews")
        self._users = _Answers[User | None](pool, monotonic_s, limits)
        self._allowed = _Answers[bool](pool, monotonic_s, limits)

    async def checked(self, request: Request, bearer: _Bearer, session: _Session) -> None:
        """Check a request. Routes that only authorized callers may read have this method as a
        dependency."""
        await self.check(request, bearer, session)

    async def check(
        self,
        request: Request,
        shown: HTTPAuthorizationCredentials | None,
        session: str | None = None,
    ) -> None:
        """Check the caller, and record which pods it may see, for ``visible_to``.

        ``shown`` is the caller's bearer token, and ``session`` the secret of the caller's session.

        Raises ``HTTPException`` with 401 if the caller is not authenticated, 403 if it may not read
        the view, and 503 if the API server does not answer.
        """
        token = shown.credentials if shown is not None else ""
        asked = sufficient_permissions(request.method, routed_path(request), request.query_params)
        try:
            user, key = await (self._creator(session) if session else self._bearer(token))
            may = partial(self._may, user, key)
            for permission in reversed(asked):  # access to the path shows more, so check it first
                if await may(permission):
                    sees = (
                        _Visible(permission, may).sees
                        if isinstance(permission, GetPod)
                        else everything
                    )
                    setattr(request.state, _SEES, sees)
                    if _shows_pods_whole(request) and not await may(ALL_PODS):
                        detail = f"{user.name} may not {ALL_PODS}, which a snapshot shows in full"
                        raise HTTPException(403, f"{detail}; add redact=true")
                    return
        except ReviewFailed as err:
            raise _unanswered(err) from err
        raise HTTPException(403, _forbidden(user, asked))

    async def _may(self, user: User, key: object, permission: Permission) -> bool:
        return await self._allowed.get(
            (key, permission), partial(self._reviews.authorize, user, permission)
        )

    async def _creator(self, secret: str) -> tuple[User, object]:
        """Return the user of a session, and a key that stands for the session."""
        ask = partial(self._reviews.creator, secret)
        return await self._known("session", secret, ask, "the session is unknown or has ended")

    async def _bearer(self, token: str) -> tuple[User, object]:
        """Return the user of a token, and a key that stands for the token."""
        if not token:
            raise _unauthenticated("no token was sent")
        ask = partial(self._reviews.authenticate, token)
        return await self._known("token", token, ask, "the API server does not accept this token")

    async def _known(
        self, kind: str, secret: str, ask: Callable[[], User | None], problem: str
    ) -> tuple[User, object]:
        """Return the user and a key, which contains a hash of the secret. The secret itself is
        never stored."""
        key = kind, hashlib.sha256(secret.encode()).digest()
        user = await self._users.get(key, ask)
        if user is None:
            raise _unauthenticated(problem)
        return user, key


class _Visible:
    """The pods that a caller with access to one pod may see: that pod, and the pods of each
    namespace in which the caller may ``get`` all pods.

    It is created on the event loop and used by one thread.
    """

    def __init__(self, own: GetPod, may: Callable[[Permission], Coroutine[Any, Any, bool]]) -> None:
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
    """Return which pods the caller may see, after ``Guard.check`` has accepted the request."""
    sees: Sees = getattr(request.state, _SEES)
    return sees


class _Answers(Generic[V]):
    """Calls the API server on threads, and caches each answer under the key of its question."""

    def __init__(
        self, pool: ThreadPoolExecutor, monotonic_s: Callable[[], float], limits: Limits
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._monotonic_s = monotonic_s
        #: The answer to each question, and the monotonic time in seconds until which the answer is
        #: used.
        self._kept: Bounded[Any, tuple[V, float]] = Bounded(limits.most_kept)
        self._under_way: dict[Any, asyncio.Future[V]] = {}

    async def get(self, key: Any, ask: Callable[[], V]) -> V:
        """Return the cached answer, or call ``ask`` on a thread.

        Raises ``ReviewFailed`` if too many calls are in progress, or if this call fails or is late.
        """
        kept = self._kept.get(key)
        if kept is not None and self._monotonic_s() < kept[1]:
            return kept[0]
        future = self._under_way.get(key)
        if future is None:
            if len(self._under_way) >= self._limits.most_under_way:
                raise ReviewFailed("too many reviews are waiting for an answer")
            future = asyncio.get_running_loop().run_in_executor(self._pool, ask)
            self._under_way[key] = future
            future.add_done_callback(lambda done: self._store(key, done))
        try:
            return await asyncio.wait_for(asyncio.shield(future), self._limits.wait_s)
        except TimeoutError as err:
            raise ReviewFailed(f"no answer within {self._limits.wait_s:g} s") from err

    def _store(self, key: Any, future: asyncio.Future[V]) -> None:
        self._under_way.pop(key, None)
        if future.cancelled() or future.exception() is not None:
            return
        self._kept[key] = future.result(), self._monotonic_s() + self._limits.kept_s


def _unanswered(err: ReviewFailed) -> HTTPException:
    detail = f"the API server could not authorize the request: {err}; try again in a moment"
    return HTTPException(503, detail, {"Retry-After": "5"})


def _unauthenticated(why: str) -> HTTPException:
    return HTTPException(401, f"{why}; {_EXAMPLE}", {"WWW-Authenticate": "Bearer"})


def _forbidden(user: User, asked: Sequence[Permission]) -> str:
    may_not = f"{user.name} may not {' or '.join(map(str, asked))}"
    if isinstance(asked[0], GetPod):
        namespace = asked[0].namespace
        needs = f"a Role in namespace {namespace} with {{resources: [pods], verbs: [get]}}"
        return f"{may_not}; it needs {needs}"
    role = "headroom-viewer (deploy/base/rbac.yaml)"
    if asked[0].path == "/metrics":
        role = "headroom-metrics (deploy/components/monitors)"
    return f"{may_not}; bind ClusterRole {role} to it"
