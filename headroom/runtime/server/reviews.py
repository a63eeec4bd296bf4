"""Asks the API server which user a reader is, and what the user may read."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime

import msgspec
from kubernetes import client

from headroom.contract.console import AUDIENCE, CSRS, LIFETIME_S, SIGNER, audiences, csr_name
from headroom.runtime.kube.api_errors import ApiError, ApiStatus
from headroom.runtime.kube.client import KubeApi
from headroom.runtime.server.auth import GetPod, Permission, ReviewFailed, User


class _Metadata(msgspec.Struct, rename="camel"):
    creation_timestamp: datetime


class _Spec(msgspec.Struct, rename="camel"):
    """The spec. The API server writes the fields about the creator, and no client can change
    them."""

    signer_name: str
    username: str = ""
    uid: str = ""
    groups: Sequence[str] = ()
    extra: Mapping[str, Sequence[str]] | None = None


class _Condition(msgspec.Struct):
    type: str


class _Status(msgspec.Struct):
    conditions: Sequence[_Condition] = ()


class _Csr(msgspec.Struct):
    """A CertificateSigningRequest, reduced to the fields that describe a session."""

    metadata: _Metadata
    spec: _Spec
    status: _Status


_decode = msgspec.json.Decoder(_Csr).decode


class KubeReviews:
    """Implements ``runtime.server.auth.Reviews`` by calls to the API server."""

    def __init__(self, api: KubeApi, wall_s: Callable[[], float] = time.time) -> None:
        self._api = api
        self._wall_s = wall_s
        self._authentication = client.AuthenticationV1Api(api.client)
        self._authorization = client.AuthorizationV1Api(api.client)

    def creator(self, secret: str) -> User | None:
        name = csr_name(secret)
        if not name:
            return None
        try:
            csr = _decode(self._api.call("GET", f"{CSRS}/{name}"))
        except ApiStatus as err:
            if err.status == 404:
                return None
            raise _failed("get", "CertificateSigningRequest", err) from err
        except ApiError as err:
            raise ReviewFailed("it did not answer") from err
        except (ValueError, RecursionError) as err:
            raise ReviewFailed("its CertificateSigningRequest cannot be read") from err
        spec, age_s = csr.spec, self._wall_s() - csr.metadata.creation_timestamp.timestamp()
        # An administrator can end the session by denying the request.
        denied = any(each.type != "Approved" for each in csr.status.conditions)
        if spec.signer_name != SIGNER or age_s > LIFETIME_S or denied or not spec.username:
            return None
        return User(spec.username, spec.uid, tuple(spec.groups), spec.extra)

    def authenticate(self, token: str) -> User | None:
        # Without audiences, the API server accepts tokens for the API server itself, such as
        # Prometheus's.
        only = [AUDIENCE] if AUDIENCE in audiences(token) else None
        review = client.V1TokenReview(spec=client.V1TokenReviewSpec(token=token, audiences=only))
        with self._asking("TokenReview") as timeout:
            status = self._authentication.create_token_review(
                review, _request_timeout=timeout
            ).status
        if status is None or not status.authenticated or not (user := status.user):
            return None
        if not user.username:
            return None
        return User(user.username, user.uid or "", tuple(user.groups or ()), user.extra)

    def authorize(self, user: User, permission: Permission) -> bool:
        extra = {key: list(values) for key, values in (user.extra or {}).items()}
        spec = client.V1SubjectAccessReviewSpec(
            user=user.name, uid=user.uid, groups=list(user.groups), extra=extra or None
        )
        if isinstance(permission, GetPod):
            spec.resource_attributes = client.V1ResourceAttributes(
                verb="get",
                version="v1",
                resource="pods",
                namespace=permission.namespace,
                name=permission.name,
            )
        else:
            spec.non_resource_attributes = client.V1NonResourceAttributes(
                verb=permission.verb, path=permission.path
            )
        review = client.V1SubjectAccessReview(spec=spec)
        with self._asking("SubjectAccessReview") as timeout:
            status = self._authorization.create_subject_access_review(
                review, _request_timeout=timeout
            ).status
        return status is not None and bool(status.allowed) and not status.denied

    @contextmanager
    def _asking(self, kind: str) -> Iterator[tuple[float, float]]:
        """Yield the timeout of the request. Convert errors of the API to ``ReviewFailed``."""
        try:
            with self._api.asking(f"create {kind}") as timeout:
                yield timeout
        except ApiStatus as err:
            raise _failed("create", kind, err) from err
        except ApiError as err:
            raise ReviewFailed(f"it did not answer a {kind}") from err


def _failed(verb: str, kind: str, err: ApiStatus) -> ReviewFailed:
    if err.status == 403:
        return ReviewFailed(f"Headroom may not {verb} a {kind}, see deploy/base/rbac.yaml")
    return ReviewFailed(f"it answered {err.status} to a {kind}")
