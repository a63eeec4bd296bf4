"""Asks the API server whose token it is and what they may: TokenReview, SubjectAccessReview."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from extender.kubeapi import ApiError, ApiStatus, KubeApi
from extender.web.auth import GetPod, ReviewFailed, Wish
from extender.web.certificates import User

_TOKENS = "/apis/authentication.k8s.io/v1/tokenreviews"
_ACCESSES = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
_encode = msgspec.json.Encoder().encode


class _UserInfo(msgspec.Struct, frozen=True):
    username: str = ""
    uid: str = ""
    groups: list[str] | None = None
    extra: Mapping[str, Sequence[str]] | None = None


class _TokenStatus(msgspec.Struct, frozen=True):
    authenticated: bool = False
    user: _UserInfo = _UserInfo()


class _AccessStatus(msgspec.Struct, frozen=True):
    allowed: bool = False
    denied: bool = False


class _TokenReview(msgspec.Struct, frozen=True):
    status: _TokenStatus = _TokenStatus()


class _AccessReview(msgspec.Struct, frozen=True):
    status: _AccessStatus = _AccessStatus()


R = TypeVar("R", _TokenReview, _AccessReview)


class KubeReviews:
    """``extender.web.auth.Reviews`` over the API server."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    def who(self, token: str) -> User | None:
        kind = "authentication.k8s.io/v1", "TokenReview"
        status = self._review(_TOKENS, kind, {"token": token}, _TokenReview).status
        if not status.authenticated or not status.user.username:
            return None
        user = status.user
        return User(user.username, user.uid, tuple(user.groups or ()), user.extra)

    def may(self, user: User, wish: Wish) -> bool:
        spec: dict[str, Any] = {"user": user.name, "uid": user.uid, "groups": user.groups}
        if user.extra:
            spec["extra"] = user.extra
        if isinstance(wish, GetPod):
            spec["resourceAttributes"] = {
                "verb": "get",
                "version": "v1",
                "resource": "pods",
                "namespace": wish.namespace,
                "name": wish.name,
            }
        else:
            spec["nonResourceAttributes"] = {"verb": wish.verb, "path": wish.path}
        kind = "authorization.k8s.io/v1", "SubjectAccessReview"
        status = self._review(_ACCESSES, kind, spec, _AccessReview).status
        return status.allowed and not status.denied

    def _review(self, path: str, kind: tuple[str, str], spec: object, form: type[R]) -> R:
        body = {"apiVersion": kind[0], "kind": kind[1], "spec": spec}
        try:
            answer = self._api.call("POST", path, body=_encode(body))
            return msgspec.json.decode(answer, type=form)
        except ApiStatus as err:
            if err.status == 403:
                raise ReviewFailed(
                    f"it lets the extender create no {kind[1]}, see deploy/base/rbac.yaml"
                ) from err
            raise ReviewFailed(f"it answers {err.status} to a {kind[1]}") from err
        except (ApiError, ValueError, RecursionError) as err:
            raise ReviewFailed(f"it did not answer a {kind[1]}") from err
