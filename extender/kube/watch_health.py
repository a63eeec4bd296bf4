"""The state of a watch. It is a module of its own, because a process without a cluster has no
client."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Health:
    """The state of one kind's watch, for /readyz and the metrics."""

    kind: str
    #: Whether its first complete list was delivered.
    synced: bool
    #: Seconds since the server's last data about it; None before the first.
    contact_age_s: float | None
    #: Watches or lists that failed and were repeated.
    reconnects: int
    #: Complete lists delivered.
    lists: int
    #: Objects that are currently unreadable.
    unreadable: int
