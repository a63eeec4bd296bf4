"""Errors, watches and credentials of the API server, as all its clients read them.

How requests are sent differs (docs/design/adr/0111): the agent has no package ``kubernetes``, the
ledger sends them on an event loop, and ``kubectl headroom`` may repeat them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Maximum length of a message in an error.
_MOST_CHARS = 1000


class LineTooLong(ValueError):
    """A line of a watch is longer than any object may be."""


@dataclass(frozen=True, slots=True)
class Status:
    """Kubernetes' error object."""

    message: str = ""
    #: Such as AlreadyExists; empty if the API server gives none.
    reason: str = ""
    #: Message of the first cause, such as the disruption budget that allows no eviction; or empty.
    cause: str = ""


def status_of(body: bytes | str) -> Status:
    """Return the error object in an answer; one without texts if the answer has none."""
    try:
        found = json.loads(body)
        causes = (found.get("details") or {}).get("causes") or [{}]
        texts = found["message"], found.get("reason") or "", causes[0].get("message") or ""
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError, IndexError):
        return Status()
    return Status(*(str(text).strip()[:_MOST_CHARS] for text in texts))


def status_message(body: bytes) -> str:
    """Return the reason and the message of an error object, or the answer's text."""
    status = status_of(body)
    if not status.message:
        return status.reason or body.decode("utf-8", "replace").strip()[:_MOST_CHARS]
    return f"{status.reason}: {status.message}" if status.reason else status.message


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the pause in seconds that the API server requests; 0 if it requests none."""
    text = headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else 0.0


def whole_lines(chunks: Iterable[bytes], most_bytes: int) -> Iterator[list[bytes]]:
    """Yield lists of the complete lines of a watch, with a list for each chunk.

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
    """Return the headers that authenticate a client; empty if it has no token.

    ``configuration``: a ``kubernetes.client.Configuration``. Call it for each request: service
    account tokens are rotated while the process runs. It may run the exec plugin of a kubeconfig,
    which can take seconds. Raises ``OSError`` if they cannot be read.
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
