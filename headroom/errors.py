"""Errors of the extender.

HeadroomError
├── NotSynced            the cluster was not listed yet, so nothing can be decided
├── BadSettings          a setting that cannot be used
├── PrometheusUnreadable an answer of Prometheus that cannot be used
└── StoreError           the API server did not do what was requested
    ├── StoreConflict    a precondition (uid, resourceVersion) no longer holds: read again
    ├── StoreNotFound    the object does not exist
    ├── StoreRejected    it will never be accepted; nothing was written
    └── OutcomeUnknown   no usable answer: the write may or may not have been done
        └── StoreTimeout no answer at all: other calls would have to wait as well
"""


class HeadroomError(Exception):
    """Base of the extender's errors."""


class NotSynced(HeadroomError):
    pass


class BadSettings(HeadroomError):
    pass


class PrometheusUnreadable(HeadroomError):
    """The message gives the reason; equal causes have equal messages."""


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


#: Length limit of the quoted error of the operating system or a library.
_MAX_QUOTED = 200


def innermost(err: BaseException) -> str:
    """Return the innermost cause of an error: each library wraps the errors of the one below."""
    while (below := err.__cause__ or err.__context__) is not None:
        err = below
    text = getattr(err, "strerror", None) or str(err)
    return f"{type(err).__name__}: {text}"[:_MAX_QUOTED]
