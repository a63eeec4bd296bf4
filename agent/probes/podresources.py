"""Client of the kubelet's PodResources service (v1), which lists held and healthy replicas.

Its responses contain namespaces and names of pods, but no uids, and omit ordinary init containers.
Immediately after a restart the kubelet has not loaded its pods, so the response is empty. The
kubelet limits the rate for all clients together to 100 calls per second, with bursts of ten.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.probes.checkpoint import MOST_REPLICA_CHARS
from agent.probes.protobuf import BadMessage, fields, message, text

_SERVICE = "/v1.PodResourcesLister/"
_MOST_BYTES = 16 << 20


class Unanswered(Exception):
    """The service did not answer. The text is the same while the cause is the same."""


@dataclass(frozen=True, slots=True)
class ListedContainer:
    """A container with the replicas that it holds."""

    namespace: str
    pod: str
    container: str
    #: Replicas of each resource.
    devices: Mapping[str, frozenset[str]]


class PodResources:
    """One connection to the service. A failed call closes it, and the next call opens it again."""

    def __init__(self, socket: str, timeout_s: float = 2.0) -> None:
        self._socket = socket
        self._timeout_s = timeout_s
        self._channel: Any = None  # grpcio has no types
        #: The parsed pod of each message in the last response, because parsing 768 pods takes most
        #: of a sample's time.
        self._pods: dict[bytes, _Pod] = {}
        self._healthy: tuple[bytes, dict[str, frozenset[str]]] = (b"", {})
        #: Number of pods and lists of devices in the last responses that could not be read.
        self._unread = {"List": 0, "GetAllocatableResources": 0}

    @property
    def left_out(self) -> int:
        """Number of pods and lists of devices in the last responses that were skipped because they
        cannot be read."""
        return sum(self._unread.values())

    def containers(self) -> list[ListedContainer]:
        """Return all containers that the kubelet lists. Raises ``Unanswered``."""
        answer = self._call("List")
        try:
            pods = [message(pod) for number, pod in fields(answer) if number == 1]
        except BadMessage as err:
            raise Unanswered("kubelet's answer to List cannot be read") from err
        # A message that the last response also contained is not parsed again.
        self._pods = {pod: self._pods.get(pod) or _containers(pod) for pod in pods}
        self._unread["List"] = sum(self._pods[pod].unread for pod in pods)
        return [container for pod in pods for container in self._pods[pod].containers]

    def healthy(self) -> dict[str, frozenset[str]]:
        """Return the healthy replicas of each resource, allocated or not. Raises ``Unanswered``."""
        answer = self._call("GetAllocatableResources")
        if answer != self._healthy[0]:
            try:
                devices, unread = _devices(answer, field=1)
            except BadMessage as err:
                raise Unanswered("kubelet's list of devices cannot be read") from err
            self._healthy = answer, devices
            self._unread["GetAllocatableResources"] = unread
        return self._healthy[1]

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _call(self, method: str) -> bytes:
        """Call the service with an empty request, and return the encoded answer.

        Closes the connection and raises ``Unanswered`` if the call fails.
        """
        try:
            import grpc
        except ImportError:
            raise Unanswered(
                "Python package grpcio is missing. Install it with: "
                "pip install 'headroom-gpu[agent]'"
            ) from None
        if self._channel is None:
            options = [("grpc.max_receive_message_length", _MOST_BYTES)]
            self._channel = grpc.insecure_channel(f"unix:{self._socket}", options)
        try:
            answer: bytes = self._channel.unary_unary(_SERVICE + method)(
                b"", timeout=self._timeout_s
            )
        except grpc.RpcError as err:
            self.close()
            raise Unanswered(f"kubelet does not answer {method}: {_code(err)}") from err
        return answer


def _code(err: Any) -> str:
    """Return the status code of a call. Its text is omitted, because it contains times and
    addresses."""
    code: str = err.code().name
    return code


@dataclass(frozen=True, slots=True)
class _Pod:
    """A pod in the list."""

    containers: Sequence[ListedContainer] = ()
    #: Number of parts of the pod's entry that cannot be read.
    unread: int = 0


def _containers(pod: bytes) -> _Pod:
    """Read a ``PodResources`` message. Parts that cannot be read are skipped and counted."""
    found: list[ListedContainer] = []
    unread = 0
    try:
        parts = list(fields(pod))
        name, namespace = _text(parts, 1), _text(parts, 2)
        for part, container in parts:
            if part == 3:
                inner = message(container)
                own_name = _text(list(fields(inner)), 1)
                devices, of_container = _devices(inner, field=2)
                unread += of_container
                found.append(ListedContainer(namespace, name, own_name, devices))
    except BadMessage:
        unread += 1
    return _Pod(found, unread)


def _devices(holder: bytes, field: int) -> tuple[dict[str, frozenset[str]], int]:
    """Return the replicas of each resource from the ``ContainerDevices`` in the given field of a
    message, and the number of ``ContainerDevices`` that cannot be read.

    The field may be repeated, and so may a resource in it. Raises ``BadMessage``.
    """
    found: dict[str, frozenset[str]] = {}
    unread = 0
    for number, devices in fields(holder):
        if number != field:
            continue
        try:
            parts = list(fields(message(devices)))
            ids = {text(value) for part, value in parts if part == 2}
            resource = _text(parts, 1)
        except BadMessage:
            unread += 1
            continue
        ids = {each for each in ids if len(each) <= MOST_REPLICA_CHARS}
        found[resource] = found.get(resource, frozenset()) | ids
    return found, unread


def _text(parts: list[tuple[int, bytes | int]], number: int) -> str:
    """Return a string field. As in protobuf, the last value counts, and a missing field is
    empty."""
    return text(dict(parts).get(number, b""))
