"""Reads the API server's errors, watches and credentials for all clients.

The clients send requests in different ways (docs/design/adr/0111). The agent does not use the
package ``kubernetes``, the ledger sends requests on an event loop, and ``kubectl headroom`` repeats
a request if the connection failed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Maximum length of a message in an error.
_MOST_CHARS = 1000


class LineTooLong(ValueError):
    """A line of a watch is longer than the maximum size of an object."""


@dataclass(frozen=True, slots=True)
class Status:
    """The error object of the Kubernetes API."""

    message: str = ""
    #: The reason, such as AlreadyExists. Empty if the API server gives no reason.
    reason: str = ""
    #: Message of the first cause, such as the disruption budget that allows no eviction. Empty if
    #: there is no cause.
    cause: str = ""


def status_of(body: bytes | str) -> Status:
    """Return the error object in a response. If the response has no error object, return an empty
    one."""
    try:
        found = json.loads(body)
        causes = (found.get("details") or {}).get("causes") or [{}]
        texts = found["message"], found.get("reason") or "", causes[0].get("message") or ""
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError, IndexError):
        return Status()
    return Status(*(str(text).strip()[:_MOST_CHARS] for text in texts))


def status_message(body: bytes) -> str:
    """Return the reason and the message of the error object in a response, or else the text of the
    response."""
    status = status_of(body)
    if not status.message:
        return status.reason or body.decode("utf-8", "replace").strip()[:_MOST_CHARS]
    return f"{status.reason}: {status.message}" if status.reason else status.message


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the pause in seconds that the API server requests, or 0 if it requests none."""
    text = headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else 0.0


def whole_lines(chunks: Iterable[bytes], most_bytes: int) -> Iterator[list[bytes]]:
    """Yield the complete lines of a watch, as a list for each chunk.

    Raises ``LineTooLong``, and ``EOFError`` if the watch ends inside a line.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > most_bytes:
            raise LineTooLong(f"a line is longer than {most_bytes >> 20} MiB")
        yield lines
    if rest:
        raise EOFError("ended inside a line")


def authentication(configuration: Any) -> dict[str, str]:
    """Return the headers that authenticate a client. The mapping is empty if the client has no
    token.

    ``configuration`` is a ``kubernetes.client.Configuration``. Call this function for each request,
    because service account tokens are rotated while the process runs. A call may run the exec
    plugin of a kubeconfig, which can take seconds. Raises ``OSError`` if the credentials cannot be
    read.
    """
    from kubernetes.config import ConfigException

    try:
        settings = configuration.auth_settings()
    except ConfigException as err:
        raise OSError(str(err)) from err
    return {
        setting["key"]: setting["value"]
        for setting in settings.values()
        if setting["in"] == "header" and setting["value"]
    }
