"""How a watch does: apart from the watches, as who serves without a cluster has no client."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Health:
    """What /readyz and the metrics tell of one kind."""

    kind: str
    #: Its first complete list was delivered.
    synced: bool
    #: Seconds since the server last said anything about it; None before that.
    contact_age_s: float | None
    #: Watches or lists that failed and were tried again.
    reconnects: int
    #: Complete lists delivered.
    lists: int
    #: Objects that cannot be read at present.
    unreadable: int
