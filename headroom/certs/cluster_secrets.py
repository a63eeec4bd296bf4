"""Reconciles the certificates of a cluster. Each run is idempotent.

Secrets are written with compare-and-swap. If two runs overlap, one of them starts again and reads
what the other wrote. Trust is written before certificates: first the CAs, then the caBundle of the
webhook configurations, then the certificates.

A Secret that cert-manager manages is never changed. The run fails if it finds such a Secret.
"""

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from kubernetes import client

from headroom.certs.pki import (
    Pair,
    Terms,
    Usage,
    Wanted,
    authority_of,
    data_of,
    ends_at,
    ends_soon,
    next_authority,
    next_leaf,
    usable,
)
from headroom.contract.commands import command
from headroom.errors import BadSettings, StoreConflict
from headroom.runtime.kube.api_errors import ApiStatus, Unreadable
from headroom.runtime.kube.client import KubeApi

#: The Secret with the CAs and their keys. Only this command reads it.
AUTHORITIES = "headroom-ca"
#: Maps each component that serves TLS to the DNS names in its certificate, which are the names of
#: its Services.
SERVERS = {
    "extender": ("headroom-extender", "headroom-journal"),
    "console": ("headroom-debug",),
    "webhook": ("headroom-webhook",),
    "agent": ("headroom-agent",),
    "recorder": ("headroom-recorder",),
    "device-taints": ("headroom-device-taints",),
}
#: Name of the webhook configurations that must trust the CA of the serving certificates.
WEBHOOKS = "headroom"
#: Command that creates CAs and Secrets. The daily run has no permission to create them.
_CREATE = "create job --from=cronjob/headroom-certs-authority replace-ca"
ATTEMPTS = 5

_LABELS = {
    "app.kubernetes.io/part-of": "headroom",
    "app.kubernetes.io/managed-by": "headroom-certs",
}
_MERGE_PATCH = "application/merge-patch+json"
#: Patch type that merges lists by the names of their items. Items that the patch does not name stay
#: unchanged.
_BY_NAME = "application/strategic-merge-patch+json"


@dataclass(frozen=True, slots=True)
class _Secret:
    data: Mapping[str, bytes]
    version: str


def wanted(namespace: str, more_names: tuple[str, ...] = ()) -> tuple[Wanted, ...]:
    """Return the certificates to create: a serving certificate for each part that serves TLS, and
    kube-scheduler's client certificate.

    Each part has its own key in its own Secret, so one part's key cannot be used to impersonate
    another part. A serving certificate is valid for the part's names in ``namespace`` and for
    ``more_names``.
    """
    servers = (
        Wanted(
            "serving",
            f"headroom-{part}-tls",
            f"headroom-{part}",
            (*names, *_in_namespace(names, namespace), *more_names),
            Usage.SERVER,
        )
        for part, names in SERVERS.items()
    )
    scheduler = Wanted(
        "client", "headroom-scheduler-client", "headroom-scheduler", (), Usage.CLIENT
    )
    return (*servers, scheduler)


def _in_namespace(names: Iterable[str], namespace: str) -> list[str]:
    endings = ("", ".svc", ".svc.cluster.local")
    return [f"{name}.{namespace}{ending}" for name in names for ending in endings]


class Certificates:
    """Creates and renews the certificates in ``all_wanted`` and their CAs.

    ``report`` is called with a sentence for each change, and for each CA that expires soon.
    """

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        all_wanted: tuple[Wanted, ...],
        terms: Terms,
        report: Callable[[str], None],
    ) -> None:
        self._api = api
        self._core = client.CoreV1Api(api.client)
        self._admission = client.AdmissionregistrationV1Api(api.client)
        self._namespace = namespace
        self._wanted = all_wanted
        self._terms = terms
        self._report = report

    def run(self, now: datetime) -> None:
        """Create and renew the certificates.

        Raises ``BadSettings`` if cert-manager manages a Secret, ``StoreConflict`` if another client
        kept changing the objects, and ``ApiError`` if a call fails.
        """
        for _ in range(ATTEMPTS - 1):
            try:
                return self._run(now)
            except StoreConflict:
                continue
        return self._run(now)

    def renew(self, now: datetime) -> None:
        """Renew the certificates with the existing CAs.

        Raises the same errors as ``run``, and ``BadSettings`` if a CA or a Secret must be created.
        Only ``run`` creates them, because it may write the webhook configurations.
        """
        stored = self._read(AUTHORITIES)
        before: Pair | None
        authorities: dict[str, Pair] = {}
        for each in self._wanted:
            before = authority_of(each.purpose, stored.data) if stored else None
            leaf = self._read(each.secret)
            if (
                before is None
                or leaf is None
                or next_authority(before, each.purpose, now, self._terms) != before
            ):
                missing = AUTHORITIES if leaf else each.secret
                raise BadSettings(
                    f"Secret {self._namespace}/{missing} does not exist, or has no valid CA, and "
                    f"this run may not create it: kubectl -n {self._namespace} {_CREATE}"
                )
            authorities[each.purpose] = before
            self._renew_leaf(each, before, leaf, now)
        self._report_ends(authorities, now)

    def _run(self, now: datetime) -> None:
        stored = self._read(AUTHORITIES)
        leaves = {each.secret: self._read(each.secret) for each in self._wanted}
        authorities: dict[str, Pair] = {}
        data: dict[str, bytes] = {}
        made: list[str] = []
        for purpose in dict.fromkeys(each.purpose for each in self._wanted):
            before = authority_of(purpose, stored.data) if stored else None
            authority = next_authority(before, purpose, now, self._terms)
            authorities[purpose] = authority
            data |= data_of(purpose, authority)
            if authority != before:
                made.append(purpose)
        if made:
            self._write(AUTHORITIES, "Opaque", data, stored)
        for purpose in made:
            self._report(f"{purpose} CA: created, because no valid CA existed")
        self._trust_in_webhooks(authorities["serving"].cert)
        for each in self._wanted:
            self._renew_leaf(each, authorities[each.purpose], leaves[each.secret], now)
        self._report_ends(authorities, now)

    def _report_ends(self, authorities: Mapping[str, Pair], now: datetime) -> None:
        """Report each CA that expires soon."""
        for purpose, authority in authorities.items():
            if not ends_soon(authority, now, self._terms):
                continue
            until = f"{ends_at(authority.cert):%Y-%m-%dT%H:%M:%SZ}"
            signed = ", ".join(each.secret for each in self._wanted if each.purpose == purpose)
            kubectl = command("kubectl", "-n", self._namespace)
            self._report(
                f"{purpose} CA: expires at {until}, and certificates cannot be renewed beyond that "
                f"(Secrets: {signed}). Replace the CAs at a time when GPU pods may wait for some "
                f"minutes: {kubectl} delete secret {AUTHORITIES} && {kubectl} {_CREATE}"
            )

    def _renew_leaf(
        self, each: Wanted, authority: Pair, existing: _Secret | None, now: datetime
    ) -> None:
        """Write the certificate's Secret if the certificate or its CA has changed."""
        before = existing.data if existing else {}
        found = usable(before.get("tls.crt"), before.get("tls.key"))
        leaf, why = next_leaf(found, authority, each, now, self._terms)
        data = {"tls.crt": leaf.cert, "tls.key": leaf.key, "ca.crt": authority.cert}
        if data.items() <= before.items():
            return
        self._write(each.secret, "kubernetes.io/tls", data, existing)
        if why:
            until = f"{ends_at(leaf.cert):%Y-%m-%dT%H:%M:%SZ}"
            self._report(f"Secret {each.secret}: new certificate until {until}, because {why}")
        else:
            self._report(f"Secret {each.secret}: ca.crt updated")

    def _read(self, name: str) -> _Secret | None:
        """Return the Secret, or None if it does not exist. Raise ``BadSettings`` if cert-manager
        manages it."""
        try:
            with self._api.asking(f"read Secret {name}") as timeout:
                read = self._core.read_namespaced_secret(
                    name, self._namespace, _request_timeout=timeout
                )
        except ApiStatus as err:
            if err.status == 404:
                return None
            raise
        metadata = _metadata(read.metadata)
        if "cert-manager.io/certificate-name" in (metadata.annotations or {}):
            raise BadSettings(
                f"Secret {self._namespace}/{name} is managed by cert-manager; either do not run "
                "headroom certs, or delete the Certificate and the Secret"
            )
        data = {key: base64.b64decode(text) for key, text in (read.data or {}).items()}
        return _Secret(data, metadata.resource_version or "")

    def _write(
        self, name: str, kind: str, data: Mapping[str, bytes], existing: _Secret | None
    ) -> None:
        """Create the Secret, or change it if it is still ``existing``."""
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        if existing is None:
            body = client.V1Secret(
                metadata=client.V1ObjectMeta(name=name, labels=_LABELS),
                type=kind,
                data=dict(encoded),
            )
            with self._writing(f"create Secret {name}") as timeout:
                self._core.create_namespaced_secret(self._namespace, body, _request_timeout=timeout)
            return
        patch = {"metadata": {"resourceVersion": existing.version}, "data": encoded}
        with self._writing(f"patch Secret {name}") as timeout:
            self._core.patch_namespaced_secret(
                name, self._namespace, patch, _request_timeout=timeout, _content_type=_MERGE_PATCH
            )

    def _trust_in_webhooks(self, bundle: bytes) -> None:
        """Write ``bundle`` as the caBundle of each webhook that has another caBundle."""
        text = base64.b64encode(bundle).decode()
        admission = self._admission
        for kind, read, patch in (
            (
                "validatingwebhookconfiguration",
                admission.read_validating_webhook_configuration,
                admission.patch_validating_webhook_configuration,
            ),
            (
                "mutatingwebhookconfiguration",
                admission.read_mutating_webhook_configuration,
                admission.patch_mutating_webhook_configuration,
            ),
        ):
            try:
                with self._api.asking(f"read {kind} {WEBHOOKS}") as timeout:
                    found = read(WEBHOOKS, _request_timeout=timeout)
            except ApiStatus as err:
                if err.status == 404:
                    continue
                raise
            hooks = [
                {"name": hook.name, "clientConfig": {"caBundle": text}}
                for hook in found.webhooks or ()
                if hook.client_config.ca_bundle != text
            ]
            if not hooks:
                continue
            version = {"resourceVersion": _metadata(found.metadata).resource_version}
            body = {"metadata": version, "webhooks": hooks}
            with self._writing(f"patch {kind} {WEBHOOKS}") as timeout:
                patch(WEBHOOKS, body, _request_timeout=timeout, _content_type=_BY_NAME)
            self._report(f"{kind} {WEBHOOKS}: caBundle updated")

    @contextmanager
    def _writing(self, call: str) -> Iterator[tuple[float, float]]:
        """Convert the errors of a write, as ``KubeApi.asking`` does for all calls.

        Raises ``StoreConflict`` if another client changed, created or deleted the object.
        """
        try:
            with self._api.asking(call) as timeout:
                yield timeout
        except ApiStatus as err:
            if err.status in (404, 409):
                raise StoreConflict(str(err)) from err
            raise


def _metadata(metadata: client.V1ObjectMeta | None) -> client.V1ObjectMeta:
    """Return the metadata. Raise ``Unreadable`` if it has no resourceVersion, because the API
    server does not check an empty precondition."""
    if metadata is None or not metadata.resource_version:
        raise Unreadable("the API server returned an object without a resourceVersion")
    return metadata
