"""Writes Kubernetes Events, each once, even if several replicas report the same.

An Event's name is derived from its object, reason and occurrence. A second replica that creates the
Event gets a conflict, and stops. An Event whose message changes over time is applied instead: it
stays one object with the message of the last writer. Nothing depends on Events; the caller retries
failed writes.
"""

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from urllib.parse import quote

import msgspec
import structlog

from contract.decision import DECISION
from extender.kube.api_errors import ApiError, ApiStatus
from extender.kube.client import KubeApi
from extender.state.notices import Notice

log = structlog.get_logger()

COMPONENT = "headroom"
#: The API server's limit for a message.
_MESSAGE_CHARS = 1024
#: The namespace of Events about cluster-scoped objects.
_NODES_NAMESPACE = "default"
#: Statuses after which a retry may succeed.
_LATER = (408, 429)

_encode = msgspec.json.Encoder().encode


class KubeEvents:
    """Writes Events. Methods block, and may be called from any thread; ``wall_s`` returns Unix
    seconds."""

    def __init__(self, api: KubeApi, wall_s: Callable[[], float]) -> None:
        self._api = api
        self._wall_s = wall_s

    def post(self, notice: Notice) -> bool:
        """Write the Event. Return False if it should be tried again; True if it is written or never
        will be."""
        try:
            self._write(notice)
        except ApiStatus as err:
            if err.status == 409:
                return True  # another replica was faster
            if err.status in _LATER or err.status >= 500:
                return False
            # For example in a namespace that is being deleted.
            log.warning("event_refused", uid=notice.about.uid, message=str(err))
            return True
        except ApiError:
            return False
        return True

    def _write(self, notice: Notice) -> None:
        namespace = notice.about.namespace or _NODES_NAMESPACE
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/events"
        body = _encode(self._event(notice, namespace))
        if notice.follows:
            self._api.call(
                "PATCH",
                f"{path}/{event_name(notice)}",
                query={"fieldManager": COMPONENT, "force": "true"},
                body=body,
                content_type="application/apply-patch+yaml",  # JSON is valid YAML
            )
        else:
            self._api.call("POST", path, body=body)

    def _event(self, notice: Notice, namespace: str) -> dict[str, object]:
        about = notice.about
        now = datetime.fromtimestamp(self._wall_s(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        regarding = {"apiVersion": "v1", "kind": about.kind, "name": about.name, "uid": about.uid}
        if about.namespace:
            regarding["namespace"] = about.namespace
        metadata: dict[str, object] = {"namespace": namespace, "name": event_name(notice)}
        if notice.decision_id:
            metadata["annotations"] = {DECISION: notice.decision_id}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": metadata,
            "involvedObject": regarding,
            "type": "Warning",
            "reason": notice.reason,
            "message": notice.message[:_MESSAGE_CHARS],
            "source": {"component": COMPONENT},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }


def event_name(notice: Notice) -> str:
    """Return the Event's name: the same on each replica, unique per occurrence, and valid."""
    what = "\n".join((notice.about.uid, notice.reason, notice.key))
    digest = hashlib.sha256(what.encode()).hexdigest()[:16]
    return f"{notice.about.name[:200].rstrip('-.')}.{digest}"
