"""Decides when the API server hears from us, and keeps trying until it has.

Nothing is queued. What is due is always computed from the last status that was *accepted* and the
newest one, so a failed write cannot lose the newest report nor send an old one after it.

The heartbeat vouches for the report: it is sent only when no report is outstanding. If status
writes are refused while the Lease goes through, the node must go stale, not look alive with figures
that are no longer true.
"""

import random
from collections.abc import Callable
from datetime import datetime
from typing import Any, Protocol

import msgspec
import structlog
import urllib3

from agent.summary import rfc3339, worth_writing
from contract.gpunode import GROUP, PLURAL, VERSION, GPUNodeStatus
from contract.kube import KubeStruct, ObjectMeta

_log = structlog.get_logger()

FIRST_BACK_OFF_S = 1.0
LONGEST_BACK_OFF_S = 30.0

_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
_MERGE_PATCH = "application/merge-patch+json"


class NotDelivered(Exception):
    """The API server did not take it; ``retry_after_s`` is the wait that it asked for, if any."""

    def __init__(self, why: str, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class NotThereYet(NotDelivered):
    """No extender has created this node's GPUNode; agents wait, they may not create it."""


class Publisher(Protocol):
    """Where reports go. Every method raises ``NotDelivered``, and nothing else."""

    def report(self, status: GPUNodeStatus) -> str:
        """Write ``status``; returns the uid of the GPUNode that took it."""
        ...

    def identity(self) -> str:
        """The uid of the GPUNode as it is now; empty where there is none."""
        ...

    def heartbeat(self, now: datetime) -> None: ...


class Courier:
    """Hands each new status to the publisher when it is due; ``deliver`` never raises."""

    def __init__(
        self,
        publisher: Publisher,
        heartbeat_s: float,
        monotonic: Callable[[], float],
        now: Callable[[], datetime],
        chance: random.Random,
    ) -> None:
        self._publisher = publisher
        self._heartbeat_s = heartbeat_s
        self._monotonic = monotonic
        self._now = now
        self._chance = chance
        #: The last status that was accepted, by the GPUNode of that uid, and when.
        self._written: GPUNodeStatus | None = None
        self._uid = ""
        self._written_at_s = 0.0
        self._beat_at_s: float | None = None
        self._failures = 0
        self._not_before_s = 0.0

    def deliver(self, status: GPUNodeStatus) -> None:
        at_s = self._monotonic()
        if self._failures and at_s < self._not_before_s:
            return
        try:
            self._deliver(status, at_s)
        except NotDelivered as err:
            self._failures += 1
            wait_s = max(self._back_off_s(), err.retry_after_s)
            self._not_before_s = at_s + wait_s
            event = "gpunode_awaited" if isinstance(err, NotThereYet) else "report_not_delivered"
            _log.warning(event, reason=str(err), failures=self._failures, retry_s=round(wait_s, 1))
        else:
            self._failures = 0

    def _deliver(self, status: GPUNodeStatus, at_s: float) -> None:
        beat = self._beat_at_s is None or at_s - self._beat_at_s >= self._heartbeat_s
        if beat and self._written is not None and self._publisher.identity() != self._uid:
            # Deleted and created again: the new one knows nothing.
            self._written = None
        if worth_writing(self._written, status, at_s - self._written_at_s):
            self._uid = self._publisher.report(status)
            self._written, self._written_at_s = status, at_s
            _log.info("report_written", devices=len(status.devices), observed_at=status.observed_at)
        if beat:
            self._publisher.heartbeat(self._now())
            self._beat_at_s = at_s

    def _back_off_s(self) -> float:
        """Doubles up to the longest; half of it by chance, so that 5,000 agents do not agree."""
        longest_s = min(LONGEST_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0 ** min(self._failures - 1, 10))
        return longest_s * self._chance.uniform(0.5, 1.0)


class _Partial(KubeStruct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()


_partial = msgspec.json.Decoder(_Partial)


class KubernetesPublisher:
    """Status patches and the Lease, over the connection that ``kubernetes`` has configured.

    ``client`` is a ``kubernetes.client.ApiClient``: it knows the host, the certificates and the
    token (and reads it again when it was rotated). Requests are sent through its connection pool:
    its generated methods change between majors, and would decode objects that nobody reads.
    """

    def __init__(
        self, client: Any, node: str, namespace: str, heartbeat_s: float, timeout_s: float = 5.0
    ) -> None:
        self._client = client
        self._node = node
        self._namespace = namespace
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._gpunode = f"/apis/{GROUP}/{VERSION}/{PLURAL}/{node}"
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"

    def report(self, status: GPUNodeStatus) -> str:
        answer = self._send("PATCH", f"{self._gpunode}/status", {"status": status_patch(status)})
        if answer.status == 404:
            raise NotThereYet(f"GPUNode {self._node} is not there yet; an extender creates it")
        return _uid(self._accepted(answer, f"status of GPUNode {self._node}"))

    def identity(self) -> str:
        # resourceVersion=0: from the API server's cache, which is as old as a heartbeat may be.
        answer = self._send("GET", f"{self._gpunode}?resourceVersion=0")
        if answer.status == 404:
            return ""
        return _uid(self._accepted(answer, f"GPUNode {self._node}"))

    def heartbeat(self, now: datetime) -> None:
        spec = {
            "holderIdentity": self._node,
            "leaseDurationSeconds": round(3 * self._heartbeat_s),
            "renewTime": rfc3339(now),
        }
        what = f"Lease {self._namespace}/{self._node}"
        answer = self._send("PATCH", f"{self._leases}/{self._node}", {"spec": spec})
        if answer.status == 404:
            lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._node, "namespace": self._namespace},
                "spec": spec,
            }
            answer = self._send("POST", self._leases, lease)
        self._accepted(answer, what)

    def _send(self, method: str, path: str, body: object = None) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": _METADATA_ONLY, "User-Agent": "headroom-agent"}
        if body is not None:
            headers["Content-Type"] = _MERGE_PATCH if method == "PATCH" else "application/json"
        try:
            for auth in self._client.configuration.auth_settings().values():
                headers[auth["key"]] = auth["value"]
            answer: urllib3.BaseHTTPResponse = self._client.rest_client.pool_manager.request(
                method,
                self._client.configuration.host + path,
                body=None if body is None else msgspec.json.encode(body),
                headers=headers,
                timeout=self._timeout_s,
                retries=False,  # the courier retries, with the newest report
            )
        except (urllib3.exceptions.HTTPError, OSError) as err:
            raise NotDelivered(f"{method} {path}: API server not reached: {err}") from err
        return answer

    def _accepted(self, answer: urllib3.BaseHTTPResponse, what: str) -> bytes:
        if 200 <= answer.status < 300:
            return answer.data
        wait = answer.headers.get("Retry-After", "")
        raise NotDelivered(
            f"{what} was refused with {answer.status}: {_shortened(answer.data)}",
            min(float(wait), 10 * LONGEST_BACK_OFF_S) if wait.isdecimal() else 0.0,
        )


def status_patch(status: GPUNodeStatus) -> dict[str, Any]:
    """``status`` as a merge patch that replaces all of the last one.

    Our encoding leaves defaults out, and a merge patch keeps what it does not name: the last pod
    would stay for ever. So every field is named; null removes it.
    """
    built = msgspec.to_builtins(status)
    return {key: _named(getattr(status, name), built.get(key)) for name, key in _fields(status)}


def _named(value: object, built: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {key: (built or {}).get(key) for _, key in _fields(value)}
    if isinstance(value, list):
        return built or []
    return built


def _fields(value: msgspec.Struct) -> list[tuple[str, str]]:
    return [(field.name, field.encode_name) for field in msgspec.structs.fields(value)]


def _uid(body: bytes) -> str:
    try:
        return _partial.decode(body).metadata.uid
    except msgspec.MsgspecError as err:
        raise NotDelivered(f"API server's answer cannot be read: {err}") from err


def _shortened(body: bytes, limit: int = 300) -> str:
    text = body.decode("utf-8", "replace")
    return text if len(text) <= limit else text[: limit - 1] + "…"
