"""Writes Kubernetes Events, each once, however many replicas have the same to tell.

An Event's name is made of the pod, the reason and the occurrence, so that the second who writes it
is told that it exists. Nothing hangs on an Event; what fails is tried again by whoever looks next.
"""

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from urllib.parse import quote

import msgspec
import structlog

from extender.cluster.notices import Notice
from extender.kubeapi import ApiError, ApiStatus, KubeApi

log = structlog.get_logger()

COMPONENT = "headroom"
#: What the API server takes of a message.
_MESSAGE_CHARS = 1024
#: Answers after which it may be accepted later.
_LATER = (408, 429)

_encode = msgspec.json.Encoder().encode


class KubeEvents:
    """Blocks; may be called from any thread. ``wall_s`` is the time in Unix seconds."""

    def __init__(self, api: KubeApi, wall_s: Callable[[], float]) -> None:
        self._api = api
        self._wall_s = wall_s

    def post(self, notice: Notice) -> bool:
        """Whether it is told, or never will be; else it should be tried again."""
        namespace = notice.pod.metadata.namespace
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/events"
        try:
            self._api.call("POST", path, body=_encode(self._event(notice)))
        except ApiStatus as err:
            if err.status == 409:
                return True  # another replica was faster
            if err.status in _LATER or err.status >= 500:
                return False
            # As in a namespace that is being deleted.
            log.warning("event_refused", pod_uid=notice.pod.metadata.uid, message=str(err))
            return True
        except ApiError:
            return False
        return True

    def _event(self, notice: Notice) -> dict[str, object]:
        metadata = notice.pod.metadata
        now = datetime.fromtimestamp(self._wall_s(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        regarding = {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": metadata.namespace,
            "name": metadata.name,
            "uid": metadata.uid,
        }
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"namespace": metadata.namespace, "name": event_name(notice)},
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
    """The same on every replica, another for each occurrence; a name that the server takes."""
    what = "\n".join((notice.pod.metadata.uid, notice.reason, notice.key))
    digest = hashlib.sha256(what.encode()).hexdigest()[:16]
    return f"{notice.pod.metadata.name[:200].rstrip('-.')}.{digest}"
