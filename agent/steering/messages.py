"""Encodes and decodes the messages of the device plugin API (v1beta1) that the proxy needs.
Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from agent.probes.protobuf import BadMessage, field, fields, message, text

_VERSION = "v1beta1"


@dataclass(frozen=True, slots=True)
class ContainerRequest:
    """The request of one container for ``size`` of the replicas in ``available``.

    Replicas in ``must_include`` are also in ``available``, and count toward ``size``.
    """

    available: tuple[str, ...]
    must_include: tuple[str, ...]
    size: int


def container_requests(request: bytes) -> list[ContainerRequest]:
    """Decode the requests of a ``PreferredAllocationRequest``. Raises ``BadMessage``."""
    return [_container_request(message(value)) for number, value in fields(request) if number == 1]


def _container_request(container: bytes) -> ContainerRequest:
    parts = list(fields(container))
    size = next((value for number, value in parts if number == 3), 0)
    if not isinstance(size, int):
        raise BadMessage("allocation_size is not a number")
    return ContainerRequest(
        tuple(text(value) for number, value in parts if number == 1),
        tuple(text(value) for number, value in parts if number == 2),
        size,
    )


def preferred(replicas: Sequence[Sequence[str]]) -> bytes:
    """Encode a ``PreferredAllocationResponse`` with the replicas for each container."""
    return b"".join(field(1, b"".join(field(1, each) for each in some)) for some in replicas)


def allocated(request: bytes) -> list[str]:
    """Return all replicas of an ``AllocateRequest``. Raises ``BadMessage``."""
    return [
        text(replica)
        for number, container in fields(request)
        if number == 1
        for part, replica in fields(message(container))
        if part == 1
    ]


def registration(endpoint: str, resource: str, options: bytes) -> bytes:
    """Encode a ``RegisterRequest`` with the plugin's own ``DevicePluginOptions``."""
    return field(1, _VERSION) + field(2, endpoint) + field(3, resource) + field(4, options)


def asks_for_preference(options: bytes) -> bool:
    """Return whether ``DevicePluginOptions`` have ``get_preferred_allocation_available``."""
    return bool(dict(fields(options)).get(2, 0))
