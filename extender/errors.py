"""What went wrong on our side.

HeadroomError
├── NotSynced            we have not seen the cluster yet, so nothing can be promised
├── BadSettings          a setting that cannot be used
└── StoreError           the store of truth (the API server) did not do what was asked
    ├── StoreConflict    a precondition (uid, resourceVersion) no longer holds: read again
    ├── StoreNotFound    the object is not there
    ├── StoreRejected     it will never accept this; nothing was written
    └── OutcomeUnknown   no answer, or none to go by: it may or may not have been done
        └── StoreTimeout  no answer at all: whatever else is asked has to wait as well
"""


class HeadroomError(Exception):
    """Base of our own errors."""


class NotSynced(HeadroomError):
    pass


class BadSettings(HeadroomError):
    pass


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
