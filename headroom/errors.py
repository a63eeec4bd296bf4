"""Errors of the extender.

HeadroomError
├── NotSynced            the cluster was not listed yet, so nothing can be decided
├── BadSettings          a setting cannot be used
├── PrometheusUnreadable an answer of Prometheus cannot be used
└── StoreError           the API server did not do what was requested
    ├── StoreConflict    a precondition (uid, resourceVersion) no longer holds, so read again
    ├── StoreNotFound    the object does not exist
    ├── StoreRejected    the write will never be accepted; nothing was written
    └── OutcomeUnknown   there is no usable answer, so the write may or may not have been done
        └── StoreTimeout there is no answer at all, so other calls would have to wait too
"""


class HeadroomError(Exception):
    """Base of the extender's errors."""


class NotSynced(HeadroomError):
    pass


class BadSettings(HeadroomError):
    pass


class PrometheusUnreadable(HeadroomError):
    """An answer of Prometheus cannot be used. The message states the reason, and is the same for
    the same cause."""


class StoreError(HeadroomError):
    pass


class StoreConflict(StoreError):
    pass


class StoreNotFound(StoreError):
    pass


class StoreRejected(StoreError):
    pass


class OutcomeUnknown(StoreError):
    pass


class StoreTimeout(OutcomeUnknown):
    pass


#: Maximum length of a quoted error of the operating system or a library.
_MAX_QUOTED = 200


def innermost(err: BaseException) -> str:
    """Describe the innermost cause of an error, because each library wraps the errors of the
    library that it calls."""
    while (below := err.__cause__ or err.__context__) is not None:
        err = below
    text = getattr(err, "strerror", None) or str(err)
    return f"{type(err).__name__}: {text}"[:_MAX_QUOTED]
