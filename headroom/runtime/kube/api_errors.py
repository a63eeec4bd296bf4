"""Errors of calls to the Kubernetes API, and functions that create them from answers.

ApiError
├── ApiStatus    the server answered with an error status
├── NoAnswer     the request was not sent, or no answer came and it may have been processed
└── Unreadable   the answer is not in the expected format
"""

from collections.abc import Mapping

import msgspec

from headroom.client.kube_protocol import retry_after_s, status_message


class ApiError(Exception):
    """Base class of the errors of a call. The text names the call."""


class ApiStatus(ApiError):
    """The server answered with an error.

    ``status`` is the HTTP code and ``message`` the server's message. ``retry_after_s`` is the pause
    in seconds that the server requested, or 0.
    """

    def __init__(self, call: str, status: int, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{call}: {status} {message}".rstrip())
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s


class NoAnswer(ApiError):
    pass


class Unreadable(ApiError):
    pass


class StatusBody(msgspec.Struct, frozen=True):
    """The Status object that Kubernetes sends in a watch."""

    message: str = ""
    reason: str = ""
    code: int = 0


def rejection(
    call: str, status: int, body: bytes, phrase: str | None, headers: Mapping[str, str]
) -> ApiStatus:
    """Return the error for an answer with an error status.

    The message comes from the body. If the body has none, it is ``phrase``, the HTTP reason phrase.
    """
    message = status_message(body) or phrase or ""
    return ApiStatus(call, status, message, retry_after_s(headers))


def describe(err: BaseException) -> str:
    """Return an error as one line. The type is included, because some errors have no text."""
    return f"{type(err).__name__}: {err}" if str(err) else type(err).__name__
