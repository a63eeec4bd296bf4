"""Sends TokenReviews and SubjectAccessReviews to the API server."""

from collections.abc import Iterator
from contextlib import contextmanager

from kubernetes import client

from extender.console.auth import GetPod, Permission, ReviewFailed
from extender.kube.api_errors import ApiError, ApiStatus
from extender.kube.client import KubeApi
from extender.server.client_certificates import User


class KubeReviews:
    """Implements ``extender.console.auth.Reviews`` with the API server."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._authentication = client.AuthenticationV1Api(api.client)
        self._authorization = client.AuthorizationV1Api(api.client)

    def authenticate(self, token: str) -> User | None:
        review = client.V1TokenReview(spec=client.V1TokenReviewSpec(token=token))
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
        """Yield the timeout of the request; replace errors of the API by ``ReviewFailed``."""
        try:
            with self._api.asking(f"create {kind}") as timeout:
                yield timeout
        except ApiStatus as err:
            if err.status == 403:
                raise ReviewFailed(
                    f"Headroom may not create a {kind}, see deploy/base/rbac.yaml"
                ) from err
            raise ReviewFailed(f"it answered {err.status} to a {kind}") from err
        except ApiError as err:
            raise ReviewFailed(f"it did not answer a {kind}") from err
