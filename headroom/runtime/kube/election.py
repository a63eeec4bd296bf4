"""Elects a leader with a Lease, as client-go does.

Each process uses only its own clock: a Lease that it has not seen change for the Lease's duration
has expired. Every write names the resourceVersion that it replaces, so only one process wins. The
election of the ``kubernetes`` package is not used, because its calls have no timeout and raise when
a connection breaks.

Leadership only avoids duplicate work. It need not be a lock, because every write of a profile is
also conditional on the profile's version.
"""

from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from headroom.contract.kube import KubeStruct, ObjectMeta
from headroom.runtime.kube.api_errors import ApiError, ApiStatus
from headroom.runtime.kube.client import KubeApi

LEASE_S = 30
#: Seconds between two attempts to acquire or renew the Lease.
RETRY_S = 5.0


class _Spec(KubeStruct, frozen=True):
    holder_identity: str = ""
    lease_duration_seconds: int = LEASE_S
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int = 0


class _Lease(KubeStruct, frozen=True):
    metadata: ObjectMeta
    api_version: str = msgspec.field(default_factory=lambda: "coordination.k8s.io/v1")
    kind: str = msgspec.field(default_factory=lambda: "Lease")
    spec: _Spec = _Spec()


_decode = msgspec.json.Decoder(_Lease).decode
_encode = msgspec.json.Encoder().encode


class Election:
    """Competes for one Lease. ``clock`` is a monotonic clock, and ``now_s`` returns Unix seconds.
    All methods block."""

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float],
        now_s: Callable[[], float],
    ) -> None:
        self._api = api
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name
        self._identity = identity
        self._clock, self._now_s = clock, now_s
        #: The newest version of the Lease, and when this process first saw it.
        self._version, self._version_s = "", 0.0
        self._renewed_s = -float("inf")

    @property
    def leads(self) -> bool:
        """Return whether this process holds the Lease, according to its own clock."""
        return self._clock() - self._renewed_s < LEASE_S

    def attempt(self) -> None:
        """Renew the Lease, or take it if it is free. Raises ``ApiError`` if a call fails."""
        began_s = self._clock()
        try:
            held = self._read()
            if held is None:
                self._write("POST", self._folder, _Lease(metadata=ObjectMeta(name=self._name)))
            elif held.spec.holder_identity == self._identity or self._expired(held):
                self._write("PUT", f"{self._folder}/{self._name}", held)
            else:
                self._renewed_s = -float("inf")
                return
        except ApiStatus as err:
            if err.status == 409:  # another process was faster
                self._renewed_s = -float("inf")
                return
            raise
        self._renewed_s = began_s

    def release(self) -> None:
        """Release the Lease, so that another process can lead immediately. Errors are ignored,
        because the Lease expires anyway."""
        if not self.leads:
            return
        self._renewed_s = -float("inf")
        try:
            held = self._read()
            if held is not None and held.spec.holder_identity == self._identity:
                spec = msgspec.structs.replace(held.spec, holder_identity="", renew_time=None)
                free = msgspec.structs.replace(held, spec=spec)
                self._api.call("PUT", f"{self._folder}/{self._name}", body=_encode(free))
        except ApiError:
            return

    def _read(self) -> _Lease | None:
        try:
            held = _decode(self._api.call("GET", f"{self._folder}/{self._name}"))
        except ApiStatus as err:
            if err.status == 404:
                return None
            raise
        if held.metadata.resource_version != self._version:
            self._version, self._version_s = held.metadata.resource_version, self._clock()
        return held

    def _expired(self, held: _Lease) -> bool:
        duration_s = max(1, held.spec.lease_duration_seconds)
        return not held.spec.holder_identity or self._clock() - self._version_s > duration_s

    def _write(self, method: str, path: str, held: _Lease) -> None:
        now = datetime.fromtimestamp(self._now_s(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine = held.spec.holder_identity == self._identity
        spec = _Spec(
            holder_identity=self._identity,
            acquire_time=held.spec.acquire_time if mine else now,
            renew_time=now,
            lease_transitions=held.spec.lease_transitions + (not mine),
        )
        body = _encode(msgspec.structs.replace(held, spec=spec))
        self._api.call(method, path, body=body)
