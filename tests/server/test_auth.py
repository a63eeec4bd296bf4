"""Checks that readers of the debug API are authenticated and authorized by the API server."""

import asyncio
import threading
from dataclasses import dataclass, field

import httpx
import pytest
from fastapi.security import HTTPAuthorizationCredentials
from starlette.exceptions import HTTPException
from starlette.requests import Request

from headroom.console.shared_answers import SharedAnswers
from headroom.runtime.server.auth import (
    ALL_PODS,
    DEFAULT_LIMITS,
    GetPod,
    Guard,
    Limits,
    Permission,
    ReadPath,
    ReviewFailed,
    User,
    sufficient_permissions,
)
from tests.console.asking import Asked
from tests.serving import serving

OF_POD = GetPod("ml", "p")
NODES = ReadPath("get", "/v1/nodes")
EXPLAIN = "/v1/explain?pod=ml/p"
OF_EXPLAIN = ReadPath("get", "/v1/explain")


@dataclass
class Played:
    """A fake API server that accepts tokens ``token-of-NAME`` and sessions ``session-of-NAME``.
    Each name has its own permissions.
    """

    rights: dict[str, set[Permission]] = field(default_factory=dict)
    fails: str = ""
    asked: list[object] = field(default_factory=list)
    #: Whether all sessions have ended.
    ended: bool = False

    def creator(self, secret: str) -> User | None:
        self._note(secret)
        name = secret.removeprefix("session-of-")
        return User(name) if name != secret and not self.ended else None

    def authenticate(self, token: str) -> User | None:
        self._note(token)
        name = token.removeprefix("token-of-")
        return User(name) if name != token else None

    def authorize(self, user: User, permission: Permission) -> bool:
        self._note((user.name, permission))
        return permission in self.rights.get(user.name, set())

    def _note(self, what: object) -> None:
        self.asked.append(what)
        if self.fails:
            raise ReviewFailed(self.fails)


class GuardedApi:
    def __init__(
        self,
        limits: Limits = DEFAULT_LIMITS,
        answers: SharedAnswers | None = None,
        **rights: Permission,
    ) -> None:
        self.reviews = Played({name: {permission} for name, permission in rights.items()})
        self.now_s = 0.0
        guard = Guard(self.reviews, lambda: self.now_s, limits)
        self.api = Asked(guard=guard, answers=answers or SharedAnswers(0.0))
        self.api.add_node("n")

    def get(self, path: str, name: str | None) -> httpx.Response:
        headers = {} if name is None else {"Authorization": f"Bearer token-of-{name}"}
        return self.api.get(path, headers)


@pytest.mark.parametrize(
    ("method", "path", "query", "asked"),
    [
        pytest.param("GET", "/v1/nodes", {}, [NODES], id="the fleet"),
        pytest.param(
            "GET",
            "/v1/explain",
            {"pod": "ml/p"},
            [OF_POD, OF_EXPLAIN],
            id="a pod",
        ),
        pytest.param(
            "GET",
            "/v1/decisions",
            {"pod": "ml/p"},
            [OF_POD, ReadPath("get", "/v1/decisions")],
            id="decisions about a pod",
        ),
        *(
            pytest.param("GET", "/v1/decisions", query, [ReadPath("get", "/v1/decisions")], id=name)
            for name, query in (
                ("decisions about all", {}),
                ("no namespace", {"pod": "/p"}),
                ("no name", {"pod": "ml/"}),
                ("no slash", {"pod": "ml"}),
                ("a uid", {"uid": "u"}),
            )
        ),
        pytest.param(
            "GET", "/v1/nodes", {"pod": "ml/p"}, [NODES], id="a view that ignores the query"
        ),
        pytest.param("POST", "/v1/whatif", {}, [ReadPath("post", "/v1/whatif")], id="a what-if"),
    ],
)
def test_each_view_accepts_sufficient_permissions(
    method: str, path: str, query: dict[str, str], asked: list[Permission]
) -> None:
    assert sufficient_permissions(method, path, query) == asked


@pytest.mark.parametrize(
    ("header", "why"),
    [
        pytest.param({}, "no token was sent", id="no credentials"),
        pytest.param({"Authorization": "Basic dTpw"}, "no token was sent", id="a password"),
        pytest.param({"Authorization": "Bearer "}, "no token was sent", id="an empty token"),
        pytest.param(
            {"Authorization": "Bearer x"}, "does not accept this token", id="an unknown token"
        ),
        pytest.param({"Headroom-Session": ""}, "no token was sent", id="an empty session"),
        pytest.param({"Headroom-Session": "x"}, "unknown or has ended", id="an unknown session"),
    ],
)
def test_a_rejection_explains_how_to_authenticate(header: dict[str, str], why: str) -> None:
    world = GuardedApi()
    for path in ("/v1/nodes", EXPLAIN, "/metrics"):
        answer = world.api.get(path, header)
        assert answer.status_code == 401
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert why in answer.json()["detail"]
        assert "Bearer $(kubectl create token" in answer.json()["detail"]
    assert "/v1/nodes" not in str(world.reviews.asked)


def test_permission_for_one_view_does_not_permit_another() -> None:
    world = GuardedApi(sre=NODES, author=OF_POD)
    assert world.get("/v1/nodes", "sre").status_code == 200
    assert (
        world.get(EXPLAIN, "author").status_code == 404
    )  # The reader is permitted, but the pod does not exist.
    rejected = world.get("/v1/nodes", "author")
    assert rejected.status_code == 403
    assert rejected.json()["detail"].startswith("author may not get path /v1/nodes; bind ")
    assert "headroom-viewer" in rejected.json()["detail"]
    rejected = world.get("/metrics", "author")
    assert rejected.status_code == 403
    assert rejected.json()["detail"] == (
        "author may not get path /metrics; "
        "bind ClusterRole headroom-metrics (deploy/components/monitors) to it"
    )
    rejected = world.get(EXPLAIN, "sre")
    assert rejected.status_code == 403
    assert rejected.json()["detail"] == (
        "sre may not get pod ml/p or get path /v1/explain; "
        "it needs a Role in namespace ml with {resources: [pods], verbs: [get]}"
    )
    assert world.get("/v1/explain?pod=other/p", "author").status_code == 403


def test_a_session_takes_precedence_over_a_token_and_is_not_a_token() -> None:
    """Otherwise, a client could make a console confuse the two."""
    world = GuardedApi(sre=NODES)

    def get(**headers: str) -> int:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return world.api.get("/v1/nodes", sent).status_code

    assert get(Headroom_Session="session-of-sre") == 200
    assert get(Headroom_Session="session-of-sre", Authorization="Bearer token-of-author") == 200
    assert get(Headroom_Session="session-of-author", Authorization="Bearer token-of-sre") == 403
    assert get(Headroom_Session="x", Authorization="Bearer token-of-sre") == 401
    assert get(Headroom_Session="token-of-sre") == 401
    assert get(Authorization="Bearer session-of-sre") == 401
    # Headers with which other proxies name a user have no effect.
    assert get(X_Remote_User="sre", X_Remote_Group="system:masters", Impersonate_User="sre") == 401


def test_an_ended_session_is_rejected_after_a_moment() -> None:
    world = GuardedApi(sre=NODES)
    header = {"Headroom-Session": "session-of-sre"}
    assert world.api.get("/v1/nodes", header).status_code == 200
    world.reviews.ended = True
    world.now_s += DEFAULT_LIMITS.kept_s
    assert world.api.get("/v1/nodes", header).status_code == 401


def test_an_unredacted_snapshot_needs_permission_to_get_all_pods() -> None:
    snapshot = ReadPath("get", "/v1/snapshot")
    world = GuardedApi(viewer=snapshot)
    world.reviews.rights["admin"] = {snapshot, ALL_PODS}
    for query in ("", "?redact=false", "?redact=true&redact=false"):
        assert world.get(f"/v1/snapshot{query}", "admin").status_code == 200
        rejected = world.get(f"/v1/snapshot{query}", "viewer")
        assert rejected.status_code == 403
        assert rejected.json()["detail"] == (
            "viewer may not get all pods, which a snapshot shows in full; add redact=true"
        )
    for query in ("?redact=true", "?redact=1", "?redact=false&redact=on"):
        assert world.get(f"/v1/snapshot{query}", "viewer").status_code == 200
    assert world.get("/v1/snapshot?redact=perhaps", "viewer").status_code == 403


def test_permission_for_the_path_permits_the_views_of_every_pod() -> None:
    world = GuardedApi(sre=OF_EXPLAIN)
    assert world.get(EXPLAIN, "sre").status_code == 404


@pytest.mark.parametrize(
    "host",
    [
        *("debug", "x/page/", "x/?", "x/healthz#", "x?", "x#", "@/page/", "x/page/@b", ""),
        *("x\\page\\", "[::1]/page/", "a/page/:80", "x;/page/", "[::1", "x]"),
    ],
)
def test_only_probes_and_the_page_need_no_authentication(host: str) -> None:
    world = GuardedApi()
    world.reviews.fails = "down"
    public = {"/", "/page/app.js", "/v1", "/healthz", "/readyz", "/openapi.json"}
    views = world.api.app.openapi()["paths"]
    assert {"/healthz", "/readyz", "/metrics", "/v1/pods", "/v1/snapshot"} <= views.keys()
    for path in [*public, *views]:
        for method in views.get(path, ["get"]):
            answer = world.api.get(path, {"Host": host}, method.upper())
            assert answer.status_code == (200 if path in public else 401), (method, path)
    assert world.reviews.asked == []


def test_a_host_header_cannot_redirect_a_reader() -> None:
    answer = GuardedApi().api.get("/v1/nodes/", {"Host": "elsewhere.example"})
    assert answer.status_code == 404
    assert "location" not in answer.headers
    assert answer.json()["detail"].startswith("/v1/nodes/ is not a view")


def test_requests_are_rejected_while_the_api_server_does_not_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = GuardedApi(sre=NODES)
    world.reviews.fails = "it did not answer a TokenReview"
    answer = world.get("/v1/nodes", "sre")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
    assert "it did not answer a TokenReview" in answer.json()["detail"]
    world.reviews.fails = ""
    assert world.get("/v1/nodes", "sre").status_code == 200  # The failure was not cached.
    assert [each for each in caplog.records if each.name == "asyncio" and each.exc_info] == []


def test_reviews_are_cached_only_for_a_moment() -> None:
    world = GuardedApi(sre=NODES)
    for _ in range(3):
        assert world.get("/v1/nodes", "sre").status_code == 200
    assert world.reviews.asked == ["token-of-sre", ("sre", NODES)]
    world.reviews.rights.clear()
    world.now_s += DEFAULT_LIMITS.kept_s - 0.5
    assert world.get("/v1/nodes", "sre").status_code == 200
    world.now_s += 0.5
    assert world.get("/v1/nodes", "sre").status_code == 403


def test_the_number_of_cached_reviews_is_limited() -> None:
    world = GuardedApi(Limits(most_kept=2))
    for name in ("a", "b", "c", "a"):
        world.get("/v1/nodes", name)
    assert world.reviews.asked.count("token-of-a") == 2


def request_of(path: str = "/v1/nodes") -> Request:
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    return Request(scope | {"path_params": {}, "server": ("debug", 80), "scheme": "http"})


def bearer(name: str) -> HTTPAuthorizationCredentials:
    return HTTPAuthorizationCredentials(scheme="Bearer", credentials=f"token-of-{name}")


class Slow(Played):
    """Reviews that return only when the test lets them."""

    def __init__(self) -> None:
        super().__init__({"sre": {NODES}})
        self.let = threading.Event()

    def authenticate(self, token: str) -> User | None:
        self.let.wait()
        return super().authenticate(token)


def test_equal_reviews_are_shared_and_too_many_are_rejected_at_once() -> None:
    reviews = Slow()
    guard = Guard(reviews, lambda: 0.0, Limits(most_under_way=2))

    async def play() -> None:
        same = [asyncio.create_task(guard.check(request_of(), bearer("sre"))) for _ in range(20)]
        other = asyncio.create_task(guard.check(request_of(), bearer("other")))
        await asyncio.sleep(0)
        with pytest.raises(HTTPException) as rejected:
            await guard.check(request_of(), bearer("third"))
        assert rejected.value.status_code == 503
        reviews.let.set()
        await asyncio.gather(*same)
        with pytest.raises(HTTPException) as rejected:
            await other
        assert rejected.value.status_code == 403

    asyncio.run(play())
    assert reviews.asked.count("token-of-sre") == 1


def test_a_review_that_takes_too_long_is_rejected() -> None:
    reviews = Slow()
    guard = Guard(reviews, lambda: 0.0, Limits(wait_s=0.05))

    async def play() -> None:
        with pytest.raises(HTTPException) as rejected:
            await guard.check(request_of(), bearer("sre"))
        assert rejected.value.status_code == 503
        reviews.let.set()

    asyncio.run(play())


@pytest.mark.slow
def test_the_port_of_kube_scheduler_does_not_serve_the_debug_api() -> None:
    with serving("nodes: [{name: n, gpus: 1, memory: 24Gi}]") as server:
        for path in server.get("/openapi.json").json()["paths"]:
            answer = httpx.get(server.verbs + path, trust_env=False)
            assert answer.status_code == 404, path
